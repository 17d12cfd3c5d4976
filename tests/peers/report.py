"""What the emulator says of other authors' kernels: `python -m tests.peers.report`.

One line a kernel: its size, the error against float64 beside plain PyTorch's, and the first finding
under each profile. Needs the packages (``pip install .[peers]``).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from fa4.accuracy import measure
from tests.peers import attention, gemm

Measured = tuple[Any, float, float]  # report, largest error, plain PyTorch's


def _attention(problem: attention.Problem, gpu: str, **options: Any) -> Measured:
    report, out, lse = attention.run(problem, gpu, **options)
    q, k, v = problem.tensors()
    errors = measure(q, k, v, out, lse, causal=problem.causal, softmax_scale=problem.scale)
    return report, errors.max_abs_error, errors.torch_max_abs_error


def _gemm(problem: gemm.Problem, gpu: str, **options: Any) -> Measured:
    report, out = gemm.run(problem, gpu, **options)
    a, b = problem.tensors()
    exact = a.double() @ b.double().T
    plain = (a @ b.T).to(problem.out_dtype)
    ours, theirs = ((x.double() - exact).abs().max().item() for x in (out, plain))
    return report, ours, theirs


def cases() -> list[tuple[str, Callable[..., Measured], Any, str]]:
    """(package, runner, problem, gpu) of every kernel that tests/peers runs."""
    from tests.peers import test_flash_attention as fa
    from tests.peers import test_quack as quack

    listed = [("flash-attn-4", _attention, problem, "b200") for problem in fa.BLACKWELL]
    listed.append(("flash-attn-4", _attention, fa.SMALL, "b300"))
    listed += [("flash-attn-4", _attention, problem, "h100") for problem in fa.HOPPER]
    listed += [("quack", _gemm, problem, "b200") for problem in quack.BLACKWELL]
    listed += [("quack", _gemm, problem, "h100") for problem in quack.HOPPER]
    return listed


def _first_finding(report: Any) -> str:
    codes = [finding.code for launch in report.launches for finding in launch.findings]
    return codes[0] if codes else "none"


def main() -> int:
    warnings.simplefilter("ignore")  # the DSL's, about what the packages import
    torch.set_num_threads(1)
    print(f"{'kernel':62} {'M instr':>8} {'s':>6} {'error':>8} {'plain':>8}  silicon / isa")
    failed = False
    for package, measured, problem, gpu in cases():
        report, error, plain = measured(problem, gpu)
        strict, _, _ = measured(problem, gpu, profile="isa")
        findings = f"{_first_finding(report)} / {_first_finding(strict)}"
        millions = report.thread_instructions / 1e6
        print(
            f"{f'{package} {gpu} {problem}':62} {millions:8.2f} {report.seconds:6.2f}"
            f" {error:8.5f} {plain:8.5f}  {findings}",
            flush=True,
        )
        failed |= not report.ok
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
