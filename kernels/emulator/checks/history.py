"""Accesses of a tensor in global memory, cell by cell.

A cell is a word of 4 bytes, or a part of one where narrower accesses have come. Of each cell three
things are remembered: the last weak write (all before it were ordered before it, or found out), the
strong writes (atomics) and the reads. Of those a new one replaces what is ordered before it; of
those that nothing orders, `SLOTS` are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

CELL_BYTES = 4
SLOTS = 2
WEAK, STRONG, COPY = 1, 2, 3  # how a cell was accessed; 0: not yet
Cells = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mark:
    """An access. ``tags``: of lanes (`lanes`), one a cell; 0 for engines."""

    how: int
    cluster: int
    agent: int
    clock: int
    pc: int
    tags: NDArray[np.int32] | int = 0


class Slot:
    """One access of every cell, as arrays; ``how`` is 0 where there was none."""

    __slots__ = ("agent", "clock", "cluster", "how", "pc", "tag")

    def __init__(self, cells: int) -> None:
        self.how = np.zeros(cells, np.uint8)
        self.cluster = np.zeros(cells, np.int32)
        self.agent = np.zeros(cells, np.int32)
        self.clock = np.zeros(cells, np.int32)
        self.pc = np.zeros(cells, np.int32)
        self.tag = np.zeros(cells, np.int32)

    def mark(self, cells: Cells, mark: Mark) -> None:
        self.how[cells] = mark.how
        self.cluster[cells] = mark.cluster
        self.agent[cells] = mark.agent
        self.clock[cells] = mark.clock
        self.pc[cells] = mark.pc
        self.tag[cells] = mark.tags

    def move(self, cells: Cells, source: Slot) -> None:
        for name in self.__slots__:
            getattr(self, name)[cells] = getattr(source, name)[cells]

    def split(self, times: int) -> None:
        for name in self.__slots__:
            setattr(self, name, np.repeat(getattr(self, name), times))


Ordered = Callable[[Slot, Cells], NDArray[np.bool_]]


class History:
    """Accesses of one kind."""

    def __init__(self, cells: int, slots: int = SLOTS) -> None:
        self.cells = cells
        self.limit = slots
        self.slots: list[Slot] = []

    def add(self, cells: Cells, mark: Mark, covered: Ordered) -> None:
        """Records an access. ``covered(slot, cells)``: which of a slot's accesses it makes
        redundant: who is ordered behind this one is behind those."""
        if not self.slots:
            self.slots.append(Slot(self.cells))
        first = self.slots[0]
        if self.limit > 1 and first.how[cells].any():
            keep = (first.how[cells] != 0) & ~covered(first, cells)
            if keep.any():
                if len(self.slots) == 1:
                    self.slots.append(Slot(self.cells))
                self.slots[1].move(cells[keep], first)
        first.mark(cells, mark)

    def forget(self, cells: Cells) -> None:
        for slot in self.slots:
            slot.how[cells] = 0

    def split(self, times: int) -> None:
        self.cells *= times
        for slot in self.slots:
            slot.split(times)


Box = Callable[[], Cells]


def _same_cluster(mark: Mark) -> Ordered:
    return lambda slot, cells: np.asarray(slot.cluster[cells] == mark.cluster)


@dataclass(slots=True)
class Tensor:
    """What is known of an allocation; ``boxes``: copies out of it that nobody had to look at yet,
    by what names the box, the last one by each of the last `SLOTS` clusters."""

    base: int  # a multiple of CELL_BYTES
    cells: int
    parts: int = 1  # of a word that are tracked
    weak: History = field(init=False)
    strong: History = field(init=False)
    reads: History = field(init=False)
    boxes: dict[Any, tuple[Box, dict[int, Mark]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weak = History(self.cells, 1)
        self.strong, self.reads = History(self.cells), History(self.cells)

    @property
    def written(self) -> bool:
        return bool(self.weak.slots or self.strong.slots)

    def cells_of(self, addrs: Cells, nbytes: int) -> tuple[Cells, int]:
        """The cells of accesses of ``nbytes`` each, and how many each touches."""
        if nbytes < CELL_BYTES // self.parts:
            times = CELL_BYTES // nbytes // self.parts
            for history in (self.weak, self.strong, self.reads):
                history.split(times)
            self.parts *= times
        unit = CELL_BYTES // self.parts
        each = max(nbytes // unit, 1)
        cells = (addrs - self.base) // unit
        if each > 1:
            cells = (cells[:, None] + np.arange(each)).reshape(-1)
        return cells, each

    def words(self, addrs: Cells) -> Cells:
        """The cells of whole words."""
        return self.cells_of(addrs, CELL_BYTES)[0]

    def copied(self, key: Any, box: Box, mark: Mark) -> None:
        """Notes a copy by its box."""
        marks = self.boxes.setdefault(key, (box, {}))[1]
        marks.pop(mark.cluster, None)
        marks[mark.cluster] = mark
        if len(marks) > SLOTS:
            del marks[next(iter(marks))]

    def spell_out(self) -> None:
        """Turns boxes into reads of cells: somebody writes to the tensor."""
        boxes, self.boxes = self.boxes, {}
        for box, marks in boxes.values():
            cells = self.words(box())
            for mark in marks.values():
                self.reads.add(cells, mark, _same_cluster(mark))
