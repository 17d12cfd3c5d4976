"""Bulk asynchronous copies: TMA tiles, their groups and prefetches.

PTX ISA 9.1 sections 9.7.9.25 and 9.7.9.27.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..engines import tma
from ..ptx.ast import Imm, Mem
from .table import LANES, Binding, Handler, machine

if TYPE_CHECKING:
    from ..state import Warp


def _tile(b: Binding, op: object):  # type: ignore[no-untyped-def]
    """Readers of a tensor operand ``[map, {coordinates}]``: map address, coordinates."""
    if not isinstance(op, Mem) or op.coords is None:
        raise b.unsupported("the tensor operand needs a map and coordinates")
    base = b.address(Mem(op.base, op.offset))
    coords = [b.signed(c) for c in op.coords]
    return base, lambda w, lane: tuple(c(w, lane) for c in coords)


@machine(
    r"cp\.async\.bulk\.tensor\.([1-5])d\.shared(?:::cta|::cluster)\.global(?:\.tile)?"
    r"\.mbarrier::complete_tx::bytes(?:\.cta_group::1)?(\.L2::cache_hint)?"
)
def tensor_load(b: Binding) -> Handler:
    """Eager: the tile arrives, and the barrier is told, when the copy is issued."""
    target, tensor, barrier = b.ins.operands[:3]
    to, bar = b.address(target), b.address(barrier)
    base, coords = _tile(b, tensor)

    def run(w: Warp, mask: int) -> None:
        cta = w.cta
        for lane in map(int, LANES[mask]):
            tmap = cta.machine.tensor_map(base(w, lane))
            moved = tma.load_tile(tmap, coords(w, lane), cta.gmem, cta.smem, to(w, lane))
            cta.mbarriers.complete_tx(bar(w, lane), moved, who="TMA")
        cta.machine.events += 1

    return run


@machine(
    r"cp\.async\.bulk\.tensor\.([1-5])d\.global\.shared::cta(?:\.tile)?\.bulk_group(\.L2::cache_hint)?"
)
def tensor_store(b: Binding) -> Handler:
    tensor, source = b.ins.operands[:2]
    start = b.address(source)
    base, coords = _tile(b, tensor)

    def run(w: Warp, mask: int) -> None:
        cta = w.cta
        for lane in map(int, LANES[mask]):
            tmap = cta.machine.tensor_map(base(w, lane))
            tma.store_tile(tmap, coords(w, lane), cta.gmem, cta.smem, start(w, lane))
        cta.machine.events += 1

    return run


@machine(r"cp\.async\.bulk\.(commit_group|wait_group(?:\.read)?)")
def group(b: Binding) -> Handler:
    """Eager stores are over when they are issued, so a group is always complete."""
    if b.match[1] != "commit_group" and not isinstance(b.ins.operands[0], Imm):
        raise b.unsupported("the number of groups must be an immediate")
    return lambda w, mask: None


@machine(r"createpolicy\.fractional\.L2::\w+(?:\.L2::\w+)?\.b64")
def createpolicy(b: Binding) -> Handler:
    """Cache policies are hints; the emulator has no cache."""
    row = b.row(b.ins.operands[0], "b64")

    def run(w: Warp, mask: int) -> None:
        w.r32[row : row + 2, LANES[mask]] = 0

    return run
