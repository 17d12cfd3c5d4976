"""Every tile shape a kernel could have, with the shared memory, TMEM and registers it needs.

The arithmetic is that of `kernels.common.plan` for the shape it builds, carried over to shapes that
nobody has built yet; barriers and row statistics are rounded up to `SMEM_RESERVE_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from roofline.fit import Excess, excesses, smem_bytes, tmem_columns
from roofline.gpus import Gpu
from roofline.terms import BLOCK, ceil_div, round_up
from roofline.tile import Tile, check_direction

#: Bytes left for row statistics, barriers and alignment, as kernels.common.plan leaves them.
SMEM_RESERVE_BYTES = 3 * 1024
#: Registers of a thread beside its row of scores: addresses, constants, P being packed. With it a
#: row of 128 scores takes the 192 registers that FlashAttention-4 gives its softmax warps.
SOFTMAX_EXTRA_REGISTERS = 64
#: Scores of a row that a softmax thread holds; a longer row is read from TMEM in parts, twice.
ROW_REGISTERS = 128
#: Threads of correction, MMA, load and store warps take 128 of the 512 registers that a column of
#: four warps shares: 80 and 48, FlashAttention-4's split for head_dim 128.
OTHER_REGISTERS = 128
REGISTER_COLUMN = 512
LARGEST_SOFTMAX_REGISTERS = 248
#: Registers of a wgmma consumer beside its accumulators and half of P (S's registers become free as
#: P is packed). Assumed: it admits every tile of FlashAttention-3 and refuses the next larger ones.
WGMMA_EXTRA_REGISTERS = 20
#: wgmma consumers: registers a thread may have with so many 64-row warpgroups and one producer.
WGMMA_REGISTERS = {1: 248, 2: 240, 3: 160}


@dataclass(frozen=True)
class Candidate:
    """A tile with its stages.

    q_stages: query tiles in flight, each with a softmax warpgroup of its own (Blackwell) or the
    64-row consumer warpgroups (Hopper); s_stages: score tiles of each in TMEM; kv_stages: slots of
    the K/V ring, each for one K or V tile; registers: of a softmax thread, of ``registers_there``.
    """

    tile: Tile
    q_stages: int
    s_stages: int
    kv_stages: int
    smem_bytes: int
    tmem_columns: int
    registers: int
    registers_there: int
    excesses: tuple[Excess, ...]

    @property
    def legal(self) -> bool:
        return not self.excesses

    @property
    def rows(self) -> int:
        """Query rows of one stage."""
        return self.tile.tile_m // self.q_stages


def candidates(
    gpu: Gpu, head_dim: int, head_dim_v: int, *, direction: str, dtype: str
) -> Iterator[Candidate]:
    """Every tile worth a look, the ones that do not fit included."""
    if check_direction(direction) == "backward":
        yield from _backward(gpu, head_dim, head_dim_v, dtype)
    elif gpu.has_tmem:
        yield from _blackwell_forward(gpu, head_dim, head_dim_v, dtype)
    else:
        yield from _hopper_forward(gpu, head_dim, head_dim_v, dtype)


def _blackwell_forward(gpu: Gpu, d: int, dv: int, dtype: str) -> Iterator[Candidate]:
    for ctas in (1, 2):
        for q_stages, rows in ((1, 64), (2, 64), (1, 128), (2, 128), (3, 128)):
            for n in range(32, 257, 32):
                tile = Tile.of(gpu, q_stages * rows, n, d, dv, ctas=ctas, dtype=dtype)
                # A second score tile lets the next S = Q K^T run while the softmax has this one.
                for s_stages in (1, 2):
                    yield blackwell_candidate(tile, q_stages, s_stages)


def blackwell_candidate(tile: Tile, q_stages: int, s_stages: int) -> Candidate:
    """A forward tile with its stages on a GPU with TMEM, and what it needs."""
    rows = tile.tile_m // q_stages
    columns = (
        q_stages
        * (s_stages * round_up(tile.tile_n, 16) + round_up(tile.head_dim_v, 16))
        * ceil_div(rows, BLOCK)
    )
    smem, kv_stages = _smem(tile)
    there = min(LARGEST_SOFTMAX_REGISTERS, (REGISTER_COLUMN - OTHER_REGISTERS) // q_stages)
    there -= there % 8
    registers = min(tile.tile_n, ROW_REGISTERS) + SOFTMAX_EXTRA_REGISTERS
    needs = [
        _smem_need(tile, smem),
        Excess("TMEM", columns, int(tile.gpu["tmem_columns"].value), "columns"),
        Excess("registers", registers, there, "a softmax thread"),
    ]
    return Candidate(
        tile, q_stages, s_stages, kv_stages, smem, columns, registers, there, _exceeded(needs)
    )


def _hopper_forward(gpu: Gpu, d: int, dv: int, dtype: str) -> Iterator[Candidate]:
    for groups in (1, 2, 3):
        for n in range(32, 257, 16):
            yield hopper_candidate(Tile.of(gpu, 64 * groups, n, d, dv, dtype=dtype), groups)


def hopper_candidate(tile: Tile, groups: int) -> Candidate:
    """A forward tile of so many 64-row consumer warpgroups, and what it needs."""
    smem, kv_stages = _smem(tile)
    p = Fraction(tile.tile_n, 4) * tile.format.element_bytes / 4
    accumulators = Fraction(tile.tile_n + tile.head_dim_v, 2)
    registers = ceil_div(accumulators + p, 1) + WGMMA_EXTRA_REGISTERS
    there = WGMMA_REGISTERS[groups]
    needs = [
        _smem_need(tile, smem),
        Excess("registers", registers, there, "a consumer thread"),
    ]
    return Candidate(tile, groups, 1, kv_stages, smem, 0, registers, there, _exceeded(needs))


def _backward(gpu: Gpu, d: int, dv: int, dtype: str) -> Iterator[Candidate]:
    """Lower bounds only: the backward kernel's plan is not written yet."""
    for ctas in (1, 2) if gpu.has_tmem else (1,):
        for m in range(32, 257, 32):
            for n in (64, 128, 256):
                tile = Tile.of(gpu, m, n, d, dv, direction="backward", ctas=ctas, dtype=dtype)
                columns = tmem_columns(tile) if gpu.has_tmem else 0
                yield Candidate(tile, 1, 1, 1, smem_bytes(tile), columns, 0, 0, excesses(tile))


def _smem(tile: Tile) -> tuple[int, int]:
    """(bytes, slots of the K/V ring): Q and O beside each other if two slots are left, else over.

    A slot holds a K or a V tile; with two CTAs half of one.
    """
    e = tile.format.element_bytes
    q = tile.tile_m * tile.head_dim * e
    o = tile.tile_m * tile.head_dim_v * max(e, Fraction(2))
    slot = tile.tile_n * max(tile.head_dim, tile.head_dim_v) * e / tile.ctas
    room = int(tile.gpu["smem_block"].value) - SMEM_RESERVE_BYTES
    fixed = q + o if room - q - o >= 2 * slot else max(q, o)
    slots = max(2, min(32, int((room - fixed) // slot)))
    return ceil_div(fixed + slots * slot, 1) + SMEM_RESERVE_BYTES, slots


def _smem_need(tile: Tile, smem: int) -> Excess:
    return Excess("SMEM", smem, int(tile.gpu["smem_block"].value), "bytes")


def _exceeded(needs: list[Excess]) -> tuple[Excess, ...]:
    return tuple(need for need in needs if need.needed > need.available)
