"""Plots of a report, as PNG and SVG; units on every axis, readable in black and white."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from roofline.budgets import budget
from roofline.errors import RooflineError
from roofline.report import Report

_INK = "black"
_HATCHES = ("", "////", "....")
_GREYS = ("0.25", "0.6", "0.9")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise RooflineError(
            "plots need matplotlib: install fa4-cutedsl[plots], or leave --plots out"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(report: Report, folder: Path) -> list[Path]:
    """Writes every plot that the report has data for; returns the files."""
    plt = _pyplot()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RooflineError(f"{folder}: cannot be made: {error.strerror}") from None
    drawers: dict[str, Callable[[Any, Report], None]] = {
        "roofline": _roofline,
        "budget": _budget,
        "speed": _speed,
        "timeline": _timeline,
    }
    if report.shares:
        drawers["exp2_share"] = _share
    files = []
    for name, draw in drawers.items():
        figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
        draw(axes, report)
        for suffix in ("png", "svg"):
            path = folder / f"{name}.{suffix}"
            try:
                figure.savefig(path, dpi=150)
            except OSError as error:
                raise RooflineError(f"{path}: cannot be written: {error.strerror}") from None
            files.append(path)
        plt.close(figure)
    return files


def _title(report: Report) -> str:
    mask = "causal" if report.causal else "dense"
    return f"{report.gpu.title}, forward, head_dim {report.head_dim}, {mask}"


def _roofline(axes: Any, report: Report) -> None:
    """Speed over arithmetic intensity at HBM, under the roofs."""
    points = [
        (p.limits.budget, float(p.problem.flops(p.limits.budget.tile)) / p.limits.hbm_bytes, p)
        for p in report.sweep
    ]
    bandwidth = float(report.gpu["hbm_bandwidth"].value)
    left, right = 10.0, max(x for _, x, _ in points) * 4
    peak, ceiling = report.budget.peak_tflops, report.budget.ceiling_tflops
    knee = peak / bandwidth
    axes.plot([left, knee, right], [left * bandwidth, peak, peak], color=_INK, label="HBM, MMA")
    if ceiling < peak * 0.999:
        axes.axhline(ceiling, color=_INK, linestyle="--", label=f"tile ({report.budget.bound})")
    for marker, (_, x, p) in zip("osD^vP", points, strict=False):
        label = f"{p.problem.seqlen}: {p.tflops:.0f}"
        axes.plot([x], [p.tflops], marker, color=_INK, fillstyle="none", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("arithmetic intensity (FLOP per byte of HBM traffic)")
    axes.set_ylabel("speed (TFLOP/s)")
    axes.set_title(_title(report))
    axes.legend(fontsize=8, title="seqlen: TFLOP/s, model", title_fontsize=8)
    axes.grid(visible=True, which="major", color="0.85")


def _budget(axes: Any, report: Report) -> None:
    """MMA, SMEM and exp cycles of a key block, tile by tile."""
    tiles = [(128, 64), (128, 128), (256, 64), (256, 128)]
    share = float(report.detail.work.options.get("exp2_emulated_share", 0.0))
    names = "MMA", "SMEM", f"exp, {share:.1%} by polynomial"
    for i, (rows, keys) in enumerate(tiles):
        b = budget(report.gpu, rows, keys, report.head_dim, exp2_emulated_share=share)
        terms = ((names[0], b.mma), (names[1], b.smem_port), (names[2], b.exp))
        for j, (name, value) in enumerate(terms):
            axes.bar(
                i + (j - 1) * 0.27,
                value,
                0.25,
                color=_GREYS[j],
                edgecolor=_INK,
                hatch=_HATCHES[j],
                label=name if i == 0 else None,
            )
    axes.set_xticks(range(len(tiles)), [f"{m}x{n}" for m, n in tiles])
    axes.set_xlabel("tile (query rows x keys)")
    axes.set_ylabel("cycles of a key block")
    axes.set_title(_title(report))
    axes.legend()


def _speed(axes: Any, report: Report) -> None:
    lengths = [p.problem.seqlen for p in report.sweep]
    axes.plot(lengths, [p.tflops for p in report.sweep], "o-", color=_INK, label="model")
    axes.plot(lengths, [p.limits.tflops for p in report.sweep], ":", color=_INK, label="ceiling")
    if report.published:
        known = sorted(report.published.items())
        axes.plot(
            *zip(*known, strict=True), "s--", color="0.5", label="FlashAttention-4, published"
        )
    if report.measured_ms is not None:
        p = report.detail
        tflops = p.tflops * p.seconds / (report.measured_ms * 1e-3)
        axes.plot([p.problem.seqlen], [tflops], "*", color=_INK, markersize=14, label="measured")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sequence length (tokens; 32k tokens in all)")
    axes.set_ylabel("speed (TFLOP/s)")
    axes.set_title(_title(report))
    axes.legend()
    axes.grid(visible=True, color="0.85")


def _share(axes: Any, report: Report) -> None:
    axes.plot(
        [100 * share for share, _ in report.shares],
        [p.tflops for _, p in report.shares],
        "o-",
        color=_INK,
    )
    axes.set_ylim(bottom=0)
    for share, p in report.shares:
        axes.annotate(
            f"{p.tflops:.0f}", (100 * share, p.tflops), (0, 7), textcoords="offset points",
            ha="center", fontsize=8,
        )  # fmt: skip
    axes.set_xlabel("exponentials by polynomial (%)")
    axes.set_ylabel("speed (TFLOP/s), model")
    axes.set_title(_title(report))
    axes.grid(visible=True, color="0.85")


def _timeline(axes: Any, report: Report) -> None:
    """Two key blocks from the middle of a work item, by track."""
    spans, period = report.detail.spans, report.detail.steady.cycles
    middle = max((s.end for s in spans), default=0.0) / 2
    first, last = middle - period, middle + period
    wanted = [s for s in spans if s.end > first and s.start < last]
    tracks: list[str] = []
    for span in wanted:
        role = span.track.partition(" (warp")[0]
        if role not in {t.partition(" (warp")[0] for t in tracks}:
            tracks.append(span.track)
    tracks.sort(reverse=True)
    for waits, style in ((True, {"facecolor": "white"}), (False, {"facecolor": "0.65"})):
        for row, track in enumerate(tracks):
            bars = [
                (max(s.start, first) - first, min(s.end, last) - max(s.start, first))
                for s in wanted
                if s.track == track and s.name.startswith("wait") == waits
            ]
            height = (row - 0.15, 0.3) if waits else (row - 0.35, 0.7)
            axes.broken_barh(bars, height, edgecolor=_INK, linewidth=0.4, **style)
    axes.set_yticks(range(len(tracks)), tracks)
    axes.set_xlim(0, last - first)
    axes.set_xlabel("cycles (two key blocks in steady state); thin white: waits at a barrier")
    axes.set_ylabel("one warp of each role, and the engines")
    axes.set_title(_title(report))
