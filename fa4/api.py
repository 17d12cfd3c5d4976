"""`attention`: the problem, the backend that fits it, and the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fa4.arch import Arch, gpu_name
from fa4.backends import Result, launch
from fa4.errors import UnsupportedError
from fa4.features import features_asked
from fa4.plan import plan_of
from fa4.problem import AttentionProblem
from fa4.support import check, check_backend
from kernels.common.plan import KernelPlan

DEFAULT_GPU = "b200"


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    gpu: str | None = None,
    **features: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q @ k^T * softmax_scale + mask) @ v, one head of k and v for heads / kv_heads of q.

    q: (batch, seqlen_q, heads, head_dim). k: (batch, seqlen_k, kv_heads, head_dim).
    v: (batch, seqlen_k, kv_heads, head_dim_v). One dtype, one device. Inputs are never modified.

    causal: query i sees key j where j <= i + seqlen_k - seqlen_q (aligned bottom-right).
    softmax_scale: a finite number; None is 1 / sqrt(head_dim).
    return_lse: return (out, lse) instead of out.
    backend: "auto" is the reference for CPU tensors and the kernel for tensors on a GPU.
      "reference": PyTorch, float32 arithmetic (float64 for float64), any device, differentiable.
      "emulator": the Blackwell kernel on a modelled SM, CPU tensors, bfloat16 and float16.
      "cuda": the Blackwell kernel, bfloat16 and float16.
    gpu: the model that the emulator takes, a GPU name or sm_*; None is "b200".
    features: keywords that other libraries know (``window_size``, ``cu_seqlens_q``, ``dropout_p``);
      a value that means "off" is accepted, anything else is refused with the reason.

    The kernels read tensors in place where the last dimension is contiguous, the other strides are
    positive multiples of 16 bytes and so is the address; else they read a copy. Heads expanded from
    one (stride 0) are read in place too.

    Returns out (batch, seqlen_q, heads, head_dim_v) in q's dtype, contiguous; lse (batch, heads,
    seqlen_q), natural log, float32 (float64 for float64 inputs). A row that sees no key gives
    out 0, lse -inf and no gradient.

    Raises, before any compile or launch: UnsupportedError for what `fa4.supports` answers no to;
    ValueError and TypeError for what is wrong with the arguments, naming each. EmulationError,
    holding the report, where the emulator finds a defect in the kernel.
    """
    result = run(
        q,
        k,
        v,
        causal=causal,
        softmax_scale=softmax_scale,
        backend=backend,
        gpu=gpu,
        features=features_asked(features),
    )
    if result.report is not None:
        result.report.raise_if_findings()
    return (result.out, result.lse) if return_lse else result.out


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    backend: str,
    gpu: str | None,
    features: tuple[str, ...] = (),
    plan_fields: Mapping[str, Any] | None = None,
    announce: Callable[[KernelPlan], None] | None = None,
    **options: Any,
) -> Result:
    """What `attention` and ``fa4 run`` share; a finding of the emulator does not raise here.

    plan_fields: fields of the kernel's plan to set. announce: is given the plan before anything
    is compiled. options: ``progress`` and ``seed``, for the emulator.
    """
    check_backend(backend)
    problem = AttentionProblem.from_tensors(q, k, v, causal=causal, softmax_scale=softmax_scale)
    backend = _resolve(backend, problem, q)
    arch = _arch_of(backend, q, gpu)
    check(problem, backend, arch, features)
    if backend == "reference":
        from fa4.backends import reference

        return reference.forward(problem, q, k, v)
    model = gpu_name((gpu or DEFAULT_GPU) if backend == "emulator" else str(arch))
    plan = plan_of(problem, model, **(plan_fields or {}))
    if announce is not None:
        announce(plan)
    if problem.is_empty:
        return launch.without_keys(problem, plan, q.device)
    if backend == "emulator":
        from fa4.backends import emulator

        return emulator.forward(problem, plan, q, k, v, **options)
    from fa4.backends import cuda

    return cuda.forward(problem, plan, q, k, v)


def _resolve(backend: str, problem: AttentionProblem, q: torch.Tensor) -> str:
    """The backend of these tensors; "auto" follows the device."""
    if backend == "auto":
        backend = {"cpu": "reference", "cuda": "cuda"}.get(problem.device, "")
        if not backend:
            raise UnsupportedError(
                f"tensors on {q.device}: backend 'auto' knows cpu and cuda; "
                "use backend='reference', which runs on any device"
            )
    wanted = {"emulator": "cpu", "cuda": "cuda"}.get(backend, problem.device)
    if problem.device != wanted:
        raise UnsupportedError(
            f"tensors on {q.device}: backend {backend!r} takes {wanted} tensors; "
            f"move them with .to({wanted!r}) or use backend='reference'"
        )
    return backend


def _arch_of(backend: str, q: torch.Tensor, gpu: str | None) -> Arch | None:
    """The architecture that the kernel is for. A `gpu` that would be ignored is an error."""
    if backend == "emulator":
        return Arch.parse(gpu or DEFAULT_GPU)
    if gpu is not None:
        Arch.parse(gpu)
        raise ValueError(
            f"gpu {gpu!r} with backend {backend!r}: gpu picks the emulator's model; "
            "add backend='emulator' or leave gpu out"
        )
    if backend == "reference":
        return None
    major, minor = torch.cuda.get_device_capability(q.device)
    return Arch(10 * major + minor)
