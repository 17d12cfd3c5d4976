# SPDX-License-Identifier: Apache-2.0
"""The MMA warp: issues S = Q K^T and O += P V for both query stages, alternating between them.

While the tensor core works for one stage, softmax works on the other:

    QK0 QK1 | PV0 QK0 PV1 QK1 | PV0 QK0 PV1 QK1 | ... | PV0 PV1

PV of a stage is issued before the next QK of that stage, which overwrites S and with it P. The
tensor core runs the MMAs of a CTA in the order of issue, so PV has read P by then; CUTLASS and
FlashAttention-4 rest on the same order. (PTX ISA 9.1 section 9.7.16.6.2 promises it only for MMAs
with the same accumulator and shape.)
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from kernels.blackwell.channels import Channels, next_slot
from kernels.blackwell.tile import Tile
from kernels.common.fences import fence_after_thread_sync
from kernels.common.plan import KernelPlan


@dataclass(frozen=True)
class Operands:
    """One matrix product: its MMA and, by stage or slot, its operands and accumulators."""

    op: tcgen05.MmaOp
    a: tuple[cute.Tensor, ...]  # by query stage: (MMA, MMA_M, MMA_K)
    b: cute.Tensor  # (MMA, MMA_N, MMA_K, SLOTS)
    acc: tuple[cute.Tensor, ...]  # by query stage: (MMA, MMA_M, MMA_N)


@cute.jit
def mma(
    plan: cutlass.Constexpr[KernelPlan], channels: Channels, tile: Tile, qk: Operands, pv: Operands
):
    """Multiplies all key blocks of the tile; event number of every per-stage barrier is the block.

    qk: Q and K from SMEM into S; pv: P from TMEM and V from SMEM into O.
    """
    slot, parity = Int32(0), Int32(0)
    if tile.blocks > 0:
        channels.kv_full.wait(slot, parity)
        for stage in cutlass.range_constexpr(plan.q_stages):
            channels.q_full.wait(stage, 0)
            fence_after_thread_sync()
            multiply_qk(channels, qk, stage, slot)
        channels.kv_empty.commit(slot)
        slot, parity = next_slot(slot, parity, plan.kv_stages)

        for j in cutlass.range(tile.blocks - 1, unroll=1):
            v_slot, v_parity = slot, parity
            k_slot, k_parity = next_slot(slot, parity, plan.kv_stages)
            channels.kv_full.wait(v_slot, v_parity)
            for stage in cutlass.range_constexpr(plan.q_stages):
                multiply_pv(plan, channels, pv, stage, v_slot, j)
                if cutlass.const_expr(stage == plan.q_stages - 1):
                    channels.kv_empty.commit(v_slot)
                if cutlass.const_expr(stage == 0):
                    channels.kv_full.wait(k_slot, k_parity)
                    fence_after_thread_sync()
                multiply_qk(channels, qk, stage, k_slot)
            channels.kv_empty.commit(k_slot)
            slot, parity = next_slot(k_slot, k_parity, plan.kv_stages)

        # Nobody refills the last V, so its slot is not handed back.
        channels.kv_full.wait(slot, parity)
        for stage in cutlass.range_constexpr(plan.q_stages):
            multiply_pv(plan, channels, pv, stage, slot, tile.blocks - 1)
            channels.o_full.commit(stage)


def multiply_qk(channels: Channels, qk: Operands, stage: int, slot: Int32) -> None:
    """S[stage] = Q[stage] K[slot]^T; s_full also says that all earlier MMAs are complete."""
    for step in range(cute.size(qk.a[stage], mode=[2])):
        multiply_step(qk, stage, slot, step, accumulate=step > 0)
    channels.s_full.commit(stage)


def multiply_pv(
    plan: KernelPlan, channels: Channels, pv: Operands, stage: int, slot: Int32, block: Int32
) -> None:
    """O[stage] += P[stage] V[slot]; block 0 overwrites O, which starts as garbage."""
    steps = cute.size(pv.a[stage], mode=[2])
    tail = steps * plan.p_head_cols // plan.tile_n
    channels.pv_ready.wait(stage, block & 1)
    fence_after_thread_sync()
    for step in range(steps):
        if step == tail:
            channels.p_tail.wait(stage, block & 1)
            fence_after_thread_sync()
        multiply_step(pv, stage, slot, step, accumulate=(block > 0) | (step > 0))


def multiply_step(product: Operands, stage: int, slot: Int32, step: int, accumulate) -> None:
    """One tcgen05.mma of K = 16: acc[stage] (+)= a[stage][:, step] b[slot][:, step]^T."""
    mma = cute.make_tiled_mma(product.op)  # a new one: whether it accumulates is its state
    mma.set(tcgen05.Field.ACCUMULATE, accumulate)
    acc = product.acc[stage]
    a, b = product.a[stage][None, None, step], product.b[None, None, step, slot]
    cute.gemm(mma, acc, a, b, acc)
