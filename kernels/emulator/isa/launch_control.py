"""Cluster launch control: a running cluster takes over one that has not started.

PTX ISA 9.1 sections 9.7.13.17 and 9.7.13.18. The response is opaque there; here it is four words:
the block index of the cancelled cluster's first CTA, and 1 (a refusal is four zeros).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..findings import EmulatorFault
from ..ptx.ast import Mem, RegPair, Sink, Vec
from ..registers import POISON
from ..schedule import AsyncOp
from .pair import check_alive
from .table import LANES, SHARED_GENERIC_BASE, Binding, Handler, machine

if TYPE_CHECKING:
    from ..state import Cta, Warp

RESPONSE_BYTES = 16


@machine(
    r"clusterlaunchcontrol\.try_cancel\.async(\.shared::cta)?\.mbarrier::complete_tx::bytes"
    r"(\.multicast::cluster::all)?\.b128"
)
def try_cancel(b: Binding) -> Handler:
    to, bar = b.address(b.ins.operands[0]), b.address(b.ins.operands[1])
    base = 0 if b.match[1] else SHARED_GENERIC_BASE
    everywhere = b.match[2] is not None

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        for lane in LANES[mask].tolist():
            own, at = w.cta.locate(to(w, lane) - base)
            same, barrier = w.cta.locate(bar(w, lane) - base)
            if own is not w.cta or same is not w.cta:
                raise EmulatorFault(
                    "cluster_address",
                    "clusterlaunchcontrol.try_cancel takes addresses of its own CTA",
                )
            if w.cta.launch_refused:
                raise EmulatorFault(
                    "launch_control_after_refusal",
                    "clusterlaunchcontrol.try_cancel after a refusal that the CTA has seen",
                )
            ctas = machine.ctas if everywhere else [w.cta]
            _issue(w, ctas, at, barrier)
        machine.events += 1

    return run


def _issue(w: Warp, ctas: list[Cta], at: int, barrier: int) -> None:
    machine, race = w.cta.machine, w.cta.machine.race
    block = machine.cancel_next()
    words = np.array([0, 0, 0, 0] if block is None else [*block, 1], np.uint32)
    for cta in ctas:
        check_alive(cta, "clusterlaunchcontrol.try_cancel writes to shared memory")
        engine = race.tma_load(w, cta, at, RESPONSE_BYTES) if race is not None else None
        if race is not None:
            race.barrier_used(w, cta, barrier, "clusterlaunchcontrol.try_cancel")
        effect = partial(cta.smem.write_bytes, at, words.view(np.uint8), "try_cancel")
        complete = partial(_complete, w, engine, cta, barrier)
        what = "clusterlaunchcontrol.try_cancel"
        machine.asyncs.issue(None, AsyncOp(what, w, w.pc, effect, complete))


def _complete(w: Warp, engine: Any, cta: Cta, barrier: int) -> None:
    if engine is not None:
        w.cta.machine.race.engine_arrive(engine, cta, barrier)  # type: ignore[union-attr]
    cta.mbarriers.complete_tx(barrier, RESPONSE_BYTES, who="launch control")


@machine(r"clusterlaunchcontrol\.query_cancel\.is_canceled\.pred\.b128")
def is_canceled(b: Binding) -> Handler:
    put, row = b.put_predicate(b.ins.operands[0]), b.row(b.ins.operands[1], "b128")

    def run(w: Warp, mask: int) -> None:
        flags = w.r32[row + 3]
        bits = 0
        for lane in LANES[mask].tolist():
            if flags[lane] > 1:
                raise EmulatorFault(
                    "launch_control_bad_response",
                    "query_cancel of 16 bytes that no clusterlaunchcontrol.try_cancel wrote",
                )
            bits |= int(flags[lane]) << lane
        if bits != mask:
            w.cta.launch_refused = True
        put(w, mask, bits)

    return run


@machine(r"clusterlaunchcontrol\.query_cancel\.get_first_ctaid(?:::([xyz])\.b32|\.v4\.b32)\.b128")
def first_ctaid(b: Binding) -> Handler:
    """PTX leaves the block of a refused request undefined: a fault under ``isa``. The DSL's own
    clc_response() asks for it always and throws it away: on silicon it is poison."""
    d, row = b.ins.operands[0], b.row(b.ins.operands[1], "b128")
    axis = b.match[1]
    if axis is None:
        if not isinstance(d, Vec) or len(d.items) != 4:
            raise b.unsupported("get_first_ctaid gives a vector of four")
        places = [(k, b.put32(x)) for k, x in enumerate(d.items) if not isinstance(x, Sink)]
    else:
        places = [("xyz".index(axis), b.put32(d))]

    def run(w: Warp, mask: int) -> None:
        given = w.r32[row + 3] == 1
        if w.cta.machine.options.profile == "isa" and not given[LANES[mask]].all():
            raise EmulatorFault(
                "launch_control_refused",
                "get_first_ctaid of a request that was refused: is_canceled must be asked first",
            )
        for k, put in places:
            put(w, mask, np.where(given, w.r32[row + k], POISON).astype(np.uint32))

    return run


@machine(r"mov\.b128")
def move_128(b: Binding) -> Handler:
    """Packs two .b64 registers into a .b128 one, unpacks it, or copies it."""
    d, source = b.ins.operands
    assert not isinstance(d, Mem | RegPair)

    def rows(op: Any) -> list[int]:
        if isinstance(op, Vec):
            if len(op.items) != 2:
                raise b.unsupported("a .b128 value is made of two .b64 registers")
            starts = [None if isinstance(x, Sink) else b.row(x, "b64") for x in op.items]
            return [-1 if s is None else s + k for s in starts for k in range(2)]
        start = b.row(op, "b128")
        return list(range(start, start + 4))

    pairs = list(zip(rows(d), rows(source), strict=True))

    def run(w: Warp, mask: int) -> None:
        lanes = LANES[mask]
        values = [w.r32[s, lanes] for _, s in pairs]
        for (to, _), value in zip(pairs, values, strict=True):
            if to >= 0:
                w.r32[to, lanes] = value

    return run
