# SPDX-License-Identifier: Apache-2.0
"""The forward kernel as the compiler and ptxas see it; what the plan says is what they did."""

import re
import time

import pytest

from kernels.blackwell.forward import compile_forward
from kernels.common.plan import KernelPlan
from kernels.common.resources import kernel_resources, launch_smem_bytes, setmaxnreg

PLANS = [
    KernelPlan.forward(),
    KernelPlan.forward(causal=True),
    KernelPlan.forward(head_dim=48, dtype="float16", causal=True, exp2_emulated_share=1.0),
    KernelPlan.forward(gpu="b300", rescale_threshold=0.0),
    KernelPlan.forward(gpu="gb300", causal=True, exp2_emulated_share=0.5),
]


@pytest.fixture(params=PLANS, ids=lambda plan: f"{plan.name}-{plan.exp2_emulated_share:g}")
def plan(request):
    return request.param


@pytest.fixture
def compiled(plan, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / f"forward-{hash(plan):x}"
    folder.mkdir(exist_ok=True)
    return compile_forward(plan, f"--keep-ptx --keep-cubin --dump-dir={folder}")


def code(compiled) -> str:
    """The PTX without comments."""
    return re.sub(r"//[^\n]*", "", compiled.__ptx__)


def test_no_spills_and_no_stack(compiled):
    (used,) = kernel_resources(compiled.__cubin__)
    assert (used.stack_bytes, used.local_bytes) == (0, 0)
    assert used.registers == 128  # 64 Ki registers over 512 threads, before setmaxnreg


def test_registers_smem_and_threads_are_the_plans(plan, compiled):
    asked = [(step.action, step.registers) for step in setmaxnreg(compiled.__ptx__)]
    assert sorted(asked) == sorted(
        [
            ("inc", plan.softmax_registers),
            ("dec", plan.correction_registers),
            ("dec", plan.other_registers),
        ]
    )
    assert launch_smem_bytes(str(compiled.ir_module)) == (plan.smem_bytes,)
    assert f".reqntid {plan.threads}, 1, 1" in compiled.__ptx__
    assert f".target {plan.arch}" in compiled.__ptx__
    assert f".entry {plan.name}_0(" in compiled.__ptx__


def test_barriers_are_initialised_where_and_as_the_plan_says(plan, compiled):
    """Offset and arrival count of every mbarrier.init."""
    text = code(compiled)
    inits = re.findall(r"mbarrier\.init\S*\s+\[__dynamic_shmem__0\+(\d+)\], (%r\d+);", text)
    counts = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", text))
    expected = {
        plan.smem_offset(barrier.name) + 8 * i: barrier.arrivals
        for barrier in plan.barriers
        for i in range(barrier.count)
    }
    assert {int(offset): int(counts[register]) for offset, register in inits} == expected


def test_exp2_is_split_as_realised(plan, compiled):
    """ex2 and polynomials in the PTX: a softmax step without mask, one with, one rescale each."""
    text = code(compiled)
    steps = 2
    mufu = plan.tile_n - 2 * plan.exp2_emulated_pairs
    assert len(re.findall(r"\bex2\.approx", text)) == steps * (mufu + 1)
    # the add that rounds down is what only the polynomial uses
    assert len(re.findall(r"\badd\.rm\S*\.f32x2", text)) == steps * plan.exp2_emulated_pairs


def test_products_read_and_write_the_columns_of_the_plan(plan, compiled):
    """PV takes A from tensor memory, QK from shared memory; both as often as the tile asks."""
    mma = re.findall(r"tcgen05\.mma\.\S+\s+\[%r\d+\], (\[)?%", code(compiled))
    qk_steps, pv_steps = plan.head_dim_padded // 16, plan.tile_n // 16
    places = 2  # in the loop and once outside, for each of two stages
    assert mma.count("") == 2 * places * qk_steps
    assert mma.count("[") == 2 * places * pv_steps


def test_tensor_memory_loads_are_waited_for_and_handovers_fenced(compiled):
    """Between a tcgen05.ld or .st and the next arrive or barrier stands its wait and a fence."""
    steps = re.findall(
        r"tcgen05\.(ld|st|wait::ld|wait::st|fence::before)|(mbarrier\.arrive\.shared|bar\.sync)",
        code(compiled),
    )
    pending = set()
    fenced = True
    for tcgen05, handover in steps:
        if handover:
            assert not pending and fenced
        elif tcgen05 in ("ld", "st"):
            pending.add(tcgen05)
            fenced = tcgen05 == "ld"  # reads are over once waited for; writes need the fence too
        elif tcgen05 == "fence::before":
            fenced = True
        else:
            pending.discard(tcgen05.removeprefix("wait::"))


def test_compiles_in_under_five_seconds():
    start = time.process_time()  # CPU time of all threads: other processes do not count
    compile_forward(KernelPlan.forward(kv_stages=2))
    assert time.process_time() - start < 5


def test_one_compile_a_plan():
    plan = KernelPlan.forward(kv_stages=2)
    assert compile_forward(plan) is compile_forward(KernelPlan.forward(kv_stages=2))
