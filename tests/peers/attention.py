"""flash-attn-4's forward kernels on the modelled SM, judged against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

import kernels.emulator as emulator
from fa4.accuracy import measure
from tests.peers.packages import peer


@dataclass(frozen=True)
class Problem:
    """One attention problem. ``two_ctas``: MMAs of CTA pairs (cta_group::2), as flash-attn-4
    chooses for dense attention with more than 256 queries and head_dim 128."""

    causal: bool
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    heads: int = 2
    kv_heads: int = 2
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    two_ctas: bool = False
    seed: int = 0

    def __str__(self) -> str:
        mask = "causal" if self.causal else "dense"
        ctas = "-2cta" if self.two_ctas else ""
        kind = str(self.dtype).removeprefix("torch.")
        shape = f"{self.seqlen_q}x{self.seqlen_k}"
        return f"{mask}-d{self.head_dim}-{shape}-h{self.heads}/{self.kv_heads}-{kind}{ctas}"

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v: every value differs, and K and V have means, so that mix-ups show."""
        make = torch.Generator().manual_seed(self.seed)

        def normal(seqlen: int, heads: int, mean: float) -> torch.Tensor:
            values = torch.randn(self.batch, seqlen, heads, self.head_dim, generator=make) + mean
            return values.to(self.dtype)

        return (
            normal(self.seqlen_q, self.heads, 0.0),
            normal(self.seqlen_k, self.kv_heads, 0.1),
            normal(self.seqlen_k, self.kv_heads, 0.3),
        )


def blackwell_kernel(problem: Problem, gpu: str = "b200") -> Any:
    """The kernel object that flash-attn-4's interface makes for Blackwell and this problem."""
    module = peer("flash_attn.cute.flash_fwd_sm100")
    group = problem.heads // problem.kv_heads
    pack_gqa = group > 1
    rows = problem.seqlen_q * (group if pack_gqa else 1)
    q_stages = 2 if rows > 128 else 1
    with emulator.host_sees(gpu):
        return module.FlashAttentionForwardSm100(
            problem.head_dim,
            problem.head_dim,
            qhead_per_kvhead=group,
            is_causal=problem.causal,
            pack_gqa=pack_gqa,
            q_stage=q_stages,
            is_static_persistent=not problem.causal or rows <= q_stages * 128,
            use_2cta_instrs=problem.two_ctas,
        )


def hopper_kernel(problem: Problem) -> Any:
    """The kernel object that flash-attn-4's interface makes for sm_90 and this problem."""
    module = peer("flash_attn.cute.flash_fwd_sm90")
    cutlass = peer("flash_attn.cute.cute_dsl_utils").torch2cute_dtype_map
    group = problem.heads // problem.kv_heads
    tile_m = 192 if problem.head_dim <= 64 else 128
    with emulator.host_sees("h100"):
        return module.FlashAttentionForwardSm90(
            cutlass[problem.dtype],
            problem.head_dim,
            problem.head_dim,
            group,
            is_causal=problem.causal,
            is_local=False,
            pack_gqa=group > 1,
            tile_m=tile_m,
            tile_n=128,
            num_stages=2,
            num_threads=384,
            Q_in_regs=False,
            intra_wg_overlap=True,
            mma_pv_is_rs=True,
        )


def run(kernel: Any, problem: Problem, **options: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(report, out, lse) of a kernel object; out and lse are NaN where it wrote nothing."""
    q, k, v = problem.tensors()
    out = torch.full_like(q, math.nan)
    lse = torch.full((problem.batch, problem.heads, problem.seqlen_q), math.nan)
    report = emulator.emulate(kernel, q, k, v, out, lse, problem.head_dim**-0.5, **options)
    return report, out, lse


def check(kernel: Any, problem: Problem, **options: Any) -> Any:
    """Runs a kernel object, wants no finding, and holds its numbers to the numbers rule."""
    report, out, lse = run(kernel, problem, **options)
    assert report.ok, str(report)
    q, k, v = problem.tensors()
    errors = measure(
        q, k, v, out, lse, causal=problem.causal, softmax_scale=problem.head_dim**-0.5
    )
    assert errors.broken_rules() == []
    return report
