"""Livelocks: warps that run, and will go round in circles for ever.

While nobody changes memory or a barrier, a warp's next step follows from its own registers. If all
warps that can run come back to a state that they were in, and no asynchronous work is left, nothing
will ever change. States are compared with one kept, and that is renewed at growing intervals
(Brent's cycle detection), so that a loop of any length is found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .state import Warp

QUIET_STEPS = 1 << 13  # without an event, before anybody looks


@dataclass(slots=True)
class _Kept:
    """A state of a warp: its fragments, registers and local memory; how often it was looked at."""

    fragments: tuple[tuple[int, int, bool], ...]
    registers: NDArray[np.uint32]
    predicates: NDArray[np.uint32]
    local: NDArray[np.uint8]
    looks: int = 0
    renew: int = 8

    @classmethod
    def of(cls, warp: Warp, renew: int) -> _Kept:
        own = warp.registers
        local = warp.local.data.copy()
        return cls(_fragments(warp), own.r32.copy(), own.preds.copy(), local, renew=renew)

    def is_state_of(self, warp: Warp) -> bool:
        return (
            self.fragments == _fragments(warp)
            and np.array_equal(self.predicates, warp.registers.preds)
            and np.array_equal(self.registers, warp.registers.r32)
            and np.array_equal(self.local, warp.local.data)
        )


def _fragments(warp: Warp) -> tuple[tuple[int, int, bool], ...]:
    return tuple((f.mask, f.pc, f.wait is None) for f in warp.fragments)


class Circles:
    """Looks at warps while nothing happens."""

    def __init__(self) -> None:
        self._kept: dict[Warp, _Kept] = {}
        self._round: set[Warp] = set()

    def clear(self) -> None:
        """Something has happened."""
        self._kept.clear()
        self._round.clear()

    def look(self, warp: Warp, ready: Iterable[Warp]) -> bool:
        """The warp has had a turn; whether all that are ready go round in circles."""
        kept = self._kept.get(warp)
        if kept is None:
            self._kept[warp] = _Kept.of(warp, 8)
            return False
        if kept.is_state_of(warp):
            self._round.add(warp)
            return all(other in self._round for other in ready)
        kept.looks += 1
        if kept.looks >= kept.renew:
            self._kept[warp] = _Kept.of(warp, 2 * kept.renew)
        return False
