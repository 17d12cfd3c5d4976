"""A matrix product: its work, and the bytes that its tiles move, by the order of the tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roofline.errors import RooflineError
from roofline.gpus import Gpu
from roofline.terms import ceil_div

MAX_SIZE = 1 << 31
#: Tiles that stand side by side in the order of tiles, where a kernel does not say.
GROUP = 8


@dataclass(frozen=True)
class Gemm:
    """C[m, n] = A[m, k] B[k, n]."""

    m: int
    n: int
    k: int

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise RooflineError(f"{name} {value!r}: must be a positive integer")
            if value > MAX_SIZE:
                raise RooflineError(f"{name} {value}: at most {MAX_SIZE}")

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


def parse_gemm(text: str) -> Gemm:
    """``MxNxK``. RooflineError if it is none."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise RooflineError(f"gemm {text!r}: must look like 4096x4096x1024 (M x N x K)")
    return Gemm(*(int(part) for part in parts))


@dataclass(frozen=True)
class Tiling:
    """How a grid cuts the product. rows, cols: of a work item; slots: items at a time; group: items
    side by side across the shorter direction, before the order goes on along the longer."""

    rows: int
    cols: int
    slots: int
    group: int = GROUP

    def order(self, gemm: Gemm) -> Iterator[tuple[int, int]]:
        """Work items (row, column) in their order: bands of ``group`` along one direction."""
        rows, cols = ceil_div(gemm.m, self.rows), ceil_div(gemm.n, self.cols)
        along_m = cols > rows  # bands of rows, each band column by column
        fast, slow = (rows, cols) if along_m else (cols, rows)
        for first in range(0, fast, self.group):
            band = range(first, min(first + self.group, fast))
            for s in range(slow):
                for f in band:
                    yield (f, s) if along_m else (s, f)


@dataclass(frozen=True)
class GemmBounds:
    """What a product costs at the least with its tiles. Bytes, and seconds at peak bandwidth."""

    gpu: Gpu
    gemm: Gemm
    peak_tflops: float
    hbm_bytes: int
    l2_bytes: int

    @property
    def flops(self) -> float:
        return float(self.gemm.flops)

    @property
    def hbm_seconds(self) -> float:
        field = "hbm_sustained" if self.gpu.has("hbm_sustained") else "hbm_bandwidth"
        return self.hbm_bytes / (float(self.gpu[field].value) * 1e12)

    @property
    def l2_seconds(self) -> float:
        return self.l2_bytes / (float(self.gpu["l2_bandwidth"].value) * 1e12)


def gemm_bounds(
    gpu: Gpu, gemm: Gemm, tiling: Tiling, element_bytes: int, rate_field: str
) -> GemmBounds:
    """Bytes of a product: from L2, and from HBM, for which items that run at the same time share
    what they read, and those of the next round what is left of it in L2.

    L2 has two halves, each of which caches for its SMs: operands that fit into one are served to
    several SMs at once, so that each byte counts once and only what an SM can take in is a limit.
    """
    e, k = element_bytes, gemm.k
    items = list(tiling.order(gemm))
    l2 = len(items) * (tiling.rows + tiling.cols) * k * e + gemm.m * gemm.n * e
    capacity = float(gpu["l2"].value) * 2**20
    hbm = gemm.m * gemm.n * e
    held_rows: set[int] = set()
    held_cols: set[int] = set()
    operands = (gemm.m + gemm.n) * k * e
    everything = operands <= capacity
    if 2 * operands <= capacity:
        l2 = operands + gemm.m * gemm.n * e
    for first in range(0, len(items), tiling.slots):
        wave = items[first : first + tiling.slots]
        rows, cols = {m for m, _ in wave}, {n for _, n in wave}
        hbm += len(rows - held_rows) * min(tiling.rows, gemm.m) * k * e
        hbm += len(cols - held_cols) * min(tiling.cols, gemm.n) * k * e
        read = (len(rows) * tiling.rows + len(cols) * tiling.cols) * k * e
        if everything:
            held_rows |= rows
            held_cols |= cols
        else:
            held_rows, held_cols = (rows, cols) if read <= capacity else (set(), set())
    sms, clock = float(gpu["sms"].value), float(gpu["clock"].value)
    peak = float(gpu[rate_field].value) * sms * clock / 1e3
    return GemmBounds(gpu, gemm, peak, int(hbm), int(l2))


def gemm_dict(gemm: Gemm) -> dict[str, Any]:
    """JSON-ready."""
    return {"m": gemm.m, "n": gemm.n, "k": gemm.k}
