"""What is asked: shapes, dtypes and masks, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

# The names that plans, the command line and error texts use.
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
_ALIASES |= {"float": "float32", "fp64": "float64", "double": "float64"}


def dtype_name(dtype: str | torch.dtype) -> str:
    """``torch.bfloat16``, ``"bf16"`` and ``"bfloat16"`` are all ``"bfloat16"``.

    A dtype that attention does not know keeps its own name, for the support rules to refuse.
    """
    name = str(dtype).removeprefix("torch.").lower()
    return _ALIASES.get(name, name)


@dataclass(frozen=True)
class AttentionProblem:
    """One call of attention: ``out = softmax(q @ k^T * softmax_scale + mask) @ v``.

    Sizes are counts, batch and sequence lengths may be 0. ``dtype`` is a name ("bfloat16"),
    ``device`` a kind ("cpu", "cuda"). ``causal`` aligns bottom-right: query i sees key j where
    ``j <= i + seqlen_k - seqlen_q``. ``needs_grad`` says that autograd will ask for gradients.
    Raises ValueError naming every broken rule.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    device: str
    causal: bool
    softmax_scale: float
    needs_grad: bool = False

    def __post_init__(self) -> None:
        at_least = {"batch": 0, "seqlen_q": 0, "seqlen_k": 0}
        at_least |= {"heads": 1, "kv_heads": 1, "head_dim": 1, "head_dim_v": 1}
        _raise_broken(
            f"{name} is {getattr(self, name)}: at least {least}"
            for name, least in at_least.items()
            if getattr(self, name) < least
        )

    @classmethod
    def from_tensors(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
    ) -> AttentionProblem:
        """The problem that tensors pose.

        q: (batch, seqlen_q, heads, head_dim); k: (batch, seqlen_k, kv_heads, head_dim);
        v: (batch, seqlen_k, kv_heads, head_dim_v). softmax_scale: None is 1 / sqrt(head_dim).
        Raises TypeError for what is no tensor, bool or number, else ValueError naming every
        broken rule.
        """
        tensors = {"q": q, "k": k, "v": v}
        _check_types(tensors, causal, softmax_scale)
        _raise_broken([*_rank_faults(tensors), *_kind_faults(tensors)])
        _raise_broken(_shape_faults(tensors))
        batch, seqlen_q, heads, head_dim = q.shape
        if softmax_scale is None:
            softmax_scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0
        if not math.isfinite(softmax_scale):
            raise ValueError(f"softmax_scale is {softmax_scale}: it must be finite")
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        return cls(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=k.shape[1],
            heads=heads,
            kv_heads=k.shape[2],
            head_dim=head_dim,
            head_dim_v=v.shape[3],
            dtype=dtype_name(q.dtype),
            device=q.device.type,
            causal=causal,
            softmax_scale=float(softmax_scale),
            needs_grad=needs_grad,
        )

    def __str__(self) -> str:
        q = (self.batch, self.seqlen_q, self.heads, self.head_dim)
        k = (self.batch, self.seqlen_k, self.kv_heads, self.head_dim)
        v = (*k[:3], self.head_dim_v)
        mask = "causal" if self.causal else "dense"
        return (
            f"attention {mask} {self.dtype}: q {q}, k {k}, v {v} as (batch, seqlen, heads, "
            f"head_dim), softmax_scale {self.softmax_scale:.6g}"
        )

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """(batch, seqlen_q, heads, head_dim_v)"""
        return self.batch, self.seqlen_q, self.heads, self.head_dim_v

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """(batch, heads, seqlen_q)"""
        return self.batch, self.heads, self.seqlen_q

    @property
    def is_empty(self) -> bool:
        """Whether no query sees any key, so that there is nothing to compute."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k)


def _check_types(tensors: dict[str, Any], causal: object, softmax_scale: object) -> None:
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}: give a torch.Tensor")
    if not isinstance(causal, bool):
        raise TypeError(f"causal is a {type(causal).__name__}: give True or False")
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, Real | None):
        # A tensor would have to be read from its device, which waits for the device.
        kind = type(softmax_scale).__name__
        raise TypeError(f"softmax_scale is a {kind}: give a Python number, or None")


def _rank_faults(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Nested and sparse tensors have no strides to read, whatever their rank."""
    layout = "(batch, seqlen, heads, head_dim)"
    faults = []
    for name, t in tensors.items():
        if t.is_nested or t.layout is not torch.strided:
            kind = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
            faults.append(f"{name} is a {kind} tensor: give a dense one, {layout}")
        elif t.dim() != 4:
            faults.append(f"{name} has shape {tuple(t.shape)}: rank 4 is needed, {layout}")
    return faults


def _kind_faults(tensors: dict[str, torch.Tensor]) -> list[str]:
    faults = []
    for what, kinds in {
        "dtype": {name: dtype_name(t.dtype) for name, t in tensors.items()},
        "device": {name: str(t.device) for name, t in tensors.items()},
    }.items():
        if len(set(kinds.values())) > 1:
            given = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
            faults.append(f"mixed {what}s ({given}): q, k and v must share one {what}")
    return faults


def _shape_faults(tensors: dict[str, torch.Tensor]) -> list[str]:
    dims = {name: dict(zip("BSHD", t.shape, strict=True)) for name, t in tensors.items()}
    words = {"B": "batch", "S": "seqlen", "H": "heads", "D": "head_dim"}
    equal = [("k", "q", "B"), ("v", "k", "B"), ("v", "k", "S"), ("v", "k", "H"), ("k", "q", "D")]
    return [
        f"{a} has {words[dim]} {dims[a][dim]} and {b} has {dims[b][dim]}: they must be equal"
        f" ({a} {tuple(tensors[a].shape)}, {b} {tuple(tensors[b].shape)})"
        for a, b, dim in equal
        if dims[a][dim] != dims[b][dim]
    ]


def _raise_broken(faults: Any) -> None:
    text = "; ".join(faults)
    if text:
        raise ValueError(text)
