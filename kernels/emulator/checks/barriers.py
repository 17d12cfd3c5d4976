"""Happens-before through mbarriers, named barriers, the cluster's barrier, and fences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..findings import EmulatorFault
from .base import ClocksOfCluster, MbarrierClocks, NamedClocks
from .clocks import (
    ASYNC,
    ASYNC_GLOBAL,
    FENCED,
    GENERIC,
    LOOSE,
    TMEM_OUT,
    TMEM_VIEW,
    UNRELEASED,
    Bundle,
    join,
)
from .flags import SCOPES, WIDEST

if TYPE_CHECKING:
    from ..program import Program
    from ..state import Cta, Warp


class BarrierHooks(ClocksOfCluster):
    """What barriers and fences order."""

    def __init__(self, program: Program, profile: str) -> None:
        super().__init__(program, profile)
        self.cluster_open: Bundle = self.agents.zero()
        self.cluster_done: Bundle = self.agents.zero()

    # -- mbarriers -------------------------------------------------------------------------------

    def mbarrier_init(self, warp: Warp, cta: Cta, addr: int) -> None:
        agent = self._warps[warp]
        zero = self.agents.zero
        barrier = MbarrierClocks(zero(), zero(), agent.index, agent.clock)
        self._ctas[id(cta)].mbarriers[addr] = barrier
        self._ctas[id(warp.cta)].unfenced.setdefault(warp, []).append(barrier)

    def _barrier(self, cta: Cta, addr: int, bundle: Bundle, what: str) -> MbarrierClocks | None:
        barrier = self._ctas[id(cta)].mbarriers.get(addr)
        if barrier is None:
            return None
        init, fence = barrier.init_agent, barrier.fence_clock
        if bundle[GENERIC, init] < barrier.init_clock and (
            # Behind fence.mbarrier_init a relaxed arrival will do.
            fence is None or bundle[UNRELEASED, init] < fence
        ):
            raise EmulatorFault(
                "mbarrier_init_race",
                f"{what} at {addr:#x}, whose mbarrier.init by"
                f" {self._name(self.agents.all[init])} is not ordered before it: a"
                " barrier or fence between them is missing",
                address=addr,
            )
        return barrier

    def fence_mbarrier_init(self, warp: Warp) -> None:
        """The warp's initialisations so far can be seen by the async proxy, and in the cluster."""
        for barrier in self._ctas[id(warp.cta)].unfenced.pop(warp, ()):
            barrier.fence_clock = self._warps[warp].clock

    def _check_init_fence(
        self, barrier: MbarrierClocks, bundle: Bundle, what: str, addr: int
    ) -> None:
        """TMA and the tensor core must see an initialised mbarrier: their accesses are the async
        proxy's, its initialisation is not (PTX ISA 9.1 sections 8.6 and 9.7.13.4)."""
        init, fence = barrier.init_agent, barrier.fence_clock
        if bundle[ASYNC, init] >= barrier.init_clock:
            return
        if fence is not None and max(bundle[GENERIC, init], bundle[UNRELEASED, init]) >= fence:
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
        own = self.agents.fit(self._warps[warp])
        if (barrier := self._barrier(cta, addr, own, "arrival")) is None:
            return
        self._visit(self._warps[warp], cta, warp.pc)
        if self.strict and lanes is not None and lanes != warp.alive:
            # Parts of a warp that arrive in turn have, together, arrived as a whole.
            lanes |= barrier.parts.get(warp, 0)
            barrier.parts[warp] = lanes
        bundle = self._release(warp, lanes)
        if self.strict:
            bundle = self._weakened(warp, bundle, order, cta is not warp.cta)
            if cta is not warp.cta:
                far = barrier.far_open
                barrier.far_open = bundle if far is None else join(far, bundle)
                return
        barrier.open = join(barrier.open, bundle)

    def _weakened(
        self, warp: Warp, bundle: Bundle, order: str, remote: bool, needed: int = 0
    ) -> Bundle:
        """What an arrival with this .sem.scope publishes by the PTX text: a relaxed one what the
        last fence covered whose scope is ``needed`` or wider, one to another CTA's barrier at .cta
        scope (the default) nothing."""
        relaxed, narrow = "relaxed" in order, remote and "cluster" not in order
        if not relaxed and not narrow:
            return bundle
        np.maximum(bundle[UNRELEASED], bundle[GENERIC], out=bundle[UNRELEASED])
        bundle[GENERIC], bundle[ASYNC], bundle[ASYNC_GLOBAL] = 0, 0, 0
        if narrow:
            bundle[TMEM_OUT] = 0
        else:
            for scope, fenced in self._fenced.get(warp, {}).items():
                if scope >= needed:
                    bundle = join(bundle, fenced)
        return bundle

    def mbarrier_wait(self, warp: Warp, cta: Cta, addr: int, order: str = "") -> None:
        """order: the instruction's .sem.scope, if it has one."""
        own = self.agents.fit(self._warps[warp])
        if (barrier := self._barrier(cta, addr, own, "wait")) is None:
            return
        lanes = cta.machine.lanes
        far = barrier.far_done
        if "relaxed" not in order or not self.strict:
            self._acquire(warp, barrier.done, lanes)
        else:
            self._acquire(warp, self._loose(barrier.done))
        if far is not None:
            whole = "cluster" in order and "relaxed" not in order
            self._acquire(warp, far if whole else self._loose(far), lanes)

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
            barrier.parts.clear()
            if barrier.far_open is not None:
                far = barrier.far_done
                barrier.far_done = barrier.far_open if far is None else join(far, barrier.far_open)
                barrier.far_open = None

    # -- named barriers, the cluster's barrier ----------------------------------------------------

    def named_arrive(self, warp: Warp, cta: Cta, index: int) -> None:
        """Raises named_barrier_race unless the arrival is ordered behind the arrivals of the
        barrier's last phase: it could as well have come before one of them and taken its place."""
        agent, table = self._warps[warp], self._ctas[id(cta)].named
        named = table.get(index)
        if named is None:
            named = table[index] = NamedClocks(self.agents.zero())
        known = self.agents.fit(agent)[GENERIC]
        for other, clock, name in named.last:
            if known[other] < clock:
                raise EmulatorFault(
                    "named_barrier_race",
                    f"{self._name(agent)} arrives at barrier {index}, whose last phase"
                    f" {', '.join(who for *_, who in named.last)} completed without it, and nothing"
                    f" orders this arrival behind {name}'s: the count of threads is too small for"
                    " all that come, or two groups share the barrier",
                    barrier=index,
                    arrived=[who for *_, who in named.last],
                )
        named.arrived.append((agent.index, agent.clock, self._name(agent)))
        named.open = join(named.open, self._release(warp))

    def named_release(self, cta: Cta, index: int, waiters: list[Warp]) -> None:
        """The open phase is complete."""
        named = self._ctas[id(cta)].named[index]
        for warp in waiters:
            self.warp_sync(warp)
            self._acquire(warp, named.open)
        named.open = self.agents.zero()
        named.last, named.arrived = named.arrived, []

    def cluster_arrive(self, warp: Warp, relaxed: bool = False) -> None:
        """A relaxed arrival publishes what a fence in front of it covers, and no more."""
        bundle = self._release(warp)
        if relaxed:
            bundle = self._weakened(warp, bundle, ".relaxed", False, SCOPES["cluster"])
        self.cluster_open = join(self.cluster_open, bundle)

    def cluster_phase(self) -> None:
        """Every warp of the cluster has arrived."""
        self.cluster_done = join(self.cluster_done, self.cluster_open)
        self.cluster_open = self.agents.zero()

    def cluster_release(self, waiters: list[Warp]) -> None:
        for warp in waiters:
            self.warp_sync(warp)
            self._acquire(warp, self.cluster_done)

    # -- fences ----------------------------------------------------------------------------------

    def fence(self, warp: Warp, scope: int, acquires: bool = True, releases: bool = True) -> None:
        """fence.acq_rel and its kin: earlier relaxed reads acquire, later relaxed writes release,
        as far as the scope reaches (`flags.SCOPES`)."""
        bundle = self.agents.fit(self._warps[warp])
        if acquires:
            before = {index: int(bundle[GENERIC, index]) for index in self._far.get(warp, ())}
            np.maximum(bundle[GENERIC], bundle[LOOSE], out=bundle[GENERIC])
            if scope == WIDEST:
                self._far.pop(warp, None)
            else:
                for index, clock in before.items():
                    bundle[GENERIC, index] = clock
        if releases:
            if scope == WIDEST:
                np.maximum(bundle[FENCED], bundle[GENERIC], out=bundle[FENCED])
            covered = self._fenced.setdefault(warp, {})[scope] = bundle.copy()
            covered[TMEM_VIEW] = 0
            self._tick(warp)

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
