"""The closed form of tcgen05.mma against what was measured on a B200, row by row."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from roofline import budget, find_gpu
from roofline.intervals import Measurement, Mma, issued, measurements, serial_cycles
from roofline.terms import mma_exact, smem_exact, total
from roofline.tile import Tile

# SemiAnalysisAI/microbench-blackwell 9a068d8, umma_latency/fit_results.csv, BF16:
# A in SMEM, CTAs, M, N, latency of one MMA, cycles between MMAs back to back.
ROWS = [
    (True, 1, 128, 64, 168, 48),
    (True, 1, 128, 128, 200, 64),
    (True, 1, 128, 256, 264, 128),
    (True, 1, 64, 64, 152, 32),
    (False, 1, 128, 64, 136, 32),
    (False, 1, 128, 128, 168, 64),
    (False, 1, 128, 256, 232, 128),
    (True, 2, 256, 64, 202, 43),
    (True, 2, 256, 128, 234, 64),
    (True, 2, 256, 256, 298, 128),
    (True, 2, 128, 256, 229, 64),
    (False, 2, 256, 128, 202, 64),
    (False, 2, 256, 256, 266, 128),
    (False, 2, 128, 256, 210, 64),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_named_rows(row: tuple) -> None:  # type: ignore[type-arg]
    a_in_smem, ctas, m, n, latency, interval = row
    mma = Mma(m, n, a_in_smem, ctas)
    assert mma.interval_cycles == interval
    assert mma.latency_cycles() == latency


def test_all_measured_rows() -> None:
    """Within 1 cycle with one CTA and 4 with two, for 5 formats, 6 widths and 7 forms."""
    rows = measurements()
    assert len(rows) == 216
    assert {row.format for row in rows} == {"bf16", "fp8", "mxfp8", "fp4", "mxfp4"}
    for row in rows:
        limit = 1 if row.mma.ctas == 1 else 4
        assert abs(row.interval_residual) < limit, row
        assert abs(row.latency_residual) <= 2, row


def test_a_wrong_form_would_be_seen() -> None:
    """The rows tell apart: SMEM ignored, M = 64 at full rate, and B not shared by a pair."""
    rows = measurements()

    def worst(model) -> float:  # type: ignore[no-untyped-def]
        return max(abs(row.interval_cycles - float(model(row.mma))) for row in rows)

    assert worst(lambda mma: mma.interval_cycles) < 2.1
    assert worst(lambda mma: mma.math_cycles) > 10
    assert worst(lambda mma: max(Fraction(mma.m * mma.n, 256 * mma.ctas), mma.smem_cycles)) > 10

    def whole_b(mma: Mma) -> Fraction:
        return max(mma.math_cycles, mma.smem_cycles + Fraction(mma.n * (mma.ctas - 1), 8))

    assert worst(whole_b) > 10


def test_issued_mmas_add_up() -> None:
    """The issued MMAs' arithmetic is the exact MMA count, their reads the exact SMEM count."""
    rng = random.Random(77)
    for _ in range(60):
        tile = Tile.of(
            "b200",
            64 * rng.randint(1, 4),
            32 * rng.randint(1, 10),
            32 * rng.randint(1, 8),
            32 * rng.randint(1, 8),
            ctas=rng.choice((1, 2)),
            dtype=rng.choice(("bf16", "fp8", "nvfp4")),
        )
        math = sum(mma.math_cycles * count for mma, count in issued(tile))
        assert math == total(mma_exact(tile)), tile
        smem = Fraction(0)
        for mma, count in issued(tile):
            waiting = 3 if mma.ctas == 2 and mma.m == 256 and mma.a_in_smem and mma.n < 112 else 0
            smem += (mma.smem_cycles - waiting) * count
        assert smem == total(smem_exact(tile)), tile


def test_serial_cycles() -> None:
    """QK^T with 64 keys waits for SMEM (48 an MMA, not 32), PV does not: 12 x 48 + 4 x 64."""
    b = budget("b200", 128, 64, 192, 128)
    assert b.mma_serial == 12 * 48 + 4 * 64
    assert any("one after another" in note for note in b.notes)
    assert budget("b200", 256, 128, 128).mma_serial == 2048
    assert budget("h100", 128, 128, 128).mma_serial is None


def test_serial_cycles_follow_the_gpu() -> None:
    """B300's fp4 is 1.5 times as fast; S = Q K^T then waits for SMEM."""
    b = budget("b300", 128, 128, 128, dtype="nvfp4")
    assert b.mma_serial == round(2 * 64 + 2 * 64 / 1.5)
    slow = find_gpu("b200").override(smem_bandwidth=64)
    assert budget(slow, 128, 128, 128).mma_serial == 8 * 128 + 8 * 64
    assert serial_cycles(budget(slow, 128, 128, 128).tile) == 1536


def test_measurement_residual_signs() -> None:
    row = Measurement("bf16", Mma(128, 128, True, 1), 203.0, 65.0)
    assert (row.interval_residual, row.latency_residual) == (1.0, 3.0)
