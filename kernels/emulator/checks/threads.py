"""Happens-before for what threads start themselves: atomics, asynchronous stores, cp.async.

A part of `RaceDetector`, which it extends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from .clocks import ASYNC, GENERIC, TMEM_VIEW, Agent, Agents, Bundle, join

if TYPE_CHECKING:
    from ..state import Cta, Warp

CELL_BYTES = 4
CP_ASYNC, ST_ASYNC, WGMMA = "cp.async", "st.async", "wgmma"  # kinds of agents


def cells_of(addrs: NDArray[np.int64], nbytes: int, base: int) -> NDArray[np.int64]:
    """The sorted cells that accesses of ``nbytes`` at the addresses touch."""
    first, last = addrs - base >> 2, addrs - base + nbytes - 1 >> 2
    words = int((last - first).max()) + 1
    cells = first if words == 1 else (first[:, None] + np.arange(words)).reshape(-1)
    return np.unique(cells)


class ThreadHooks:
    """Needs `RaceDetector`'s agents, shadows and `_access`."""

    agents: Agents
    _warps: dict[Any, Agent]
    _ctas: dict[int, Any]

    if TYPE_CHECKING:

        def _access(self, *args: Any) -> None: ...

        def _fault(self, *args: Any) -> EmulatorFault: ...

        def _own(self, table: dict[Any, Agent], kind: str, warp: Warp) -> Agent: ...

        def _barrier(self, cta: Cta, addr: int, view: NDArray[np.int32], what: str) -> Any: ...

    def __init__(self) -> None:
        self._cp_async: dict[Any, Agent] = {}
        self._wgmma: dict[Any, Agent] = {}

    def smem_atomic(self, warp: Warp, cta: Cta, addrs: NDArray[np.int64], nbytes: int) -> None:
        """Atomics do not race with each other, but with everything else."""
        agent, shadow = self._warps[warp], self._ctas[id(cta)]
        cells = cells_of(addrs, nbytes, shadow.base)
        view = self.agents.fit(agent)[GENERIC]
        conflict = shadow.smem.atomic(cells, view, agent.index, agent.clock, warp.pc)
        if conflict is not None:
            raise self._fault(conflict, agent, GENERIC, True, "smem", shadow.base)

    def store_async(self, warp: Warp, cta: Cta, addrs: NDArray[np.int64], nbytes: int) -> Agent:
        """st.async or red.async is issued; pass the agent to `engine_arrive` at completion."""
        engine: Agent = self.agents.engine(ST_ASYNC, self._warps[warp])
        shadow = self._ctas[id(cta)]
        cells = cells_of(addrs, nbytes, shadow.base)
        self._access(shadow.smem, cells, engine, GENERIC, True, warp.pc, "smem", shadow.base)
        return engine

    def cp_async(self, warp: Warp, addrs: NDArray[np.int64], nbytes: int) -> int:
        """A cp.async is issued: its clock, for `cp_async_wait`."""
        agent: Agent = self._own(self._cp_async, CP_ASYNC, warp)
        issuer = self._warps[warp]
        agent.bundle = join(self.agents.fit(agent), self.agents.fit(issuer))
        agent.clock += 1
        agent.bundle[GENERIC, agent.index] = agent.clock  # copies of the generic proxy
        shadow = self._ctas[id(warp.cta)]
        cells = cells_of(addrs, nbytes, shadow.base)
        self._access(shadow.smem, cells, agent, GENERIC, True, warp.pc, "smem", shadow.base)
        return agent.clock

    def cp_async_wait(self, warp: Warp, clock: int) -> None:
        """The warp waited for its copies up to that clock."""
        done = self._cp_async[warp]
        bundle = self.agents.fit(self._warps[warp])
        bundle[GENERIC, done.index] = max(int(bundle[GENERIC, done.index]), clock)

    def wgmma(self, warp: Warp, operands: list[NDArray[np.int64]], number: int) -> int:
        """A warp's share of the warpgroup's ``number``-th wgmma is issued: its clock. The four
        warps' shares are one operation, of one agent: whoever waits for it knows it complete."""
        group = (warp.cta, warp.index // 4)
        agent = self._wgmma.get(group)
        if agent is None:
            agent = self._wgmma[group] = self.agents.add(WGMMA, warp)
        agent.clock = max(agent.clock, number)
        share = Agent(agent.index, WGMMA, warp, number, self.agents.fit(self._warps[warp]))
        shadow = self._ctas[id(warp.cta)]
        for cells in operands:
            at = cells - (shadow.base >> 2)
            self._access(shadow.smem, at, share, ASYNC, False, warp.pc, "smem", shadow.base)
        return number

    def wgmma_wait(self, warp: Warp, clock: int) -> None:
        """The warp waited for the warpgroup's operations up to that clock. Completion has a proxy
        fence of its own, and what reads operands is the async proxy already (PTX ISA 9.1 section
        9.7.15.4): a copy may overwrite them behind the wait."""
        done = self._wgmma[(warp.cta, warp.index // 4)]
        bundle = self.agents.fit(self._warps[warp])
        for row in (GENERIC, ASYNC):
            bundle[row, done.index] = max(int(bundle[row, done.index]), clock)

    def cp_async_arrive(self, warp: Warp, cta: Cta, addr: int) -> Bundle:
        """cp.async.mbarrier.arrive is issued: the bundle that its arrival will publish."""
        agent: Agent = self._own(self._cp_async, CP_ASYNC, warp)
        view = self.agents.fit(self._warps[warp])[GENERIC]
        self._barrier(cta, addr, view, "cp.async.mbarrier.arrive")
        issued = self.agents.fit(self._warps[warp])
        bundle: Bundle = join(self.agents.fit(agent).copy(), issued)
        bundle[TMEM_VIEW] = 0
        return bundle
