"""`stand_in`: code that compiles and launches for itself, and torch's CUDA device, on the model."""

from __future__ import annotations

import gc
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import library

cute = pytest.importorskip("cutlass.cute")

import cutlass  # noqa: E402
from cutlass.cute.runtime import from_dlpack, make_ptr  # noqa: E402

from kernels.emulator import EmulationError, emulate, stand_in  # noqa: E402
from kernels.emulator.__main__ import main  # noqa: E402
from tests.emulator import capture_kernels as k  # noqa: E402

SCRIPT = Path(__file__).with_name("stand_in_script.py")


def numbers(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


# --- Compiled functions -------------------------------------------------------------------------


def test_a_compiled_function_runs_its_kernels_when_it_is_called():
    x, y = numbers(300), numbers(301)[:300]
    with stand_in("b200") as gpu:
        a, b = x.cuda(), y.cuda()
        out = torch.zeros_like(a)
        fast = cute.compile(
            k.axpy,
            *(cute_tensor(t) for t in (a, b, out)),
            cutlass.Float32(2.0),
            torch_stream(),
        )
        assert torch.equal(out.cpu(), torch.zeros(300)) and gpu.reports == []
        fast(
            *(cute_tensor(t) for t in (a, b, out)),
            cutlass.Float32(3.0),
            torch_stream(),
        )
        result = out.cpu()
    exact = x.double() * 3 + y.double()
    torch.testing.assert_close(result.double(), exact, rtol=0, atol=1e-6)
    (report,) = gpu.reports
    assert report.ok and report.launches[0].ctas == 5 and gpu.ok


def cute_tensor(tensor: torch.Tensor):
    return from_dlpack(tensor).mark_layout_dynamic()


def torch_stream():
    import cuda.bindings.driver as driver

    return driver.CUstream(torch.cuda.current_stream().cuda_stream)


def test_a_function_may_be_called_as_it_is():
    with stand_in() as gpu:
        values = numbers(100).cuda()
        k.Doubler()(cute_tensor(values), torch_stream())
        assert torch.equal(values.cpu(), numbers(100) * 2)
    assert [report.function for report in gpu.reports] != []


def test_pointers_reach_tensors_whose_address_was_asked_for():
    with stand_in():
        values = numbers(64).cuda()
        pointer = make_ptr(cutlass.Float32, values.data_ptr(), cute.AddressSpace.gmem)
        k.double_by_pointer(pointer, cutlass.Int32(64))
        assert torch.equal(values.cpu(), numbers(64) * 2)


def test_memory_that_nobody_showed_is_out_of_bounds():
    hidden = numbers(64)
    with stand_in(), pytest.raises(EmulationError, match="global_out_of_bounds"):
        pointer = make_ptr(cutlass.Float32, hidden.data_ptr(), cute.AddressSpace.gmem)
        k.double_by_pointer(pointer, cutlass.Int32(64))
    assert torch.equal(hidden, numbers(64))


def test_a_finding_raises_or_is_kept():
    with stand_in() as gpu, pytest.raises(EmulationError, match="global_out_of_bounds") as caught:
        k.doubles_beyond(cute_tensor(numbers(64).cuda()))
    assert caught.value.report is gpu.reports[0] and not gpu.ok
    with stand_in(keep_going=True) as gpu:
        k.doubles_beyond(cute_tensor(numbers(64).cuda()))
        k.Doubler()(cute_tensor(numbers(64).cuda()), torch_stream())
    assert [report.ok for report in gpu.reports] == [False, True]


def test_options_are_those_of_emulate():
    with stand_in("h100", schedule="random", seed=3, max_instructions=10**6) as gpu:
        k.Doubler()(cute_tensor(numbers(64).cuda()), torch_stream())
    (report,) = gpu.reports
    assert (report.gpu.name, report.schedule, report.seed) == ("h100", "random", 3)
    with (
        pytest.raises(ValueError, match="schedule='fifo' is not supported"),
        stand_in(schedule="fifo"),
    ):
        pass


# --- torch's device -----------------------------------------------------------------------------


def test_tensors_of_the_device_say_so_and_copies_are_copies():
    here = numbers(10)
    with stand_in():
        there = here.cuda()
        made = torch.zeros(3, device="cuda")
        assert there.is_cuda and made.device == torch.device("cuda", 0) and not here.is_cuda
        assert (there + 1).is_cuda and there[2:5].is_cuda and torch.empty_like(made).is_cuda
        assert there.to(torch.float64).is_cuda and not there.to("cpu").is_cuda
        assert there.max(dim=0).values.is_cuda and all(t.is_cuda for t in there.split(5))
        assert there.cuda() is there and there.data_ptr() != here.data_ptr()
        assert not torch.zeros(3).is_cuda and torch.zeros(2, 2).device.type == "cpu"
        there += 1
        back = there.cpu()
        back += 1
        assert made.get_device() == 0 and torch.cuda.get_device_capability() == (10, 0)
        assert there.data_ptr() % 256 == 0 and (there * 2).data_ptr() % 256 == 0
    assert torch.equal(there, here + 1) and torch.equal(back, here + 2)


def test_gradients_flow_through_tensors_of_the_device():
    with stand_in():
        w = numbers(8).cuda().requires_grad_()
        (w * w).sum().backward()
        assert w.grad is not None and w.grad.is_cuda
    assert torch.equal(w.grad, 2 * numbers(8))


def test_python_code_that_torch_calls_sees_the_device():
    """Of gradients and of operators: torch turns a function mode off while it runs them."""
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append((gradient.is_cuda, torch.empty(3, device="cuda").is_cuda))
            return gradient * 2

    with stand_in():

        @library.custom_op("stand_in_test::add_one", mutates_args=(), device_types="cuda")
        def add_one(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            seen.append((x.is_cuda, out.is_cuda))
            return out.copy_(x + 1)

        leaf = numbers(8).cuda().requires_grad_()
        Twice.apply(leaf).sum().backward()
        assert torch.equal(add_one(leaf.detach()).cpu(), numbers(8) + 1)
    assert seen == [(True, True), (True, True)]
    assert torch.equal(leaf.grad, torch.full((8,), 2.0))


def test_everything_is_put_back():
    from cutlass.cute import testing
    from cutlass.cutlass_dsl import CuTeDSL

    before = (
        torch.cuda.is_available,
        library.custom_op,
        testing.benchmark,
        vars(CuTeDSL._get_dsl()).get("compile_and_cache"),
        CuTeDSL._get_dsl().envar.keep_ptx,
    )
    with stand_in():
        assert torch.cuda.is_available()
        assert np.isnan(testing.benchmark(lambda: None, kernel_arguments=None))
    after = (
        torch.cuda.is_available,
        library.custom_op,
        testing.benchmark,
        vars(CuTeDSL._get_dsl()).get("compile_and_cache"),
        CuTeDSL._get_dsl().envar.keep_ptx,
    )
    assert before == after


def test_what_compiles_afterwards_keeps_no_ptx():
    """cute.compile remembers its options from call to call."""
    values = from_dlpack(numbers(64)).mark_layout_dynamic()
    with stand_in():
        cute.compile(k.double_all, cute_tensor(numbers(64).cuda()))
    assert cute.compile(k.double_all, values, no_jit_engine=True).__ptx__ is None


def test_memory_of_tensors_that_are_gone_is_no_memory_of_the_device():
    with stand_in():
        values = numbers(64).cuda()
        address = values.data_ptr()
        del values
        gc.collect()
        with pytest.raises(EmulationError, match="global_out_of_bounds"):
            pointer = make_ptr(cutlass.Float32, address, cute.AddressSpace.gmem)
            k.double_by_pointer(pointer, cutlass.Int32(64))


def test_memory_of_the_driver_is_the_devices():
    import cuda.bindings.driver as driver
    import cuda.bindings.runtime as runtime

    values = numbers(64).numpy().copy()
    back = np.empty_like(values)
    with stand_in():
        error, address = runtime.cudaMalloc(values.nbytes)
        assert error == runtime.cudaError_t.cudaSuccess and address % 256 == 0
        runtime.cudaMemset(address, 255, values.nbytes)
        driver.cuMemcpyHtoD(address, values.ctypes.data, values.nbytes // 2)
        pointer = make_ptr(cutlass.Float32, address, cute.AddressSpace.gmem)
        k.double_by_pointer(pointer, cutlass.Int32(64))
        driver.cuMemcpyDtoH(back.ctypes.data, address, values.nbytes)
        assert runtime.cudaFree(address) == (runtime.cudaError_t.cudaSuccess,)
        assert runtime.cudaFree(address) == (runtime.cudaError_t.cudaErrorInvalidValue,)
        with pytest.raises(EmulationError, match="global_out_of_bounds"):
            k.double_by_pointer(pointer, cutlass.Int32(64))
    assert (back[:32] == values[:32] * 2).all() and np.isnan(back[32:]).all()


# --- TVM-FFI ------------------------------------------------------------------------------------


def test_tvm_ffi_functions_take_torch_tensors():
    pytest.importorskip("tvm_ffi")
    with stand_in() as gpu:
        n = cute.sym_int()
        fake = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16)
        double = cute.compile(k.double_all, fake, options="--enable-tvm-ffi")
        for size in (64, 40):
            values = numbers(size).cuda()
            double(values)
            assert torch.equal(values.cpu(), numbers(size) * 2)
        with pytest.raises(Exception, match="(?i)mismatch|expected"):
            double(numbers(64).double().cuda())
    assert len(gpu.reports) == 2


def test_compiled_functions_run_in_the_stand_in_that_is_on():
    """Packages keep them; the tensors and the GPU are those of the moment."""
    with stand_in("b200") as first:
        values = cute_tensor(numbers(64).cuda())
        double = cute.compile(k.double_all, values)
        double(values)
    with pytest.raises(RuntimeError, match="inside of kernels.emulator.stand_in"):
        double(values)
    with stand_in("gb200", profile="isa") as second:
        again = numbers(64).cuda()
        double(cute_tensor(again))
        assert torch.equal(again.cpu(), numbers(64) * 2)
    with stand_in("h100"), pytest.raises(RuntimeError, match="compiled for b200.*is h100"):
        double(cute_tensor(numbers(64).cuda()))
    assert [len(first.reports), len(second.reports)] == [1, 1]
    assert second.reports[0].profile == "isa"


def test_functions_of_the_host_alone_run_on_the_host(capfd):
    """With TVM-FFI and without: they launch nothing, and nothing is emulated."""
    options = ["", "--enable-tvm-ffi"] if find_spec("tvm_ffi") else [""]
    with stand_in() as gpu:
        for option in options:
            n = cute.sym_int()
            fake = cute.runtime.make_fake_compact_tensor(
                cutlass.Float32, (n,), memspace=cute.AddressSpace.generic
            )
            shows = cute.compile(k.launches_nothing, fake, options=option)
            here = numbers(7)
            shows(here if option else from_dlpack(here).mark_layout_dynamic())
    assert gpu.reports == []
    assert capfd.readouterr().out.count("n = 7") == len(options)


# --- Scripts ------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch):
    """`python -m kernels.emulator run ...`, with what a script changes of the process put back."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return lambda *arguments: main(["run", *map(str, arguments)])


def test_a_script_runs_as_it_stands(command, capsys):
    assert command("--gpu", "b200", SCRIPT, "--n", "70") == 0
    captured = capsys.readouterr()
    assert "right" in captured.out
    assert "1 emulated call, 1 kernel" in captured.err and "no findings" in captured.err


def test_a_script_whose_kernel_is_wrong_is_told_where(command, capsys):
    assert command(SCRIPT, "--n", "70", "--beyond") == 1
    captured = capsys.readouterr()
    assert "right" not in captured.out
    assert "global_out_of_bounds" in captured.err and "capture_kernels.py:" in captured.err


def test_a_scripts_own_exit_status_and_errors_come_through(command, tmp_path, capsys):
    script = tmp_path / "leaves.py"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    assert command(script, 3) == 3
    script.write_text("raise SystemExit('no reason')")
    assert command(script) == 1 and "no reason" in capsys.readouterr().err
    script.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        command(script)
    script.write_text("raise KeyboardInterrupt")
    assert command(script) == 130 and "interrupted" in capsys.readouterr().err
    assert command(tmp_path / "nowhere.py") == 2


def test_what_is_not_modelled_is_named_with_its_line(command, tmp_path, capsys):
    script = tmp_path / "breaks.py"
    script.write_text(
        "import torch\n"
        "from cutlass.cute.runtime import from_dlpack\n"
        "from tests.emulator import capture_kernels as k\n"
        "k.breaks(from_dlpack(torch.zeros(4, device='cuda')).mark_layout_dynamic())\n"
    )
    assert command(script) == 1
    assert "not modelled" in (said := capsys.readouterr().err) and "capture_kernels.py:" in said
    assert "no findings" not in said


# --- emulate, with tensors and pointers of the caller's -----------------------------------------


def test_tensors_of_from_dlpack_keep_their_marks_and_lie_in_global_memory():
    values = numbers(64).reshape(8, 8)
    marked = from_dlpack(values, assumed_align=16).mark_compact_shape_dynamic(1, divisibility=8)
    assert emulate(k.double_rows, marked).ok
    assert torch.equal(values, numbers(64).reshape(8, 8) * 2)
    assert "gmem" in str(marked.__cache_key__) and "div=8" in str(marked.__cache_key__)


def test_memory_names_tensors_behind_pointers():
    values = numbers(64)
    pointer = make_ptr(cutlass.Float32, values.data_ptr(), cute.AddressSpace.gmem)
    report = emulate(k.double_by_pointer, pointer, cutlass.Int32(64))
    assert [finding.code for finding in report.findings] == ["global_out_of_bounds"]
    assert emulate(k.double_by_pointer, pointer, cutlass.Int32(64), memory=[values]).ok
    assert torch.equal(values, numbers(64) * 2)
    with pytest.raises(TypeError, match=r"memory\[0\]: 3 is not a tensor"):
        emulate(k.double_by_pointer, pointer, cutlass.Int32(64), memory=[3])
    with pytest.raises(TypeError, match="memory: a Tensor; pass a list"):
        emulate(k.double_by_pointer, pointer, cutlass.Int32(64), memory=values)


def test_shared_memory_that_nothing_wrote_is_a_finding_or_poison():
    x, out = numbers(40), torch.zeros(40)
    (finding,) = emulate(k.through_shared, x, out, False).findings
    assert finding.code == "smem_unwritten_read" and "capture_kernels.py" in finding.source
    for profile in ("silicon", "isa"):
        assert emulate(k.through_shared, x, out, False, unwritten="poison", profile=profile).ok
        assert torch.equal(out, x + 1)
    assert emulate(k.through_shared, x, out, True, unwritten="poison").ok
    assert torch.equal(out[:-1], x[1:] + 1) and out[-1].isnan()
    with pytest.raises(ValueError, match="unwritten='zero' is not supported"):
        emulate(k.through_shared, x, out, False, unwritten="zero")
