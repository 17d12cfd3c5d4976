"""Order between the lanes of one warp.

Since sm_70 lanes are threads of their own: that they execute together orders nothing (PTX ISA 9.1
sections 8.9.5 and 9.7.13.2), and ptxas, which sees one thread, may move a load above another lane's
store. What orders them is a meeting: bar.warp.sync, or a barrier of the CTA or the cluster. The
profile ``silicon`` counts every instruction that lanes converge for (.sync: shfl, vote, elect,
ldmatrix, ...) as one, ``isa`` does not: they promise no order of memory accesses.

Time is the clock of the warp's agent, which ticks behind a meeting. An access is recorded as a tag:
its clock, and who of the warp made it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# In the place of a lane: several that read the cell together or wrote one value there; and several
# whose atomic operations did different things to it.
MANY, ATOMICS = 32, 33
_SHIFT = 6
_WHO = (1 << _SHIFT) - 1
FULL = 0xFFFFFFFF


class LaneOrder:
    """What the lanes of a warp know of each other's accesses."""

    __slots__ = ("copies_waited", "known", "met", "since")

    def __init__(self) -> None:
        self.met = 0  # everybody knows everybody's accesses up to this clock
        # Clocks where only some lanes met: known[i, j], what i knows of j's; index 32 is MANY.
        self.known: NDArray[np.int32] | None = None
        self.since = False  # whether anybody accessed memory since the clock ticked
        # By the clock of the warp's cp.async: the warp's own clock when it had waited for it.
        self.copies_waited = np.zeros(16, np.int32)

    def meet(self, members: int, alive: int, clock: int) -> None:
        """The lanes of ``members`` know each other's accesses up to the clock."""
        if not alive & ~members:
            self.met, self.known, self.since = clock, None, False
            return
        known, lanes = self._matrix(), _lanes(members & FULL)
        knows = known[lanes].max(axis=0)
        knows[lanes] = clock
        known[lanes] = knows
        self._many(known)

    def acquire(self, lanes: int, alive: int, clock: int) -> None:
        """The lanes learn of every lane's accesses up to the clock: somebody else brought it."""
        if clock <= self.met:
            return
        if not alive & ~lanes:
            self.met = clock
            if self.known is not None:
                np.maximum(self.known, clock, out=self.known)
            return
        known, chosen = self._matrix(), _lanes(lanes & FULL)
        known[chosen] = np.maximum(known[chosen], clock)
        self._many(known)

    def waited(self, first: int, last: int, clock: int) -> None:
        """Copies with these clocks have been waited for at the warp's clock."""
        if last >= self.copies_waited.size:
            grown = np.zeros(2 * last, np.int32)
            grown[: self.copies_waited.size] = self.copies_waited
            self.copies_waited = grown
        self.copies_waited[first : last + 1] = clock

    def _matrix(self) -> NDArray[np.int32]:
        if self.known is None:
            self.known = np.full((MANY + 1, MANY + 1), self.met, np.int32)
        return self.known

    @staticmethod
    def _many(known: NDArray[np.int32]) -> None:
        """For cells that several lanes accessed: as much as the one that knows or is known best."""
        known[MANY, :MANY] = known[:MANY, :MANY].max(axis=0)
        known[:, MANY] = known[:, :MANY].max(axis=1)


@dataclass(slots=True)
class ByLanes:
    """An access by lanes of a warp. ``agents``: the warp's own, ``copies``: that of its cp.async;
    ``who``: the lane of each cell, or MANY."""

    order: LaneOrder
    agents: tuple[int, ...]
    copies: int
    clock: int
    who: NDArray[np.int32]

    def at(self, chosen: NDArray[np.bool_]) -> ByLanes:
        """The same for some of the cells."""
        return replace(self, who=self.who[chosen])

    def tags(self) -> NDArray[np.int32]:
        return self.who + (self.clock << _SHIFT)

    def merged(self, before: NDArray[np.int32]) -> NDArray[np.int32]:
        """Tags of reads behind others that no meeting has ended."""
        tags = self.tags()
        threshold = self.order.met + 1 << _SHIFT
        if int(before.max()) >= threshold:
            several = (before >= threshold) & ((before ^ tags) & _WHO != 0)
            tags[several] = (self.clock << _SHIFT) + MANY
        return tags

    def late(self, before: NDArray[np.int32], same_value: bool) -> NDArray[np.bool_] | None:
        """Which of the earlier accesses with these tags are other lanes' and not ordered before
        this one; None for none. ``same_value``: MANY wrote one value, so whose does not matter."""
        order = self.order
        if int(before.max()) < order.met + 1 << _SHIFT:
            return None
        clocks, who = before >> _SHIFT, before & _WHO
        late = (clocks > order.met) & ((who != self.who) | (self.who >= MANY))
        if same_value:
            late &= who != MANY
        if order.known is not None:
            late &= clocks > order.known[np.minimum(self.who, MANY), np.minimum(who, MANY)]
        return late if late.any() else None

    def waited(self, clocks: NDArray[np.int64], tags: NDArray[np.int32]) -> NDArray[np.int32]:
        """Tags of the warp's cp.async: for other lanes they happened when they were waited for."""
        at = self.order.copies_waited
        return (at[np.minimum(clocks, at.size - 1)] << _SHIFT) + (tags & _WHO)


def who_of(tag: int) -> int:
    """The lane of a tag, MANY or ATOMICS."""
    return tag & _WHO


@lru_cache(maxsize=1024)
def _lanes(mask: int) -> NDArray[np.int32]:
    return np.array([lane for lane in range(32) if mask >> lane & 1], np.int32)


@lru_cache(maxsize=1024)
def lanes_of(mask: int, words: int) -> NDArray[np.int32]:
    """The lane of each cell, where each lane of the mask touches ``words`` of them."""
    return _lanes(mask).repeat(words)


def sorted_cells(
    cells: NDArray[np.int64], who: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int32], bool]:
    """Cells in order, each once, with the lanes that touch them, and whether lanes share one."""
    if cells.size == 1:
        return cells, who, False
    steps = cells[1:] - cells[:-1]
    lowest = int(steps.min())
    if lowest > 0:
        return cells, who, False
    if lowest < 0:
        at = np.argsort(cells, kind="stable")
        cells, who = cells[at], who[at]
        steps = cells[1:] - cells[:-1]
    fresh = np.empty(cells.size, np.bool_)
    fresh[0] = True
    np.not_equal(steps, 0, out=fresh[1:])
    if fresh.all():
        return cells, who, False
    starts = np.flatnonzero(fresh)
    shared = np.maximum.reduceat(who, starts) != np.minimum.reduceat(who, starts)
    who = np.where(shared, np.int32(MANY), who[starts])
    return cells[starts], who, bool(shared.any())


def collision(addrs: NDArray[np.int64], data: NDArray[np.uint8]) -> tuple[int, int] | None:
    """Two rows (of executing lanes) that store different bytes to one address. Accesses of equal
    width are aligned, so that they overlap whole or not at all."""
    order = np.argsort(addrs, kind="stable")
    at, rows = addrs[order], data[order]
    wrong = (at[1:] == at[:-1]) & (rows[1:] != rows[:-1]).any(axis=1)
    if not wrong.any():
        return None
    k = int(wrong.argmax())
    return int(order[k]), int(order[k + 1])
