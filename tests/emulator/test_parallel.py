"""emulate(processes=N): the grid shared out over forked workers."""

import importlib
import multiprocessing
import sys
import threading

import cutlass
import cutlass.cute as cute
import pytest
import torch

from kernels.blackwell.gemm import ROLES, Gemm
from kernels.emulator import emulate


@cute.kernel
def scale_kernel(x: cute.Tensor, out: cute.Tensor, stride: cutlass.Int32):
    block, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    out[block * stride + thread] = x[block * 64 + thread] * 2.0


@cute.jit
def scale(x: cute.Tensor, out: cute.Tensor, stride: cutlass.Int32, stream):
    """CTA b writes 64 values from b * stride on: below 64 the CTAs share writes."""
    grid = (x.shape[0] // 64, 1, 1)
    scale_kernel(x, out, stride).launch(grid=grid, block=(64, 1, 1), stream=stream)


@pytest.mark.parametrize("processes", [2, 3, 16])
def test_results_are_those_of_one_process(processes: int) -> None:
    a, b = torch.randn(300, 136).bfloat16(), torch.randn(200, 136).bfloat16()
    alone, shared = torch.full((2, 300, 200), torch.nan)
    one = emulate(Gemm(), a, b, alone, roles=ROLES)
    several = emulate(Gemm(), a, b, shared, roles=ROLES, processes=processes)
    assert one.ok and several.ok, f"{one}\n{several}"
    assert torch.equal(alone, shared) and not shared.isnan().any()
    assert one.thread_instructions == several.thread_instructions
    assert one.launches[0].ctas == several.launches[0].ctas == 6


def test_progress_reaches_the_end_and_never_goes_back() -> None:
    x, seen = torch.randn(64 * 9), []
    report = emulate(scale, x, torch.zeros(64 * 9), 64, processes=2, progress=seen.append)
    assert report.ok and seen == sorted(seen) and seen[-1] == 1.0 and len(seen) >= 9


def test_shared_writes_are_refused_and_nothing_is_written() -> None:
    x, out = torch.randn(64 * 4) + 5, torch.zeros(64 * 4)
    with pytest.raises(ValueError, match="share global writes; use processes=1"):
        emulate(scale, x, out, 32, processes=2)
    assert (out == 0).all()


@cute.kernel
def hand_over_kernel(x: cute.Tensor, out: cute.Tensor):
    block, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    if block == 0:
        x[thread] = -x[thread]
    else:
        out[(block - 1) * 64 + thread] = x[thread]


@cute.jit
def hand_over(x: cute.Tensor, out: cute.Tensor, stream):
    """CTA 0 writes what the others read, with nothing between them."""
    grid = (out.shape[0] // 64 + 1, 1, 1)
    hand_over_kernel(x, out).launch(grid=grid, block=(64, 1, 1), stream=stream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_that_another_process_reads_are_refused(dtype: torch.dtype) -> None:
    x, out = torch.randn(64).to(dtype), torch.zeros(64 * 3, dtype=dtype)
    before = x.clone()
    (finding,) = emulate(hand_over, before.clone(), out.clone()).findings
    assert finding.code == "global_race"
    with pytest.raises(ValueError, match="another process changed.*use processes=1"):
        emulate(hand_over, x, out, processes=2)
    assert torch.equal(x, before) and (out == 0).all()


def test_the_finding_is_the_first_in_grid_order() -> None:
    """The last CTAs write beyond the end; the earliest of them is reported, whoever ran it."""
    x, out = torch.randn(64 * 6), torch.zeros(64 * 4)
    codes = []
    for processes in (1, 2, 3):
        report = emulate(scale, x, out, 64, processes=processes)
        (finding,) = report.findings
        codes.append((finding.code, finding.cta))
    assert codes == [("global_out_of_bounds", (4, 0, 0))] * 3


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupt_ends_the_run_and_says_what_the_tensors_hold(processes: int) -> None:
    x, out = torch.randn(64 * 64), torch.zeros(64 * 64)

    def interrupt(fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        emulate(scale, x, out, 64, processes=processes, progress=interrupt)
    (note,) = raised.value.__notes__
    if processes == 1:
        assert "partial" in note and 0 < int((out != 0).sum()) < out.numel()
    else:
        assert "as they were" in note and (out == 0).all()
    assert not multiprocessing.active_children()


def test_workers_run_the_machine_even_if_a_test_had_replaced_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The module that forks is imported when it is first needed; the machine may be a stand-in at
    that moment, and a name bound to it would outlive it."""
    with monkeypatch.context() as patch:
        patch.setattr("kernels.emulator.machine.run_launch", lambda *_, **__: None)
        patch.delitem(sys.modules, "kernels.emulator.parallel", raising=False)
        fresh = importlib.import_module("kernels.emulator.parallel")
    monkeypatch.setitem(sys.modules, "kernels.emulator.parallel", fresh)
    x, out = torch.randn(64 * 4), torch.zeros(64 * 4)
    assert emulate(scale, x, out, 64, processes=2).ok
    assert torch.equal(out, 2 * x)


def test_workers_do_their_work_beside_other_threads() -> None:
    """Threads that run Python and torch while workers fork."""
    stop = threading.Event()

    def busy() -> None:
        values = torch.randn(64, 64)
        while not stop.is_set():
            values = torch.tanh(values @ values)

    threads = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
    x, out = torch.randn(64 * 4), torch.zeros(64 * 4)
    for thread in threads:
        thread.start()
    try:
        assert emulate(scale, x, out, 64, processes=3).ok
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert torch.equal(out, 2 * x)
