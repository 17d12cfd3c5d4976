# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: a second kernel that starts before the first has ended."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import pytest
import torch

from kernels.emulator import emulate

THREADS = 64


@cute.kernel
def first(x: cute.Tensor, middle: cute.Tensor):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    cute.arch.griddepcontrol_launch_dependents()
    middle[i] = x[i] * 2.0


@cute.kernel
def second(x: cute.Tensor, middle: cute.Tensor, out: cute.Tensor, how: cutlass.Constexpr):
    tid = cute.arch.thread_idx()[0]
    i = cute.arch.block_idx()[0] * THREADS + tid
    own = x[i]  # of no concern to the first kernel
    if cutlass.const_expr(how == "all wait"):
        cute.arch.griddepcontrol_wait()
    if cutlass.const_expr(how in ("one warp waits", "one warp waits for all")):
        if tid < 32:
            cute.arch.griddepcontrol_wait()
    if cutlass.const_expr(how == "one warp waits for all"):
        cute.arch.sync_threads()
    if cutlass.const_expr(how == "overwrites"):
        x[i] = own + 1.0
        cute.arch.griddepcontrol_wait()
    out[i] = middle[i] + own
    if cutlass.const_expr(how == "waits too late"):
        cute.arch.griddepcontrol_wait()


@cute.jit
def both(
    x: cute.Tensor,
    middle: cute.Tensor,
    out: cute.Tensor,
    how: cutlass.Constexpr,
    pdl: cutlass.Constexpr,
):
    grid = (cute.size(x) // THREADS, 1, 1)
    first(x, middle).launch(grid=grid, block=(THREADS, 1, 1))
    second(x, middle, out, how).launch(grid=grid, block=(THREADS, 1, 1), use_pdl=pdl)


def run(how: str, pdl: bool = True, **options):
    x = torch.randn(128, generator=torch.Generator().manual_seed(1))
    middle, out = torch.zeros(128), torch.zeros(128)
    want = x * 3
    report = emulate(both, x, middle, out, how, pdl, **options)
    return report, out, want


@pytest.mark.parametrize("gpu", ["b200", "h100"])
@pytest.mark.parametrize("profile", ["silicon", "isa"])
@pytest.mark.parametrize("how", ["all wait", "one warp waits for all"])
def test_who_waits_may_read(how, profile, gpu):
    report, out, want = run(how, profile=profile, gpu=gpu)
    assert report.ok, str(report)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
@pytest.mark.parametrize("how", ["nobody waits", "waits too late", "one warp waits", "overwrites"])
def test_results_of_the_launch_before_need_the_wait(how, schedule):
    report, *_ = run(how, schedule=schedule)
    (finding,) = report.launches[1].findings
    assert finding.code == "grid_dependency_not_waited"
    assert "test_grid_dependency.py" in finding.source
    other = finding.details["other"]
    assert other["access"] == ("read" if how == "overwrites" else "write")
    assert "test_grid_dependency.py" in other["source"] and "first" in other["agent"]


def test_an_ordinary_launch_comes_after_the_one_before():
    report, out, want = run("nobody waits", pdl=False)
    assert report.ok, str(report)
    torch.testing.assert_close(out, want)
