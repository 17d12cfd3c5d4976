"""MMA and SMEM cycles of one tile, term by term, in exact fractions.

Two countings stand beside each other:

* *published*: the forms of the FlashAttention-4 paper (arXiv 2603.05451, equations 1 to 3 and 7 to
  10). Forward operands are counted in whole 128-row blocks, which charges a full block for a tile
  narrower than 128 keys or a value head narrower than 128.
* *exact*: what the MMAs that must be issued read and take. An MMA's rows are padded to what the
  tensor core runs at full rate, its reduction to the format's K step; B is read once for each 128
  rows (on Hopper for each 64, those of a wgmma), A once for each 256 columns, the widest MMA. It is
  below the published form where that over-counts, and above it where a block of keys or queries is
  read more than once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from roofline.tile import Tile

BLOCK = 128  # rows of the paper's MMA block, M of one tcgen05.mma per SM
WGMMA_ROWS = 64  # M of one wgmma
MMA_COLUMNS = 256  # the widest N of tcgen05.mma and wgmma (PTX ISA 9.1 section 9.7.16.2)
ACCUMULATOR_BYTES = 4  # dQ is accumulated in fp32
#: Passes over half a dS tile that the two-CTA backward adds to the SMEM port. The paper gives only
#: the sum at 128x128x128 (Table 3: 384 cycles); three passes of 16384 B reproduce it. A fit.
DSMEM_PASSES = 3


@dataclass(frozen=True)
class Term:
    """One line of a budget: what is read or computed, and its cycles."""

    name: str
    cycles: Fraction

    def to_dict(self) -> dict[str, str | int | float]:
        return {"name": self.name, "cycles": round(float(self.cycles), 3)}


@dataclass(frozen=True)
class Matmul:
    """One matrix product of the tile, per CTA: rows x cols, reduced over depth.

    a_in_smem: the A operand is read from SMEM (SS); from TMEM or registers otherwise (TS, RS).
    """

    name: str
    rows: int | Fraction
    cols: int
    depth: int
    a_in_smem: bool

    @property
    def flops(self) -> Fraction:
        return Fraction(2 * self.rows * self.cols * self.depth)


def matmuls(tile: Tile) -> tuple[Matmul, ...]:
    """The matrix products of one tile: two forward, five backward (S and dP transposed)."""
    m, n, d, dv = tile.tile_m, tile.tile_n, tile.head_dim, tile.head_dim_v
    if tile.direction == "forward":
        return (Matmul("S = Q K^T", m, n, d, True), Matmul("O += P V", m, dv, n, False))
    # The pair splits dQ's rows and reduces over both CTAs' keys: the same work per CTA.
    dq_rows, dq_depth = Fraction(m, tile.ctas), n * tile.ctas
    return (
        Matmul("S^T = K Q^T", n, m, d, True),
        Matmul("dP^T = V dO^T", n, m, dv, True),
        Matmul("dV += P^T dO", n, dv, m, False),
        Matmul("dK += dS^T Q", n, d, m, False),
        Matmul("dQ = dS K", dq_rows, d, dq_depth, True),
    )


def mma_published(tile: Tile) -> tuple[Term, ...]:
    """MMA cycles at the format's rate, nothing padded."""
    rate = tile.gpu[tile.format.rate_field].exact
    return tuple(Term(product.name, product.flops / rate) for product in matmuls(tile))


def mma_exact(tile: Tile) -> tuple[Term, ...]:
    """MMA cycles with the padding the tensor core runs anyway.

    A tcgen05.mma of 64 rows takes as long as one of 128 (measured, SemiAnalysisAI/
    microbench-blackwell 9a068d8); with two CTAs the MMA of 128 rows, 64 an SM, is at full rate.
    wgmma has 64 rows.
    """
    rate = tile.gpu[tile.format.rate_field].exact
    terms = []
    for product in matmuls(tile):
        rows = round_up(product.rows, _full_rate_rows(tile))
        cols = round_up(product.cols, 16 if tile.gpu.has_tmem else 8)
        depth = round_up(product.depth, tile.format.mma_k)
        terms.append(Term(product.name, Fraction(2 * rows * cols * depth) / rate))
    return tuple(terms)


def _full_rate_rows(tile: Tile) -> int:
    return 64 if tile.ctas == 2 or not tile.gpu.has_tmem else BLOCK


def smem_published(tile: Tile) -> tuple[Term, ...]:
    """SMEM cycles as the paper counts them; two CTAs halve each B operand."""
    if tile.direction == "backward":
        return (*_backward_operands_published(tile), *_backward_exchange(tile))
    m, n, d, dv = tile.tile_m, tile.tile_n, tile.head_dim, tile.head_dim_v
    blocks_m, blocks_n, blocks_dv = (ceil_div(size, BLOCK) for size in (m, n, dv))
    scores = blocks_m * blocks_n * (BLOCK * d + Fraction(BLOCK * d, tile.ctas))
    values = Fraction(blocks_m * blocks_dv * BLOCK * n, tile.ctas)
    return (
        Term("Q and K for S", _read(tile, scores)),
        Term("V for O", _read(tile, values)),
    )


def _backward_operands_published(tile: Tile) -> tuple[Term, ...]:
    """Equation 7 to 9: A once, B once (half of it with two CTAs)."""
    terms = []
    for product in matmuls(tile):
        a = product.rows * product.depth if product.a_in_smem else 0
        b = Fraction(product.cols * product.depth, tile.ctas)
        terms.append(Term(f"operands of {product.name}", _read(tile, a + b)))
    return tuple(terms)


def _backward_exchange(tile: Tile) -> tuple[Term, ...]:
    """dS written for dQ's MMA, part of it exchanged by the pair, dQ staged in fp32 (eq. 10)."""
    scores = tile.tile_m * tile.tile_n
    passes = Fraction(DSMEM_PASSES, 2)
    dq_bytes = Fraction(tile.tile_m * tile.head_dim * ACCUMULATOR_BYTES, tile.ctas)
    terms = [Term("dS written", _read(tile, scores))]
    if tile.ctas == 2:
        terms.append(Term("dS to and from the peer", _read(tile, passes * scores)))
    terms.append(Term("dQ written and read, fp32", 2 * dq_bytes / _port(tile)))
    return tuple(terms)


def smem_exact(tile: Tile) -> tuple[Term, ...]:
    """SMEM cycles of the MMAs that must be issued, plus the backward's exchanges.

    Each wgmma reads its B anew, those of several warpgroups on the same B too: measured on an H200
    (`roofline.intervals`, tests/roofline/hardware/wgmma.py).
    """
    block = BLOCK if tile.gpu.has_tmem else WGMMA_ROWS
    terms = []
    for product in matmuls(tile):
        rows = round_up(product.rows, 64)
        depth = round_up(product.depth, tile.format.mma_k)
        a = ceil_div(product.cols, MMA_COLUMNS) * rows * depth if product.a_in_smem else 0
        b = ceil_div(product.rows, block) * Fraction(product.cols * depth, tile.ctas)
        terms.append(Term(f"operands of {product.name}", _read(tile, a + b)))
    if tile.direction == "backward":
        terms.extend(_backward_exchange(tile))
    return tuple(terms)


def _read(tile: Tile, elements: int | Fraction) -> Fraction:
    """Cycles the SMEM port takes for so many elements of the tile's format."""
    return Fraction(elements) * tile.format.element_bytes / _port(tile)


def _port(tile: Tile) -> Fraction:
    return tile.gpu["smem_bandwidth"].exact


def total(terms: Iterable[Term]) -> Fraction:
    """The sum of a budget's lines."""
    return sum((term.cycles for term in terms), Fraction(0))


def whole_cycles(cycles: Fraction) -> int:
    """Cycles rounded to the nearest integer, at least one."""
    return max(1, int(cycles + Fraction(1, 2)))


def ceil_div(size: int | Fraction, block: int | Fraction) -> int:
    return int(-(-size // block))


def round_up(size: int | Fraction, multiple: int) -> int:
    return ceil_div(size, multiple) * multiple
