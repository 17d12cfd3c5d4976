"""What the field tests share: backends as parameters, and gradients against the definition."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

import fa4
from tests.fa4.problems import QKV, dense_attention


def on_backends(cases: Iterable[Any], emulated: Iterable[Any] | None = None) -> list[Any]:
    """Parameters (backend, *case): each on the reference, and on the emulator, which is slow.

    emulated: the smaller cases that the emulator gets instead.
    """

    def values(backend: str, case: Any) -> tuple[Any, ...]:
        return (backend, *(case if isinstance(case, tuple) else (case,)))

    cases = list(cases)
    return [values("reference", case) for case in cases] + [
        pytest.param(*values("emulator", case), marks=pytest.mark.slow)
        for case in (cases if emulated is None else emulated)
    ]


BACKENDS = ["reference", pytest.param("emulator", marks=pytest.mark.slow)]
DTYPES = [torch.bfloat16, torch.float16]


def gradients(
    qkv: QKV, grad_out: torch.Tensor, *, causal: bool = False, grad_lse: torch.Tensor | None = None
) -> QKV:
    """(dq, dk, dv) of `fa4.attention`, whatever strides q, k and v have."""
    leaves = tuple(t.detach().requires_grad_() for t in qkv)
    out, lse = fa4.attention(*leaves, causal=causal, return_lse=True)
    if grad_lse is None:
        return torch.autograd.grad(out, leaves, grad_out)
    return torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))


def exact_gradients(
    qkv: QKV,
    grad_out: torch.Tensor,
    *,
    causal: bool = False,
    dtype: torch.dtype = torch.float64,
) -> QKV:
    """The same by the definition, each step in `dtype`."""
    leaves = tuple(t.detach().to(dtype).requires_grad_() for t in qkv)
    out, _ = dense_attention(*leaves, causal=causal, scale=qkv[0].shape[-1] ** -0.5)
    return torch.autograd.grad(out, leaves, grad_out.to(dtype))


def assert_gradients_hold(qkv: QKV, grad_out: torch.Tensor, *, causal: bool = False) -> QKV:
    """The numbers rule for gradients: against float64, beside the definition in q's dtype."""
    ours = gradients(qkv, grad_out, causal=causal)
    exact = exact_gradients(qkv, grad_out, causal=causal)
    plain = exact_gradients(qkv, grad_out, causal=causal, dtype=qkv[0].dtype)
    for name, a, b, p in zip("qkv", ours, exact, plain, strict=True):
        error, plains = (a.double() - b).abs(), (p.double() - b).abs()
        assert error.max() <= 1.5 * plains.max() + 1e-5, f"d{name}"
        assert error.square().mean() <= plains.square().mean() + 1e-14, f"d{name}"
    return ours


def refused(feature: str, **keywords: object) -> None:
    """A feature that is not there: refused on every backend, in the words of `fa4.supports`."""
    make = torch.Generator().manual_seed(1)
    qkv = [torch.randn(2, 32, 2, 64, generator=make, dtype=torch.bfloat16) for _ in range(3)]
    for backend in ("reference", "emulator"):
        answer = fa4.supports(feature, backend=backend)
        assert not answer and feature in answer.reason
        with pytest.raises(fa4.UnsupportedError) as caught:
            fa4.attention(*qkv, backend=backend, **keywords)
        assert str(caught.value) == answer.reason
    for gpu in ("b200", "gb300", "sm_90", "none"):
        assert feature in fa4.supports(feature, gpu=gpu).reason
