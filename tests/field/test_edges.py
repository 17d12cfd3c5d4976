"""Empty extents, rows without keys, scores far from zero, NaN."""

from __future__ import annotations

import pytest
import torch

import fa4
from tests.fa4.problems import assert_numbers_rule, dense_attention, random_qkv
from tests.field.cases import BACKENDS, DTYPES, assert_gradients_hold, gradients, on_backends

EMPTY = [(0, 128, 128), (2, 0, 128), (2, 128, 0), (2, 0, 0), (2, 1, 1)]


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), EMPTY[:4])
def test_empty_extents(
    backend: str, causal: bool, batch: int, seqlen_q: int, seqlen_k: int
) -> None:
    """FC06. DA PR#2470, DA#2503, DA#1537, DA PR#2706: crashes and divisions by zero.

    (PyTorch's own CPU kernel divides by zero too, for an empty sequence.)
    """
    qkv = random_qkv(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    out, lse = fa4.attention(*qkv, causal=causal, return_lse=True, backend=backend)
    assert out.shape == (batch, seqlen_q, 4, 64) and out.dtype == torch.bfloat16
    assert lse.shape == (batch, 4, seqlen_q) and lse.dtype == torch.float32
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert fa4.attention(*qkv, causal=causal, backend=backend).shape == out.shape


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), EMPTY[:4])
def test_empty_extents_have_zero_gradients(
    batch: int, seqlen_q: int, seqlen_k: int, causal: bool
) -> None:
    """FC06, backward."""
    qkv = random_qkv(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    grads = gradients(
        qkv,
        torch.ones(batch, seqlen_q, 4, 64, dtype=torch.bfloat16),
        causal=causal,
        grad_lse=torch.ones(batch, 4, seqlen_q),
    )
    for grad, t in zip(grads, qkv, strict=True):
        assert grad.shape == t.shape and grad.dtype == t.dtype and (grad == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_one_query_one_key(backend: str, causal: bool) -> None:
    """FC06, the smallest extent that is not empty: out is v, lse is the score."""
    q, k, v = random_qkv(seqlen_q=1, seqlen_k=1)
    out, lse = fa4.attention(q, k, v, causal=causal, return_lse=True, backend=backend)
    assert torch.equal(out, v.repeat_interleave(2, 2))
    scores = (q.double() * k.double().repeat_interleave(2, 2)).sum(-1) / 8
    torch.testing.assert_close(lse.double(), scores.transpose(1, 2), rtol=0, atol=1e-5)


MORE_QUERIES = [(239, 1), (799, 3), (5, 2), (129, 128), (3, 799), (1, 799)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), MORE_QUERIES)
def test_causal_with_more_queries_than_keys(backend: str, seqlen_q: int, seqlen_k: int) -> None:
    """FC07. flashinfer-ai/flashinfer#4452, thu-ml/SageAttention#19 and #26."""
    for dtype in DTYPES if backend == "reference" else DTYPES[:1]:
        qkv = random_qkv(
            batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=6, kv_heads=2, dtype=dtype
        )
        out, lse = assert_numbers_rule(*qkv, causal=True, backend=backend)
        blind = max(0, seqlen_q - seqlen_k)
        assert (out[:, :blind] == 0).all() and (lse[:, :, :blind] == -torch.inf).all()
        assert out.isfinite().all() and lse[:, :, blind:].isfinite().all()
        assert (out[:, blind:] != 0).any(-1).all()
        if backend == "reference":
            assert_numbers_rule(*qkv)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), MORE_QUERIES)
def test_causal_with_more_queries_than_keys_backward(seqlen_q: int, seqlen_k: int) -> None:
    """FC07, backward: rows without a key have a gradient of exactly 0."""
    qkv = random_qkv(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=6, kv_heads=2)
    grad_out = random_qkv(batch=1, seqlen_q=seqlen_q, heads=6, seed=5)[0]
    grads = assert_gradients_hold(qkv, grad_out, causal=True)
    assert (grads[0][:, : max(0, seqlen_q - seqlen_k)] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


def _shifted(seqlen: int, shift: float, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q and k of 64 features, the last of which adds `shift` to every scaled score, exactly."""
    q, k, v = random_qkv(
        batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads=2, dtype=torch.float32, seed=seqlen
    )
    q[..., 63], k[..., 63] = 32.0, shift * 8 / 32
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("backend", "seqlen"), on_backends([64, 192, 65, 704, 1025], emulated=[64, 192, 65])
)
def test_scores_far_from_zero(backend: str, causal: bool, seqlen: int) -> None:
    """FC20. pytorch/pytorch#196678, #153799, huggingface/trl#7181: NaN where a tile is half full.

    Softmax does not see a shift of all scores by -120 or +120; lse is shifted by just that.
    """
    # float16 products are slow in PyTorch on a CPU, and the yardstick is made of them
    for dtype in DTYPES if backend == "reference" and seqlen <= 192 else DTYPES[:1]:
        runs = {
            shift: assert_numbers_rule(
                *_shifted(seqlen, shift, dtype), causal=causal, backend=backend
            )
            for shift in (-120.0, 0.0, 120.0)
        }
        out, lse = runs[0.0]
        for shift, (shifted_out, shifted_lse) in runs.items():
            assert (shifted_lse - lse - shift).abs().max() <= 1e-3
            assert shifted_out.isfinite().all()
            # scores near 120 are rounded to 2^-17 in float32, which a weight feels relatively
            torch.testing.assert_close(shifted_out, out, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [64, 192, 65])
def test_scores_far_from_zero_backward(causal: bool, seqlen: int) -> None:
    """FC20, backward: exp(0 - lse) of a padded half tile was infinite, and 0 times that NaN."""
    grads = {}
    grad_out = random_qkv(batch=1, seqlen_q=seqlen, heads=2, dtype=torch.float32, seed=9)[0]
    for shift in (-120.0, 0.0, 120.0):
        qkv = _shifted(seqlen, shift, torch.float32)
        grads[shift] = gradients(qkv, grad_out, causal=causal)
    for shifted in grads.values():
        for name, a, b in zip("qkv", shifted, grads[0.0], strict=True):
            features = slice(0, 64 if name == "v" else 63)
            torch.testing.assert_close(a[..., features], b[..., features], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key", [0, 40, 96])
def test_one_nan_key_is_nan_in_the_rows_that_see_it(backend: str, key: int) -> None:
    """NaN is neither lost nor spread: whichever column it falls on, and only where it is seen."""
    q, k, v = random_qkv(batch=1, seqlen_q=97, seqlen_k=97)
    k[0, key, 0, 5] = torch.nan
    out, lse = fa4.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    exact, _ = dense_attention(q.float(), k.float(), v.float(), causal=True, scale=0.125)
    assert torch.equal(out.isnan(), exact.isnan())
    assert out[0, key:, :2].isnan().all() and lse[0, :2, key:].isnan().all()
    assert out[0, :key, :2].isfinite().all() and out[0, :, 2:].isfinite().all()
