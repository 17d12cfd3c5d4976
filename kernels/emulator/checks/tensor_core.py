"""Happens-before for Tensor Memory and the fifth-generation tensor core (PTX ISA 9.1 section
9.7.16.6)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from ..memory.tensor import COLUMNS
from .barriers import BarrierHooks
from .base import QUADS, CtaShadow
from .clocks import (
    ASYNC,
    GENERIC,
    TENSOR_CORE,
    TMEM_LD,
    TMEM_OUT,
    TMEM_ST,
    TMEM_VIEW,
    Agent,
    Bundle,
    join,
)

if TYPE_CHECKING:
    from ..state import Cta, Warp


@lru_cache(maxsize=4096)
def tmem_cells(column: int, columns: int, quads: tuple[int, ...]) -> NDArray[np.int64]:
    """The cells of these columns in the lanes of some quads, in order."""
    first = np.array(sorted(quads), np.int64)[:, None] * COLUMNS + column
    return (first + np.arange(columns)).reshape(-1)


class TensorCoreHooks(BarrierHooks):
    """Loads, stores and MMAs of a warp are an agent each."""

    def tcgen05_ld(self, warp: Warp, cta: Cta, column: int, columns: int, split: int | None) -> int:
        """Returns the load's clock, for `ld_complete`. split: where the second half begins."""
        return self._tmem(self._ld, TMEM_LD, warp, cta, column, columns, split, write=False)

    def tcgen05_st(
        self, warp: Warp, cta: Cta, column: int, columns: int, split: int | None
    ) -> None:
        self._tmem(self._st, TMEM_ST, warp, cta, column, columns, split, write=True)

    def _tmem(
        self, table: dict[Any, Agent], kind: str, warp: Warp, cta: Cta, column: int, columns: int,
        split: int | None, write: bool,
    ) -> int:  # fmt: skip
        agent = self._own(table, kind, warp)
        issuer = self._warps[warp]
        agent.bundle = join(self.agents.fit(agent), self.agents.fit(issuer))
        agent.clock += 1
        agent.bundle[:, agent.index] = agent.clock
        if self.strict:
            self._touched(agent, warp.alive)
        # Two loads or stores of a warp are not ordered by the order of issue (section 9.7.16.6.1).
        view = self.agents.fit(issuer)[self.tmem_row] if self.strict else None
        shadow = self._ctas[id(cta)].tmem
        for start in (column,) if split is None else (column, column + split):
            first = (warp.index & 3) * COLUMNS + start
            cells = slice(first, first + columns)
            self._access(shadow, cells, agent, self.tmem_row, write, warp.pc, "tmem", 0, view)
        return agent.clock

    def wait_ld(self, warp: Warp) -> None:
        self._wait_own(self._ld, warp)

    def ld_complete(self, warp: Warp, clock: int) -> None:
        """A use of its registers waited for a load (and for those before it)."""
        self._wait_own(self._ld, warp, clock)

    def wait_st(self, warp: Warp) -> None:
        self._wait_own(self._st, warp)

    def _wait_own(self, table: dict[Any, Agent], warp: Warp, clock: int | None = None) -> None:
        done = table.get(warp)
        if done is not None:
            bundle = self.agents.fit(self._warps[warp])
            for row in (GENERIC, TMEM_VIEW):
                bundle[row, done.index] = done.clock if clock is None else clock

    def mma(
        self, warp: Warp, ctas: Sequence[Cta], smem_cells: list[tuple[str, NDArray[np.int64]]],
        tmem_reads: list[tuple[int, int]], d: tuple[int, int], quads: tuple[int, ...],
    ) -> None:  # fmt: skip
        """One tcgen05.mma is issued. The MMAs of a warp execute in the order of issue.

        ctas: those it works on, at the same addresses in each. smem_cells: operand name and its
        4-byte cells (address / 4 in the shared window). tmem_reads, d: (column, columns) of A in
        Tensor Memory, and of D. quads: of D's lanes.
        """
        core = self._own(self._core, TENSOR_CORE, warp)
        core.bundle = join(self.agents.fit(core), self._issuer(warp))
        core.clock += 1
        core.bundle[:, core.index] = core.clock
        for cta in ctas:
            self._visit(core, cta, warp.pc)
            self._mma_cells(core, warp.pc, self._ctas[id(cta)], smem_cells, tmem_reads, d, quads)

    def _mma_cells(
        self, core: Agent, pc: int, shadow: CtaShadow,
        smem_cells: list[tuple[str, NDArray[np.int64]]], tmem_reads: list[tuple[int, int]],
        d: tuple[int, int], quads: tuple[int, ...],
    ) -> None:  # fmt: skip
        for _, cells in smem_cells:
            at = cells - (shadow.base >> 2)
            self._access(shadow.smem, at, core, ASYNC, False, pc, "smem", shadow.base)
        for column, columns in tmem_reads:
            at = tmem_cells(column, columns, quads)
            self._access(shadow.tmem, at, core, self.tmem_row, False, pc, "tmem", 0)
        at = tmem_cells(*d, quads)
        self._access(shadow.tmem, at, core, self.tmem_row, True, pc, "tmem", 0)

    def commit(self, warp: Warp, cta: Cta, addr: int) -> Bundle:
        """tcgen05.commit is issued: the bundle that its arrival will publish (`bundle_arrive`)."""
        core = self._own(self._core, TENSOR_CORE, warp)
        bundle = self.agents.fit(self._warps[warp])
        if (barrier := self._barrier(cta, addr, bundle, "tcgen05.commit")) is not None:
            self._check_init_fence(barrier, bundle, "tcgen05.commit", addr)
            core.bundle = join(self.agents.fit(core), self._issuer(warp))
            self._visit(core, cta, warp.pc)
        return self._published(core)

    def tmem_allocated(self, cta: Cta, column: int, columns: int) -> None:
        for quad in range(QUADS):
            first = quad * COLUMNS + column
            self._ctas[id(cta)].tmem.forget(slice(first, first + columns))

    def tmem_freed(self, warp: Warp, cta: Cta, column: int, columns: int) -> None:
        """Freeing counts as a write: nobody may still be using the columns. It is synchronous, so
        it needs no fence in front of it; what others did must have been published behind one."""
        agent = self._warps[warp]
        bundle, row, view = self.agents.fit(agent), GENERIC, None
        if self.strict:
            row, view = TMEM_VIEW, np.maximum(bundle[TMEM_VIEW], bundle[TMEM_OUT])
        shadow = self._ctas[id(cta)].tmem
        cells = tmem_cells(column, columns, tuple(range(QUADS)))
        try:
            self._access(shadow, cells, agent, row, True, warp.pc, "tmem", 0, view)
        except EmulatorFault as fault:
            text = fault.message.replace("write by", "tcgen05.dealloc by", 1)
            raise EmulatorFault(fault.code, text, **fault.details) from None
        agent.bundle[TMEM_VIEW, agent.index] = agent.clock  # for the warp itself, no fence needed
