"""The exact counts against a tensor core that is walked MMA by MMA, on random tiles."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from roofline import budget
from roofline.terms import smem_exact, total

FORMATS = {"bf16": (2, 16), "tf32": (4, 8), "fp8": (1, 32), "nvfp4": (0.5, 64)}


def walk(rows: int, cols: int, depth: int, k: int, a_in_smem: bool, ctas: int) -> tuple[int, int]:
    """(elements read from SMEM by one SM, multiply-adds run by it) of one matrix product.

    rows are one CTA's; an MMA takes up to 128 rows of it, and with two CTAs half of B each.
    """
    elements = work = 0
    for row in range(0, rows, 128):
        block = -(-min(128, rows - row) // 64) * 64  # an MMA has 64 or 128 rows
        for step in range(0, depth, k):
            del step
            for column in range(0, cols, 256):  # the widest MMA
                width = min(256, cols - column)
                elements += (block * k if a_in_smem else 0) + width * k // ctas
            # 64 rows of one CTA take as long as 128; a pair's 2 x 64 do not.
            work += (128 if ctas == 1 else block) * (-(-cols // 16) * 16) * k
    return elements, work


def products(direction: str, m: int, n: int, d: int, dv: int, ctas: int) -> list[tuple]:  # type: ignore[type-arg]
    if direction == "forward":
        return [(m, n, d, True), (m, dv, n, False)]
    return [
        (n, m, d, True),
        (n, m, dv, True),
        (n, dv, m, False),
        (n, d, m, False),
        (m // ctas, d, n * ctas, True),
    ]


def random_tiles(count: int) -> list[tuple]:  # type: ignore[type-arg]
    rng = random.Random(20260305)
    return [
        (
            rng.choice(("forward", "backward")),
            rng.choice((1, 2)),
            rng.choice(tuple(FORMATS)),
            64 * rng.randint(1, 4),
            64 * rng.randint(1, 4),
            16 * rng.randint(1, 36),
            16 * rng.randint(1, 36),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("tile", random_tiles(60), ids=str)
def test_walked_mmas(tile: tuple) -> None:  # type: ignore[type-arg]
    direction, ctas, dtype, m, n, d, dv = tile
    element_bytes, k = FORMATS[dtype]
    b = budget("b200", m, n, d, dv, direction=direction, ctas=ctas, dtype=dtype)
    walked = [walk(*p[:3], k, p[3], ctas) for p in products(direction, m, n, d, dv, ctas)]

    read = Fraction(element_bytes) * sum(e for e, _ in walked) / 128
    exchange = Fraction(0)
    if direction == "backward":
        exchange += Fraction(element_bytes) * m * n / 128  # dS written
        exchange += Fraction(element_bytes) * m * n * (ctas - 1) * 3 / 2 / 128  # and exchanged
        exchange += Fraction(2 * 4 * m * d, ctas * 128)  # dQ staged
    assert total(smem_exact(b.tile)) == read + exchange

    rate = {"bf16": 8192, "tf32": 4096, "fp8": 16384, "nvfp4": 32768}[dtype]
    assert b.mma_exact == max(
        1, int(Fraction(2 * sum(w for _, w in walked), rate) + Fraction(1, 2))
    )


def test_padding_is_seen() -> None:
    """64 query rows run at half rate, head_dim 40 is reduced over 48; notes say so."""
    half = budget("b200", 64, 128, 128)
    assert half.mma_exact == 2 * half.mma
    assert any("padded" in note for note in half.notes)
    odd = budget("b200", 128, 128, 40)
    assert odd.mma_exact == Fraction(2 * 128 * 128 * 48 + 2 * 128 * 48 * 128, 8192)
    assert odd.mma == 2 * 2 * 128 * 128 * 40 // 8192
    assert budget("h100", 64, 128, 128).mma_exact == budget("h100", 64, 128, 128).mma


def test_wide_mma_reads_queries_once() -> None:
    """256 keys in one MMA: the published form reads Q for each 128 of them."""
    b = budget("b200", 128, 256, 128)
    assert (b.smem, b.smem_exact) == (1536, (128 * 128 + 2 * 256 * 128) * 2 // 128)


def test_whole_keys_reread_by_row_blocks() -> None:
    """256 keys in the backward are two blocks of A rows: Q and dO are read twice."""
    b = budget("b200", 128, 256, 128, direction="backward")
    assert b.smem_exact > b.smem
    assert any("under-counts" in note for note in b.notes)
