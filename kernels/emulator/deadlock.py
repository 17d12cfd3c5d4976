"""The report of a CTA in which nothing can run: who waits where, for what, and what it lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .findings import Finding

if TYPE_CHECKING:
    from .program import Program
    from .state import Cta, Fragment, Warp


def frontier(ctas: list[Cta], program: Program) -> list[dict[str, Any]]:
    """Where every warp stands, and what it waits for."""
    return [
        _row(cta, program, warp, fragment)
        for cta in ctas
        for warp in cta.warps
        for fragment in warp.fragments
    ]


def report(ctas: list[Cta], program: Program) -> Finding:
    """A finding ``deadlock`` whose details["blocked"] is the blocked frontier."""
    blocked = frontier(ctas, program)
    waits = sorted({str(row["waits_on"]) for row in blocked})
    return Finding(
        code="deadlock",
        message=f"{len(blocked)} warp fragment(s) wait for what nothing can bring about any more: "
        + "; ".join(waits),
        role=str(blocked[0]["role"]),
        cta=blocked[0]["cta"],
        warp=int(blocked[0]["warp"]),
        ptx_line=int(blocked[0]["ptx_line"]),
        source=str(blocked[0]["source"]),
        details={"blocked": blocked},
    )


def _row(cta: Cta, program: Program, warp: Warp, fragment: Fragment) -> dict[str, Any]:
    ins = program.segments[fragment.pc].first
    wait = fragment.wait
    row: dict[str, Any] = {
        "cta": cta.block,
        "warp": warp.index,
        "role": warp.name,
        "lanes": fragment.mask,
        "source": program.module.source_of(ins),
        "ptx_line": ins.line,
        "waits_on": wait.what if wait is not None else ins.op,
    }
    if wait is None:
        return row
    row.update(wait.detail)
    kind, *rest = wait.key
    if kind == "mbar" and rest[0] in cta.mbarriers.live:
        state = cta.mbarriers.live[rest[0]]
        row.update(
            barrier=f"mbarrier {rest[0]:#x} (smem offset {rest[0] - cta.smem.base})",
            phase=state.phase,
            pending_arrivals=state.pending,
            pending_bytes=state.tx_count,
            last_arrivers=[f"{who} (phase {phase})" for who, phase in state.arrivers],
        )
    elif kind == "bar" and rest[0] in cta.named.open:
        named = cta.named.open[rest[0]]
        row.update(
            pending_arrivals=named.expected - named.arrived,
            last_arrivers=list(named.by),
        )
    return row
