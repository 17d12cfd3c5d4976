"""Attention in PyTorch: exact, blockwise, differentiable, on any device.

16-bit and float32 inputs are computed in float32, float64 in float64. Memory is linear in the
sequence lengths. The forward on the CPU is PyTorch's own flash kernel; see `flash_cpu`.
"""

from __future__ import annotations

from typing import Any

import torch

from fa4.backends import Result, blockwise, flash_cpu
from fa4.errors import UnsupportedError
from fa4.problem import AttentionProblem


def forward(problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
    """Attention, differentiable in q, k and v, through out and through lse.

    lse is float32, and float64 for float64 inputs. A row that sees no key gives out 0, lse -inf and
    no gradient; one whose visible keys all score -inf (infinite inputs) is NaN with lse -inf, as
    softmax has it.
    """
    scale = problem.softmax_scale
    if scale < 0:  # the flash kernel masks before it scales, and -inf must stay -inf
        q, scale = -q, -scale
    elif scale == 0:  # a product, not zeros: NaN in q stays NaN, and gradients have their shape
        q, scale = q * 0, 1.0
    out, lse = _Attention.apply(q, k, v, problem.causal, scale)
    return Result(out.to(q.dtype), lse)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _heads_first(t: torch.Tensor) -> torch.Tensor:
    """(batch, seqlen, heads, dim) -> (batch, heads, seqlen, dim) in the arithmetic's dtype."""
    return t.transpose(1, 2).to(compute_dtype(t.dtype))


class _Attention(torch.autograd.Function):
    """(q, k, v) -> (out, lse), both in the dtype of the arithmetic.

    out leaves unrounded because the backward needs it so; the caller rounds it to q's dtype.
    """

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_, k_, v_ = (_heads_first(t) for t in (q, k, v))
        kernel = flash_cpu if flash_cpu.applies(q_, k_, v_) else blockwise
        out, lse = kernel.forward(q_, k_, v_, causal=causal, scale=scale)
        queries, keys = q_.shape[2], k_.shape[2]
        blind = max(queries - keys, 0) if causal or not keys else 0
        out = _nan_where_weightless(out, lse, blind)
        return _owned(out.transpose(1, 2)), _owned(lse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        q, k, v, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return None, None, None, None, None
        grads = _Gradients.apply(grad_out, grad_lse, *ctx.saved_tensors, ctx.causal, ctx.scale)
        return *grads, None, None


class _Gradients(torch.autograd.Function):
    """(gradients of out and lse, what the forward saved) -> (dq, dk, dv); itself once only.

    A Function of its own so that a second derivative is refused where it is asked for: it depends
    on q, k and v also when the incoming gradients need none.
    """

    @staticmethod
    def forward(
        grad_out: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, ...]:
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grads = blockwise.backward(
            grad_out.transpose(1, 2),
            grad_lse,
            _heads_first(q),
            _heads_first(k),
            _heads_first(v),
            out.transpose(1, 2),
            lse,
            causal=causal,
            scale=scale,
        )
        return tuple(_owned(g.transpose(1, 2).to(q.dtype)) for g in grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * 9
        raise UnsupportedError(
            "a second derivative of fa4.attention: the reference has first derivatives only; use"
            " torch.nn.functional.scaled_dot_product_attention with its MATH backend"
        )


def _nan_where_weightless(out: torch.Tensor, lse: torch.Tensor, blind: int) -> torch.Tensor:
    """out (B, H, Sq, D) with NaN in the rows, from ``blind`` on, whose lse is -inf: they see keys,
    but none has weight. The first ``blind`` rows see none, and stay 0."""
    weightless = lse.isneginf()
    weightless[:, :, :blind] = False
    if lse.is_meta or weightless.any():  # a meta tensor has no values to look at
        return out.masked_fill(weightless.unsqueeze(-1), torch.nan)
    return out


def _owned(t: torch.Tensor) -> torch.Tensor:
    """Contiguous, and no view: autograd lets nobody change a Function's view in place."""
    t = t.contiguous()
    return t if t._base is None else t.clone()
