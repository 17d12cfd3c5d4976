# SPDX-License-Identifier: Apache-2.0
"""The correction warpgroup: rescales O when a maximum moved, normalises it at the end, writes LSE.

Thread t serves row t of both stages in turn. A warp rescales if any of its 32 rows asks for it.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import select_

from kernels.blackwell.channels import Channels
from kernels.blackwell.tile import Tile, stage_matrix
from kernels.common.fences import fence_after_thread_sync, fence_before_thread_sync
from kernels.common.mask import visible_keys
from kernels.common.plan import KernelPlan

RESCALE_COLS = 16  # columns of O in registers at a time while rescaling
OUT_COLS = 16  # and while normalising
LN2 = math.log(2.0)


@dataclass(frozen=True)
class Output:
    """Where O and LSE go."""

    tmem: cute.Pointer  # base of tensor memory, where the accumulators are
    smem: cute.Tensor  # (128, head_dim_padded, STAGES), 16 bit
    lse: cute.Tensor  # (batch, head, seqlen_q) float32, global


@cute.jit
def correction(
    plan: cutlass.Constexpr[KernelPlan],
    channels: Channels,
    tile: Tile,
    out: Output,
    stats: cute.Tensor,
    scale_log2: Float32,
):
    """Serves both stages of the tile; stats as in :func:`kernels.blackwell.softmax.softmax`."""
    row = cute.arch.thread_idx()[0] % plan.tile_m
    warp = row // 32
    if tile.blocks > 0:
        # The first PV overwrites O: nothing to rescale.
        for stage in cutlass.range_constexpr(plan.q_stages):
            channels.pv_ready.arrive_warp(stage)
    for j in cutlass.range(1, tile.blocks, unroll=1):
        for stage in cutlass.range_constexpr(plan.q_stages):
            barrier = stage * 4 + warp
            channels.stats_full.wait(barrier, (j - 1) & 1)
            rescale = stats[0, stage, row]
            channels.stats_empty.arrive_warp(barrier)
            # Softmax got S of block j after all MMAs issued before it were complete (s_full), the
            # PV of block j - 1 among them, so O is at rest.
            fence_after_thread_sync()
            if cute.arch.vote_any_sync(rescale != 1.0):
                rescale_accumulator(plan, stage_matrix(plan, out.tmem, "O", stage), row, rescale)
            fence_before_thread_sync()
            channels.pv_ready.arrive_warp(stage)
    for stage in cutlass.range_constexpr(plan.q_stages):
        finish_stage(plan, channels, tile, out, stats, scale_log2, stage, row)


def chunk_columns(o: cute.Tensor, cols: int, chunk: int) -> cute.Tensor:
    """Columns ``chunk * cols`` and on of an accumulator: (128, cols)."""
    return cute.local_tile(o, (cute.size(o, mode=[0]), cols), (0, chunk))


def scale_pairs(values: cute.Tensor, factor: Float32) -> None:
    """values *= factor, in place, two at a time."""
    for i in range(0, cute.size(values), 2):
        pair = (values[i], values[i + 1])
        values[i], values[i + 1] = cute.arch.mul_packed_f32x2(pair, (factor, factor))


@cute.jit
def rescale_accumulator(
    plan: cutlass.Constexpr[KernelPlan], o: cute.Tensor, row: Int32, factor: Float32
):
    """O[row] *= factor, in TMEM."""
    load_atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(RESCALE_COLS)), Float32)
    store_atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(RESCALE_COLS)), Float32)
    for chunk in cutlass.range_constexpr(plan.head_dim_padded // RESCALE_COLS):
        columns = chunk_columns(o, RESCALE_COLS, chunk)
        load = tcgen05.make_tmem_copy(load_atom, columns)
        store = tcgen05.make_tmem_copy(store_atom, columns)
        source = load.get_slice(row).partition_S(columns)
        registers = cute.make_rmem_tensor(((RESCALE_COLS, 1), 1, 1), Float32)
        cute.copy(load, source, registers)
        cute.arch.fence_view_async_tmem_load()
        scale_pairs(registers, factor)
        cute.copy(store, registers, store.get_slice(row).partition_D(columns))
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def finish_stage(
    plan: cutlass.Constexpr[KernelPlan],
    channels: Channels,
    tile: Tile,
    out: Output,
    stats: cute.Tensor,
    scale_log2: Float32,
    stage: cutlass.Constexpr,
    row: Int32,
):
    """Normalises O of a stage into SMEM for the store warp, and writes its LSE."""
    query = tile.m_tile * plan.tile_q + stage * plan.tile_m + row
    total, maximum = Float32(0.0), Float32(-Float32.inf)
    if tile.blocks > 0:
        channels.stats_full.wait(stage * 4 + row // 32, (tile.blocks - 1) & 1)
        total, maximum = stats[0, stage, row], stats[1, stage, row]
        channels.o_full.wait(stage, 0)
        fence_after_thread_sync()
        sees_key = visible_keys(query, tile.seqlen_q, tile.seqlen_k, plan.causal) > 0
        normalise(plan, out, stage, row, cute.arch.rcp_approx(total), sees_key)
    else:
        clear(plan, out, stage, row)
    cute.arch.fence_view_async_shared()  # generic writes, read by TMA (async proxy)
    channels.o_stored.arrive_warp(stage)

    if query < tile.seqlen_q:
        lse = (maximum * scale_log2 + cute.math.log2(total, approx=True)) * LN2
        # a score of +inf makes the sum NaN, and O with it, but the LSE infinite, as in PyTorch
        lse = select_(maximum == Float32.inf, maximum, lse)
        out.lse[tile.batch, tile.head, query] = lse


@cute.jit
def normalise(
    plan: cutlass.Constexpr[KernelPlan],
    out: Output,
    stage: cutlass.Constexpr,
    row: Int32,
    factor: Float32,
    sees_key: Boolean,
):
    """SMEM row of the stage := O[row] * factor in 16 bit, or 0 for a row that sees no key.

    A row whose visible scores are all -inf has sum 0 too, but becomes 0 * inf = NaN as in PyTorch.
    """
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(OUT_COLS)), Float32)
    o = stage_matrix(plan, out.tmem, "O", stage)
    for chunk in cutlass.range_constexpr(plan.head_dim_padded // OUT_COLS):
        columns = chunk_columns(o, OUT_COLS, chunk)
        load = tcgen05.make_tmem_copy(atom, columns)
        # (COPY): columns of the row
        values = cute.make_rmem_tensor(((OUT_COLS, 1), 1, 1), Float32)
        cute.copy(load, load.get_slice(row).partition_S(columns), values)
        cute.arch.fence_view_async_tmem_load()
        scale_pairs(values, factor)
        for i in cutlass.range_constexpr(OUT_COLS):
            values[i] = select_(sees_key, values[i], Float32(0.0))
        store_columns(out, stage, row, chunk, values)


@cute.jit
def clear(plan: cutlass.Constexpr[KernelPlan], out: Output, stage: cutlass.Constexpr, row: Int32):
    """SMEM row of the stage := 0."""
    values = cute.make_rmem_tensor(OUT_COLS, Float32)
    values.fill(0.0)
    for chunk in cutlass.range_constexpr(plan.head_dim_padded // OUT_COLS):
        store_columns(out, stage, row, chunk, values)


def store_columns(out: Output, stage: int, row: Int32, chunk: int, values: cute.Tensor) -> None:
    """Writes OUT_COLS float32 values as 16 bit into the row's chunk of SMEM, 16 bytes at a time."""
    dtype = out.smem.element_type
    packed = cute.make_rmem_tensor(OUT_COLS, dtype)
    packed.store(cute.make_tensor(values.iterator, OUT_COLS).load().to(dtype))
    # (OUT_COLS)
    target = cute.local_tile(out.smem[row, None, stage], (OUT_COLS,), (chunk,))
    cute.autovec_copy(packed, target)
