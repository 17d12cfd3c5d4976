"""Head ratios, head dims, and the log-sum-exp."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fa4
from tests.fa4.problems import assert_numbers_rule, dense_attention, random_qkv
from tests.field.cases import BACKENDS, DTYPES, assert_gradients_hold, on_backends

RATIOS = [(40, 4), (7, 1), (12, 4), (6, 2), (71, 1), (128, 1), (8, 8)]


@pytest.mark.parametrize(
    ("backend", "heads", "kv_heads"),
    on_backends(RATIOS, emulated=[(7, 1), (12, 4), (6, 2), (8, 8)]),
)
def test_head_ratios(backend: str, heads: int, kv_heads: int) -> None:
    """FC14. DA#2300, DA#2186, DA#2878, DA#2553, thu-ml/SageAttention#302."""
    lengths = (65,) if backend == "emulator" else (3,) if heads > 40 else (1, 65, 200)
    for seqlen_q in lengths:
        for head_dim, causal in ((64, True), (128, False)):
            if backend == "emulator" and (head_dim == 128) != (heads == 12):
                continue
            q, k, v = random_qkv(
                batch=1,
                seqlen_q=seqlen_q,
                seqlen_k=257,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
            )
            out, lse = assert_numbers_rule(q, k, v, causal=causal, backend=backend)
            if backend == "emulator":
                continue
            repeated = [t.repeat_interleave(heads // kv_heads, 2) for t in (k, v)]
            again = fa4.attention(q, *repeated, causal=causal, return_lse=True)
            torch.testing.assert_close(again[0], out, rtol=2**-7, atol=1e-6)
            torch.testing.assert_close(again[1], lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(40, 4), (7, 1), (71, 1), (8, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_head_ratios_backward(heads: int, kv_heads: int, causal: bool) -> None:
    """FC14, backward: dk and dv sum over the heads that share a key head."""
    sizes = {"batch": 1, "heads": heads, "kv_heads": kv_heads, "seqlen_q": 5, "seqlen_k": 257}
    grad_out = random_qkv(**sizes, seed=4)[0]
    assert_gradients_hold(random_qkv(**sizes), grad_out, causal=causal)


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 2), (2, 4), (40, 3)])
def test_head_ratios_that_do_not_divide(backend: str, heads: int, kv_heads: int) -> None:
    """FC14: a ValueError with both numbers."""
    with pytest.raises(ValueError, match=f"{heads} heads of q and {kv_heads} of k and v"):
        fa4.attention(*random_qkv(heads=heads, kv_heads=kv_heads), backend=backend)
    assert not fa4.supports(heads=heads, kv_heads=kv_heads, backend=backend)


HEAD_DIMS: list[Any] = [8, 16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 208, 224, 256, 512]
HEAD_DIMS += [(192, 128), (192, 192), (576, 512), 4, 46, 148, 520, (64, 100)]


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("gpu", ["sm_80", "sm_86", "sm_90", "b200", "b300", "sm_120", "none"])
def test_head_dims_are_answered_before_they_are_tried(
    head_dim: int | tuple[int, int], gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FC15. DA#2750, DA#2591, DA#1963, DA#2427, DA#2087, vllm-project/vllm#41454 and #12656.

    A yes computes, a no is a ValueError before any compile or launch, with arch, dims and limit.
    """
    d, dv = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    backend = "reference" if gpu == "none" else "emulator"
    answer = fa4.supports(gpu=gpu, backend=backend, head_dim=d, head_dim_v=dv)
    qkv = random_qkv(batch=1, seqlen_q=64, seqlen_k=64, head_dim=d, head_dim_v=dv)
    compiled: list[Any] = []
    monkeypatch.setattr("fa4.backends.emulator.forward", lambda *a, **_: compiled.append(a[1]))
    call = lambda: fa4.api.run(
        *qkv,
        causal=True,
        softmax_scale=None,
        backend=backend,
        gpu=None if gpu == "none" else gpu,
    )
    if answer:
        call()
        assert len(compiled) == (backend == "emulator")
        assert all(plan.smem_bytes <= 232448 for plan in compiled)
        assert backend == "reference" or (d == dv and d % 16 == 0 and d <= 128)
        return
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == answer.reason and not compiled
    assert gpu not in ("b200", "b300") or f"head_dim {d}" in answer.reason
    assert "sm_" in answer.reason and "reference" in answer.reason


@pytest.mark.parametrize("head_dim", [8, 24, 72, 80, 160, 192, 256, 512, (192, 128), (576, 512)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
def test_head_dims_of_the_reference(head_dim: Any, heads: int, kv_heads: int) -> None:
    """FC15, where the answer is yes: forward and backward."""
    d, dv = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    sizes = {"batch": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": d, "head_dim_v": dv}
    qkv = random_qkv(seqlen_q=64, seqlen_k=96, **sizes)
    out, _ = assert_numbers_rule(*qkv, causal=True)
    assert_gradients_hold(qkv, torch.ones_like(out) + out, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [16, 80, 112])
def test_head_dims_of_the_kernel(head_dim: int) -> None:
    """FC15, on the emulator: dims that TMA pads with zeros and clips."""
    qkv = random_qkv(batch=1, seqlen_q=64, seqlen_k=96, heads=2, kv_heads=1, head_dim=head_dim)
    assert_numbers_rule(*qkv, causal=True, backend="emulator")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seqlen_k", [1, 16, 300])
def test_lse_is_a_natural_logarithm(backend: str, seqlen_k: int) -> None:
    """FC19. pytorch/pytorch#181645 (off by ln 2), flashinfer-ai/flashinfer#4452, DA#2263."""
    for dtype in DTYPES if backend == "reference" else DTYPES[:1]:
        q, k, v = random_qkv(seqlen_q=70, seqlen_k=seqlen_k, kv_heads=4, dtype=dtype)
        out, lse = assert_numbers_rule(q, k, v, backend=backend)
        scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) / 8
        torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-3)
        assert torch.equal(fa4.attention(q, k, v, backend=backend), out)
        # n equal keys: lse = score + ln n
        k, v = (t[:, :1].expand(t.shape) for t in (k, v))
        lse = fa4.attention(q, k, v, return_lse=True, backend=backend)[1]
        closed = scores[..., 0] + math.log(seqlen_k)
        torch.testing.assert_close(lse, closed, rtol=0, atol=1e-3)


@pytest.mark.parametrize("which", ["out", "lse", "both"])
def test_lse_is_differentiable(which: str) -> None:
    """FC19: a loss of lse only, out only, and both."""
    qkv = random_qkv(batch=1, seqlen_q=5, seqlen_k=7, head_dim=6, dtype=torch.float64)
    qkv = tuple(t.requires_grad_() for t in qkv)

    def loss(*qkv: torch.Tensor) -> torch.Tensor:
        out, lse = fa4.attention(*qkv, causal=True, return_lse=True)
        return (out.sin().sum() if which != "lse" else 0) + (
            lse.cos().sum() if which != "out" else 0
        )

    assert torch.autograd.gradcheck(loss, qkv)


def test_causal_is_bottom_right() -> None:
    """The alignment that caches need: the last query sees every key."""
    q, k, v = random_qkv(seqlen_q=3, seqlen_k=40)
    out = fa4.attention(q, k, v, causal=True)
    dense = fa4.attention(q[:, -1:], k, v)
    torch.testing.assert_close(out[:, -1:], dense, rtol=2**-7, atol=1e-6)
    exact, _ = dense_attention(q[:, :1], k[:, :38], v[:, :38], causal=False, scale=0.125)
    torch.testing.assert_close(out[:, :1], exact, rtol=2**-5, atol=2**-8)
