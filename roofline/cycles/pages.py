"""What `roofline simulate` prints, and its timeline for ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Sequence

from roofline.cycles.hardware import calibrations, latencies
from roofline.cycles.predict import GAIN, Prediction, RecordsReplay
from roofline.cycles.state import Run, Span
from roofline.text import table

_SHOWN_CAUSES = 4
_UNITS = ("tensor core", "SMEM port", "MUFU", "FMA", "ALU", "CVT", "TMEM", "LSU", "issue", "L2")


def simulate_text(p: Prediction) -> str:
    """The page of a prediction."""
    filled = p.filled
    head = f"{p.gpu.title} ({p.gpu.arch}): kernel {p.work.name}, {p.work.describe(p.problem)}"
    share = p.tflops / p.peak_tflops
    line = (
        f"{p.seconds * 1e6:.1f} us, {p.tflops:.0f} TFLOP/s, {share:.0%} of {p.peak_tflops:.0f} at"
        f" {p.clock_ghz:.2f} GHz; limited by {p.bound}"
    )
    size = p.records.cluster_ctas
    places = "SMs" if size == 1 else f"clusters of {size} SMs"
    rows: list[list[object]] = [
        [f"a {p.work.iteration}, steady", round(p.steady.cycles), "cycles"],
        [f"a work item besides its {p.work.iteration}s", round(p.cost.overhead), "cycles"],
        ["work items", filled.items, f"on {filled.slots} {places}, {filled.waves:.2f} waves"],
        ["SMs busy", f"{filled.busy:.1%}", "until the last item ends"],
        ["whole launch", round(filled.cycles), "cycles"],
        ["SMs", f"{p.sm_seconds * 1e6:.1f}", "us, launch included"],
        ["L2, at the least", f"{p.limits.l2_seconds * 1e6:.1f}", "us"],
        ["HBM, at the least", f"{p.limits.hbm_seconds * 1e6:.1f}", "us"],
    ]
    parts = [head, line, table(["", "", ""], rows).split("\n", 2)[2], units_text(p)]
    parts.append(stalls_text(p.steady))
    parts.append(
        f"{p.emulated_instructions / 1e6:.1f} M thread-instructions emulated, replayed and extended"
        f" in {p.wall_seconds:.0f} s;\n" + calibration_text(p.gpu.arch_number)
    )
    return "\n\n".join(parts)


def calibration_text(arch_number: int) -> str:
    """Which measured times of kernels the model stands on."""
    by_rows: dict[str, list[str]] = {}
    for name, rows in calibrations(arch_number).items():
        by_rows.setdefault(rows, []).append(name)
    if not by_rows:
        return "no measured time of a kernel went into it"
    lines = [f"  {', '.join(names)}: {rows}" for rows, names in by_rows.items()]
    head = (
        "constants that measured times of kernels decided (tests/roofline/hardware/h200_peers.csv):"
    )
    return "\n".join([head, *lines])


def units_text(p: Prediction) -> str:
    """How busy each unit is in steady state, and what a faster one would be worth."""
    rows: list[list[object]] = []
    for unit in dict.fromkeys((*_UNITS, *p.gains)):
        busy = p.steady.busy.get(unit)
        cells: list[object] = [unit]
        cells += ["", ""] if busy is None else [round(busy), f"{busy / p.steady.cycles:.0%}"]
        if p.gains:
            cells.append(str(p.gains[unit]) if unit in p.gains else "")
        rows.append(cells)
    header = [f"unit, for a {p.work.iteration}", "cycles", "busy"]
    if p.gains:
        header.append(f"saved if {GAIN - 1:.0%} faster")
    return table(header, rows)


def stalls_text(steady: Run) -> str:
    """Where the warps of each role spend a key block."""
    rows: list[list[object]] = []
    for role, causes in steady.stalls.items():
        largest = sorted(causes.items(), key=lambda item: -item[1])[:_SHOWN_CAUSES]
        if sum(causes.values()) < 1 or not steady.cycles:
            continue
        for i, (cause, cycles) in enumerate(largest):
            if cycles >= 0.005 * steady.cycles or i == 0:
                share = f"{cycles / steady.cycles:.0%}"
                rows.append([role if i == 0 else "", cause, round(cycles), share])
    return table(["role", "a warp waits for", "cycles", "share"], rows)


def assumptions_text(arch_number: int) -> str:
    """The model's own constants on an architecture."""
    found = latencies(arch_number)
    rows = [[name, q.value, q.unit, q.tag, q.source] for name, q in found.items()]
    return table(["constant", "value", "unit", "tag", "source"], rows)


def perfetto(spans: Sequence[Span], title: str) -> str:
    """Trace events (JSON) of one work item; a microsecond there is a cycle here."""
    tracks: dict[str, int] = {}
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{title}; 1 us = 1 cycle"}}
    ]
    for span in spans:
        if span.track not in tracks:
            tracks[span.track] = len(tracks) + 1
            thread = tracks[span.track]
            name = {"name": span.track}
            events.append({"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": name})
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": tracks[span.track],
                "name": span.name,
                "ts": round(span.start, 2),
                "dur": round(max(span.end - span.start, 0.01), 2),
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, allow_nan=False)


def records_text(found: RecordsReplay) -> str:
    """A replayed file of records, cluster by cluster."""
    records = found.records
    rows: list[list[object]] = []
    for i, run in enumerate(found.runs):
        busiest = max(run.busy, key=lambda unit: run.busy[unit])
        ctas = records.ctas[i * records.cluster_ctas : (i + 1) * records.cluster_ctas]
        name = ", ".join(map(str, ctas))
        share = f"{run.busy[busiest] / run.cycles:.0%}" if run.cycles else "-"
        rows.append([name, round(run.cycles), run.instructions, busiest, share])
    head = f"{found.gpu.title} ({found.gpu.arch}): {records.kernel}, grid {records.grid}"
    return f"{head}\n\n" + table(
        ["CTAs", "cycles", "warp instructions", "busiest unit", "busy"], rows
    )
