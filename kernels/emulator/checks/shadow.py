"""Who touched a memory cell last, as epochs (agent, clock): FastTrack's representation in arrays."""

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


class Shadow:
    """Epochs of the last write and, per agent, of the last read, for a flat range of cells."""

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self._w_agent = np.zeros(cells, np.int16)
        self._w_clock = np.zeros(cells, np.int32)
        self._w_pc = np.zeros(cells, np.int32)
        self._reads: dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]] = {}

    def read(
        self, cells: Cells, view: NDArray[np.int32], agent: int, clock: int, pc: int
    ) -> Conflict | None:
        """Checks a read against the last writes, then records it."""
        conflict = self._against_writes(cells, view)
        clocks, pcs = self._reads.get(agent) or self._new_reader(agent)
        clocks[cells] = clock
        pcs[cells] = pc
        return conflict

    def write(
        self, cells: Cells, view: NDArray[np.int32], agent: int, clock: int, pc: int
    ) -> Conflict | None:
        """Checks a write against the last writes and reads, then records it."""
        conflict = self._against_writes(cells, view)
        if conflict is None:
            for reader, (clocks, pcs) in self._reads.items():
                known = int(view[reader]) if reader < view.size else 0
                late = clocks[cells] > known
                if late.any():
                    k = int(late.argmax())
                    cell = cells.start + k if isinstance(cells, slice) else int(cells[k])
                    conflict = Conflict(cell, reader, int(clocks[cell]), int(pcs[cell]), False)
                    break
        self._w_agent[cells] = agent
        self._w_clock[cells] = clock
        self._w_pc[cells] = pc
        return conflict

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
        return Conflict(cell, int(self._w_agent[cell]), int(self._w_clock[cell]), int(self._w_pc[cell]), True)

    def _new_reader(self, agent: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        pair = (np.zeros(self.cells, np.int32), np.zeros(self.cells, np.int32))
        self._reads[agent] = pair
        return pair

    def forget(self, cells: Cells) -> None:
        """The cells start a new life (Tensor Memory allocated anew)."""
        self._w_agent[cells] = 0
        self._w_clock[cells] = 0
        for clocks, _ in self._reads.values():
            clocks[cells] = 0
