"""The yardstick itself: against PyTorch's float64 attention, and that it can fail."""

from __future__ import annotations

import math

import pytest
import torch

from fa4.accuracy import Errors, materialised, measure
from tests.fa4.problems import dense_attention, random_qkv


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 70), (1100, 300), (30, 2000)])
def test_float64_is_exact(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    qkv = random_qkv(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=6, dtype=torch.float64)
    ours = materialised(*qkv, causal=causal, softmax_scale=0.1, dtype=torch.float64)
    exact = dense_attention(*qkv, causal=causal, scale=0.1)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


def test_plain_rounds_every_step() -> None:
    """In bfloat16 the same bits as the expression that defines it."""
    q, k, v = random_qkv(heads=2, kv_heads=2)
    plain, _ = materialised(q, k, v, causal=False, softmax_scale=0.125, dtype=torch.bfloat16)
    by_head = [
        ((q[b, :, h] @ k[b, :, h].T) * 0.125).softmax(-1) @ v[b, :, h]
        for b in range(2)
        for h in range(2)
    ]
    assert torch.equal(plain, torch.stack(by_head).view(2, 2, 65, 64).transpose(1, 2))


def test_errors_are_those_of_the_definition() -> None:
    q, k, v = random_qkv()
    exact, lse = dense_attention(q.double(), k.double(), v.double(), causal=True, scale=0.125)
    out = exact.clone()
    out[1, 3, 2, 7] += 0.25
    errors = measure(q, k, v, out, lse + 1e-4, causal=True, softmax_scale=0.125)
    assert errors.max_abs_error == pytest.approx(0.25)
    assert errors.rms_error == pytest.approx(0.25 / math.sqrt(out.numel()))
    assert errors.lse_max_abs_error == pytest.approx(1e-4)
    assert errors.torch_max_abs_error > errors.torch_rms_error > 0
    assert errors.broken_rules()[0].startswith("max error 0.25 is above")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_should_be_finite_is_an_infinite_error(bad: float) -> None:
    q, k, v = random_qkv()
    out, lse = dense_attention(q.double(), k.double(), v.double(), causal=False, scale=0.125)
    out[0, 0, 0, 0] = bad
    lse[0, 0, 0] = bad
    errors = measure(q, k, v, out, lse, causal=False, softmax_scale=0.125)
    assert errors.max_abs_error == errors.lse_max_abs_error == math.inf
    assert errors.to_dict()["max_abs_error"] is None
    assert len(errors.broken_rules()) == 3


def test_nan_where_nan_belongs_is_no_error() -> None:
    q, k, v = random_qkv(dtype=torch.float32)
    k[0, 5, 0, 3] = torch.nan
    v[1, 7, 1, 2] = torch.inf
    out, lse = dense_attention(q, k, v, causal=False, scale=0.125)
    assert out.isnan().any() and out.isinf().any()
    errors = measure(q, k, v, out, lse, causal=False, softmax_scale=0.125)
    assert errors.max_abs_error < 1e-5 and errors.lse_max_abs_error < 1e-5


@pytest.mark.parametrize(
    ("dtype", "ours", "broken"),
    [
        (torch.bfloat16, (0.015, 0.01, 1e-3), []),
        (torch.bfloat16, (0.0151, 0.01, 1e-3), ["max"]),
        (torch.bfloat16, (0.015, 0.0101, 1e-3), ["RMS"]),
        (torch.bfloat16, (0.015, 0.01, 1.1e-3), ["LSE"]),
        (torch.float32, (0.015, 0.015, 0.0), []),
        (torch.float32, (0.015, 0.0151, 0.0), ["RMS"]),
        (torch.float64, (0.0, 2e-12, 0.0), ["RMS"]),
    ],
)
def test_the_rule(dtype: torch.dtype, ours: tuple[float, ...], broken: list[str]) -> None:
    largest, rms, lse = ours
    errors = Errors(largest, 0.01, rms, 0.01, lse, dtype)
    assert [text.split()[0] for text in errors.broken_rules()] == broken


def test_the_lse_limit_follows_the_spacing_of_float32() -> None:
    q, k, v = random_qkv()
    out, lse = dense_attention(q.double(), k.double(), v.double(), causal=False, scale=0.125)
    small = measure(q, k, v, out, lse + 1.2e-3, causal=False, softmax_scale=0.125)
    assert [rule for rule in small.broken_rules() if rule.startswith("LSE")]

    q = q * 4000  # scores, and LSE, of about +-12000: float32 values there lie 1e-3 apart
    out, lse = dense_attention(q.double(), k.double(), v.double(), causal=False, scale=0.125)
    assert float(lse.abs().max()) > 8192
    stored = measure(q, k, v, out, lse.float(), causal=False, softmax_scale=0.125)
    assert not stored.broken_rules()
    far = measure(q, k, v, out, lse + 1e-2, causal=False, softmax_scale=0.125)
    assert [rule for rule in far.broken_rules() if rule.startswith("LSE")]
