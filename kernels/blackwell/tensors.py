# SPDX-License-Identifier: Apache-2.0
"""The forward kernel's tensors: where the plan puts them, and each role's view of them.

Names: sX lies in SMEM, tX in TMEM, gX in global memory; the comment above a tensor names its modes.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.tensor_utils import LayoutEnum

from kernels.blackwell.mma import Operands
from kernels.blackwell.tile import Tile, TmaTiles
from kernels.common.plan import KernelPlan

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def permute(tensor: cute.Tensor, modes: tuple[int, ...]) -> cute.Tensor:
    """The tensor with its modes reordered; no data moves."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(modes)))


def smem_array(plan: KernelPlan, smem: cute.Pointer, name: str, dtype) -> cute.Pointer:
    """Start of an SMEM region of the plan."""
    return cute.recast_ptr(smem + plan.smem_offset(name), dtype=dtype)


def smem_tensors(plan: KernelPlan, smem: cute.Pointer):
    """sQ, sK, sV (MMA, MMA_M or N, MMA_K, STAGE), sO (TILE_M, HEAD_DIM, STAGE) and stats.

    K and V share one ring of slots and with it their memory. stats: (field, stage, row).
    """

    def swizzled(name: str, layout: cute.ComposedLayout) -> cute.Tensor:
        start = cute.recast_ptr(
            smem + plan.smem_offset(name), layout.inner, dtype=DTYPES[plan.dtype]
        )
        return cute.make_tensor(start, layout.outer)

    q, k, v, _, o = smem_layouts(plan)
    stats_layout = cute.make_ordered_layout((2, plan.q_stages, plan.tile_m), order=(2, 1, 0))
    stats = cute.make_tensor(smem_array(plan, smem, "stats", Float32), stats_layout)
    return swizzled("Q", q), swizzled("KV", k), swizzled("KV", v), swizzled("O", o), stats


def tiled_mmas(plan: KernelPlan) -> tuple[cute.TiledMma, cute.TiledMma]:
    """QK^T, both from SMEM, and PV, P from TMEM and V with keys as its rows (MN-major)."""
    dtype = DTYPES[plan.dtype]
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    one, tmem = tcgen05.CtaGroup.ONE, tcgen05.OperandSource.TMEM
    qk, pv = qk_tiler(plan)[:2], pv_tiler(plan)[:2]
    return (
        sm100.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, one, qk),
        sm100.make_trivial_tiled_mma(dtype, dtype, k_major, mn_major, Float32, one, pv, tmem),
    )


def qk_tiler(plan: KernelPlan) -> tuple[int, int, int]:
    """(M, N, K) of one S = Q K^T."""
    return plan.tile_m, plan.tile_n, plan.head_dim_padded


def pv_tiler(plan: KernelPlan) -> tuple[int, int, int]:
    """(M, N, K) of one O += P V."""
    return plan.tile_m, plan.head_dim_padded, plan.tile_n


def smem_layouts(plan: KernelPlan):
    """Layouts of Q, K, V, P (TMEM) and O, all with 128-byte swizzle.

    (MMA, MMA_M or MMA_N, MMA_K, STAGE) for the operands, (TILE_M, HEAD_DIM, STAGE) for O.
    """
    qk, pv = tiled_mmas(plan)
    dtype, o_tile = DTYPES[plan.dtype], (plan.tile_m, plan.head_dim_padded)
    return (
        sm100.make_smem_layout_a(qk, qk_tiler(plan), dtype, plan.q_stages),
        sm100.make_smem_layout_b(qk, qk_tiler(plan), dtype, plan.kv_stages),
        sm100.make_smem_layout_b(pv, pv_tiler(plan), dtype, plan.kv_stages),
        sm100.make_smem_layout_a(pv, pv_tiler(plan), dtype, 1),
        sm100.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, o_tile, plan.q_stages),
    )


def tma_atoms(plan: KernelPlan, q, k, v, out):
    """(TMA atom, coordinate tensor) of Q, K, V and O; host side, as it encodes tensor maps.

    q, k, out: (seqlen, head_dim, head, batch); v: (head_dim, seqlen_k, head, batch).
    """
    qk, pv = tiled_mmas(plan)
    g2s, s2g = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    q_tile, k_tile, v_tile, _, o_tile = smem_layouts(plan)
    q_tile, k_tile, v_tile = (cute.select(t, mode=[0, 1, 2]) for t in (q_tile, k_tile, v_tile))
    o_tile = cute.select(o_tile, mode=[0, 1])
    return (
        cute.nvgpu.make_tiled_tma_atom_A(g2s, q, q_tile, qk_tiler(plan), qk),
        cute.nvgpu.make_tiled_tma_atom_B(g2s, k, k_tile, qk_tiler(plan), qk),
        cute.nvgpu.make_tiled_tma_atom_B(g2s, v, v_tile, pv_tiler(plan), pv),
        cpasync.make_tiled_tma_atom(s2g, out, o_tile, (plan.tile_m, plan.head_dim_padded)),
    )


def operands(plan: KernelPlan, tmem: cute.Pointer, sQ, sK, sV):
    """The MMA warp's two products, S = Q K^T and O += P V."""
    qk, pv = tiled_mmas(plan)
    # (MMA, MMA_M, MMA_K, STAGE), (MMA, MMA_N, MMA_K, SLOT): SMEM descriptors
    tSrQ, tSrK, tOrV = qk.make_fragment_A(sQ), qk.make_fragment_B(sK), pv.make_fragment_B(sV)
    # (MMA, MMA_M, MMA_K): P as the A operand, 16-bit elements, two to a TMEM column
    tOrP = pv.make_fragment_A(smem_layouts(plan)[3].outer.shape)[None, None, None, 0]
    stages = range(plan.q_stages)
    ratio = 32 // (plan.element_bytes * 8)

    def accumulator(mma, shape, name):
        """(MMA, MMA_M, MMA_N)"""
        fragment = mma.make_fragment_C(mma.partition_shape_C(shape))
        return cute.make_tensor(tmem + plan.tmem_col(name), fragment.layout)

    def weights(name):
        start = cute.recast_ptr(tmem, dtype=sV.element_type) + plan.tmem_col(name) * ratio
        return cute.make_tensor(start, tOrP.layout)

    scores = tuple(accumulator(qk, (plan.tile_m, plan.tile_n), f"S{i}") for i in stages)
    outputs = tuple(accumulator(pv, (plan.tile_m, plan.head_dim_padded), f"O{i}") for i in stages)
    queries = tuple(tSrQ[None, None, None, i] for i in stages)
    return (
        Operands(qk.op, queries, tSrK, scores),
        Operands(pv.op, tuple(weights(f"P{i}") for i in stages), tOrV, outputs),
    )


def load_tiles(plan: KernelPlan, tile: Tile, tma, sQ, sK, sV):
    """Q by stages of 128 rows, K and V by blocks of 128 keys, of this tile's head and batch."""
    (q_atom, q), (k_atom, k), (v_atom, v), _ = tma
    qk, pv = (mma.get_slice(0) for mma in tiled_mmas(plan))
    rows, keys, head_dim = plan.tile_m, plan.tile_n, plan.head_dim_padded
    # (TILE_M, HEAD_DIM, TILES), (TILE_N, HEAD_DIM, TILES), (HEAD_DIM, TILE_N, TILES)
    gQ = cute.local_tile(q[None, None, tile.head, tile.batch], (rows, head_dim), (None, 0))
    gK = cute.local_tile(k[None, None, tile.kv_head, tile.batch], (keys, head_dim), (None, 0))
    gV = cute.local_tile(v[None, None, tile.kv_head, tile.batch], (head_dim, keys), (0, None))
    return (
        TmaTiles.partition(q_atom, sQ, qk.partition_A(gQ), 3),
        TmaTiles.partition(k_atom, sK, qk.partition_B(gK), 3),
        TmaTiles.partition(v_atom, sV, pv.partition_B(gV), 3),
    )


def store_tiles(plan: KernelPlan, tile: Tile, tma, sO) -> TmaTiles:
    """O by stages of 128 rows, of this tile's head and batch."""
    o_atom, o = tma[3]
    # (TILE_M, HEAD_DIM, TILES)
    tiler = (plan.tile_m, plan.head_dim_padded)
    gO = cute.local_tile(o[None, None, tile.head, tile.batch], tiler, (None, 0))
    return TmaTiles.partition(o_atom, sO, gO, 2)
