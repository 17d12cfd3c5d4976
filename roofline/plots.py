"""Plots of a report, as PNG and SVG; units on every axis, readable in black and white."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from roofline.budgets import budget
from roofline.cycles.state import Span
from roofline.errors import RooflineError
from roofline.report import Report

_INK = "black"
_HATCHES = ("", "////", "....")
#: What an MMA does in attention's forward, by where its operands are.
_MMAS = {"SS": "QK", "TS": "PV", "RS": "PV"}
_NEIGHBOURS = 2.0  # cycles between spans that count as one
_SIZES = {"timeline": (11.0, 4.5)}  # inches; the others 7.5 x 4.5
_LETTER = 0.0055  # width of a letter of 6 points, of the timeline's axis
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
        figure, axes = plt.subplots(figsize=_SIZES.get(name, (7.5, 4.5)), layout="constrained")
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
    share = float(report.budget.exp2_emulated_share)
    names = "MMA", "SMEM", f"exp, {share:.1%} by polynomial" if share else "exp (MUFU alone)"
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
    axes.set_ylim(0, 1.15 * max(p.tflops for _, p in report.shares))
    for share, p in report.shares:
        axes.annotate(
            f"{p.tflops:.0f}", (100 * share, p.tflops), (0, 7), textcoords="offset points",
            ha="center", fontsize=8,
        )  # fmt: skip
    axes.set_xlabel("exponentials by polynomial (%)")
    axes.set_ylabel("speed (TFLOP/s), model")
    axes.set_title(_title(report))
    axes.grid(visible=True, color="0.85")


def labels(
    spans: Sequence[Span], functions: Mapping[str, str]
) -> Iterator[tuple[str, float, float]]:
    """(text, begin, end) of neighbouring spans of a track that are the same thing.

    An MMA is told by its operands: scores have both in SMEM, what P multiplies has one elsewhere.
    functions: by the `file.py:line` of a span.
    """
    found: list[tuple[str, float, float]] = []
    for span in sorted(spans, key=lambda s: s.start):
        kind = span.name.rpartition(" ")[2]
        text = _MMAS.get(kind) or functions.get(span.name, span.name)
        if found and found[-1][0] == text and span.start - found[-1][2] <= _NEIGHBOURS:
            found[-1] = text, found[-1][1], max(span.end, found[-1][2])
        else:
            found.append((text, span.start, span.end))
    yield from found


def _functions(sources: Iterable[str]) -> dict[str, str]:
    """The innermost function around each `path/file.py:line`, by `file.py:line`."""
    found = {}
    for source in sources:
        path, _, line = source.rpartition(":")
        number = int(line) if line.isdecimal() else 0
        around = [one for one in _definitions(path) if one[0] <= number <= one[1]]
        if around:
            found[source.rpartition("/")[2]] = max(around)[2]
    return found


@cache
def _definitions(path: str) -> tuple[tuple[int, int, str], ...]:
    """(first line, last line, name) of each function of a file; none if it cannot be read."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    )


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
    named = _functions(report.detail.records.code.sources)
    for row, track in enumerate(tracks):
        own = [s for s in wanted if s.track == track]
        waits = [(s.name, s.start, s.end) for s in own if s.name.startswith("wait")]
        works = list(labels([s for s in own if not s.name.startswith("wait")], named))
        for boxes, height, face in ((waits, 0.3, "white"), (works, 0.7, "0.75")):
            bars = [(max(b, first) - first, min(e, last) - max(b, first)) for _, b, e in boxes]
            place = row - height / 2, height
            axes.broken_barh(bars, place, edgecolor=_INK, linewidth=0.4, facecolor=face)
        for text, begin, end in works:
            begin, end = max(begin, first) - first, min(end, last) - first
            for lines in (text, text.replace("_", "\n")):
                longest = max(map(len, lines.split("\n")))
                if end - begin >= _LETTER * longest * (last - first):
                    middle = (begin + end) / 2
                    axes.text(middle, row, lines, ha="center", va="center", fontsize=6)
                    break
    axes.set_yticks(range(len(tracks)), tracks)
    axes.set_xlim(0, last - first)
    axes.set_xlabel(
        "cycles (two key blocks in steady state); thin white: waits at a barrier\n"
        "QK, PV: MMAs; other boxes: the kernel's function that runs, or bytes copied"
    )
    axes.set_ylabel("one warp of each role, and the engines")
    axes.set_title(_title(report))
