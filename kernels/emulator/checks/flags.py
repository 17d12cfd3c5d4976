"""Flags: words by which threads order other accesses (PTX ISA 9.1 sections 8.8 and 8.9).

A strong write publishes what its thread knows: a release all of it, a relaxed one what a fence in
front of it covers. A strong read takes that in: an acquire at once, a relaxed one at a later fence.
Both must reach the other thread: ``.cta`` only threads of one CTA, ``.cluster`` those of a cluster.

Clusters run one after the other here, so that what one publishes to another is kept as plain
vectors of its agents' clocks, and the other's own clocks only count which of them it has seen.

``silicon`` differs in two points. A relaxed read acquires (the CUDA C++ Programming Guide's own
example of __threadfence has no fence behind its counter), and a fence by one thread covers, beyond
a barrier of the CTA, another thread's flag too (fences act on the SM, not on the thread).
"""

from __future__ import annotations

from collections.abc import Hashable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .clocks import (
    ASYNC,
    ASYNC_GLOBAL,
    FENCED,
    GENERIC,
    LOOSE,
    TMEM_OUT,
    TMEM_VIEW,
    UNRELEASED,
    Agent,
    Bundle,
)
from .clocks import join as join_bundles

if TYPE_CHECKING:
    from ..state import Warp

Vector = NDArray[np.int32]
SCOPES = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 2}
WIDEST = 2


def reach(order: str) -> int:
    """How far an access's scope reaches; without one: .gpu (atom, red) or .sys (.volatile)."""
    return next((SCOPES[word] for word in order.split(".") if word in SCOPES), WIDEST)


_NOTHING: Vector = np.zeros(1, np.int32)


@dataclass(slots=True)
class _Flag:
    """What strong writes to a word published. ``near``: to threads of a CTA, ``wide``: of the
    cluster that runs; ``far``: to other clusters, by cluster; ``loose``: what a fence, or a wider
    scope, would have published to them."""

    cluster: int
    near: dict[int, Bundle] = field(default_factory=dict)
    wide: Bundle | None = None
    far: dict[int, Vector] = field(default_factory=dict)
    loose: dict[int, Vector] = field(default_factory=dict)


@dataclass(slots=True)
class Foreign:
    """Another cluster: what has been seen of its clocks, state after state, each with all before
    it. The agent's entry in a bundle is the number of a state."""

    agent: Agent
    states: list[Vector] = field(default_factory=lambda: [_NOTHING])

    def take(self, vector: Vector) -> int:
        """The number of a state that holds the vector."""
        newest = self.states[-1]
        if covers(newest, vector):
            k = len(self.states) - 1
            while k and covers(self.states[k - 1], vector):
                k -= 1
            return k
        self.states.append(_larger(newest, vector))
        return len(self.states) - 1


def covers(known: Vector, vector: Vector) -> bool:
    size = min(known.size, vector.size)
    return bool((vector[:size] <= known[:size]).all() and not vector[size:].any())


def _held(foreign: Foreign | None, view: Vector) -> Vector:
    if foreign is None or foreign.agent.index >= view.size:
        return _NOTHING
    return foreign.states[int(view[foreign.agent.index])]


def _larger(one: Vector | None, other: Vector) -> Vector:
    if one is None:
        return other.copy()
    if one.size < other.size:
        one, other = other, one
    out = one.copy()
    np.maximum(out[: other.size], other, out=out[: other.size])
    return out


class Flags:
    """The flags of a launch, in global memory or (``shared``) in the shared memory of a cluster.
    Call `begin` for each cluster."""

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.cluster = 0
        self._flags: dict[Hashable, _Flag] = {}
        self._foreign: dict[int, Foreign] = {}
        self._unreleased: dict[int, Foreign] = {}  # by what was not released, or not acquired
        self.race: Any = None

    def begin(self, race: Any) -> None:
        self.race = race
        self.cluster += 1
        self._foreign, self._unreleased = {}, {}

    def seen(self, cluster: int, view: Vector) -> Vector:
        """What a view of this cluster holds of another's clocks."""
        return _held(self._foreign.get(cluster), view)

    def nearly(self, cluster: int, unreleased: Vector) -> Vector:
        """What a view would hold of another cluster's clocks, had the flags that brought them been
        released and acquired at gpu scope. ``unreleased``: that row of the accessing agent."""
        return _held(self._unreleased.get(cluster), unreleased)

    # -- publishing --------------------------------------------------------------------------------

    def publish(self, warp: Warp, keys: Set[Hashable], order: str) -> None:
        """A strong write to the words by the executing lanes."""
        race, cta = self.race, warp.cta
        current = race._release(warp, cta.machine.lanes)
        scope = reach(order)
        releases = "release" in order or "acq_rel" in order
        releases |= self.shared and not race.strict  # an SM's shared memory keeps program order
        tiers = [
            None if k > scope else current if releases else self._fenced(warp, current, k)
            for k in range(WIDEST + 1)
        ]
        loose = race.agents.zero()
        np.maximum(current[GENERIC], current[UNRELEASED], out=loose[UNRELEASED])
        loose[TMEM_OUT] = current[TMEM_OUT]
        near, wide = (_both(tier, loose) for tier in tiers[:2])
        far, far_loose = self._vectors(tiers[2]), self._vectors(current)
        for key in keys:
            flag = self._flags.get(key)
            if flag is None:
                flag = self._flags[key] = _Flag(self.cluster)
            elif flag.cluster != self.cluster:
                flag.cluster, flag.near, flag.wide = self.cluster, {}, None
            before = flag.near.get(id(cta))
            flag.near[id(cta)] = near.copy() if before is None else join_bundles(before, near)
            flag.wide = wide.copy() if flag.wide is None else join_bundles(flag.wide, wide)
            for table, more in ((flag.far, far), (flag.loose, far_loose)):
                for cluster, vector in more.items():
                    table[cluster] = _larger(table.get(cluster), vector)

    def _fenced(self, warp: Warp, current: Bundle, scope: int) -> Bundle | None:
        """What fences that reach so far have covered."""
        race = self.race
        out: Bundle | None = None
        for fence_scope, bundle in race._fenced.get(warp, {}).items():
            if fence_scope >= scope:
                out = bundle.copy() if out is None else join_bundles(out, bundle)
        if race.strict:
            return out
        by_others = race.agents.zero()
        for row in (GENERIC, ASYNC, ASYNC_GLOBAL):
            np.minimum(current[row], current[FENCED], out=by_others[row])
        by_others[FENCED] = current[FENCED]
        return by_others if out is None else join_bundles(by_others, out)

    def _vectors(self, bundle: Bundle | None) -> dict[int, Vector]:
        """The bundle's clocks of this cluster's agents, and what it has seen of others."""
        if bundle is None or self.shared:
            return {}
        out = {self.cluster: bundle[GENERIC].copy()}
        for cluster, foreign in self._foreign.items():
            index = foreign.agent.index
            if index < bundle.shape[1] and bundle[GENERIC, index]:
                out[cluster] = foreign.states[bundle[GENERIC, index]]
        return out

    # -- taking in ---------------------------------------------------------------------------------

    def acquire(self, warp: Warp, keys: Set[Hashable], order: str) -> None:
        """A strong read of the words by the executing lanes."""
        if not self._flags:
            return
        race, cta = self.race, warp.cta
        scope, lanes = reach(order), cta.machine.lanes
        acquires = "acq" in order or not race.strict
        for key in keys:
            flag = self._flags.get(key)
            if flag is None:
                continue
            if flag.cluster == self.cluster:
                near = flag.near.get(id(cta))
                for bundle, far_enough in ((near, True), (flag.wide, scope >= 1)):
                    if bundle is not None:
                        self._take(warp, bundle, acquires and far_enough, lanes)
            row = GENERIC if acquires and scope == WIDEST else LOOSE
            for cluster, vector in flag.far.items():
                # What a narrower read sees no fence can make up for by the PTX text.
                if cluster != self.cluster and (scope == WIDEST or not race.strict):
                    index = self._import(self._foreign, warp, cluster, vector, row)
                    if row == LOOSE and race.strict:
                        race._far.setdefault(warp, set()).add(index)
            for cluster, vector in flag.loose.items():
                if cluster != self.cluster:
                    self._import(self._unreleased, warp, cluster, vector, UNRELEASED)

    def _take(self, warp: Warp, bundle: Bundle, whole: bool, lanes: int) -> None:
        if whole:
            bundle = bundle.copy()
            bundle[TMEM_VIEW] = 0
        self.race._acquire(warp, bundle if whole else self.race._loose(bundle), lanes)

    def _import(
        self, table: dict[int, Foreign], warp: Warp, cluster: int, vector: Vector, row: int
    ) -> int:
        foreign = table.get(cluster)
        if foreign is None:
            agent = self.race.agents.add("cluster", None)
            agent.bundle[:, agent.index] = 0
            agent.clock = 0
            foreign = table[cluster] = Foreign(agent)
        number, index = foreign.take(vector), foreign.agent.index
        own = self.race.agents.fit(self.race._warps[warp])
        own[row, index] = max(int(own[row, index]), number)
        return index


def _both(bundle: Bundle | None, loose: Bundle) -> Bundle:
    out = loose.copy()
    return out if bundle is None else join_bundles(out, bundle)
