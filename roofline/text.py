"""Tables and pages for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from roofline.terms import Term, whole_cycles

if TYPE_CHECKING:
    from roofline.budgets import Budget
    from roofline.gpus import Gpu
    from roofline.intervals import Measurement, Wgmma
    from roofline.problem import Bounds, Problem
    from roofline.tiles import Priced, Ranking


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns, numbers to the right and texts to the left; no trailing blanks."""
    columns = range(len(header))
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in columns]
    right = [all(_is_number(row[i]) for row in cells) for i in columns]
    lines = [_line(header, widths, right), "  ".join("-" * width for width in widths)]
    lines += [_line(row, widths, right) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    return "  ".join(
        text.rjust(width) if to_right else text.ljust(width)
        for text, width, to_right in zip(row, widths, right, strict=True)
    )


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _is_number(text: str) -> bool:
    return text in ("", "-") or text.lstrip("+-").replace(".", "", 1).isdecimal()


def budget_text(b: Budget) -> str:
    """The page `roofline budget` prints for a tile."""
    tile = b.tile
    ctas = "1 CTA" if tile.ctas == 1 else "2 CTAs (numbers per CTA)"
    head = f"{tile.gpu.title} ({tile.gpu.arch}): {tile.direction}, tile {tile}, {tile.format.name}"
    rows = [
        ["MMA", b.mma, b.mma_exact],
        *_breakdown(b.mma_terms),
        ["SMEM", b.smem, b.smem_exact],
        *(_breakdown(b.smem_terms) if tile.gpu.has_tmem else _breakdown_both(b)),
        ["exp", b.exp, b.exp],
        *_exp_rows(b),
    ]
    sections = [
        f"{head}, {ctas}",
        table(["cycles of one KV iteration", "published", "exact"], rows),
        _bound_line(b),
        _core_line(b),
    ]
    tail = [f"note: {note}" for note in b.notes]
    tail += [f"does not fit: {excess}" for excess in b.excesses]
    if tail:
        sections.append("\n".join(tail))
    return "\n\n".join(sections)


def _breakdown(terms: Sequence[Term]) -> list[list[object]]:
    return [[f"  {term.name}", whole_cycles(term.cycles), ""] for term in terms]


def _breakdown_both(b: Budget) -> list[list[object]]:
    pairs = zip(b.smem_terms, b.smem_exact_terms, strict=True)
    return [[f"  {p.name}", whole_cycles(p.cycles), whole_cycles(e.cycles)] for p, e in pairs]


def _exp_rows(b: Budget) -> list[list[object]]:
    exp = b.exp_term
    rows: list[list[object]] = [
        [f"  MUFU, {float(exp.share):.1%} emulated", whole_cycles(exp.mufu), ""],
        ["  FMA pipe, softmax and emulation", whole_cycles(exp.fma), ""],
    ]
    if exp.balance_share:
        label = f"  balanced at {float(exp.balance_share):.1%} emulated"
        rows.append([label, whole_cycles(exp.balance_cycles), ""])
    return rows


def _bound_line(b: Budget) -> str:
    names = " and ".join("exp" if name == "exp" else name.upper() for name in b.bound.split("+"))
    verb = "bind" if "+" in b.bound else "binds"
    line = (
        f"{names} {verb}: at most {b.mma_share:.0%} of the tensor core's peak, "
        f"{b.ceiling_tflops:.0f} of {b.peak_tflops:.0f} TFLOP/s"
    )
    if b.cycles_exact != b.cycles:
        line += f" (by the exact counts {b.mma_share_exact:.0%}, bound: {b.bound_exact})"
    return line


def _core_line(b: Budget) -> str:
    cores = b.cuda_cores
    pipes = ", ".join(f"{pipe.upper()} {float(c):.0f}" for pipe, c in cores.pipes.items())
    return (
        f"CUDA cores, arithmetic alone: {pipes} cycles; issue slots {float(cores.issue):.0f} "
        f"of {b.cycles}"
    )


def problem_text(bounds: Bounds) -> str:
    """The whole problem: time, traffic and what materialised attention would move."""
    rows: list[list[object]] = [
        [f"SMs, {bounds.occupancy:.0%} busy", "", _us(bounds.sm_seconds)],
        ["L2 to and from the SMs", _mb(bounds.l2_bytes), _us(bounds.l2_seconds)],
        ["HBM, every tensor once", _mb(bounds.hbm_bytes), _us(bounds.hbm_seconds)],
        [
            "HBM, S and P materialised",
            _mb(bounds.materialised_bytes),
            _us(bounds.materialised_seconds),
        ],
    ]
    names = " and ".join(name.upper() for name in bounds.bound.split("+")).replace("SM", "SMs")
    return (
        f"whole problem: {_problem_line(bounds.problem)}\n\n"
        + table(["at the least", "MB", "us"], rows)
        + f"\n\nbound by {names}: at least {bounds.seconds * 1e6:.1f} us, at most "
        f"{bounds.tflops:.0f} TFLOP/s; S and P would take "
        f"{_mb(bounds.materialised_peak_bytes)} MB"
    )


def _problem_line(p: Problem) -> str:
    heads = f"{p.heads} heads" if p.heads == p.kv_heads else f"{p.heads}/{p.kv_heads} heads"
    mask = f"{float(p.visible_share):.1%} of the pairs visible"
    return f"batch {p.batch}, {heads}, {p.seqlen} queries x {p.seqlen_k} keys, {mask}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"


def gpu_text(gpu: Gpu) -> str:
    """One GPU with every number, its tag and its source."""
    rows = [[name, q.value, q.unit, q.tag, q.source] for name, q in gpu.quantities.items()]
    return f"{gpu.name}: {gpu.title} ({gpu.arch})\n\n" + table(
        ["quantity", "value", "unit", "tag", "source"], rows
    )


def gpus_text(gpus: Sequence[Gpu], fields: Sequence[str]) -> str:
    """Several GPUs beside each other, without the sources."""
    rows: list[list[object]] = []
    for field in fields:
        found = [gpu.quantities.get(field) for gpu in gpus]
        unit = next((q.unit for q in found if q is not None), "")
        cells = [None if q is None else f"{q.value:g} {q.tag[0]}" for q in found]
        rows.append([field, unit, *cells])
    text = table(["quantity", "unit", *(gpu.name for gpu in gpus)], rows)
    return f"{text}\n\nm measured, v vendor, d derived, a assumed; --gpu NAME shows the sources"


def intervals_text(measurements: Sequence[Measurement]) -> str:
    """Every measured MMA beside the closed form, and the worst residuals."""
    header = [
        "format",
        "A",
        "CTAs",
        "M",
        "N",
        "interval",
        "model",
        "off",
        "latency",
        "model",
        "off",
    ]
    rows = [
        [
            m.format,
            "SMEM" if m.mma.a_in_smem else "TMEM",
            m.mma.ctas,
            m.mma.m,
            m.mma.n,
            f"{m.interval_cycles:.2f}",
            f"{float(m.mma.interval_cycles):.2f}",
            f"{m.interval_residual:+.2f}",
            f"{m.latency_cycles:.0f}",
            f"{m.latency_cycles - m.latency_residual:.0f}",
            f"{m.latency_residual:+.0f}",
        ]
        for m in measurements
    ]
    lines = [
        f"{ctas} CTA{'s' if ctas > 1 else ''}: {len(group)} rows, worst interval residual "
        f"{max(abs(m.interval_residual) for m in group):.2f} cycles, mean "
        f"{sum(abs(m.interval_residual) for m in group) / len(group):.2f}; worst latency residual "
        f"{max(abs(m.latency_residual) for m in group):.0f}"
        for ctas in (1, 2)
        for group in [[m for m in measurements if m.mma.ctas == ctas]]
    ]
    return table(header, rows) + "\n\n" + "\n".join(lines)


def tiles_text(ranking: Ranking, top: int) -> str:
    """The best tiles with their resources, why each is where it is, and the best with a kernel."""
    tile = ranking.winner.tile
    dims = f"{tile.head_dim}/{tile.head_dim_v}" if tile.head_dim != tile.head_dim_v else ""
    head = (
        f"{tile.gpu.title} ({tile.gpu.arch}): {tile.direction}, head_dim "
        f"{dims or tile.head_dim}, {tile.format.name}; {_problem_line(ranking.problem)}"
    )
    ranked = list(zip(ranking.places, ranking.priced, strict=True))
    shown = ranked[:top]
    best = ranking.best_built
    if best is not None and all(p is not best for _, p in shown):
        shown += [(i, p) for i, p in ranked if p is best]
    header = ["#", "tile", "CTAs", "Q", "S", "KV", "SMEM", "TMEM", "regs", "exp2", "cycles"]
    header += ["us", "TFLOP/s", "kernel"]
    text = table(header, [_tile_row(i, p) for i, p in shown])
    reasons = [f"{i:>3}  {_tile_name(p)}: {ranking.reason(p)}" for i, p in shown]
    tail = (
        f"{len(ranking.priced)} tiles fit, {len(ranking.refused)} do not (--json lists all). "
        "Q, S, KV: stages of queries, scores, keys or values; SMEM in bytes, TMEM in columns, "
        "regs a softmax thread; exp2: emulated share; cycles of a KV iteration."
    )
    return "\n\n".join([head, text, "\n".join(reasons), textwrap.fill(tail, 100)])


def reasons_text(reasons: Mapping[str, str]) -> str:
    """A sentence by decision, wrapped, its lines under each other."""
    width = max(map(len, reasons))
    lines = []
    for name, reason in reasons.items():
        head, indent = f"  {name.ljust(width)}  ", " " * (width + 4)
        lines.append(textwrap.fill(reason, 100, initial_indent=head, subsequent_indent=indent))
    return "\n".join(lines)


def _tile_name(p: Priced) -> str:
    return f"{p.tile.tile_m}x{p.tile.tile_n}" + (", 2 CTAs" if p.tile.ctas == 2 else "")


def _tile_row(rank: int, p: Priced) -> list[object]:
    c = p.candidate
    return [
        rank,
        f"{p.tile.tile_m}x{p.tile.tile_n}",
        p.tile.ctas,
        c.q_stages,
        c.s_stages,
        c.kv_stages,
        c.smem_bytes,
        c.tmem_columns or None,
        c.registers or None,
        f"{float(p.exp2_share):.2f}",
        round(p.iteration_cycles),
        f"{p.seconds * 1e6:.1f}",
        round(p.tflops),
        "yes" if p.plan else "no",
    ]


def wgmma_text(rows: tuple[Wgmma, ...]) -> str:
    """Measured and modelled intervals of wgmma, and the worst residuals."""
    cells: list[list[object]] = [
        [
            row.format,
            "SS" if row.a_in_smem else "RS",
            row.b_major,
            row.warpgroups,
            row.n,
            f"{row.interval_cycles:.2f}",
            f"{row.model_cycles:g}",
            f"{row.residual:+.2f}",
        ]
        for row in rows
    ]
    head = ["format", "operands", "B", "warpgroups", "N", "interval", "form", "residual"]
    parts = [table(head, cells)]
    for name, some in (
        ("1 warpgroup", [r for r in rows if r.warpgroups == 1]),
        ("2 and 3 warpgroups", [r for r in rows if r.warpgroups > 1]),
    ):
        worst = max(abs(row.residual) for row in some)
        mean = sum(abs(row.residual) for row in some) / len(some)
        parts.append(
            f"{name}: {len(some)} rows, worst residual {worst:.2f} cycles, mean {mean:.2f}"
        )
    return parts[0] + "\n\n" + "\n".join(parts[1:])
