# SPDX-License-Identifier: Apache-2.0
"""The first kernel to read: C[M, N] = A[M, K] @ B[N, K]^T on Blackwell, in about 100 lines.

One CTA computes one 128 x 128 tile of C. Its six warps have three roles that run side by side
and meet only at barriers in shared memory (SMEM):

    load      one warp      global --TMA--> SMEM     walks K in steps of 64, a ring of 4 stages
    multiply  one warp      SMEM --tcgen05--> TMEM   accumulates in float32, in tensor memory
    epilogue  four warps    TMEM --> registers --> SMEM --TMA--> global

What the kernel needs: A, B bfloat16 or float16; C bfloat16, float16 or float32; rows contiguous
and their strides multiples of 16 bytes (TMA). M, N and K are free otherwise: TMA fills what lies
outside A and B with zeros and drops what lies outside C.

Run it on the modelled SM, no GPU needed:  python -m kernels.blackwell.gemm --m 200 --n 136 --k 328
docs/first_kernel.md is a walk through it. Read `kernel` first, then the three roles.

Names: tCrA is "A, partitioned for the MMA's C (t C), as r(egister-like descriptors)"; g is global,
s shared, t tensor memory, r registers. The comment above a tensor names its modes.
"""

import enum
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass.cute.nvgpu import cpasync, tcgen05

from kernels.common.fences import fence_after_thread_sync, fence_before_thread_sync
from kernels.common.plan import SMEM_LIMIT_BYTES, SWIZZLE_ATOM_BYTES

THREADS = 6 * 32


class Warp(enum.IntEnum):
    """First warp of each role. A warp reaches TMEM lanes 32 * (warp % 4) + 0..31 and no others
    (PTX ISA 9.1 section 9.7.16.8), so the epilogue is warps 0 to 3, one for each 32 rows of C."""

    EPILOGUE = 0
    MULTIPLY = 4
    LOAD = 5


class NamedBarrier(enum.IntEnum):
    CTA = 0  # all threads; what sync_threads uses
    EPILOGUE = 1  # the 128 threads of the epilogue


def ring_slot(k_tile, stages):
    """K tile -> its stage of the ring, and the parity of the ring's current round."""
    return k_tile % stages, (k_tile // stages) % 2


def tma_partition(atom, smem_tensor, global_tensor, modes):
    """(TMA, ...) views of both sides of a TMA copy whose tile is the first ``modes`` modes."""
    group = [cute.group_modes(tensor, 0, modes) for tensor in (smem_tensor, global_tensor)]
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), *group)


@cute.jit
def load(k_tiles, stages: cutlass.Constexpr, tx_bytes: cutlass.Constexpr, a, b, full, empty):
    """Producer of the ring. a and b are (TMA atom, global tiles, SMEM stages)."""
    a_atom, tAgA, tAsA = a
    b_atom, tBgB, tBsB = b
    for k_tile in cutlass.range(k_tiles, unroll=1):
        stage, parity = ring_slot(k_tile, stages)
        # A fresh barrier is in phase 0 and counts phase "-1", of parity 1, as completed: waiting
        # for the opposite parity lets the first round through an empty ring without blocking.
        cute.arch.mbarrier_wait(empty + stage, parity ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, tx_bytes)
        cute.copy(a_atom, tAgA[None, k_tile], tAsA[None, stage], tma_bar_ptr=full + stage)
        cute.copy(b_atom, tBgB[None, k_tile], tBsB[None, stage], tma_bar_ptr=full + stage)


@cute.jit
def multiply(k_tiles, stages: cutlass.Constexpr, tiled_mma, tCrA, tCrB, tCtC, full, empty, done):
    """Consumer of the ring: issues every MMA; one elected thread speaks for the warp."""
    for k_tile in cutlass.range(k_tiles, unroll=1):
        stage, parity = ring_slot(k_tile, stages)
        cute.arch.mbarrier_wait(full + stage, parity)
        fence_after_thread_sync()
        for k_block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):  # K = 16 each
            # TMEM starts as garbage: the very first MMA overwrites it instead of adding to it.
            tiled_mma.set(tcgen05.Field.ACCUMULATE, (k_tile > 0) | (k_block > 0))
            slot = (None, None, k_block, stage)
            cute.gemm(tiled_mma, tCtC, tCrA[slot], tCrB[slot], tCtC)
        with cute.arch.elect_one():  # arrives once the MMAs issued so far have read their SMEM
            tcgen05.commit(empty + stage)
    with cute.arch.elect_one():  # arrives once the accumulator is complete
        tcgen05.commit(done)


@cute.jit
def epilogue(tidx, out_dtype: cutlass.Constexpr, tCtC, tCsC, done):
    """Accumulator to SMEM: thread t owns row t of the tile and moves 32 columns at a time."""
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), cutlass.Float32)
    tmem_load = tcgen05.make_tmem_copy(atom, tCtC)
    # (COPY, CHUNK) in TMEM and in SMEM
    tLtC = cute.group_modes(tmem_load.get_slice(tidx).partition_S(tCtC), 1, 4)
    tLsC = cute.group_modes(tmem_load.get_slice(tidx).partition_D(tCsC), 1, 4)
    cute.arch.mbarrier_wait(done, 0)
    fence_after_thread_sync()
    for chunk in cutlass.range(cute.size(tLtC, mode=[1]), unroll=1):
        # (COPY): 32 float32 of this thread's row
        rAcc = cute.make_rmem_tensor(tLsC[None, chunk].shape, cutlass.Float32)
        rC = cute.make_rmem_tensor(rAcc.shape, out_dtype)
        cute.copy(tmem_load, tLtC[None, chunk], rAcc)
        cute.arch.fence_view_async_tmem_load()  # tcgen05.wait::ld: the registers are there
        rC.store(rAcc.load().to(out_dtype))
        cute.autovec_copy(rC, tLsC[None, chunk])


@dataclass(frozen=True)
class Gemm:
    """C[M, N] = A[M, K] @ B[N, K]^T, accumulated in float32.

    tile_n: columns of C a CTA computes, 32, 64, 128 or 256; tile_k: 32, 64 or 128 elements of K a
    stage; stages: depth of the ring. Raises ValueError when a field or the SMEM they need is out
    of range. Shapes are not part of it: one compile serves every M, N and K of the same dtypes.
    """

    tile_n: int = 128
    tile_k: int = 64
    stages: int = 4

    def __post_init__(self):
        if self.tile_n not in (32, 64, 128, 256):  # PTX ISA 9.1 section 9.7.16.7: tcgen05.alloc
            raise ValueError(f"tile_n is {self.tile_n}: TMEM comes in 32, 64, 128 or 256 columns")
        if self.tile_k not in (32, 64, 128) or self.stages < 1:
            raise ValueError(
                f"tile_k, stages are {self.tile_k}, {self.stages}: tile_k is 32, 64 or 128, "
                "stages at least 1"
            )

    @property
    def tile_mnk(self) -> tuple[int, int, int]:
        return 128, self.tile_n, self.tile_k  # tcgen05.mma gives each of the 128 TMEM lanes a row

    def check_compile(self, a_dtype, b_dtype, c_dtype):
        """Raises TypeError or ValueError for what the kernel cannot be compiled for."""
        if a_dtype is not b_dtype or a_dtype not in (cutlass.BFloat16, cutlass.Float16):
            raise TypeError(f"A is {a_dtype}, B {b_dtype}: both must be BFloat16, or both Float16")
        if c_dtype not in (cutlass.BFloat16, cutlass.Float16, cutlass.Float32):
            raise TypeError(f"C is {c_dtype}: must be BFloat16, Float16 or Float32")
        tile_m, tile_n, tile_k = self.tile_mnk
        ring = self.stages * (tile_m + tile_n) * tile_k * a_dtype.width // 8
        total = SWIZZLE_ATOM_BYTES + ring + tile_m * tile_n * c_dtype.width // 8
        if total > SMEM_LIMIT_BYTES:
            raise ValueError(
                f"{self} with C in {c_dtype} needs {total} bytes of SMEM, an SM has "
                f"{SMEM_LIMIT_BYTES} for a CTA: use fewer stages or a smaller tile"
            )

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        """a (M, K), b (N, K), c (M, N), each with contiguous rows; c is written."""
        self.check_compile(a.element_type, b.element_type, c.element_type)
        tiler, dtype = self.tile_mnk, a.element_type
        k_major = cute.nvgpu.OperandMajorMode.K
        tiled_mma = sm100.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, cutlass.Float32, tcgen05.CtaGroup.ONE, tiler[:2]
        )
        # (MMA, MMA_M, MMA_K, STAGE), 128-byte swizzle; likewise B; C is (TILE_M, TILE_N)
        a_smem = sm100.make_smem_layout_a(tiled_mma, tiler, dtype, self.stages)
        b_smem = sm100.make_smem_layout_b(tiled_mma, tiler, dtype, self.stages)
        row_major = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
        c_smem = sm100.make_smem_layout_epi(c.element_type, row_major, tiler[:2], 1)
        a_stage, b_stage = (cute.select(layout, mode=[0, 1, 2]) for layout in (a_smem, b_smem))
        c_smem = cute.select(c_smem, mode=[0, 1])
        # A TMA atom holds the tensor map (a kernel parameter); the tensor beside it has
        # coordinates where others have addresses.
        g2s, s2g = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        a_tma = cute.nvgpu.make_tiled_tma_atom_A(g2s, a, a_stage, tiler, tiled_mma)
        b_tma = cute.nvgpu.make_tiled_tma_atom_B(g2s, b, b_stage, tiler, tiled_mma)
        c_tma = cpasync.make_tiled_tma_atom(s2g, c, c_smem, tiler[:2])
        layouts, dtypes = (a_smem, b_smem, c_smem), (dtype, c.element_type)
        self.kernel(tiled_mma, a_tma, b_tma, c_tma, layouts, dtypes).launch(
            grid=cute.ceil_div((*c.shape, 1), tiler[:2]), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, tiled_mma, a_tma, b_tma, c_tma, layouts, dtypes: cutlass.Constexpr):
        """One tile of C. Blocks are (m_tile, n_tile, 1)."""
        (a_atom, a), (b_atom, b), (c_atom, c) = a_tma, b_tma, c_tma
        (a_smem, b_smem, c_smem), (in_dtype, out_dtype) = layouts, dtypes
        m_tile, n_tile, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # 1. Shared memory, barriers, tensor memory
        smem = cutlass.memory.SmemAllocator()
        # full[s]:  stage s holds A and B. 1 arrival (load, with expect_tx) + the bytes of both
        #           tiles (TMA); multiply waits; parity 0 first.
        # empty[s]: stage s may be overwritten. 1 arrival (commit, after the MMAs that read it);
        #           load waits; parity 1 first, which a fresh barrier passes.
        # done:     the accumulator is complete. 1 arrival (commit after the last MMA); all 128
        #           epilogue threads wait, once, for parity 0.
        full = smem.allocate_array(cutlass.Int64, self.stages)
        empty = smem.allocate_array(cutlass.Int64, self.stages)
        done = smem.allocate_array(cutlass.Int64, 1)
        tmem_address = smem.allocate_array(cutlass.Int32, 1)
        sA = smem.allocate_tensor(in_dtype, a_smem.outer, SWIZZLE_ATOM_BYTES, swizzle=a_smem.inner)
        sB = smem.allocate_tensor(in_dtype, b_smem.outer, SWIZZLE_ATOM_BYTES, swizzle=b_smem.inner)
        sC = smem.allocate_tensor(out_dtype, c_smem.outer, SWIZZLE_ATOM_BYTES, swizzle=c_smem.inner)
        if warp == Warp.LOAD:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, 1)
                cute.arch.mbarrier_init(done, 1)
                cute.arch.mbarrier_init_fence()  # TMA and commit must see them initialised
        if warp == Warp.EPILOGUE:
            cute.arch.alloc_tmem(self.tile_n, tmem_address)  # a float32 column for each of C's
            cute.arch.relinquish_tmem_alloc_permit()
        fence_before_thread_sync()
        cute.arch.sync_threads()  # publishes the barriers and the TMEM address
        fence_after_thread_sync()

        # 2. This CTA's tiles, cut the way each engine wants them
        coord, mma = (m_tile, n_tile, None), tiled_mma.get_slice(0)
        # (TILE_M, TILE_K, K_TILES), (TILE_N, TILE_K, K_TILES), (TILE_M, TILE_N)
        gA = cute.local_tile(a, self.tile_mnk, coord, proj=(1, None, 1))
        gB = cute.local_tile(b, self.tile_mnk, coord, proj=(None, 1, 1))
        gC = cute.local_tile(c, self.tile_mnk[:2], (m_tile, n_tile))
        # (TMA, STAGE) in SMEM, (TMA, K_TILES) in global memory
        tAsA, tAgA = tma_partition(a_atom, sA, mma.partition_A(gA), modes=3)
        tBsB, tBgB = tma_partition(b_atom, sB, mma.partition_B(gB), modes=3)
        # (TMA)
        tCsC_tma, tCgC = tma_partition(c_atom, sC, gC, modes=2)
        # (MMA, MMA_M, MMA_K, STAGE), (MMA, MMA_N, MMA_K, STAGE): SMEM descriptors
        tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
        # (MMA, MMA_M, MMA_N): tile_n columns of TMEM
        tmem = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, tmem_address)
        acc_shape = tiled_mma.partition_shape_C(self.tile_mnk[:2])
        tCtC = cute.make_tensor(tmem, tiled_mma.make_fragment_C(acc_shape).layout)

        # 3. The roles
        k_tiles = cute.size(gA, mode=[2])
        stage_bytes = (cute.size(tAsA, mode=[0]) + cute.size(tBsB, mode=[0])) * in_dtype.width // 8
        if warp == Warp.LOAD:
            a_copy, b_copy = (a_atom, tAgA, tAsA), (b_atom, tBgB, tBsB)
            load(k_tiles, self.stages, stage_bytes, a_copy, b_copy, full, empty)
        if warp == Warp.MULTIPLY:
            multiply(k_tiles, self.stages, tiled_mma, tCrA, tCrB, tCtC, full, empty, done)
        if warp < Warp.MULTIPLY:
            epilogue(tidx, out_dtype, tCtC, mma.partition_C(sC), done)
            cute.arch.fence_view_async_shared()  # make the row visible to TMA (async proxy)
            fence_before_thread_sync()
            cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=128)
            fence_after_thread_sync()
            if warp == Warp.EPILOGUE:
                cute.copy(c_atom, tCsC_tma, tCgC)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.dealloc_tmem(tmem, self.tile_n)
                cute.arch.cp_async_bulk_wait_group(0, read=True)  # SMEM outlives the store


def check_operands(a, b, c):
    """Raises ValueError for torch tensors that TMA cannot take; the dtypes are check_compile's."""
    (m, k), (n, _) = a.shape, b.shape
    if b.shape[1] != k or tuple(c.shape) != (m, n) or 0 in (m, n, k):
        raise ValueError(
            f"A {tuple(a.shape)}, B {tuple(b.shape)}, C {tuple(c.shape)}: "
            "must be (M, K), (N, K), (M, N), none of them 0"
        )
    for name, tensor in (("A", a), ("B", b), ("C", c)):
        row_bytes = tensor.stride(0) * tensor.element_size()
        if tensor.stride(1) != 1 or row_bytes % 16 or tensor.data_ptr() % 16:
            raise ValueError(
                f"{name} has strides {tensor.stride()} of {tensor.element_size()} bytes at "
                f"{tensor.data_ptr():#x}: TMA needs contiguous rows, and rows and base at "
                "multiples of 16 bytes; pad the rows"
            )


ROLES = {**dict.fromkeys(range(4), "epilogue"), Warp.MULTIPLY: "multiply", Warp.LOAD: "load"}


def reference(a, b):
    return a @ b.T


def main():
    """Multiplies random matrices on the modelled SM and compares with float64."""
    import argparse

    import torch

    from kernels.emulator import emulate

    parser = argparse.ArgumentParser("python -m kernels.blackwell.gemm", description=main.__doc__)
    for size, default in (("m", 200), ("n", 136), ("k", 328)):
        parser.add_argument(f"--{size}", type=int, default=default)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--gpu", default="b200")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    random = torch.Generator().manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    a, b = (torch.randn(r, args.k, generator=random).to(dtype) for r in (args.m, args.n))
    c = torch.full((args.m, args.n), torch.nan)
    check_operands(a, b, c)
    report = emulate(Gemm(), a, b, c, gpu=args.gpu, roles=ROLES)
    print(report)
    if not report.ok:
        return 1
    exact, plain = reference(a.double(), b.double()), reference(a.float(), b.float())
    error, torch_error = ((x - exact).abs().max().item() for x in (c, plain))
    print(f"largest error against float64: {error:.3g} (torch in float32: {torch_error:.3g})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
