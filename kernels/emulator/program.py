"""A kernel ready to run: PTX instructions cut into segments, registers given places.

A *segment* is what a warp executes in one step: a block of native instructions with the branch that
ends it, or one instruction that the machine executes itself (memory, barriers, TMA, tensor core).
Segment indices are the machine's program counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .findings import UnsupportedPTX
from .memory.local import LOCAL_BASE
from .native import BlockBuilder, Places, compile_blocks, find, find_collective, source_lanes
from .ptx.ast import Entry, Instr, Label, Mem, Module, Operand, Reg, RegPair, Special, Vec
from .registers import RegisterFile

CLUSTER_RANK = "%cluster_ctarank"
ALL_LANES = 0xFFFFFFFF
SHARED_WINDOW_BASE = 1024  # sm_100 keeps the first KiB of the shared window for the system


def _not_bound(*_: Any) -> Any:
    raise AssertionError("the segment has not been decoded to the end")


@dataclass(slots=True)
class Segment:
    """One step of a warp. ``target`` is the segment a taken branch goes to; ``branch`` is ``none``,
    ``always`` or ``conditional``."""

    index: int
    instrs: list[Instr]
    native: bool
    branch: str = "none"
    target: int = -1
    run: Callable[..., Any] = field(default=_not_bound)
    checks: tuple[str, ...] = ()  # registers that may be unwritten when read here
    marks: tuple[str, ...] = ()  # checked registers that are written here
    tracked: bool = False  # it has either
    guard: tuple[int, int] | None = None  # of a machine instruction: predicate, lanes to flip
    count: int = 0
    converged: bool = False  # needs every live lane of the warp
    leaves: bool = False  # ret or exit
    source_lanes: int = 0  # lanes that a native shfl reads
    syncs: bool = False  # native, with a bar.warp.sync of the whole warp in it
    ld_uses: frozenset[int] = frozenset()  # tcgen05.ld segments whose results it computes with
    ld_touches: frozenset[int] = frozenset()  # and those whose registers it names at all
    overwrites: frozenset[int] = frozenset()  # wgmma segments whose A registers it writes

    @property
    def first(self) -> Instr:
        return self.instrs[0]


@dataclass
class Program:
    """A decoded entry. ``symbols``: shared variables' window addresses; ``local``: local variables'
    addresses; ``variables``: offsets of .global and .const variables, which stand behind the
    parameters; ``specials``: special registers in use."""

    module: Module
    entry: Entry
    segments: list[Segment]
    layout: RegisterFile
    symbols: dict[str, int]
    static_smem_bytes: int
    specials: tuple[str, ...]
    native: Any = None
    clustered: bool = False
    tracked: tuple[str, ...] = ()
    read: frozenset[str] = frozenset()  # registers that some instruction reads
    local: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0  # of a thread
    variables: dict[str, int] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)  # by binders, about the whole program

    def is_read(self, register: str) -> bool:
        """Whether anything reads the register: results that nobody reads need no place."""
        return register in self.read


def operand_regs(operand: Operand) -> Iterator[Reg | Special]:
    if isinstance(operand, Reg | Special):
        yield operand
    elif isinstance(operand, Vec):
        for item in operand.items:
            yield from operand_regs(item)
    elif isinstance(operand, RegPair):
        yield from operand_regs(operand.first)
        yield from operand_regs(operand.second)
    elif isinstance(operand, Mem):
        if isinstance(operand.base, Reg | Special):
            yield operand.base
        for item in operand.coords or ():
            yield from operand_regs(item)


_NO_DEST = frozenset(
    "st bra ret exit bar barrier fence membar red prefetch nanosleep trap griddepcontrol "
    "setmaxnreg discard applypriority cp brkpt pmevent call".split()
)


def destinations(ins: Instr) -> int:
    """How many leading operands are written (``d|p`` counts once)."""
    mods = ins.mods
    if mods[0] in ("bar", "barrier") and "red" in mods[1:3]:
        return 1
    if mods[0] in _NO_DEST:
        return 0
    if mods[0] == "mbarrier":
        if mods[1] in ("init", "inval", "expect_tx", "complete_tx"):
            return 0
        return 0 if ins.operands and isinstance(ins.operands[0], Mem) else 1
    if mods[0] == "tcgen05":
        if mods[1] != "ld":
            return 0
        return 2 if mods[2] == "red" else 1
    return 1 if ins.operands else 0


def uses_and_defs(ins: Instr) -> tuple[list[str], list[str]]:
    """Registers read and written. A guarded write also reads: the other lanes keep their value."""
    n = destinations(ins)
    defs = [r.name for op in ins.operands[:n] for r in operand_regs(op) if not isinstance(op, Mem)]
    uses = [r.name for op in ins.operands[n:] for r in operand_regs(op)]
    if is_wgmma(ins):
        uses += defs  # D is read too, unless scale-d is false
    uses += [r.name for op in ins.operands[:n] if isinstance(op, Mem) for r in operand_regs(op)]
    if ins.guard is not None:
        uses.append(ins.guard.name)
    return uses, defs


def is_wgmma(ins: Instr) -> bool:
    return ins.op.startswith("wgmma.mma_async.")


def is_branch(ins: Instr) -> bool:
    return ins.op in ("bra", "bra.uni")


def _is_native(ins: Instr) -> bool:
    """Whether the instruction runs in a native block; a parameter that a register points to does
    not, for the address has to be checked."""
    if ins.op.startswith("ld.param") and isinstance(ins.operands[1], Mem):
        return not isinstance(ins.operands[1].base, Reg)
    return find(ins.op) is not None or find_collective(ins) is not None


def cut(entry: Entry) -> list[Segment]:
    """Segments in program order, branch targets resolved."""
    leaders = set(entry.labels.values())
    segments: list[Segment] = []
    at: dict[int, int] = {}  # instruction index -> segment index
    block: list[Instr] = []

    def close() -> None:
        if block:
            segments.append(Segment(len(segments), list(block), True))
            block.clear()

    for i, ins in enumerate(entry.body):
        if i in leaders:
            close()
        at[i] = len(segments)
        if is_branch(ins):
            block.append(ins)
            close()
            segments[-1].branch = "always" if ins.guard is None else "conditional"
        elif _is_native(ins):
            block.append(ins)
        else:
            close()
            at[i] = len(segments)
            segments.append(Segment(len(segments), [ins], False))
    close()
    at[len(entry.body)] = len(segments)
    for segment in segments:
        segment.count = len(segment.instrs)
        segment.leaves = segment.instrs[-1].op in ("ret", "exit")
        segment.converged = segment.native and any(
            find_collective(ins) is not None for ins in segment.instrs
        )
        if segment.converged:
            for ins in segment.instrs:
                segment.source_lanes |= source_lanes(ins)
        segment.syncs = segment.native and any(i.op == "bar.warp.sync" for i in segment.instrs)
        if segment.branch != "none":
            label = segment.instrs[-1].operands[0]
            assert isinstance(label, Label)
            segment.target = at[entry.labels[label.name]]
    return segments


def successors(segment: Segment, total: int) -> list[int]:
    last = segment.instrs[-1]
    if segment.branch == "always":
        return [segment.target]
    if last.mods[0] in ("ret", "exit", "trap") and last.guard is None:
        return []
    out = [segment.index + 1] if segment.index + 1 < total else []
    return out + ([segment.target] if segment.branch == "conditional" else [])


@dataclass
class Flow:
    """Dataflow over segments with register sets as big integers (bit = register)."""

    bit: dict[str, int]
    live_out: list[int]
    unwritten_reads: list[int]  # registers read in the segment that some path leaves unwritten


def analyse(segments: list[Segment], given: Iterable[str]) -> Flow:
    bit: dict[str, int] = {}
    use: list[int] = []
    kill: list[int] = []
    surely: list[int] = []
    for segment in segments:
        u = k = s = 0
        for ins in segment.instrs:
            uses, defs = uses_and_defs(ins)
            for name in uses:
                mask = 1 << bit.setdefault(name, len(bit))
                if not k & mask:
                    u |= mask
            for name in defs:
                mask = 1 << bit.setdefault(name, len(bit))
                if ins.guard is None:
                    k |= mask
                elif not k & mask:
                    u |= mask
                s |= mask
        use.append(u)
        kill.append(k)
        surely.append(s)
    n = len(segments)
    succ = [[t for t in successors(s, n) if t < n] for s in segments]
    live_in, live_out = [0] * n, [0] * n
    changed = True
    while changed:
        changed = False
        for i in range(n - 1, -1, -1):
            out = 0
            for t in succ[i]:
                out |= live_in[t]
            into = use[i] | (out & ~kill[i])
            if out != live_out[i] or into != live_in[i]:
                live_out[i], live_in[i], changed = out, into, True
    everything = (1 << len(bit)) - 1
    written_in = [everything] * n
    if n:
        written_in[0] = sum(1 << bit[name] for name in given if name in bit)
    changed = True
    while changed:
        changed = False
        for i in range(n):
            out = written_in[i] | surely[i]
            for t in succ[i]:
                if written_in[t] & ~out:
                    written_in[t] &= out
                    changed = True
    return Flow(bit, live_out, [_plain_reads(segments[i], bit) & ~written_in[i] for i in range(n)])


def _plain_reads(segment: Segment, bit: dict[str, int]) -> int:
    """Registers that the segment reads before writing them, other than through a guarded write or a
    move (moving an undefined value is not yet using it)."""
    seen = reads = 0
    for ins in segment.instrs:
        uses, defs = uses_and_defs(ins)
        if ins.guard is None and ins.mods[0] not in ("mov", "selp", "wgmma"):
            for name in uses:
                mask = 1 << bit[name]
                if not seen & mask:
                    reads |= mask
        for name in defs:
            seen |= 1 << bit[name]
    return reads


def _names(mask: int, by_bit: list[str]) -> list[str]:
    out = []
    while mask:
        low = mask & -mask
        out.append(by_bit[low.bit_length() - 1])
        mask ^= low
    return out


def _link_loads(segments: list[Segment]) -> None:
    """Notes which segments touch, and which truly use, the registers of which tcgen05.ld or wgmma,
    and which overwrite registers that a wgmma reads.

    NVVM moves and packs a load's registers above its tcgen05.wait::ld, which for ptxas is renaming;
    a copy counts as the load's register, and copying as touching it, not as using it.
    """
    loads: dict[str, frozenset[int]] = {}
    sources: dict[str, frozenset[int]] = {}
    for segment in segments:
        ins = segment.first
        if not segment.native and (ins.op.startswith("tcgen05.ld.") or is_wgmma(ins)):
            for name in uses_and_defs(ins)[1]:
                loads[name] = loads.get(name, frozenset()) | {segment.index}
        if is_wgmma(ins) and isinstance(ins.operands[1], Vec):
            for register in operand_regs(ins.operands[1]):
                sources[register.name] = sources.get(register.name, frozenset()) | {segment.index}
    if not loads:
        return
    facts = [
        (segment.index, ins.mods[0] == "mov", *_facts_of(ins))
        for segment in segments
        for ins in segment.instrs
    ]
    nothing: frozenset[int] = frozenset()
    changed = True
    while changed:
        changed = False
        for _, copies, uses, defs in facts:
            if copies:
                source = nothing.union(*(loads.get(name, nothing) for name in uses))
                for name in defs:
                    if not source <= loads.get(name, nothing):
                        loads[name] = loads.get(name, nothing) | source
                        changed = True
    for index, copies, uses, defs in facts:
        touched = nothing.union(*(loads.get(name, nothing) for name in (*uses, *defs)))
        overwritten = nothing.union(*(sources.get(name, nothing) for name in defs))
        segments[index].overwrites |= overwritten
        segments[index].ld_touches |= touched - {index} | overwritten
        if not copies:
            used = nothing.union(*(loads.get(name, nothing) for name in uses))
            segments[index].ld_uses |= used


def _facts_of(ins: Instr) -> tuple[list[str], list[str]]:
    """Registers that an instruction reads and writes itself; the accumulators of a wgmma pass from
    one to the next without a wait."""
    if not is_wgmma(ins):
        return uses_and_defs(ins)
    return [r.name for op in ins.operands[1:] for r in operand_regs(op)], []


def place_shared(entry: Entry) -> tuple[dict[str, int], int]:
    """Window addresses of shared variables: statics in order, then the dynamic array."""
    at, symbols = SHARED_WINDOW_BASE, {}
    for var in sorted(entry.shared, key=lambda v: v.extern):
        at = (at + var.align - 1) // var.align * var.align
        symbols[var.name] = at
        at += var.nbytes
    static_end = at
    return symbols, static_end - SHARED_WINDOW_BASE


def place_local(entry: Entry) -> tuple[dict[str, int], int]:
    """Addresses of local variables, and the bytes that a thread has."""
    at, places = LOCAL_BASE, {}
    for var in entry.local:
        at = (at + var.align - 1) // var.align * var.align
        places[var.name] = at
        at += var.nbytes
    return places, at - LOCAL_BASE


def place_variables(module: Module, entry: Entry) -> dict[str, int]:
    """Offsets of .global and .const variables in the parameter block, behind the parameters."""
    at, places = (entry.param_bytes + 127) // 128 * 128, {}
    for var in module.variables:
        at = (at + var.align - 1) // var.align * var.align
        places[var.name] = at
        at += max(var.nbytes, 1)
    return places


def decode(
    module: Module,
    entry_name: str,
    bind: Callable[[Program, Segment], Callable[..., Any]],
    clustered: bool = False,
) -> Program:
    """Cuts, analyses, places and compiles. ``bind`` makes the handler of a machine instruction and
    raises `UnsupportedPTX` for what it does not know."""
    if entry_name not in module.entries:
        raise ValueError(f"entry {entry_name!r} is not in the PTX; it has {sorted(module.entries)}")
    entry = module.entries[entry_name]
    segments = cut(entry)
    named = (
        r.name
        for ins in entry.body
        for op in ins.operands
        for r in operand_regs(op)
        if isinstance(r, Special)
    )
    specials = tuple(dict.fromkeys([*([CLUSTER_RANK] if clustered else []), *named]))
    flow = analyse(segments, specials)
    kinds = {**entry.registers, **dict.fromkeys(specials, "b32")}
    used, groups = _crossing(segments, flow, specials)
    symbols, static_bytes = place_shared(entry)
    layout = RegisterFile(kinds, used, groups)
    program = Program(module, entry, segments, layout, symbols, static_bytes, specials)
    program.clustered = clustered
    program.local, program.local_bytes = place_local(entry)
    program.variables = place_variables(module, entry)
    program.read = frozenset(
        name for segment in segments for ins in segment.instrs for name in uses_and_defs(ins)[0]
    )
    _link_loads(segments)
    _track_unwritten(program, flow)
    _generate(program, flow)
    for segment in segments:
        if not segment.native:
            segment.run = bind(program, segment)
            if (guard := segment.first.guard) is not None:
                flip = ALL_LANES if guard.negated else 0
                segment.guard = (layout.pred(guard.name), flip)
    return program


def _crossing(
    segments: list[Segment], flow: Flow, specials: tuple[str, ...]
) -> tuple[list[str], list[list[str]]]:
    """Registers that need a place in memory, and vector operands that want consecutive rows."""
    by_bit = list(flow.bit)
    used: dict[str, None] = dict.fromkeys(specials)
    groups: list[list[str]] = []
    for i, segment in enumerate(segments):
        used.update(dict.fromkeys(_names(flow.live_out[i], by_bit)))
        if not segment.native:
            uses, defs = uses_and_defs(segment.first)
            used.update(dict.fromkeys(uses + defs))
            for op in segment.first.operands:
                if isinstance(op, Vec) and len(op.items) > 2:
                    names = [r.name for r in operand_regs(op)]
                    if len(set(names)) == len(op.items):
                        groups.append(names)
    if segments:  # what the first block reads unwritten still needs a (poisoned) place
        for mask in flow.unwritten_reads:
            used.update(dict.fromkeys(_names(mask, by_bit)))
    groups.sort(key=lambda g: -len(g))
    return list(used), groups


def _track_unwritten(program: Program, flow: Flow) -> None:
    by_bit = list(flow.bit)
    tracked = 0
    for mask in flow.unwritten_reads:
        tracked |= mask
    program.tracked = tuple(_names(tracked, by_bit))
    for i, segment in enumerate(program.segments):
        segment.checks = tuple(_names(flow.unwritten_reads[i], by_bit))
        written = 0
        for ins in segment.instrs if tracked else ():
            for name in uses_and_defs(ins)[1]:
                written |= 1 << flow.bit[name]
        segment.marks = tuple(_names(written & tracked, by_bit))
        segment.tracked = bool(segment.checks or segment.marks)


def _generate(program: Program, flow: Flow) -> None:
    by_bit = list(flow.bit)
    params = {p.name: p.offset for p in program.entry.params}
    places = Places(program.symbols, params, program.local, program.variables, program.clustered)
    blocks = []
    for segment in program.segments:
        if not segment.native:
            continue
        block = BlockBuilder(f"b{segment.index}", program.layout, places)
        taken = None
        for ins in segment.instrs:
            block.instr = ins
            if is_branch(ins):
                taken = block.p(ins.guard) if ins.guard is not None else None
                continue
            block.guard = block.p(ins.guard) if ins.guard is not None else None
            found, together = find(ins.op), find_collective(ins)
            try:
                if found is not None:
                    found[0](block, ins, found[1])
                else:
                    assert together is not None
                    together(block, ins)
            except (ValueError, KeyError, AssertionError, AttributeError) as error:
                if isinstance(error, UnsupportedPTX):
                    raise
                raise UnsupportedPTX(
                    f"ptx:{ins.line}: {ins.text!r}: operands not modelled ({error})"
                ) from error
        block.store_live(set(_names(flow.live_out[segment.index], by_bit)))
        blocks.append((block, taken))
    program.native = compile_blocks(blocks)
    for segment in program.segments:
        if segment.native:
            segment.run = program.native.functions[f"b{segment.index}"]
