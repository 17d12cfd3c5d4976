"""From what is asked to how it is done: the kernel's plan for a problem."""

from __future__ import annotations

from typing import Any

from fa4.problem import AttentionProblem
from kernels.common.plan import KernelPlan


def plan_of(problem: AttentionProblem, gpu: str, **fields: Any) -> KernelPlan:
    """The plan of the forward kernel; `fields` replaces plan fields.

    gpu: a GPU name. Raises `kernels.common.plan.PlanError`, a ValueError, naming every broken rule.
    """
    return KernelPlan.forward(
        gpu=gpu,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        causal=problem.causal,
        **fields,
    )
