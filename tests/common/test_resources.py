# SPDX-License-Identifier: Apache-2.0
"""Reading a compiled kernel's costs: from real compiles, and from text that must not be misread."""

import cutlass
import cutlass.cute as cute
import pytest
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from kernels.common.resources import (
    KernelResources,
    SetMaxNReg,
    find_cuobjdump,
    kernel_resources,
    launch_smem_bytes,
    parse_resource_usage,
    setmaxnreg,
)


@cute.kernel
def rotate(source: cute.Tensor, target: cute.Tensor, smem_floats: cutlass.Constexpr):
    """Indexes a register array with a run-time value, which forces it onto the stack."""
    tidx, _, _ = cute.arch.thread_idx()
    cutlass.memory.SmemAllocator().allocate_array(cutlass.Float32, smem_floats)
    row = cute.make_rmem_tensor((32,), cutlass.Float32)
    row.fill(0.0)
    for i in cutlass.range(64, unroll=1):
        row[(tidx * i) % 32] += source[tidx * 32 + i % 32]
    target[tidx] = row[tidx % 31]


@cute.kernel
def shrink(target: cute.Tensor):
    cute.arch.setmaxregister_decrease(40)
    tidx, _, _ = cute.arch.thread_idx()
    target[tidx] = cutlass.Float32(0)
    if tidx < 128:
        cute.arch.setmaxregister_increase(168)


@cute.jit
def launch_all(source: cute.Tensor, target: cute.Tensor, stream):
    rotate(source, target, 256).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)
    shrink(target).launch(grid=(1, 1, 1), block=(256, 1, 1), stream=stream)
    rotate(source, target, 512).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    fake = [make_fake_compact_tensor(cutlass.Float32, (n,)) for n in (2048, 64)]
    folder = tmp_path_factory.mktemp("dump")
    options = f"--gpu-arch sm_100a --keep-ptx --keep-cubin --dump-dir={folder}"
    return cute.compile(launch_all, *fake, make_fake_stream(), options=options)


def test_a_stack_is_seen_and_its_absence_too(compiled, tmp_path):
    used = {k.name: k for k in kernel_resources(compiled.__cubin__)}
    rotates = [k for name, k in used.items() if "rotate" in name]
    (shrinks,) = [k for name, k in used.items() if "shrink" in name]
    assert len(rotates) == 2 and all(k.stack_bytes >= 128 for k in rotates)  # 32 float32
    assert shrinks.stack_bytes == 0
    assert all(0 < k.registers <= 255 and k.local_bytes == 0 for k in used.values())
    file = tmp_path / "all.cubin"
    file.write_bytes(compiled.__cubin__)
    assert kernel_resources(file) == kernel_resources(compiled.__cubin__)


def test_smem_of_each_launch_in_order(compiled):
    assert launch_smem_bytes(str(compiled.ir_module)) == (1024, 0, 2048)


def test_setmaxnreg_of_a_compile(compiled):
    assert setmaxnreg(compiled.__ptx__) == (SetMaxNReg("dec", 40), SetMaxNReg("inc", 168))


def test_a_comment_is_not_an_instruction():
    ptx = "// setmaxnreg.inc.sync.aligned.u32 232;\n\tsetmaxnreg.dec.sync.aligned.u32 \t24; // x"
    assert setmaxnreg(ptx) == (SetMaxNReg("dec", 24),)


def test_a_form_it_does_not_know_is_not_dropped():
    with pytest.raises(ValueError, match="2 setmaxnreg, understood 1"):
        setmaxnreg("setmaxnreg.dec.sync.aligned.u32 24; setmaxnreg.set.sync.aligned.u32 24;")


LISTING = """
Resource usage:
 Common:
  GLOBAL:0
 Function first:
  REG:168 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:1480 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function second:
  REG:24 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:904 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_every_kernel_of_a_listing_is_read():
    assert parse_resource_usage(LISTING) == (
        KernelResources("first", 168, 16, 8, 1024),
        KernelResources("second", 24, 0, 0, 0),
    )


@pytest.mark.parametrize("text", ["", LISTING.replace("REG:24 ", "REGS:24 ")])
def test_a_listing_it_cannot_read_raises(text):
    with pytest.raises(ValueError, match="understood"):
        parse_resource_usage(text)


def test_what_is_not_a_cubin_raises():
    with pytest.raises(RuntimeError, match="cuobjdump"):
        kernel_resources(b"not a cubin")


def test_what_is_not_host_code_raises(compiled):
    with pytest.raises(ValueError, match="no launch"):
        launch_smem_bytes(compiled.__ptx__)


def test_a_missing_cuobjdump_says_where_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUOBJDUMP", "/nowhere/cuobjdump")
    monkeypatch.setattr("sysconfig.get_path", lambda _: "/nowhere")
    with pytest.raises(FileNotFoundError, match="nvidia-cuda-cuobjdump"):
        find_cuobjdump()
