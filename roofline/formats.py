"""Element formats of the operands: bytes, the MMA's reduction step, and their names.

The command lines of `fa4` and `roofline` accept the same names, torch's ("bfloat16") included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from roofline.errors import RooflineError


@dataclass(frozen=True)
class Format:
    """One operand format.

    element_bytes: bytes an element takes in SMEM (1/2 for fp4; block scales live in TMEM and are
    not counted); mma_k: elements one MMA reduces over, 32 bytes of each row (PTX ISA 9.1, tcgen05
    and wgmma shapes); cvt_field: the GPU field with the rate of converting f32 pairs to it, None
    where P stays f32.
    """

    name: str
    element_bytes: Fraction
    mma_k: int
    cvt_field: str | None

    @property
    def rate_field(self) -> str:
        """The GPU field with this format's MMA rate."""
        return f"mma_{self.name}"


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "bf16": Format("bf16", Fraction(2), 16, "cvt_16bit"),
        "fp16": Format("fp16", Fraction(2), 16, "cvt_16bit"),
        "tf32": Format("tf32", Fraction(4), 8, None),
        "fp8": Format("fp8", Fraction(1), 32, "cvt_fp8"),
        "mxfp8": Format("mxfp8", Fraction(1), 32, "cvt_fp8"),
        "nvfp4": Format("nvfp4", Fraction(1, 2), 64, "cvt_fp4"),
    }
)
_ALIASES = MappingProxyType(
    {
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "e4m3": "fp8",
        "float8_e4m3fn": "fp8",
        "e5m2": "fp8",
        "float8_e5m2": "fp8",
    }
)


def find_format(name: str) -> Format:
    """The format of a name; RooflineError lists the names."""
    key = name.strip().lower()
    found = FORMATS.get(_ALIASES.get(key, key))
    if found is None:
        raise RooflineError(f"dtype {name!r} is unknown; choose one of {', '.join(FORMATS)}")
    return found
