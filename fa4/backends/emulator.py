"""The Blackwell kernel on the emulator: CPU tensors, the PTX that a B200 would run."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    *,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    **emulation: Any,
) -> Result:
    """Attention as the kernel computes it, with the emulator's report.

    No extent of the problem is 0. seed: of the emulator's scheduler. progress: called with the
    fraction done. emulation: more options of `kernels.emulator.emulate`. Outputs start as NaN, so
    that what the kernel leaves unwritten shows. The emulator keeps compiled kernels by plan.
    """
    require("nvidia-cutlass-dsl", "numpy", "llvmlite")
    from cutlass import Float32

    from kernels.blackwell.forward import AttentionForward
    from kernels.emulator import emulate

    out, lse = launch.outputs(problem, q.device, fill=math.nan)
    report = emulate(
        AttentionForward(plan),
        *launch.operands(q, k, v),
        out,
        lse,
        Float32(problem.softmax_scale),
        None,
        gpu=plan.gpu,
        seed=seed,
        roles=plan.role_of_warp(),
        progress=progress,
        **emulation,
    )
    return Result(out, lse, plan, report)
