"""The kernel's plan for a GPU, and why: tile, stages, CTAs, share of exp2, registers, tile order.

`choose` ranks every tile (`roofline.tiles`), takes the best that a kernel has, and sets what that
kernel leaves open from what is known of it (`roofline.evidence`): registers as ptxas needs them,
cycles as the cycle model replays them; where there is no such row, from the closed forms. Each
decision has a sentence. `fa4` builds its plans from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from kernels.common.plan import KernelPlan
from roofline.decisions import no_kernel
from roofline.errors import RooflineError
from roofline.formats import Format, find_format
from roofline.gpus import GPU_NAMES, Gpu, find_gpu
from roofline.problem import Problem, published_problem
from roofline.tiles import Priced, Ranking, rank


@dataclass(frozen=True)
class Choice:
    """What to run on a GPU. preferred: the tile that ranks first, whether or not a kernel has it.

    plan: of the kernel there is, None if none takes this; no_kernel: then every rule that is in the
    way. reasons: a sentence by decision, in the order of a plan.
    """

    gpu: Gpu
    problem: Problem
    ranking: Ranking
    plan: KernelPlan | None
    no_kernel: tuple[str, ...]
    reasons: Mapping[str, str]

    @property
    def preferred(self) -> Priced:
        return self.ranking.winner

    @property
    def plan_fields(self) -> dict[str, Any]:
        """The fields of the plan that were chosen, for `KernelPlan.forward`; {} without a plan."""
        return {} if self.plan is None else {name: getattr(self.plan, name) for name in CHOSEN}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        ranking = self.ranking.to_dict()
        return {
            "gpu": self.gpu.name,
            "problem": self.problem.to_dict(),
            "preferred": ranking["tiles"][0],
            "kernel": self.plan is not None,
            "no_kernel": list(self.no_kernel),
            "fields": self.plan_fields,
            "reasons": dict(self.reasons),
            "tiles": ranking["tiles"],
        }


#: Fields of a plan that `choose` decides.
CHOSEN: tuple[str, ...] = (
    "tile_m",
    "q_stages",
    "tile_n",
    "ctas",
    "kv_stages",
    "exp2_emulated_share",
)
CHOSEN += ("softmax_registers", "correction_registers", "other_registers", "tile_order")


def choose(
    gpu: str | Gpu,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    dtype: str = "bf16",
    causal: bool = False,
    problem: Problem | None = None,
) -> Choice:
    """The plan of the forward pass, and why.

    problem: what the time is predicted for; None is the published benchmark, so that the answer
    holds for every shape and a kernel is compiled once. RooflineError for what has no answer.
    """
    found = find_gpu(gpu) if isinstance(gpu, str) else gpu
    if problem is None:
        problem = published_problem(head_dim, causal=causal)
    dim_v = head_dim if head_dim_v is None else head_dim_v
    fmt = find_format(dtype)
    if found.name in GPU_NAMES and found is find_gpu(found.name):
        return _of_builtin(found.name, head_dim, dim_v, fmt, problem)
    return _choose(found, head_dim, dim_v, fmt, problem)


@lru_cache(maxsize=256)  # every call of fa4.attention asks for its plan
def _fields_of(gpu: str, head_dim: int, dtype: str, causal: bool) -> Mapping[str, Any]:
    try:
        return MappingProxyType(choose(gpu, head_dim, dtype=dtype, causal=causal).plan_fields)
    except RooflineError:
        return MappingProxyType({})


def chosen_fields(gpu: str, head_dim: int, *, dtype: str, causal: bool) -> dict[str, Any]:
    """`Choice.plan_fields` of a built-in GPU; {} for what no kernel takes and no tile fits.

    Names of another type than theirs are for the plan to refuse.
    """
    if type(head_dim) is not int or not isinstance(dtype, str) or not isinstance(causal, bool):
        return {}
    return dict(_fields_of(gpu, head_dim, dtype, causal))


@lru_cache(maxsize=64)
def _of_builtin(gpu: str, head_dim: int, dim_v: int, fmt: Format, problem: Problem) -> Choice:
    return _choose(find_gpu(gpu), head_dim, dim_v, fmt, problem)


def _choose(gpu: Gpu, head_dim: int, dim_v: int, fmt: Format, problem: Problem) -> Choice:
    ranking = rank(gpu, problem, head_dim, dim_v, dtype=fmt.name)
    best = ranking.best_built
    if best is None or best.plan is None or best.decisions is None:
        rules = no_kernel(gpu, fmt, head_dim, dim_v) or ("no kernel has a tile that fits",)
        return Choice(gpu, problem, ranking, None, rules, MappingProxyType({}))
    reasons = {"tile": _tile_reason(ranking, best)} | dict(best.decisions.reasons)
    return Choice(gpu, problem, ranking, best.plan, (), MappingProxyType(reasons))


def _tile_reason(ranking: Ranking, best: Priced) -> str:
    tile, place = best.tile, ranking.place(best)
    ctas = "1 CTA" if tile.ctas == 1 else f"{tile.ctas} CTAs"
    text = f"{tile.tile_m}x{tile.tile_n}, {ctas}, the only tile with a kernel; "
    if place == 1:
        return text + f"first of {len(ranking.priced)} that fit: it {ranking.reason(best)}"
    winner = ranking.winner
    return (
        f"{text}number {place} of {len(ranking.priced)} that fit, "
        f"{best.seconds / winner.seconds - 1:.1%} behind {winner.tile.tile_m}x{winner.tile.tile_n}"
        f"{', 2 CTAs' if winner.tile.ctas == 2 else ''}: {ranking.reason(best)}"
    )
