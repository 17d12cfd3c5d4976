# SPDX-License-Identifier: Apache-2.0
"""A softmax warpgroup: S from TMEM, P back to TMEM over it, one query row a thread.

Thread t of the warpgroup owns TMEM lane t, which is row t of the stage's 128 query rows; a row
never needs another thread.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from kernels.blackwell.channels import Channels
from kernels.blackwell.tensors import DTYPES
from kernels.blackwell.tile import Tile, stage_matrix, unmasked_blocks
from kernels.common import softmax as online
from kernels.common.fences import fence_after_thread_sync, fence_before_thread_sync
from kernels.common.mask import mask_beyond, visible_keys
from kernels.common.plan import KernelPlan

COLS = 32  # columns of S that one tcgen05.ld brings


@dataclass(frozen=True)
class Row:
    """One thread's row: its views of tensor memory and its place in the statistics."""

    plan: KernelPlan
    channels: Channels
    stage: Int32
    index: Int32  # row within the stage, 0 to 127
    load: cute.TiledCopy
    s: cute.Tensor  # (COPY, CHUNK): 32 columns of S a chunk
    store: cute.TiledCopy
    p: cute.Tensor  # (COPY, CHUNK): 32 columns of P, 16 registers, a chunk
    stats: cute.Tensor  # (field, stage, row) in SMEM
    scale_log2: Float32  # softmax_scale * log2(e)

    @property
    def stats_barrier(self) -> Int32:
        """Index of this warp's stats barriers."""
        return self.stage * 4 + self.index // 32


@cute.jit
def softmax(
    plan: cutlass.Constexpr[KernelPlan],
    channels: Channels,
    tile: Tile,
    stage: Int32,
    tmem: cute.Pointer,
    stats: cute.Tensor,
    scale_log2: Float32,
):
    """Turns every S of a stage into P, from the rightmost key block to the left.

    tmem: base of tensor memory; stats: (2, stages, 128) float32 SMEM: rescale factor or final row
    sum, final row maximum.
    """
    row = make_row(plan, channels, stage, tmem, stats, scale_log2)
    first_row = tile.m_tile * plan.tile_q + stage * plan.tile_m
    limit = visible_keys(first_row + row.index, tile.seqlen_q, tile.seqlen_k, plan.causal)
    masked = tile.blocks - unmasked_blocks(plan, tile, first_row)
    maximum, total = Float32(-Float32.inf), Float32(0.0)
    for j in cutlass.range(masked, unroll=1):
        columns = limit - (tile.blocks - 1 - j) * plan.tile_n
        maximum, total = softmax_block(row, j, maximum, total, columns, True)
    for j in cutlass.range(masked, tile.blocks, unroll=1):
        maximum, total = softmax_block(row, j, maximum, total, Int32(0), False)
    if tile.blocks > 0:
        channels.stats_empty.wait(row.stats_barrier, tile.blocks & 1)
        stats[0, stage, row.index] = total
        stats[1, stage, row.index] = maximum
        channels.stats_full.arrive_warp(row.stats_barrier)


def make_row(plan, channels, stage, tmem, stats, scale_log2) -> Row:
    """The calling thread's row."""
    thread = cute.arch.thread_idx()[0] % plan.tile_m
    s, p = stage_matrix(plan, tmem, "S", stage), stage_matrix(plan, tmem, "P", stage)
    load_atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(COLS)), Float32)
    store_atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(COLS // 2)), Float32)
    load, store = tcgen05.make_tmem_copy(load_atom, s), tcgen05.make_tmem_copy(store_atom, p)
    s_chunks = cute.group_modes(load.get_slice(thread).partition_S(s), 1, 3)
    p_chunks = cute.group_modes(store.get_slice(thread).partition_D(p), 1, 3)
    return Row(plan, channels, stage, thread, load, s_chunks, store, p_chunks, stats, scale_log2)


@cute.jit
def softmax_block(
    row: Row,
    j: Int32,
    maximum: Float32,
    total: Float32,
    columns: Int32,
    masked: cutlass.Constexpr,
) -> tuple[Float32, Float32]:
    """One key block of the row: number ``j`` from the right, of which it sees ``columns`` keys.

    Returns the new reference maximum and sum.
    """
    plan, channels, stats = row.plan, row.channels, row.stats
    channels.s_full.wait(row.stage, j & 1)
    fence_after_thread_sync()
    # (tile_n) float32: scores, then weights
    scores = cute.make_rmem_tensor(plan.tile_n, Float32)
    for chunk in cutlass.range_constexpr(plan.tile_n // COLS):
        registers = cute.make_tensor(scores.iterator + chunk * COLS, ((COLS, 1),))
        cute.copy(row.load, row.s[None, chunk], registers)
    cute.arch.fence_view_async_tmem_load()
    if cutlass.const_expr(masked):
        mask_beyond(scores, columns)

    block_maximum = online.row_maximum(scores, maximum)
    maximum, subtrahend, rescale = online.advance_maximum(
        maximum, block_maximum, row.scale_log2, plan.rescale_threshold
    )
    if j > 0:  # there is no O to rescale before the first block
        channels.stats_empty.wait(row.stats_barrier, j & 1)
        stats[0, row.stage, row.index] = rescale
        channels.stats_full.arrive_warp(row.stats_barrier)

    online.subtract_maximum(scores, subtrahend, row.scale_log2)
    poison = subtrahend - subtrahend  # 0, or NaN if the maximum is NaN or infinite
    return maximum, total * rescale + poison + write_p(row, scores)


def write_p(row: Row, scores: cute.Tensor) -> Float32:
    """exp2 of the scores, in place, and P in 16 bit to TMEM; returns the sum of the exponentials.

    Three quarters of P are announced early so that PV can start. The sum is taken chunk by chunk:
    its additions hide behind the MUFU, and a chunk's registers are free after it.
    """
    plan, channels, sums = row.plan, row.channels, []
    dtype = DTYPES[plan.dtype]
    for chunk in range(plan.tile_n // COLS):
        first, last = chunk * COLS, (chunk + 1) * COLS
        online.exp2_row(scores, first, last, plan.exp2_is_emulated, plan.exp2_degree)
        weights = cute.make_tensor(scores.iterator + first, COLS)
        # (COPY): 16 registers of two weights each
        packed = cute.make_rmem_tensor(((COLS // 2, 1),), Float32)
        halves = cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=dtype), COLS)
        halves.store(weights.load().to(dtype))
        cute.copy(row.store, packed, row.p[None, chunk])
        if last in (plan.p_head_cols, plan.tile_n):
            cute.arch.fence_view_async_tmem_store()
            fence_before_thread_sync()
            ready = channels.pv_ready if last == plan.p_head_cols else channels.p_tail
            ready.arrive_warp(row.stage)
        sums = online.add_to_sums(sums, scores, first, last)
    return online.total_of(sums)
