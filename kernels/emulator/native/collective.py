"""Warp-wide instructions inside native blocks, where all of the warp's live lanes take part.

elect, vote, shfl of a fixed lane and bar.warp need no more than the lane mask once every live lane
is there. A block that holds one runs only then (`Segment.converged`: the machine lets lanes wait
for each other first), so only the form with the full member mask and no guard compiles; others are
executed by the machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..ptx.ast import Imm, Instr, RegPair, Sink
from .builder import BlockBuilder
from .ir import I1, I32, V, splat_i

FULL = 0xFFFFFFFF
Emitter = Callable[[BlockBuilder, Instr], None]
_VOTE = re.compile(r"vote\.sync\.(all|any|ballot)\.(pred|b32)")


def find_collective(ins: Instr) -> Emitter | None:
    """The emitter of a collective instruction in its convergent form, or None."""
    members = ins.operands[-1] if ins.operands else None
    if ins.guard is not None or not isinstance(members, Imm) or members.value & FULL != FULL:
        return None
    if ins.op == "elect.sync":
        return _elect
    if ins.op == "bar.warp.sync":
        return _barrier
    if (match := _VOTE.fullmatch(ins.op)) is not None:
        if (match[1] == "ballot") == (match[2] == "b32"):
            return _vote
    if ins.op == "shfl.sync.idx.b32" and not isinstance(ins.operands[0], RegPair):
        lane, clamp = ins.operands[2:4]
        if isinstance(lane, Imm) and isinstance(clamp, Imm) and clamp.value == V - 1:
            return _broadcast
    return None


def source_lanes(ins: Instr) -> int:
    """The lane that a shfl of a fixed lane reads, as a mask; 0 for any other instruction."""
    if ins.op != "shfl.sync.idx.b32" or find_collective(ins) is None:
        return 0
    lane = ins.operands[2]
    assert isinstance(lane, Imm)
    return 1 << (lane.value & V - 1)


def _lanes(b: BlockBuilder, mask: str) -> str:
    return b.t(f"bitcast i32 {mask} to {I1}")


def _splat(b: BlockBuilder, scalar: str) -> str:
    one = b.t(f"insertelement {I32} poison, i32 {scalar}, i64 0")
    return b.t(f"shufflevector {I32} {one}, {I32} poison, {I32} zeroinitializer")


def _elect(b: BlockBuilder, ins: Instr) -> None:
    """The lowest live lane leads; PTX leaves the choice open but fixed."""
    pair = ins.operands[0]
    assert isinstance(pair, RegPair)
    lowest = b.t(f"and i32 %mask, {b.t('sub i32 0, %mask')}")
    if not isinstance(pair.first, Sink):
        index = b.call("i32", "llvm.cttz.i32", ("i32", "%mask"), ("i1", "false"))
        b.set_i32(pair.first, _splat(b, index))
    if not isinstance(pair.second, Sink):
        b.set_p(pair.second, _lanes(b, lowest))


def _barrier(b: BlockBuilder, ins: Instr) -> None:
    """All lanes are here: nothing is left to wait for."""


def _vote(b: BlockBuilder, ins: Instr) -> None:
    d, p, _ = ins.operands
    bits = b.t(f"and i32 {b.t(f'bitcast {I1} {b.p(p)} to i32')}, %mask")
    if ins.op.endswith(".b32"):
        b.set_i32(d, _splat(b, bits))
        return
    against, compare = ("%mask", "eq") if ".all." in ins.op else ("0", "ne")
    result = b.t(f"icmp {compare} i32 {bits}, {against}")
    b.set_p(d, _lanes(b, b.t(f"sext i1 {result} to i32")))


def _broadcast(b: BlockBuilder, ins: Instr) -> None:
    """shfl.sync.idx of one lane for all; a lane that has returned gives an unspecified value."""
    d, source, lane, _, _ = ins.operands
    assert isinstance(lane, Imm)
    from_lane = splat_i(32, lane.value & V - 1)
    b.set_i32(d, b.t(f"shufflevector {I32} {b.i32(source)}, {I32} poison, {I32} {from_lane}"))
