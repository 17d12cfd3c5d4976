# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4's forward for Blackwell (sm_100a, sm_103a): the wiring of its warps.

One CTA of 16 warps computes 256 query rows of one head, as two stages of 128 rows that take turns
on the tensor core:

    load        warp 14       Q, K, V: global --TMA--> SMEM                      load.py
    mma         warp 12       S = Q K^T, O += P V, accumulators in TMEM          mma.py
    softmax0/1  warps 0-7     S --> P, online maximum and sum, a row a thread    softmax.py
    correction  warps 8-11    rescales O, normalises it into SMEM, writes LSE    correction.py
    store       warp 13       O: SMEM --TMA--> global                            store.py

Tensor memory of head_dim 128, 512 columns of 128 lanes (``print(plan)`` has it for every plan):

    S0 0-127    S1 128-255    scores; written by QK, free again once PV of the same stage has read P
    P0 64-127   P1 192-255    weights in 16 bit, two a column, over the upper half of their S
    O0 256-383  O1 384-511    output; written by PV, rescaled in between, read at the end

See the PTX of a plan without a GPU, with PTX, cubin and line numbers in DIR:

    python -c "from kernels.blackwell.forward import compile_forward; \\
        from kernels.common.plan import KernelPlan; \\
        compile_forward(KernelPlan.forward(), '--keep-ptx --keep-cubin --dump-dir=DIR')"
"""

import functools
import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from kernels.blackwell.channels import Channels, NamedBarrier, Warp
from kernels.blackwell.correction import Output, correction
from kernels.blackwell.load import load
from kernels.blackwell.mma import mma
from kernels.blackwell.softmax import softmax
from kernels.blackwell.store import store
from kernels.blackwell.tensors import (
    DTYPES,
    load_tiles,
    operands,
    permute,
    smem_array,
    smem_tensors,
    store_tiles,
    tma_atoms,
)
from kernels.blackwell.tile import Tile, key_blocks
from kernels.common.fences import fence_after_thread_sync, fence_before_thread_sync
from kernels.common.plan import SWIZZLE_ATOM_BYTES, KernelPlan
from kernels.common.tile_order import heads_in_l2, tile_of

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class AttentionForward:
    """softmax(Q K^T * softmax_scale) V by one plan. Hashable: one compile serves all shapes."""

    plan: KernelPlan

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        softmax_scale: Float32,
        stream,
    ):
        """Launches the kernel; ``out`` and ``lse`` are written.

        q, out: (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, kv_heads, head_dim), all
        of the plan's dtype, head_dim contiguous, other strides multiples of 16 bytes; heads a
        multiple of kv_heads. lse: (batch, heads, seqlen_q) float32, natural logarithm.
        softmax_scale: positive. No size may be 0 (TMA has no empty tensors).
        """
        plan = self.plan
        # (seqlen, head_dim, head, batch); V is (head_dim, seqlen_k, head, batch)
        q, k, out = (permute(tensor, (1, 3, 2, 0)) for tensor in (q, k, out))
        v = permute(v, (3, 1, 2, 0))
        seqlen_q, _, heads, batches = q.shape
        seqlen_k, _, kv_heads, _ = k.shape
        m_tiles = cute.ceil_div(seqlen_q, plan.tile_q)
        kv_bytes = Int64(seqlen_k) * (2 * plan.head_dim * plan.element_bytes)
        section = heads_in_l2(kv_bytes, heads * batches)
        sizes = (seqlen_q, seqlen_k, heads, heads // kv_heads, batches, m_tiles, section)
        sizes = tuple(Int32(size) for size in sizes)
        tma = tma_atoms(plan, q, k, v, out)
        self.kernel.set_name_prefix(plan.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(tma, lse, sizes, softmax_scale * LOG2_E).launch(
            grid=(m_tiles * heads * batches, 1, 1),
            block=(plan.threads, 1, 1),
            smem=plan.smem_bytes,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tma, lse, sizes, scale_log2: Float32):
        """One tile. tma: (atom, coordinate tensor) of Q, K, V and O; sizes: see this_tile."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=SWIZZLE_ATOM_BYTES)
        channels = Channels.create(plan, smem)
        tmem_base = smem_array(plan, smem, "tmem_base", Int32)
        setup(plan, channels, tmem_base, tma, warp)
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_base)
        sQ, sK, sV, sO, stats = smem_tensors(plan, smem)

        if warp < Warp.CORRECTION:
            cute.arch.setmaxregister_increase(plan.softmax_registers)
            stage = Int32(warp >= Warp.SOFTMAX1)
            softmax(plan, channels, this_tile(plan, sizes), stage, tmem, stats, scale_log2)
        elif warp < Warp.MMA:
            cute.arch.setmaxregister_decrease(plan.correction_registers)
            tile = this_tile(plan, sizes)
            correction(plan, channels, tile, Output(tmem, sO, lse), stats, scale_log2)
            free_tmem_barrier(plan)
        else:
            cute.arch.setmaxregister_decrease(plan.other_registers)
            tile = this_tile(plan, sizes)
            if warp == Warp.MMA:
                qk, pv = operands(plan, tmem, sQ, sK, sV)
                mma(plan, channels, tile, qk, pv)
                free_tmem_barrier(plan)
                cute.arch.dealloc_tmem(tmem, plan.tmem_cols)
            if warp == Warp.LOAD:
                q, k, v = load_tiles(plan, tile, tma, sQ, sK, sV)
                load(plan, channels, tile, q, k, v)
            if warp == Warp.STORE:
                store(plan, channels, tile, store_tiles(plan, tile, tma, sO))


@cute.jit
def this_tile(plan: cutlass.Constexpr[KernelPlan], sizes) -> Tile:
    """The calling CTA's tile."""
    seqlen_q, seqlen_k, heads, group, batches, m_tiles, section = sizes
    index, _, _ = cute.arch.block_idx()
    longest_first = plan.tile_order == "longest_first"
    m_tile, head_of_all = tile_of(index, m_tiles, heads * batches, section, longest_first)
    batch = Int32(Uint32(head_of_all) // Uint32(heads))
    head = head_of_all - batch * heads
    kv_head = Int32(Uint32(head) // Uint32(group))
    blocks = key_blocks(plan, m_tile, seqlen_q, seqlen_k)
    return Tile(m_tile, head, kv_head, batch, seqlen_q, seqlen_k, blocks)


@cute.jit
def setup(plan: cutlass.Constexpr[KernelPlan], channels: Channels, tmem_base, tma, warp: Int32):
    """Barriers, tensor memory and TMA descriptors, ready for all warps on return."""
    if warp == Warp.LOAD:
        for atom, _ in tma:
            cpasync.prefetch_descriptor(atom)
    if warp == Warp.STORE:
        with cute.arch.elect_one():
            channels.init()
    if warp == Warp.MMA:
        # 512 columns are all an SM has: this waits until the CTA before us has freed its own
        cute.arch.alloc_tmem(plan.tmem_cols, tmem_base)
        cute.arch.relinquish_tmem_alloc_permit()
    fence_before_thread_sync()
    cute.arch.barrier(barrier_id=NamedBarrier.CTA, number_of_threads=plan.threads)
    fence_after_thread_sync()


def free_tmem_barrier(plan: KernelPlan) -> None:
    """Correction and mma warps meet here: after it nobody touches tensor memory."""
    fence_before_thread_sync()
    cute.arch.barrier(barrier_id=NamedBarrier.TMEM_FREE, number_of_threads=plan.tile_m + 32)
    fence_after_thread_sync()


@functools.cache
def compile_forward(plan: KernelPlan, options: str = ""):
    """The compiled kernel of a plan, for tensors of any shape; cached by plan and DSL options.

    Call the result with the arguments of :meth:`AttentionForward.__call__`. Needs no GPU.
    """

    def fake():
        """(batch, seqlen, heads, head_dim): any sizes, head_dim contiguous, strides of 16 bytes."""
        shape = tuple(cute.sym_int32() for _ in range(4))
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return make_fake_tensor(DTYPES[plan.dtype], shape, (*strides, 1), assumed_align=16)

    lse_shape = tuple(cute.sym_int32() for _ in range(3))
    lse_strides = (cute.sym_int64(), cute.sym_int64(), 1)
    lse = make_fake_tensor(Float32, lse_shape, lse_strides, assumed_align=4)
    arguments = (fake(), fake(), fake(), fake(), lse, Float32(1.0), make_fake_stream())
    options = f"--gpu-arch {plan.arch} {options}"
    return cute.compile(AttentionForward(plan), *arguments, options=options)
