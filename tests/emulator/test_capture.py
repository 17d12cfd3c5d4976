"""Launch capture: what a host function launches is caught, and nothing else is disturbed."""

from __future__ import annotations

import re
import struct
import threading

import numpy as np
import pytest
import torch

cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
from cutlass.base_dsl import compiler as dsl_compiler  # noqa: E402
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor  # noqa: E402

from kernels.emulator import capture  # noqa: E402
from kernels.emulator.gpus import gpu_model  # noqa: E402
from kernels.emulator.host_runtime import (  # noqa: E402
    CaptureError,
    UnsupportedLaunch,
    decode_attributes,
    encode_tensor_map,
    entry_parameter_bytes,
)
from kernels.emulator.tensormap import TensorMap  # noqa: E402
from tests.emulator import capture_kernels as k  # noqa: E402


def pointer_and_size(param: bytes) -> tuple[int, int]:
    """The first two fields of a one-dimensional tensor parameter with a dynamic size."""
    return struct.unpack_from("<Qi", param)


def make(n: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(n)
    return tuple(torch.randn(n).to(dtype) for _ in range(3))


# --- Launches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_plain_launch_arrives_with_its_shape_and_parameters(dtype):
    x, y, out = make(100, dtype)
    [launch] = capture.compile(k.axpy, x, y, out, 2.5, None).launch(x, y, out, 2.5, None)
    assert (launch.grid, launch.block, launch.cluster) == ((2, 1, 1), (64, 1, 1), (1, 1, 1))
    assert (launch.smem_bytes, launch.stream, launch.cooperative) == (0, 0, False)
    assert [pointer_and_size(p) for p in launch.params[:3]] == [
        (t.data_ptr(), 100) for t in (x, y, out)
    ]
    assert struct.unpack("<f", launch.params[3]) == (2.5,)


def test_three_launches_of_two_kernels_keep_order_names_and_attributes():
    x, y, out = make(100)
    compiled = capture.compile(k.axpy_then_double, x, y, out, 1.0, None)
    first, second, third = compiled.launch(x, y, out, -3.0, 77)
    assert "axpy_kernel" in first.kernel and "double_kernel" in second.kernel
    assert set(compiled.entries) >= {first.kernel, second.kernel, third.kernel}
    for launch in (first, second, third):
        assert f".entry {launch.kernel}(" in compiled.ptx
        assert tuple(map(len, launch.params)) == compiled.entries[launch.kernel]
        assert launch.stream == 77
    assert (second.grid, second.block) == ((1, 1, 1), (128, 1, 1))
    assert (third.grid, third.cluster, third.smem_bytes) == ((4, 1, 1), (2, 1, 1), 1024)
    assert struct.unpack("<f", third.params[3]) == (-3.0,)


def test_parameters_are_copied_when_the_launch_happens():
    x, y, out = make(10)
    compiled = capture.compile(k.axpy, x, y, out, 1.0, None)
    [before] = compiled.launch(x, y, out, 4.0, None)
    compiled.launch(out, x, y, 5.0, None)
    assert struct.unpack("<f", before.params[3]) == (4.0,)
    assert pointer_and_size(before.params[0])[0] == x.data_ptr()


def test_one_compile_serves_other_sizes():
    compiled = capture.compile(k.axpy, *make(100), 1.0, None)
    x, y, out = make(1000)
    [launch] = compiled.launch(x, y, out, 1.0, None)
    assert launch.grid == (16, 1, 1)
    assert pointer_and_size(launch.params[2]) == (out.data_ptr(), 1000)


def test_a_launch_with_other_types_than_compiled_for_is_refused():
    compiled = capture.compile(k.axpy, *make(100), 1.0, None)
    with pytest.raises(TypeError, match="element types"):
        compiled.launch(*make(100, torch.float16), 1.0, None)


def test_the_stream_may_be_left_out():
    x, y, out = make(10)
    [launch] = capture.compile(k.axpy, x, y, out, 1.0).launch(x, y, out, 1.0)
    assert launch.stream == 0


@pytest.mark.filterwarnings("ignore:Dynamic variable in block size")
@pytest.mark.parametrize("factor", [3, 5])
def test_compile_time_arguments_are_folded_and_runtime_ones_are_not(factor):
    out = torch.zeros(64)
    compiled = capture.compile(k.scaled_by_constant, out, factor, 32)
    [launch] = compiled.launch(out, factor, 48)
    assert launch.block == (48, 1, 1)
    [stored] = re.findall(r"st\.global\.b32 .*, (\d+);", compiled.ptx)
    assert struct.pack("<I", int(stored)) == struct.pack("<f", factor)


def test_objects_methods_and_lists_are_host_functions_and_arguments_too():
    out = torch.zeros(128)
    [launch] = capture.compile(k.Doubler(96), out).launch(out)
    assert launch.block == (96, 1, 1)
    [launch] = capture.compile(k.MutableDoubler(32), out).launch(out)
    assert (launch.grid, launch.block) == ((1, 1, 1), (32, 1, 1))
    [launch] = capture.compile(k.MutableDoubler(32).method, out).launch(out)
    assert launch.grid == (2, 1, 1)
    tensors = [torch.ones(64), torch.zeros(64)]
    [launch] = capture.compile(k.pair, tensors).launch(tensors)
    assert [pointer_and_size(p)[0] for p in launch.params[:3]] == [
        tensors[0].data_ptr(),
        tensors[0].data_ptr(),
        tensors[1].data_ptr(),
    ]
    assert {a.name for a in launch.allocations} == {"tensors[0]", "tensors[1]"}


# --- Tensors ------------------------------------------------------------------------------------


def tensor_map(src: torch.Tensor) -> np.ndarray:
    """The tensor map that `load_tile` makes for `src`, as sixteen 64-bit words."""
    dst = torch.zeros(32, dtype=src.dtype)
    [launch] = capture.compile(k.load_tile, src, dst, None).launch(src, dst, None)
    [raw] = [p for p in launch.params if len(p) == 128]
    return np.frombuffer(raw, np.uint64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, cols, pitch", [(256, 64, 64), (37, 72, 200)])
def test_the_tensor_map_has_the_tensors_address_sizes_and_strides(dtype, rows, cols, pitch):
    src = torch.randn(rows, pitch).to(dtype)[:, :cols]
    words = [int(word) for word in tensor_map(src)]
    # Field positions of CUtensorMap: see tests/emulator/test_tensormap.py for their evidence.
    assert words[0] == src.data_ptr()
    assert (words[1] >> 32) * 16 == pitch * 2  # stride of the outer dimension
    assert (words[4] & 0xFFFFFFFF) + 1 == cols
    assert (words[4] >> 32) + 1 == rows


def test_tensors_compile_as_cuda_tensors_do():
    """Generic pointers would need cvta and could not feed cp.async: PTX must not depend on where
    the tensor happens to lie."""
    ptx = capture.ptx_of(k.axpy, *make(10), 1.0, None)
    assert "cvta" not in ptx and "ld.global" in ptx
    fake = make_fake_compact_tensor(
        cutlass.Float32, (cute.sym_int(),), stride_order=(0,), assumed_align=16
    )
    assert body(capture.ptx_of(k.axpy, fake, fake, fake, 1.0, None)) == body(ptx)


def body(ptx: str) -> list[str]:
    """Instructions of the module, without names that differ by argument spelling."""
    return [line.split()[0] for line in ptx.splitlines() if line.startswith("\t") and line.split()]


def test_allocations_are_the_exact_extents_by_parameter_name():
    x, y, out = make(100)
    [launch] = capture.compile(k.axpy, x, y, out, 1.0, None).launch(x, y, out, 1.0, None)
    assert {a.name: (a.base, a.nbytes) for a in launch.allocations} == {
        "x": (x.data_ptr(), 400),
        "y": (y.data_ptr(), 400),
        "out": (out.data_ptr(), 400),
    }


def test_views_of_one_buffer_become_one_allocation():
    buffer = torch.randn(100)
    x, y, out = buffer[:60], buffer[40:], torch.zeros(60)
    [launch] = capture.compile(k.axpy, x, y, out, 1.0, None).launch(x, y, out, 1.0, None)
    merged = {a.name: (a.base, a.nbytes) for a in launch.allocations}
    assert merged == {"x|y": (buffer.data_ptr(), 400), "out": (out.data_ptr(), 240)}


@pytest.mark.parametrize("stride", [2, 3])
def test_strided_vectors_keep_their_stride_and_end_at_their_last_element(stride):
    base = torch.arange(30.0)
    x, y, out = base[::stride], *(torch.zeros(len(base[::stride])) for _ in range(2))
    [launch] = capture.compile(k.axpy, x, y, out, 1.0, None).launch(x, y, out, 1.0, None)
    assert struct.unpack("<Qiiq", launch.params[0])[::3] == (x.data_ptr(), stride)
    [extent] = [a for a in launch.allocations if a.name == "x"]
    assert extent.nbytes == 4 * ((len(x) - 1) * stride + 1)


def test_numpy_and_cute_tensors_are_taken():
    x, y = np.arange(8, dtype=np.float32), np.ones(8, np.float32)
    out = from_dlpack(torch.zeros(8), assumed_align=16)  # static layout, generic pointer
    [launch] = capture.compile(k.axpy, x, y, out, 1.0, None).launch(x, y, out, 1.0, None)
    assert launch.grid == (1, 1, 1)
    sizes = {a.name: a.nbytes for a in launch.allocations}
    assert sizes == {"x": 32, "y": 32, "out": 32}


def test_unaligned_tensors_promise_only_what_they_have():
    x, y, out = make(101)
    aligned = capture.HostArguments(k.axpy, (x, y, out, 1.0)).key
    shifted = capture.HostArguments(k.axpy, (x[1:], y[1:], out[1:], 1.0)).key
    assert aligned != shifted
    [launch] = capture.compile(k.axpy, x[1:], y, out, 1.0).launch(x[1:], y, out, 1.0)
    assert pointer_and_size(launch.params[0]) == (x.data_ptr() + 4, 100)


def test_empty_tensors_name_no_memory():
    arguments = capture.HostArguments(k.axpy, (*make(0), 1.0))
    assert arguments.allocations == ()


def test_the_key_is_about_types_never_about_pointers_or_sizes():
    def key(*args):
        return capture.HostArguments(k.axpy, args).key

    assert key(*make(100), 1.0) == key(*make(7), 2.0) == key(*make(7), 3, None)
    assert key(*make(100), 1.0) != key(*make(100, torch.float16), 1.0)
    x, y, out = make(100)
    assert key(x, y, out, 1.0) != key(x[::2], y, out, 1.0)
    constant = [capture.HostArguments(k.scaled_by_constant, (x, n, 1)).key for n in (3, 3, 4)]
    assert constant[0] == constant[1] != constant[2]


def test_gradients_do_not_stand_in_the_way():
    x, y, out = make(16)
    x.requires_grad_()
    [launch] = capture.compile(k.axpy, x, y, out, 1.0).launch(x, y, out, 1.0)
    assert pointer_and_size(launch.params[0])[0] == x.data_ptr()


# --- GPUs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["h100", "b200", "gb300"])
def test_the_ptx_targets_the_gpu_and_has_lines(gpu):
    ptx = capture.ptx_of(k.axpy, *make(10), 1.0, None, gpu=gpu)
    assert f".target {gpu_model(gpu).arch}" in ptx
    assert ".loc" in ptx and "capture_kernels.py" in ptx


# --- Nothing else is disturbed ------------------------------------------------------------------


def test_the_dsl_is_as_it_was_and_compiles_for_itself():
    before = dict(vars(dsl_compiler.Compiler))
    x, y, out = make(10)
    capture.compile(k.axpy, x, y, out, 1.0, None)
    assert dict(vars(dsl_compiler.Compiler)) == before
    tensor = from_dlpack(x, assumed_align=16).mark_layout_dynamic()
    compiled = cute.compile(k.Doubler(), tensor, capture.cuda_stream(None))
    # The emulator asks for no engine and for PTX; an ordinary compile must get what it asks for.
    assert compiled.__ptx__ is None
    assert compiled.engine is not None
    if not torch.cuda.is_available():
        with pytest.raises(Exception, match="(?i)cuda|driver"):
            compiled(tensor, capture.cuda_stream(None))


@pytest.mark.gpu
def test_a_real_launch_in_the_same_process_is_untouched():
    major, minor = torch.cuda.get_device_capability()
    if f"sm_{major}{minor}a" not in {"sm_90a", "sm_100a", "sm_103a"}:
        pytest.skip(f"no model of sm_{major}{minor}")
    host = make(1000)
    device = [tensor.cuda() for tensor in host]
    stream = capture.cuda_stream(torch.cuda.current_stream().cuda_stream)
    values = [from_dlpack(t, assumed_align=16).mark_layout_dynamic() for t in device]
    before = cute.compile(k.axpy, *values, 2.0, stream)
    captured = capture.compile(k.axpy, *host, 2.0, gpu=f"sm_{major}{minor}a")
    untouched = host[2].clone()
    assert captured.launch(*host, 2.0)[0].grid == (16, 1, 1)
    after = cute.compile(k.axpy, *values, 2.0, stream)
    for scale, compiled in ((2.0, before), (-3.0, after)):
        compiled(*values, scale, stream)
        expected = device[0].double() * scale + device[1].double()
        assert torch.equal(device[2], expected.float())  # one fma, exact in float64, rounded once
    assert torch.equal(host[2], untouched)


def test_a_failed_compile_leaves_nothing_behind():
    @cute.jit
    def broken(x: cute.Tensor):
        raise ValueError("no such tile")

    before = dict(vars(dsl_compiler.Compiler))
    with pytest.raises(Exception, match="no such tile"):
        capture.compile(broken, torch.zeros(4))
    assert dict(vars(dsl_compiler.Compiler)) == before
    x, y, out = make(10)
    assert len(capture.compile(k.axpy, x, y, out, 1.0).launch(x, y, out, 1.0)) == 1


def test_environment_and_temporary_files_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    for name in ("CUTE_DSL_ARCH", "CUTE_DSL_KEEP_PTX", "CUTE_DSL_LINEINFO"):
        monkeypatch.delenv(name, raising=False)
    assert ".loc" in capture.ptx_of(k.axpy, *make(10), 1.0, None)
    assert list(tmp_path.iterdir()) == []


def test_threads_may_compile_and_launch_at_once():
    results: dict[int, tuple[int, int]] = {}

    def work(n: int) -> None:
        x, y, out = make(n)
        compiled = capture.compile(k.axpy, x, y, out, 1.0)
        for _ in range(20):
            [launch] = compiled.launch(x, y, out, 1.0)
        results[n] = launch.grid[0], pointer_and_size(launch.params[0])[1]

    threads = [threading.Thread(target=work, args=(n,)) for n in (64, 128, 256)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: (n // 64, n) for n in (64, 128, 256)}


# --- Refusals -----------------------------------------------------------------------------------


def test_what_is_not_a_host_function_is_named():
    x = torch.zeros(4)
    for wrong in (len, lambda x: x, k.axpy_kernel.__wrapped__, object(), None):
        with pytest.raises(TypeError, match=r"@cute\.jit"):
            capture.compile(wrong, x)


def test_wrong_argument_counts_are_type_errors():
    with pytest.raises(TypeError, match="missing"):
        capture.compile(k.axpy, torch.zeros(4))
    with pytest.raises(TypeError, match="too many"):
        capture.compile(k.axpy, *make(4), 1.0, None, 1)


def test_fake_tensors_compile_but_do_not_launch():
    fake = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), stride_order=(0,))
    compiled = capture.compile(k.Doubler(), fake)
    with pytest.raises(TypeError, match="out: a fake tensor"):
        compiled.launch(fake)


def test_tensors_elsewhere_are_refused():
    with pytest.raises(ValueError, match=r"out: a tensor on cuda:0; .*\.cpu\(\)"):
        capture.HostArguments(k.Doubler(), (_OnGpu(),))


class _OnGpu:
    """What a CUDA tensor shows of itself."""

    device = "cuda:0"

    def __dlpack__(self, stream=None):
        raise AssertionError("not to be exported")

    def __dlpack_device__(self):
        return 2, 0


def test_a_host_function_without_kernels_is_refused():
    with pytest.raises(CaptureError, match="launches no kernel"):
        capture.compile(k.launches_nothing, torch.zeros(4))


def test_errors_in_callbacks_reach_the_caller_and_do_not_stick(monkeypatch):
    x, y, out = make(10)
    compiled = capture.compile(k.axpy, x, y, out, 1.0)

    def fail(attributes):
        raise UnsupportedLaunch("launch attribute 999")

    with monkeypatch.context() as patch:
        patch.setattr("kernels.emulator.host_runtime.decode_attributes", fail)
        with pytest.raises(UnsupportedLaunch, match="999"):
            compiled.launch(x, y, out, 1.0)
    assert len(compiled.launch(x, y, out, 1.0)) == 1


def test_launch_attributes_are_decoded_and_unknown_ones_raise():
    words = [2, 1, 4, *[0] * 13]
    assert decode_attributes([(4, words)]) == {"cluster": (2, 1, 4)}
    assert decode_attributes([(2, words)]) == {"cooperative": True}
    assert decode_attributes([(6, [0] * 16), (8, words), (0, words)]) == {
        "programmatic_stream_serialization": False
    }
    assert decode_attributes([(11, words)]) == {"preferred_cluster": (2, 1, 4)}
    with pytest.raises(UnsupportedLaunch, match="attribute 13 "):
        decode_attributes([(13, words)])


def test_entry_parameters_of_every_form():
    ptx = """
    .visible .entry plain() { ret; }
    .visible .entry $mixed_1(
        .param .align 64 .b8 p0[128], .param .u64 .ptr .global .align 16 p1,
        .param .f32 p2, .param .u8 p3, .param .align 8 .b8 p4[24],
        .param .u64 p5 ) .reqntid 64 { ret; }
    """
    assert entry_parameter_bytes(ptx) == {"plain": (), "$mixed_1": (128, 8, 4, 1, 24, 8)}
    with pytest.raises(CaptureError, match="texref"):
        entry_parameter_bytes(".entry k(.param .texref p0) {}")


def test_tensor_maps_of_the_drivers_encoder_are_those_of_the_dsl():
    """cuTensorMapEncodeTiled, called by host code for itself: the same map as TensorMap describes,
    and the driver's rules."""
    pitch, modes = 48, (0, 3, 2, 0)
    raw = encode_tensor_map(6, 1 << 20, [20, 9], [pitch], [16, 4], [1, 1], modes)
    made = TensorMap.decode(raw)
    assert (made.address, made.dtype, made.dims, made.strides_bytes) == (
        1 << 20,
        "float16",
        (20, 9),
        (pitch,),
    )
    assert (made.box, made.swizzle_bytes, made.l2_promotion_bytes) == ((16, 4), 128, 128)
    assert TensorMap.decode(
        encode_tensor_map(11, 16, [4], [], [4], [1], (0, 0, 0, 1))
    ) == TensorMap(
        16,
        "float32",
        (4,),
        (),
        (4,),
        (1,),
        nan_fill=True,
        tf32_rounding=True,
        l2_promotion_bytes=0,
    )
    for change, message in (
        ({"address": 8}, "address 0x8 is not a multiple of 16"),
        ({"strides": [40]}, "not all multiples of 16 bytes"),
        ({"box": [128, 4]}, "exceeds the 128-byte swizzle"),
        ({"box": [16, 512]}, "in boxes of"),
        ({"dtype": 99}, "no such code"),
    ):
        good = {
            "dtype": 6,
            "address": 1 << 20,
            "dims": [20, 9],
            "strides": [pitch],
            "box": [16, 4],
            "element_strides": [1, 1],
            "modes": modes,
        }
        with pytest.raises(ValueError, match=f"cuTensorMapEncodeTiled.*{message}"):
            encode_tensor_map(**{**good, **change})
    with pytest.raises(UnsupportedLaunch, match="interleave 1"):
        encode_tensor_map(6, 1 << 20, [20, 9], [pitch], [16, 4], [1, 1], (1, 0, 0, 0))
