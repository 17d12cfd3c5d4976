"""Happens-before for copies that engines make: TMA, and what else completes on an mbarrier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .barriers import BarrierHooks
from .clocks import ASYNC, GENERIC, TMA_LOAD, TMA_STORE, Agent, Bundle, join

if TYPE_CHECKING:
    from ..state import Cta, Warp


class CopyHooks(BarrierHooks):
    """Each copy is an agent of its own."""

    def tma_load(self, warp: Warp, cta: Cta, addr: int, nbytes: int) -> Agent:
        """A copy into shared memory is issued; pass the agent to `engine_arrive` at completion."""
        engine = self._engine(TMA_LOAD, warp)
        shadow = self._ctas[id(cta)]
        cells = slice((addr - shadow.base) >> 2, (addr - shadow.base + nbytes + 3) >> 2)
        self._access(shadow.smem, cells, engine, ASYNC, True, warp.pc, "smem", shadow.base)
        self._visit(engine, cta, warp.pc)
        return engine

    def tma_store(self, warp: Warp, cta: Cta, addr: int, nbytes: int) -> Agent:
        """A copy out of shared memory is issued; pass the agent to `engine_wait`."""
        engine = self._engine(TMA_STORE, warp)
        shadow = self._ctas[id(cta)]
        cells = slice((addr - shadow.base) >> 2, (addr - shadow.base + nbytes + 3) >> 2)
        self._access(shadow.smem, cells, engine, ASYNC, False, warp.pc, "smem", shadow.base)
        return engine

    def tma_read(self, warp: Warp, engine: Agent, cta: Cta, addr: int, nbytes: int) -> None:
        """The copy of `tma_load` reads shared memory too."""
        shadow = self._ctas[id(cta)]
        cells = slice((addr - shadow.base) >> 2, (addr - shadow.base + nbytes + 3) >> 2)
        self._access(shadow.smem, cells, engine, ASYNC, False, warp.pc, "smem", shadow.base)

    def barrier_used(self, warp: Warp, cta: Cta, addr: int, what: str) -> None:
        """An operation that will complete on an mbarrier is issued: its init must come before."""
        self._visit(self._warps[warp], cta, warp.pc)
        self._barrier(cta, addr, self.agents.fit(self._warps[warp]), what)

    def engine_arrive(self, engine: Agent, cta: Cta, addr: int) -> None:
        """An engine completes on an mbarrier: all that it did and followed is published."""
        barrier = self._ctas[id(cta)].mbarriers.get(addr)
        if barrier is not None:
            self._check_init_fence(barrier, self.agents.fit(engine), engine.kind, addr)
            barrier.open = join(barrier.open, self._published(engine))

    def engine_wait(self, warp: Warp, engine: Agent, clock: int) -> None:
        """The warp waited for an operation of the engine."""
        agent = self._warps[warp]
        agent.bundle = self.agents.fit(agent)
        for row in (GENERIC, ASYNC):
            agent.bundle[row, engine.index] = max(int(agent.bundle[row, engine.index]), clock)

    def bundle_arrive(self, bundle: Bundle, cta: Cta, addr: int) -> None:
        barrier = self._ctas[id(cta)].mbarriers.get(addr)
        if barrier is not None:
            barrier.open = join(barrier.open, bundle)
