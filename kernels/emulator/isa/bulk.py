"""Bulk asynchronous copies: TMA tiles, their groups and prefetches.

PTX ISA 9.1 sections 9.7.9.25 and 9.7.9.27.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..engines import tma
from ..ptx.ast import Imm, Mem
from ..schedule import AsyncOp, BulkGroups
from .table import LANES, Binding, Handler, machine

if TYPE_CHECKING:
    from ..state import Cta, Warp
    from ..tensormap import TensorMap


def _tile(b: Binding, op: object):  # type: ignore[no-untyped-def]
    """Readers of a tensor operand ``[map, {coordinates}]``: map address, coordinates."""
    if not isinstance(op, Mem) or op.coords is None:
        raise b.unsupported("the tensor operand needs a map and coordinates")
    base = b.address(Mem(op.base, op.offset))
    coords = [b.signed(c) for c in op.coords]
    return base, lambda w, lane: tuple(c(w, lane) for c in coords)


@machine(
    r"cp\.async\.bulk\.tensor\.([1-5])d\.shared(?:::cta|::cluster)\.global(?:\.tile)?"
    r"\.mbarrier::complete_tx::bytes(?:\.cta_group::[12])?(\.L2::cache_hint)?"
)
def tensor_load(b: Binding) -> Handler:
    """Global to shared memory; the barrier hears of the bytes when they have arrived."""
    target, tensor, barrier = b.ins.operands[:3]
    to, bar = b.address(target), b.address(barrier)
    base, coords = _tile(b, tensor)

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        for lane in map(int, LANES[mask]):
            tmap = machine.tensor_map(base(w, lane))
            there, start = w.cta.locate(to(w, lane))
            notified, at = w.cta.locate(bar(w, lane))
            _issue_load(w, tmap, coords(w, lane), there, start, notified, at)
        machine.events += 1

    return run


def _issue_load(
    w: Warp,
    tmap: TensorMap,
    coords: tuple[int, ...],
    there: Cta,
    start: int,
    notified: Cta,
    at: int,
) -> None:
    machine, nbytes = w.cta.machine, tmap.tile_bytes
    race = machine.race
    engine = race.tma_load(w, there, start, nbytes) if race is not None else None

    def effect() -> None:
        tma.load_tile(tmap, coords, machine.gmem, there.smem, start)

    def complete() -> None:
        if race is not None and engine is not None:
            race.engine_arrive(engine, notified, at)
        notified.mbarriers.complete_tx(at, nbytes, who="TMA")

    machine.asyncs.issue(None, AsyncOp("TMA load", w, w.pc, effect, complete))


@machine(
    r"cp\.async\.bulk\.tensor\.([1-5])d\.global\.shared::cta(?:\.tile)?\.bulk_group"
    r"(\.L2::cache_hint)?"
)
def tensor_store(b: Binding) -> Handler:
    """Shared to global memory, in the issuing thread's open bulk group."""
    tensor, source = b.ins.operands[:2]
    start = b.address(source)
    base, coords = _tile(b, tensor)

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        for lane in map(int, LANES[mask]):
            tmap, box = machine.tensor_map(base(w, lane)), coords(w, lane)
            cta, at = w.cta.locate(start(w, lane))
            effect = partial(tma.store_tile, tmap, box, machine.gmem, cta.smem, at)
            _issue_store(w, lane, effect, cta, at, tmap.tile_bytes)
        machine.events += 1

    return run


def _issue_store(
    w: Warp, lane: int, effect: Callable[[], Any], cta: Cta, at: int, nbytes: int
) -> None:
    machine = w.cta.machine
    engine = machine.race.tma_store(w, cta, at, nbytes) if machine.race is not None else None
    op = AsyncOp("TMA store", w, w.pc, effect)
    clock = engine.clock if engine is not None else 0
    w.bulk.setdefault(lane, BulkGroups()).open.append((op, engine, clock))
    machine.asyncs.issue(("bulk", w, lane), op)


@machine(r"cp\.async\.bulk\.commit_group")
def commit_group(b: Binding) -> Handler:
    def run(w: Warp, mask: int) -> None:
        for lane in map(int, LANES[mask]):
            groups = w.bulk.setdefault(lane, BulkGroups())
            groups.committed.append(groups.open)
            groups.open = []

    return run


@machine(r"cp\.async\.bulk\.wait_group(\.read)?")
def wait_group(b: Binding) -> Handler:
    """Waits until at most N of the thread's newest groups are pending: the older ones complete now,
    the latest that is legal. The writes of a ``.read`` wait complete with its reads (the model does
    not let them lag)."""
    count = b.ins.operands[0]
    if not isinstance(count, Imm):
        raise b.unsupported("the number of groups must be an immediate")
    allowed = count.value

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        for lane in map(int, LANES[mask]):
            groups = w.bulk.get(lane)
            while groups is not None and len(groups.committed) > allowed:
                for op, engine, clock in groups.committed.popleft():
                    machine.asyncs.force(op)
                    if machine.race is not None and engine is not None:
                        machine.race.engine_wait(w, engine, clock)

    return run


@machine(r"createpolicy\.fractional\.L2::\w+(?:\.L2::\w+)?\.b64")
def createpolicy(b: Binding) -> Handler:
    """Cache policies are hints; the emulator has no cache."""
    row = b.row(b.ins.operands[0], "b64")

    def run(w: Warp, mask: int) -> None:
        w.r32[row : row + 2, LANES[mask]] = 0

    return run
