"""Immediates that an instruction does not take: PTX ISA 9.1 chapter 9, and what ptxas refuses.

Those that only show when it executes (counts of barriers, columns, bytes of a bulk copy) are
findings of the machine, with a code, whether they are immediates or in registers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from .ast import Imm, Operand

_Rule = tuple[re.Pattern[str], int, Callable[[int], bool], str]


def _rule(pattern: str, at: int, allowed: Callable[[int], bool], text: str) -> _Rule:
    return re.compile(pattern), at, allowed, text


def _byte(value: int) -> bool:
    return 0 <= value <= 255


def _sign(value: int) -> bool:
    return value in (-1, 1)


_POSITION = "from 0 to 255"
_RULES: tuple[_Rule, ...] = (
    _rule(r"bfe\..*", 2, _byte, _POSITION),
    _rule(r"bfe\..*", 3, _byte, _POSITION),
    _rule(r"bfi\..*", 3, _byte, _POSITION),
    _rule(r"bfi\..*", 4, _byte, _POSITION),
    _rule(r"cp\.async\.ca\..*", 2, lambda v: v in (4, 8, 16), "4, 8 or 16 bytes"),
    _rule(r"cp\.async\.cg\..*", 2, lambda v: v == 16, "16 bytes"),
    _rule(r"cp\.async\.c[ag]\..*", 3, lambda v: 0 <= v <= 16, "0 to 16 bytes"),
    _rule(r"setmaxnreg\..*", 0, lambda v: 24 <= v <= 256 and v % 8 == 0,
          "a multiple of 8 registers from 24 to 256"),
    _rule(r"mbarrier\.(try|test)_wait\.parity\..*", 2, lambda v: v in (0, 1), "parity 0 or 1"),
    _rule(r"wgmma\.wait_group\..*", 0, lambda v: v >= 0, "a number of groups"),
    _rule(r"wgmma\.mma_async\..*", 3, lambda v: v in (0, 1), "scale-d 0 or 1"),
    _rule(r"wgmma\.mma_async\..*", 4, _sign, "a scale of 1 or -1"),
    _rule(r"wgmma\.mma_async\..*", 5, _sign, "a scale of 1 or -1"),
    _rule(r"wgmma\.mma_async\..*", 6, lambda v: v in (0, 1), "transposed 0 or 1"),
    _rule(r"wgmma\.mma_async\..*", 7, lambda v: v in (0, 1), "transposed 0 or 1"),
    _rule(r"(discard|applypriority)\..*", 1, lambda v: v == 128, "128 bytes"),
)  # fmt: skip


@cache
def _rules(op: str) -> tuple[tuple[int, Callable[[int], bool], str], ...]:
    return tuple((at, allowed, text) for rx, at, allowed, text in _RULES if rx.fullmatch(op))


def bad_immediate(op: str, operands: tuple[Operand, ...]) -> str | None:
    """What is wrong with an instruction's immediates, or None."""
    for at, allowed, text in _rules(op):
        if at < len(operands):
            operand = operands[at]
            if isinstance(operand, Imm) and not operand.is_float and not allowed(operand.value):
                return f"{op} takes {text}, not {operand.value}"
    return None
