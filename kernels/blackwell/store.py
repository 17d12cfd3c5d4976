# SPDX-License-Identifier: Apache-2.0
"""The store warp: normalised O from SMEM to global memory by TMA."""

import cutlass
import cutlass.cute as cute

from kernels.blackwell.channels import Channels
from kernels.blackwell.tile import Tile, TmaTiles
from kernels.common.plan import KernelPlan


@cute.jit
def store(plan: cutlass.Constexpr[KernelPlan], channels: Channels, tile: Tile, o: TmaTiles):
    """Stores both stages; TMA drops rows beyond seqlen_q and columns beyond head_dim."""
    with cute.arch.elect_one():  # bulk groups belong to the thread that issues the copies
        for stage in cutlass.range_constexpr(plan.q_stages):
            channels.o_stored.wait(stage, 0)
            o.store(tile.m_tile * plan.q_stages + stage, stage)
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # SMEM must outlive the reads
