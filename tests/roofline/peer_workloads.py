"""flash-attn-4's kernels as workloads of the cycle model (`roofline simulate --kernel ...`).

    roofline simulate --kernel tests.roofline.peer_workloads:flash_attention_4 --causal

Needs flash-attn-4 (`pip install .[peers]`). The kernel object is the one that its interface makes;
its file, version and code are its own.
"""

from __future__ import annotations

from typing import Any

import torch

import kernels.emulator as emulator
from tests.peers.attention import Problem

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
