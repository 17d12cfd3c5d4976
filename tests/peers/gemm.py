"""quack-kernels' dense GEMM on the modelled SM."""

from __future__ import annotations

import math
from typing import Any

import torch

import kernels.emulator as emulator
from tests.peers.packages import peer


def kernel(
    gpu: str,
    tile: tuple[int, int],
    cluster: tuple[int, int] = (1, 1),
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Any:
    """quack's GEMM class for the GPU; tile: (M, N) of the MMA, cluster: CTAs along M and N."""
    epilogue = peer("quack.gemm_default_epi")
    cutlass_dtype = peer("quack.cute_dsl_utils").torch2cute_dtype_map
    blackwell = emulator.gpu_model(gpu).compute_capability[0] == 10
    make = epilogue.GemmDefaultSm100 if blackwell else epilogue.GemmDefaultSm90
    with emulator.host_sees(gpu):
        return make(
            cutlass_dtype[torch.float32], cutlass_dtype[dtype], tile, (*cluster, 1), **options
        )


def run(
    gemm: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, gpu: str, **options: Any
) -> Any:
    """out[M, N] = a[M, K] @ b[N, K]^T; returns the emulator's report."""
    scheduler = peer("quack.tile_scheduler")
    int32 = peer("cutlass").Int32
    clusters = emulator.gpu_model(gpu).sm_count // math.prod(gemm.cluster_shape_mnk)
    return emulator.emulate(
        gemm,
        a,
        b,
        out,
        None,
        type(gemm).EpilogueArguments(),
        scheduler.TileSchedulerOptions(max_active_clusters=int32(clusters)),
        None,
        None,
        gpu=gpu,
        **options,
    )
