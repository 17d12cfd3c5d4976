"""Attention in blocks with PyTorch's matrix products, forward and backward, on any device.

arXiv 2205.14135 (FlashAttention), algorithms 1 and 4, with a gradient for the log-sum-exp. Shapes:
B batch, H query heads, G = H // Hkv heads that share a key head, N = B * Hkv such groups. A block
takes the G * rows queries of a group as one matrix, so that K and V are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# 2 Mi scores in float32 are 8 MiB, about a CPU core's share of cache; three such buffers are live.
_BLOCK_ROWS, _BLOCK_KEYS, _BLOCK_SCORES = 512, 1024, 2**21


@dataclass(frozen=True)
class _Block:
    """Groups [n0, n1), their queries [i0, i1) and keys [j0, j1)."""

    n: slice
    i: slice
    j: slice
    diagonal: int | None  # key j is seen by query i where j - i <= diagonal; None: all are

    def hide_unseen(self, s_NRK: torch.Tensor) -> torch.Tensor:
        """Scores (N, G * rows, keys) with -inf where a causal mask hides the key; in place."""
        if self.diagonal is None or self.j.stop - 1 - self.i.start <= self.diagonal:
            return s_NRK
        row = torch.arange(self.i.start, self.i.stop, device=s_NRK.device)
        key = torch.arange(self.j.start, self.j.stop, device=s_NRK.device)
        unseen = key - row[:, None] > self.diagonal
        s_NGrK = s_NRK.view(s_NRK.shape[0], -1, *unseen.shape)
        return s_NGrK.masked_fill_(unseen, -torch.inf).view_as(s_NRK)


def _row_blocks(q_NGSD: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """(groups, queries) of each block of rows."""
    groups, share, seqlen, _ = q_NGSD.shape
    if not seqlen:
        return
    rows = min(seqlen, max(1, _BLOCK_ROWS // share))
    at_once = max(1, _BLOCK_SCORES // (rows * share * _BLOCK_KEYS))
    for n0 in range(0, groups, at_once):
        for i0 in range(0, seqlen, rows):
            yield slice(n0, min(n0 + at_once, groups)), slice(i0, min(i0 + rows, seqlen))


def _blocks_of_row(n: slice, i: slice, keys: int, diagonal: int | None) -> Iterator[_Block]:
    """The blocks of keys that these queries see, from the first key on."""
    seen = keys if diagonal is None else min(keys, i.stop + diagonal)
    for j0 in range(0, seen, _BLOCK_KEYS):
        yield _Block(n, i, slice(j0, min(j0 + _BLOCK_KEYS, seen)), diagonal)


def _split(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(B, H, S, D) -> (N, G, S, D)"""
    batch, heads, seqlen, dim = q.shape
    return q.reshape(batch * kv_heads, heads // kv_heads, seqlen, dim)


def _rows(x_NGSD: torch.Tensor, n: slice, i: slice) -> torch.Tensor:
    """(N, G, S, D) -> (n, G * rows, D)"""
    return x_NGSD[n, :, i].flatten(1, 2)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: (B, H, Sq, D); k: (B, Hkv, Sk, D); v: (B, Hkv, Sk, Dv); causal aligns bottom-right.

    Returns out (B, H, Sq, Dv) and lse (B, H, Sq), natural log.
    """
    batch, kv_heads, keys, _ = k.shape
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full(q.shape[:3], -torch.inf)
    q_NGSD = _split(q, kv_heads)
    k_NKD, v_NKD = (x.reshape(batch * kv_heads, keys, x.shape[3]) for x in (k, v))
    out_NGSD, lse_NGS1 = _split(out, kv_heads), _split(lse.unsqueeze(-1), kv_heads)
    diagonal = keys - q.shape[2] if causal else None
    for n, i in _row_blocks(q_NGSD):
        q_NRD = _rows(q_NGSD, n, i) * scale
        m = q_NRD.new_full((*q_NRD.shape[:2], 1), -torch.inf)  # row maximum so far
        total = torch.zeros_like(m)  # row sum of exp(score - m)
        acc = q_NRD.new_zeros(*q_NRD.shape[:2], v.shape[3])
        for block in _blocks_of_row(n, i, keys, diagonal):
            s = block.hide_unseen(torch.bmm(q_NRD, k_NKD[n, block.j].mT))
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            floor = m_new.masked_fill(m_new == -torch.inf, 0.0)  # else -inf - -inf is NaN
            p = s.sub_(floor).exp_()
            shrink = (m - floor).exp_()
            total = total.mul_(shrink).add_(p.sum(-1, keepdim=True))
            acc = acc.mul_(shrink).baddbmm_(p, v_NKD[n, block.j])
            m = m_new
        weightless = total == 0
        acc = (acc / total).masked_fill_(weightless, 0.0)
        shape = out_NGSD[n, :, i].shape
        out_NGSD[n, :, i] = acc.view(shape)
        lse_NGS1[n, :, i] = (
            (m + total.log()).masked_fill_(weightless, -torch.inf).view(*shape[:3], 1)
        )
    return out, lse


def backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), shaped as q, k and v, from the forward's tensors and both gradients.

    With p = exp(s - lse), an output gradient gives ds = p * (dp - rowsum(grad_out * out)), and
    since d lse / d s = p, a gradient of lse adds p * grad_lse.
    """
    batch, kv_heads, keys, _ = k.shape
    delta = (grad_out * out).sum(-1)
    if grad_lse is not None:
        delta -= grad_lse
    # A row without weight has lse -inf; p = exp(s - inf) = 0 gives it no gradient.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    q_NGSD, do_NGSD = _split(q, kv_heads), _split(grad_out, kv_heads)
    lse_NGS1, delta_NGS1 = (_split(x.unsqueeze(-1), kv_heads) for x in (lse, delta))
    k_NKD, v_NKD = (x.reshape(batch * kv_heads, keys, x.shape[3]) for x in (k, v))
    dq_NGSD = torch.zeros_like(q_NGSD, memory_format=torch.contiguous_format)
    dk_NKD, dv_NKD = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k_NKD, v_NKD)
    )
    diagonal = keys - q.shape[2] if causal else None
    for n, i in _row_blocks(q_NGSD):
        q_NRD, do_NRD = _rows(q_NGSD, n, i) * scale, _rows(do_NGSD, n, i)
        lse_NR1, delta_NR1 = _rows(lse_NGS1, n, i), _rows(delta_NGS1, n, i)
        dq_NRD = torch.zeros_like(q_NRD)
        for block in _blocks_of_row(n, i, keys, diagonal):
            k_block, v_block = k_NKD[n, block.j], v_NKD[n, block.j]
            s = block.hide_unseen(torch.bmm(q_NRD, k_block.mT))
            p = s.sub_(lse_NR1).exp_()
            dv_NKD[n, block.j].baddbmm_(p.mT, do_NRD)
            ds = torch.bmm(do_NRD, v_block.mT).sub_(delta_NR1).mul_(p)
            dq_NRD.baddbmm_(ds, k_block)
            dk_NKD[n, block.j].baddbmm_(ds.mT, q_NRD)  # q_NRD carries the scale
        dq_NGSD[n, :, i] = (dq_NRD * scale).view(dq_NGSD[n, :, i].shape)
    return dq_NGSD.view(q.shape), dk_NKD.view(k.shape), dv_NKD.view(v.shape)
