"""The Blackwell kernel on a GPU: compiled once a plan, launched on PyTorch's current stream."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fa4.backends import Result, launch
from fa4.dependencies import require
from fa4.problem import AttentionProblem
from kernels.common.plan import KernelPlan


def forward(
    problem: AttentionProblem,
    plan: KernelPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> Result:
    """Attention on q's device, without waiting for it. No extent of the problem is 0.

    Operands that had to be copied are freed in stream order by PyTorch's allocator, which knows
    them to be of the current stream.
    """
    kernel = _compiled(plan)
    with torch.cuda.device(q.device):
        out, lse = launch.outputs(problem, q.device)
        stream = torch.cuda.current_stream().cuda_stream
        kernel(*arguments(*launch.operands(q, k, v), out, lse, problem.softmax_scale, stream))
    return Result(out, lse, plan)


@lru_cache(maxsize=64)
def _compiled(plan: KernelPlan) -> Any:
    """The kernel of a plan, for tensors of any shape and stride."""
    require("nvidia-cutlass-dsl", "cuda-python")
    from kernels.blackwell.forward import compile_forward

    return compile_forward(plan)


def arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    stream: int,
) -> tuple[Any, ...]:
    """What a compiled kernel takes: tensors of dynamic shape, float32, CUstream.

    Shapes are 32 bit and strides 64 bit, as the kernel was compiled for. Rows of lse are
    contiguous; it is read as it lies, 4 bytes aligned.
    """
    from cuda.bindings.driver import CUstream
    from cutlass import Float32
    from cutlass.cute.runtime import from_dlpack

    tensors = [(t, launch.TMA_ALIGNMENT_BYTES) for t in (q, k, v, out)] + [(lse, 4)]
    views = [
        from_dlpack(t, assumed_align=align).mark_layout_dynamic(leading_dim=t.dim() - 1)
        for t, align in tensors
    ]
    return (*views, Float32(softmax_scale), CUstream(stream))
