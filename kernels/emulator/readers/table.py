"""The table of readers: opcode pattern -> class, and who reads its operands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..findings import UnsupportedPTX
from ..isa.table import LANES, Binding
from ..program import Program, Segment
from ..records import Event, OpClass

if TYPE_CHECKING:
    from ..state import Warp

Row = tuple[int, int, int, int, int]
Reader = Callable[["Warp", int], "Row | list[Row]"]
NONE: Row = (Event.NONE, 0, 0, 0, 0)
_READERS: list[tuple[re.Pattern[str], OpClass, Callable[[Binding], Reader] | None]] = []


def reads(
    pattern: str, op: OpClass
) -> Callable[[Callable[[Binding], Reader]], Callable[[Binding], Reader]]:
    """Registers the reader of every opcode that ``pattern`` matches in full."""

    def register(make: Callable[[Binding], Reader]) -> Callable[[Binding], Reader]:
        _READERS.append((re.compile(pattern), op, make))
        return make

    return register


def plain(pattern: str, op: OpClass) -> None:
    """Opcodes of which a model needs the class only."""
    _READERS.append((re.compile(pattern), op, None))


def class_of(op: str) -> OpClass | None:
    """The class of a machine instruction's opcode; None if no reader knows it."""
    return next((found for pattern, found, _ in _READERS if pattern.fullmatch(op)), None)


def reader(program: Program, segment: Segment) -> Reader:
    """The reader of a machine segment. UnsupportedPTX if there is none."""
    ins = segment.first
    for pattern, _, make in _READERS:
        match = pattern.fullmatch(ins.op)
        if match is not None:
            if make is None:
                return lambda w, mask: NONE
            return make(Binding(program, ins, match, segment.index))
    raise UnsupportedPTX(
        f"ptx:{ins.line}: {ins.text!r}: opcode {ins.op!r} cannot be recorded for the cycle model"
    )


def by_value(mask: int, values: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(value, lanes that give it)."""
    found, counts = np.unique(values[LANES[mask]], return_counts=True)
    return list(zip(map(int, found), map(int, counts), strict=True))
