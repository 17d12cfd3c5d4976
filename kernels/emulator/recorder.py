"""Writes `records` while the machine runs: one call a step, and one reader an instruction."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .findings import Finding
from .machine import Machine
from .program import Program, Segment, uses_and_defs
from .ptx.ast import Imm, Instr
from .readers import NONE, Reader, Row, class_of, reader
from .records import LANE_BITS, MORE, Code, OpClass, Records, WarpRecord

if TYPE_CHECKING:
    from .host_runtime import Dim3
    from .state import Cta, Fragment, Warp


class Recorder:
    """Collects the steps of a launch."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._readers: list[Reader | None] = [
            None if segment.native else reader(program, segment) for segment in program.segments
        ]
        self._steps: defaultdict[Warp, list[int]] = defaultdict(list)
        self._events: defaultdict[Warp, list[Row]] = defaultdict(list)
        self._ctas: list[int] = []
        self._warps: list[WarpRecord] = []

    def native(self, warp: Warp, pc: int, mask: int) -> None:
        """A block of native instructions ran."""
        self._steps[warp].append(pc << LANE_BITS | mask.bit_count())

    def read(self, warp: Warp, pc: int, active: int) -> Row | list[Row]:
        """What a machine instruction is about to do, for `machine` once it is done."""
        found = self._readers[pc]
        assert found is not None
        return found(warp, active)

    def machine(self, warp: Warp, pc: int, active: int, rows: Row | list[Row]) -> None:
        self._steps[warp].append(pc << LANE_BITS | active.bit_count())
        if isinstance(rows, tuple):
            self._events[warp].append(rows)
            return
        events = self._events[warp]
        events += [(row[0] | MORE, *row[1:]) for row in rows[:-1]]
        events.append(rows[-1] if rows else NONE)

    def close_cta(self, cta: Cta, grid: tuple[int, int, int]) -> None:
        """The CTA has ended: its lists become arrays."""
        x, y, z = cta.block
        index = x + grid[0] * (y + grid[1] * z)
        self._ctas.append(index)
        for warp in cta.warps:
            steps = np.array(self._steps.pop(warp), np.int64)
            events = np.array(self._events.pop(warp), np.int64).reshape(-1, 5)
            self._warps.append(WarpRecord(index, warp.index, warp.name, steps, events))

    def records(self, machine: Machine) -> Records:
        launch = machine.launch
        return Records(
            launch.kernel,
            machine.gpu.name,
            launch.grid,
            launch.block,
            launch.cluster,
            launch.smem_bytes,
            tuple(self._ctas),
            code_of(self.program),
            tuple(self._warps),
        )


class RecordingMachine(Machine):
    """A machine that writes records; `Machine` itself knows nothing of them."""

    def __init__(self, program: Program, *rest: Any) -> None:
        super().__init__(program, *rest)
        self.recorder = Recorder(program)

    def records(self) -> Records:
        return self.recorder.records(self)

    def run_cluster(self, blocks: list[Dim3]) -> Finding | None:
        finding = super().run_cluster(blocks)
        for cta in self.ctas:
            self.recorder.close_cta(cta, self.launch.grid)
        return finding

    def _step(self, warp: Warp, fragment: Fragment) -> bool:
        executed = self.executed
        goes_on = super()._step(warp, fragment)
        if self.executed != executed and self.program.segments[warp.pc].native:
            self.recorder.native(warp, warp.pc, self._mask)
        return goes_on

    def _execute(self, warp: Warp, fragment: Fragment, segment: Segment, mask: int) -> bool:
        guard, active = segment.first.guard, mask
        if guard is not None:
            value = warp.flags[self.program.layout.pred(guard.name)]
            active &= ~value if guard.negated else value
        rows = self.recorder.read(warp, segment.index, active) if active else NONE
        executed = self.executed
        goes_on = super()._execute(warp, fragment, segment, mask)
        if self.executed != executed:  # it is done; waits that fail do not count
            self.recorder.machine(warp, segment.index, active, rows)
        return goes_on


# -- the code -------------------------------------------------------------------------------------


def code_of(program: Program) -> Code:
    """The program's instructions as arrays."""
    segments = program.segments
    instructions = [ins for segment in segments for ins in segment.instrs]
    names: dict[str, int] = {}
    sources: dict[str, int] = {}
    registers: dict[str, int] = {}
    rows = [uses_and_defs(ins) for ins in instructions]

    def compressed(which: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        lists = [
            [registers.setdefault(name, len(registers)) for name in dict.fromkeys(row[which])]
            for row in rows
        ]
        start = np.cumsum([0, *(len(x) for x in lists)], dtype=np.int32)
        return start, np.array([r for x in lists for r in x], np.int32)

    use_start, uses = compressed(0)
    def_start, defs = compressed(1)
    source_of = program.module.source_of
    return Code(
        segment_start=np.cumsum([0, *(len(s.instrs) for s in segments)], dtype=np.int32),
        leader=_leaders(program),
        machine=np.array([not s.native for s in segments], np.bool_),
        target=np.array([s.target for s in segments], np.int32),
        op=np.array([op_class(ins.op) for ins in instructions], np.uint8),
        width=np.array([2 if ins.mods[-1].endswith("f32x2") else 1 for ins in instructions], "u1"),
        op_name=np.array([names.setdefault(i.op, len(names)) for i in instructions], np.int32),
        source=np.array(
            [sources.setdefault(source_of(i), len(sources)) for i in instructions], np.int32
        ),
        ptx_line=np.array([ins.line for ins in instructions], np.int32),
        immediate=np.array([_allowed_groups(ins) for ins in instructions], np.int32),
        def_start=def_start,
        defs=defs,
        use_start=use_start,
        uses=uses,
        registers=len(registers),
        op_names=tuple(names),
        sources=tuple(sources),
    )


def _allowed_groups(ins: Instr) -> int:
    first = ins.operands[0] if ".wait_group" in ins.op and ins.operands else None
    return first.value if isinstance(first, Imm) else 0


def _leaders(program: Program) -> NDArray[np.bool_]:
    """Segments that begin a basic block: the entry, branch targets, and what follows a branch."""
    leaders = np.zeros(len(program.segments), np.bool_)
    if len(leaders):
        leaders[0] = True
    for segment in program.segments:
        if segment.branch != "none" or segment.leaves:
            if segment.index + 1 < len(leaders):
                leaders[segment.index + 1] = True
        if 0 <= segment.target < len(leaders):
            leaders[segment.target] = True
    return leaders


_NATIVE_CLASSES: tuple[tuple[re.Pattern[str], OpClass], ...] = tuple(
    (re.compile(pattern), op)
    for pattern, op in (
        (r"bra(\.uni)?", OpClass.BRANCH),
        (r"(and|or|xor|not)\.pred|mov\.pred", OpClass.PREDICATE),
        (r"mov\..*|cvta\..*|ld\.param\..*", OpClass.MOVE),
        (r"cvt\.[us]64\.[us]32|cvt\.[us]32\.[us]64|cvt\.[us](16|32)\.[us](8|16)", OpClass.MOVE),
        (r"cvt\..*", OpClass.CVT),
        (r"(add|sub|mul|fma)(\.(rn|rz|rm|rp))?(\.ftz)?(\.sat)?\.f32(x2)?", OpClass.FMA),
        (r"(ex2|lg2|sin|cos|rcp|rsqrt|sqrt|tanh)\.approx.*", OpClass.MUFU),
        (r"(mul|mad)\.(lo|hi|wide)\..*", OpClass.IMAD),
        (r"(div|rem)\..*|(rcp|sqrt)\.rn.*|.*\.f64", OpClass.LONG),
    )
)


def op_class(op: str) -> OpClass:
    """The class of an opcode; plain ALU work where nothing else is known of a native one."""
    for pattern, found in _NATIVE_CLASSES:
        if pattern.fullmatch(op):
            return found
    found_class = class_of(op)
    return OpClass.ALU if found_class is None else found_class
