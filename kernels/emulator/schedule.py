"""Which warp runs next, and when asynchronous work takes effect.

A policy orders the warps that can run. Asynchronous operations (copies, MMAs, commits) are queued
by engine: operations of one queue keep their order, queues do not wait for each other. With eager
visibility effects happen at issue; with late visibility they happen when the operation completes.
The round-robin and run-until-blocked policies complete work at once when eager; in all other cases
an operation completes as late as is legal, when no warp can run, or (random) at any time before.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .state import Warp

# A shared::cluster address is the CTA's rank above its own window (as mapa and CUTLASS's peer bit
# mask 0xFEFFFFFF show); a CTA's own addresses carry its rank too.
CTA_RANK_SHIFT = 24
CTA_WINDOW_MASK = (1 << CTA_RANK_SHIFT) - 1
NO_CTA = 0xFF  # the rank in an address that mapa could not make; clusters have at most 16 CTAs

POLICIES = ("round_robin", "run_until_blocked", "random", "adversarial")
VISIBILITIES = ("eager", "late")


@dataclass(frozen=True)
class Options:
    """How to run: see `kernels.emulator.emulate`."""

    seed: int = 0
    schedule: str = "round_robin"
    visibility: str = "eager"
    checks: bool = True
    profile: str = "silicon"
    record: bool = False
    ctas: frozenset[int] | None = None  # linear indices of the CTAs to run; None: all
    trace: bool = False
    unwritten: str = "finding"

    def leaves_out(self, blocks: list[tuple[int, int, int]], grid: tuple[int, int, int]) -> bool:
        """Whether none of a cluster's CTAs is to run."""
        if self.ctas is None:
            return False
        return not any(x + grid[0] * (y + grid[1] * z) in self.ctas for x, y, z in blocks)


class ReadyQueue:
    """The warps that can run."""

    def __init__(self, policy: str, seed: int) -> None:
        self.policy = policy
        self.random = random.Random(seed)
        self._warps: deque[Warp] = deque()
        # Segments a turn: fewer turns are faster, single steps mix warps most.
        self.steps = {"round_robin": 8, "run_until_blocked": 4096}.get(policy, 1)
        self._shuffled = policy in ("random", "adversarial")

    def __bool__(self) -> bool:
        return bool(self._warps)

    def __iter__(self) -> Iterator[Warp]:
        return iter(self._warps)

    def wake(self, warp: Warp) -> None:
        """A warp that waited can run again."""
        if not warp.queued:
            warp.queued = True
            self._warps.append(warp)

    def again(self, warp: Warp) -> None:
        """The warp that just ran a step can run another."""
        if not warp.queued:
            warp.queued = True
            self._warps.append(warp)

    def next(self) -> Warp:
        if self._shuffled:
            k = self.random.randrange(len(self._warps))
            self._warps[0], self._warps[k] = self._warps[k], self._warps[0]
        warp = self._warps.popleft()
        warp.queued = False
        return warp

    def clear(self) -> None:
        self._warps.clear()


@dataclass(slots=True)
class AsyncOp:
    """Work of an engine: ``effect`` moves data, ``complete`` tells who waits. ``warp``, ``pc``: who
    issued it, for findings."""

    what: str
    warp: Warp
    pc: int
    effect: Callable[[], None] | None
    complete: Callable[[], None] | None = None
    finished: bool = False
    written: int = 0  # clock of its writes to global memory


@dataclass(slots=True)
class PendingLoad:
    """A tcgen05.ld or a wgmma that nobody has waited for: its segment, its clock (0: unchecked),
    what still has to move (None: it moved at issue), and what using its registers is."""

    pc: int
    clock: int
    effect: Callable[[], None] | None
    code: str = "tcgen05_ld_not_waited"


BulkCopy = tuple[AsyncOp, Any, int]  # the copy, its agent in the race detector, the agent's clock


@dataclass(slots=True)
class BulkGroups:
    """A thread's bulk copies out of shared memory: its open group, and the committed ones."""

    open: list[BulkCopy] = field(default_factory=list)
    committed: deque[list[BulkCopy]] = field(default_factory=deque)


class AsyncQueues:
    """Operations issued and not yet complete."""

    def __init__(self, policy: str, late: bool, rng: random.Random) -> None:
        self.at_once = not late and policy in ("round_robin", "run_until_blocked")
        self.late = late
        self._random = rng
        self._policy = policy
        self._queues: dict[Any, deque[AsyncOp]] = {}
        self._serial = 0
        self.current: AsyncOp | None = None  # whose effect is happening, for findings

    def __bool__(self) -> bool:
        return bool(self._queues)

    def issue(self, key: Any, op: AsyncOp) -> None:
        """``key``: the queue whose order the operation keeps; None: it keeps none."""
        if not self.late:
            self._effect(op)
            if self.at_once:
                self._finish(op)
                return
        if key is None:
            self._serial += 1
            key = self._serial
        self._queues.setdefault(key, deque()).append(op)

    def complete_one(self) -> bool:
        """Completes the next operation of some queue; False if there is none."""
        while self._queues:
            keys = list(self._queues)
            if self._policy == "adversarial":
                key = keys[-1]  # the newest first: nobody may rely on the order of queues
            elif self._policy == "random":
                key = self._random.choice(keys)
            else:
                key = keys[0]
            queue = self._queues[key]
            op = queue.popleft()
            if not queue:
                del self._queues[key]
            if not op.finished:
                self._run(op)
                return True
        return False

    def sometimes(self) -> None:
        """With the random policy work may complete at any time."""
        if self._queues and self._policy == "random" and self._random.random() < 0.125:
            self.complete_one()

    def force(self, op: AsyncOp) -> None:
        """Somebody waits for this operation by name: it completes now."""
        if not op.finished:
            self._run(op)

    def drain(self) -> None:
        while self.complete_one():
            pass

    def clear(self) -> None:
        self._queues.clear()

    def _run(self, op: AsyncOp) -> None:
        if self.late:
            self._effect(op)
        self._finish(op)

    def _effect(self, op: AsyncOp) -> None:
        if op.effect is not None:
            self.current = op
            op.effect()
            self.current = None

    def _finish(self, op: AsyncOp) -> None:
        op.finished = True
        if op.complete is not None:
            self.current = op
            op.complete()
            self.current = None
