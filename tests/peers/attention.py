"""flash-attn-4's forward kernels on the modelled SM, judged against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

import kernels.emulator as emulator
from fa4.accuracy import measure
from tests.peers.packages import peer


@dataclass(frozen=True)
class Problem:
    """One attention problem. ``two_ctas``: MMAs of CTA pairs (cta_group::2), which flash-attn-4
    takes for dense attention, head_dim 128, with more than 256 queries of a KV head."""

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
        shape = f"{self.batch}x{self.seqlen_q}x{self.seqlen_k}-heads{self.heads}:{self.kv_heads}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{mask}-d{self.head_dim}-{shape}-{dtype}{'-2cta' if self.two_ctas else ''}"

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

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

    def kernel(self, gpu: str = "b200") -> Any:
        """The kernel object that flash-attn-4's interface makes for this problem and GPU.

        One object for all problems that share a compile, so that they do share it.
        """
        rows = self.seqlen_q * self.group
        if emulator.gpu_model(gpu).compute_capability[0] == 9:
            return _hopper(gpu, self.dtype, self.head_dim, self.group, self.causal)
        return _blackwell(gpu, self.head_dim, self.group, self.causal, rows, self.two_ctas)


@lru_cache
def _blackwell(
    gpu: str,
    head_dim: int,
    group: int,
    causal: bool,
    rows: int,
    two_ctas: bool,
    varlen: bool = False,
    launch_control: bool = False,
) -> Any:
    """rows: queries of a KV head, which decide between one and two Q tiles a CTA."""
    q_stages = 2 if rows > 128 else 1
    with emulator.host_sees(gpu):
        return peer("flash_attn.cute.flash_fwd_sm100").FlashAttentionForwardSm100(
            head_dim,
            head_dim,
            qhead_per_kvhead=group,
            is_causal=causal,
            pack_gqa=group > 1,
            q_stage=q_stages,
            is_static_persistent=not varlen and (not causal or rows <= q_stages * 128),
            is_varlen_q=varlen,
            use_2cta_instrs=two_ctas,
            use_clc_scheduler=launch_control,
        )


@lru_cache
def _hopper(gpu: str, dtype: torch.dtype, head_dim: int, group: int, causal: bool) -> Any:
    cutlass_dtype = peer("flash_attn.cute.cute_dsl_utils").torch2cute_dtype_map[dtype]
    tile = peer("flash_attn.cute.interface")._tile_size_fwd_sm90(head_dim, head_dim, causal, False)
    with emulator.host_sees(gpu):
        return peer("flash_attn.cute.flash_fwd_sm90").FlashAttentionForwardSm90(
            cutlass_dtype,
            head_dim,
            head_dim,
            group,
            is_causal=causal,
            is_local=False,
            pack_gqa=group > 1,
            tile_m=tile.m_block_size,
            tile_n=tile.n_block_size,
            num_stages=2,
            num_threads=384,
            Q_in_regs=False,
            intra_wg_overlap=tile.intra_wg_overlap,
            mma_pv_is_rs=tile.mma_pv_is_rs,
        )


def run(
    problem: Problem, gpu: str = "b200", **options: Any
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(report, out, lse); out and lse are NaN where the kernel wrote nothing."""
    q, k, v = problem.tensors()
    out = torch.full_like(q, math.nan)
    lse = torch.full((problem.batch, problem.heads, problem.seqlen_q), math.nan)
    kernel = problem.kernel(gpu)
    report = emulator.emulate(kernel, q, k, v, out, lse, problem.scale, gpu=gpu, **options)
    return report, out, lse


def check(problem: Problem, gpu: str = "b200", **options: Any) -> Any:
    """Runs a problem, wants no finding, and holds the numbers to the numbers rule."""
    report, out, lse = run(problem, gpu, **options)
    assert report.ok, str(report)
    assert_numbers(problem, *problem.tensors(), out, lse)
    return report


def assert_numbers(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    errors = measure(q, k, v, out, lse, causal=problem.causal, softmax_scale=problem.scale)
    assert errors.broken_rules() == []


@dataclass(frozen=True)
class Varlen:
    """Sequences of different lengths in one problem; lengths of queries and of keys."""

    causal: bool
    head_dim: int
    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 2
    launch_control: bool = False

    def check(self, gpu: str = "b200", **options: Any) -> Any:
        """Runs the problem, wants no finding, and holds each sequence to the numbers rule."""
        total = Problem(
            self.causal,
            self.head_dim,
            sum(self.seqlens_q),
            sum(self.seqlens_k),
            self.heads,
            self.kv_heads,
        )
        q, k, v = (tensor[0] for tensor in total.tensors())
        out, lse = torch.full_like(q, math.nan), torch.full((self.heads, len(q)), math.nan)
        starts_q, starts_k = _starts(self.seqlens_q), _starts(self.seqlens_k)
        if emulator.gpu_model(gpu).compute_capability[0] == 9:
            kernel = total.kernel(gpu)
        else:
            rows = max(self.seqlens_q) * total.group
            kernel = _blackwell(
                gpu, self.head_dim, total.group, self.causal, rows, False, True, self.launch_control
            )
        report = emulator.emulate(
            kernel, q, k, v, out, lse, total.scale, starts_q, starts_k, gpu=gpu, **options
        )
        assert report.ok, str(report)
        for n in range(len(self.seqlens_q)):
            rows_q = slice(int(starts_q[n]), int(starts_q[n + 1]))
            rows_k = slice(int(starts_k[n]), int(starts_k[n + 1]))
            one = (q[None, rows_q], k[None, rows_k], v[None, rows_k])
            assert_numbers(total, *one, out[None, rows_q], lse[None, :, rows_q])
        return report


def _starts(seqlens: tuple[int, ...]) -> torch.Tensor:
    """cu_seqlens: where each sequence starts, and the end."""
    return torch.tensor([0, *seqlens]).cumsum(0).to(torch.int32)
