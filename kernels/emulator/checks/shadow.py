"""Who touched a memory cell last, as epochs (agent, clock): FastTrack's form, in arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


class Shadow:
    """Epochs of the last write and, per agent, of the last read, for a flat range of cells."""

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self.split = 1  # parts of a cell, see `refine`
        self._w_agent = np.zeros(cells, np.int16)
        self._w_clock = np.zeros(cells, np.int32)
        self._w_pc = np.zeros(cells, np.int32)
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
        if self._atomic is not None:
            self._atomic = (np.repeat(self._atomic[0], times), np.repeat(self._atomic[1], times))
        for reader in self._reads.values():
            reader.clocks = np.repeat(reader.clocks, times)
            reader.pcs = np.repeat(reader.pcs, times)
            reader.low, reader.high = reader.low * times, reader.high * times
        self.cells, self.split = self.cells * times, split

    def _parts(self, cells: Cells) -> Cells:
        n = self.split
        if isinstance(cells, slice):
            return slice(cells.start * n, cells.stop * n)
        return (cells.reshape(-1, 1) * n + np.arange(n)).reshape(-1)

    def read(
        self, cells: Cells, view: NDArray[np.int32], agent: int, clock: int, pc: int,
        fine: bool = False,
    ) -> Conflict | None:  # fmt: skip
        """Checks a read against the last writes, then records it. ``fine``: the cells are parts."""
        cells = cells if fine or self.split == 1 else self._parts(cells)
        conflict = self._against_writes(cells, view)
        reader = self._reads.get(agent)
        if reader is None:
            reader = self._reads[agent] = _Reader(self.cells)
        low, high = _span(cells)
        reader.low, reader.high = min(reader.low, low), max(reader.high, high)
        reader.clocks[cells] = clock
        reader.pcs[cells] = pc
        return conflict

    def write(
        self, cells: Cells, view: NDArray[np.int32], agent: int, clock: int, pc: int,
        reads: NDArray[np.int32] | None = None, fine: bool = False,
    ) -> Conflict | None:  # fmt: skip
        """Checks a write against the last writes and reads, then records it. ``reads``: the view
        that governs the reads, where it is another."""
        cells = cells if fine or self.split == 1 else self._parts(cells)
        conflict = self._against_writes(cells, view)
        conflict = conflict or self._against_reads(cells, view if reads is None else reads)
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
        self, cells: NDArray[np.int64], view: NDArray[np.int32], agent: int, clock: int, pc: int
    ) -> Conflict | None:
        """An atomic operation: it must be ordered behind ordinary writes and reads, not behind
        other atomic operations (of which only the last is remembered)."""
        if self.split > 1:
            cells = np.asarray(self._parts(cells))
        plain = cells[~self.atomic_cells(cells)]
        conflict = self._against_writes(plain, view) if plain.size else None
        conflict = conflict or self._against_reads(cells, view)
        self.mark_atomic(cells, agent, clock, pc)
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

    def _against_writes(self, cells: Cells, view: NDArray[np.int32]) -> Conflict | None:
        agents = self._w_agent[cells]
        clocks = self._w_clock[cells]
        if agents.size == 0:
            return None
        first = int(agents[0])
        if (agents == first).all():  # nearly always one writer: no gather
            known = int(view[first]) if first < view.size else 0
            if int(clocks.max()) <= known:
                return None
            k = int((clocks > known).argmax())
        else:
            if int(agents.max()) >= view.size:
                view = np.concatenate([view, np.zeros(int(agents.max()) + 1 - view.size, np.int32)])
            late = clocks > view[agents]
            if not late.any():
                return None
            k = int(late.argmax())
        cell = cells.start + k if isinstance(cells, slice) else int(cells.reshape(-1)[k])
        agent, clock = int(self._w_agent[cell]), int(self._w_clock[cell])
        return Conflict(cell, agent, clock, int(self._w_pc[cell]), True, self.split)

    def forget(self, cells: Cells) -> None:
        """The cells start a new life (Tensor Memory allocated anew)."""
        cells = cells if self.split == 1 else self._parts(cells)
        self._w_agent[cells] = 0
        self._w_clock[cells] = 0
        for reader in self._reads.values():
            reader.clocks[cells] = 0


class _Reader:
    """An agent's last reads, and the range of cells that they lie in."""

    __slots__ = ("clocks", "high", "low", "pcs")

    def __init__(self, cells: int) -> None:
        self.clocks = np.zeros(cells, np.int32)
        self.pcs = np.zeros(cells, np.int32)
        self.low, self.high = cells, 0


def _span(cells: Cells) -> tuple[int, int]:
    """Half-open range; index arrays are sorted."""
    if isinstance(cells, slice):
        return cells.start, cells.stop
    return int(cells[0]), int(cells[-1]) + 1
