"""A whole attention problem: its work, its traffic, and the time no kernel with this tile can beat.

Traffic is counted at two levels. *HBM*: every tensor once, what must move at the least. *L2*: what
the CTAs load and store, K and V once for every tile of queries that sees them. Beside it stands the
HBM traffic of materialised attention, which writes S and P out.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from roofline.budgets import Budget
from roofline.errors import RooflineError
from roofline.terms import ACCUMULATOR_BYTES, ceil_div
from roofline.tile import Tile

MAX_SEQLEN = 1 << 31
#: Work items beyond which the schedule is bounded and not simulated: so many fill every SM so often
#: that the last round hardly counts.
MAX_SIMULATED_ITEMS = 4096
#: The published benchmarks (arXiv 2603.05451, section 5): tokens, hidden size, and the length of
#: sequences that stands for the others.
TOKENS, HIDDEN, SEQLEN = 32768, 2048, 8192


@dataclass(frozen=True)
class Problem:
    """What is asked: batch, lengths and heads; ``causal`` aligns bottom-right.

    visible: share of the (query, key) pairs and of the tiles that a mask leaves, if it is neither
    dense nor causal.
    """

    batch: int
    seqlen: int
    seqlen_k: int
    heads: int
    kv_heads: int
    causal: bool = False
    visible: Fraction | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "seqlen", "seqlen_k", "heads", "kv_heads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise RooflineError(f"{name} {value!r}: must be a positive integer")
            if value > MAX_SEQLEN:
                raise RooflineError(f"{name} {value}: at most {MAX_SEQLEN}")
        if self.heads % self.kv_heads:
            raise RooflineError(
                f"heads {self.heads}: must be a multiple of kv_heads, {self.kv_heads}"
            )
        if self.visible is not None and not 0 < self.visible <= 1:
            raise RooflineError(f"visible {float(self.visible)}: must be above 0 and at most 1")
        if self.visible is not None and self.causal:
            raise RooflineError("visible and causal exclude each other: give the share or the mask")

    @property
    def visible_share(self) -> Fraction:
        """Share of the (query, key) pairs that are computed."""
        if self.visible is not None:
            return self.visible
        if not self.causal:
            return Fraction(1)
        # Row r sees r + 1 + seqlen_k - seqlen keys; rows before the first key see none.
        last = self.seqlen_k
        first = max(1, self.seqlen_k - self.seqlen + 1)
        pairs = (first + last) * (last - first + 1) // 2
        return Fraction(pairs, self.seqlen * self.seqlen_k)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "batch": self.batch,
            "seqlen": self.seqlen,
            "seqlen_k": self.seqlen_k,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "causal": self.causal,
            "visible_share": round(float(self.visible_share), 6),
        }

    def keys_seen(self, row: int) -> int:
        """Keys that query ``row`` sees, the diagonal included."""
        if not self.causal:
            return self.seqlen_k
        return min(max(row + 1 + self.seqlen_k - self.seqlen, 0), self.seqlen_k)

    def flops(self, tile: Tile) -> Fraction:
        """Floating-point operations of the visible pairs: the matrix products only."""
        d, dv = tile.head_dim, tile.head_dim_v
        per_pair = 2 * (d + dv) if tile.direction == "forward" else 2 * (3 * d + 2 * dv)
        pairs = self.seqlen * self.seqlen_k * self.visible_share
        return Fraction(per_pair * pairs * self.heads * self.batch)


def published_problem(head_dim: int, seqlen: int = SEQLEN, causal: bool = False) -> Problem:
    """32k tokens and a hidden size of 2048, as the published benchmarks have."""
    heads = max(1, HIDDEN // head_dim)
    return Problem(max(1, TOKENS // seqlen), seqlen, seqlen, heads, heads, causal)


def visible_share(value: float) -> Fraction:
    """The exact fraction of a decimal share; RooflineError if it is none above 0 and up to 1."""
    try:
        share = Fraction(str(value))
    except ValueError:
        raise RooflineError(f"visible {value!r}: must be a number from 0 to 1") from None
    if not 0 < share <= 1:
        raise RooflineError(f"visible {value}: must be above 0 and at most 1")
    return share


@dataclass(frozen=True)
class Bounds:
    """What a problem costs at the least with one tile on one GPU. Bytes, and seconds at peak."""

    problem: Problem
    budget: Budget
    work: Counter[int]
    hbm_bytes: int
    l2_bytes: int
    materialised_bytes: int
    materialised_peak_bytes: int

    @property
    def tiles(self) -> int:
        """KV iterations of all CTAs."""
        return sum(length * count for length, count in self.work.items()) * self._ctas

    @property
    def sm_cycles(self) -> int:
        """Cycles until the last SM is done, longest work first, at the tile's published budget."""
        clusters = max(1, int(self.budget.tile.gpu["sms"].value) // self._ctas)
        return makespan(self.work, clusters) * self.budget.cycles

    @property
    def sm_seconds(self) -> float:
        return float(self.sm_cycles / self.budget.tile.gpu["clock"].exact) * 1e-9

    @property
    def hbm_seconds(self) -> float:
        return self.hbm_bytes / (self._tb_per_s("hbm_bandwidth") * 1e12)

    @property
    def l2_seconds(self) -> float:
        return self.l2_bytes / (self._tb_per_s("l2_bandwidth") * 1e12)

    @property
    def materialised_seconds(self) -> float:
        """HBM time of materialised attention's traffic alone."""
        return self.materialised_bytes / (self._tb_per_s("hbm_bandwidth") * 1e12)

    @property
    def seconds(self) -> float:
        """The longest of the three: prologues, epilogues and launches come on top."""
        return max(self.sm_seconds, self.hbm_seconds, self.l2_seconds)

    @property
    def bound(self) -> str:
        """ "sm", "l2" or "hbm", joined by "+" on a tie."""
        times = {"sm": self.sm_seconds, "l2": self.l2_seconds, "hbm": self.hbm_seconds}
        return "+".join(name for name, value in times.items() if value == max(times.values()))

    @property
    def tflops(self) -> float:
        """TFLOP/s at ``seconds``, counting visible pairs only."""
        return float(self.problem.flops(self.budget.tile)) / self.seconds / 1e12

    @property
    def occupancy(self) -> float:
        """Share of the SM cycles spent on tiles: 1 less the waste of the last wave."""
        sms = int(self.budget.tile.gpu["sms"].value)
        return self.tiles * self.budget.cycles / (self.sm_cycles * sms)

    @property
    def _ctas(self) -> int:
        return self.budget.tile.ctas

    def _tb_per_s(self, field: str) -> float:
        return float(self.budget.tile.gpu[field].value)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: bytes as integers, times in microseconds."""
        p = self.problem
        return p.to_dict() | {
            "flops": int(p.flops(self.budget.tile)),
            "tiles": self.tiles,
            "occupancy": round(self.occupancy, 4),
            "sm_cycles": self.sm_cycles,
            "sm_us": round(self.sm_seconds * 1e6, 3),
            "l2_bytes": self.l2_bytes,
            "l2_us": round(self.l2_seconds * 1e6, 3),
            "hbm_bytes": self.hbm_bytes,
            "hbm_us": round(self.hbm_seconds * 1e6, 3),
            "bound": self.bound,
            "us": round(self.seconds * 1e6, 3),
            "tflops": round(self.tflops, 1),
            "materialised_bytes": self.materialised_bytes,
            "materialised_us": round(self.materialised_seconds * 1e6, 3),
            "materialised_peak_bytes": self.materialised_peak_bytes,
        }


def bounds(problem: Problem, budget: Budget) -> Bounds:
    """The lower bounds of a problem with the budget's tile."""
    tile = budget.tile
    forward = tile.direction == "forward"
    work = _forward_work(problem, tile) if forward else _backward_work(problem, tile)
    if not work:
        raise RooflineError("no query sees a key: there is nothing to compute")
    hbm, l2 = (_forward_bytes if forward else _backward_bytes)(problem, tile, work)
    materialised, peak = _materialised_bytes(problem, tile)
    return Bounds(problem, budget, work, int(hbm), int(l2), int(materialised), int(peak))


def _forward_work(problem: Problem, tile: Tile) -> Counter[int]:
    """KV iterations of a work item (a CTA, or a pair) -> number of such items."""
    rows = tile.tile_m * tile.ctas
    copies = problem.batch * problem.heads
    blocks = ceil_div(problem.seqlen, rows)
    work: Counter[int] = Counter()
    if not problem.causal:
        share = problem.visible_share
        length = ceil_div(problem.seqlen_k * share, tile.tile_n)
        return Counter({length: blocks * copies})
    for block in range(blocks):
        last = min((block + 1) * rows, problem.seqlen) - 1
        length = ceil_div(problem.keys_seen(last), tile.tile_n)
        if length:
            work[length] += copies
    return work


def _backward_work(problem: Problem, tile: Tile) -> Counter[int]:
    """Query iterations of a work item, which owns a block of keys -> number of such items."""
    keys = tile.tile_n * tile.ctas
    copies = problem.batch * problem.heads
    blocks = ceil_div(problem.seqlen_k, keys)
    if not problem.causal:
        length = ceil_div(problem.seqlen * problem.visible_share, tile.tile_m)
        return Counter({length: blocks * copies})
    work: Counter[int] = Counter()
    rows = ceil_div(problem.seqlen, tile.tile_m)
    for block in range(blocks):
        # The first row that sees the block's first key; earlier query tiles are skipped.
        first = max(0, block * keys - (problem.seqlen_k - problem.seqlen))
        length = rows - first // tile.tile_m
        if length > 0:
            work[length] += copies
    return work


def _forward_bytes(p: Problem, tile: Tile, work: Counter[int]) -> tuple[Fraction, Fraction]:
    """(HBM, L2) bytes of the forward pass."""
    e, d, dv = tile.format.element_bytes, tile.head_dim, tile.head_dim_v
    rows = p.batch * p.seqlen * p.heads
    own = rows * (d * e + dv * max(e, Fraction(2)) + 4)  # Q in; O and LSE out
    keys = p.batch * p.seqlen_k * p.kv_heads
    iterations = sum(length * count for length, count in work.items())
    # A pair loads each K and V tile once, half of it per CTA.
    return own + keys * (d + dv) * e, own + iterations * tile.tile_n * (d + dv) * e


def _backward_bytes(p: Problem, tile: Tile, work: Counter[int]) -> tuple[Fraction, Fraction]:
    """(HBM, L2) bytes of the backward pass: delta first, dQ accumulated in fp32, converted last."""
    e, d, dv = tile.format.element_bytes, tile.head_dim, tile.head_dim_v
    acc = ACCUMULATOR_BYTES
    rows, keys = p.batch * p.seqlen * p.heads, p.batch * p.seqlen_k * p.kv_heads
    prologue = rows * (2 * dv * e + 4 + d * acc)  # O and dO in; delta out; dQ accumulator zeroed
    epilogue = rows * d * (acc + e)  # dQ accumulator in, dQ out
    key_blocks = p.batch * p.seqlen_k * p.heads * (d + dv) * e  # K and V, once a query head
    gradients = keys * (d + dv) * e
    hbm = prologue + epilogue + 2 * gradients + rows * ((d + dv) * e + 8 + d * acc)
    iterations = sum(length * count for length, count in work.items())
    # A pair loads each Q and dO tile once, half of it per CTA, and adds each dQ tile once.
    tiles = iterations * tile.tile_m * ((d + dv) * e + 8 + d * acc)
    return hbm, prologue + epilogue + key_blocks + gradients + tiles


def _materialised_bytes(p: Problem, tile: Tile) -> tuple[Fraction, Fraction]:
    """(HBM bytes, bytes of the matrices held at once) when S and P are written out.

    Forward: S written, read by the softmax, P written, read by PV. Backward, with P kept: P read
    for dV, dP written, P and dP read and dS written by the softmax, dS read for dQ and for dK.
    """
    e, d, dv = tile.format.element_bytes, tile.head_dim, tile.head_dim_v
    rows, keys = p.batch * p.seqlen * p.heads, p.batch * p.seqlen_k * p.kv_heads
    matrix = Fraction(p.batch * p.heads * p.seqlen * p.seqlen_k) * e
    if tile.direction == "forward":
        return rows * (d + dv) * e + keys * (d + dv) * e + 4 * matrix, 2 * matrix
    products = rows * (3 * d + 2 * dv) * e + keys * 3 * (d + dv) * e
    return products + 7 * matrix, 3 * matrix


def makespan(work: Counter[int], slots: int) -> int:
    """Iterations until the last of ``slots`` is done when the longest items start first."""
    items = sum(work.values())
    total = sum(length * count for length, count in work.items())
    if len(work) == 1:
        (length,) = work
        return ceil_div(items, slots) * length
    if items > MAX_SIMULATED_ITEMS:
        return max(ceil_div(total, slots), max(work))
    ends = [0] * slots
    for length in sorted(work, reverse=True):
        for _ in range(work[length]):
            heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def item_lengths(problem: Problem, rows: int, keys: int) -> list[int]:
    """KV iterations of the work items of one head, in the order of their query rows."""
    lasts = (min(first + rows, problem.seqlen) - 1 for first in range(0, problem.seqlen, rows))
    return [ceil_div(problem.keys_seen(last), keys) for last in lasts]


def makespan_in_order(lengths: Sequence[float], slots: int) -> float:
    """When the last of ``slots`` is done if each takes the next item as soon as it is free."""
    ends = [0.0] * slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)
