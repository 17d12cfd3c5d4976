# SPDX-License-Identifier: Apache-2.0
"""The load warp: Q once, then K and V blocks from the right, by TMA into SMEM."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels.blackwell.channels import Channels, next_slot
from kernels.blackwell.tile import Tile, TmaTiles
from kernels.common.plan import KernelPlan


@cute.jit
def load(
    plan: cutlass.Constexpr[KernelPlan],
    channels: Channels,
    tile: Tile,
    q: TmaTiles,
    k: TmaTiles,
    v: TmaTiles,
):
    """Fills q_full and the kv ring in the order in which the MMA warp needs them.

    q: tiles of 128 query rows by stage; k, v: tiles of 128 keys by ring slot. Rows beyond the
    sequence and columns beyond head_dim arrive as zeros and count as bytes all the same.
    """
    slot, parity = Int32(0), Int32(1)  # kv_empty: the ring starts empty
    for j in cutlass.range(tile.blocks, unroll=1):
        block = tile.blocks - 1 - j
        if j == 0:
            load_q(channels, tile, q, 0)
        channels.kv_empty.wait(slot, parity)
        k.copy(block, slot, channels.kv_full.expect(slot))
        slot, parity = next_slot(slot, parity, plan.kv_stages)
        if j == 0:
            load_q(channels, tile, q, 1)
        channels.kv_empty.wait(slot, parity)
        v.copy(block, slot, channels.kv_full.expect(slot))
        slot, parity = next_slot(slot, parity, plan.kv_stages)


def load_q(channels: Channels, tile: Tile, q: TmaTiles, stage: int):
    """One Q stage; each is used once, so there is no empty side."""
    q.copy(tile.m_tile * 2 + stage, stage, channels.q_full.expect(stage))
