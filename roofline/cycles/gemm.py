"""A matrix product as a workload of the cycle model: its work items, and its small stand-ins.

A workload function of a product takes ``gpu``, ``dtype``, ``m``, ``n`` and ``k``. It returns
``fn``, ``args`` and ``roles``; ``tile_rows``, ``tile_cols`` and ``tile_depth``, what a work item (a
CTA's, or a cluster's) computes and how much of K an iteration takes; ``cluster_ctas``;
``persistent``; and, if it likes, ``group``, the width of the bands in which it orders its tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from roofline.cycles.probe import LONG, SHORT, imported, known_gpu, long_dtype, made_for, takes
from roofline.errors import RooflineError
from roofline.gemm import GROUP, Gemm, GemmBounds, Tiling, gemm_bounds
from roofline.gpus import Gpu
from roofline.terms import ceil_div

_RATES = {"bfloat16": ("mma_bf16", 2), "float16": ("mma_fp16", 2), "float8_e4m3fn": ("mma_fp8", 1)}


@dataclass(frozen=True)
class GemmWorkload:
    """A GEMM kernel as its workload function describes it."""

    name: str
    make: Any
    gpu: str
    dtype: str
    tile_rows: int
    tile_cols: int
    tile_depth: int
    cluster_ctas: int
    persistent: bool
    group: int = GROUP
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    iteration: ClassVar[str] = "K block"
    needs: ClassVar[tuple[str, ...]] = ("tile_cols", "tile_depth")

    def iterations(self, problem: Gemm) -> int:
        """K blocks of each work item."""
        return ceil_div(problem.k, self.tile_depth)

    def items(self, problem: Gemm) -> list[int]:
        """K blocks of all work items."""
        count = ceil_div(problem.m, self.tile_rows) * ceil_div(problem.n, self.tile_cols)
        return [self.iterations(problem)] * count

    def arguments(self, problem: Gemm) -> dict[str, Any]:
        """What the workload function is told of a problem."""
        return {"m": problem.m, "n": problem.n, "k": problem.k}

    def stand_ins(self, problem: Gemm) -> tuple[Gemm, ...]:
        """Two lengths of K; for a persistent kernel two and four items, since two warpgroups may
        take turns with them."""
        blocks = self.iterations(problem)
        lengths = (SHORT, LONG) if blocks > LONG else (max(1, blocks // 2), blocks)
        short, long = (n * self.tile_depth for n in lengths)
        if not self.persistent:
            return tuple(
                Gemm(self.tile_rows, self.tile_cols, k) for k in dict.fromkeys((short, long))
            )
        two, four = 2 * self.tile_rows, 4 * self.tile_rows
        return tuple(
            Gemm(m, self.tile_cols, k) for m, k in ((two, short), (four, short), (four, long))
        )

    def limits(self, gpu: Gpu, problem: Gemm) -> GemmBounds:
        """What the problem costs at the least on the whole GPU."""
        slots = int(gpu["sms"].value) // self.cluster_ctas
        tiling = Tiling(self.tile_rows, self.tile_cols, slots, self.group)
        rate, element_bytes = _RATES[self.dtype]
        return gemm_bounds(gpu, problem, tiling, element_bytes, rate)

    def describe(self, problem: Gemm) -> str:
        """The problem in words."""
        return f"{self.dtype}; M {problem.m}, N {problem.n}, K {problem.k}"


def gemm_workload(
    kernel: str, gpu: Gpu, dtype: str, options: Mapping[str, Any] | None = None
) -> GemmWorkload:
    """The kernel that an import string names. RooflineError if there is none, or it refuses."""
    name, make = known_gpu(gpu), imported(kernel)
    if not takes(make, ("m", "n", "k")):
        raise RooflineError(
            f"gemm: kernel {kernel} computes no matrix product; name one that does by --kernel"
            " MODULE:FUNCTION"
        )
    first = GemmWorkload(
        kernel, make, name, long_dtype(dtype), 1, 1, 1, 1, False, options=dict(options or {})
    )
    made = made_for(first, Gemm(128, 128, 64))
    return replace(
        first,
        tile_rows=int(made["tile_rows"]),
        tile_cols=int(made["tile_cols"]),
        tile_depth=int(made["tile_depth"]),
        cluster_ctas=int(made.get("cluster_ctas", 1)),
        persistent=bool(made.get("persistent", False)),
        group=int(made.get("group", GROUP)),
    )
