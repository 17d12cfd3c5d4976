"""C[M, N] = A[M, K] @ B[N, K]^T on one Blackwell SM per 128x128 tile: the first kernel to read."""

import enum
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
import cutlass.utils.blackwell_helpers as sm100
from cutlass.cute.nvgpu import cpasync, tcgen05


class Warp(enum.IntEnum):
    """Warps 0 to 3 are the epilogue: warp w of a warpgroup can only reach TMEM lanes 32w..32w+31."""

    EPILOGUE = 0
    MMA = 4
    LOAD = 5


EPILOGUE_BARRIER = 1  # named barrier of the 128 epilogue threads; 0 is the CTA-wide one
THREADS = 6 * 32


@dataclass(frozen=True)
class Gemm:
    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    stages: int = 4

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream) -> None:
        tile_mnk = (self.tile_m, self.tile_n, self.tile_k)
        tiled_mma = sm100.make_trivial_tiled_mma(
            a.element_type,
            tcgen05.OperandMajorMode.K,
            tcgen05.OperandMajorMode.K,
            cutlass.Float32,
            tcgen05.CtaGroup.ONE,
            tile_mnk[:2],
        )
        a_layout = sm100.make_smem_layout_a(tiled_mma, tile_mnk, a.element_type, self.stages)
        b_layout = sm100.make_smem_layout_b(tiled_mma, tile_mnk, b.element_type, self.stages)
        c_layout = cute.select(
            sm100.make_smem_layout_epi(
                c.element_type, utils.LayoutEnum.ROW_MAJOR, tile_mnk[:2], 1
            ),
            mode=[0, 1],
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        a_atom, a_tma = cute.nvgpu.make_tiled_tma_atom_A(
            load, a, cute.select(a_layout, mode=[0, 1, 2]), tile_mnk, tiled_mma
        )
        b_atom, b_tma = cute.nvgpu.make_tiled_tma_atom_B(
            load, b, cute.select(b_layout, mode=[0, 1, 2]), tile_mnk, tiled_mma
        )
        c_atom, c_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), c, c_layout, tile_mnk[:2]
        )
        self.kernel(
            tiled_mma, a_atom, a_tma, b_atom, b_tma, c_atom, c_tma, a_layout, b_layout, c_layout,
            a.element_type, c.element_type,
        ).launch(
            grid=cute.ceil_div((*c.shape, 1), tile_mnk[:2]), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        a_atom: cute.CopyAtom,
        a: cute.Tensor,
        b_atom: cute.CopyAtom,
        b: cute.Tensor,
        c_atom: cute.CopyAtom,
        c: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        c_layout: cute.ComposedLayout,
        in_dtype: cutlass.Constexpr,
        out_dtype: cutlass.Constexpr,
    ) -> None:
        tile_mnk = (self.tile_m, self.tile_n, self.tile_k)
        m_tile, n_tile, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        smem = utils.SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, self.stages)
        empty = smem.allocate_array(cutlass.Int64, self.stages)
        done = smem.allocate_array(cutlass.Int64, 1)
        tmem_address = smem.allocate_array(cutlass.Int32, 1)
        sA = smem.allocate_tensor(in_dtype, a_layout.outer, 1024, swizzle=a_layout.inner)
        sB = smem.allocate_tensor(in_dtype, b_layout.outer, 1024, swizzle=b_layout.inner)
        sC = smem.allocate_tensor(out_dtype, c_layout.outer, 1024, swizzle=c_layout.inner)

        if warp == Warp.LOAD:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, 1)
                cute.arch.mbarrier_init(done, 1)
                cute.arch.mbarrier_init_fence()
        if warp == Warp.EPILOGUE:
            cute.arch.alloc_tmem(self.tile_n, tmem_address)
        cute.arch.sync_threads()

        thr_mma = tiled_mma.get_slice(0)
        gA = cute.local_tile(a, tile_mnk, (m_tile, n_tile, None), proj=(1, None, 1))
        gB = cute.local_tile(b, tile_mnk, (m_tile, n_tile, None), proj=(None, 1, 1))
        gC = cute.local_tile(c, tile_mnk[:2], (m_tile, n_tile))
        tAsA, tAgA = cpasync.tma_partition(
            a_atom, 0, cute.make_layout(1),
            cute.group_modes(sA, 0, 3), cute.group_modes(thr_mma.partition_A(gA), 0, 3),
        )
        tBsB, tBgB = cpasync.tma_partition(
            b_atom, 0, cute.make_layout(1),
            cute.group_modes(sB, 0, 3), cute.group_modes(thr_mma.partition_B(gB), 0, 3),
        )
        tCrA = tiled_mma.make_fragment_A(sA)
        tCrB = tiled_mma.make_fragment_B(sB)
        tmem = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, tmem_address)
        acc = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C(tile_mnk[:2]))
        tCtC = cute.make_tensor(tmem, acc.layout)
        k_tiles = cute.size(gA, mode=[2])

        if warp == Warp.LOAD:
            tx_bytes = cute.size_in_bytes(
                in_dtype, cute.select(a_layout, mode=[0, 1, 2])
            ) + cute.size_in_bytes(in_dtype, cute.select(b_layout, mode=[0, 1, 2]))
            for k_tile in cutlass.range(k_tiles, unroll=1):
                stage = k_tile % self.stages
                phase = (k_tile // self.stages) % 2
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, tx_bytes)
                cute.copy(a_atom, tAgA[None, k_tile], tAsA[None, stage], tma_bar_ptr=full + stage)
                cute.copy(b_atom, tBgB[None, k_tile], tBsB[None, stage], tma_bar_ptr=full + stage)

        if warp == Warp.MMA:
            for k_tile in cutlass.range(k_tiles, unroll=1):
                stage = k_tile % self.stages
                phase = (k_tile // self.stages) % 2
                cute.arch.mbarrier_wait(full + stage, phase)
                for k_block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, (k_tile > 0) | (k_block > 0))
                    coord = (None, None, k_block, stage)
                    cute.gemm(tiled_mma, tCtC, tCrA[coord], tCrB[coord], tCtC)
                with cute.arch.elect_one():
                    tcgen05.commit(empty + stage)
            with cute.arch.elect_one():
                tcgen05.commit(done)

        if warp < Warp.MMA:
            cute.arch.mbarrier_wait(done, 0)
            load = cute.make_copy_atom(
                tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), cutlass.Float32
            )
            tiled_load = tcgen05.make_tmem_copy(load, tCtC)
            thr_load = tiled_load.get_slice(tidx)
            tLtC = thr_load.partition_S(tCtC)
            tLsC = thr_load.partition_D(thr_mma.partition_C(sC))
            rAcc = cute.make_rmem_tensor(tLsC.shape, cutlass.Float32)
            rC = cute.make_rmem_tensor(tLsC.shape, out_dtype)
            cute.copy(tiled_load, tLtC, rAcc)
            cute.arch.fence_view_async_tmem_load()
            rC.store(rAcc.load().to(out_dtype))
            cute.autovec_copy(rC, tLsC)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=EPILOGUE_BARRIER, number_of_threads=128)
            if warp == Warp.EPILOGUE:
                tCsC, tCgC = cpasync.tma_partition(
                    c_atom, 0, cute.make_layout(1),
                    cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2),
                )
                cute.copy(c_atom, tCsC, tCgC)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.relinquish_tmem_alloc_permit()
                cute.arch.dealloc_tmem(tmem, self.tile_n)
