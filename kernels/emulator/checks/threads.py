"""Happens-before for what threads do themselves: loads and stores, atomics, cp.async, wgmma."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from .barriers import BarrierHooks
from .clocks import ASYNC, GENERIC, TMEM_VIEW, WARP, Agent, Bundle, join
from .flags import Flags
from .lanes import ATOMICS, MANY, ByLanes, collision, lanes_of, sorted_cells
from .reports import CELL_BYTES, CP_ASYNC, ST_ASYNC, WGMMA, same_word_twice

if TYPE_CHECKING:
    from ..program import Program
    from ..state import Cta, Warp


def cells_of(addrs: NDArray[np.int64], nbytes: int, base: int) -> NDArray[np.int64]:
    """The sorted cells that accesses of ``nbytes`` at the addresses touch."""
    first, last = addrs - base >> 2, addrs - base + nbytes - 1 >> 2
    words = int((last - first).max()) + 1
    cells = first if words == 1 else (first[:, None] + np.arange(words)).reshape(-1)
    return np.unique(cells)


class ThreadHooks(BarrierHooks):
    """Accesses of shared memory by a warp's lanes."""

    def __init__(self, program: Program, profile: str) -> None:
        super().__init__(program, profile)
        self.flags = Flags(shared=True)
        self.flags.begin(self)

    def smem(
        self,
        warp: Warp,
        cta: Cta,
        addrs: NDArray[np.int64],
        nbytes: int,
        write: bool,
        data: NDArray[np.uint8] | None = None,
        chosen: NDArray[np.bool_] | None = None,
    ) -> None:
        """An ordinary access by lanes of a warp; a narrow one makes the CTA's shadow finer.
        ``data``: what a store writes, a row a lane. ``chosen``: which of the lanes that execute
        (None: as many of the lowest as there are addresses)."""
        warp_agent = agent = self._warps[warp]
        self._visit(agent, cta, warp.pc)
        if self.strict:
            agent = self._lane_agent(warp, agent, cta, chosen)
        shadow = self._ctas[id(cta)]
        fine = nbytes < CELL_BYTES
        if fine:
            shadow.smem.refine(CELL_BYTES // nbytes)
        unit = CELL_BYTES // shadow.smem.split if fine else CELL_BYTES
        cells = (addrs - shadow.base) // unit
        words = nbytes // unit
        if words > 1:
            cells = (cells[:, None] + np.arange(words)).reshape(-1)
        who = self._who(warp, words, chosen)[: cells.size]
        cells, who, shared = sorted_cells(cells, who)
        if shared and data is not None:
            self._one_value(addrs, data)
        by = self._by(warp, warp_agent, who)
        place = (warp.pc, "smem", shadow.base)
        self._access(shadow.smem, cells, agent, GENERIC, write, *place, fine=fine, by=by)

    @staticmethod
    def _who(warp: Warp, words: int, chosen: NDArray[Any] | None) -> NDArray[np.int32]:
        """The lane of each cell; ``chosen``: mask or indices within the executing lanes."""
        if chosen is None:
            return lanes_of(warp.cta.machine.lanes, words)
        who: NDArray[np.int32] = lanes_of(warp.cta.machine.lanes, 1)[chosen]
        return who.repeat(words)

    def smem_written(self, warp: Warp, cta: Cta, addr: int, nbytes: int) -> None:
        """A warp as a whole has written (tcgen05.alloc): none of its lanes has to wait."""
        agent, shadow = self._warps[warp], self._ctas[id(cta)]
        if self.strict:
            self._touched(agent, warp.alive)
        cells = slice((addr - shadow.base) >> 2, (addr - shadow.base + nbytes) >> 2)
        self._access(shadow.smem, cells, agent, GENERIC, True, warp.pc, "smem", shadow.base)

    def _by(self, warp: Warp, agent: Agent, who: NDArray[np.int32]) -> ByLanes:
        order = self._order[warp]
        order.since = True
        part, copies = self._parts.get(warp), self._cp_async.get(warp)
        agents: tuple[int, ...] = (agent.index,)
        if part is not None:
            agents += (part.index,)
        if (far := self._far_parts.get(warp)) is not None:
            agents += tuple(other.index for other in far.values())
        return ByLanes(order, agents, -1 if copies is None else copies.index, agent.clock, who)

    def _one_value(self, addrs: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        """Lanes that store to one place must store one value there."""
        if (lanes := collision(addrs, data)) is not None:
            where = f"shared address {int(addrs[lanes[0]]):#x}"
            raise EmulatorFault("smem_race", same_word_twice(where, lanes))

    def _lane_agent(
        self,
        warp: Warp,
        agent: Agent,
        cta: Cta | None = None,
        chosen: NDArray[np.bool_] | None = None,
    ) -> Agent:
        """Who is recorded for an access by the lanes that execute: the warp, or a second agent for
        a part of it, so that what one lane did is told from what they all did. ``cta``, ``chosen``:
        whose memory, and which of the lanes where they are not of one mind about it."""
        lanes = warp.cta.machine.lanes
        if lanes != warp.alive:
            if cta is None or (cta is warp.cta and chosen is None):
                part = self._parts.get(warp)
                if part is None:
                    part = self._parts[warp] = self.agents.add(WARP, warp)
            else:
                lanes = sum(1 << lane for lane in self._who(warp, 1, chosen).tolist())
                parts = self._far_parts.setdefault(warp, {})
                part = parts.get(id(cta))
                if part is None:
                    part = parts[id(cta)] = self.agents.add(WARP, warp)
            self.agents.fit(agent)
            agent.bundle[GENERIC, part.index] = part.clock
            part.bundle = agent.bundle
            agent = part
        self._touched(agent, lanes)
        return agent

    def smem_strong(
        self,
        warp: Warp,
        cta: Cta,
        addrs: NDArray[np.int64],
        nbytes: int,
        write: bool,
        order: str,
        chosen: NDArray[Any] | None = None,
        reads: bool = False,
    ) -> None:
        """An atomic operation, or a load or store that is strong. Such do not race with each other,
        but with everything else, and carry order. ``reads``: also what a write found there."""
        keys = {(id(cta), address) for address in addrs.tolist()}
        if reads or not write:
            self.flags.acquire(warp, keys, order)
        agent, shadow = self._warps[warp], self._ctas[id(cta)]
        self._visit(agent, cta, warp.pc)
        # Narrow operations count as if they were on the whole word.
        words = max(nbytes // CELL_BYTES, 1)
        cells = ((addrs - shadow.base) // CELL_BYTES)[:, None] + np.arange(words)
        cells, who, _ = sorted_cells(cells.reshape(-1), self._who(warp, words, chosen))
        by = self._by(warp, agent, np.where(who == MANY, np.int32(ATOMICS), who))
        view = self.agents.fit(agent)[GENERIC]
        epoch = (agent.index, agent.clock, warp.pc)
        conflict = shadow.smem.strong(cells, view, *epoch, by, write)
        if conflict is not None:
            raise self._fault(conflict, agent, GENERIC, write, "smem", shadow.base)
        if write:
            self.flags.publish(warp, keys, order)

    def store_async(self, warp: Warp, cta: Cta, addrs: NDArray[np.int64], nbytes: int) -> Agent:
        """st.async or red.async is issued; pass the agent to `engine_arrive` at completion."""
        engine: Agent = self.agents.engine(ST_ASYNC, self._warps[warp])
        self._visit(engine, cta, warp.pc)
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
        cells = (addrs - shadow.base >> 2)[:, None] + np.arange(nbytes >> 2)
        lanes = lanes_of(warp.cta.machine.lanes, nbytes >> 2)
        cells, who, _ = sorted_cells(cells.reshape(-1), lanes)
        by = self._by(warp, issuer, who)
        place = (warp.pc, "smem", shadow.base)
        self._access(shadow.smem, cells, agent, GENERIC, True, *place, by=by)
        return agent.clock

    def cp_async_wait(self, warp: Warp, clock: int) -> None:
        """The warp waited for its copies up to that clock."""
        done = self._cp_async[warp]
        bundle = self.agents.fit(self._warps[warp])
        before = int(bundle[GENERIC, done.index])
        if clock > before:
            bundle[GENERIC, done.index] = clock
            order = self._order[warp]
            order.waited(before + 1, clock, self._warps[warp].clock)
            order.since = True

    def wgmma(self, warp: Warp, operands: list[NDArray[np.int64]], number: int) -> int:
        """A warp's share of the warpgroup's ``number``-th wgmma is issued: its clock. The four
        warps' shares are one operation, of one agent: whoever waits for it knows it complete."""
        group = (warp.cta, warp.index // 4)
        agent = self._wgmma.get(group)
        if agent is None:
            agent = self._wgmma[group] = self.agents.add(WGMMA, warp)
        agent.clock, agent.pc = max(agent.clock, number), warp.pc
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
        self._barrier(cta, addr, self.agents.fit(self._warps[warp]), "cp.async.mbarrier.arrive")
        issued = self.agents.fit(self._warps[warp])
        bundle: Bundle = join(self.agents.fit(agent).copy(), issued)
        bundle[TMEM_VIEW] = 0
        return bundle
