"""How often a tcgen05.mma can issue and how long one takes: a closed form, and what was measured.

    interval = max(math, smem)                cycles between MMAs issued back to back
    math     = the MMA's FLOP / rate          an M of 64 takes as long as one of 128 (one CTA)
    smem     = (A rows + B rows of this SM) x K x element bytes / 128        A only if it is in SMEM
    latency  = math + completion              from issue until the mbarrier wait is seen

One MMA reduces over 32 bytes of each row in every format, so the interval depends on M, N and where
A lies, not on the format. The same form holds for Hopper's wgmma, of 64 rows, at half the rate. The
measured rows are package data; `roofline intervals` prints the residuals of the form against each.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from roofline.gpus import Gpu
from roofline.terms import BLOCK, MMA_COLUMNS, ceil_div, matmuls, round_up
from roofline.tile import Tile

K_BYTES = 32  # bytes of each operand row that one MMA reduces over (PTX ISA 9.1 section 9.7.16.2)
#: Extra cycles of a pair's MMA that waits for SMEM (M = 256, A in SMEM, N below 112; fitted to the
#: measured rows, which this form then meets within 2.1 cycles).
PAIR_SMEM_CYCLES = 3
#: (A in SMEM, CTAs, M) -> cycles from the end of the arithmetic to the wait seen, fitted.
COMPLETION_CYCLES = {
    (True, 1, 64): 120,
    (True, 1, 128): 136,
    (True, 2, 128): 165,
    (True, 2, 256): 170,
    (False, 1, 64): 104,
    (False, 1, 128): 104,
    (False, 2, 128): 146,
    (False, 2, 256): 138,
}
#: Block-scaled formats read their scales too: cycles more by where A lies and by CTAs, fitted.
SCALED_CYCLES = {(True, 1): 1, (True, 2): 3, (False, 1): 3, (False, 2): 3}
WGMMA_LEAST = 13  # cycles of the narrowest wgmma with A in registers, measured
_HOPPER = Path(__file__).with_name("gpu_data") / "h200_wgmma_intervals.csv"
_MEASURED = Path(__file__).with_name("gpu_data") / "b200_mma_intervals.csv"


@dataclass(frozen=True)
class Mma:
    """One tcgen05.mma: M x N over K_BYTES of reduction, by one CTA or a pair (cta_group::2).

    m and n are the instruction's: with two CTAs each has m/2 rows of A and n/2 of B.
    """

    m: int
    n: int
    a_in_smem: bool
    ctas: int

    @property
    def math_cycles(self) -> Fraction:
        """Arithmetic at 8192 bf16 FLOP a cycle and SM: N/2 for 128 rows an SM, N/4 for a pair's 64.

        One CTA's 64 rows take as long as 128.
        """
        rows = self.m // 2 if self.ctas == 2 else 128
        return Fraction(rows * self.n, 256)

    @property
    def smem_cycles(self) -> Fraction:
        """Operands of this SM at 128 B a cycle, and what a waiting pair loses."""
        rows = (self.m // self.ctas if self.a_in_smem else 0) + Fraction(self.n, self.ctas)
        cycles = rows * K_BYTES / 128
        if self.ctas == 2 and self.m == 256 and self.a_in_smem and self.n < 112:
            cycles += PAIR_SMEM_CYCLES
        return cycles

    @property
    def interval_cycles(self) -> Fraction:
        return max(self.math_cycles, self.smem_cycles)

    def latency_cycles(self, *, scaled: bool = False) -> Fraction:
        """Cycles of one MMA alone; ``scaled``: mxfp8, nvfp4 and the like."""
        completion = Fraction(COMPLETION_CYCLES[self.a_in_smem, self.ctas, self.m])
        if (self.a_in_smem, self.ctas, self.m) == (True, 2, 128):
            completion -= Fraction(max(0, 128 - self.n), 8)
        if scaled:
            completion += SCALED_CYCLES[self.a_in_smem, self.ctas]
        return self.math_cycles + completion


@dataclass(frozen=True)
class Measurement:
    """One measured MMA and what the closed form says of it."""

    format: str
    mma: Mma
    latency_cycles: float
    interval_cycles: float

    @property
    def interval_residual(self) -> float:
        """Measured less modelled, in cycles."""
        return self.interval_cycles - float(self.mma.interval_cycles)

    @property
    def latency_residual(self) -> float:
        scaled = self.format.startswith("mx")
        return self.latency_cycles - float(self.mma.latency_cycles(scaled=scaled))

    def to_dict(self) -> dict[str, Any]:
        mma = self.mma
        return {
            "format": self.format,
            "a_in_smem": mma.a_in_smem,
            "ctas": mma.ctas,
            "m": mma.m,
            "n": mma.n,
            "interval": self.interval_cycles,
            "interval_model": float(mma.interval_cycles),
            "latency": self.latency_cycles,
            "latency_model": self.latency_cycles - self.latency_residual,
        }


@cache
def measurements() -> tuple[Measurement, ...]:
    """Every measured row of a B200, with its source in the file's head."""
    lines = _MEASURED.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return tuple(
        Measurement(
            row["format"],
            Mma(int(row["m"]), int(row["n"]), row["operands"] == "SS", int(row["ctas"])),
            float(row["latency_cycles"]),
            float(row["interval_cycles"]),
        )
        for row in rows
    )


@dataclass(frozen=True)
class Wgmma:
    """One wgmma of a warpgroup, 64 x N over K_BYTES of reduction, measured on an H200.

    warpgroups: that issue at the same time; interval_cycles: of the SM, for each wgmma.
    """

    format: str
    n: int
    a_in_smem: bool
    b_major: str
    warpgroups: int
    interval_cycles: float

    @property
    def model_cycles(self) -> float:
        """Arithmetic at 4096 bf16 FLOP a cycle and SM, or the operands at 128 B, or the least."""
        rows = self.n + (64 if self.a_in_smem else 0)
        return max(self.n / 2, rows * K_BYTES / 128, float(WGMMA_LEAST))

    @property
    def residual(self) -> float:
        """Measured less modelled, in cycles."""
        return self.interval_cycles - self.model_cycles

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "n": self.n,
            "a_in_smem": self.a_in_smem,
            "b_major": self.b_major,
            "warpgroups": self.warpgroups,
            "interval": self.interval_cycles,
            "interval_model": self.model_cycles,
        }


@cache
def wgmmas() -> tuple[Wgmma, ...]:
    """Every measured row of an H200, with its source in the file's head."""
    lines = _HOPPER.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return tuple(
        Wgmma(
            row["dtype"],
            int(row["n"]),
            row["a"] == "smem",
            row["b"],
            int(row["warpgroups"]),
            float(row["interval"]),
        )
        for row in rows
    )


def issued(tile: Tile) -> Iterator[tuple[Mma, int]]:
    """The MMAs of one tile, per CTA, and how many of each; Blackwell only."""
    for product in matmuls(tile):
        rows_max = BLOCK * tile.ctas
        rows = round_up(product.rows * tile.ctas, 64 * tile.ctas)
        steps = ceil_div(product.depth, tile.format.mma_k)
        for first in range(0, rows, rows_max):
            m = round_up(min(rows_max, rows - first), 64 * tile.ctas)
            for column in range(0, product.cols, MMA_COLUMNS):
                n = round_up(min(MMA_COLUMNS, product.cols - column), 16 * tile.ctas)
                yield Mma(m, n, product.a_in_smem, tile.ctas), steps


def serial_cycles(tile: Tile) -> Fraction | None:
    """Tensor-core cycles if every MMA of the tile takes its interval, one after another.

    Above ``mma`` where some MMAs wait for SMEM while others leave the port idle. None for wgmma.
    """
    if not tile.gpu.has_tmem:
        return None
    speed = _speed(tile.gpu, tile)
    cycles = Fraction(0)
    for mma, count in issued(tile):
        cycles += count * max(mma.math_cycles / speed, mma.smem_cycles * _port(tile.gpu))
    return cycles


def _speed(gpu: Gpu, tile: Tile) -> Fraction:
    """This GPU's MMA rate over the measured B200's for the same format."""
    per_mma = 2 * 128 * tile.format.mma_k * 2  # FLOP a cycle when 128 x N takes N/2 cycles
    return gpu[tile.format.rate_field].exact / per_mma


def _port(gpu: Gpu) -> Fraction:
    """128 B a cycle over this GPU's SMEM port."""
    return 128 / gpu["smem_bandwidth"].exact
