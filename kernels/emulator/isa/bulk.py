"""Bulk asynchronous copies and reductions: TMA tiles and linear runs, their groups.

PTX ISA 9.1 sections 9.7.9.25 and 9.7.9.27.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..checks.globals import box_of
from ..engines import gather, tiles, tma
from ..findings import EmulatorFault
from ..ptx.ast import Imm, Mem
from ..schedule import AsyncOp, BulkGroups
from ..tensormap import TensorMap
from .pair import check_alive, destinations
from .table import LANES, Binding, Handler, machine

if TYPE_CHECKING:
    from ..state import Cta, Warp

_QUALIFIERS = r"((?:\.(?:multicast::cluster|cta_group::[12]|L2::cache_hint))*)"
_REDUCE = r"(add|min|max|inc|dec|and|or|xor)"


def _tile(b: Binding, op: object):  # type: ignore[no-untyped-def]
    """Readers of a tensor operand ``[map, {coordinates}]``: map address, coordinates."""
    if not isinstance(op, Mem) or op.coords is None:
        raise b.unsupported("the tensor operand needs a map and coordinates")
    base = b.address(Mem(op.base, op.offset))
    coords = [b.signed(c) for c in op.coords]
    return base, lambda w, lane: tuple(c(w, lane) for c in coords)


def _usable_map(w: Warp, address: int) -> TensorMap:
    """The tensor map at an address, which the CTA must be allowed to use by now."""
    machine = w.cta.machine
    machine.map_updates.check(w.cta, address)
    return machine.tensor_map(address)


# -- into shared memory ---------------------------------------------------------------------------


@machine(
    rf"cp\.async\.bulk\.tensor\.([1-5])d{_QUALIFIERS}\.shared(?:::cta|::cluster)\.global(?:\.tile)?"
    rf"\.mbarrier::complete_tx::bytes{_QUALIFIERS}"
)
def tensor_load(b: Binding) -> Handler:
    """Global to shared memory; the barrier hears of the bytes when they have arrived."""
    target, tensor, barrier = b.ins.operands[:3]
    to, bar = b.address(target), b.address(barrier)
    base, coords = _tile(b, tensor)
    targets = _targets(b)

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        for lane in map(int, LANES[mask]):
            tmap, box = _usable_map(w, base(w, lane)), coords(w, lane)
            for there, start, notified, at in targets(w, lane, to(w, lane), bar(w, lane)):
                effect = partial(tma.load_tile, tmap, box, machine.gmem, there.smem, start)
                cells = partial(tiles.tile_cells, tmap, box)
                origin = (tiles.tile_start(tmap, box), (id(tmap), box), cells)
                where = (there, start, tmap.tile_bytes, notified, at)
                _issue_load(w, "TMA load", effect, *where, origin=origin, tx_bytes=tmap.tx_bytes)
        machine.events += 1

    return run


@machine(
    rf"cp\.async\.bulk\.tensor\.2d{_QUALIFIERS}\.shared(?:::cta|::cluster)\.global\.tile::gather4"
    rf"\.mbarrier::complete_tx::bytes{_QUALIFIERS}"
)
def tensor_gather(b: Binding) -> Handler:
    """Four rows of a matrix into one tile."""
    target, tensor, barrier = b.ins.operands[:3]
    to, bar = b.address(target), b.address(barrier)
    base, coords = _tile(b, tensor)
    targets = _targets(b)

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        for lane in map(int, LANES[mask]):
            tmap, box = _usable_map(w, base(w, lane)), coords(w, lane)
            whole, starts = gather.four_rows(tmap), _starts(tmap, box)
            for there, start, notified, at in targets(w, lane, to(w, lane), bar(w, lane)):
                effect = partial(gather.load, tmap, box, machine.gmem, there.smem, start)
                origin = (starts, (id(tmap), box), partial(gather.cells, tmap, box))
                where = (there, start, whole.tile_bytes, notified, at)
                told = gather.ROWS * tmap.tx_bytes
                _issue_load(w, "TMA gather", effect, *where, origin=origin, tx_bytes=told)
        machine.events += 1

    return run


def _starts(tmap: TensorMap, box: tuple[int, ...]) -> int | None:
    """Address of the first byte of the four rows that lies inside the tensor."""
    found = [tiles.tile_start(tmap, row) for row in gather.rows_of(tmap, box)]
    return min((at for at in found if at is not None), default=None)


Origin = tuple[int | None, Any, Callable[[], Any]]  # address, what names the box, its cells
Target = tuple["Cta", int, "Cta", int]  # where the data goes, and the barrier that hears of it


def _targets(b: Binding) -> Callable[[Warp, int, int, int], list[Target]]:
    """Reader of a load's destinations f(warp, lane, address, barrier): one, or those of a multicast
    mask; with ``.cta_group::2`` the barrier may be the pair peer's."""
    pair = ".cta_group::2" in b.ins.op
    policy = ".L2::cache_hint" in b.ins.op
    linear = ".tensor." not in b.ins.op
    if ".multicast::cluster" not in b.ins.op:

        def one(w: Warp, lane: int, address: int, barrier: int) -> list[Target]:
            there, start = w.cta.locate(address)
            notified, at = w.cta.locate(barrier)
            if notified is not there and (not pair or notified.rank != there.rank ^ 1):
                _wrong_barrier(there, notified, pair)
            check_alive(there, "an asynchronous copy to shared memory")
            check_alive(notified, "an asynchronous copy to shared memory")
            return [(there, start, notified, at)]

        return one
    operand = 3 + linear
    if len(b.ins.operands) != operand + 1 + policy:
        raise b.unsupported("a multicast copy needs its CTA mask")
    ctas = b.scalar(b.ins.operands[operand])

    def several(w: Warp, lane: int, address: int, barrier: int) -> list[Target]:
        notified, at = w.cta.locate(barrier)
        peers = w.cta.machine.ctas
        out = []
        for there, start in destinations(w, address, ctas(w, lane)):
            rank = there.rank & ~1 | notified.rank & 1 if pair else there.rank
            if rank >= len(peers):
                _wrong_barrier(there, notified, pair)
            check_alive(peers[rank], "an asynchronous copy to shared memory")
            out.append((there, start, peers[rank], at))
        return out

    return several


def _wrong_barrier(there: Cta, notified: Cta, pair: bool) -> None:
    raise EmulatorFault(
        "tma_barrier_elsewhere",
        f"a copy into the shared memory of CTA {there.rank} with its mbarrier in CTA"
        f" {notified.rank}: it must be in the same CTA"
        + (" or its pair peer" if pair else " (or its pair peer, with .cta_group::2)"),
        destination=there.rank,
        barrier=notified.rank,
    )


def _issue_load(
    w: Warp,
    what: str,
    effect: Callable[[], Any],
    there: Cta,
    start: int,
    nbytes: int,
    notified: Cta,
    at: int,
    source: tuple[Cta, int] | None = None,
    origin: Origin | None = None,
    tx_bytes: int | None = None,
) -> None:
    """``source``: where in shared memory the data comes from, or ``origin``, where in global.
    ``tx_bytes``: what the barrier hears of, where it is not all."""
    machine = w.cta.machine
    race = machine.race
    engine = None
    if race is not None:
        engine = race.tma_load(w, there, start, nbytes)
        if source is not None:
            race.tma_read(w, engine, *source, nbytes)
        race.barrier_used(w, notified, at, what)
        if origin is not None and machine.globals is not None:
            machine.globals.copy_in(w, engine, *origin)

    def complete() -> None:
        if race is not None and engine is not None:
            race.engine_arrive(engine, notified, at)
        told = nbytes if tx_bytes is None else tx_bytes
        notified.mbarriers.complete_tx(at, told, who=what.split()[0])

    machine.asyncs.issue(None, AsyncOp(what, w, w.pc, effect, complete))


@machine(
    rf"cp\.async\.bulk\.shared(?:::cta|::cluster)\.global\.mbarrier::complete_tx::bytes{_QUALIFIERS}"
)
def linear_load(b: Binding) -> Handler:
    target, source, size, barrier = b.ins.operands[:4]
    to, start, count, bar = b.address(target), b.address(source), b.scalar(size), b.address(barrier)
    targets = _targets(b)

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        for lane in map(int, LANES[mask]):
            nbytes = count(w, lane)
            for there, at, notified, key in targets(w, lane, to(w, lane), bar(w, lane)):
                effect = partial(
                    tma.bulk_load, machine.gmem, start(w, lane), there.smem, at, nbytes
                )
                first = start(w, lane)
                origin = (first, (first, nbytes), box_of(first, nbytes))
                _issue_load(w, "bulk copy", effect, there, at, nbytes, notified, key, origin=origin)
        machine.events += 1

    return run


@machine(
    r"cp(?:\.async|\.reduce\.async)\.bulk\.shared::cluster\.shared::cta"
    rf"\.mbarrier::complete_tx::bytes(?:\.{_REDUCE}\.([busf]\d+))?"
)
def peer_copy(b: Binding) -> Handler:
    """From the CTA's own shared memory to that of another CTA of the cluster."""
    reduces = b.match[1] is not None
    if reduces != b.ins.op.startswith("cp.reduce"):
        raise b.unsupported("cp.reduce has an operation, cp.async has none")
    op, kind = b.match[1], b.match[2]
    target, source, size, barrier = b.ins.operands
    to, start, count, bar = b.address(target), b.address(source), b.scalar(size), b.address(barrier)
    targets = _targets(b)

    def run(w: Warp, mask: int) -> None:
        for lane in map(int, LANES[mask]):
            nbytes = count(w, lane)
            own, first = w.cta.locate(start(w, lane))
            if own is not w.cta:
                raise EmulatorFault(
                    "cluster_address", "the source of a .shared::cta copy is in another CTA"
                )
            for there, at, notified, key in targets(w, lane, to(w, lane), bar(w, lane)):
                ends = (own.smem, first, there.smem, at, nbytes)
                effect = partial(tma.bulk_reduce, *ends, op, kind) if reduces else None
                effect = effect or partial(tma.bulk_copy, *ends)
                what = "bulk reduction" if reduces else "bulk copy"
                _issue_load(w, what, effect, there, at, nbytes, notified, key, (own, first))
        w.cta.machine.events += 1

    return run


# -- out of shared memory -------------------------------------------------------------------------


@machine(
    rf"cp(\.reduce)?\.async\.bulk\.tensor\.([1-5])d\.global\.shared::cta(?:\.{_REDUCE})?(?:\.tile)?"
    r"\.bulk_group(?:\.L2::cache_hint)?"
)
def tensor_store(b: Binding) -> Handler:
    """Shared to global memory, in the issuing thread's open bulk group."""
    op = b.match[3]
    if (op is None) != (b.match[1] is None):
        raise b.unsupported("cp.reduce has an operation, cp.async has none")
    tensor, source = b.ins.operands[:2]
    start = b.address(source)
    base, coords = _tile(b, tensor)
    what = "TMA store" if op is None else "TMA reduction"

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        for lane in map(int, LANES[mask]):
            tmap, box = _usable_map(w, base(w, lane)), coords(w, lane)
            cta, at = w.cta.locate(start(w, lane))
            place = (tmap, box, machine.gmem, cta.smem, at)
            store = partial(tma.store_tile, *place)
            effect = store if op is None else partial(tma.reduce_tile, *place, op)
            to = (tiles.tile_start(tmap, box), partial(tiles.tile_cells, tmap, box))
            _issue_store(w, lane, what, effect, cta, at, tmap.tile_bytes, to, op is not None)
        machine.events += 1

    return run


@machine(
    r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\.tile::scatter4\.bulk_group"
    r"(?:\.L2::cache_hint)?"
)
def tensor_scatter(b: Binding) -> Handler:
    """One tile into four rows of a matrix."""
    tensor, source = b.ins.operands[:2]
    start = b.address(source)
    base, coords = _tile(b, tensor)

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        for lane in map(int, LANES[mask]):
            tmap, box = _usable_map(w, base(w, lane)), coords(w, lane)
            cta, at = w.cta.locate(start(w, lane))
            nbytes = gather.four_rows(tmap).tile_bytes
            effect = partial(gather.store, tmap, box, machine.gmem, cta.smem, at)
            to = (_starts(tmap, box), partial(gather.cells, tmap, box))
            _issue_store(w, lane, "TMA scatter", effect, cta, at, nbytes, to, False)
        machine.events += 1

    return run


@machine(
    rf"cp(\.reduce)?\.async\.bulk\.global\.shared::cta\.bulk_group(?:\.L2::cache_hint)?"
    rf"(?:\.{_REDUCE}(\.noftz)?\.([busf]\d+|bf16))?"
)
def linear_store(b: Binding) -> Handler:
    op, kind = b.match[2], b.match[4]
    if (op is None) != (b.match[1] is None):
        raise b.unsupported("cp.reduce has an operation, cp.async has none")
    if op == "add" and (b.match[3] is not None) != (kind in ("f16", "bf16")):
        raise b.unsupported(".noftz belongs to .add of .f16 and .bf16")
    target, source, size = b.ins.operands[:3]
    to, start, count = b.address(target), b.address(source), b.scalar(size)
    what = "bulk store" if op is None else "bulk reduction"

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        for lane in map(int, LANES[mask]):
            cta, at = w.cta.locate(start(w, lane))
            nbytes = count(w, lane)
            ends = (cta.smem, at, machine.gmem, to(w, lane), nbytes)
            store = partial(tma.bulk_store, *ends)
            effect = store if op is None else partial(tma.bulk_reduce, *ends, op, kind)
            place = (ends[3], box_of(ends[3], nbytes))
            _issue_store(w, lane, what, effect, cta, at, nbytes, place, op is not None)
        machine.events += 1

    return run


def _issue_store(
    w: Warp, lane: int, what: str, effect: Callable[[], Any], cta: Cta, at: int, nbytes: int,
    to: tuple[int | None, Callable[[], Any]], reduces: bool,
) -> None:  # fmt: skip
    machine = w.cta.machine
    engine = machine.race.tma_store(w, cta, at, nbytes) if machine.race is not None else None
    op = AsyncOp(what, w, w.pc, effect)
    clock = engine.clock if engine is not None else 0
    if engine is not None and machine.globals is not None:
        op.written = machine.globals.copy_out(w, engine, *to, reduces)
    w.bulk.setdefault(lane, BulkGroups()).open.append((op, engine, clock))
    machine.asyncs.issue(("bulk", w, lane), op)


# -- groups, prefetches, policies -----------------------------------------------------------------


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
    allowed, writes = count.value, b.match[1] is None

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        for lane in map(int, LANES[mask]):
            groups = w.bulk.get(lane)
            while groups is not None and len(groups.committed) > allowed:
                for op, engine, clock in groups.committed.popleft():
                    machine.asyncs.force(op)
                    if machine.race is not None and engine is not None:
                        machine.race.engine_wait(w, engine, clock)
                    if writes and machine.globals is not None:
                        machine.globals.written(w, op.written)

    return run


@machine(
    r"cp\.async\.bulk\.prefetch(?:\.tensor\.[1-5]d)?\.L2\.global(?:\.tile(?:::gather4)?)?"
    r"(?:\.L2::cache_hint)?|"
    r"(?:prefetch|prefetchu|applypriority)(?:\.global)?\.L[12](?:::\w+)*"
)
def prefetch(b: Binding) -> Handler:
    """Prefetches are hints; the emulator has no cache."""
    return lambda w, mask: None


@machine(r"createpolicy\.(?:fractional|range)(?:\.global)?(?:\.L2::\w+){1,2}\.b64")
def createpolicy(b: Binding) -> Handler:
    """Cache policies are hints; the emulator has no cache."""
    row = b.row(b.ins.operands[0], "b64")

    def run(w: Warp, mask: int) -> None:
        w.r32[row : row + 2, LANES[mask]] = 0

    return run
