"""From what is asked to how it is done: the kernel's plan for a problem, and why it is that one.

The roofline chooses (`roofline.choose`): tile, stages, CTAs, registers, share of exp2, tile order.
No choice depends on sequence lengths, batch or heads, so that one compiled kernel serves them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fa4.problem import AttentionProblem
from kernels.common.plan import FORWARD_ARCHS, GPU_ARCHS, KernelPlan

if TYPE_CHECKING:
    from roofline.choice import Choice


def plan_of(problem: AttentionProblem, gpu: str, **fields: Any) -> KernelPlan:
    """The plan of the forward kernel; `fields` replaces plan fields.

    gpu: a GPU name. Raises `kernels.common.plan.PlanError`, a ValueError, naming every broken rule.
    """
    return make_plan(gpu, problem.dtype, problem.head_dim, problem.causal, fields)


def make_plan(
    gpu: str, dtype: str, head_dim: int, causal: bool, fields: Mapping[str, Any]
) -> KernelPlan:
    """The plan for a GPU name, a dtype such as "bfloat16", a head dimension and a mask."""
    chosen: dict[str, Any] = {}
    if GPU_ARCHS.get(gpu) in FORWARD_ARCHS:
        from roofline.choice import chosen_fields

        chosen = chosen_fields(gpu, head_dim, dtype=dtype, causal=causal)
    return KernelPlan.forward(
        gpu=gpu, dtype=dtype, head_dim=head_dim, causal=causal, **(chosen | dict(fields))
    )


@dataclass(frozen=True)
class Explained:
    """A plan with the reasons of the roofline. plan: None where this GPU has no kernel, and then
    `instead` says what runs. asked: plan fields that the caller set."""

    choice: Choice
    plan: KernelPlan | None
    asked: tuple[str, ...]
    instead: str

    @property
    def reasons(self) -> dict[str, str]:
        """A sentence by decision; what the caller set is said to be so."""
        names = {"softmax_registers": "registers", "tile_m": "tile", "tile_n": "tile"}
        set_by_caller = {names.get(field, field) for field in self.asked}
        found = dict(self.choice.reasons)
        for name in set_by_caller & set(found):
            found[name] = f"as asked; chosen would be: {found[name]}"
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the plan's own fields, and "why"; without a kernel "kernel" is false."""
        choice = self.choice.to_dict()
        why = {
            "kernel": self.plan is not None,
            "no_kernel": choice["no_kernel"],
            "instead": self.instead or None,
            "reasons": self.reasons,
            "problem": choice["problem"],
            "tiles": choice["tiles"],
        }
        plan = {"gpu": self.choice.gpu.name, "arch": self.choice.gpu.arch}
        return (plan if self.plan is None else self.plan.to_dict()) | {"why": why}

    def __str__(self) -> str:
        from roofline.text import reasons_text, tiles_text

        parts = []
        if self.plan is not None:
            parts.append(str(self.plan))
        else:
            gpu = self.choice.gpu
            parts += [f"No kernel for {gpu.name} ({gpu.arch}): {'; '.join(self.choice.no_kernel)}"]
            parts += [f"What runs there: {self.instead}"]
        if self.reasons:
            parts.append("Why\n" + reasons_text(self.reasons))
        parts.append("Tiles, " + tiles_text(self.choice.ranking, TOP))
        return "\n\n".join(parts)


#: Tiles that an explanation lists.
TOP = 5


def explain(
    gpu: str, dtype: str, head_dim: int, causal: bool, fields: Mapping[str, Any]
) -> Explained:
    """The plan for a GPU name and the reasons. ValueError as `make_plan` and `roofline.choose`.

    On a GPU without a kernel (Hopper) there is no plan: what the roofline would pick, and which
    backend runs.
    """
    from roofline.choice import choose

    plan, instead = None, ""
    if GPU_ARCHS.get(gpu) in FORWARD_ARCHS:
        plan = make_plan(gpu, dtype, head_dim, causal, fields)
    elif fields:
        raise ValueError(
            f"plan fields {', '.join(fields)} on {gpu}: there is no kernel to set them; leave them "
            "out to see what roofline would pick"
        )
    else:
        from fa4.support import supports

        answer = supports(gpu=gpu, dtype=dtype, head_dim=head_dim)
        instead = f"the PyTorch reference; a call with tensors on the GPU says: {answer.reason}"
    choice = choose(gpu, head_dim, dtype=dtype, causal=causal)
    return Explained(choice, plan, tuple(fields), instead)
