"""GPU names and sm_* strings, compared by number and never by their text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernels.common.plan import GPU_ARCHS

# "sm_100a", "sm_103f", "sm90", "SM_120": the suffix says which code a compiler may emit, not which
# GPU it is (CUDA C++ Programming Guide, "Feature availability").
_SM = re.compile(r"sm_?(\d{2,3})([af]?)", re.IGNORECASE)


@dataclass(frozen=True, order=True)
class Arch:
    """A compute capability: ``number`` is 10 * major + minor, so 90 for sm_90a, 103 for sm_103f."""

    number: int

    @property
    def major(self) -> int:
        return self.number // 10

    def __str__(self) -> str:
        return f"sm_{self.number}"

    @classmethod
    def parse(cls, text: str) -> Arch:
        """The architecture of a GPU name (``b200``) or an ``sm_*`` string.

        Raises ValueError, listing the names, for anything else.
        """
        if not isinstance(text, str):
            raise TypeError(f"gpu is a {type(text).__name__}; give a name as text, such as 'b200'")
        arch = GPU_ARCHS.get(text.strip().lower(), text.strip())
        match = _SM.fullmatch(arch)
        if match is None:
            names = ", ".join(sorted(GPU_ARCHS))
            raise ValueError(f"unknown GPU {text!r}: give one of {names}, or sm_NN such as sm_100a")
        return cls(int(match[1]))


def gpu_name(text: str) -> str:
    """The GPU name that a plan and the emulator know for a name or an ``sm_*`` string.

    An ``sm_*`` string stands for the first GPU of that architecture ("sm_100f" for "b200"); text
    without a GPU of ours comes back as its own architecture, for the support rules to refuse.
    """
    key = text.strip().lower()
    if key in GPU_ARCHS:
        return key
    arch = Arch.parse(text)
    return next((name for name, sm in GPU_ARCHS.items() if Arch.parse(sm) == arch), str(arch))
