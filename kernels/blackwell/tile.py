# SPDX-License-Identifier: Apache-2.0
"""The work of one CTA, and how TMA sees the tensors it works on."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op

from kernels.common.mask import visible_keys
from kernels.common.plan import KernelPlan


@dataclass(frozen=True)
class Tile:
    """256 query rows of one head of one batch, and the key blocks they see."""

    m_tile: Int32  # rows m_tile * 256 and on
    head: Int32  # query head
    kv_head: Int32
    batch: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    blocks: Int32  # key blocks 0 to blocks - 1; 0 if no row sees a key


@cute.jit
def key_blocks(
    plan: cutlass.Constexpr[KernelPlan], m_tile: Int32, seqlen_q: Int32, seqlen_k: Int32
) -> Int32:
    """Key blocks that the last row of a tile sees; no other row sees more."""
    last_row = min((m_tile + 1) * plan.tile_q, seqlen_q) - 1
    keys = visible_keys(last_row, seqlen_q, seqlen_k, plan.causal)
    return Int32(Uint32(keys + plan.tile_n - 1) // plan.tile_n)


@cute.jit
def unmasked_blocks(plan: cutlass.Constexpr[KernelPlan], tile: Tile, first_row: Int32) -> Int32:
    """Key blocks, from the left, that every row from ``first_row`` on sees whole."""
    keys = visible_keys(first_row, tile.seqlen_q, tile.seqlen_k, plan.causal)
    return min(Int32(Uint32(keys) // plan.tile_n), tile.blocks)


@dataclass(frozen=True)
class TmaTiles:
    """A tensor cut into tiles, as one TMA copy takes them."""

    atom: cute.CopyAtom
    in_global: cute.Tensor  # (TMA, TILES) coordinates
    in_smem: cute.Tensor  # (TMA, STAGES)

    @dsl_user_op
    def copy(self, tile: Int32, stage: Int32, barrier: cute.Pointer, *, loc=None, ip=None) -> None:
        """Global tile to SMEM stage; its bytes complete on ``barrier``. Called by a whole warp."""
        source, target = self.in_global[None, tile], self.in_smem[None, stage]
        cute.copy(self.atom, source, target, tma_bar_ptr=barrier, loc=loc, ip=ip)

    @dsl_user_op
    def store(self, tile: Int32, stage: Int32, *, loc=None, ip=None) -> None:
        """SMEM stage to global tile, clipped at the tensor's bounds. Called by one thread."""
        source, target = self.in_smem[None, stage], self.in_global[None, tile]
        cute.copy(self.atom, source, target, loc=loc, ip=ip)

    @classmethod
    def partition(
        cls, atom: cute.CopyAtom, smem: cute.Tensor, tiles: cute.Tensor, modes: int
    ) -> "TmaTiles":
        """smem (TILE..., STAGES) and tiles (TILE..., TILES), each with ``modes`` modes a tile."""
        grouped = [cute.group_modes(tensor, 0, modes) for tensor in (smem, tiles)]
        in_smem, in_global = cpasync.tma_partition(atom, 0, cute.make_layout(1), *grouped)
        return cls(atom, in_global, in_smem)


def stage_matrix(plan: KernelPlan, tmem: cute.Pointer, name: str, stage: Int32) -> cute.Tensor:
    """TMEM region ``name`` ("S", "P" or "O") of a query stage as (128, cols) of 32 bits.

    A row is a lane, which TMEM addresses count in bits 31 to 16 (PTX ISA 9.1 section 9.7.16.1).
    """
    first, second = (next(r for r in plan.tmem_map if r.name == f"{name}{i}") for i in range(2))
    start = tmem + (first.first_col + stage * (second.first_col - first.first_col))
    return cute.make_tensor(start, cute.make_layout((128, first.cols), stride=(1 << 16, 1)))
