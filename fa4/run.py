"""``fa4 run``: attention on real or random input, checked against float64, with its budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fa4 import accuracy, api, support
from fa4.arch import gpu_name
from fa4.backends import Result
from fa4.errors import UnsupportedError
from fa4.inputs import QKV
from fa4.problem import AttentionProblem
from fa4.progress import ProgressBar


@dataclass(frozen=True)
class Outcome:
    """One run. `seconds`: emulating, or the call itself. `gpu`: None for the reference."""

    problem: AttentionProblem
    backend: str
    gpu: str | None
    result: Result
    seconds: float
    errors: accuracy.Errors
    budget: Any
    budget_with_exp2_split: Any

    @property
    def findings(self) -> list[dict[str, Any]]:
        """The emulator's findings, JSON-ready."""
        report = self.result.report
        return list(report.to_dict()["findings"]) if report else []

    @property
    def faults(self) -> list[str]:
        """Why this run is not good: findings, and parts of the numbers rule that do not hold."""
        report = self.result.report
        bad = report is not None and not report.ok
        return [*(["the emulator has findings"] if bad else []), *self.errors.broken_rules()]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; null for what this backend does not have, and for what is not finite."""
        report, plan = self.result.report, self.result.plan
        return {
            **self.errors.to_dict(),
            "ok": not self.faults,
            "findings": self.findings,
            "thread_instructions": report.thread_instructions if report else None,
            "seconds": self.seconds,
            "backend": self.backend,
            "gpu": self.gpu,
            "problem": {
                name: getattr(self.problem, name)
                for name in ("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads")
                + ("head_dim", "head_dim_v", "dtype", "causal", "softmax_scale")
            },
            "plan": plan.to_dict() if plan else None,
            "budget": self.budget.to_dict() if self.budget else None,
        }

    def __str__(self) -> str:
        parts = [_work(self), _error_table(self.errors)]
        if self.budget:
            parts.append(_budget_text(self))
        parts.append("FAILED: " + "; ".join(self.faults) if self.faults else "ok")
        return "\n\n".join(parts)


def run(
    qkv: QKV,
    *,
    causal: bool,
    backend: str,
    gpu: str | None,
    plan_fields: dict[str, Any],
    seed: int,
    emulation: dict[str, Any] | None = None,
    show_progress: bool | None = None,
    announce: Callable[[str], None] = print,
) -> Outcome:
    """Run attention on CPU tensors, and measure it. Errors are those of `fa4.attention`.

    backend "auto" is this machine's GPU where the kernel runs on it, else the emulator.
    emulation: more options of `kernels.emulator.emulate`, for the emulator only.
    announce: is given the problem and the plan as text, before anything runs.
    """
    problem = AttentionProblem.from_tensors(*qkv, causal=causal)
    backend = _resolve(problem, backend, gpu)
    if backend == "reference" and plan_fields:
        raise ValueError(
            f"plan fields {', '.join(plan_fields)} with backend 'reference', which has no plan: "
            "use backend 'emulator' or 'cuda', or leave them out"
        )
    if emulation and backend != "emulator":
        raise ValueError(
            f"{', '.join(emulation)} with backend {backend!r}: these are the emulator's; use "
            "backend 'emulator', or leave them out"
        )
    inputs = _on_gpu(qkv) if backend == "cuda" else qkv
    options: dict[str, Any] = {}
    start = time.perf_counter()
    with ProgressBar(f"emulating {gpu or api.DEFAULT_GPU}", show_progress) as bar:
        if backend == "emulator":
            options = {"progress": bar, "seed": seed, **(emulation or {})}
        result = api.run(
            *inputs,
            causal=causal,
            softmax_scale=None,
            backend=backend,
            gpu=gpu,
            plan_fields=plan_fields,
            announce=lambda plan: announce(f"{problem}\n\n{plan}\n"),
            **options,
        )
    if backend == "cuda":
        torch.cuda.synchronize()
    if result.plan is None:
        announce(f"{problem}\n")
    seconds = time.perf_counter() - start
    if result.report is not None:
        seconds = result.report.seconds
    errors = accuracy.measure(
        *qkv,
        result.out.cpu(),
        result.lse.cpu(),
        causal=causal,
        softmax_scale=problem.softmax_scale,
    )
    name = result.plan.gpu if result.plan else None
    return Outcome(problem, backend, name, result, seconds, errors, *_budgets(result))


def _resolve(problem: AttentionProblem, backend: str, gpu: str | None) -> str:
    """The backend of a run; an explicit one is checked by `fa4.attention`."""
    support.check_backend(backend)
    if gpu is not None:
        gpu_name(gpu)
    if backend != "auto":
        return backend
    arch = support.detect_arch()
    fits = arch in support.KERNEL_ARCHS and support.supports(
        gpu=str(arch),
        backend="cuda",
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
    )
    return "cuda" if fits and gpu is None else "emulator"


def _on_gpu(qkv: QKV) -> QKV:
    """The tensors on this machine's GPU; UnsupportedError where there is none."""
    if support.detect_arch() is None:
        raise UnsupportedError(support.supports(gpu="none", backend="cuda").reason)
    q, k, v = (t.cuda() for t in qkv)
    return q, k, v


def _budgets(result: Result) -> tuple[Any, Any]:
    """(as published, with the plan's share of exp2 on the FMA pipe), of the tile that was used."""
    plan = result.plan
    if plan is None:
        return None, None
    from roofline.budgets import budget

    dtype = {"bfloat16": "bf16", "float16": "fp16"}[plan.dtype]
    published, split = (
        budget(
            plan.gpu,
            plan.tile_q,
            plan.tile_n,
            plan.head_dim_padded,
            ctas=plan.ctas,
            dtype=dtype,
            exp2_emulated_share=share,
        )
        for share in (0.0, plan.exp2_realised_share)
    )
    return published, split


def _error_table(e: accuracy.Errors) -> str:
    title = "error against float64"
    lines = [
        f"{title:24}{'ours':>12}{'plain PyTorch':>16}",
        f"{'  out, largest':24}{e.max_abs_error:>12.3e}{e.torch_max_abs_error:>16.3e}",
        f"{'  out, RMS':24}{e.rms_error:>12.3e}{e.torch_rms_error:>16.3e}",
        f"{'  lse, largest':24}{e.lse_max_abs_error:>12.3e}",
    ]
    return "\n".join(lines)


def _work(outcome: Outcome) -> str:
    report = outcome.result.report
    if report is not None:
        return str(report)
    if outcome.result.plan and outcome.problem.is_empty:
        return f"{outcome.backend}: no query sees a key, nothing was launched"
    return f"{outcome.backend}: {outcome.seconds:.3f} s"


def _budget_text(outcome: Outcome) -> str:
    plan, split = outcome.result.plan, outcome.budget_with_exp2_split
    text = str(outcome.budget)
    if plan is not None and plan.exp2_realised_share:
        text += (
            f"\n\nwith this plan's {plan.exp2_realised_share:.1%} of exp2 on the FMA pipe: "
            f"MMA {split.mma}, SMEM {split.smem}, exp {split.exp} cycles; {split.bound} binds"
        )
    return text
