# SPDX-License-Identifier: Apache-2.0
"""How the forward kernel's warps talk: mbarriers in SMEM, by the plan's table of barriers.

    load --q_full, kv_full--> mma --s_full--> softmax --stats_full--> correction --o_stored--> store
    load <-----kv_empty------ mma <-pv_ready, p_tail- softmax
                              mma <------pv_ready---- correction (has rescaled O)
                              mma --o_full----------> correction
                                       softmax <-stats_empty- correction

Every barrier starts in phase 0. ``wait(i, parity)`` returns once the phase of that parity has
completed; a fresh barrier counts phase "-1", of parity 1, as completed, which is how a producer
gets through its first round of an empty buffer. So the consumer of event ``n`` waits for parity
``n & 1`` of the full side, and its producer for ``(n & 1) ^ 1`` of the empty side.
"""

import enum
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op

from kernels.common.plan import Barrier, KernelPlan


class Warp(enum.IntEnum):
    """First warp of each role.

    A warp reaches TMEM lanes 32 * (warp % 4) to 32 * (warp % 4) + 31 and no others (PTX ISA 9.1
    section 9.7.16.8), so the roles that touch TMEM rows come in groups of four, aligned to four.
    """

    SOFTMAX0 = 0
    SOFTMAX1 = 4
    CORRECTION = 8
    MMA = 12
    STORE = 13
    LOAD = 14
    IDLE = 15


class NamedBarrier(enum.IntEnum):
    """Hardware barriers of the CTA (bar.sync)."""

    CTA = 0  # all threads, once: mbarriers are initialised, TMEM is allocated
    TMEM_FREE = 1  # correction (128) and mma (32): O has been read, TMEM can be freed


@dataclass(frozen=True)
class BarrierArray:
    """The mbarriers of one family; who arrives and who waits is in ``spec``."""

    first: cute.Pointer
    spec: Barrier

    # dsl_user_op gives these the line of their caller, which is what a report should point to.

    @dsl_user_op
    def wait(self, index: Int32, parity: Int32, *, loc=None, ip=None) -> None:
        """Blocks the calling thread until the phase of this parity has completed."""
        cute.arch.mbarrier_wait(self.first + index, parity, loc=loc, ip=ip)

    @dsl_user_op
    def arrive_warp(self, index: Int32, *, loc=None, ip=None) -> None:
        """One arrival for the whole warp, after all its lanes got here; releases their writes."""
        cute.arch.sync_warp(loc=loc, ip=ip)
        with cute.arch.elect_one(loc=loc, ip=ip):
            cute.arch.mbarrier_arrive(self.first + index, loc=loc, ip=ip)

    @dsl_user_op
    def expect(self, index: Int32, *, loc=None, ip=None) -> cute.Pointer:
        """Arrives and announces the TMA bytes of this phase; returns the barrier for the copy."""
        barrier, bytes_ = self.first + index, self.spec.tx_bytes
        with cute.arch.elect_one(loc=loc, ip=ip):
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, bytes_, loc=loc, ip=ip)
        return barrier

    @dsl_user_op
    def commit(self, index: Int32, *, loc=None, ip=None) -> None:
        """Arrives once all MMAs that this warp has issued so far are complete."""
        with cute.arch.elect_one(loc=loc, ip=ip):
            tcgen05.commit(self.first + index, loc=loc, ip=ip)

    def init(self) -> None:
        """Initialises every mbarrier of the family; by one thread of the CTA."""
        for i in range(self.spec.count):
            cute.arch.mbarrier_init(self.first + i, self.spec.arrivals)


@dataclass(frozen=True)
class Channels:
    """All mbarriers of the kernel, by name. See ``KernelPlan.barriers`` for the protocol of each.

    q_full[stage]        Q tile is in SMEM
    kv_full[slot]        K or V tile is in SMEM
    kv_empty[slot]       MMAs have read the K or V tile
    s_full[stage]        S = Q K^T is in TMEM, and every MMA issued before it is complete
    pv_ready[stage]      softmax has read S and written the head of P; correction has rescaled O
    p_tail[stage]        softmax has written the rest of P
    stats_full[4 stage + warp]   rescale factors of a warp's rows are in SMEM, at the end sums and
                                 maxima
    stats_empty[4 stage + warp]  correction has read them
    o_full[stage]        O is complete in TMEM
    o_stored[stage]      normalised O is in SMEM, visible to TMA
    """

    q_full: BarrierArray
    kv_full: BarrierArray
    kv_empty: BarrierArray
    s_full: BarrierArray
    pv_ready: BarrierArray
    p_tail: BarrierArray
    stats_full: BarrierArray
    stats_empty: BarrierArray
    o_full: BarrierArray
    o_stored: BarrierArray

    @classmethod
    def create(cls, plan: KernelPlan, smem: cute.Pointer) -> "Channels":
        """The channels of ``plan`` in the CTA's dynamic shared memory."""
        arrays = {
            spec.name: BarrierArray(
                cute.recast_ptr(smem + plan.smem_offset(spec.name), dtype=cutlass.Int64), spec
            )
            for spec in plan.barriers
        }
        return cls(**arrays)

    def init(self) -> None:
        """Initialises all of them and makes that visible to TMA and tcgen05; by one thread."""
        for array in vars(self).values():
            array.init()
        cute.arch.mbarrier_init_fence()


@cute.jit
def next_slot(slot: Int32, parity: Int32, slots: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """The following slot of a ring and its parity, which flips at each wrap."""
    slot += 1
    if slot == slots:
        slot = Int32(0)
        parity ^= 1
    return slot, parity
