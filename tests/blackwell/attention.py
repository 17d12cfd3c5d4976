# SPDX-License-Identifier: Apache-2.0
"""Running the forward kernel on the modelled SM, and judging its numbers against float64."""

import math

import torch

import kernels.emulator as emulator
from kernels.blackwell.forward import AttentionForward
from kernels.common.plan import KernelPlan

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def random_problem(plan, batch, seqlen_q, seqlen_k, heads, kv_heads, seed=0):
    """q, k, v of a plan; every value differs, and K and V have means, so mix-ups show."""
    generator = torch.Generator().manual_seed(seed)

    def normal(seqlen, n_heads, mean):
        shape = (batch, seqlen, n_heads, plan.head_dim)
        values = torch.randn(shape, generator=generator) + mean
        return values.to(TORCH_DTYPES[plan.dtype])

    return (
        normal(seqlen_q, heads, 0.0),
        normal(seqlen_k, kv_heads, 0.1),
        normal(seqlen_k, kv_heads, 0.3),
    )


def run_forward(plan: KernelPlan, q, k, v, scale=None, out=None, **options):
    """(out, lse, report) of the kernel on the emulator; fails on any finding."""
    batch, seqlen_q, heads, head_dim = q.shape
    out = torch.full_like(q, math.nan) if out is None else out
    lse = torch.full((batch, heads, seqlen_q), math.nan)
    scale = head_dim**-0.5 if scale is None else scale
    report = emulator.emulate(
        AttentionForward(plan), q, k, v, out, lse, scale, gpu=plan.gpu,
        roles=plan.role_of_warp(), **options,
    )  # fmt: skip
    assert report.ok, str(report)
    return out, lse, report


def attention(q, k, v, scale, causal):
    """softmax((q @ k^T) * scale) @ v materialised in the dtype of its inputs: (out, lse).

    Causal is bottom-right; a row that sees no key is 0 with LSE -inf.
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = (q @ k.mT) * scale
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if causal:
        visible = visible.tril(scores.shape[-1] - scores.shape[-2])
    scores = scores.masked_fill(~visible, -math.inf)
    weights = torch.softmax(scores, -1).masked_fill(~visible.any(-1, keepdim=True), 0)
    return (weights @ v).transpose(1, 2), torch.logsumexp(scores, -1)


def check_numbers(plan: KernelPlan, q, k, v, scale=None, **options):
    """Runs the kernel and holds it to the numbers rule; returns (out, lse, report).

    Against float64: largest error at most 1.5 x that of attention materialised in the dtype, plus
    1e-5; RMS error at most its; LSE within 1e-3.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse, report = run_forward(plan, q, k, v, scale, **options)
    exact, exact_lse = attention(q.double(), k.double(), v.double(), scale, plan.causal)
    plain, _ = attention(q, k, v, scale, plan.causal)
    error, plain_error = out.double() - exact, plain.double() - exact
    assert out.isfinite().all()
    assert error.abs().max() <= 1.5 * plain_error.abs().max() + 1e-5
    assert error.square().mean() <= plain_error.square().mean()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-3)
    return out, lse, report
