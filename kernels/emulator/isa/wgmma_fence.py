"""Where a wgmma.fence is missing, found from the code alone.

PTX ISA 9.1 section 9.7.15.7.1: a wgmma.fence must come before the first wgmma.mma_async of a kernel
and between an access of a register by other instructions and by a wgmma; accumulators of earlier
wgmma of the same shape need none. A register that *every* path to a wgmma has written since its
last fence is an error; what only some path does is let pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..program import operand_regs, successors, uses_and_defs
from ..ptx.ast import Instr, Vec

if TYPE_CHECKING:
    from ..program import Program, Segment


def unfenced(program: Program, strict: bool) -> frozenset[int]:
    """Segments of wgmma instructions that surely lack a fence. LLVM puts the constants that
    accumulators start from behind the fence that the source has behind them, and ptxas makes that
    good: they count as writes only if ``strict``."""
    key = f"wgmma without a fence, {strict=}"
    if key not in program.found:
        program.found[key] = _analyse(program, strict)
    found: frozenset[int] = program.found[key]
    return found


def _is_mma(ins: Instr) -> bool:
    return ins.op.startswith("wgmma.mma_async")


def _registers(ins: Instr) -> list[str]:
    """Of D and of A, where A lies in registers."""
    parts = [op for op in ins.operands[:2] if isinstance(op, Vec)]
    return [r.name for op in parts for r in operand_regs(op)]


def _copies(ins: Instr, strict: bool) -> bool:
    return ins.mods[0] == "mov" and (not strict or bool(uses_and_defs(ins)[0]))


def _tracked(program: Program) -> dict[str, int]:
    """Bits of the registers of wgmma instructions, and of those that are copied into them."""
    every = [ins for segment in program.segments for ins in segment.instrs]
    names = {name for ins in every if _is_mma(ins) for name in _registers(ins)}
    moves = [uses_and_defs(ins) for ins in every if _copies(ins, True)]
    grown = True
    while grown:
        grown = False
        for uses, defs in moves:
            if names.intersection(defs) and not names.issuperset(uses):
                names.update(uses)
                grown = True
    if names:
        names.add(_NEVER)
    return {name: 1 << k for k, name in enumerate(sorted(names))}


_NEVER = "no fence yet"  # a register of its own that only a fence cleans
# A step of a segment: what becomes of the set of dirty registers.
_FENCE, _CHECK, _WRITE, _COPY = range(4)
_Step = tuple[int, int, int]  # kind, written registers, sources


def _steps(segment: Segment, bit: dict[str, int], strict: bool) -> list[_Step]:
    steps = []
    for ins in segment.instrs:
        if ins.op.startswith("wgmma.fence"):
            steps.append((_FENCE, 0, 0))
        elif _is_mma(ins):
            used = {_NEVER, *_registers(ins)}
            steps.append((_CHECK, sum(bit[name] for name in used), 0))
        else:
            uses, defs = uses_and_defs(ins)
            written = sum({bit[name] for name in defs if name in bit})
            if written and ins.guard is None:
                sources = sum({bit[name] for name in uses if name in bit})
                steps.append((_COPY if _copies(ins, strict) else _WRITE, written, sources))
    return steps


def _run(steps: list[_Step], dirty: int) -> tuple[int, int]:
    """(dirty registers behind the segment, those that its wgmma used dirty)."""
    used = 0
    for kind, written, sources in steps:
        if kind == _FENCE:
            dirty = 0
        elif kind == _CHECK:
            used |= dirty & written
        elif kind == _WRITE or dirty & sources:
            dirty |= written
        else:
            dirty &= ~written
    return dirty, used


def _analyse(program: Program, strict: bool) -> frozenset[int]:
    bit = _tracked(program)
    if not bit:
        return frozenset()
    segments, every = program.segments, (1 << len(bit)) - 1
    steps = [_steps(segment, bit, strict) for segment in segments]
    dirty_in = [every] * len(segments)
    work = set(range(len(segments)))
    while work:
        index = work.pop()
        out, _ = _run(steps[index], dirty_in[index])
        for after in successors(segments[index], len(segments)):
            if dirty_in[after] & ~out:
                dirty_in[after] &= out
                work.add(after)
    return frozenset(i for i, s in enumerate(steps) if s and _run(s, dirty_in[i])[1])
