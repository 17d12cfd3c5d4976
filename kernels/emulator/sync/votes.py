"""What warps contribute to a named barrier's reduction (PTX ISA 9.1 section 9.7.13.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Vote:
    """A warp's part: threads that voted and those that voted true, and what takes both sums over
    all warps when the barrier completes."""

    threads: int
    true: int
    put: Callable[[int, int], None]
