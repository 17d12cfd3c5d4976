"""Happens-before over the warps and engines of a cluster: who may touch what, and when.

Every access of shared and tensor memory is checked against the last write and the last reads of its
cells (`Shadow`), under the clock view that the memory model prescribes for it (`clocks`). The check
depends on the order in which operations are *issued* and on synchronisation only, never on when
their effects happen to become visible: a race is found even where the numbers come out right.

Profiles: ``silicon`` takes tcgen05 operations to be ordered by any synchronisation, as hardware
does (flash-attention-4's forward has no tcgen05.fence, and no tcgen05.wait::ld: the scoreboard
holds a load's registers until it is complete); ``isa`` holds kernels to the PTX text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from ..memory.tensor import COLUMNS
from .clocks import (
    ASYNC,
    ASYNC_GLOBAL,
    GENERIC,
    LOOSE,
    TENSOR_CORE,
    TMA_LOAD,
    TMA_STORE,
    TMEM_LD,
    TMEM_OUT,
    TMEM_ST,
    TMEM_VIEW,
    WARP,
    Agent,
    Agents,
    Bundle,
    join,
)
from .shadow import Cells, Conflict, Shadow
from .threads import CP_ASYNC, ST_ASYNC, WGMMA, ThreadHooks

if TYPE_CHECKING:
    from ..program import Program
    from ..state import Cta, Warp

CELL_BYTES = 4
_BEHIND = "{}, or a synchronisation of the two behind it, is missing"
_NO_COMMIT = "no tcgen05.commit behind the MMA was waited for"
_MUST_FINISH = (TMA_LOAD, TMA_STORE, TENSOR_CORE, TMEM_ST, WGMMA)
QUADS = 4  # of 32 Tensor Memory lanes


@dataclass(slots=True)
class _Barrier:
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


@dataclass(slots=True)
class _Lanes:
    """A warp's agent (isa profile): which lanes accessed memory since the warp last met as a whole,
    and the agent's clock when it did."""

    clock: int = 0
    since: int = 0


@dataclass
class _CtaShadow:
    smem: Shadow
    tmem: Shadow
    base: int
    mbarriers: dict[int, _Barrier] = field(default_factory=dict)
    unfenced: dict[Any, list[_Barrier]] = field(default_factory=dict)  # by who initialised them
    named: dict[int, Bundle] = field(default_factory=dict)


class RaceDetector(ThreadHooks):
    """Clocks and shadows of the CTAs that run together. Methods name what happened; those that
    access memory raise `EmulatorFault` for an unordered conflict."""

    def __init__(self, program: Program, profile: str) -> None:
        super().__init__()
        self.program = program
        self.strict = profile == "isa"
        self.tmem_row = TMEM_VIEW if self.strict else GENERIC
        self.agents = Agents()
        self._warps: dict[Any, Agent] = {}
        self._ld: dict[Any, Agent] = {}
        self._st: dict[Any, Agent] = {}
        self._core: dict[Any, Agent] = {}
        self._parts: dict[Any, Agent] = {}  # accesses by some lanes of a warp only (isa profile)
        self._lanes: dict[int, _Lanes] = {}  # by agent
        self._fenced: dict[Any, Bundle] = {}  # a warp's bundle at its last fence.acq_rel or .sc
        self._ctas: dict[int, _CtaShadow] = {}
        self.cluster_open: Bundle = self.agents.zero()
        self.cluster_done: Bundle = self.agents.zero()

    # -- life ------------------------------------------------------------------------------------

    def add_cta(self, cta: Cta) -> None:
        smem = Shadow(cta.smem.nbytes // CELL_BYTES + 1)
        self._ctas[id(cta)] = _CtaShadow(smem, Shadow(QUADS * COLUMNS), cta.smem.base)
        for warp in cta.warps:
            agent = self.agents.add(WARP, warp)
            agent.bundle[GENERIC, agent.index] = 1
            self._warps[warp] = agent

    def _own(self, table: dict[Any, Agent], kind: str, warp: Warp) -> Agent:
        agent = table.get(warp)
        if agent is None:
            agent = table[warp] = self.agents.add(kind, warp)
            agent.clock = 0
        return agent

    # -- ordinary synchronisation ----------------------------------------------------------------

    def _release(self, warp: Warp, lanes: int | None = None) -> Bundle:
        """What an arrival by ``lanes`` (None: by each) of the warp publishes: a view of its bundle;
        its clock then ticks."""
        agent = self._warps[warp]
        bundle = self.agents.fit(agent).copy()
        bundle[TMEM_VIEW] = 0
        if self.strict and lanes is not None and lanes != warp.alive:
            self._only_of(warp, lanes, bundle)
        agent.clock += 1
        agent.bundle[GENERIC, agent.index] = agent.clock
        return bundle

    def _only_of(self, warp: Warp, lanes: int, bundle: Bundle) -> None:
        """Takes out of the bundle what other lanes did since bar.warp.sync or a barrier: a thread's
        release does not cover its neighbours (PTX ISA 9.1 section 8.8, base causality order)."""
        for table in (self._warps, self._parts, self._ld, self._st):
            agent = table.get(warp)
            state = self._lanes.get(agent.index) if agent is not None else None
            if agent is not None and state is not None and state.since & ~lanes:
                own = bundle[:, agent.index]
                np.minimum(own, state.clock, out=own)

    def warp_sync(self, warp: Warp) -> None:
        """All lanes of the warp met at a barrier that orders their memory accesses."""
        if not self.strict:
            return
        for table in (self._warps, self._parts, self._ld, self._st):
            if (agent := table.get(warp)) is not None:
                state = self._lanes.setdefault(agent.index, _Lanes())
                state.clock, state.since = agent.clock, 0
                if agent.kind == WARP:
                    agent.clock += 1
        own = self._warps[warp]
        own.bundle[GENERIC, own.index] = own.clock

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
            state = self._lanes[agent.index] = _Lanes()
        state.since |= lanes

    def _acquire(self, warp: Warp, bundle: Bundle) -> None:
        agent = self._warps[warp]
        agent.bundle = join(self.agents.fit(agent), bundle)

    def mbarrier_init(self, warp: Warp, cta: Cta, addr: int) -> None:
        agent = self._warps[warp]
        zero = self.agents.zero
        barrier = _Barrier(zero(), zero(), agent.index, agent.clock)
        self._ctas[id(cta)].mbarriers[addr] = barrier
        self._ctas[id(warp.cta)].unfenced.setdefault(warp, []).append(barrier)

    def _barrier(self, cta: Cta, addr: int, view: NDArray[np.int32], what: str) -> _Barrier | None:
        barrier = self._ctas[id(cta)].mbarriers.get(addr)
        if barrier is None:
            return None
        if view[barrier.init_agent] < barrier.init_clock:
            raise EmulatorFault(
                "mbarrier_init_race",
                f"{what} at {addr:#x}, whose mbarrier.init by"
                f" {self._name(self.agents.all[barrier.init_agent])} is not ordered before it: a"
                " barrier or fence between them is missing",
                address=addr,
            )
        return barrier

    def fence_mbarrier_init(self, warp: Warp) -> None:
        """The warp's initialisations so far can be seen by the async proxy, and in the cluster."""
        for barrier in self._ctas[id(warp.cta)].unfenced.pop(warp, ()):
            barrier.fence_clock = self._warps[warp].clock

    def _check_init_fence(self, barrier: _Barrier, bundle: Bundle, what: str, addr: int) -> None:
        """TMA and the tensor core must see an initialised mbarrier: their accesses are the async
        proxy's, its initialisation is not (PTX ISA 9.1 sections 8.6 and 9.7.13.4)."""
        init, fence = barrier.init_agent, barrier.fence_clock
        if bundle[ASYNC, init] >= barrier.init_clock:
            return
        if fence is not None and bundle[GENERIC, init] >= fence:
            return
        raise EmulatorFault(
            "missing_mbarrier_init_fence",
            f"{what} at {addr:#x}: between mbarrier.init by"
            f" {self._name(self.agents.all[init])} and an arrival by the async proxy,"
            " fence.mbarrier_init or fence.proxy.async is missing",
            address=addr,
        )

    def mbarrier_arrive(
        self, warp: Warp, cta: Cta, addr: int, lanes: int | None = None, order: str = ""
    ) -> None:
        """lanes: those that arrive. order: the instruction's .sem.scope, if it has one."""
        view = self.agents.fit(self._warps[warp])[GENERIC]
        if (barrier := self._barrier(cta, addr, view, "arrival")) is None:
            return
        bundle = self._release(warp, lanes)
        if self.strict:
            bundle = self._weakened(warp, bundle, order, cta is not warp.cta)
            if cta is not warp.cta:
                far = barrier.far_open
                barrier.far_open = bundle if far is None else join(far, bundle)
                return
        barrier.open = join(barrier.open, bundle)

    def _weakened(self, warp: Warp, bundle: Bundle, order: str, remote: bool) -> Bundle:
        """What an arrival with this .sem.scope publishes by the PTX text: a relaxed one what the
        last fence covered, one to another CTA's barrier at .cta scope (the default) nothing."""
        relaxed, narrow = "relaxed" in order, remote and "cluster" not in order
        if not relaxed and not narrow:
            return bundle
        np.maximum(bundle[LOOSE], bundle[GENERIC], out=bundle[LOOSE])
        bundle[GENERIC], bundle[ASYNC], bundle[ASYNC_GLOBAL] = 0, 0, 0
        if narrow:
            bundle[TMEM_OUT] = 0
        elif (fenced := self._fenced.get(warp)) is not None:
            bundle = join(bundle, fenced)
        return bundle

    def mbarrier_wait(self, warp: Warp, cta: Cta, addr: int, order: str = "") -> None:
        """order: the instruction's .sem.scope, if it has one."""
        view = self.agents.fit(self._warps[warp])[GENERIC]
        if (barrier := self._barrier(cta, addr, view, "wait")) is None:
            return
        far = barrier.far_done
        if "relaxed" not in order or not self.strict:
            self._acquire(warp, barrier.done)
        else:
            self._acquire(warp, self._loose(barrier.done))
        if far is not None:
            whole = "cluster" in order and "relaxed" not in order
            self._acquire(warp, far if whole else self._loose(far))

    def _loose(self, bundle: Bundle) -> Bundle:
        """What a wait takes in that is relaxed, or whose scope is too narrow: execution order, on
        which tcgen05.fence builds (PTX ISA 9.1 section 9.7.16.6.4), and what a fence may add."""
        out = self.agents.zero()
        np.maximum(bundle[LOOSE], bundle[GENERIC], out=out[LOOSE, : bundle.shape[1]])
        out[TMEM_OUT, : bundle.shape[1]] = bundle[TMEM_OUT]
        return out

    def mbarrier_missed(self, warp: Warp, addr: int, parity: int, phase: int) -> None:
        """A wait by parity, with the barrier in ``phase``. Raises mbarrier_missed_phase where the
        warp, which waited for each phase before, is two or more behind: it would take a later phase
        for the one it waits for, or wait for one that is long over."""
        barrier = self._ctas[id(warp.cta)].mbarriers.get(addr)
        if barrier is None:
            return
        last = barrier.seen.get(warp, -1)
        wanted = last if parity == last & 1 else last + 1
        if wanted > last and phase > wanted + 1:
            raise EmulatorFault(
                "mbarrier_missed_phase",
                f"{warp.name} waits for parity {parity} of the mbarrier at {addr:#x}: for it that"
                f" is phase {wanted}, but the barrier is in phase {phase} already; its arrivals"
                " must wait until every waiter has seen a phase",
                address=addr,
                waits_for=wanted,
                phase=phase,
            )
        if phase & 1 != parity:
            barrier.seen[warp] = phase - 1

    def brings(self, warp: Warp, cta: Cta, addr: int) -> bool:
        """Whether waiting for the mbarrier now would order anything for the warp that is not
        ordered already."""
        barrier = self._ctas[id(cta)].mbarriers.get(addr)
        if barrier is None:
            return False
        own = self.agents.fit(self._warps[warp])
        return bool((self.agents.padded(barrier.done) > own).any())

    def mbarrier_phase(self, cta: Cta, addr: int) -> None:
        """The open phase completed."""
        barrier = self._ctas[id(cta)].mbarriers.get(addr)
        if barrier is not None:
            barrier.done = join(barrier.done, barrier.open)
            barrier.open = self.agents.zero()
            if barrier.far_open is not None:
                far = barrier.far_done
                barrier.far_done = barrier.far_open if far is None else join(far, barrier.far_open)
                barrier.far_open = None

    def named_arrive(self, warp: Warp, cta: Cta, index: int) -> None:
        named = self._ctas[id(cta)].named
        named[index] = join(named.get(index, self.agents.zero()), self._release(warp))

    def named_release(self, cta: Cta, index: int, waiters: list[Warp]) -> None:
        bundle = self._ctas[id(cta)].named.pop(index)
        for warp in waiters:
            self.warp_sync(warp)
            self._acquire(warp, bundle)

    def cluster_arrive(self, warp: Warp) -> None:
        self.cluster_open = join(self.cluster_open, self._release(warp))

    def cluster_phase(self) -> None:
        """Every warp of the cluster has arrived."""
        self.cluster_done = join(self.cluster_done, self.cluster_open)
        self.cluster_open = self.agents.zero()

    def cluster_release(self, waiters: list[Warp]) -> None:
        for warp in waiters:
            self.warp_sync(warp)
            self._acquire(warp, self.cluster_done)

    # -- fences ----------------------------------------------------------------------------------

    def fence(self, warp: Warp) -> None:
        """fence.acq_rel or fence.sc: earlier relaxed waits acquire, later relaxed arrivals
        release. (Its scope is not compared: no kernel seen has one that is too narrow.)"""
        if not self.strict:
            return
        bundle = self.agents.fit(self._warps[warp])
        np.maximum(bundle[GENERIC], bundle[LOOSE], out=bundle[GENERIC])
        self._fenced[warp] = bundle.copy()
        self._fenced[warp][TMEM_VIEW] = 0

    def fence_proxy_async(self, warp: Warp, space: str = "") -> None:
        """space: "shared" or "global" if the fence is for one only."""
        bundle = self._warps[warp].bundle
        rows = {"shared": (ASYNC,), "global": (ASYNC_GLOBAL,)}.get(space, (ASYNC, ASYNC_GLOBAL))
        for row in rows:
            np.maximum(bundle[row], bundle[GENERIC], out=bundle[row])

    def tcgen05_before(self, warp: Warp) -> None:
        bundle = self._warps[warp].bundle
        np.maximum(bundle[TMEM_OUT], bundle[GENERIC], out=bundle[TMEM_OUT])

    def tcgen05_after(self, warp: Warp) -> None:
        bundle = self._warps[warp].bundle
        np.maximum(bundle[TMEM_VIEW], bundle[TMEM_OUT], out=bundle[TMEM_VIEW])

    # -- shared memory ---------------------------------------------------------------------------

    def smem(
        self, warp: Warp, cta: Cta, addrs: NDArray[np.int64], nbytes: int, write: bool
    ) -> None:
        """An ordinary access by a warp's lanes; a narrow one makes the CTA's shadow finer."""
        agent = self._warps[warp]
        if self.strict:
            agent = self._lane_agent(warp, agent)
        shadow = self._ctas[id(cta)]
        fine = nbytes < CELL_BYTES
        if fine:
            shadow.smem.refine(CELL_BYTES // nbytes)
        unit = CELL_BYTES // shadow.smem.split if fine else CELL_BYTES
        cells = (addrs - shadow.base) // unit
        words = nbytes // unit
        if words > 1:
            cells = (cells[:, None] + np.arange(words)).reshape(-1)
        if cells.size > 1 and (cells[1:] < cells[:-1]).any():
            cells = np.sort(cells)
        place = (warp.pc, "smem", shadow.base)
        self._access(shadow.smem, cells, agent, GENERIC, write, *place, fine=fine)

    def _lane_agent(self, warp: Warp, agent: Agent) -> Agent:
        """Who is recorded for an access by the lanes that execute: the warp, or a second agent for
        a part of it, so that what one lane did is told from what they all did."""
        lanes = warp.cta.machine.lanes
        if lanes != warp.alive:
            part = self._parts.get(warp)
            if part is None:
                part = self._parts[warp] = self.agents.add(WARP, warp)
            self.agents.fit(agent)
            agent.bundle[GENERIC, part.index] = part.clock
            part.bundle = agent.bundle
            agent = part
        self._touched(agent, lanes)
        return agent

    def _access(
        self, shadow: Shadow, cells: Cells, agent: Agent, row: int, write: bool, pc: int,
        space: str, base: int, view: NDArray[np.int32] | None = None, fine: bool = False,
    ) -> None:  # fmt: skip
        """``view``: in the place of the agent's row. ``fine``: see `Shadow.refine`."""
        bundle = self.agents.fit(agent)
        agent.pc = pc
        if view is None:
            view = bundle[row]
        if write:
            # Nobody is known to put a proxy fence between ordinary reads and the copy that
            # overwrites what was read; by the PTX text it belongs there.
            reads = bundle[GENERIC] if row == ASYNC and not self.strict else view
            conflict = shadow.write(cells, view, agent.index, agent.clock, pc, reads, fine)
        else:
            conflict = shadow.read(cells, view, agent.index, agent.clock, pc, fine)
        if conflict is not None:
            raise self._fault(conflict, agent, row, write, space, base)

    # -- TMA -------------------------------------------------------------------------------------

    def tma_load(self, warp: Warp, cta: Cta, addr: int, nbytes: int) -> Agent:
        """A copy into shared memory is issued; pass the agent to `engine_arrive` at completion."""
        engine = self._engine(TMA_LOAD, warp)
        shadow = self._ctas[id(cta)]
        cells = slice((addr - shadow.base) >> 2, (addr - shadow.base + nbytes + 3) >> 2)
        self._access(shadow.smem, cells, engine, ASYNC, True, warp.pc, "smem", shadow.base)
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
        view = self.agents.fit(self._warps[warp])[GENERIC]
        self._barrier(cta, addr, view, what)

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

    def _published(self, engine: Agent) -> Bundle:
        bundle = self.agents.fit(engine).copy()
        bundle[:TMEM_VIEW, engine.index] = engine.clock
        bundle[TMEM_OUT] = np.maximum(bundle[TMEM_OUT], bundle[GENERIC])
        bundle[TMEM_VIEW] = 0
        return bundle

    # -- Tensor Memory and the tensor core -------------------------------------------------------

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
            self._mma_cells(core, warp.pc, self._ctas[id(cta)], smem_cells, tmem_reads, d, quads)

    def _mma_cells(
        self, core: Agent, pc: int, shadow: _CtaShadow,
        smem_cells: list[tuple[str, NDArray[np.int64]]], tmem_reads: list[tuple[int, int]],
        d: tuple[int, int], quads: tuple[int, ...],
    ) -> None:  # fmt: skip
        for _, cells in smem_cells:
            at = cells - (shadow.base >> 2)
            self._access(shadow.smem, at, core, ASYNC, False, pc, "smem", shadow.base)
        for column, columns in tmem_reads:
            for quad in quads:
                first = quad * COLUMNS + column
                cells_ = slice(first, first + columns)
                self._access(shadow.tmem, cells_, core, self.tmem_row, False, pc, "tmem", 0)
        for quad in quads:
            first = quad * COLUMNS + d[0]
            cells_ = slice(first, first + d[1])
            self._access(shadow.tmem, cells_, core, self.tmem_row, True, pc, "tmem", 0)

    def commit(self, warp: Warp, cta: Cta, addr: int) -> Bundle:
        """tcgen05.commit is issued: the bundle that its arrival will publish (`bundle_arrive`)."""
        core = self._own(self._core, TENSOR_CORE, warp)
        bundle = self.agents.fit(self._warps[warp])
        if (barrier := self._barrier(cta, addr, bundle[GENERIC], "tcgen05.commit")) is not None:
            self._check_init_fence(barrier, bundle, "tcgen05.commit", addr)
        return self._published(core)

    def bundle_arrive(self, bundle: Bundle, cta: Cta, addr: int) -> None:
        barrier = self._ctas[id(cta)].mbarriers.get(addr)
        if barrier is not None:
            barrier.open = join(barrier.open, bundle)

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
        for quad in range(QUADS):
            first = quad * COLUMNS + column
            cells = slice(first, first + columns)
            self._access(shadow, cells, agent, row, True, warp.pc, "tmem", 0, view)
        agent.bundle[TMEM_VIEW, agent.index] = agent.clock  # for the warp itself, no fence needed

    # -- the end ---------------------------------------------------------------------------------

    def check_exit(self, cta: Cta) -> None:
        """Every asynchronous operation of the CTA must have been waited for by somebody."""
        known = self.agents.zero()[GENERIC]
        for agent in self._warps.values():
            known = np.maximum(known, self.agents.fit(agent)[GENERIC])
        for agent in self.agents.all[1:]:
            if agent.kind in _MUST_FINISH and agent.clock and agent.warp.cta is cta:
                if known[agent.index] < agent.clock:
                    raise EmulatorFault(
                        "exit_with_work_in_flight",
                        f"the CTA ends, but nobody has waited for the last {agent.kind} of"
                        f" {agent.warp.name}",
                        engine=agent.kind,
                        issued_by=agent.warp.name,
                        issuer=agent.warp,
                        pc=agent.pc,
                    )

    # -- reports ---------------------------------------------------------------------------------

    def _name(self, agent: Agent) -> str:
        name = "nobody"
        if (warp := agent.warp) is not None:
            alike = sum(other.name == warp.name for other in warp.cta.warps)
            name = f"{warp.name} (warp {warp.index})" if alike > 1 else warp.name
        return name if agent.kind == WARP else f"{agent.kind} of {name}"

    def _fault(
        self, conflict: Conflict, agent: Agent, row: int, write: bool, space: str, base: int
    ) -> EmulatorFault:
        other = self.agents.all[conflict.agent]
        bundle = self.agents.fit(agent)
        code, why = self._classify(conflict, other, agent, bundle, row, write, space)
        if space == "smem":
            where = f"shared address {base + conflict.cell * CELL_BYTES // conflict.split:#x}"
        else:
            where = (
                f"Tensor Memory lanes {conflict.cell // COLUMNS * 32}.."
                f"{conflict.cell // COLUMNS * 32 + 31}, column {conflict.cell % COLUMNS}"
            )
        ins = self.program.segments[conflict.pc].first
        source = self.program.module.source_of(ins)
        earlier = f"{'write' if conflict.wrote else 'read'} by {self._name(other)}"
        at = f" at {source}" if source else ""
        return EmulatorFault(
            code,
            f"{'write' if write else 'read'} by {self._name(agent)} of {where} is not ordered after"
            f" the {earlier}{at} (ptx:{ins.line}): {why}",
            space=space,
            other={
                "access": "write" if conflict.wrote else "read",
                "agent": self._name(other),
                "source": source,
                "ptx_line": ins.line,
                "instruction": ins.text,
            },
            access="write" if write else "read",
            agent=self._name(agent),
        )

    def _classify(
        self, conflict: Conflict, other: Agent, agent: Agent, bundle: Bundle, row: int,
        write: bool, space: str,
    ) -> tuple[str, str]:  # fmt: skip
        known = conflict.clock <= int(bundle[GENERIC, other.index])
        if row == ASYNC and known:
            return "missing_proxy_fence", "fence.proxy.async is missing between them"
        loose = conflict.clock <= int(bundle[LOOSE, other.index])
        if row == TMEM_VIEW and (known or loose) and other is not agent:
            return (
                "missing_tcgen05_fence",
                "tcgen05.fence::before_thread_sync before, or ::after_thread_sync behind, the"
                " synchronisation between them is missing",
            )
        if loose and other is not agent:
            return (
                "sync_scope_too_narrow",
                "what synchronises them is relaxed, or its scope (.cta where none is given) does"
                " not reach both threads",
            )
        if other.kind == TMA_LOAD:
            return "tma_load_not_waited", "the copy's mbarrier was not waited for"
        if other.kind == WGMMA:
            return "mma_operand_overwritten", _BEHIND.format("wgmma.wait_group")
        if other.kind == CP_ASYNC:
            return "cp_async_not_waited", "cp.async.wait_group or the copy's mbarrier is missing"
        if other.kind == ST_ASYNC:
            return "st_async_not_waited", "the store's mbarrier was not waited for"
        if other.kind == TMA_STORE:
            return "tma_store_not_waited", _BEHIND.format("cp.async.bulk.wait_group")
        if other.kind == TENSOR_CORE:
            if space == "tmem":
                return (
                    "tmem_access_before_commit",
                    "no tcgen05.commit behind the MMA was waited for",
                )
            return "mma_operand_overwritten", "no tcgen05.commit behind the MMA was waited for"
        if other.kind == TMEM_LD:
            return "tcgen05_ld_not_waited", _BEHIND.format("tcgen05.wait::ld")
        if other.kind == TMEM_ST:
            return "tcgen05_st_not_waited", _BEHIND.format("tcgen05.wait::st")
        return f"{space}_race", "no synchronisation orders them"
