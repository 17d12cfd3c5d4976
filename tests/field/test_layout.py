"""How tensors lie in memory must not change what attention computes."""

from __future__ import annotations

import pytest
import torch

import fa4
from tests.fa4.problems import assert_numbers_rule, random_qkv
from tests.field.cases import BACKENDS, DTYPES, assert_gradients_hold, gradients

STORAGE = {"(B,H,S,D)": (0, 2, 1, 3), "(S,B,H,D)": (1, 0, 2, 3)}


def _stored(t: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same values, stored with the dimensions in another order."""
    view = t.permute(order).contiguous().permute(torch.tensor(order).argsort().tolist())
    assert torch.equal(view, t) and (view.stride() != t.stride() or 1 in t.shape)
    return view


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, DTYPES[0]), (128, DTYPES[1])])
def test_strided_storage_first_and_cached_call(
    backend: str, storage: str, head_dim: int, dtype: torch.dtype
) -> None:
    """FC01. DA#2665, DA#2886, DA#2545, NVIDIA/TransformerEngine#3216.

    A contiguous copy, the view, and the view again, so that a compile cache is hit.
    """
    qkv = random_qkv(seqlen_q=160, seqlen_k=160, head_dim=head_dim, dtype=dtype)
    views = tuple(_stored(t, STORAGE[storage]) for t in qkv)
    exact = assert_numbers_rule(*qkv, causal=True, backend=backend)
    for _ in range(2):
        for a, b in zip(
            fa4.attention(*views, causal=True, backend=backend, return_lse=True),
            exact,
            strict=True,
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_strided_storage_backward(storage: str, head_dim: int, causal: bool) -> None:
    """FC01, backward: dq was five times too large with (S,B,H,D) storage and batch 2."""
    qkv = random_qkv(seqlen_q=130, seqlen_k=130, heads=8, head_dim=head_dim, seed=1)
    grad_out = random_qkv(seqlen_q=130, heads=8, head_dim=head_dim, seed=2)[0]
    exact = assert_gradients_hold(qkv, grad_out, causal=causal)
    views = tuple(_stored(t, STORAGE[storage]) for t in (*qkv, grad_out))
    for _ in range(2):
        ours = gradients(views[:3], views[3], causal=causal)
        assert all(torch.equal(a, b) for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seqlen_k", [64, 65, 97])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_broadcast_inputs_do_not_poison_a_cache(backend: str, seqlen_k: int, head_dim: int) -> None:
    """FC02. DA PR#2298, DA PR#2745, pytorch/pytorch#191937.

    Heads expanded from one, then dense, then expanded again; a batch of 1 with stride 0, then of 4;
    a batch of 4 expanded from 1.
    """
    sizes = {"seqlen_k": seqlen_k, "heads": 8, "kv_heads": 8, "head_dim": head_dim}

    def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        copies = [t.clone(memory_format=torch.contiguous_format) for t in (q, k, v)]
        exact = assert_numbers_rule(*copies, backend=backend)
        ours = fa4.attention(q, k, v, backend=backend, return_lse=True)
        for a, b in zip(ours, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6 if backend == "reference" else 0)

    q, k, v = random_qkv(batch=1, **sizes)
    heads = [t[:, :, :1].expand(t.shape) for t in (k, v)]
    assert heads[0].stride(2) == 0
    check(q, *heads)
    check(q, k, v)
    check(q, *heads)
    check(*(t.as_strided(t.shape, (0, *t.stride()[1:])) for t in (q, k, v)))
    if backend == "reference" or (seqlen_k, head_dim) == (65, 64):
        four = random_qkv(batch=4, seed=3, **sizes)
        check(*four)
        check(four[0], *(t[:1].expand(t.shape) for t in four[1:]))


def test_gradients_of_expanded_inputs_come_back_summed() -> None:
    """FC02, backward: autograd sums the slots of an expanded input."""
    q, k, v = random_qkv(heads=8, kv_heads=8, dtype=torch.float64)
    one = [t[:, :, :1].clone().requires_grad_() for t in (k, v)]
    wide = [t[:, :, :1].expand(t.shape).contiguous().requires_grad_() for t in (k, v)]
    fa4.attention(q, *(t.expand(k.shape) for t in one)).square().sum().backward()
    fa4.attention(q, *wide).square().sum().backward()
    for a, b in zip(one, wide, strict=True):
        torch.testing.assert_close(a.grad, b.grad.sum(2, keepdim=True), rtol=1e-12, atol=1e-12)
