"""Who touched a memory cell last, as epochs (agent, clock): FastTrack's form, in arrays.

Accesses by lanes of a warp carry a tag besides (`lanes`): epochs of a warp do not tell its lanes
apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .lanes import ByLanes, who_of

Cells = slice | NDArray[np.int64]


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
        self._w_agent = np.zeros(cells, np.int16)
        self._w_clock = np.zeros(cells, np.int32)
        self._w_pc = np.zeros(cells, np.int32)
        self._w_tag = np.zeros(cells, np.int32)
        self._reads: dict[int, _Reader] = {}
        self._atomic: tuple[NDArray[np.int16], NDArray[np.int32]] | None = None

    def refine(self, split: int) -> None:
        """From now on each cell is tracked in so many equal parts: an access narrower than a cell
        has come. What is known of a cell is known of its parts."""
        times = split // self.split
        if times <= 1:
            return
        self._w_agent = np.repeat(self._w_agent, times)
        self._w_clock = np.repeat(self._w_clock, times)
        self._w_pc = np.repeat(self._w_pc, times)
        self._w_tag = np.repeat(self._w_tag, times)
        if self._atomic is not None:
            self._atomic = (np.repeat(self._atomic[0], times), np.repeat(self._atomic[1], times))
        for reader in self._reads.values():
            reader.clocks = np.repeat(reader.clocks, times)
            reader.pcs = np.repeat(reader.pcs, times)
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
        conflict = self._against_writes(cells, view, by)
        reader = self._reads.get(agent)
        if reader is None:
            reader = self._reads[agent] = _Reader(self.cells)
        low, high = _span(cells)
        reader.low, reader.high = min(reader.low, low), max(reader.high, high)
        reader.clocks[cells] = clock
        reader.pcs[cells] = pc
        if by is not None:
            if reader.tags is None:
                reader.tags = np.zeros(self.cells, np.int32)
            reader.tags[cells] = by.merged(reader.tags[cells])
        return conflict

    def _fine(
        self, cells: Cells, by: ByLanes | None, fine: bool
    ) -> tuple[Cells, ByLanes | None]:
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
        conflict = self._against_writes(cells, view, by, True)
        conflict = conflict or self._against_reads(cells, view if reads is None else reads)
        if by is not None:
            conflict = conflict or self._against_lanes_reads(cells, by)
        self._w_tag[cells] = 0 if by is None else by.tags()
        self._w_agent[cells] = agent
        self._w_clock[cells] = clock
        self._w_pc[cells] = pc
        return conflict

    def _against_reads(self, cells: Cells, view: NDArray[np.int32]) -> Conflict | None:
        low, high = _span(cells)
        for index, reader in self._reads.items():
            if reader.low >= high or reader.high <= low:
                continue
            known = int(view[index]) if index < view.size else 0
            clocks = reader.clocks[cells]
            if int(clocks.max()) > known:
                k = int((clocks > known).argmax())
                cell = cells.start + k if isinstance(cells, slice) else int(cells[k])
                late = int(reader.clocks[cell])
                return Conflict(cell, index, late, int(reader.pcs[cell]), False, self.split)
        return None

    def atomic(
        self, cells: NDArray[np.int64], view: NDArray[np.int32], agent: int, clock: int, pc: int,
        by: ByLanes,
    ) -> Conflict | None:  # fmt: skip
        """An atomic operation: it must be ordered behind ordinary writes and reads, not behind
        other atomic operations (of which only the last is remembered)."""
        if self.split > 1:
            cells, by.who = np.asarray(self._parts(cells)), by.who.repeat(self.split)
        plain = ~self.atomic_cells(cells)
        conflict = None
        if plain.any():
            conflict = self._against_writes(cells[plain], view, by.at(plain), True)
        conflict = conflict or self._against_reads(cells, view)
        conflict = conflict or self._against_lanes_reads(cells, by)
        self.mark_atomic(cells, agent, clock, pc)
        self._w_tag[cells] = by.tags()
        return conflict

    def atomic_cells(self, cells: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which cells were last written by an atomic operation (as far as clocks tell: an ordinary
        write of the same agent at the same clock passes for one)."""
        if self._atomic is None:
            return np.zeros(cells.size, np.bool_)
        agents, clocks = self._atomic
        same = (self._w_agent[cells] == agents[cells]) & (self._w_clock[cells] == clocks[cells])
        return np.asarray(same & (agents[cells] != 0), np.bool_)

    def mark_atomic(self, cells: NDArray[np.int64], agent: int, clock: int, pc: int) -> None:
        """Records an atomic operation as the cells' last write."""
        if self._atomic is None:
            self._atomic = (np.zeros(self.cells, np.int16), np.zeros(self.cells, np.int32))
        for arrays in ((self._w_agent, self._w_clock), self._atomic):
            arrays[0][cells] = agent
            arrays[1][cells] = clock
        self._w_pc[cells] = pc

    def _against_writes(
        self, cells: Cells, view: NDArray[np.int32], by: ByLanes | None = None, write: bool = False
    ) -> Conflict | None:
        agents = self._w_agent[cells]
        clocks = self._w_clock[cells]
        if agents.size == 0:
            return None
        first = int(agents[0])
        if (agents == first).all():  # nearly always one writer: no gather
            known = int(view[first]) if first < view.size else 0
            if int(clocks.max()) <= known:
                if by is not None and (first in by.agents or first == by.copies):
                    return self._against_lanes_writes(cells, agents, by, write)
                return None
            k = int((clocks > known).argmax())
        else:
            if int(agents.max()) >= view.size:
                view = np.concatenate([view, np.zeros(int(agents.max()) + 1 - view.size, np.int32)])
            late = clocks > view[agents]
            if not late.any():
                return None if by is None else self._against_lanes_writes(cells, agents, by, write)
            k = int(late.argmax())
        cell = cells.start + k if isinstance(cells, slice) else int(cells.reshape(-1)[k])
        agent, clock = int(self._w_agent[cell]), int(self._w_clock[cell])
        return Conflict(cell, agent, clock, int(self._w_pc[cell]), True, self.split)

    def _against_lanes_writes(
        self, cells: Cells, agents: NDArray[np.int16], by: ByLanes, write: bool
    ) -> Conflict | None:
        """Against what other lanes of the warp wrote, its cp.async included. ``agents``: of the
        cells' last writes."""
        tags = self._w_tag[cells]
        copied = agents == by.copies
        if copied.any():
            tags = np.where(copied, by.waited(self._w_clock[cells], tags), tags)
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
        clock, pc = int(self._w_clock[cell]), int(self._w_pc[cell])
        return Conflict(cell, int(agents[k]), clock, pc, True, self.split, lanes)

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
                clock, pc = int(reader.clocks[cell]), int(reader.pcs[cell])
                return Conflict(cell, index, clock, pc, False, self.split, lanes)
        return None

    def forget(self, cells: Cells) -> None:
        """The cells start a new life (Tensor Memory allocated anew)."""
        cells = cells if self.split == 1 else self._parts(cells)
        self._w_agent[cells] = 0
        self._w_clock[cells] = 0
        for reader in self._reads.values():
            reader.clocks[cells] = 0


class _Reader:
    """An agent's last reads, and the range of cells that they lie in."""

    __slots__ = ("clocks", "high", "low", "pcs", "tags")

    def __init__(self, cells: int) -> None:
        self.clocks = np.zeros(cells, np.int32)
        self.pcs = np.zeros(cells, np.int32)
        self.tags: NDArray[np.int32] | None = None
        self.low, self.high = cells, 0


def _span(cells: Cells) -> tuple[int, int]:
    """Half-open range; index arrays are sorted."""
    if isinstance(cells, slice):
        return cells.start, cells.stop
    return int(cells[0]), int(cells[-1]) + 1
