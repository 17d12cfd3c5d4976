"""`roofline report`: a page about a kernel on a GPU, in Markdown, with plots if asked.

The page holds predictions over sequence lengths beside the ceilings, one key block unit by unit and
role by role, the tiles, the emulated share of exp2, and what it all stands on. A user's own timing
(`--measured-ms`) is put beside the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roofline.budgets import Budget
from roofline.cycles.hardware import latencies
from roofline.cycles.predict import Prediction, predict
from roofline.errors import RooflineError
from roofline.gpus import Gpu, find_gpu
from roofline.problem import Problem, published_problem
from roofline.tiles import Ranking, rank

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
SHARES = (0.0, 0.125, 0.25, 0.375, 0.5)
#: Published forward speeds of FlashAttention-4, TFLOP/s by seqlen (arXiv 2603.05451, figure 4).
PUBLISHED = {
    ("b200", 128, False): dict(zip(LENGTHS, (1355, 1468, 1532, 1579, 1601, 1613), strict=True)),
    ("b200", 128, True): dict(zip(LENGTHS, (744, 1053, 1279, 1426, 1526, 1576), strict=True)),
}


@dataclass(frozen=True)
class Report:
    """What the page and the plots show. sweep: by seqlen; shares: by emulated share of exp2."""

    gpu: Gpu
    head_dim: int
    causal: bool
    sweep: tuple[Prediction, ...]
    detail: Prediction
    shares: tuple[tuple[float, Prediction], ...]
    ranking: Ranking
    budget: Budget
    measured_ms: float | None

    @property
    def published(self) -> dict[int, int]:
        return PUBLISHED.get((self.gpu.name, self.head_dim, self.causal), {})

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "gpu": self.gpu.name,
            "head_dim": self.head_dim,
            "causal": self.causal,
            "sweep": [p.to_dict() for p in self.sweep],
            "detail": self.detail.to_dict(),
            "shares": [{"share": share, "tflops": round(p.tflops, 1)} for share, p in self.shares],
            "published": {str(seqlen): tflops for seqlen, tflops in self.published.items()},
            "budget": self.budget.to_dict(),
            "measured": None if self.measured_ms is None else self._measured(),
        }

    def _measured(self) -> dict[str, Any]:
        assert self.measured_ms is not None
        seconds = self.measured_ms * 1e-3
        return {
            "ms": self.measured_ms,
            "tflops": round(self.detail.tflops * self.detail.seconds / seconds, 1),
            "of_model": round(self.detail.seconds / seconds, 4),
            "verdict": verdict(self.detail, self.measured_ms),
        }


def make(
    gpu_name: str,
    head_dim: int,
    causal: bool,
    *,
    problem: Problem | None = None,
    kernel: str = "fa4",
    measured_ms: float | None = None,
    shares: bool = True,
) -> Report:
    """Computes the report. problem: what is looked at in detail (seqlen 8192 of the benchmark)."""
    if measured_ms is not None and not (math.isfinite(measured_ms) and measured_ms > 0):
        raise RooflineError(f"measured_ms {measured_ms}: must be a finite number above 0")
    gpu = find_gpu(gpu_name)
    problem = problem or published_problem(head_dim, 8192, causal)
    detail = predict(gpu, problem, head_dim, kernel=kernel, timeline=True)
    sweep = tuple(
        predict(gpu, published_problem(head_dim, s, causal), head_dim, kernel=kernel, gains=False)
        for s in LENGTHS
    )
    tried = tuple(
        (
            share,
            predict(
                gpu,
                problem,
                head_dim,
                kernel=kernel,
                gains=False,
                options={"exp2_emulated_share": share},
            ),
        )
        for share in (SHARES if shares else ())
    )
    ranking = rank(gpu, problem, head_dim)
    tile = detail.limits.budget
    return Report(gpu, head_dim, causal, sweep, detail, tried, ranking, tile, measured_ms)


def verdict(p: Prediction, measured_ms: float) -> str:
    """One sentence on a measured time."""
    ratio = measured_ms * 1e-3 / p.seconds
    clocks = [float(p.gpu[name].value) for name in ("clock", "clock_max") if p.gpu.has(name)]
    peak = p.peak_tflops / p.clock_ghz * max(*clocks, p.clock_ghz)
    if p.flops / (measured_ms * 1e-3) / 1e12 > peak:
        return (
            f"impossible: the tensor cores' peak is {peak:.0f} TFLOP/s at the highest clock; is"
            " measured_ms in milliseconds, and of this problem?"
        )
    clock = round(p.clock_ghz, 2)
    if ratio < 0.97:
        return (
            f"{1 - ratio:.0%} faster than the model: the GPU may run above {clock} GHz, or the"
            " kernel differs from the one modelled"
        )
    if ratio <= 1.1:
        return f"within {abs(ratio - 1):.0%} of the model: limited by {p.bound}"
    return (
        f"{ratio - 1:.0%} slower than the model, which is limited by {p.bound}: look at the clock"
        f" under load ({clock} GHz assumed), cold caches, launch overhead, and whether the same"
        " kernel ran"
    )


def markdown(report: Report, plots: Sequence[Path] = ()) -> str:
    """The page."""
    p = report.detail
    mask = "causal" if report.causal else "dense"
    parts = [
        f"# {report.gpu.title}: forward attention, head_dim {report.head_dim}, {mask}",
        f"Kernel `{p.work.name}`, {p.work.dtype}. At {p.problem.seqlen} queries x"
        f" {p.problem.seqlen_k} keys, batch {p.problem.batch}, {p.problem.heads} heads:"
        f" **{p.tflops:.0f} TFLOP/s**, {p.seconds * 1e6:.0f} us,"
        f" {p.tflops / p.peak_tflops:.0%} of {p.peak_tflops:.0f}; limited by {p.bound}.",
    ]
    if report.measured_ms is not None:
        measured = report._measured()
        parts.append(
            f"Measured: {report.measured_ms:g} ms, {measured['tflops']:.0f} TFLOP/s,"
            f" {measured['of_model']:.0%} of the model's speed; {measured['verdict']}."
        )
    parts += ["## Over sequence lengths", _sweep_table(report)]
    parts += ["## One key block, unit by unit", _unit_table(p)]
    parts += ["## What its warps wait for", _stall_table(p)]
    if report.shares:
        parts += ["## Emulated share of exp2", _share_table(report)]
    parts += ["## Tiles", _tile_table(report)]
    parts += [f"![{path.stem}]({path.name})" for path in plots if path.suffix == ".png"]
    parts += ["## What this stands on", _basis(report)]
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _sweep_table(report: Report) -> str:
    header = ["seqlen", "us", "TFLOP/s", "of peak", "SMs busy", "ceiling"]
    published = report.published
    header += ["FlashAttention-4, published", "model beside it"] if published else []
    rows = []
    for p in report.sweep:
        seqlen = p.problem.seqlen
        row: list[object] = [seqlen, f"{p.seconds * 1e6:.0f}", f"{p.tflops:.0f}"]
        row += [f"{p.tflops / p.peak_tflops:.0%}", f"{p.filled.busy:.1%}"]
        row.append(f"{p.limits.tflops:.0f}")
        if published:
            row += [published[seqlen], f"{p.tflops / published[seqlen] - 1:+.1%}"]
        rows.append(row)
    if not published or report.detail.work.name != "fa4":
        return _table(header, rows)
    note = (
        "Published is FlashAttention-4, another kernel than the one modelled: the last column"
        " compares the two and is no error of the model."
    )
    return f"{_table(header, rows)}\n\n{note}"


def _unit_table(p: Prediction) -> str:
    rows = [
        [unit, round(busy), f"{busy / p.steady.cycles:.0%}", _gain(p, unit)]
        for unit, busy in sorted(p.steady.busy.items(), key=lambda item: -item[1])
    ]
    rows.append(["all latencies", "", "", _gain(p, "latencies")])
    head = f"A key block takes {p.steady.cycles:.0f} cycles in steady state."
    return head + "\n\n" + _table(["unit", "cycles", "busy", "saved if 10% faster"], rows)


def _gain(p: Prediction, unit: str) -> str:
    return str(p.gains[unit]) if unit in p.gains else ""


def _stall_table(p: Prediction) -> str:
    rows = []
    for role, causes in p.steady.stalls.items():
        largest = sorted(causes.items(), key=lambda item: -item[1])[:3]
        text = ", ".join(f"{cause} {cycles:.0f}" for cause, cycles in largest if cycles >= 1)
        if text:
            rows.append([role, round(sum(causes.values())), text])
    return _table(["role", "cycles waiting", "mostly"], rows)


def _share_table(report: Report) -> str:
    best = max(report.shares, key=lambda item: item[1].tflops)[0]
    rows = [
        [f"{share:.1%}" + (" (best)" if share == best else ""), f"{p.tflops:.0f}"]
        for share, p in report.shares
    ]
    return _table(["share", "TFLOP/s"], rows)


def _tile_table(report: Report) -> str:
    rows = [
        [f"{one.tile.tile_m}x{one.tile.tile_n}", one.tile.ctas, f"{one.tflops:.0f}",
         report.ranking.reason(one)]
        for one in report.ranking.priced[:5]
    ]  # fmt: skip
    return _table(["tile", "CTAs", "forecast TFLOP/s", "why"], rows)


def _basis(report: Report) -> str:
    tags: dict[str, int] = {}
    for quantity in (*report.gpu.quantities.values(), *latencies(report.gpu.arch_number).values()):
        tags[quantity.tag] = tags.get(quantity.tag, 0) + 1
    counts = ", ".join(f"{count} {tag}" for tag, count in sorted(tags.items()))
    return (
        f"{counts} numbers (`roofline gpus --gpu {report.gpu.name}`, `roofline simulate"
        f" --assumptions`); {report.detail.emulated_instructions / 1e6:.0f} M thread-instructions"
        " of the kernel's PTX, emulated and replayed. No measurement of this kernel calibrates the"
        " model. Ceilings are of the tile's MMAs, SMEM and exponentials, all SMs busy."
    )
