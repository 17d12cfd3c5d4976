"""flash-attn-4's kernels as workloads of the cycle model (`roofline simulate --kernel ...`).

    roofline simulate --kernel tests.roofline.peer_workloads:flash_attention_4 --causal

Needs flash-attn-4 (`pip install .[peers]`). The kernel object is the one that its interface makes;
its file, version and code are its own.
"""

from __future__ import annotations

from typing import Any

import torch

import kernels.emulator as emulator
from tests.peers import gemm
from tests.peers.attention import Problem
from tests.peers.packages import peer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ROLES = {
    **dict.fromkeys(range(4), "softmax0"),
    **dict.fromkeys(range(4, 8), "softmax1"),
    **dict.fromkeys(range(8, 12), "correction"),
    12: "mma",
    13: "epilogue",
    14: "load",
    15: "empty",
}
HOPPER_ROLES = {
    0: "load",
    **dict.fromkeys(range(1, 4), "idle"),
    **{4 * group + warp: f"softmax{group - 1}" for group in (1, 2, 3) for warp in range(4)},
}


def flash_attention_4(
    *,
    gpu: str,
    dtype: str,
    head_dim: int,
    batch: int,
    seqlen: int,
    seqlen_k: int,
    heads: int,
    kv_heads: int,
    causal: bool,
) -> dict[str, Any]:
    """One-CTA forward. Blackwell: persistent when dense; one CTA an item, longest first, when
    causal. Hopper: one CTA an item."""
    hopper = emulator.gpu_model(gpu).compute_capability[0] == 9
    problem = Problem(
        causal=causal,
        head_dim=head_dim,
        # Two query tiles in flight on a Blackwell, as for any long sequence.
        seqlen_q=seqlen if hopper else max(seqlen, 257),
        seqlen_k=seqlen_k,
        heads=heads,
        kv_heads=kv_heads,
        batch=batch,
        dtype=DTYPES[dtype],
    )
    kernel = problem.kernel(gpu)
    make = torch.Generator().manual_seed(0)

    def normal(length: int, count: int) -> torch.Tensor:
        values = torch.randn((batch, length, count, head_dim), generator=make)
        return values.to(DTYPES[dtype])

    q, k, v = normal(seqlen, heads), normal(seqlen_k, kv_heads), normal(seqlen_k, kv_heads)
    out, lse = torch.empty_like(q), torch.empty((batch, heads, seqlen))
    return {
        "fn": kernel,
        "args": (q, k, v, out, lse, head_dim**-0.5),
        "roles": HOPPER_ROLES if hopper else ROLES,
        "tile_rows": kernel.tile_m if hopper else 256,
        "tile_keys": kernel.tile_n if hopper else 128,
        "persistent": not causal and not hopper,
        "longest_first": causal,
    }


GEMM_ROLES = {
    **{4 * group + warp: f"mma{group}" for group in range(3) for warp in range(4)},
    **dict.fromkeys(range(8, 12), "load"),
}


def quack_gemm(
    *,
    gpu: str,
    dtype: str,
    m: int,
    n: int,
    k: int,
    tile: tuple[int, int] = (128, 192),
    cluster: tuple[int, int] = (2, 1),
    pingpong: bool = True,
) -> dict[str, Any]:
    """quack's dense GEMM on Hopper, as its interface calls it (its defaults for sm_90); tiles are
    handed out statically, in bands of eight clusters."""
    if emulator.gpu_model(gpu).compute_capability[0] != 9:
        raise ValueError(f"gpu {gpu}: this workload is for Hopper")
    problem = gemm.Problem(tile, cluster, m, n, k, dtype=DTYPES[dtype], pingpong=pingpong)
    make = torch.Generator().manual_seed(0)
    a = torch.randn((m, k), generator=make).to(DTYPES[dtype])
    b = torch.randn((n, k), generator=make).to(DTYPES[dtype])
    out = torch.empty((m, n), dtype=DTYPES[dtype])
    kernel = gemm.kernel(problem, gpu)
    options = peer("quack.tile_scheduler").TileSchedulerOptions
    one = peer("cutlass").Int32(1)
    return {
        "fn": kernel,
        "args": (
            a, b, out, None, type(kernel).EpilogueArguments(),
            options(max_active_clusters=one), None, None,
        ),
        "roles": GEMM_ROLES,
        "tile_rows": tile[0] * cluster[0],
        "tile_cols": tile[1] * cluster[1],
        "tile_depth": 64,
        "cluster_ctas": cluster[0] * cluster[1],
        "persistent": True,
    }  # fmt: skip
