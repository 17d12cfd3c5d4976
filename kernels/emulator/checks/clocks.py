"""Vector clocks of agents: warps, and the asynchronous engines that work for them.

Each agent carries a *bundle* of eight vector clocks, rows of one array:

    GENERIC     what happens-before the agent's next ordinary access
    ASYNC       what also happens-before its next access through the async proxy: grows to GENERIC
                at fence.proxy.async, by whoever executes it (PTX ISA 9.1 section 8.6)
    TMEM_OUT    what it publishes to tcgen05 operations of others: grows to GENERIC at
                tcgen05.fence::before_thread_sync
    TMEM_VIEW   what happens-before its next tcgen05 operation: takes in what barriers brought at
                tcgen05.fence::after_thread_sync (sections 9.7.16.6.2 and .3)
    ASYNC_GLOBAL  as ASYNC, for global memory: fence.proxy.async may name one state space
    LOOSE       what was released, but read by a relaxed access: grows into GENERIC at a fence
    UNRELEASED  what would have come along, had it been released, at a scope that reaches here: for
                messages only
    FENCED      what somebody's fence has shown to the whole GPU: grows to GENERIC at one

An access by agent a at its clock c is ordered before another agent's access if the view that
governs the latter has v[a] >= c. The two-clock idea (ordinary and async) is JAX Pallas's Mosaic-GPU
interpreter's; the tcgen05 rows and the per-operation engine agents are added here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

GENERIC, ASYNC, TMEM_OUT, TMEM_VIEW, LOOSE, ASYNC_GLOBAL, FENCED, UNRELEASED = range(8)
ROWS = 8
Bundle = NDArray[np.int32]

WARP, TMEM_LD, TMEM_ST, TENSOR_CORE, TMA_LOAD, TMA_STORE = (
    "warp", "tcgen05.ld", "tcgen05.st", "tensor core", "TMA load", "TMA store",
)  # fmt: skip


@dataclass(slots=True)
class Agent:
    """``clock``, ``pc``: of its latest access and the segment that issued it; ``warp``: for whom it
    works."""

    index: int
    kind: str
    warp: Any
    clock: int = 1
    bundle: Bundle = field(default_factory=lambda: np.zeros((ROWS, 0), np.int32))
    pc: int | None = None


class Agents:
    """The agents of one cluster. Index 0 stands for "nobody": ordered before everything."""

    def __init__(self) -> None:
        self.all: list[Agent] = [Agent(0, "nobody", None, 0)]
        self.capacity = 64
        self._pools: dict[str, list[Agent]] = {}

    def add(self, kind: str, warp: Any) -> Agent:
        agent = Agent(len(self.all), kind, warp)
        self.all.append(agent)
        if agent.index >= self.capacity:
            self.capacity *= 2
        agent.bundle = np.zeros((ROWS, self.capacity), np.int32)
        return agent

    def engine(self, kind: str, issuer: Agent) -> Agent:
        """An agent for one asynchronous operation: one whose last operation the issuer knows to be
        over (to reuse another would hide a race), else a new one. Its bundle starts as the
        issuer's."""
        pool = self._pools.setdefault(kind, [])
        known = self.fit(issuer)[GENERIC]
        for k, agent in enumerate(pool):
            if agent.index < known.size and known[agent.index] >= agent.clock:
                pool.append(pool.pop(k))  # oldest first next time
                agent.clock += 1
                break
        else:
            agent = self.add(kind, issuer.warp)
            pool.append(agent)
        agent.warp = issuer.warp
        agent.bundle = self.fit(issuer).copy()
        agent.bundle[:, agent.index] = agent.clock
        return agent

    def fit(self, agent: Agent) -> Bundle:
        """The agent's bundle at today's capacity."""
        if agent.bundle.shape[1] < self.capacity:
            agent.bundle = self.padded(agent.bundle)
        return agent.bundle

    def padded(self, bundle: Bundle) -> Bundle:
        out = np.zeros((ROWS, self.capacity), np.int32)
        out[:, : bundle.shape[1]] = bundle
        return out

    def zero(self) -> Bundle:
        return np.zeros((ROWS, self.capacity), np.int32)


def join(into: Bundle, other: Bundle) -> Bundle:
    """Pointwise maximum, in place where the shapes agree; returns the result."""
    if into.shape[1] == other.shape[1]:
        return np.maximum(into, other, out=into)
    if into.shape[1] < other.shape[1]:
        out = other.copy()
        np.maximum(out[:, : into.shape[1]], into, out=out[:, : into.shape[1]])
        return out
    part = into[:, : other.shape[1]]
    np.maximum(part, other, out=part)
    return into
