"""PyTorch's flash attention for CPUs, within the rules it keeps silent about.

The operator behind `torch.nn.functional.scaled_dot_product_attention` on a CPU also returns the
log-sum-exp. Called directly it checks little: an empty sequence divides by zero, a last dimension
that is not contiguous is read as if it were, its causal mask is aligned top-left, and where all
scores are -inf its log-sum-exp is 0. This file gives it only what it computes rightly. Its own
backward is not used: it takes one thread for one head, and no gradient of the log-sum-exp
(`blockwise.backward` is about ten times as fast there).
"""

from __future__ import annotations

import torch

from fa4.backends import blockwise


def applies(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the operator can take these (batch, heads, seqlen, dim) tensors."""
    nothing = 0 in q.shape or 0 in k.shape
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and not nothing


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: (B, H, Sq, D); k, v: (B, Hkv, Sk, D); float32 or float64; scale > 0; causal bottom-right.

    Returns out (B, H, Sq, D) and lse (B, H, Sq), natural log.
    """
    ahead = k.shape[2] - q.shape[2]  # keys that every query sees
    if not causal or (q.shape[2] == 1 and ahead >= 0):
        return _flash(q, k, v, False, scale)
    if ahead < 0:  # the first queries see no key
        seen, lse_seen = _flash(q[:, :, -ahead:], k, v, True, scale)
        out = q.new_zeros(q.shape)
        lse = q.new_full(q.shape[:3], -torch.inf)
        out[:, :, -ahead:] = seen
        lse[:, :, -ahead:] = lse_seen
        return out, lse
    square = _flash(q, k[:, :, ahead:], v[:, :, ahead:], True, scale)
    if ahead == 0:
        return square
    return _merge(_flash(q, k[:, :, :ahead], v[:, :, :ahead], False, scale), square)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One call; a causal mask needs as many queries as keys, where both alignments agree."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _matrix(q), _matrix(k), _matrix(v), 0.0, causal, scale=scale
    )
    at_zero = lse == 0
    if at_zero.any() and (at_zero & (out == 0).all(-1)).any():
        # Either scores and values that are 0, or a row of scores that are all -inf, for which the
        # operator says 0 as well.
        return blockwise.forward(q, k, v, causal=causal, scale=scale)
    return out, lse


def _matrix(t: torch.Tensor) -> torch.Tensor:
    """The tensor with (seqlen, dim) as BLAS reads a matrix; a copy where it lies otherwise.

    BLAS wants contiguous rows, one at least a row's length after the other; an expanded or
    transposed tensor has other strides, and so may a dimension of size 1.
    """
    if t.stride(-1) == 1 and t.stride(-2) >= t.shape[-1]:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _merge(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys from that over each."""
    lse = torch.logaddexp(a[1], b[1])
    # Where neither set has weight the difference would be NaN; both outputs are 0 there.
    floor = lse.masked_fill(lse == -torch.inf, 0.0)
    out = a[0] * (a[1] - floor).exp_().unsqueeze(-1)
    return out.addcmul_(b[0], (b[1] - floor).exp_().unsqueeze(-1)), lse
