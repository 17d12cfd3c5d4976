"""What the emulator reports: findings, faults and refusals.

A *finding* is data about one thing that is wrong with the kernel under test. A *fault* is a finding
that stops the run (nothing sensible can follow it). A *refusal* (`UnsupportedPTX`) says that the
emulator does not model something; it is never silently skipped.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One defect of the emulated kernel.

    code: stable snake_case identifier, e.g. ``smem_unwritten_read``; tests match this, never the
        text.
    message: the value, the rule and the way out, for people.
    role: warp role (or ``warp N``) that was executing; ``ptx_line`` is 1-based in the PTX text;
    source: ``file.py:line`` from the PTX ``.loc``; cta: block index (x, y, z).
    details: further JSON-ready facts (addresses, byte ranges, barrier states).
    """

    code: str
    message: str
    role: str = ""
    cta: tuple[int, int, int] | None = None
    warp: int | None = None
    ptx_line: int | None = None
    source: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        where = [part for part in (self.role, self.source) if part]
        if self.ptx_line is not None:
            where.append(f"ptx:{self.ptx_line}")
        if self.cta is not None:
            where.append(f"cta {self.cta}")
        return f"{self.code}: {self.message}" + (f"  [{', '.join(where)}]" if where else "")


class EmulatorFault(Exception):
    """A memory, engine or synchronisation rule was broken; the machine adds where and by whom.

    Raised by memories and engines, which know the rule but not the warp: ``code`` and ``details``
    become a `Finding` when the machine catches it.
    """

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details


class UnsupportedPTX(NotImplementedError):
    """An opcode, modifier, operand form or descriptor bit that the emulator does not model."""


class EmulationError(RuntimeError):
    """An emulated kernel had findings; ``report`` holds them all."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report
