"""tcgen05: Tensor Memory and registers, and when operations are complete (PTX ISA 9.1 section
9.7.16). The tensor core is in `tensor_mma`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from ..ptx.ast import Imm, Mem, Operand
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


def _address(b: Binding, op: Operand) -> Callable[[Warp], int]:
    """Reader of a Tensor Memory address, which is the warp's, not a lane's."""
    common = b.uniform_address(op)

    def read(w: Warp) -> int:
        at = common(w)
        if at is None:
            raise EmulatorFault(
                "tmem_divergent_address",
                "the lanes of a warp give different Tensor Memory addresses",
            )
        return at

    return read


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


def _own_lanes(w: Warp, address: int) -> int:
    """The address with the lanes that the warp reaches. PTX wants them named; under ``silicon``
    lanes 0 to 31 are the warp's own, as DeepGEMM's epilogue for sm_100 and CUTLASS's example
    1cta_mma_a_from_tmem.py rely on, which give all four warps one address."""
    warp = w.index & 3
    if warp and address >> 16 < 32 and w.cta.machine.options.profile == "silicon":
        return address + (32 * warp << 16)
    return address


def _load(
    b: Binding,
    source: Operand,
    shape: str,
    num: int,
    pack: bool,
    split: int | None,
    put: Callable[[Warp, NDArray[np.uint32] | int], None],
) -> Handler:
    address = _address(b, source)
    columns = num * _LANE_COLUMNS[shape] * (2 if pack else 1)

    def run(w: Warp, mask: int) -> None:
        cta = w.cta
        machine = cta.machine
        at = _own_lanes(w, address(w))
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
    rows, address = b.vector_rows(source), _address(b, target)
    shape, num, unpack = b.match[1], int(b.match[2]), bool(b.match[3])
    columns = num * _LANE_COLUMNS[shape] * (2 if unpack else 1)

    def run(w: Warp, mask: int) -> None:
        cta = w.cta
        machine = cta.machine
        at = _own_lanes(w, address(w))
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
