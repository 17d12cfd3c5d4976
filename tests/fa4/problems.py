"""Random problems for the tests of fa4, and the numbers rule as an assertion."""

from __future__ import annotations

from typing import Any

import torch

import fa4
from fa4.accuracy import measure

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_qkv(
    *,
    batch: int = 2,
    seqlen_q: int = 65,
    seqlen_k: int = 97,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> QKV:
    """Standard normal q, k and v, each different in every element."""
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, seqlen_q, heads, head_dim, generator=make)
    k = torch.randn(batch, seqlen_k, kv_heads, head_dim, generator=make)
    v = torch.randn(batch, seqlen_k, kv_heads, head_dim_v or head_dim, generator=make)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def assert_numbers_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run attention, hold its out and lse to the numbers rule, and return them."""
    out, lse = fa4.attention(
        q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=True, **options
    )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    errors = measure(q, k, v, out, lse, causal=causal, softmax_scale=scale)
    assert errors.broken_rules() == []
    return out, lse


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the definition, in the inputs' dtype, differentiable; rows without a key: 0.

    Written with einsum and an explicit mask, so that it shares nothing with the code under test.
    """
    share = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if causal:
        i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        scores = scores.masked_fill(j > i + k.shape[1] - q.shape[1], -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    lse = scores.masked_fill(blind, 0.0).logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse
