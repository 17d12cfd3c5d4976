"""Warp-wide instructions: shfl, vote, elect, redux, activemask, bar.warp.

PTX ISA 9.1 sections 9.7.9.6 and 9.7.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..findings import EmulatorFault
from ..ptx.ast import Imm, Operand, RegPair
from ..registers import POISON
from .table import FULL, LANES, Binding, Handler, Wait, first_lane, machine

if TYPE_CHECKING:
    from ..state import Warp


def member_mask(b: Binding, op: Operand):  # type: ignore[no-untyped-def]
    """Reader f(warp, mask) -> member mask; leaving out an executing lane is a fault."""
    read = b.scalar(op)

    def members(w: Warp, mask: int) -> int:
        value = read(w, first_lane(mask)) & FULL
        if mask & ~value:
            raise EmulatorFault(
                "warp_sync_mask",
                f"lanes {mask & ~value:#x} execute the instruction, its member mask is {value:#x}",
                executing=mask,
                members=value,
            )
        return value

    return members


def gather(w: Warp, mask: int, members: int, b: Binding) -> Wait | None:
    """All live members must arrive before a .sync instruction executes."""
    missing = members & w.alive & ~mask
    if not missing:
        if (race := w.cta.machine.race) is not None:
            race.converged(w, mask)
        return None
    return Wait(("converge", w.index), b.ins.op, detail=(("missing_lanes", f"{missing:#010x}"),))


def by_mask(b: Binding, op: Operand, run: Handler) -> Handler:
    """``run`` for each set of lanes that give the same member mask: tiles of cooperative groups
    execute one shfl.sync together, each with its own mask."""
    if isinstance(op, Imm):
        return run
    read = b.lanes32(op)

    def by_parts(w: Warp, mask: int) -> Wait | None:
        values = read(w)[LANES[mask]]
        if (values == values[0]).all():
            return run(w, mask)
        parts: dict[int, int] = {}
        for lane, members in zip(LANES[mask].tolist(), values.tolist(), strict=True):
            parts[members] = parts.get(members, 0) | 1 << lane
        for members, part in parts.items():  # all are here before any executes: once each
            if missing := members & w.alive & ~part & FULL:
                detail = (("missing_lanes", f"{missing:#010x}"),)
                return Wait(("converge", w.index), b.ins.op, detail=detail)
        for part in parts.values():
            run(w, part)
        return None

    return by_parts


@machine(r"elect\.sync")
def elect(b: Binding) -> Handler:
    pair = b.ins.operands[0]
    assert isinstance(pair, RegPair)
    put_lane, put_p = b.put32(pair.first), b.put_predicate(pair.second)
    members = member_mask(b, b.ins.operands[1])

    def run(w: Warp, mask: int) -> Wait | None:
        if (wait := gather(w, mask, members(w, mask), b)) is not None:
            return wait
        leader = first_lane(mask)
        put_lane(w, mask, leader)
        put_p(w, mask, 1 << leader)
        return None

    return by_mask(b, b.ins.operands[1], run)


@machine(r"shfl\.sync\.(idx|up|down|bfly)\.b32")
def shfl(b: Binding) -> Handler:
    """PTX ISA 9.1 section 9.7.9.6: c holds the clamp in bits 4:0 and the segment mask in 12:8."""
    d, source, offset, clamp, member = b.ins.operands
    put = b.put32(d.first if isinstance(d, RegPair) else d)
    put_p = b.put_predicate(d.second) if isinstance(d, RegPair) else None
    values, offsets, clamps = b.lanes32(source), b.lanes32(offset), b.lanes32(clamp)
    members, mode = member_mask(b, member), b.match[1]
    lane = np.arange(32, dtype=np.int64)

    def run(w: Warp, mask: int) -> Wait | None:
        if (wait := gather(w, mask, members(w, mask), b)) is not None:
            return wait
        by = offsets(w).astype(np.int64) & 31
        c = clamps(w).astype(np.int64)
        bound, segment = c & 31, c >> 8 & 31
        top = (lane & segment) | (bound & ~segment)
        if mode == "up":
            at = lane - by
            valid = at >= top
        elif mode == "down":
            at = lane + by
            valid = at <= top
        elif mode == "bfly":
            at = lane ^ by
            valid = at <= top
        else:
            at = (lane & segment) | (by & ~segment)
            valid = at <= top
        at = np.where(valid, at, lane)
        got = values(w)[at]
        absent = ~(np.uint32(mask) >> at.astype(np.uint32) & 1).astype(bool)
        if absent[LANES[mask]].any():
            if w.cta.machine.options.profile == "isa":
                reader = int(LANES[mask][absent[LANES[mask]].argmax()])
                raise EmulatorFault(
                    "shfl_inactive_lane",
                    f"lane {reader} reads lane {int(at[reader])}, which does not take part: the"
                    " result is undefined",
                    reader=reader,
                    source=int(at[reader]),
                )
            got = np.where(absent, np.uint32(POISON), got)  # undefined, and often not used
        put(w, mask, got)
        if put_p is not None:
            put_p(w, mask, _bits(valid))
        return None

    return by_mask(b, member, run)


def _bits(flags: np.ndarray) -> int:
    return int(np.packbits(flags, bitorder="little").view(np.uint32)[0])


@machine(r"vote\.sync\.(all|any|uni|ballot)\.(pred|b32)")
def vote(b: Binding) -> Handler:
    d, p, member = b.ins.operands
    mode = b.match[1]
    if (mode == "ballot") != (b.match[2] == "b32"):
        raise b.unsupported("ballot gives .b32, the other votes .pred")
    read, members = b.predicate(p), member_mask(b, member)
    put32 = b.put32(d) if mode == "ballot" else None
    put_p = b.put_predicate(d) if mode != "ballot" else None

    def run(w: Warp, mask: int) -> Wait | None:
        if (wait := gather(w, mask, members(w, mask), b)) is not None:
            return wait
        votes = read(w) & mask
        if put32 is not None:
            put32(w, mask, votes)
            return None
        result = {"all": votes == mask, "any": votes != 0, "uni": votes in (0, mask)}[mode]
        assert put_p is not None
        put_p(w, mask, FULL if result else 0)
        return None

    return by_mask(b, member, run)


_REDUCE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@machine(r"redux\.sync\.(add|min|max|and|or|xor)\.(u32|s32|b32)")
def redux(b: Binding) -> Handler:
    d, source, member = b.ins.operands
    put, values, members = b.put32(d), b.lanes32(source), member_mask(b, member)
    reduce = _REDUCE[b.match[1]]
    dtype = np.int32 if b.match[2] == "s32" else np.uint32

    def run(w: Warp, mask: int) -> Wait | None:
        if (wait := gather(w, mask, members(w, mask), b)) is not None:
            return wait
        out = reduce.reduce(values(w).view(dtype)[LANES[mask]])
        put(w, mask, np.full(32, out, dtype).view(np.uint32))
        return None

    return by_mask(b, member, run)


@machine(r"activemask\.b32")
def activemask(b: Binding) -> Handler:
    put = b.put32(b.ins.operands[0])
    return lambda w, mask: put(w, mask, mask)


@machine(r"bar\.warp\.sync")
def bar_warp(b: Binding) -> Handler:
    """Lanes meet, and their earlier memory accesses are ordered before their later ones."""
    member = b.ins.operands[0] if b.ins.operands else Imm(-1)
    members = member_mask(b, member)

    def run(w: Warp, mask: int) -> Wait | None:
        if (wait := gather(w, mask, members(w, mask), b)) is not None:
            return wait
        if (race := w.cta.machine.race) is not None:
            race.warp_sync(w, mask)
        return None

    return by_mask(b, member, run)
