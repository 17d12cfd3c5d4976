"""The clocks of a cluster's warps and engines, and what one access or synchronisation does to them.

`RaceDetector` is made of this and of the hooks of each kind of instruction: `barriers`, `threads`,
`copies`, `tensor_core`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from ..memory.tensor import COLUMNS
from .clocks import (
    ASYNC,
    GENERIC,
    LOOSE,
    TMEM_OUT,
    TMEM_VIEW,
    UNRELEASED,
    WARP,
    Agent,
    Agents,
    Bundle,
    join,
)
from .lanes import FULL, ByLanes, LaneOrder
from .reports import CELL_BYTES, Reports
from .shadow import Cells, Shadow

if TYPE_CHECKING:
    from ..program import Program
    from ..state import Cta, Warp

QUADS = 4  # of 32 Tensor Memory lanes


@dataclass(slots=True)
class MbarrierClocks:
    """Clocks of an mbarrier: arrivals of the open phase, and of all completed ones; ``far``: what
    other CTAs' threads published to them at cluster scope. Its init, and the fence behind that
    which shows it to the async proxy."""

    open: Bundle
    done: Bundle
    init_agent: int
    init_clock: int
    fence_clock: int | None = None
    far_open: Bundle | None = None
    far_done: Bundle | None = None
    seen: dict[Any, int] = field(default_factory=dict)  # warp -> the last phase it waited for
    parts: dict[Any, int] = field(default_factory=dict)  # warp -> lanes that arrived this phase


@dataclass(slots=True)
class Touched:
    """An agent of a warp (isa profile): which lanes accessed memory since the warp last met as a
    whole, and the agent's clock when it did."""

    clock: int = 0
    since: int = 0


@dataclass(slots=True)
class NamedClocks:
    """A named barrier: what the open phase's arrivals published, and who arrived in the open and in
    the last phase, as (agent, clock, warp's name)."""

    open: Bundle
    arrived: list[tuple[int, int, str]] = field(default_factory=list)
    last: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass
class CtaShadow:
    """A CTA's memories: who touched what."""

    smem: Shadow
    tmem: Shadow
    base: int
    mbarriers: dict[int, MbarrierClocks] = field(default_factory=dict)
    unfenced: dict[Any, list[MbarrierClocks]] = field(default_factory=dict)  # by who initialised
    named: dict[int, NamedClocks] = field(default_factory=dict)


class ClocksOfCluster(Reports):
    """Agents, shadows, and the steps that all hooks are made of."""

    def __init__(self, program: Program, profile: str) -> None:
        self.program = program
        self.strict = profile == "isa"
        self.tmem_row = TMEM_VIEW if self.strict else GENERIC
        self.agents = Agents()
        self._warps: dict[Any, Agent] = {}
        self._order: dict[Any, LaneOrder] = {}
        self._ld: dict[Any, Agent] = {}
        self._st: dict[Any, Agent] = {}
        self._core: dict[Any, Agent] = {}
        self._cp_async: dict[Any, Agent] = {}
        self._wgmma: dict[Any, Agent] = {}
        self._parts: dict[Any, Agent] = {}  # accesses by some lanes of a warp only (isa profile)
        # The same for accesses to another CTA, or to several, by CTA: each lane tells the one that
        # it wrote to.
        self._far_parts: dict[Any, dict[int, Agent]] = {}
        self._lanes: dict[int, Touched] = {}  # by agent
        # A warp's bundles at its last fence.acq_rel or .sc, by the fence's scope.
        self._fenced: dict[Any, dict[int, Bundle]] = {}
        # Other clusters of which a warp's relaxed reads brought news that only a fence of the whole
        # GPU takes in (isa profile): their agents.
        self._far: dict[Any, set[int]] = {}
        self._ctas: dict[int, CtaShadow] = {}
        # By CTA: the last access to it by each agent of another, as (clock, segment, warp).
        self._visits: dict[int, dict[int, tuple[int, int, Any]]] = {}
        self._hosts: set[tuple[Any, int]] = set()  # (warp, CTA that it knows to have started)

    def add_cta(self, cta: Cta) -> None:
        smem = Shadow(cta.smem.nbytes // CELL_BYTES + 1)
        self._ctas[id(cta)] = CtaShadow(smem, Shadow(QUADS * COLUMNS), cta.smem.base)
        for warp in cta.warps:
            agent = self.agents.add(WARP, warp)
            agent.bundle[GENERIC, agent.index] = 1
            self._warps[warp] = agent
            self._order[warp] = LaneOrder()

    def _own(self, table: dict[Any, Agent], kind: str, warp: Warp) -> Agent:
        agent = table.get(warp)
        if agent is None:
            agent = table[warp] = self.agents.add(kind, warp)
            agent.clock = 0
        return agent

    def _release(self, warp: Warp, lanes: int | None = None) -> Bundle:
        """What an arrival by ``lanes`` (None: by each) of the warp publishes: a view of its bundle;
        its clock then ticks."""
        agent = self._warps[warp]
        bundle = self.agents.fit(agent).copy()
        bundle[TMEM_VIEW] = 0
        if self.strict and lanes is not None and lanes != warp.alive:
            self._only_of(warp, lanes, bundle)
        self._tick(warp)
        return bundle

    def _tick(self, warp: Warp) -> None:
        """What the warp does from now on is behind what it did."""
        if (part := self._parts.get(warp)) is not None:
            part.clock += 1
        if (far := self._far_parts.get(warp)) is not None:
            for part in far.values():
                part.clock += 1
        agent = self._warps[warp]
        agent.clock += 1
        agent.bundle[GENERIC, agent.index] = agent.clock

    def _only_of(self, warp: Warp, lanes: int, bundle: Bundle) -> None:
        """Takes out of the bundle what other lanes did since bar.warp.sync or a barrier: a thread's
        release does not cover its neighbours (PTX ISA 9.1 section 8.8, base causality order)."""
        for agent in self._agents_of(warp):
            state = self._lanes.get(agent.index)
            if state is not None and state.since & ~lanes:
                own = bundle[:, agent.index]
                np.minimum(own, state.clock, out=own)

    def _agents_of(self, warp: Warp) -> Iterator[Agent]:
        """Those that the warp's lanes access memory as."""
        for table in (self._warps, self._parts, self._ld, self._st):
            if (own := table.get(warp)) is not None:
                yield own
        yield from self._far_parts.get(warp, {}).values()

    def warp_sync(self, warp: Warp, members: int = FULL) -> None:
        """Lanes of the warp met at a barrier that orders their memory accesses."""
        agent = self._warps[warp]
        self._meet(agent, warp, members)
        if not self.strict or warp.alive & ~members:
            return
        for own in self._agents_of(warp):
            state = self._lanes.setdefault(own.index, Touched())
            state.clock, state.since = own.clock, 0
            if own.kind == WARP:
                own.clock += 1
        agent.bundle[GENERIC, agent.index] = agent.clock

    def converged(self, warp: Warp, members: int = FULL) -> None:
        """Lanes of the warp executed an instruction that they converge for."""
        if not self.strict:
            self._meet(self._warps[warp], warp, members)

    def _meet(self, agent: Agent, warp: Warp, members: int) -> None:
        order = self._order[warp]
        if order.since:
            order.meet(members, warp.alive, agent.clock)
            agent.clock += 1
            agent.bundle[GENERIC, agent.index] = agent.clock

    def _issuer(self, warp: Warp) -> Bundle:
        """What comes before an operation that the executing lanes issue to an engine."""
        bundle = self.agents.fit(self._warps[warp])
        lanes = warp.cta.machine.lanes
        if self.strict and lanes != warp.alive:
            bundle = bundle.copy()
            self._only_of(warp, lanes, bundle)
        return bundle

    def _engine(self, kind: str, warp: Warp) -> Agent:
        """The agent of one asynchronous operation."""
        engine = self.agents.engine(kind, self._warps[warp])
        lanes = warp.cta.machine.lanes
        if self.strict and lanes != warp.alive:
            self._only_of(warp, lanes, engine.bundle)
        return engine

    def _touched(self, agent: Agent, lanes: int) -> None:
        state = self._lanes.get(agent.index)
        if state is None:
            state = self._lanes[agent.index] = Touched()
        state.since |= lanes

    def _acquire(self, warp: Warp, bundle: Bundle, lanes: int = FULL) -> None:
        """The lanes learn what the bundle holds; so does, where it is not about lanes, the warp."""
        agent, order = self._warps[warp], self._order[warp]
        brought = int(bundle[GENERIC, agent.index])
        if brought > order.met:
            order.acquire(lanes, warp.alive, brought)
        copies = self._cp_async.get(warp)
        if copies is not None and copies.index < bundle.shape[1]:
            order.waited(0, int(bundle[GENERIC, copies.index]), 0)
        agent.bundle = join(self.agents.fit(agent), bundle)

    def _loose(self, bundle: Bundle) -> Bundle:
        """What a wait takes in that is relaxed, or whose scope is too narrow: execution order, on
        which tcgen05.fence builds (PTX ISA 9.1 section 9.7.16.6.4), and what a fence may add."""
        out = self.agents.zero()
        np.maximum(bundle[LOOSE], bundle[GENERIC], out=out[LOOSE, : bundle.shape[1]])
        for row in (TMEM_OUT, UNRELEASED):
            out[row, : bundle.shape[1]] = bundle[row]
        return out

    def _published(self, engine: Agent) -> Bundle:
        bundle = self.agents.fit(engine).copy()
        bundle[:TMEM_VIEW, engine.index] = engine.clock
        bundle[TMEM_OUT] = np.maximum(bundle[TMEM_OUT], bundle[GENERIC])
        bundle[TMEM_VIEW] = 0
        return bundle

    def _access(
        self, shadow: Shadow, cells: Cells, agent: Agent, row: int, write: bool, pc: int,
        space: str, base: int, view: NDArray[np.int32] | None = None, fine: bool = False,
        by: ByLanes | None = None,
    ) -> None:  # fmt: skip
        """``view``: in the place of the agent's row. ``fine``, ``by``: see `Shadow`."""
        bundle = self.agents.fit(agent)
        agent.pc = pc
        if view is None:
            view = bundle[row]
        if write:
            # Nobody is known to put a proxy fence between ordinary reads and the copy that
            # overwrites what was read; by the PTX text it belongs there.
            reads = bundle[GENERIC] if row == ASYNC and not self.strict else view
            conflict = shadow.write(cells, view, agent.index, agent.clock, pc, reads, fine, by)
        else:
            conflict = shadow.read(cells, view, agent.index, agent.clock, pc, fine, by)
        if conflict is not None:
            raise self._fault(conflict, agent, row, write, space, base)

    # -- CTAs of a cluster -------------------------------------------------------------------------

    def _visit(self, agent: Agent, cta: Cta, pc: int) -> None:
        """The agent accesses shared or Tensor Memory of the CTA, which for another than its own
        must have started (CUDA C++ Programming Guide, distributed shared memory) and, see
        `check_hosts`, must not end before."""
        warp = agent.warp
        if warp.cta is cta:
            return
        self._visits.setdefault(id(cta), {})[agent.index] = (agent.clock, pc, warp)
        if (warp, id(cta)) in self._hosts:
            return
        known = executed(self.agents.fit(agent))
        if not any(known[self._warps[other].index] for other in cta.warps):
            raise EmulatorFault(
                "cluster_cta_not_started",
                f"an access to CTA {cta.rank} of the cluster, of which nothing says that it has"
                " started: barrier.cluster before the first access is missing",
                rank=cta.rank,
            )
        self._hosts.add((warp, id(cta)))

    def check_hosts(self, cta: Cta) -> None:
        """The CTA has ended: some thread of it must have known of each access from outside."""
        visits = self._visits.get(id(cta))
        if visits is None:
            return
        known = np.max([executed(self.agents.fit(self._warps[w])) for w in cta.warps], axis=0)
        for index, (clock, pc, warp) in visits.items():
            if known[index] < clock:
                ins = self.program.segments[pc].first
                raise EmulatorFault(
                    "cluster_cta_exited",
                    f"nothing orders the end of CTA {cta.rank} of the cluster behind the access to"
                    f" it by {self._name(self.agents.all[index])} of CTA {warp.cta.rank}"
                    f" (ptx:{ins.line}): by then its memory may be gone. A wait for what that"
                    " access completes, or barrier.cluster, is missing",
                    rank=cta.rank,
                    issuer=warp,
                    pc=pc,
                )


def executed(bundle: Bundle) -> NDArray[np.int32]:
    """What came before in time, whether or not its memory accesses are ordered."""
    rows: NDArray[np.int32] = bundle[[GENERIC, LOOSE, UNRELEASED]].max(axis=0)
    return rows
