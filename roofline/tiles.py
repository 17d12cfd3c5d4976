"""Which tile: every candidate priced for a problem, ranked, the winner and the losers explained.

An iteration of a CTA takes about as long as the longest of

    mma    the tile's MMAs one after another at their measured intervals
    smem   operand bytes at the SMEM port
    exp    exponentials, with the emulated share that serves the tile best
    issue  warp instructions of the softmax at the issue rate
    chain  what one query tile cannot overlap with itself (`roofline.costs`)

and a work item adds its first load, its first chain and its epilogue once. Items go to the SMs
longest first; L2 and HBM traffic bound the whole. Latencies are those of this project's kernel as
the cycle model replays it, and for a tile without a kernel the same: a forecast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from kernels.common.plan import KernelPlan, PlanError
from roofline.budgets import Budget
from roofline.candidates import Candidate, candidates
from roofline.costs import Cost, calibration, item_cycles
from roofline.decisions import Decisions, decide, kernel_dtype, kernel_gpu
from roofline.errors import RooflineError
from roofline.gpus import Gpu
from roofline.problem import Bounds, Problem, bounds, makespan
from roofline.tile import Tile

#: Emulated shares of exp2 that are tried: none to half, in sixteenths.
SHARES = tuple(Fraction(i, 16) for i in range(9))
#: Predicted times this close are a tie, for the chain meets its replays within 3 % in the mean: one
#: CTA, one score tile, fewer query stages go first.
TIE = 1.03
#: A cause of less than this is not named.
NAMED = 1.005


@dataclass(frozen=True)
class Priced:
    """A legal candidate with its predicted time for a problem.

    iteration: cycles of one KV iteration by what it might wait for; item_cycles: what a work item
    adds once; plan, decisions: the kernel plan with this tile and why its other fields are what
    they are, None if no kernel here has it.
    """

    candidate: Candidate
    exp2_share: Fraction
    iteration: Mapping[str, float]
    item_cycles: float
    limits: Bounds
    plan: KernelPlan | None
    decisions: Decisions | None

    @property
    def tile(self) -> Tile:
        return self.candidate.tile

    @property
    def iteration_cycles(self) -> float:
        return calibration(self.tile).cycles(self.iteration.values())

    @property
    def bound(self) -> str:
        """What one iteration waits for most, joined by "+" on a tie (to the cycle)."""
        top = round(max(self.iteration.values()))
        return "+".join(name for name, value in self.iteration.items() if round(value) == top)

    @cached_property
    def sm_seconds(self) -> float:
        """Until the last SM is done."""
        work: Counter[int] = Counter()
        for length, count in self.limits.work.items():
            work[round(self._item(length))] += count
        return makespan(work, self._slots) / self._clock_hz

    @property
    def seconds(self) -> float:
        return max(self.sm_seconds, self.limits.l2_seconds, self.limits.hbm_seconds)

    @property
    def tflops(self) -> float:
        return float(self.limits.problem.flops(self.tile)) / self.seconds / 1e12

    @cached_property
    def busy_cycles(self) -> float:
        """Cycles of all work items together, on one SM (or pair) each."""
        return sum(count * self._item(length) for length, count in self.limits.work.items())

    @property
    def occupancy(self) -> float:
        """Share of the SM time in which items run."""
        return self.busy_cycles / (self.sm_seconds * self._clock_hz * self._slots)

    @property
    def cycles_per_score(self) -> float:
        """SM cycles a computed score takes, starts and ends left out."""
        return self.iteration_cycles / (self.tile.tile_m * self.tile.tile_n)

    @property
    def computed_share(self) -> float:
        """Scores computed over scores visible: 1 plus what masks and ragged ends waste."""
        p = self.limits.problem
        visible = p.visible_share * p.seqlen * p.seqlen_k * p.batch * p.heads
        return self.limits.tiles * self.tile.tile_m * self.tile.tile_n / float(visible)

    @property
    def overhead_share(self) -> float:
        """Share of the busy cycles that starts and ends of work items take."""
        return sum(self.limits.work.values()) * self.item_cycles / self.busy_cycles

    @property
    def _slots(self) -> int:
        return max(1, int(self.tile.gpu["sms"].value) // self.tile.ctas)

    @property
    def _clock_hz(self) -> float:
        return float(self.tile.gpu["clock"].value) * 1e9

    def _item(self, iterations: int) -> float:
        return iterations * self.iteration_cycles + self.item_cycles

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; cycles are integers, times in microseconds."""
        c = self.candidate
        return {
            "tile": f"{self.tile.tile_m}x{self.tile.tile_n}",
            "ctas": self.tile.ctas,
            "q_stages": c.q_stages,
            "s_stages": c.s_stages,
            "kv_stages": c.kv_stages,
            "smem_bytes": c.smem_bytes,
            "tmem_columns": c.tmem_columns or None,
            "registers": c.registers or None,
            "exp2_share": float(self.exp2_share),
            "iteration": {name: round(value) for name, value in self.iteration.items()},
            "iteration_cycles": round(self.iteration_cycles),
            "bound": self.bound,
            "item_overhead": round(self.item_cycles),
            "occupancy": round(self.occupancy, 4),
            "l2_us": round(self.limits.l2_seconds * 1e6, 3),
            "hbm_us": round(self.limits.hbm_seconds * 1e6, 3),
            "us": round(self.seconds * 1e6, 3),
            "tflops": round(self.tflops, 1),
            "built": self.plan is not None,
        }


@dataclass(frozen=True)
class Ranking:
    """Candidates for a problem: legal ones best first with their places, and those without room."""

    problem: Problem
    priced: tuple[Priced, ...]
    refused: tuple[Candidate, ...]
    places: tuple[int, ...]

    @property
    def winner(self) -> Priced:
        return self.priced[0]

    @property
    def best_built(self) -> Priced | None:
        """The best tile that a kernel of this project has."""
        return next((p for p in self.priced if p.plan), None)

    def place(self, one: Priced) -> int:
        """Its place among the tiles that fit, from 1."""
        return self.places[self.priced.index(one)]

    def reason(self, one: Priced) -> str:
        """Why a tile wins, or why it is not the winner."""
        if one is self.winner:
            return f"waits for {_waits(one)}; SMs {one.occupancy:.0%} busy"
        if one.seconds <= self.fastest_seconds * TIE:
            return _tie_reason(self.winner, one)
        return _loss(self.winner, one)

    @property
    def fastest_seconds(self) -> float:
        """Of all tiles; the winner ties with it."""
        return min(p.seconds for p in self.priced)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: ``tiles`` in order, each with its ``reason``; ``refused`` with theirs."""
        best = self.best_built
        return {
            "gpu": self.winner.tile.gpu.name,
            "tiles": [
                {"place": place} | p.to_dict() | {"reason": self.reason(p)}
                for place, p in zip(self.places, self.priced, strict=True)
            ],
            "built": best.to_dict() if best else None,
            "refused": [
                {
                    "tile": f"{c.tile.tile_m}x{c.tile.tile_n}",
                    "ctas": c.tile.ctas,
                    "q_stages": c.q_stages,
                    "s_stages": c.s_stages,
                    "reason": "; ".join(str(e) for e in c.excesses),
                }
                for c in self.refused
            ],
        }


def rank(
    gpu: Gpu,
    problem: Problem,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    direction: str = "forward",
    dtype: str = "bf16",
) -> Ranking:
    """Every tile for a problem on a GPU; RooflineError if none fits."""
    dim_v = head_dim if head_dim_v is None else head_dim_v
    found = list(candidates(gpu, head_dim, dim_v, direction=direction, dtype=dtype))
    refused = tuple(c for c in found if not c.legal)
    priced = [price(c, problem) for c in found if c.legal]
    if not priced:
        excesses = "; ".join(str(e) for e in found[0].excesses)
        raise RooflineError(
            f"head_dim {head_dim}/{dim_v}: no tile fits {gpu.name}; the smallest: {excesses}"
        )
    fastest = min(p.seconds for p in priced)

    def order(p: Priced) -> tuple[float, ...]:
        c = p.candidate
        if p.seconds > fastest * TIE:
            return (1, p.seconds)
        return (0, p.tile.ctas, c.s_stages, c.q_stages, -p.tile.tile_n, p.seconds)

    places = tuple(range(1, len(priced) + 1))
    return Ranking(problem, tuple(sorted(priced, key=order)), refused, places)


def only_tile(ranking: Ranking, tile_m: int, tile_n: int) -> Ranking:
    """The ranking's winner and every variant of one tile; RooflineError if it does not fit.

    The error says by how many bytes, columns or registers.
    """

    def same(tile: Tile) -> bool:
        return (tile.tile_m, tile.tile_n) == (tile_m, tile_n)

    ranked = zip(ranking.places, ranking.priced, strict=True)
    kept = [(i, p) for i, p in ranked if i == 1 or same(p.tile)]
    refused = tuple(c for c in ranking.refused if same(c.tile))
    name, gpu = f"tile {tile_m}x{tile_n}", ranking.winner.tile.gpu.name
    if not any(same(p.tile) for _, p in kept):
        if not refused:
            known = [p.tile for p in ranking.priced] + [c.tile for c in ranking.refused]
            rows, keys = (sorted({getattr(t, f) for t in known}) for f in ("tile_m", "tile_n"))
            raise RooflineError(f"{name}: not considered; rows are of {rows}, keys of {keys}")
        leanest = min(refused, key=lambda c: (len(c.excesses), c.smem_bytes, c.tmem_columns))
        excesses = "; ".join(str(e) for e in leanest.excesses)
        raise RooflineError(f"{name} does not fit {gpu}: {excesses}; take a smaller tile")
    places, priced = zip(*kept, strict=True)
    return Ranking(ranking.problem, priced, refused, places)


def price(candidate: Candidate, problem: Problem) -> Priced:
    """The predicted time of one candidate, with the exp2 share that serves it best."""
    tile = candidate.tile
    cost = Cost.of(candidate)
    known = calibration(tile)
    share = min(SHARES, key=lambda s: (known.cycles(cost.iteration(float(s)).values()), s))
    built = _built(candidate, problem, share)
    plan = None
    if built is not None:
        plan, _ = built
        share = Fraction(plan.exp2_emulated_share)
        candidate = replace(
            candidate,
            kv_stages=plan.kv_stages,
            smem_bytes=plan.smem_bytes,
            tmem_columns=plan.tmem_cols,
            registers=plan.softmax_registers,
        )
    iteration = cost.iteration(float(share))
    item = item_cycles(tile, iteration.get("chain", 0.0), problem.causal)
    limits = bounds(problem, Budget(tile, share))
    return Priced(candidate, share, iteration, item, limits, plan, built[1] if built else None)


def _built(
    candidate: Candidate, problem: Problem, share: Fraction
) -> tuple[KernelPlan, Decisions] | None:
    """The plan of the kernel that takes this tile, as decided; None if there is none.

    share: of exp2 by the closed forms, for a GPU that nothing was replayed on.
    """
    tile = candidate.tile
    if tile.direction == "backward" or tile.head_dim != tile.head_dim_v:
        return None
    if candidate.s_stages > 1 or problem.visible is not None:
        return None
    asked: dict[str, Any] = {
        "tile_m": candidate.rows,
        "q_stages": candidate.q_stages,
        "tile_n": tile.tile_n,
        "ctas": tile.ctas,
    }
    try:
        decided = decide(tile.gpu, tile.format, tile.head_dim, problem.causal, share)
        plan = KernelPlan.forward(
            gpu=kernel_gpu(tile.gpu),
            dtype=kernel_dtype(tile.format),
            head_dim=tile.head_dim,
            causal=problem.causal,
            **asked,
            **decided.fields,
        )
    except PlanError:
        return None
    return plan, decided


_NAMES = {
    "mma": "the MMAs",
    "smem": "SMEM reads",
    "exp": "the exponentials",
    "issue": "issue slots",
    "chain": "the chain of a query tile",
}


def _waits(p: Priced) -> str:
    return " and ".join(_NAMES[name] for name in p.bound.split("+"))


def _loss(winner: Priced, loser: Priced) -> str:
    """The causes of the difference, largest first."""
    gains = {
        f"more cycles a score, it waits for {_waits(loser)}": loser.cycles_per_score
        / winner.cycles_per_score,
        "more scores computed than visible": loser.computed_share / winner.computed_share,
        "more time in starts and ends": (1 - winner.overhead_share) / (1 - loser.overhead_share),
        "more idle SMs": winner.occupancy / loser.occupancy,
    }
    if loser.seconds > loser.sm_seconds:
        gains = {"more time, it waits for L2 or HBM": loser.seconds / winner.seconds}
    causes = sorted(((ratio, text) for text, ratio in gains.items() if ratio > NAMED), reverse=True)
    return "; ".join(f"{ratio - 1:.1%} {text}" for ratio, text in causes[:2]) or "slower by a bit"


def _tie_reason(winner: Priced, loser: Priced) -> str:
    """What makes it less simple."""
    a, b = winner.candidate, loser.candidate
    if b.tile.ctas > a.tile.ctas:
        less = "needs pairs of CTAs"
    elif b.s_stages > a.s_stages:
        less = "needs a second score tile"
    elif b.q_stages > a.q_stages:
        less = "needs more query stages"
    else:
        less = "has more iterations, each with its barriers"
    return f"as fast to {TIE - 1:.1%}, but {less}"
