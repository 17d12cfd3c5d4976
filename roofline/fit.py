"""What a tile needs at the very least, against what the GPU has.

Lower bounds, independent of any kernel: a tile refused here cannot be built by any plan, one that
passes may still need more (stages, barriers, staging buffers), which the kernel's plan says.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from roofline.terms import BLOCK, ceil_div, round_up
from roofline.tile import Tile


@dataclass(frozen=True)
class Excess:
    """One resource that the tile exceeds, in ``unit``."""

    resource: str
    needed: int
    available: int
    unit: str

    def __str__(self) -> str:
        return (
            f"{self.resource}: {self.needed} {self.unit} needed, {self.available} there, "
            f"{self.needed - self.available} too many"
        )


def excesses(tile: Tile) -> tuple[Excess, ...]:
    """Every resource that even the leanest kernel with this tile would exceed."""
    needs = [("SMEM", smem_bytes(tile), int(tile.gpu["smem_block"].value), "bytes")]
    if tile.gpu.has_tmem:
        columns = int(tile.gpu["tmem_columns"].value)
        needs.append(("TMEM", tmem_columns(tile), columns, "columns"))
    else:
        needs.append(("registers", registers(tile), int(tile.gpu["registers"].value), "an SM"))
    return tuple(Excess(*need) for need in needs if need[1] > need[2])


def smem_bytes(tile: Tile) -> int:
    """Forward: Q, one K and one V. Backward: Q, dO, K, V and dS. Two CTAs halve the B operands."""
    m, n, d, dv = tile.tile_m, tile.tile_n, tile.head_dim, tile.head_dim_v
    if tile.direction == "forward":
        elements = m * d + Fraction(n * (d + dv), tile.ctas)
    else:
        # K is both A of S and, for dQ, half of the pair's B: it is there whole, as V is.
        elements = n * (d + dv) + Fraction(m * (d + dv), tile.ctas) + m * n
    return ceil_div(elements * tile.format.element_bytes, 1)


def tmem_columns(tile: Tile) -> int:
    """fp32 accumulators, 128 rows to a set of columns.

    Forward: S (P goes over it) and O. Backward: dV, dK, dP and P in half width, which must be there
    together; S may give its place to dP, and dQ take dP's.
    """
    m, n, d, dv = tile.tile_m, tile.tile_n, tile.head_dim, tile.head_dim_v
    if tile.direction == "forward":
        return ceil_div(m, BLOCK) * (round_up(n, 16) + round_up(dv, 16))
    return ceil_div(n, BLOCK) * (round_up(d, 16) + round_up(dv, 16) + m + m // 2)


def registers(tile: Tile) -> int:
    """32-bit registers that wgmma's fp32 accumulators take, all warpgroups together.

    Forward: S (P goes over it) and O. Backward: dV, dK and one of S, dP and dQ.
    """
    m, n, d, dv = tile.tile_m, tile.tile_n, tile.head_dim, tile.head_dim_v
    if tile.direction == "forward":
        return m * (n + dv)
    return n * (d + dv) + m * n
