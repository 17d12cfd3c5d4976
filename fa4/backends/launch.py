"""What both kernel backends share: operands, outputs, and the cases that launch nothing."""

from __future__ import annotations

import torch

from fa4.backends import Result
from fa4.problem import DTYPES, AttentionProblem
from kernels.common.plan import KernelPlan

# cuTensorMapEncodeTiled (CUDA driver API): the address and every stride are multiples of 16 bytes.
TMA_ALIGNMENT_BYTES = 16


def outputs(
    problem: AttentionProblem, device: torch.device, *, fill: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous (out, lse) for a kernel to write; `fill` shows what it leaves unwritten."""
    out = torch.empty(problem.out_shape, dtype=DTYPES[problem.dtype], device=device)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=device)
    if fill is not None:
        out.fill_(fill)
        lse.fill_(fill)
    return out, lse


def without_keys(problem: AttentionProblem, plan: KernelPlan, device: torch.device) -> Result:
    """The result where there is nothing to launch: no query, or no key for any."""
    out, lse = outputs(problem, device, fill=0.0)
    return Result(out, lse.fill_(-torch.inf), plan)


def operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as the kernel may read them, without autograd, copied only where they must be.

    K and V whose heads are all one head (stride 0) become that head: the kernel shares a key head
    among query heads anyway.
    """
    q, k, v = (t.detach().resolve_neg() for t in (q, k, v))
    if k.shape[2] > 1 and k.stride(2) == v.stride(2) == 0:
        k, v = k[:, :, :1], v[:, :, :1]
    return _readable(q), _readable(k), _readable(v)


def _readable(t: torch.Tensor) -> torch.Tensor:
    """(batch, seqlen, heads, head_dim) as a tensor map can describe it; a contiguous copy if not.

    A dimension of size 1 has no stride that matters, but a tensor map checks it all the same: it
    gets the stride that a contiguous tensor has there.
    """
    size = t.element_size()
    aligned = t.data_ptr() % TMA_ALIGNMENT_BYTES == 0 and t.stride(-1) == 1
    strides = list(t.stride())
    inner = t.shape[-1]
    for dim in (2, 1, 0):
        if t.shape[dim] == 1:
            strides[dim] = inner
        aligned &= strides[dim] > 0 and strides[dim] * size % TMA_ALIGNMENT_BYTES == 0
        inner = max(inner, strides[dim] * t.shape[dim])
    if not aligned:
        return t.clone(memory_format=torch.contiguous_format)
    return t.as_strided(t.shape, strides)
