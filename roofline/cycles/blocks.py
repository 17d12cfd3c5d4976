"""Basic blocks in the order a compiler would issue them.

PTX lists instructions; ptxas schedules them. The model schedules each basic block once, greedily:
of the instructions whose operands are there and whose pipe is free it issues the earliest in PTX
order, and time passes only where there is none. What touches memory, barriers or engines keeps its
order; arithmetic moves freely around it, within the block. Registers are unlimited, so that a block
which would spill looks better than it is. Moves, packing and unpacking are renaming and cost
nothing, nor does a shift that feeds one addition (LEA).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kernels.emulator.records import Code, OpClass
from roofline.cycles.hardware import NO_PIPE, PIPE_OF, Hardware

_FREE_PREDICATES = ("not.pred", "mov.pred")


@dataclass(frozen=True, slots=True)
class Op:
    """One instruction as the SM sees it. ``machine``: it has events. ``index``: in the code."""

    pipe: int
    interval: float
    latency: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    machine: bool
    index: int


@dataclass(frozen=True, slots=True)
class Block:
    """Part of a basic block that a warp ran in one go, scheduled.

    copies: registers that moves define for later blocks, each with what it was moved from.
    """

    ops: tuple[Op, ...]
    copies: tuple[tuple[int, tuple[int, ...]], ...]


class Blocks:
    """The blocks of a kernel on an SM, scheduled when first seen.

    compiled_for: the SM that the compiler had in mind, if not ``hw`` (what-if studies keep the
    order of the instructions).
    """

    def __init__(self, code: Code, hw: Hardware, compiled_for: Hardware | None = None) -> None:
        self.code = code
        self._hw = hw
        self._compiled_for = compiled_for or hw
        self._crossing = _crossing(code)
        self._accumulators = _accumulators(code)
        self.block = lru_cache(maxsize=None)(self._block)

    def _block(self, first: int, last: int) -> Block:
        """Segments ``first`` to ``last``, both included."""
        ops, copies = self._lower(first, last, self._compiled_for)
        order = schedule(ops, self._compiled_for.issue)
        if self._hw is not self._compiled_for:
            priced = {op.index: op for op in self._lower(first, last, self._hw)[0]}
            order = [priced[op.index] for op in order]
        return Block(tuple(order), copies)

    def _lower(
        self, first: int, last: int, hw: Hardware
    ) -> tuple[list[Op], tuple[tuple[int, tuple[int, ...]], ...]]:
        """Operations in PTX order, moves resolved."""
        code = self.code
        alias: dict[int, tuple[int, ...]] = {}
        ops: list[Op] = []
        loaded: list[int] = []  # registers of tcgen05.ld that no wait has covered
        groups: list[set[int]] = [set()]  # accumulators of each wgmma group committed, and open
        fused = _fused_shifts(code, first, last)
        for segment in range(first, last + 1):
            machine = bool(code.machine[segment])
            for i in code.instructions(segment):
                op = OpClass(int(code.op[i]))
                reads = _roots(alias, code.reads(i).tolist())
                writes = tuple(code.writes(i).tolist())
                name = code.op_names[code.op_name[i]]
                free = op is OpClass.MOVE or name in _FREE_PREDICATES or i in fused
                if free and not machine:
                    for register in writes:
                        alias[register] = reads
                    continue
                for register in writes:
                    alias.pop(register, None)
                if name.startswith("tcgen05.ld"):
                    loaded += writes
                elif name.startswith("tcgen05.wait::ld"):
                    reads, writes = tuple(loaded), tuple(loaded)
                    loaded = []
                elif name.startswith("wgmma.mma_async"):
                    groups[-1].update(writes)
                elif name.startswith("wgmma.commit_group"):
                    groups.append(set())
                elif name.startswith("wgmma.wait_group"):
                    reads = writes = self._waited(groups, int(code.immediate[i]))
                pipe = PIPE_OF.get(op, NO_PIPE)
                interval = hw.interval[op] * (int(code.width[i]) if op is OpClass.FMA else 1)
                ops.append(Op(pipe, interval, hw.latency[op], reads, writes, machine, i))
        copies = tuple((r, roots) for r, roots in alias.items() if r in self._crossing)
        return ops, copies

    def _waited(self, groups: list[set[int]], allowed: int) -> tuple[int, ...]:
        """Accumulators that are there after wgmma.wait_group: all but those of the newest
        ``allowed`` groups, as far as this block has committed them."""
        newest = groups[max(0, len(groups) - 1 - allowed) :]
        pending = set().union(*newest)
        return tuple(r for r in self._accumulators if r not in pending)


def _roots(alias: dict[int, tuple[int, ...]], registers: list[int]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for register in registers:
        for root in alias.get(register, (register,)):
            found[root] = None
    return tuple(found)


def _crossing(code: Code) -> set[int]:
    """Registers that some basic block reads before it writes them."""
    crossing: set[int] = set()
    written: set[int] = set()
    for segment in range(len(code.machine)):
        if code.leader[segment]:
            written = set()
        for i in code.instructions(segment):
            crossing.update(r for r in code.reads(i).tolist() if r not in written)
            written.update(code.writes(i).tolist())
    return crossing


def _accumulators(code: Code) -> tuple[int, ...]:
    """Registers that some wgmma writes."""
    found: dict[int, None] = {}
    wgmma = [i for i, name in enumerate(code.op_names) if name.startswith("wgmma.mma_async")]
    for i in np.flatnonzero(np.isin(code.op_name, wgmma)).tolist():
        found.update(dict.fromkeys(code.writes(i).tolist()))
    return tuple(found)


def _fused_shifts(code: Code, first: int, last: int) -> set[int]:
    """Left shifts whose result one addition of the block reads, and nothing else."""
    shifts: dict[int, int] = {}
    readers: dict[int, list[str]] = {}
    for segment in range(first, last + 1):
        for i in code.instructions(segment):
            name = code.op_names[code.op_name[i]]
            for register in code.reads(i).tolist():
                readers.setdefault(register, []).append(name)
            if name == "shl.b32" and len(code.reads(i)) == 1:
                shifts[int(code.writes(i)[0])] = i
    return {
        i
        for register, i in shifts.items()
        if readers.get(register, []) in (["add.s32"], ["add.u32"])
    }


def schedule(ops: list[Op], issue: float) -> list[Op]:
    """One warp alone: the earliest operation in PTX order of those that can start now."""
    waits_for, followers = _dependencies(ops)
    ready = [0.0] * len(ops)
    left = [len(w) for w in waits_for]
    open_ops = [i for i, n in enumerate(left) if n == 0]
    free: dict[int, float] = {}
    order: list[Op] = []
    now = 0.0
    while open_ops:
        best, best_start = -1, float("inf")
        for i in open_ops:  # in PTX order
            start = max(ready[i], free.get(ops[i].pipe, 0.0) if ops[i].pipe != NO_PIPE else 0.0)
            if start <= now:
                best, best_start = i, now
                break
            if start < best_start:
                best, best_start = i, start
        op = ops[best]
        open_ops.remove(best)
        order.append(op)
        now = max(now, best_start)
        if op.pipe != NO_PIPE:
            free[op.pipe] = now + op.interval
        for follower, latency in followers[best]:
            ready[follower] = max(ready[follower], now + latency)
            left[follower] -= 1
            if left[follower] == 0:
                _insert(open_ops, follower)
        now += issue
    return order


def _insert(sorted_list: list[int], value: int) -> None:
    at = len(sorted_list)
    while at and sorted_list[at - 1] > value:
        at -= 1
    sorted_list.insert(at, value)


def _dependencies(ops: list[Op]) -> tuple[list[set[int]], list[list[tuple[int, float]]]]:
    """What each operation waits for, and who waits for it with which latency."""
    waits_for: list[set[int]] = [set() for _ in ops]
    followers: list[list[tuple[int, float]]] = [[] for _ in ops]
    writer: dict[int, int] = {}
    previous = -1  # operation with events: these keep their order
    for i, op in enumerate(ops):

        def after(other: int, latency: float, i: int = i) -> None:
            if other not in waits_for[i]:
                waits_for[i].add(other)
                followers[other].append((i, latency))

        for register in op.reads:
            if register in writer:
                after(writer[register], ops[writer[register]].latency)
        if op.machine:
            if previous >= 0:
                after(previous, 0.0)
            previous = i
        if i == len(ops) - 1 and op.pipe == NO_PIPE and not op.machine:  # the branch ends the block
            for other in range(i):
                after(other, 0.0)
        for register in op.writes:
            writer[register] = i
    return waits_for, followers
