"""Writes `records` while the machine runs: one call a step, and one reader an instruction.

The readers look at an instruction's operands before it executes, with the same `Binding` as the
handlers, so that the handlers themselves know nothing of records. An engine's or a barrier's opcode
that no reader knows is refused: a cycle model must not miss work.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .findings import Finding, UnsupportedPTX
from .isa.table import LANES, Binding, first_lane
from .machine import Machine
from .program import Program, Segment, uses_and_defs
from .ptx.ast import Imm, Instr, Mem
from .records import LANE_BITS, MORE, Code, Event, MmaForm, OpClass, Records, WarpRecord
from .schedule import CTA_RANK_SHIFT, CTA_WINDOW_MASK

if TYPE_CHECKING:
    from .host_runtime import Dim3
    from .state import Cta, Fragment, Warp

Row = tuple[int, int, int, int, int]
Reader = Callable[["Warp", int], "Row | list[Row]"]
_NONE: Row = (Event.NONE, 0, 0, 0, 0)
_READERS: list[tuple[re.Pattern[str], OpClass, Callable[[Binding], Reader] | None]] = []


class Recorder:
    """Collects the steps of a launch."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._readers: list[Reader | None] = [
            None if segment.native else _reader(program, segment) for segment in program.segments
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
        reader = self._readers[pc]
        assert reader is not None
        return reader(warp, active)

    def machine(self, warp: Warp, pc: int, active: int, rows: Row | list[Row]) -> None:
        self._steps[warp].append(pc << LANE_BITS | active.bit_count())
        if isinstance(rows, tuple):
            self._events[warp].append(rows)
            return
        events = self._events[warp]
        events += [(row[0] | MORE, *row[1:]) for row in rows[:-1]]
        events.append(rows[-1] if rows else _NONE)

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

    def _step(self, warp: Warp) -> bool:
        executed = self.executed
        can_go_on = super()._step(warp)
        if self.executed != executed and self.program.segments[warp.pc].native:
            self.recorder.native(warp, warp.pc, self._mask)
        return can_go_on

    def _execute(self, warp: Warp, fragment: Fragment, segment: Segment, mask: int) -> None:
        guard, active = segment.first.guard, mask
        if guard is not None:
            value = int(warp.preds[self.program.layout.pred(guard.name)])
            active &= ~value if guard.negated else value
        rows = self.recorder.read(warp, segment.index, active) if active else _NONE
        executed = self.executed
        super()._execute(warp, fragment, segment, mask)
        if self.executed != executed:  # it is done; waits that fail do not count
            self.recorder.machine(warp, segment.index, active, rows)


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
        def_start=def_start,
        defs=defs,
        use_start=use_start,
        uses=uses,
        registers=len(registers),
        op_names=tuple(names),
        sources=tuple(sources),
    )


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
    for pattern, found, _ in _READERS:
        if pattern.fullmatch(op):
            return found
    return OpClass.ALU


# -- readers of machine instructions ---------------------------------------------------------------


def reads(
    pattern: str, op: OpClass
) -> Callable[[Callable[[Binding], Reader]], Callable[[Binding], Reader]]:
    """Registers the reader of every opcode that ``pattern`` matches in full."""

    def register(make: Callable[[Binding], Reader]) -> Callable[[Binding], Reader]:
        _READERS.append((re.compile(pattern), op, make))
        return make

    return register


def plain(pattern: str, op: OpClass) -> None:
    """Opcodes of which a model needs the class only."""
    _READERS.append((re.compile(pattern), op, None))


def _reader(program: Program, segment: Segment) -> Reader:
    ins: Instr = segment.first
    for pattern, _, make in _READERS:
        match = pattern.fullmatch(ins.op)
        if match is not None:
            if make is None:
                return lambda w, mask: _NONE
            return make(Binding(program, ins, match, segment.index))
    raise UnsupportedPTX(
        f"ptx:{ins.line}: {ins.text!r}: opcode {ins.op!r} cannot be recorded for the cycle model"
    )


plain(r"ret|exit|trap|nanosleep\..*|createpolicy\..*|griddepcontrol\..*", OpClass.OTHER)
plain(r"prefetch.*|bar\.warp\.sync", OpClass.OTHER)
plain(r"fence\..*|membar\..*|tcgen05\.fence::.*|wgmma\.fence.*", OpClass.FENCE)
plain(r"shfl\..*", OpClass.SHUFFLE)
plain(r"vote\..*|elect\..*|redux\..*|match\..*|activemask\..*", OpClass.VOTE)
plain(r"mbarrier\.inval\..*", OpClass.BARRIER)
plain(r"tcgen05\.relinquish_alloc_permit\..*|mapa\..*|isspacep\..*", OpClass.OTHER)
plain(r"cvta\..*", OpClass.OTHER)
plain(r"(atom|red)\..*", OpClass.GLOBAL)


@reads(r"setmaxnreg\..*", OpClass.OTHER)
def _setmaxnreg(b: Binding) -> Reader:
    count = b.scalar(b.ins.operands[0])
    return lambda w, mask: (Event.REGISTERS, count(w, first_lane(mask)), 0, 0, 0)


def _by_value(mask: int, values: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(value, lanes that give it)."""
    found, counts = np.unique(values[LANES[mask]], return_counts=True)
    return list(zip(map(int, found), map(int, counts), strict=True))


@reads(r"mbarrier\.init\..*", OpClass.BARRIER)
def _init(b: Binding) -> Reader:
    address, count = b.addresses(b.ins.operands[0]), b.scalar(b.ins.operands[1])

    def read(w: Warp, mask: int) -> list[Row]:
        arrivals = count(w, first_lane(mask))
        return [(Event.MBARRIER_INIT, at, arrivals, 0, 0) for at, _ in _by_value(mask, address(w))]

    return read


@reads(r"mbarrier\.arrive(\.expect_tx)?(\.noComplete)?\.(?!.*noinc).*", OpClass.BARRIER)
def _arrive(b: Binding) -> Reader:
    operands = list(b.ins.operands)
    if not isinstance(operands[0], Mem):
        operands.pop(0)
    address = b.addresses(operands[0])
    amount = b.scalar(operands[1]) if len(operands) > 1 else None
    expects = bool(b.match[1])

    def read(w: Warp, mask: int) -> list[Row]:
        rows: list[Row] = []
        value = amount(w, first_lane(mask)) if amount is not None else 1
        for at, lanes in _by_value(mask, address(w)):
            arrivals, nbytes = (lanes, value * lanes) if expects else (lanes * value, 0)
            rows.append((Event.MBARRIER_ARRIVE, at, arrivals, nbytes, 0))
        return rows

    return read


@reads(r"mbarrier\.(expect|complete)_tx\..*", OpClass.BARRIER)
def _expect(b: Binding) -> Reader:
    address, nbytes = b.addresses(b.ins.operands[0]), b.scalar(b.ins.operands[1])
    sign = 1 if b.match[1] == "expect" else -1

    def read(w: Warp, mask: int) -> list[Row]:
        value = sign * nbytes(w, first_lane(mask))
        return [
            (Event.MBARRIER_EXPECT, at, value * lanes, 0, 0)
            for at, lanes in _by_value(mask, address(w))
        ]

    return read


@reads(r"mbarrier\.(?:try|test)_wait.*", OpClass.BARRIER)
def _wait(b: Binding) -> Reader:
    """Read when the wait succeeds: the phase just completed, or the token's own."""
    address = b.addresses(b.ins.operands[1])

    def read(w: Warp, mask: int) -> Row:
        at = int(address(w)[first_lane(mask)])
        cta, own = w.cta.locate(at)
        return (Event.MBARRIER_WAIT, at, cta.mbarriers.state(own).phase - 1, 0, 0)

    return read


@reads(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?", OpClass.BARRIER)
def _named(b: Binding) -> Reader:
    number = b.scalar(b.ins.operands[0])
    threads = b.scalar(b.ins.operands[1]) if len(b.ins.operands) > 1 else None
    waits = int(b.match[1] == "sync")

    def read(w: Warp, mask: int) -> Row:
        lane = first_lane(mask)
        count = threads(w, lane) if threads is not None else w.cta.threads_rounded
        return (Event.NAMED_BARRIER, number(w, lane), count, waits, 0)

    return read


@reads(r"barrier\.cluster\.(arrive|wait).*", OpClass.BARRIER)
def _cluster(b: Binding) -> Reader:
    waits = int(b.match[1] == "wait")
    return lambda w, mask: (Event.CLUSTER_BARRIER, waits, 0, 0, 0)


# -- memory ---------------------------------------------------------------------------------------


def wavefronts(addresses: NDArray[np.int64], nbytes: int) -> int:
    """Passes over the 32 four-byte banks that a warp's access takes: lanes go in groups of 128
    bytes, and the words of a group that share a bank, unless equal, go one after another."""
    per_pass = max(1, 128 // max(nbytes, 4))
    total = 0
    for first in range(0, len(addresses), per_pass):
        group = addresses[first : first + per_pass]
        words = np.unique((group[:, None] + np.arange(0, max(nbytes, 1), 4)) // 4)
        total += int(np.bincount(words % 32).max())
    return total


@reads(r"(ld|st)matrix\..*\.x([124])(?:\.trans)?\.shared.*", OpClass.SMEM)
def _matrix(b: Binding) -> Reader:
    """Eight rows of 16 bytes a matrix; each row has its own place in the banks if swizzled well."""
    kind = Event.SMEM_LOAD if b.match[1] == "ld" else Event.SMEM_STORE
    row: Row = (kind, 128 * int(b.match[2]), int(b.match[2]), 0, 0)
    return lambda w, mask: row


_ACCESS = r"(ld|st)(?:\.(?!shared|global|param|v2|v4|v8|b8|b16|b32|b64|async)[\w:]+)*"
_TYPE = r"(?:\.[\w:]+)*?(?:\.v([248]))?\.[busf](8|16|32|64)"


@reads(rf"{_ACCESS}\.shared(?:::cta|::cluster)?{_TYPE}", OpClass.SMEM)
def _shared(b: Binding) -> Reader:
    load = b.match[1] == "ld"
    nbytes = int(b.match[2] or 1) * int(b.match[3]) // 8
    address = b.addresses(b.ins.operands[1 if load else 0])
    kind = Event.SMEM_LOAD if load else Event.SMEM_STORE

    def read(w: Warp, mask: int) -> Row:
        at = address(w)[LANES[mask]] & CTA_WINDOW_MASK
        return (kind, nbytes * len(at), wavefronts(at, nbytes), 0, 0)

    return read


@reads(rf"{_ACCESS}(?:\.global)?{_TYPE}", OpClass.GLOBAL)
def _global(b: Binding) -> Reader:
    load = b.match[1] == "ld"
    nbytes = int(b.match[2] or 1) * int(b.match[3]) // 8
    address = b.addresses(b.ins.operands[1 if load else 0])
    kind = Event.GLOBAL_LOAD if load else Event.GLOBAL_STORE

    def read(w: Warp, mask: int) -> Row:
        at = address(w)[LANES[mask]]
        sectors = np.unique(np.concatenate([at // 32, (at + nbytes - 1) // 32])).size
        return (kind, nbytes * len(at), sectors, 0, 0)

    return read


# -- Tensor Memory, tensor core, copies ------------------------------------------------------------

# Bytes of the cells that one repetition of a shape moves for a warp.
_SHAPE_BYTES = {"32x32b": 128, "16x64b": 128, "16x128b": 256, "16x256b": 512, "16x32bx2": 128}


@reads(r"tcgen05\.(ld|st)\.sync\.aligned\.(\w+)\.x(\d+)(?:\.\w+(?:::\w+)?)*\.b32", OpClass.TMEM)
def _tmem(b: Binding) -> Reader:
    row: Row = (
        Event.TMEM_LOAD if b.match[1] == "ld" else Event.TMEM_STORE,
        _SHAPE_BYTES[b.match[2]] * int(b.match[3]),
        0,
        0,
        0,
    )
    return lambda w, mask: row


@reads(r"tcgen05\.wait::(ld|st)\..*", OpClass.TMEM)
def _tmem_wait(b: Binding) -> Reader:
    row: Row = (Event.TMEM_WAIT, int(b.match[1] == "st"), 0, 0, 0)
    return lambda w, mask: row


@reads(r"tcgen05\.(alloc|dealloc)\..*", OpClass.TMEM)
def _tmem_alloc(b: Binding) -> Reader:
    columns, sign = b.scalar(b.ins.operands[1]), 1 if b.match[1] == "alloc" else -1
    return lambda w, mask: (Event.TMEM_ALLOC, sign * columns(w, first_lane(mask)), 0, 0, 0)


_KINDS = {"f16": (16, 16), "tf32": (8, 32), "f8f6f4": (32, 8), "i8": (32, 8)}  # K, bits
_MMA = r"tcgen05\.mma\.cta_group::([12])\.kind::(f16|tf32|f8f6f4|i8)(?:\.collector::a::\w+)?"


@reads(_MMA, OpClass.TENSOR)
def _mma(b: Binding) -> Reader:
    """M and N are bits 24-28 and 17-22 of the instruction descriptor (PTX ISA 9.1 table 42)."""
    d, a, _, idesc = b.ins.operands[:4]
    column, descriptor = b.address(d), b.scalar(idesc)
    k, bits = _KINDS[b.match[2]]
    form = MmaForm(isinstance(a, Mem), int(b.match[1]), bits).encode()

    def read(w: Warp, mask: int) -> list[Row]:
        rows: list[Row] = []
        for lane in map(int, LANES[mask]):
            value = descriptor(w, lane)
            m, n = (value >> 24 & 31) << 4, (value >> 17 & 63) << 3
            rows.append((Event.MMA, m, n, k | form << 16, column(w, lane) & 0xFFFF))
        return rows

    return read


@reads(r"tcgen05\.commit\..*?(\.multicast::cluster)?(?:\.b64)", OpClass.TENSOR)
def _commit(b: Binding) -> Reader:
    operand = b.ins.operands[0]
    bar = b.address(operand) if isinstance(operand, Mem) else b.scalar(operand)
    multicast = b.scalar(b.ins.operands[1]) if len(b.ins.operands) > 1 else None

    def read(w: Warp, mask: int) -> list[Row]:
        lane = first_lane(mask)
        at = bar(w, lane)
        if multicast is None:
            return [(Event.COMMIT, at, 0, 0, 0)]
        ranks = multicast(w, lane) & 0xFFFF
        return [
            (Event.COMMIT, rank << CTA_RANK_SHIFT | at & CTA_WINDOW_MASK, 0, 0, 0)
            for rank in range(16)
            if ranks >> rank & 1
        ]

    return read


@reads(r"cp\.async\.bulk\.tensor\.\dd\.shared(?:::cta|::cluster)\.global\b.*", OpClass.COPY)
def _copy_in(b: Binding) -> Reader:
    target, tensor, barrier = b.ins.operands[:3]
    assert isinstance(tensor, Mem)
    to, bar, base = (
        b.address(target),
        b.address(barrier),
        b.address(Mem(tensor.base, tensor.offset)),
    )

    def read(w: Warp, mask: int) -> list[Row]:
        machine = w.cta.machine
        return [
            (
                Event.COPY_IN,
                bar(w, lane),
                machine.tensor_map(base(w, lane)).tile_bytes,
                to(w, lane),
                0,
            )
            for lane in map(int, LANES[mask])
        ]

    return read


@reads(r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta\b.*", OpClass.COPY)
def _copy_out(b: Binding) -> Reader:
    """Lanes that copy from the same place are one copy: whole warps issue stores, as CUTLASS's
    epilogues do, and the hardware's instruction takes uniform registers."""
    tensor, source = b.ins.operands[:2]
    assert isinstance(tensor, Mem)
    base, start = b.address(Mem(tensor.base, tensor.offset)), b.address(source)

    def read(w: Warp, mask: int) -> list[Row]:
        machine = w.cta.machine
        lanes: dict[tuple[int, int], int] = {}
        for lane in map(int, LANES[mask]):
            key = base(w, lane), start(w, lane)
            lanes[key] = lanes.get(key, 0) + 1
        return [
            (Event.COPY_OUT, machine.tensor_map(at).tile_bytes, smem, count, 0)
            for (at, smem), count in lanes.items()
        ]

    return read


@reads(r"cp\.async\.bulk\.commit_group", OpClass.COPY)
def _copy_commit(b: Binding) -> Reader:
    return lambda w, mask: (Event.COPY_COMMIT, 0, 0, 0, 0)


@reads(r"cp\.async\.bulk\.wait_group(\.read)?", OpClass.COPY)
def _copy_wait(b: Binding) -> Reader:
    count = b.ins.operands[0]
    allowed = count.value if isinstance(count, Imm) else 0
    return lambda w, mask: (Event.COPY_WAIT, allowed, int(bool(b.match[1])), 0, 0)
