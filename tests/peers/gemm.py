"""quack-kernels' dense GEMM on the modelled SM, judged against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

import kernels.emulator as emulator
from tests.peers.packages import peer


@dataclass(frozen=True)
class Problem:
    """out[M, N] = a[M, K] @ b[N, K]^T. tile: (M, N) of the MMA; cluster: CTAs along M and N.

    ``launch_control``: CTAs take over tiles by cluster launch control (Blackwell); else tiles are
    handed out statically. ``pingpong``: two consumer warpgroups take turns (Hopper).
    """

    tile: tuple[int, int]
    cluster: tuple[int, int] = (1, 1)
    m: int = 300
    n: int = 400
    k: int = 200
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    launch_control: bool = True
    pingpong: bool = False

    def __str__(self) -> str:
        tile, cluster = ("x".join(map(str, x)) for x in (self.tile, self.cluster))
        how = "" if self.launch_control else "-static"
        how += "-pingpong" if self.pingpong else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"tile{tile}-cluster{cluster}-{self.m}x{self.n}x{self.k}-{dtype}{how}"

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """a and b, of small integers: every sum is exact in float32, in whatever order."""
        make = torch.Generator().manual_seed(self.m + self.n)
        a = torch.randint(-4, 5, (self.m, self.k), generator=make)
        b = torch.randint(-3, 4, (self.n, self.k), generator=make)
        return a.to(self.dtype), b.to(self.dtype)


@lru_cache
def kernel(problem: Problem, gpu: str) -> Any:
    """quack's GEMM object for a problem's tile, cluster and types."""
    epilogue = peer("quack.gemm_default_epi")
    cutlass_dtype = peer("quack.cute_dsl_utils").torch2cute_dtype_map
    types = cutlass_dtype[torch.float32], cutlass_dtype[problem.dtype]
    cluster = (*problem.cluster, 1)
    with emulator.host_sees(gpu):
        if emulator.gpu_model(gpu).compute_capability[0] == 9:
            return epilogue.GemmDefaultSm90(
                *types, problem.tile, cluster, pingpong=problem.pingpong
            )
        return epilogue.GemmDefaultSm100(
            *types, problem.tile, cluster, use_clc_persistence=problem.launch_control
        )


def run(problem: Problem, gpu: str = "b200", **options: Any) -> tuple[Any, torch.Tensor]:
    """(report, out); out is NaN where the kernel wrote nothing."""
    scheduler, int32 = peer("quack.tile_scheduler"), peer("cutlass").Int32
    gemm = kernel(problem, gpu)
    a, b = problem.tensors()
    out = torch.full((problem.m, problem.n), math.nan, dtype=problem.out_dtype)
    clusters = emulator.gpu_model(gpu).sm_count // math.prod(problem.cluster)
    tiles = scheduler.TileSchedulerOptions(max_active_clusters=int32(clusters))
    epilogue = type(gemm).EpilogueArguments()
    report = emulator.emulate(
        gemm, a, b, out, None, epilogue, tiles, None, None, gpu=gpu, **options
    )
    return report, out


def check(problem: Problem, gpu: str = "b200", **options: Any) -> Any:
    """Runs a problem; wants no finding, and the exact product, rounded once."""
    report, out = run(problem, gpu, **options)
    assert report.ok, str(report)
    a, b = problem.tensors()
    exact = (a.double() @ b.double().T).to(problem.out_dtype)
    torch.testing.assert_close(out, exact, rtol=0, atol=0)
    return report
