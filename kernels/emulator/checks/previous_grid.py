"""Programmatic dependent launch: what the grid before this one may still be doing.

A kernel launched with programmatic stream serialisation starts before its predecessor has ended.
Only griddepcontrol.wait promises that the predecessor is complete and its writes are visible (PTX
ISA 9.1 section 9.7.13.14): until then its results must not be read, and what it reads or writes not
be written. Having waited is one more clock of the cluster, which synchronisation hands on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from .clocks import ASYNC_GLOBAL, FENCED, GENERIC, Agent, Bundle
from .history import CELL_BYTES, Slot, Tensor

if TYPE_CHECKING:
    from ..program import Program
    from ..state import Warp


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a launch has read and written of global memory."""

    program: Program
    tensors: tuple[Tensor, ...]

    def find(self, addrs: NDArray[np.int64], write: bool) -> tuple[int, str, int] | None:
        """An access that conflicts with a read or a write of these bytes: (address, "write" or
        "read", the segment that made it), or None."""
        for tensor in self.tensors:
            unit = CELL_BYTES // tensor.parts
            cells = (addrs - tensor.base) // unit
            inside = (cells >= 0) & (cells < tensor.weak.cells)
            if not inside.any():
                continue
            chosen, where = cells[inside], addrs[inside]
            slots = [(slot, "write") for slot in (*tensor.weak.slots, *tensor.strong.slots)]
            if write:
                tensor.spell_out()
                slots += [(slot, "read") for slot in tensor.reads.slots]
            for slot, what in slots:
                if (found := _first(slot, chosen)) is not None:
                    return int(where[found]), what, int(slot.pc[chosen[found]])
        return None

    def touched(self) -> list[tuple[int, int, NDArray[np.bool_]]]:
        """What was accessed at all, by tensor: first address, bytes of a cell, a flag a cell."""
        out = []
        for tensor in self.tensors:
            tensor.spell_out()
            flags = np.zeros(tensor.weak.cells, np.bool_)
            for history in (tensor.weak, tensor.strong, tensor.reads):
                for slot in history.slots:
                    flags |= slot.how != 0
            out.append((tensor.base, CELL_BYTES // tensor.parts, flags))
        return out


def _first(slot: Slot, cells: NDArray[np.int64]) -> int | None:
    touched = slot.how[cells] != 0
    return int(touched.argmax()) if touched.any() else None


class PreviousGrid:
    """The launch before, as a cluster of this one sees it. `begin` for each cluster."""

    def __init__(self, footprint: Footprint) -> None:
        self._footprint = footprint
        self._agent: Agent | None = None

    def begin(self, race: Any) -> None:
        self._agent = race.agents.add("previous grid", None)
        self._agent.bundle[:, self._agent.index] = 0

    def waited(self, race: Any, warp: Warp) -> None:
        """The warp executed griddepcontrol.wait."""
        assert self._agent is not None
        own = race.agents.fit(race._warps[warp])
        for row in (GENERIC, ASYNC_GLOBAL, FENCED):
            own[row, self._agent.index] = 1

    def is_over(self, bundle: Bundle) -> bool:
        """Whether who has these clocks knows that it is complete."""
        assert self._agent is not None
        return bool(bundle[GENERIC, self._agent.index])

    def check(self, addrs: NDArray[np.int64], write: bool, who: str) -> None:
        """Raises grid_dependency_not_waited for an access of these words by who does not know."""
        found = self._footprint.find(addrs, write)
        if found is None:
            return
        address, what, pc = found
        program = self._footprint.program
        ins = program.segments[pc].first
        source = program.module.source_of(ins)
        at = f" at {source}" if source else ""
        raise EmulatorFault(
            "grid_dependency_not_waited",
            f"{'write' if write else 'read'} by {who} of global address {address:#x} without"
            f" griddepcontrol.wait: the launch before, {program.entry.name}, may not be done with"
            f" its {what}{at} (ptx:{ins.line})",
            address=address,
            other={
                "access": what,
                "agent": program.entry.name,
                "source": source,
                "ptx_line": ins.line,
                "instruction": ins.text,
            },
        )
