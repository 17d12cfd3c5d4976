"""Addresses across state spaces and CTAs: cvta, mapa, getctarank, isspacep.

PTX ISA 9.1 sections 9.7.9.19 to 9.7.9.24. A shared::cluster address carries the CTA's rank; the
shared window lies among generic addresses at `SHARED_GENERIC_BASE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from ..memory.local import LOCAL_GENERIC_BASE
from ..ptx.ast import Imm, Operand, Reg, Sym
from ..schedule import CTA_RANK_SHIFT, CTA_WINDOW_MASK, NO_CTA
from .table import FULL, LANES, SHARED_GENERIC_BASE, Binding, Handler, machine

if TYPE_CHECKING:
    from ..state import Warp

Lanes64 = NDArray[np.int64]


def lanes(b: Binding, op: Operand) -> Callable[[Warp], Lanes64]:
    """Reader of an integer operand of any width: int64[32], zero-extended."""
    if isinstance(op, Sym):
        at = b.constant(op)
        return lambda w: np.full(32, at + w.cta.window, np.int64)
    if isinstance(op, Imm):
        value = np.full(32, op.value, np.int64)
        return lambda w: value
    if isinstance(op, Reg) and op.kind == "b64":
        wide = b.lanes64(op)
        return lambda w: wide(w).view(np.int64)
    narrow = b.lanes32(op)
    return lambda w: narrow(w).astype(np.int64)


def put_wide(b: Binding, op: Operand) -> Callable[[Warp, int, Any], None]:
    """Writer f(warp, mask, int64[32]) of a 32- or 64-bit destination."""
    if not (isinstance(op, Reg) and op.kind == "b64"):
        put = b.put32(op)
        return lambda w, mask, value: put(w, mask, (value & FULL).astype(np.uint32))
    row = b.row(op, "b64")

    def put64(w: Warp, mask: int, value: Lanes64) -> None:
        chosen = LANES[mask]
        w.r32[row, chosen] = (value[chosen] & FULL).astype(np.uint32)
        w.r32[row + 1, chosen] = (value[chosen] >> 32 & FULL).astype(np.uint32)

    return put64


@machine(r"cvta(\.to)?\.shared(?:::cta|::cluster)?\.u64")
def cvta_shared(b: Binding) -> Handler:
    put, read = put_wide(b, b.ins.operands[0]), lanes(b, b.ins.operands[1])
    to_shared = b.match[1] is not None

    def run(w: Warp, mask: int) -> None:
        values = read(w)
        if not to_shared:
            put(w, mask, values + SHARED_GENERIC_BASE)
            return
        outside = [lane for lane in LANES[mask] if not _is_shared(int(values[lane]))]
        if outside:
            raise EmulatorFault(
                "generic_not_shared",
                f"cvta.to.shared of {int(values[outside[0]]):#x}, which is not an address of shared"
                " memory",
                address=int(values[outside[0]]),
            )
        put(w, mask, values - SHARED_GENERIC_BASE)

    return run


def _is_shared(generic: int) -> bool:
    return generic >= SHARED_GENERIC_BASE


def _is_local(generic: int) -> bool:
    return LOCAL_GENERIC_BASE <= generic < SHARED_GENERIC_BASE


@machine(r"mapa(\.shared::cluster)?\.u(?:32|64)")
def mapa(b: Binding) -> Handler:
    """The address in CTA b of the cluster that corresponds to an address of shared memory.

    Where the cluster has no CTA b, the address is one that no CTA has, and its use is the fault:
    compilers move mapa in front of the branch that keeps lanes from using it.
    """
    d, a, rank = b.ins.operands
    put, read, ctas = put_wide(b, d), lanes(b, a), lanes(b, rank)
    base = 0 if b.match[1] else SHARED_GENERIC_BASE

    def run(w: Warp, mask: int) -> None:
        to = ctas(w)
        exists = (to >= 0) & (to < len(w.cta.machine.ctas))
        own = read(w) - base & CTA_WINDOW_MASK
        put(w, mask, (own | np.where(exists, to, NO_CTA) << CTA_RANK_SHIFT) + base)

    return run


@machine(r"getctarank(\.shared::cluster)?\.u(?:32|64)")
def getctarank(b: Binding) -> Handler:
    put, read = b.put32(b.ins.operands[0]), lanes(b, b.ins.operands[1])
    base = 0 if b.match[1] else SHARED_GENERIC_BASE

    def run(w: Warp, mask: int) -> None:
        put(w, mask, (read(w) - base >> CTA_RANK_SHIFT & 0xFFFF).astype(np.uint32))

    return run


@machine(r"isspacep\.(shared(?:::cta|::cluster)?|global|local)")
def isspacep(b: Binding) -> Handler:
    put, read = b.put_predicate(b.ins.operands[0]), lanes(b, b.ins.operands[1])
    space = b.match[1]

    def run(w: Warp, mask: int) -> None:
        values, peers = read(w), len(w.cta.machine.ctas)
        bits = 0
        for lane in LANES[mask].tolist():
            value = int(values[lane])
            inside, local = _is_shared(value), _is_local(value)
            rank = value - SHARED_GENERIC_BASE >> CTA_RANK_SHIFT if inside else -1
            if space == "global":
                found = not inside and not local
            elif space == "local":
                found = local
            elif space == "shared::cluster":
                found = 0 <= rank < peers
            else:
                found = rank == w.cta.rank
            bits |= found << lane
        put(w, mask, bits)

    return run
