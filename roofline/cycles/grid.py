"""From a few replayed work items to a whole launch.

The cycles of an item are a function of its key blocks: as replayed where it was replayed, linear in
between, and beyond the longest with the slope of the longer half. The items then go to the SMs in
the order of the grid, each to the first SM that is free (for a persistent kernel, round robin), so
that waves, tails and the imbalance of a causal mask are what they are.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from roofline.problem import Problem

#: Items beyond which the schedule is bounded and not simulated.
MAX_ITEMS = 1 << 18
T = TypeVar("T")


def settled(points: Sequence[T], length: Callable[[T], int]) -> list[T]:
    """The points from half the longest on, shortest first; at least two, if there are."""
    found = sorted(points, key=length)
    late = [point for point in found if 2 * length(point) >= length(found[-1])]
    return late if len(late) > 1 else found[-2:]


@dataclass(frozen=True)
class ItemCost:
    """Cycles of a work item by its key blocks. points: (blocks, cycles), rising.

    start: cycles before the first item of a persistent CTA. least: cycles of the busiest unit for a
    key block, below which no steady state is.
    """

    points: tuple[tuple[int, float], ...]
    start: float = 0.0
    least: float = 0.0

    @property
    def slope(self) -> float:
        """Cycles of one more key block in steady state.

        It is a difference of replays, each of which may have been lucky; the busiest unit was not.
        """
        found = settled(self.points, lambda point: point[0])
        (n0, c0), (n1, c1) = found[0], found[-1]
        slope = (c1 - c0) / (n1 - n0) if n1 > n0 else c1 / max(n1, 1)
        return max(slope, self.least)

    @property
    def overhead(self) -> float:
        """Cycles of an item that do not depend on its length, by the steady state."""
        longest = self.points[-1][0]
        late = [point for point in self.points if 2 * point[0] >= longest]
        return sum(cycles - self.slope * blocks for blocks, cycles in late) / len(late)

    def cycles(self, blocks: int) -> float:
        points = self.points
        at = bisect_left(points, (blocks, 0.0))
        if at < len(points) and points[at][0] == blocks:
            return points[at][1]
        if at == len(points) or len(points) == 1:
            return self.overhead + self.slope * blocks
        at = max(at, 1)
        (n0, c0), (n1, c1) = points[at - 1], points[at]
        return c0 + (c1 - c0) * (blocks - n0) / (n1 - n0)


@dataclass(frozen=True)
class Filled:
    """A grid on its SMs. cycles: until the last item is done; busy: share of the slots' cycles."""

    cycles: float
    items: int
    slots: int
    busy: float

    @property
    def waves(self) -> float:
        return self.items / self.slots


def item_cycles(cost: ItemCost, blocks: Sequence[int]) -> list[float]:
    """Cycles of each item, each length priced once."""
    priced = {n: cost.cycles(n) for n in set(blocks)}
    return [priced[n] for n in blocks]


def in_grid_order(blocks: Sequence[int], problem: Problem, longest_first: bool) -> list[int]:
    """Key blocks of all items in the order in which the grid starts them."""
    copies = problem.batch * problem.heads
    if longest_first:
        return [n for n in sorted(blocks, reverse=True) for _ in range(copies)]
    return list(blocks) * copies


def fill(cycles: Sequence[float], slots: int, gap: float, start: float, persistent: bool) -> Filled:
    """Items on ``slots``. gap: cycles between two CTAs of a slot; start: of a persistent CTA."""
    if persistent:
        ends = [start] * min(slots, max(len(cycles), 1))
        for i, length in enumerate(cycles):
            ends[i % len(ends)] += length
    elif len(cycles) > MAX_ITEMS:
        total = sum(cycles) + gap * len(cycles)
        ends = [total / slots + max(cycles) / 2] * slots
    else:
        ends = [0.0] * slots
        for length in cycles:
            heapq.heapreplace(ends, ends[0] + length + gap)
    last = max(ends)
    return Filled(last, len(cycles), slots, sum(ends) / (last * slots))
