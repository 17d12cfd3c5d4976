"""What a running CTA consists of: warps, their fragments, named barriers, memories.

Lanes of a warp may part at a branch. A *fragment* is a set of lanes with one program counter; of
the fragments that can run, the one with the lowest counter goes first, and those that meet merge.
That is reconvergence at the join for the code that compilers lay out, and a fragment that blocks
never holds up another (independent thread scheduling since sm_70).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .findings import EmulatorFault
from .isa.cp_async import CopyGroups
from .isa.pair import check_alive
from .isa.register_pool import launch_registers
from .isa.table import Wait
from .isa.wgmma import Groups
from .memory import LocalMemory, SharedMemory, TensorMemory
from .registers import WarpRegisters
from .schedule import CTA_RANK_SHIFT, CTA_WINDOW_MASK, NO_CTA, AsyncOp, BulkGroups, PendingLoad
from .sync import MbarrierUnit
from .sync.votes import Vote

if TYPE_CHECKING:
    from .isa.allocation import PairCall
    from .machine import Machine
    from .program import Program

NAMED_BARRIERS = 16  # PTX ISA 9.1 section 9.7.13.1


@dataclass(slots=True, eq=False)
class Fragment:
    """Lanes that execute together: ``mask``, program counter, and what they wait for."""

    mask: int
    pc: int
    wait: Wait | None = None


class Warp:
    """One warp: registers and fragments. ``alive``: lanes that have not returned."""

    __slots__ = (
        "alive",
        "cta",
        "flags",
        "fragments",
        "i32",
        "index",
        "local",
        "max_registers",
        "name",
        "preds",
        "queued",
        "r16",
        "r32",
        "registers",
        "bulk",
        "copies",
        "wgmma",
        "pc",
        "pending_ld",
        "pending_st",
        "timed_out",
        "peeked",
        "unwritten",
        "words",
    )

    def __init__(self, cta: Cta, index: int, mask: int, name: str, program: Program) -> None:
        self.cta = cta
        self.index = index
        self.name = name
        self.alive = mask
        self.fragments = [Fragment(mask, 0)]
        self.registers = WarpRegisters(program.layout)
        self.local = LocalMemory(program.local_bytes)
        self.r32, self.i32 = self.registers.r32, self.registers.i32
        self.r16, self.preds = self.registers.r16, self.registers.preds
        self.words, self.flags = self.registers.words, self.registers.flags
        self.max_registers: int | None = None
        self.pc = 0  # segment being executed
        self.pending_ld: list[PendingLoad] = []
        self.pending_st: list[AsyncOp] = []
        self.bulk: dict[int, BulkGroups] = {}  # by lane
        self.copies = CopyGroups()
        self.wgmma = Groups()
        self.timed_out = False  # the soft wait that runs next may give up
        self.peeked: tuple[int, int, int] | None = None  # the last one that did: segment, what for
        self.queued = False
        finding = cta.machine.options.unwritten == "finding"  # else all counts as written
        self.unwritten = dict.fromkeys(program.tracked, 0xFFFFFFFF if finding else 0)  # lanes
        if not finding:
            self.local.valid[:] = 1

    def exit_lanes(self, mask: int) -> None:
        self.alive &= ~mask
        if not self.alive:
            self.cta.named.warp_left()

    def merge(self) -> None:
        """Fragments that wait for nothing, or for each other, and stand at one place become one."""
        by_pc: dict[int, Fragment] = {}
        for fragment in self.fragments:
            if fragment.wait is not None and fragment.wait.key[0] != "converge":
                continue
            other = by_pc.get(fragment.pc)
            if other is None:
                by_pc[fragment.pc] = fragment
            else:
                other.mask |= fragment.mask
                other.wait = None
                fragment.mask = 0
        self.fragments = [f for f in self.fragments if f.mask & self.alive]

    def wake_converging(self) -> None:
        """Lanes returned: who waits for the whole warp may have it now."""
        for fragment in self.fragments:
            if fragment.wait is not None and fragment.wait.key[0] == "converge":
                fragment.wait = None


@dataclass(slots=True)
class _Barrier:
    expected: int
    whole: bool  # of all the CTA's threads that live, not of a given number
    arrived: int = 0
    by: list[str] = field(default_factory=list)


class NamedBarriers:
    """The CTA's 16 named barriers; counts are in threads."""

    def __init__(self, cta: Cta) -> None:
        self._cta = cta
        self.open: dict[int, _Barrier] = {}
        self._votes: dict[int, list[Vote]] = {}  # of each open barrier

    def vote(self, index: int, vote: Vote) -> None:
        """What a warp that is about to arrive at a barrier contributes to its reduction."""
        self._votes.setdefault(index, []).append(vote)

    def arrive(self, warp: Warp, index: int, threads: int | None, waits: bool) -> bool:
        """A warp arrives; True if that completes the barrier (waiters are then woken).

        threads: the count; None: every thread of the CTA that has not returned.
        """
        expected = self._alive() if threads is None else threads
        if not 0 <= index < NAMED_BARRIERS:
            raise EmulatorFault(
                "named_barrier_bad_id", f"barrier {index}: a CTA has 0 to 15", barrier=index
            )
        if expected <= 0 or expected % 32:
            raise EmulatorFault(
                "named_barrier_bad_count",
                f"barrier {index} expects {expected} threads; the count must be a positive multiple"
                " of 32",
                barrier=index,
                expected=expected,
            )
        barrier = self.open.setdefault(index, _Barrier(expected, threads is None))
        if barrier.whole and threads is None:
            barrier.expected = expected
        elif barrier.expected != expected:
            raise EmulatorFault(
                "named_barrier_count_mismatch",
                f"{warp.name} arrives at barrier {index} with {expected} threads, but it is open"
                f" with {barrier.expected} ({', '.join(barrier.by)} arrived)",
                barrier=index,
                expected=barrier.expected,
                given=expected,
            )
        barrier.arrived += 32
        barrier.by.append(warp.name)
        machine = self._cta.machine
        machine.events += 1
        if machine.race is not None:
            machine.race.named_arrive(warp, self._cta, index)
        if barrier.arrived < expected:
            return False
        self._complete(index, [warp] * waits)
        return True

    def warp_left(self) -> None:
        """A warp has returned: a barrier of the whole CTA waits for it no longer (CUDA C++
        Programming Guide: __syncthreads waits for all non-exited threads)."""
        for index, barrier in list(self.open.items()):
            if barrier.whole:
                barrier.expected = self._alive()
                if barrier.arrived >= barrier.expected > 0:
                    self._complete(index, [])

    def _alive(self) -> int:
        return 32 * sum(warp.alive != 0 for warp in self._cta.warps)

    def _complete(self, index: int, completing: list[Warp]) -> None:
        del self.open[index]
        votes = self._votes.pop(index, [])
        for vote in votes:
            vote.put(sum(v.true for v in votes), sum(v.threads for v in votes))
        machine = self._cta.machine
        if machine.race is not None:
            waiters = [w for w, _ in self._cta.waiting.get(("bar", index), ())]
            machine.race.named_release(self._cta, index, waiters + completing)
        machine.wake(("bar", index), self._cta)


class Cta:
    """A thread block on its SM."""

    def __init__(self, machine: Machine, block: tuple[int, int, int], rank: int = 0) -> None:
        program, launch = machine.program, machine.launch
        self.machine = machine
        self.block = block
        self.rank = rank  # in its cluster
        self.window = rank << CTA_RANK_SHIFT
        self.gmem = machine.gmem
        self.smem = SharedMemory(machine.smem_bytes, unwritten=machine.options.unwritten)
        self.tmem = TensorMemory()
        self.mbarriers = MbarrierUnit(self.smem)
        self.mbarriers.on_phase.append(self._on_phase)
        self.named = NamedBarriers(self)
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.threads_rounded = (threads + 31) // 32 * 32
        self.launch_registers = launch_registers(program.entry, machine.gpu.registers_per_sm)
        self.free_registers = 0  # a thread, in the pool of setmaxnreg
        self.cta_group: int | None = None  # of its tcgen05 instructions
        self.tmem_owners: dict[int, tuple[Warp, int]] = {}  # column -> who allocated it, and where
        self.launch_refused = False  # it has seen launch control refuse
        self.pair_calls: dict[str, PairCall] = {}  # collective calls that wait for the peer CTA
        self.gave_up_at: int | None = None  # machine events when a soft wait last gave up
        self.waiting: dict[tuple[Any, ...], list[tuple[Warp, Fragment]]] = {}
        self.warps = []
        for index in range(self.threads_rounded // 32):
            mask = (1 << min(32, threads - 32 * index)) - 1
            name = machine.roles.get(index, f"warp {index}")
            self.warps.append(Warp(self, index, mask, name, program))

    def _on_phase(self, addr: int, phase: int) -> None:
        if self.machine.race is not None:
            self.machine.race.mbarrier_phase(self, addr)
        self.machine.wake(("mbar", addr), self)

    def peer(self, address: int) -> tuple[Cta, int]:
        """The CTA that a shared::cluster address names, and the address in its own window."""
        rank = address >> CTA_RANK_SHIFT
        peers = self.machine.ctas
        if rank >= len(peers):
            who = "a CTA that mapa did not find" if rank == NO_CTA else f"CTA {rank}"
            raise EmulatorFault(
                "cluster_address",
                f"shared::cluster address {address:#x} names {who} of a cluster of {len(peers)}",
                address=address,
            )
        check_alive(peers[rank], "an access to shared memory")
        return peers[rank], address & CTA_WINDOW_MASK

    def locate(self, address: int) -> tuple[Cta, int]:
        """As `peer`, quickly for the CTA's own addresses."""
        if address >> CTA_RANK_SHIFT == self.rank:
            return self, address & CTA_WINDOW_MASK
        return self.peer(address)

    def check_exit(self) -> None:
        """Rules at the end of a CTA."""
        try:
            self.tmem.check_freed()
        except EmulatorFault as fault:
            first = fault.details["allocations"][0][0]
            warp, pc = self.tmem_owners[first]
            raise EmulatorFault(
                fault.code, fault.message, **fault.details, issuer=warp, pc=pc
            ) from None
