"""Arguments as other authors' kernels take them, and host code that asks about its GPU."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch

cutlass = pytest.importorskip("cutlass")

import cuda.bindings.driver as cuda  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass.base_dsl.dsl import BaseDSL  # noqa: E402
from cutlass.cutlass_dsl import CuTeDSL  # noqa: E402
from cutlass.utils import HardwareInfo  # noqa: E402

import kernels.emulator as emulator  # noqa: E402
from kernels.emulator import CaptureError, capture, emulate  # noqa: E402
from tests.emulator import capture_kernels as k  # noqa: E402

THREADS = 64


@cute.kernel
def affine_kernel(x: cute.Tensor, out: cute.Tensor, scale: cutlass.Float32, shift: cutlass.Float32):
    i = cute.arch.thread_idx()[0]
    out[i] = x[i] * scale + shift


class Operands(NamedTuple):
    """Tensors, a value of the launch, and one that is folded into the code."""

    x: cute.Tensor
    out: cute.Tensor
    scale: cutlass.Float32
    shift: cutlass.Constexpr[int] = 0
    extra: cute.Tensor | None = None

    def __new_from_mlir_values__(self, values):
        return Operands(*values[:3], self.shift)


@cute.jit
def from_named_tuple(operands: Operands):
    affine_kernel(operands.x, operands.out, operands.scale, cutlass.Float32(operands.shift)).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1)
    )


@dataclass(frozen=True)
class Bundle:
    x: cute.Tensor
    out: cute.Tensor
    scale: cutlass.Float32
    shift: cutlass.Constexpr[int]


@cute.jit
def from_dataclass(bundle: Bundle):
    affine_kernel(bundle.x, bundle.out, bundle.scale, cutlass.Float32(bundle.shift)).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1)
    )


@cute.jit
def with_defaults(
    x: cute.Tensor,
    out: cute.Tensor,
    mask: cute.Tensor | None = None,
    window: int | None = None,
    stream: cuda.CUstream = None,
):
    affine_kernel(x, out, 1.0, 0.5).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@pytest.mark.parametrize(("host", "pack"), [(from_named_tuple, Operands), (from_dataclass, Bundle)])
def test_tensors_inside_tuples_and_dataclasses(host, pack):
    x, out = torch.randn(THREADS), torch.zeros(THREADS)
    for scale, shift in ((2.0, 3), (-0.5, 3), (2.0, 7)):
        given = pack(x, out, cutlass.Float32(scale), shift)
        report = emulator.emulate(host, given)
        assert report.ok, str(report)
        torch.testing.assert_close(out, x * scale + shift)
        assert given.x is x  # the caller's object is as it was


def test_the_key_knows_what_is_folded_into_the_code():
    x, out = torch.randn(THREADS), torch.zeros(THREADS)

    def key(pack, *values):
        host = from_named_tuple if pack is Operands else from_dataclass
        return capture.HostArguments(host, (pack(x, out, *values),)).key

    one, two = cutlass.Float32(1.0), cutlass.Float32(2.0)
    for pack in (Operands, Bundle):
        assert key(pack, one, 3) == key(pack, two, 3)
        assert key(pack, one, 3) != key(pack, one, 4)
    assert key(Operands, one, 3) != key(Bundle, one, 3)


def test_memory_is_named_by_where_the_tensor_was_found():
    x, out = torch.randn(THREADS), torch.zeros(THREADS)
    named = capture.HostArguments(from_named_tuple, (Operands(x, out, cutlass.Float32(1)),))
    assert {a.name for a in named.allocations} == {"operands[0]", "operands[1]"}
    bundled = capture.HostArguments(from_dataclass, (Bundle(x, out, cutlass.Float32(1), 0),))
    assert {a.name for a in bundled.allocations} == {"bundle.x", "bundle.out"}


def test_a_stream_behind_defaults_is_the_default_stream():
    x, out = torch.randn(THREADS), torch.zeros(THREADS)
    [launch] = capture.compile(with_defaults, x, out).launch(x, out)
    assert launch.stream == 0
    [launch] = capture.compile(with_defaults, x, out).launch(x, out, None, None, 5)
    assert launch.stream == 5
    with pytest.raises(TypeError, match="out"):
        capture.compile(with_defaults, x)


@cute.jit
def as_wide_as_the_gpu(out: cute.Tensor):
    """As persistent kernels do: one CTA on every SM."""
    info = HardwareInfo()
    grid = (info.get_device_multiprocessor_count(), info.get_max_active_clusters(2), 1)
    affine_kernel(out, out, 1.0, 0.0).launch(grid=grid, block=(THREADS, 1, 1))


@pytest.mark.parametrize(("gpu", "sms"), [("h100", 132), ("b200", 148), ("gb200", 152)])
def test_host_code_sees_the_modelled_gpu(gpu, sms):
    out = torch.zeros(THREADS)
    [launch] = capture.compile(as_wide_as_the_gpu, out, gpu=gpu).launch(out)
    assert launch.grid == (sms, sms // 2, 1)


def test_what_host_code_sees_is_put_back():
    dsls = [BaseDSL._get_dsl(), CuTeDSL._get_dsl()]
    before = [(vars(HardwareInfo).copy(), dsl.envar._arch) for dsl in dsls]
    with emulator.host_sees("h100") as outer:
        assert outer.name == "h100"
        assert {str(dsl.get_arch_enum()) for dsl in dsls} == {"sm_90a"}
        with emulator.host_sees("sm_103a"):
            assert {str(dsl.get_arch_enum()) for dsl in dsls} == {"sm_103a"}
            assert HardwareInfo().get_device_multiprocessor_count() == 148
        assert HardwareInfo().get_max_active_clusters(4) == 132 // 4
    with pytest.raises(KeyError), emulator.host_sees("b300"):
        raise KeyError
    assert [(vars(HardwareInfo).copy(), dsl.envar._arch) for dsl in dsls] == before
    with pytest.raises(ValueError, match="no such GPU"), emulator.host_sees("v100"):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="HardwareInfo answers where there is a GPU")
def test_other_threads_see_the_real_machine():
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            HardwareInfo().get_device_multiprocessor_count()
        except RuntimeError as error:  # there is no driver
            caught.append(error)

    with emulator.host_sees("b200"):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert len(caught) == 1


def test_strides_that_a_tensor_map_cannot_hold_are_refused():
    """The DSL's encoder keeps multiples of 16 bytes and drops the rest without a word."""
    dst = torch.zeros(32, dtype=torch.bfloat16)
    rows = torch.randn(64, 100).bfloat16()
    compiled = capture.compile(k.load_tile, rows, dst)
    with pytest.raises(ValueError, match="src: dimension 0 has a stride of 200 bytes"):
        compiled.launch(rows, dst)
    padded = torch.zeros(64, 104, dtype=torch.bfloat16)[:, :100]
    assert len(compiled.launch(padded, dst)) == 1
    one_row = rows[:1]  # its stride is never used
    assert len(compiled.launch(one_row, dst)) == 1
    columns = rows.float()
    report = emulator.emulate(k.axpy, columns[:, 0], columns[:, 1], columns[:, 2], 1.0)
    assert report.ok, str(report)  # makes no map


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.randn(64, 64).bfloat16().T, "strides .* call .contiguous"),
        (lambda: torch.randn(64, 128).bfloat16()[:, ::2], "strides .* call .contiguous"),
        (lambda: torch.randn(64, 72).bfloat16()[:, 1:65], "data begins at .* multiple of 16 bytes"),
    ],
    ids=["transposed", "every second column", "address"],
)
def test_tensors_that_no_tensor_map_describes_are_refused(make, message):
    """The map's innermost dimension is contiguous and its address a multiple of 16 bytes, whatever
    the tensor's are: the copy would fetch other elements."""
    src, dst = make(), torch.zeros(32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"src: .*{message}"):
        capture.compile(k.load_tile, src, dst).launch(src, dst)
    copy = src.contiguous()
    assert len(capture.compile(k.load_tile, copy, dst).launch(copy, dst)) == 1


@pytest.mark.parametrize("ctas", [[5], [], ["a"], "0", 3, [-1], [True]])
def test_ctas_outside_the_grid_are_refused(ctas):
    x, y, out = torch.randn(3, 128)
    with pytest.raises(ValueError, match="ctas"):
        emulator.emulate(k.axpy, x, y, out, 1.0, ctas=ctas)
    assert emulator.emulate(k.axpy, x, y, out, 1.0, ctas=[1]).launches[0].ctas == 1


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (None, "out: None for a cute.Tensor"),
        (torch.zeros(4, device="meta"), r"out: a torch.float32 tensor on meta has no memory"),
        (torch.eye(4).to_sparse(), r"out: a torch.float32 tensor on cpu has no memory.*strided"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "out: a torch.complex64 tensor.*conjugate"),
        (np.broadcast_to(np.float32(1), (64,)), "out: a float32 tensor on cpu.*readonly"),
    ],
    ids=["none", "meta", "sparse", "conjugate", "readonly"],
)
def test_what_a_kernel_cannot_be_given_is_named(argument, message):
    with pytest.raises(TypeError, match=message):
        emulate(k.double_all, argument)


def test_missing_arguments_name_the_function():
    x = torch.zeros(4)
    with pytest.raises(TypeError, match=r"^axpy: missing a required argument: 'out'"):
        emulate(k.axpy, x, x)
    with pytest.raises(TypeError, match="^double_all: too many positional arguments"):
        emulate(k.double_all, x, x)
    with pytest.raises(CaptureError, match="launches_nothing launches no kernel"):
        emulate(k.launches_nothing, x)


def test_numpys_integers_are_integers():
    report = emulate(k.double_all, torch.zeros(4), seed=np.int64(3), max_instructions=np.int32(999))
    assert (report.ok, report.seed, type(report.seed)) == (True, 3, int)
