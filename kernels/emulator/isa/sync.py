"""Barriers, fences, and the end of a thread.

PTX ISA 9.1 sections 9.7.12 and 9.7.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..checks.flags import SCOPES
from ..findings import EmulatorFault
from ..ptx.ast import Imm, Instr, Label, Mem, Operand, Reg, Sink
from ..sync.votes import Vote
from .table import FULL, LANES, Binding, Handler, Wait, first_lane, machine

if TYPE_CHECKING:
    from ..program import Program
    from ..state import Warp

_SPACE = r"\.shared(?:::cta|::cluster)?"
_ORDER = r"(\.(?:release|relaxed|acquire)\.(?:cta|cluster))?"


# -- threads -------------------------------------------------------------------------------------


@machine(r"ret|exit")
def leave(b: Binding) -> Handler:
    def run(w: Warp, mask: int) -> None:
        w.exit_lanes(mask)

    return run


@machine(r"trap")
def trap(b: Binding) -> Handler:
    def run(w: Warp, mask: int) -> None:
        raise EmulatorFault("trap", "the kernel executed trap")

    return run


@machine(r"fence\.proxy\.async(?:\.(?:shared::cta|shared::cluster|global))?")
def fence_proxy_async(b: Binding) -> Handler:
    last = b.ins.mods[-1]
    space = last.partition("::")[0] if last != "async" else ""

    def run(w: Warp, mask: int) -> None:
        if (race := w.cta.machine.race) is not None:
            race.fence_proxy_async(w, space)

    return run


@machine(r"fence\.mbarrier_init\.release\.cluster")
def fence_mbarrier_init(b: Binding) -> Handler:
    def run(w: Warp, mask: int) -> None:
        if (race := w.cta.machine.race) is not None:
            race.fence_mbarrier_init(w)

    return run


@machine(r"fence(?:\.(sc|acq_rel|acquire|release))?\.(cta|cluster|gpu|sys)|membar\.(cta|gl|sys)")
def fence(b: Binding) -> Handler:
    """Ordinary memory effects happen in program order; only the race detector has to know."""
    kind, scope = b.match[1], SCOPES[(b.match[2] or b.match[3]).replace("gl", "gpu")]

    def run(w: Warp, mask: int) -> None:
        if (race := w.cta.machine.race) is not None:
            race.fence(w, scope, kind != "release", kind != "acquire")

    return run


@machine(r"griddepcontrol\.wait")
def grid_dependency_wait(b: Binding) -> Handler:
    """Launches run one after the other: only the race detector has to know."""

    def run(w: Warp, mask: int) -> None:
        if (races := w.cta.machine.globals) is not None:
            races.grid_dependency_wait(w)

    return run


@machine(
    r"griddepcontrol\.launch_dependents|nanosleep\.u32|"
    r"prefetch(?:\.param)?\.tensormap|prefetch\.global\.L[12](?:::\w+)?"
)
def passing_by(b: Binding) -> Handler:
    """Hints, and what has no effect in a launch of its own."""
    return lambda w, mask: None


@machine(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(\.aligned)?", converged=True)
def named_barrier(b: Binding) -> Handler:
    """The count is in threads; a warp arrives as a whole (PTX ISA 9.1 section 9.7.13.1)."""
    number = b.scalar(b.ins.operands[0])
    threads = b.scalar(b.ins.operands[1]) if len(b.ins.operands) > 1 else None
    if b.match[1] == "arrive" and threads is None:
        raise b.unsupported("bar.arrive needs a thread count")
    waits = b.match[1] == "sync"

    def run(w: Warp, mask: int) -> Wait | None:
        lane = first_lane(mask)
        index = number(w, lane)
        expected = threads(w, lane) if threads is not None else None
        if w.cta.named.arrive(w, index, expected, waits):
            return None
        if not waits:
            return None
        return Wait(
            ("bar", index), f"barrier {index}", retry=False, detail=(("barrier", f"named {index}"),)
        )

    return run


@machine(
    r"(?:bar|barrier)(?:\.cta)?\.red\.(?:(popc)(?:\.aligned)?\.u32|(and|or)(?:\.aligned)?\.pred)",
    converged=True,
)
def barrier_reduction(b: Binding) -> Handler:
    """bar.sync that also gives everybody who waits how many, whether all or whether any voted."""
    target, which, *threads_, source = b.ins.operands
    number, vote = b.scalar(which), b.predicate(source)
    threads = b.scalar(threads_[0]) if threads_ else None
    op = b.match[1] or b.match[2]
    put = b.put32(target) if op == "popc" else b.put_predicate(target)

    def run(w: Warp, mask: int) -> Wait | None:
        lane, yes = first_lane(mask), vote(w) & mask
        index = number(w, lane)

        def result(true: int, voted: int) -> None:
            value = {"popc": true, "and": FULL * (true == voted), "or": FULL * (true > 0)}[op]
            put(w, mask, value)

        w.cta.named.vote(index, Vote(mask.bit_count(), yes.bit_count(), result))
        expected = threads(w, lane) if threads is not None else None
        if w.cta.named.arrive(w, index, expected, True):
            return None
        detail = (("barrier", f"named {index}"),)
        return Wait(("bar", index), f"barrier {index}", retry=False, detail=detail)

    return run


# -- the cluster's barrier ------------------------------------------------------------------------


@machine(r"barrier\.cluster\.arrive(?:\.(?:release|relaxed))?(?:\.aligned)?", converged=True)
def cluster_arrive(b: Binding) -> Handler:
    relaxed = "relaxed" in b.ins.mods

    def run(w: Warp, mask: int) -> None:
        w.cta.machine.cluster.arrive(w, relaxed)

    return run


@machine(r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?", converged=True)
def cluster_wait(b: Binding) -> Handler:
    def run(w: Warp, mask: int) -> Wait | None:
        cluster = w.cta.machine.cluster
        if cluster.passed(w):
            return None
        detail = (("barrier", "cluster"),)
        return Wait(("cluster",), "barrier.cluster.wait", detail=detail)

    return run


# -- mbarriers -----------------------------------------------------------------------------------


def _by_address(b: Binding, op: Operand) -> Callable[[Warp, int], Sequence[tuple[int, int]]]:
    """Reader f(warp, mask) -> (address, lane mask) groups; one group in nearly every kernel."""
    every, one, common = b.addresses(op), b.address(op), _common(b, op)

    def groups(w: Warp, mask: int) -> Sequence[tuple[int, int]]:
        if mask & (mask - 1) == 0:
            return ((one(w, mask.bit_length() - 1), mask),)
        if (value := common(w)) is not None:
            return ((value, mask),)
        return _grouped(every(w), mask)

    return groups


@machine(rf"mbarrier\.init{_SPACE}\.b64")
def mbarrier_init(b: Binding) -> Handler:
    """By PTX an mbarrier is initialised once. Under ``silicon`` all lanes of a warp may do it, as
    in flash-attn-4's backward, or several warps, as in CUTLASS's minimal_tensor_mma: the object
    that is there already is the one that the instruction writes."""
    groups, count = _by_address(b, b.ins.operands[0]), b.scalar(b.ins.operands[1])

    def run(w: Warp, mask: int) -> None:
        for at, lanes in groups(w, mask):
            for lane in LANES[lanes].tolist():
                cta, own = w.cta.locate(at)
                again = w.cta.machine.options.profile == "silicon"
                cta.mbarriers.init(own, count(w, lane), again)
                if (race := w.cta.machine.race) is not None:
                    race.mbarrier_init(w, cta, own)

    return run


@machine(rf"mbarrier\.inval{_SPACE}\.b64")
def mbarrier_inval(b: Binding) -> Handler:
    groups = _by_address(b, b.ins.operands[0])

    def run(w: Warp, mask: int) -> None:
        for at, _ in groups(w, mask):
            cta, own = w.cta.locate(at)
            cta.mbarriers.inval(own)

    return run


@machine(rf"mbarrier\.arrive(\.noComplete)?{_ORDER}{_SPACE}\.b64")
def mbarrier_arrive(b: Binding) -> Handler:
    operands = list(b.ins.operands)
    state = operands.pop(0) if isinstance(operands[0], Reg | Sink) else Sink()
    groups, put, no_complete = _by_address(b, operands[0]), _put64(b, state), bool(b.match[1])
    given = operands[1] if len(operands) > 1 else Imm(1)
    each = given.value if isinstance(given, Imm) else None
    count, order = b.scalar(given), b.match[2] or ""

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        for at, lanes in groups(w, mask):
            if each is not None:
                total = each * lanes.bit_count()
            else:
                total = sum(count(w, lane) for lane in LANES[lanes].tolist())
            cta, own = w.cta.locate(at)
            if machine.race is not None:
                machine.race.mbarrier_arrive(w, cta, own, lanes, order)
            put(w, lanes, cta.mbarriers.arrive(own, total, who=w.name, no_complete=no_complete))
        machine.events += 1

    return run


@machine(rf"mbarrier\.arrive\.expect_tx{_ORDER}{_SPACE}\.b64")
def mbarrier_arrive_expect_tx(b: Binding) -> Handler:
    operands = list(b.ins.operands)
    state = operands.pop(0) if isinstance(operands[0], Reg | Sink) else Sink()
    address, nbytes, put = b.addresses(operands[0]), b.scalar(operands[1]), _put64(b, state)
    order = b.match[1] or ""

    def run(w: Warp, mask: int) -> None:
        machine, at_lane = w.cta.machine, address(w)
        for lane in map(int, LANES[mask]):
            cta, own = w.cta.locate(int(at_lane[lane]))
            if machine.race is not None:
                machine.race.mbarrier_arrive(w, cta, own, mask, order)
            put(w, 1 << lane, cta.mbarriers.arrive_expect_tx(own, nbytes(w, lane), who=w.name))
        machine.events += 1

    return run


@machine(rf"mbarrier\.(expect|complete)_tx{_ORDER}{_SPACE}\.b64")
def mbarrier_tx(b: Binding) -> Handler:
    address, nbytes = b.addresses(b.ins.operands[0]), b.scalar(b.ins.operands[1])
    expects = b.match[1] == "expect"

    def run(w: Warp, mask: int) -> None:
        at_lane = address(w)
        for lane in map(int, LANES[mask]):
            cta, own = w.cta.locate(int(at_lane[lane]))
            act = cta.mbarriers.expect_tx if expects else cta.mbarriers.complete_tx
            act(own, nbytes(w, lane), who=w.name)
        w.cta.machine.events += 1

    return run


def _put64(b: Binding, op: object):  # type: ignore[no-untyped-def]
    """Writer f(warp, mask, value) of a 64-bit destination."""
    if isinstance(op, Sink) or (isinstance(op, Reg) and not b.program.is_read(op.name)):
        return lambda w, mask, value: None
    row = b.row(op, "b64")  # type: ignore[arg-type]

    def put(w: Warp, mask: int, value: int) -> None:
        lanes = LANES[mask]
        w.r32[row, lanes] = value & FULL
        w.r32[row + 1, lanes] = value >> 32 & FULL

    return put


@machine(rf"mbarrier\.(try|test)_wait(\.parity)?{_ORDER}{_SPACE}\.b64")
def mbarrier_wait(b: Binding) -> Handler:
    """Blocks until the phase completes, as a suspended try_wait may; one that its code does not
    repeat in a loop is *soft*: when nothing else can run it reports failure instead. With late
    visibility it fails the first time, as it may: what comes behind it has to wait in earnest."""
    put = b.put_predicate(b.ins.operands[0])
    groups, phases = _by_address(b, b.ins.operands[1]), _by_value(b, b.ins.operands[2])
    by_parity, soft = bool(b.match[2]), not spins(b.program, b.index, b.ins)
    order = b.match[3] or ""

    def run(w: Warp, mask: int) -> Wait | None:
        unit, race = w.cta.mbarriers, w.cta.machine.race
        done, pending = 0, None
        for address_, at_one in groups(w, mask):
            at = address_ - w.cta.window
            for value, lanes in phases(w, at_one):
                if race is not None and by_parity:
                    race.mbarrier_missed(w, at, value & 1, unit.state(at).phase)
                if unit.try_parity(at, value & 1) if by_parity else unit.try_phase(at, value):
                    done |= lanes
                    if race is not None:
                        race.mbarrier_wait(w, w.cta, at, order)
                else:
                    pending = (at, value)
        if pending is None or done:  # lanes whose phase is over do not wait for the others
            put(w, mask, done)
            return None
        if w.timed_out or (soft and w.cta.machine.asyncs.late and w.peeked != (b.index, *pending)):
            w.timed_out = False
            w.peeked = (b.index, *pending)
            put(w, mask, 0)
            return None
        return wait_for(*pending)

    @lru_cache(maxsize=64)
    def wait_for(at: int, value: int) -> Wait:
        what = f"parity {value & 1}" if by_parity else f"phase token {value}"
        detail = (("barrier", f"mbarrier {at:#x}"), ("address", at), ("waits_for", what))
        return Wait(("mbar", at), f"mbarrier {at:#x} {what}", soft=soft, detail=detail)

    return run


def _by_value(b: Binding, op: Operand) -> Callable[[Warp, int], Sequence[tuple[int, int]]]:
    """Reader f(warp, mask) -> (value, lane mask) groups of a 32- or 64-bit operand."""
    if isinstance(op, Imm):
        constant = op.value
        return lambda w, mask: ((constant, mask),)
    one = b.scalar(op)
    wide = isinstance(op, Reg) and op.kind == "b64"
    every: Callable[[Warp], Any] = b.lanes64(op) if wide else b.lanes32(op)
    common = _common(b, op)

    def groups(w: Warp, mask: int) -> Sequence[tuple[int, int]]:
        if mask & (mask - 1) == 0:
            return ((one(w, mask.bit_length() - 1), mask),)
        if (value := common(w)) is not None:
            return ((value, mask),)
        return _grouped(every(w), mask)

    return groups


def _common(b: Binding, op: Operand) -> Callable[[Warp], int | None]:
    """`Binding.uniform` of an operand or of an address, where it has 32 bits: the usual case."""
    register = op.base if isinstance(op, Mem) else op
    if isinstance(register, Reg) and register.kind != "b32":
        return lambda w: None
    return b.uniform_address(op) if isinstance(op, Mem) else b.uniform(op)


def _grouped(values: Any, mask: int) -> Sequence[tuple[int, int]]:
    """(value, lane mask) of the lanes of ``mask``, the lowest lane's first."""
    lanes = LANES[mask]
    if mask != FULL:
        values = values[lanes]
    first = values[0]
    if (values == first).all():
        return ((int(first), mask),)
    by: dict[int, int] = {}
    for lane, value in zip(lanes.tolist(), values.tolist(), strict=True):
        by[value] = by.get(value, 0) | 1 << lane
    return list(by.items())


def spins(program: Program, index: int, ins: Instr) -> bool:
    """Whether failure leads straight back to the instruction, over branches and moves only."""
    flag = ins.operands[0]
    if not isinstance(flag, Reg):
        return False
    body = program.entry.body
    at = next(i for i, other in enumerate(body) if other is ins) + 1
    for _ in range(8):
        if at >= len(body):
            return False
        here = body[at]
        if here is ins:
            return True
        if here.op in ("bra", "bra.uni"):
            taken = here.guard is None
            if here.guard is not None:
                if here.guard.name != flag.name:
                    return False
                taken = here.guard.negated  # the flag is false
            label = here.operands[0]
            assert isinstance(label, Label)
            at = program.entry.labels[label.name] if taken else at + 1
        elif here.op.startswith("mov."):
            at += 1
        else:
            return False
    return False
