"""From a few replayed work items to a whole launch.

The cycles of an item are a function of its key blocks: as replayed where it was replayed, linear in
between, and beyond the longest with the slope of the longer half. The items then go to the SMs in
the order of the grid, each to the first SM that is free (for a persistent kernel, round robin), so
that waves, tails and the imbalance of a causal mask are what they are.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from roofline.problem import Problem

#: Items beyond which the schedule is bounded and not simulated.
MAX_ITEMS = 1 << 18


@dataclass(frozen=True)
class ItemCost:
    """Cycles of a work item by its key blocks. points: (blocks, cycles), rising.

    start: cycles before the first item of a persistent CTA.
    """

    points: tuple[tuple[int, float], ...]
    start: float = 0.0

    @property
    def _settled(self) -> tuple[tuple[int, float], ...]:
        """The points from half the longest item on."""
        longest = self.points[-1][0]
        return tuple(point for point in self.points if 2 * point[0] >= longest)

    @property
    def slope(self) -> float:
        """Cycles of one more key block in steady state."""
        settled = self._settled if len(self._settled) > 1 else self.points[-2:]
        if len(settled) == 1:
            blocks, cycles = settled[0]
            return cycles / max(blocks, 1)
        (n0, c0), (n1, c1) = settled[0], settled[-1]
        return (c1 - c0) / (n1 - n0)

    @property
    def overhead(self) -> float:
        """Cycles of an item that do not depend on its length, by the steady state."""
        settled = self._settled
        return sum(cycles - self.slope * blocks for blocks, cycles in settled) / len(settled)

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
