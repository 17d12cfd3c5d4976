"""An emulator that computes with the reference, to test what stands around the real one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

import fa4
from kernels.emulator.findings import Finding
from kernels.emulator.gpus import gpu_model
from kernels.emulator.host_runtime import Launch
from kernels.emulator.report import LaunchReport, Report


class FakeEmulator:
    """Stands in for `kernels.emulator.emulate`; `calls` has the keyword arguments of each call.

    findings: what it reports. spoil: called with (out, lse) when they are computed.
    """

    def __init__(
        self,
        *findings: Finding,
        spoil: Callable[[torch.Tensor, torch.Tensor], object] = lambda out, lse: None,
    ) -> None:
        self.findings = findings
        self.spoil = spoil
        self.calls: list[Any] = []

    def __call__(self, fn: Any, *args: Any, **options: Any) -> Report:
        q, k, v, out, lse, scale, stream = args
        assert stream is None and out.isnan().all() and lse.isnan().all()
        usual = ("gpu", "seed", "roles", "progress")
        more = {name: value for name, value in options.items() if name not in usual}
        call = SimpleNamespace(plan=fn.plan, qkv=(q, k, v), options=more, **options)
        self.calls.append(call)
        scale = float(scale.value)
        given = fa4.attention(q, k, v, causal=fn.plan.causal, softmax_scale=scale, return_lse=True)
        out.copy_(given[0])
        lse.copy_(given[1])
        self.spoil(out, lse)
        if options["progress"]:
            for fraction in (0.0, 0.5, 1.0):
                options["progress"](fraction)
        launch = Launch("forward", (2, 1, 1), (512, 1, 1), (1, 1, 1), 1024, 0, ())
        ran = LaunchReport(launch, self.findings, thread_instructions=1000, ctas=2, seconds=0.5)
        return Report("AttentionForward", gpu_model(options["gpu"]), (ran,))


FINDING = Finding("smem_unwritten_read", "byte 16 of Q was read before it was written", role="mma")
