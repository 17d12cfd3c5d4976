"""Readers of barriers, fences, votes, launch control, and of what a model knows by class alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..isa.table import LANES, SHARED_GENERIC_BASE, Binding, first_lane
from ..ptx.ast import Mem
from ..records import Event, OpClass
from .table import Reader, Row, by_value, plain, reads

if TYPE_CHECKING:
    from ..state import Warp

plain(r"ret|exit|trap|nanosleep\..*|createpolicy\..*|griddepcontrol\..*", OpClass.OTHER)
plain(r"(?:prefetch|prefetchu|applypriority)\b.*|cp\.async\.bulk\.prefetch\..*", OpClass.OTHER)
plain(r"bar\.warp\.sync|call\.vprintf", OpClass.OTHER)
plain(r"tensormap\..*|clock\..*", OpClass.OTHER)
plain(r"fence\..*|membar\..*|tcgen05\.fence::.*|wgmma\.fence.*", OpClass.FENCE)
plain(r"shfl\..*|movmatrix\..*", OpClass.SHUFFLE)
plain(r"vote\..*|elect\..*|redux\..*|match\..*|activemask\..*", OpClass.VOTE)
plain(r"mbarrier\.inval\..*", OpClass.BARRIER)
plain(r"tcgen05\.relinquish_alloc_permit\..*|mapa\..*|getctarank\..*|isspacep\..*", OpClass.OTHER)
plain(r"cvta\..*|mov\.b128", OpClass.OTHER)
plain(r"clusterlaunchcontrol\.query_cancel\..*", OpClass.ALU)


@reads(r"setmaxnreg\..*", OpClass.OTHER)
def _setmaxnreg(b: Binding) -> Reader:
    count = b.scalar(b.ins.operands[0])
    return lambda w, mask: (Event.REGISTERS, count(w, first_lane(mask)), 0, 0, 0)


@reads(r"mbarrier\.init\..*", OpClass.BARRIER)
def _init(b: Binding) -> Reader:
    address, count = b.addresses(b.ins.operands[0]), b.scalar(b.ins.operands[1])

    def read(w: Warp, mask: int) -> list[Row]:
        arrivals = count(w, first_lane(mask))
        return [(Event.MBARRIER_INIT, at, arrivals, 0, 0) for at, _ in by_value(mask, address(w))]

    return read


@reads(r"mbarrier\.arrive(\.expect_tx)?(\.noComplete)?\.(?!.*noinc).*", OpClass.BARRIER)
def _arrive(b: Binding) -> Reader:
    operands = list(b.ins.operands)
    if not isinstance(operands[0], Mem):
        operands.pop(0)
    address = b.addresses(operands[0])
    amount = b.scalar(operands[1]) if len(operands) > 1 else None
    expects = bool(b.match[1])

    def read(w: Warp, mask: int) -> list[Row]:
        rows: list[Row] = []
        value = amount(w, first_lane(mask)) if amount is not None else 1
        for at, lanes in by_value(mask, address(w)):
            arrivals, nbytes = (lanes, value * lanes) if expects else (lanes * value, 0)
            rows.append((Event.MBARRIER_ARRIVE, at, arrivals, nbytes, 0))
        return rows

    return read


@reads(r"mbarrier\.(expect|complete)_tx\..*", OpClass.BARRIER)
def _expect(b: Binding) -> Reader:
    address, nbytes = b.addresses(b.ins.operands[0]), b.scalar(b.ins.operands[1])
    sign = 1 if b.match[1] == "expect" else -1

    def read(w: Warp, mask: int) -> list[Row]:
        value = sign * nbytes(w, first_lane(mask))
        return [
            (Event.MBARRIER_EXPECT, at, value * lanes, 0, 0)
            for at, lanes in by_value(mask, address(w))
        ]

    return read


@reads(r"mbarrier\.(?:try|test)_wait.*", OpClass.BARRIER)
def _wait(b: Binding) -> Reader:
    """Read when the wait succeeds: the phase just completed, or the token's own."""
    address = b.addresses(b.ins.operands[1])

    def read(w: Warp, mask: int) -> Row:
        at = int(address(w)[first_lane(mask)])
        cta, own = w.cta.locate(at)
        return (Event.MBARRIER_WAIT, at, cta.mbarriers.state(own).phase - 1, 0, 0)

    return read


@reads(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive|red)(?:\.[\w]+)*", OpClass.BARRIER)
def _named(b: Binding) -> Reader:
    operands = b.ins.operands[1:-1] if b.match[1] == "red" else b.ins.operands
    number = b.scalar(operands[0])
    threads = b.scalar(operands[1]) if len(operands) > 1 else None
    waits = int(b.match[1] != "arrive")

    def read(w: Warp, mask: int) -> Row:
        lane = first_lane(mask)
        count = threads(w, lane) if threads is not None else w.cta.threads_rounded
        return (Event.NAMED_BARRIER, number(w, lane), count, waits, 0)

    return read


@reads(r"barrier\.cluster\.(arrive|wait).*", OpClass.BARRIER)
def _cluster(b: Binding) -> Reader:
    waits = int(b.match[1] == "wait")
    return lambda w, mask: (Event.CLUSTER_BARRIER, waits, 0, 0, 0)


@reads(
    r"clusterlaunchcontrol\.try_cancel\.async(\.shared::cta)?\.mbarrier::complete_tx::bytes"
    r"(\.multicast::cluster::all)?\.b128",
    OpClass.COPY,
)
def _try_cancel(b: Binding) -> Reader:
    """Each CTA that the answer goes to hears of its 16 bytes."""
    bar = b.address(b.ins.operands[1])
    base = 0 if b.match[1] else SHARED_GENERIC_BASE
    everywhere = b.match[2] is not None

    def read(w: Warp, mask: int) -> list[Row]:
        rows: list[Row] = []
        for lane in LANES[mask].tolist():
            own, at = w.cta.locate(bar(w, lane) - base)
            for cta in w.cta.machine.ctas if everywhere else [own]:
                rows.append((Event.LAUNCH_CONTROL, cta.window | at, 16, 0, 0))
        return rows

    return read
