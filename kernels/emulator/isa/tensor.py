"""tcgen05: Tensor Memory and the fifth-generation tensor core (PTX ISA 9.1 section 9.7.16)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..engines import tensorcore
from ..engines.descriptors import InstrDescriptor
from ..engines.formats import ELEMENT_BYTES
from ..engines.operands import operand_chunks
from ..findings import EmulatorFault
from ..ptx.ast import Imm, Mem, Operand, Vec
from ..registers import POISON
from ..schedule import AsyncOp, PendingLoad
from .pair import check_alive, destinations, group_of
from .table import LANES, Binding, Handler, machine

if TYPE_CHECKING:
    from ..state import Cta, Warp


@machine(r"tcgen05\.wait::(ld|st)\.sync\.aligned", converged=True)
def wait(b: Binding) -> Handler:
    loads = b.match[1] == "ld"

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        if loads:
            for load in w.pending_ld:
                if load.effect is not None:
                    load.effect()
            w.pending_ld.clear()
            if machine.race is not None:
                machine.race.wait_ld(w)
            return
        for op in w.pending_st:
            machine.asyncs.force(op)
        w.pending_st.clear()
        if machine.race is not None:
            machine.race.wait_st(w)

    return run


@machine(r"tcgen05\.fence::(before|after)_thread_sync")
def fence(b: Binding) -> Handler:
    before = b.match[1] == "before"

    def run(w: Warp, mask: int) -> None:
        if (race := w.cta.machine.race) is not None:
            (race.tcgen05_before if before else race.tcgen05_after)(w)

    return run


_SHAPES = r"(32x32b|16x64b|16x128b|16x256b|16x32bx2)\.x(1|2|4|8|16|32|64|128)"
_LANE_COLUMNS = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 1}


def _uniform(w: Warp, mask: int, addresses: np.ndarray) -> int:
    at = int(addresses[0])
    if not (addresses == at).all():
        raise EmulatorFault(
            "tmem_divergent_address",
            "the lanes of a warp give different Tensor Memory addresses",
        )
    return at


@machine(rf"tcgen05\.ld\.sync\.aligned\.{_SHAPES}(\.pack::16b)?\.b32", converged=True)
def ld(b: Binding) -> Handler:
    """Asynchronous: registers are there behind wait::ld (``silicon``: at their first use)."""
    shape, num, pack, split = b.match[1], int(b.match[2]), bool(b.match[3]), _split(b, 2)
    rows = b.vector_rows(b.ins.operands[0])

    def put(w: Warp, values: NDArray[np.uint32] | int) -> None:
        w.r32[rows] = values

    return _load(b, b.ins.operands[1], shape, num, pack, split, put)


@machine(
    r"tcgen05\.ld\.red\.sync\.aligned\.(32x32b)\.x(2|4|8|16|32|64|128)"
    r"\.(min|max)(?:(\.abs)?(\.NaN)?\.(f32)|\.([us]32))",
    converged=True,
)
def ld_red(b: Binding) -> Handler:
    """tcgen05.ld that also reduces what each lane loads, over columns, into one register."""
    shape, num, op, absolute, nan, floating, integer = b.match.groups()
    target, result, source = b.ins.operands
    rows, row = b.vector_rows(target), b.row(result, "b32")
    reduce = partial(reduced, op=op, dtype=floating or integer, absolute=absolute, nan=nan)

    def put(w: Warp, values: NDArray[np.uint32] | int) -> None:
        w.r32[rows] = values
        w.r32[row] = values if isinstance(values, int) else reduce(values)

    return _load(b, source, shape, int(num), False, None, put)


def reduced(
    values: NDArray[np.uint32], *, op: str, dtype: str, absolute: object = None, nan: object = None
) -> NDArray[np.uint32]:
    """min or max over axis 0 of register contents, as PTX's min and max of that type: -0 is below
    +0, and a NaN is left out unless ``nan`` is set; a NaN result is canonical."""
    if dtype != "f32":
        integers = values.view(np.int32 if dtype == "s32" else np.uint32)
        best = integers.max(0) if op == "max" else integers.min(0)
        return np.asarray(best).view(np.uint32)
    bits = values & np.uint32(0x7FFFFFFF) if absolute else values
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    # Floats sort as these integers do: negative ones by falling magnitude.
    flip = np.where(bits >> np.uint32(31), np.uint32(0xFFFFFFFF), np.uint32(0x80000000))
    ordered = bits ^ flip
    left_out = np.uint32(0 if op == "max" else 0xFFFFFFFF)
    kept = np.where(is_nan, left_out, ordered)
    chosen = kept.max(0) if op == "max" else kept.min(0)
    flip_back = np.where(chosen >> np.uint32(31), np.uint32(0x80000000), np.uint32(0xFFFFFFFF))
    gone = is_nan.any(0) if nan else is_nan.all(0)
    return np.where(gone, np.uint32(0x7FFFFFFF), chosen ^ flip_back)


def _load(
    b: Binding,
    source: Operand,
    shape: str,
    num: int,
    pack: bool,
    split: int | None,
    put: Callable[[Warp, NDArray[np.uint32] | int], None],
) -> Handler:
    address = b.addresses(source)
    columns = num * _LANE_COLUMNS[shape] * (2 if pack else 1)

    def run(w: Warp, mask: int) -> None:
        cta = w.cta
        machine = cta.machine
        at = _uniform(w, mask, address(w))
        clock = 0
        if machine.race is not None:
            clock = machine.race.tcgen05_ld(w, cta, at & 0xFFFF, columns, split)
        if not machine.asyncs.late:
            put(w, cta.tmem.ld(shape, num, at, w.index & 3, pack, split))
            if machine.race is not None:
                w.pending_ld.append(PendingLoad(w.pc, clock, None))
            return

        def effect() -> None:
            put(w, cta.tmem.ld(shape, num, at, w.index & 3, pack, split))

        put(w, POISON)
        w.pending_ld.append(PendingLoad(w.pc, clock, effect))

    return run


@machine(rf"tcgen05\.st\.sync\.aligned\.{_SHAPES}(\.unpack::16b)?\.b32", converged=True)
def st(b: Binding) -> Handler:
    """Asynchronous: the registers are read at issue, the cells written by wait::st."""
    split = _split(b, 1) if len(b.ins.operands) == 3 else None
    target, source = b.ins.operands[0], b.ins.operands[-1]
    rows, address = b.vector_rows(source), b.addresses(target)
    shape, num, unpack = b.match[1], int(b.match[2]), bool(b.match[3])
    columns = num * _LANE_COLUMNS[shape] * (2 if unpack else 1)

    def run(w: Warp, mask: int) -> None:
        cta = w.cta
        machine = cta.machine
        at = _uniform(w, mask, address(w))
        machine.events += 1
        if machine.race is not None:
            machine.race.tcgen05_st(w, cta, at & 0xFFFF, columns, split)
        if not machine.asyncs.late:
            cta.tmem.st(shape, num, at, w.index & 3, w.r32[rows], unpack, split)
            return
        values = w.r32[rows].copy()

        def effect() -> None:
            cta.tmem.st(shape, num, at, w.index & 3, values, unpack, split)

        op = AsyncOp("tcgen05.st", w, w.pc, effect)
        w.pending_st.append(op)
        machine.asyncs.issue(("st", w), op)

    return run


def _split(b: Binding, k: int) -> int | None:
    if len(b.ins.operands) <= k:
        return None
    operand = b.ins.operands[k]
    return operand.value if isinstance(operand, Imm) else None


_COLLECTOR = r"(?:\.collector::a::(?:fill|use|lastuse|discard))?"


@machine(rf"tcgen05\.mma\.cta_group::([12])\.kind::(f16|tf32|f8f6f4){_COLLECTOR}")
def mma(b: Binding) -> Handler:
    """D = A B (+ D): A from shared memory (a descriptor) or Tensor Memory (an address)."""
    d, a, b_desc, idesc, *rest = b.ins.operands
    disable = rest[0] if rest and isinstance(rest[0], Vec) else None
    rest = rest[1:] if disable is not None else rest
    if not rest or len(rest) > 2:
        raise b.unsupported("operands after the instruction descriptor are not understood")
    enable = b.predicate(rest[0])
    scale_d = rest[1].value if len(rest) == 2 and isinstance(rest[1], Imm) else None
    if len(rest) == 2 and scale_d is None:
        raise b.unsupported("scale-input-d must be an immediate")
    read_d, in_tmem = b.address(d), isinstance(a, Mem)
    read_a = b.address(a) if in_tmem else b.scalar(a)
    read_b, read_i = b.scalar(b_desc), b.scalar(idesc)
    read_lanes = [b.scalar(x) for x in disable.items] if disable is not None else None
    group, kind = int(b.match[1]), b.match[2]

    def run(w: Warp, mask: int) -> None:
        accumulate, machine = enable(w), w.cta.machine
        ctas = group_of(w, group)
        for lane in map(int, LANES[mask]):
            off = tuple(x(w, lane) for x in read_lanes) if read_lanes is not None else None
            operands = (read_i(w, lane), read_a(w, lane), read_b(w, lane), read_d(w, lane))
            options: dict[str, Any] = {
                "accumulate": bool(accumulate >> lane & 1),
                "a_in_tmem": in_tmem,
                "kind": kind,
                "disable_output_lane": off,
                "scale_d": scale_d,
            }
            if machine.race is not None:
                _note_mma(w, ctas, operands, in_tmem, kind)
            effect = partial(_multiply, ctas, operands, options)
            if machine.asyncs.at_once:
                effect()
                continue
            machine.asyncs.issue(("tensor core", w.cta.rank), AsyncOp("MMA", w, w.pc, effect))
        machine.events += 1

    return run


Operands = tuple[int, int, int, int]  # instruction descriptor, A, B, D


def _multiply(ctas: tuple[Cta, ...], operands: Operands, options: dict[str, Any]) -> None:
    if len(ctas) == 1:
        tensorcore.mma(*operands, ctas[0].smem, ctas[0].tmem, **options)
        return
    even, odd = ctas
    tensorcore.mma_pair(*operands, (even.smem, odd.smem), (even.tmem, odd.tmem), **options)


def _note_mma(
    w: Warp, ctas: tuple[Cta, ...], operands: Operands, a_in_tmem: bool, kind: str
) -> None:
    """Tells the race detector which cells the MMA touches, in each CTA."""
    idesc, a, b_desc, d = operands
    inst = InstrDescriptor.decode(idesc, kind, len(ctas))
    rows_a, rows_b = inst.m // len(ctas), inst.n // len(ctas)
    cells = [("B", operand_cells(b_desc, rows_b, inst.b_mn_major, ELEMENT_BYTES[inst.b_dtype]))]
    if not a_in_tmem:
        nbytes = ELEMENT_BYTES[inst.a_dtype]
        cells.append(("A", operand_cells(a, rows_a, inst.a_mn_major, nbytes)))
    reads = [(a & 0xFFFF, 8)] if a_in_tmem else []
    columns = inst.n // 2 if len(ctas) == 2 and inst.m == 128 else inst.n
    race = w.cta.machine.race
    assert race is not None
    race.mma(w, ctas, cells, reads, (d & 0xFFFF, columns), (0, 1, 2, 3))


@lru_cache(maxsize=4096)
def operand_cells(
    descriptor: int, rows: int, mn_major: bool, element_bytes: int
) -> NDArray[np.int64]:
    """The 4-byte cells (address / 4) of an operand in shared memory."""
    chunks = operand_chunks(descriptor, rows, mn_major, element_bytes).index.reshape(-1, 1)
    return np.sort((chunks * 4 + np.arange(4)).reshape(-1))


@machine(
    r"tcgen05\.commit\.cta_group::([12])\.mbarrier::arrive::one(?:\.shared::cluster)?"
    r"(\.multicast::cluster)?\.b64"
)
def commit(b: Binding) -> Handler:
    """The barriers hear when all MMAs that the thread issued before are complete: one barrier, or
    those at the same place in every CTA of a mask."""
    operand, group = b.ins.operands[0], int(b.match[1])
    bar = b.address(operand) if isinstance(operand, Mem) else b.scalar(operand)
    multicast = b.scalar(b.ins.operands[1]) if b.match[2] else None

    def run(w: Warp, mask: int) -> None:
        machine, race = w.cta.machine, w.cta.machine.race
        group_of(w, group)
        for lane in map(int, LANES[mask]):
            address = bar(w, lane)
            if multicast is None:
                notified = [w.cta.locate(address)]
            else:
                notified = destinations(w, address, multicast(w, lane))
            bundles = [race.commit(w, cta, at) for cta, at in notified] if race is not None else []
            complete = partial(_complete, w, notified, bundles)
            op = AsyncOp("tcgen05.commit", w, w.pc, None, complete)
            machine.asyncs.issue(("tensor core", w.cta.rank), op)
        machine.events += 1

    return run


def _complete(w: Warp, notified: list[tuple[Cta, int]], bundles: list[Any]) -> None:
    race = w.cta.machine.race
    for k, (cta, at) in enumerate(notified):
        check_alive(cta, "tcgen05.commit signals an mbarrier")
        if race is not None:
            race.bundle_arrive(bundles[k], cta, at)
        cta.mbarriers.arrive(at, who="tensor core")
