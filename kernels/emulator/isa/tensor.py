"""tcgen05: Tensor Memory and the fifth-generation tensor core (PTX ISA 9.1 section 9.7.16)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..engines import tensorcore
from ..findings import EmulatorFault
from ..ptx.ast import Imm, Mem, Vec
from .table import LANES, Binding, Handler, Wait, first_lane, machine

if TYPE_CHECKING:
    from ..state import Warp


@machine(r"tcgen05\.alloc\.cta_group::1\.sync\.aligned\.shared(?:::cta)?\.b32", converged=True)
def alloc(b: Binding) -> Handler:
    """Writes the address of the new columns to shared memory; blocks while there is no room."""
    to, count = b.address(b.ins.operands[0]), b.scalar(b.ins.operands[1])

    def run(w: Warp, mask: int) -> Wait | None:
        lane = first_lane(mask)
        columns = count(w, lane)
        column = w.cta.tmem.alloc(columns)
        if column is None:
            detail = (("barrier", "Tensor Memory"), ("waits_for", f"{columns} columns"))
            return Wait(("tmem",), f"tcgen05.alloc of {columns} columns", detail=detail)
        w.cta.smem.store(
            np.array([to(w, lane)], np.int64), np.array([[column]], np.uint32).view(np.uint8)
        )
        w.cta.machine.events += 1
        return None

    return run


@machine(r"tcgen05\.dealloc\.cta_group::1\.sync\.aligned\.b32", converged=True)
def dealloc(b: Binding) -> Handler:
    where, count = b.scalar(b.ins.operands[0]), b.scalar(b.ins.operands[1])

    def run(w: Warp, mask: int) -> None:
        lane = first_lane(mask)
        w.cta.tmem.dealloc(where(w, lane), count(w, lane))
        w.cta.machine.wake(("tmem",), w.cta)

    return run


@machine(r"tcgen05\.relinquish_alloc_permit\.cta_group::1\.sync\.aligned", converged=True)
def relinquish(b: Binding) -> Handler:
    return lambda w, mask: w.cta.tmem.relinquish()


@machine(
    r"tcgen05\.wait::(?:ld|st)\.sync\.aligned|tcgen05\.fence::(?:before|after)_thread_sync",
)
def ordering(b: Binding) -> Handler:
    """With eager visibility loads, stores and MMAs are over when they are issued."""
    return lambda w, mask: None


_SHAPES = r"(32x32b|16x64b|16x128b|16x256b|16x32bx2)\.x(1|2|4|8|16|32|64|128)"


def _uniform(w: Warp, mask: int, addresses: np.ndarray) -> int:
    at = int(addresses[0])
    if not (addresses == at).all():
        raise EmulatorFault(
            "tmem_divergent_address", "the lanes of a warp give different Tensor Memory addresses"
        )
    return at


@machine(rf"tcgen05\.ld\.sync\.aligned\.{_SHAPES}(\.pack::16b)?\.b32", converged=True)
def ld(b: Binding) -> Handler:
    target, source = b.ins.operands[:2]
    rows, address = b.vector_rows(target), b.addresses(source)
    shape, num, pack, split = b.match[1], int(b.match[2]), bool(b.match[3]), _split(b, 2)

    def run(w: Warp, mask: int) -> None:
        at = _uniform(w, mask, address(w))
        w.r32[rows] = w.cta.tmem.ld(shape, num, at, w.index & 3, pack, split)

    return run


@machine(rf"tcgen05\.st\.sync\.aligned\.{_SHAPES}(\.unpack::16b)?\.b32", converged=True)
def st(b: Binding) -> Handler:
    split = _split(b, 2) if len(b.ins.operands) == 3 else None
    target, source = b.ins.operands[0], b.ins.operands[-1]
    rows, address = b.vector_rows(source), b.addresses(target)
    shape, num, unpack = b.match[1], int(b.match[2]), bool(b.match[3])
    if split is not None:
        operand = b.ins.operands[1]
        assert isinstance(operand, Imm)
        split = operand.value

    def run(w: Warp, mask: int) -> None:
        at = _uniform(w, mask, address(w))
        w.cta.tmem.st(shape, num, at, w.index & 3, w.r32[rows], unpack, split)
        w.cta.machine.events += 1

    return run


def _split(b: Binding, k: int) -> int | None:
    if len(b.ins.operands) <= k:
        return None
    operand = b.ins.operands[k]
    return operand.value if isinstance(operand, Imm) else None


@machine(
    r"tcgen05\.mma\.cta_group::1\.kind::(f16|tf32)(\.collector::a::(?:fill|use|lastuse|discard))?"
)
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
    kind = b.match[1]

    def run(w: Warp, mask: int) -> None:
        cta, accumulate = w.cta, enable(w)
        for lane in map(int, LANES[mask]):
            off = tuple(x(w, lane) for x in read_lanes) if read_lanes is not None else None
            tensorcore.mma(
                read_i(w, lane),
                read_a(w, lane),
                read_b(w, lane),
                read_d(w, lane),
                cta.smem,
                cta.tmem,
                accumulate=bool(accumulate >> lane & 1),
                a_in_tmem=in_tmem,
                cta_group=1,
                kind=kind,
                disable_output_lane=off,
                scale_d=scale_d,
            )
        cta.machine.events += 1

    return run


@machine(r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one(?:\.shared::cluster)?\.b64")
def commit(b: Binding) -> Handler:
    """Eager: earlier MMAs of the thread are complete, so the barrier hears at once."""
    operand = b.ins.operands[0]
    bar = b.address(operand) if isinstance(operand, Mem) else b.scalar(operand)

    def run(w: Warp, mask: int) -> None:
        for lane in map(int, LANES[mask]):
            w.cta.mbarriers.arrive(bar(w, lane), who="tensor core")
        w.cta.machine.events += 1

    return run
