# SPDX-License-Identifier: Apache-2.0
"""The GEMM as a compiler sees it: what it costs, what it refuses, that it needs no GPU."""

import re
import time

import cutlass
import cutlass.cute as cute
import pytest
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from kernels.blackwell.gemm import THREADS, Gemm
from kernels.common.resources import kernel_resources, launch_smem_bytes, setmaxnreg

BF16, FP16, FP32 = cutlass.BFloat16, cutlass.Float16, cutlass.Float32


def fake_matrix(dtype):
    """A row-major matrix of symbolic shape whose rows are multiples of 16 bytes apart."""
    row_stride = cute.sym_int64(divisibility=128 // dtype.width)
    shape = (cute.sym_int32(), cute.sym_int32())
    return make_fake_tensor(dtype, shape, stride=(row_stride, 1), assumed_align=16)


def compile_gemm(gemm, in_dtype=BF16, out_dtype=BF16, arch="sm_100a", b_dtype=None):
    a, b, c = (fake_matrix(t) for t in (in_dtype, b_dtype or in_dtype, out_dtype))
    options = f"--gpu-arch {arch} --keep-ptx --keep-cubin"
    return cute.compile(gemm, a, b, c, make_fake_stream(), options=options)


@pytest.fixture(autouse=True)
def _in_a_scratch_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # --keep-* write into the current folder


@pytest.mark.parametrize(
    ("gemm", "in_dtype", "out_dtype", "arch"),
    [
        (Gemm(), BF16, BF16, "sm_100a"),
        (Gemm(), BF16, FP32, "sm_100a"),
        (Gemm(), FP16, FP16, "sm_103a"),
        (Gemm(tile_n=256, stages=3), FP16, BF16, "sm_100a"),
        (Gemm(tile_n=32, tile_k=128, stages=1), BF16, FP32, "sm_100a"),
        (Gemm(tile_n=64, tile_k=32, stages=7), BF16, BF16, "sm_100a"),
    ],
)
def test_no_spills_no_stack_and_the_smem_it_says(gemm, in_dtype, out_dtype, arch):
    compiled = compile_gemm(gemm, in_dtype, out_dtype, arch)
    (used,) = kernel_resources(compiled.__cubin__)
    assert (used.stack_bytes, used.local_bytes) == (0, 0)
    assert 24 <= used.registers <= 128  # 192 threads of 128 leave room for two CTAs an SM
    ring = gemm.stages * (128 + gemm.tile_n) * gemm.tile_k * 2
    assert launch_smem_bytes(str(compiled.ir_module)) == (
        1024 + ring + 128 * gemm.tile_n * out_dtype.width // 8,
    )
    assert f".target {arch}" in compiled.__ptx__
    assert f".reqntid {THREADS}, 1, 1" in compiled.__ptx__
    assert setmaxnreg(compiled.__ptx__) == ()


def test_compiles_in_under_five_seconds():
    start = time.perf_counter()
    compile_gemm(Gemm(tile_n=64, stages=2))
    assert time.perf_counter() - start < 5


def test_every_handover_of_tensor_memory_is_fenced():
    """PTX ISA 9.1 section 9.7.16.6.4: after each wait that guards a tcgen05 operation, a fence."""
    ptx = re.sub(r"//[^\n]*", "", compile_gemm(Gemm()).__ptx__)
    handovers = re.findall(
        r"(tcgen05\.fence::\w+|bar\.sync\s+\d|try_wait\S*|tcgen05\.(?:alloc|mma|ld|dealloc)\b)", ptx
    )
    compact = [re.sub(r"\s+", " ", step.split(".parity")[0]) for step in handovers]
    before, after = "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync"
    assert compact == [
        *("tcgen05.alloc", before, "bar.sync 0", after),
        "try_wait",  # load: empty
        *("try_wait", after, *["tcgen05.mma"] * 4),  # multiply: full
        *("try_wait", after, "tcgen05.ld"),  # epilogue: done
        *(before, "bar.sync 1", after, "tcgen05.dealloc"),
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tile_n": 96}, "tile_n is 96"),
        ({"tile_n": 512}, "tile_n is 512"),
        ({"tile_k": 48}, "48, 4"),
        ({"stages": 0}, "64, 0"),
    ],
)
def test_bad_fields_are_named(fields, said):
    with pytest.raises(ValueError, match=said):
        Gemm(**fields)


def test_too_much_smem_is_refused_before_the_compile():
    with pytest.raises(ValueError, match="328704 bytes of SMEM.*fewer stages"):
        compile_gemm(Gemm(tile_n=256), out_dtype=FP32)
    compile_gemm(Gemm(tile_n=256, stages=1), out_dtype=FP32)


@pytest.mark.parametrize(
    ("in_dtype", "b_dtype", "out_dtype", "said"),
    [
        (FP32, FP32, FP32, "A is Float32, B Float32"),
        (BF16, FP16, BF16, "A is BFloat16, B Float16"),
        (BF16, BF16, cutlass.Int32, "C is Int32"),
    ],
)
def test_dtypes_it_cannot_take_are_refused(in_dtype, b_dtype, out_dtype, said):
    with pytest.raises(TypeError, match=said):
        compile_gemm(Gemm(), in_dtype, out_dtype, b_dtype=b_dtype)
