"""Who touched a memory cell last, as epochs (agent, clock): FastTrack's form, in arrays.

An epoch and the segment that it was in are packed into one integer, agent first: of cells that one
agent touched the largest is the latest.

Accesses by lanes of a warp carry a tag besides (`lanes`): epochs of a warp do not tell its lanes
apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..native.scan import scan_and_fill
from .lanes import ByLanes, who_of

Cells = slice | NDArray[np.int64]
Packed = NDArray[np.int64]
_PC_BITS, _CLOCK_BITS = 20, 28
_PC, _CLOCK = (1 << _PC_BITS) - 1, (1 << _CLOCK_BITS) - 1
_AGENT_AT = _PC_BITS + _CLOCK_BITS


def pack(agent: int, clock: int, pc: int) -> int:
    """Raises OverflowError where the run is longer than the fields are wide."""
    if clock > _CLOCK or pc > _PC:
        raise OverflowError(f"clock {clock} or segment {pc} is too large for the race detector")
    return agent << _AGENT_AT | clock << _PC_BITS | pc


def unpack(epoch: int) -> tuple[int, int, int]:
    """(agent, clock, segment)"""
    return epoch >> _AGENT_AT, epoch >> _PC_BITS & _CLOCK, epoch & _PC


@dataclass(frozen=True, slots=True)
class Conflict:
    """An earlier access that is not ordered before this one."""

    cell: int
    agent: int
    clock: int
    pc: int
    wrote: bool
    split: int = 1  # ``cell`` counts such parts of a cell
    lanes: tuple[int, int] | None = None  # of the same warp: the earlier one, and this one's


class Shadow:
    """Epochs of the last write and, per agent, of the last read, for a flat range of cells."""

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self.split = 1  # parts of a cell, see `refine`
        self._writes: Packed = np.zeros(cells, np.int64)
        self._writes_address = self._writes.ctypes.data
        self._tags: NDArray[np.int32] | None = None  # of those writes that lanes made
        self._reads: dict[int, _Reader] = {}
        self._atomic: Packed | None = None
        self._scratch = np.empty(0, np.int64)  # what a mere scan fills
        self._ends = np.empty(2, np.int64)
        self._scratch_address, self._ends_address = 0, self._ends.ctypes.data

    def refine(self, split: int) -> None:
        """From now on each cell is tracked in so many equal parts: an access narrower than a cell
        has come. What is known of a cell is known of its parts."""
        times = split // self.split
        if times <= 1:
            return
        self._writes = np.repeat(self._writes, times)
        self._writes_address = self._writes.ctypes.data
        if self._tags is not None:
            self._tags = np.repeat(self._tags, times)
        if self._atomic is not None:
            self._atomic = np.repeat(self._atomic, times)
        for reader in self._reads.values():
            reader.keep(np.repeat(reader.epochs, times))
            if reader.tags is not None:
                reader.tags = np.repeat(reader.tags, times)
            reader.low, reader.high = reader.low * times, reader.high * times
        self.cells, self.split = self.cells * times, split

    def _parts(self, cells: Cells) -> Cells:
        n = self.split
        if isinstance(cells, slice):
            return slice(cells.start * n, cells.stop * n)
        return (cells.reshape(-1, 1) * n + np.arange(n)).reshape(-1)

    def read(
        self, cells: Cells, view: NDArray[np.int32], agent: int, clock: int, pc: int,
        fine: bool = False, by: ByLanes | None = None,
    ) -> Conflict | None:  # fmt: skip
        """Checks a read against the last writes, then records it. ``fine``: the cells are parts.
        ``by``: the lanes of a warp that make the access, whose order counts too."""
        cells, by = self._fine(cells, by, fine)
        reader = self._reads.get(agent)
        if reader is None:
            reader = self._reads[agent] = _Reader(self.cells)
        low, high = _span(cells)
        reader.low, reader.high = min(reader.low, low), max(reader.high, high)
        reader.latest = max(reader.latest, clock)
        epoch = pack(0, clock, pc)
        if by is None and not isinstance(cells, slice) and low >= 0 and high <= self.cells:
            # An MMA's operand: a thousand cells, nearly always of one writer that is long known.
            oldest, newest = self._note_read(reader, cells, epoch)
            if self._is_known(oldest, newest, view):
                return None
            return self._against_writes(cells, view)
        conflict = self._against_writes(cells, view, by)
        reader.epochs[cells] = epoch
        if by is not None:
            if reader.tags is None:
                reader.tags = np.zeros(self.cells, np.int32)
            reader.tags[cells] = by.merged(reader.tags[cells])
        return conflict

    def _note_read(self, reader: _Reader, cells: NDArray[np.int64], epoch: int) -> tuple[int, int]:
        """Records a read; the oldest and the newest epoch of the last writes there."""
        cells, ends = np.ascontiguousarray(cells, np.int64), np.empty(2, np.int64)
        addresses = (self._writes_address, reader.address, cells.ctypes.data, ends.ctypes.data)
        scan_and_fill()(*addresses, cells.size, epoch)
        oldest, newest = ends.tolist()
        return oldest, newest

    @staticmethod
    def _is_known(oldest: int, newest: int, view: NDArray[np.int32]) -> bool:
        """Whether all epochs from one to the other are of one agent, and in the view."""
        agent = newest >> _AGENT_AT
        known = int(view[agent]) if agent < view.size else 0
        return oldest >> _AGENT_AT == agent and newest >> _PC_BITS & _CLOCK <= known

    def _fine(self, cells: Cells, by: ByLanes | None, fine: bool) -> tuple[Cells, ByLanes | None]:
        """The access in parts of cells, where those are tracked."""
        if fine or self.split == 1:
            return cells, by
        if by is not None:
            by.who = by.who.repeat(self.split)
        return self._parts(cells), by

    def write(
        self, cells: Cells, view: NDArray[np.int32], agent: int, clock: int, pc: int,
        reads: NDArray[np.int32] | None = None, fine: bool = False, by: ByLanes | None = None,
    ) -> Conflict | None:  # fmt: skip
        """Checks a write against the last writes and reads, then records it. ``reads``: the view
        that governs the reads, where it is another."""
        cells, by = self._fine(cells, by, fine)
        reads = view if reads is None else reads
        if by is None and not isinstance(cells, slice) and self._holds(cells):
            # An MMA's accumulator: as in `read`.
            conflict = self._of_many(cells, view, reads)
        else:
            conflict = self._against_writes(cells, view, by, True)
            conflict = conflict or self._against_reads(cells, reads)
        if by is not None:
            conflict = conflict or self._against_lanes_reads(cells, by)
        self._tag(cells, by)
        self._writes[cells] = pack(agent, clock, pc)
        return conflict

    def _of_many(
        self, cells: NDArray[np.int64], view: NDArray[np.int32], reads: NDArray[np.int32]
    ) -> Conflict | None:
        """What a write of these cells conflicts with; the common case, nothing, in native code."""
        cells = np.ascontiguousarray(cells, np.int64)
        where, low, high = cells.ctypes.data, *_span(cells)
        if not self._is_known(*self._scan(self._writes_address, where, cells.size), view):
            conflict = self._against_writes(cells, view, None, True)
            if conflict is not None:
                return conflict
        for index, reader in self._reads.items():
            known = int(reads[index]) if index < reads.size else 0
            if reader.low >= high or reader.high <= low or reader.latest <= known:
                continue
            if self._scan(reader.address, where, cells.size)[1] >= known + 1 << _PC_BITS:
                return self._against_reads(cells, reads)
        return None

    def _holds(self, cells: NDArray[np.int64]) -> bool:
        """Whether the sorted cells are some, and all in range, as native code must trust."""
        return cells.size > 0 and cells[0] >= 0 and cells[-1] < self.cells

    def _scan(self, values: int, cells: int, count: int) -> tuple[int, int]:
        """The least and the greatest of an array's values at these cells."""
        if self._scratch.size < self.cells:
            self._scratch = np.empty(self.cells, np.int64)
            self._scratch_address = self._scratch.ctypes.data
        scan_and_fill()(values, self._scratch_address, cells, self._ends_address, count, 0)
        oldest, newest = self._ends.tolist()
        return oldest, newest

    def _tag(self, cells: Cells, by: ByLanes | None) -> None:
        if self._tags is None:
            if by is None:
                return
            self._tags = np.zeros(self.cells, np.int32)
        self._tags[cells] = 0 if by is None else by.tags()

    def _against_reads(self, cells: Cells, view: NDArray[np.int32]) -> Conflict | None:
        low, high = _span(cells)
        for index, reader in self._reads.items():
            if reader.low >= high or reader.high <= low:
                continue
            known = int(view[index]) if index < view.size else 0
            if reader.latest <= known:
                continue
            epochs = _at(reader.epochs, cells)
            if int(np.maximum.reduce(epochs)) >= known + 1 << _PC_BITS:
                k = int((epochs >= known + 1 << _PC_BITS).argmax())
                cell = cells.start + k if isinstance(cells, slice) else int(cells[k])
                _, late, pc = unpack(int(epochs[k]))
                return Conflict(cell, index, late, pc, False, self.split)
        return None

    def strong(
        self, cells: NDArray[np.int64], view: NDArray[np.int32], agent: int, clock: int, pc: int,
        by: ByLanes, write: bool,
    ) -> Conflict | None:  # fmt: skip
        """An atomic operation, or another strong access: it must be ordered behind ordinary writes
        (and reads, if it writes), not behind other strong ones, of which only the last write is
        remembered."""
        if self.split > 1:
            cells, by.who = np.asarray(self._parts(cells)), by.who.repeat(self.split)
        plain = ~self.atomic_cells(cells)
        conflict = None
        if plain.any():
            conflict = self._against_writes(cells[plain], view, by.at(plain), write)
        if not write:
            return conflict
        conflict = conflict or self._against_reads(cells, view)
        conflict = conflict or self._against_lanes_reads(cells, by)
        if self._atomic is None:
            self._atomic = np.zeros(self.cells, np.int64)
        self._writes[cells] = self._atomic[cells] = pack(agent, clock, pc)
        self._tag(cells, by)
        return conflict

    def atomic_cells(self, cells: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which cells were last written by an atomic operation."""
        if self._atomic is None:
            return np.zeros(cells.size, np.bool_)
        return np.asarray((self._writes[cells] == self._atomic[cells]) & (self._atomic[cells] != 0))

    def _against_writes(
        self, cells: Cells, view: NDArray[np.int32], by: ByLanes | None = None, write: bool = False
    ) -> Conflict | None:
        epochs = _at(self._writes, cells)
        if epochs.size == 0:
            return None
        last = int(np.maximum.reduce(epochs))
        first = last >> _AGENT_AT
        if int(np.minimum.reduce(epochs)) >> _AGENT_AT == first:  # nearly always one writer
            known = int(view[first]) if first < view.size else 0
            if last >> _PC_BITS & _CLOCK <= known:
                if by is not None and (first in by.agents or first == by.copies):
                    return self._against_lanes_writes(cells, epochs, by, write)
                return None
            late = epochs >= pack(first, known + 1, 0)
        else:
            agents, clocks = epochs >> _AGENT_AT, epochs >> _PC_BITS & _CLOCK
            if first >= view.size:
                view = np.concatenate([view, np.zeros(first + 1 - view.size, np.int32)])
            late = clocks > view[agents]
            if not late.any():
                return None if by is None else self._against_lanes_writes(cells, epochs, by, write)
        k = int(late.argmax())
        cell = cells.start + k if isinstance(cells, slice) else int(cells[k])
        return Conflict(cell, *unpack(int(epochs[k])), True, self.split)

    def _against_lanes_writes(
        self, cells: Cells, epochs: Packed, by: ByLanes, write: bool
    ) -> Conflict | None:
        """Against what other lanes of the warp wrote, its cp.async included. ``epochs``: of the
        cells' last writes."""
        if self._tags is None:
            return None
        tags, agents = self._tags[cells], epochs >> _AGENT_AT
        copied = agents == by.copies
        if copied.any():
            tags = np.where(copied, by.waited(epochs >> _PC_BITS & _CLOCK, tags), tags)
        late = by.late(tags, not write)
        if late is None:
            return None
        own = copied
        for index in by.agents:
            own |= agents == index
        late &= own
        if not late.any():
            return None
        k = int(late.argmax())
        cell = cells.start + k if isinstance(cells, slice) else int(cells[k])
        lanes = who_of(int(tags[k])), int(by.who[k])
        return Conflict(cell, *unpack(int(epochs[k])), True, self.split, lanes)

    def _against_lanes_reads(self, cells: Cells, by: ByLanes) -> Conflict | None:
        for index in by.agents:
            reader = self._reads.get(index)
            if reader is None or reader.tags is None:
                continue
            tags = reader.tags[cells]
            late = by.late(tags, False)
            if late is not None:
                k = int(late.argmax())
                cell = cells.start + k if isinstance(cells, slice) else int(cells[k])
                lanes = who_of(int(tags[k])), int(by.who[k])
                _, clock, pc = unpack(int(reader.epochs[cell]))
                return Conflict(cell, index, clock, pc, False, self.split, lanes)
        return None

    def forget(self, cells: Cells) -> None:
        """The cells start a new life (Tensor Memory allocated anew)."""
        cells = cells if self.split == 1 else self._parts(cells)
        self._writes[cells] = 0
        for reader in self._reads.values():
            reader.epochs[cells] = 0


class _Reader:
    """An agent's last reads, and the range of cells that they lie in."""

    __slots__ = ("address", "epochs", "high", "latest", "low", "tags")

    epochs: Packed
    address: int  # of ``epochs``, for native code

    def __init__(self, cells: int) -> None:
        self.keep(np.zeros(cells, np.int64))
        self.tags: NDArray[np.int32] | None = None
        self.low, self.high = cells, 0
        self.latest = 0  # clock

    def keep(self, epochs: Packed) -> None:
        self.epochs, self.address = epochs, epochs.ctypes.data


def _at(values: Packed, cells: Cells) -> Packed:
    return values[cells] if isinstance(cells, slice) else values.take(cells)


def _span(cells: Cells) -> tuple[int, int]:
    """Half-open range; index arrays are sorted."""
    if isinstance(cells, slice):
        return cells.start, cells.stop
    return int(cells[0]), int(cells[-1]) + 1
