"""cp.async: a thread's own asynchronous copies, 4 to 16 bytes each (PTX ISA 9.1 9.7.9.25.3).

Groups are kept per warp with the lanes they belong to; lanes that commit and wait together, as they
do in all code but a test's, share them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from ..ptx.ast import Imm, Reg
from ..schedule import AsyncOp
from .memory import by_cta
from .table import LANES, Binding, Handler, machine

if TYPE_CHECKING:
    from ..state import Warp


@dataclass(slots=True)
class Copy:
    """One cp.async instruction: its lanes that have not been waited for, and its clock."""

    op: AsyncOp
    clock: int
    mask: int


@dataclass(slots=True)
class Group:
    copies: list[tuple[Copy, int]]  # with the lanes that committed it here
    mask: int


@dataclass(slots=True)
class CopyGroups:
    """A warp's cp.async operations: not yet committed, and committed groups, oldest first."""

    open: list[Copy] = field(default_factory=list)
    committed: list[Group] = field(default_factory=list)


@machine(
    r"cp\.async\.(ca|cg)\.shared(?:::cta)?\.global(\.L2::cache_hint)?(?:\.L2::(?:64|128|256)B)?"
)
def cp_async(b: Binding) -> Handler:
    target, source, size, *rest = b.ins.operands
    if not isinstance(size, Imm) or size.value not in ((16,) if b.match[1] == "cg" else (4, 8, 16)):
        raise b.unsupported("cp-size is 4, 8 or 16 (16 with .cg)")
    rest = rest[:-1] if b.match[2] else rest
    if len(rest) > 1:
        raise b.unsupported("operands after cp-size are not understood")
    to, start, nbytes = b.addresses(target), b.addresses(source), size.value
    taken = _source_bytes(b, rest[0] if rest else None, nbytes)

    def run(w: Warp, mask: int) -> None:
        machine, lanes = w.cta.machine, LANES[mask]
        addrs, from_ = to(w)[lanes], start(w)[lanes]
        for cta, _, _ in by_cta(w, addrs):
            if cta is not w.cta:
                raise EmulatorFault(
                    "cluster_address", "cp.async writes to its own CTA's shared memory only"
                )
        addrs = addrs - w.cta.window
        clock = 0
        if machine.race is not None:
            clock = machine.race.cp_async(w, addrs, nbytes)
        amount = taken(w)[lanes]
        if machine.globals is not None and (whole := amount == nbytes).any():
            machine.globals.access(w, from_[whole], nbytes, False, chosen=whole)
        effect = partial(_copy, w, addrs, from_, amount, nbytes)
        op = AsyncOp("cp.async", w, w.pc, effect)
        w.copies.open.append(Copy(op, clock, mask))
        machine.asyncs.issue(("cp.async", w), op)
        machine.events += 1

    return run


def _source_bytes(b: Binding, op: Any, nbytes: int):  # type: ignore[no-untyped-def]
    """Reader of how many bytes each lane takes from the source; the rest is filled with zeros."""
    if op is None:
        every = np.full(32, nbytes, np.int64)
        return lambda w: every
    if isinstance(op, Reg) and op.kind == "pred":
        ignored = b.predicate(op)
        lane = np.arange(32, dtype=np.int64)
        return lambda w: np.where(ignored(w) >> lane & 1, 0, nbytes)
    if isinstance(op, Imm) and not 0 <= op.value <= nbytes:
        raise b.unsupported(f"src-size {op.value} with cp-size {nbytes}")
    read = b.lanes32(op)
    return lambda w: read(w).astype(np.int64)


def _copy(
    w: Warp,
    addrs: NDArray[np.int64],
    source: NDArray[np.int64],
    taken: NDArray[np.int64],
    nbytes: int,
) -> None:
    gmem = w.cta.gmem
    data = np.zeros((addrs.size, nbytes), np.uint8)
    whole = taken == nbytes
    if whole.any():
        data[whole] = gmem.load(source[whole], nbytes)
    for k in np.flatnonzero(~whole & (taken > 0)):
        part = int(min(taken[k], nbytes))
        data[k, :part] = gmem.read_bytes(int(source[k]), part, "cp.async")
    w.cta.smem.store(addrs, data)


@machine(r"cp\.async\.commit_group")
def commit(b: Binding) -> Handler:
    return _commit


def _commit(w: Warp, mask: int) -> None:
    copies = w.copies
    copies.committed.append(Group([(c, c.mask & mask) for c in copies.open if c.mask & mask], mask))
    for copy in copies.open:
        copy.mask &= ~mask
    copies.open = [copy for copy in copies.open if copy.mask]


@machine(r"cp\.async\.(?:wait_group|wait_all)")
def wait(b: Binding) -> Handler:
    """All but the newest N groups complete now, the latest that is legal."""
    count = b.ins.operands[0] if b.ins.operands else Imm(0)
    if not isinstance(count, Imm) or bool(b.ins.operands) != b.ins.op.endswith("wait_group"):
        raise b.unsupported("wait_group has an immediate number of groups, wait_all has none")
    everything, allowed = not b.ins.operands, count.value

    def run(w: Warp, mask: int) -> None:
        if everything:
            _commit(w, mask)
        committed = w.copies.committed
        together = all(g.mask & mask in (0, mask) for g in committed)
        for lanes in (mask,) if together else [1 << lane for lane in LANES[mask].tolist()]:
            mine = [g for g in committed if g.mask & lanes]
            for group in mine[: max(len(mine) - allowed, 0)]:
                _finish(w, group, lanes)
        w.copies.committed = [g for g in committed if g.mask]

    return run


def _finish(w: Warp, group: Group, lanes: int) -> None:
    machine = w.cta.machine
    for copy, mask in group.copies:
        if mask & lanes:
            machine.asyncs.force(copy.op)
            if machine.race is not None:
                machine.race.cp_async_wait(w, copy.clock)
    group.mask &= ~lanes


@machine(r"cp\.async\.mbarrier\.arrive(\.noinc)?(?:\.shared(?:::cta)?)?\.b64")
def arrive(b: Binding) -> Handler:
    """The barrier hears when all the thread's earlier cp.async are complete. Without ``.noinc`` the
    pending count grows first, so that the arrival is not one of those that were expected."""
    address, adds = b.addresses(b.ins.operands[0]), b.match[1] is None

    def run(w: Warp, mask: int) -> None:
        machine, race = w.cta.machine, w.cta.machine.race
        addrs = address(w)
        for lane in LANES[mask].tolist():
            cta, at = w.cta.locate(int(addrs[lane]))
            if adds:
                cta.mbarriers.add_pending(at, 1)
            bundle = race.cp_async_arrive(w, cta, at) if race is not None else None
            complete = partial(_arrived, w, cta, at, bundle)
            op = AsyncOp("cp.async.mbarrier.arrive", w, w.pc, None, complete)
            machine.asyncs.issue(("cp.async", w), op)
        machine.events += 1

    return run


def _arrived(w: Warp, cta: Any, at: int, bundle: Any) -> None:
    if bundle is not None:
        w.cta.machine.race.bundle_arrive(bundle, cta, at)  # type: ignore[union-attr]
    cta.mbarriers.arrive(at, who=f"cp.async of {w.name}")
