"""How far an attention result is from float64, beside PyTorch in the same dtype.

*Plain* is ``softmax((q @ k^T) * scale) @ v`` with every intermediate in the inputs' dtype. The
numbers rule: the largest error is at most 1.5 times plain's plus 1e-5, the RMS error at most
plain's, and the log-sum-exp is within 1e-3, plus two spacings of float32 at its magnitude (beyond
|LSE| = 8192 one spacing is 1e-3: no float32 can do better). Float32 inputs are computed in float32,
as plain's are, so neither can be the better one throughout: there the RMS error, too, is at most
1.5 times plain's. For float64 inputs plain is the yardstick itself, and the RMS error is at most
1e-12.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

ERROR_FACTOR, ERROR_FLOOR, LSE_TOLERANCE = 1.5, 1e-5, 1e-3
LSE_SPACINGS = 2 * 2.0**-23  # relative
FLOAT64_RMS = 1e-12
_ROWS = 1024  # queries at once: scores take _ROWS * seqlen_k elements


@dataclass(frozen=True)
class Errors:
    """Absolute errors against float64, infinite where one is finite or NaN and the other is not."""

    max_abs_error: float
    torch_max_abs_error: float
    rms_error: float
    torch_rms_error: float
    lse_max_abs_error: float
    dtype: torch.dtype
    lse_limit: float = LSE_TOLERANCE

    def broken_rules(self) -> list[str]:
        """Every part of the numbers rule that these errors break."""
        max_limit = ERROR_FACTOR * self.torch_max_abs_error + ERROR_FLOOR
        rms_limit, rms_rule = {
            2: (self.torch_rms_error, "plain's"),
            4: (ERROR_FACTOR * self.torch_rms_error, "1.5 x plain's"),
            8: (FLOAT64_RMS, "float64's limit"),
        }[self.dtype.itemsize]
        rules = [
            ("max error", self.max_abs_error, max_limit, "1.5 x plain's + 1e-5"),
            ("RMS error", self.rms_error, rms_limit, rms_rule),
            ("LSE error", self.lse_max_abs_error, self.lse_limit, "the tolerance"),
        ]
        return [
            f"{name} {value:.3g} is above {limit:.3g} ({what})"
            for name, value, limit, what in rules
            if not value <= limit
        ]

    def to_dict(self) -> dict[str, float | None]:
        """JSON-ready: null where an error is not finite."""
        left_out = ("dtype", "lse_limit")
        values = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


def materialised(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with the scores in memory and each step rounded to `dtype`.

    q: (batch, seqlen_q, heads, head_dim), k and v: (batch, seqlen_k, kv_heads, ...). Returns out
    (batch, seqlen_q, heads, head_dim_v) in `dtype` and lse (batch, heads, seqlen_q), at least
    float32; out 0 and lse -inf in a row that sees no key.
    """
    q, k, v = (t.detach().to(dtype).transpose(1, 2) for t in (q, k, v))
    share = q.shape[1] // k.shape[1]
    diagonal = k.shape[2] - q.shape[2]
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    key = torch.arange(k.shape[2], device=q.device)
    for b, h in ((b, h) for b in range(q.shape[0]) for h in range(q.shape[1])):
        k_KD, v_KD = k[b, h // share], v[b, h // share]
        for i0 in range(0, q.shape[2] if k.shape[2] else 0, _ROWS):
            scores = (q[b, h, i0 : i0 + _ROWS] @ k_KD.mT) * softmax_scale
            if causal:
                row = torch.arange(i0, i0 + scores.shape[0], device=q.device)
                scores.masked_fill_(key > row[:, None] + diagonal, -torch.inf)
            blind = (scores == -torch.inf).all(-1, keepdim=True)
            rows = slice(i0, i0 + scores.shape[0])
            out[b, h, rows] = scores.softmax(-1).masked_fill(blind, 0.0) @ v_KD
            lse[b, h, rows] = scores.to(wide).logsumexp(-1)
    return out.transpose(1, 2), lse


def measure(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float,
) -> Errors:
    """The errors of (out, lse), shaped as `fa4.attention` returns them, on these inputs."""
    exact, exact_lse = materialised(
        q, k, v, causal=causal, softmax_scale=softmax_scale, dtype=torch.float64
    )
    plain, _ = materialised(q, k, v, causal=causal, softmax_scale=softmax_scale, dtype=q.dtype)
    ours, theirs = _difference(out, exact), _difference(plain, exact)
    finite = exact_lse[exact_lse.isfinite()]
    largest_lse = float(finite.abs().max()) if finite.numel() else 0.0
    return Errors(
        _largest(ours),
        _largest(theirs),
        _rms(ours),
        _rms(theirs),
        _largest(_difference(lse, exact_lse)),
        q.dtype,
        LSE_TOLERANCE + LSE_SPACINGS * largest_lse,
    )


def _difference(x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """|x - exact|, 0 where both are the same infinity or both NaN, infinite where only one is."""
    x = x.detach().double()
    same = (x == exact) | (x.isnan() & exact.isnan())
    return (x - exact).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)


def _largest(difference: torch.Tensor) -> float:
    return float(difference.max()) if difference.numel() else 0.0


def _rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt()) if difference.numel() else 0.0
