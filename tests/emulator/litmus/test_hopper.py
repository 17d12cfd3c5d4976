# SPDX-License-Identifier: Apache-2.0
"""sm_90a: the pairs that do without tcgen05, and those of wgmma (PTX ISA 9.1 section 9.7.15)."""

import re

import pytest

from . import test_barriers, test_clusters, test_flags, test_global, test_lanes, test_memory
from .harness import (
    PROXY,
    WAYS,
    Litmus,
    bulk_load,
    check_right,
    check_wrong,
    expect,
    init,
    store,
    variants,
    wait,
)

MODULES = (test_barriers, test_clusters, test_flags, test_global, test_lanes, test_memory)
EVERY = [case for module in MODULES for case in module.CASES]
PORTABLE = [variants(c, gpu="h100") for c in EVERY if not c.tmem and "tcgen05.a" not in str(c)]
FEW = [WAYS[0], next(way for way in WAYS if way["schedule"] == "adversarial")]

A_AT, B_AT, A_BYTES, B_BYTES = 1024, 4096, 2048, 256  # 64 x 16 and 8 x 16 of f16
ALL = range(4)  # warps of the warpgroup


def descriptor(at):
    """K-major without swizzle; every element is the same, so the layout does not matter here."""
    return 1024 + at >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32


def fill(a=True, b=True):
    """A by ordinary stores, 1.0 everywhere, a quarter of it by each warp; B, 2.0, by each whole."""
    lines = ["mov.b32 %r10, 0x3c003c00;", "mov.b32 %r11, 0x40004000;", "shl.b32 %r12, %lane, 4;"]
    lines += ["mov.u32 %r13, smem;", "shl.b32 %r14, %warp, 9;"]
    lines += ["add.u32 %r14, %r14, %r12;", "add.u32 %r14, %r14, %r13;"]
    lines += ["shl.b32 %r12, %lane, 1;", "shl.b32 %r15, %warp, 6;", "add.u32 %r12, %r12, %r15;"]
    lines += ["add.u32 %r13, %r13, %r12;"]
    if a:
        lines.append(f"st.shared.v4.b32 [%r14+{A_AT}], {{%r10, %r10, %r10, %r10}};")
    if b:
        lines.append(f"st.shared.u16 [%r13+{B_AT}], %r11;")
    return "\n".join(lines)


D = "{%f0, %f1, %f2, %f3}"
START = (
    f"mov.b64 %rd4, {descriptor(A_AT)};\nmov.b64 %rd5, {descriptor(B_AT)};\n"
    "setp.ne.u32 %p2, %lane, %lane;"
)
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
MMA = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {D}, %rd4, %rd5, %p2, 1, 1, 0, 0;"
FROM_REGISTERS = (
    f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {D}, {{%r0, %r1, %r2, %r3}}, %rd5, %p2, "
    "1, 1, 0;"
)
ONES_IN_REGISTERS = "\n".join(f"mov.b32 %r{k}, 0x3c003c00;" for k in range(4))
DONE = "wgmma.wait_group.sync.aligned 0;"
SHOW = f"mov.b32 %r5, %f0;\n{store('%r5')}"
MEET = "bar.sync 1, 128;"
READY = f"{fill()}\n{PROXY}\n{MEET}"
MULTIPLY = f"{START}\n{FENCE}\n{MMA}\n{COMMIT}"
RESULT = dict.fromkeys(ALL, 0x42000000)  # 32.0


def group(text, **fields):
    """The same text for the four warps, with labels of their own."""
    warps = {w: re.sub(r"\b(SENT|WAIT\d+)\b", rf"\1_{w}", text) for w in ALL}
    return {"warps": warps, "threads": 128, "gpu": "h100", **fields}


WGMMA = [
    Litmus(
        "the accumulator needs wait_group", "wgmma_not_waited",
        **group(f"{READY}\n{MULTIPLY}\n{DONE} //right\n{SHOW}\n{DONE}",
                expect=RESULT, numbers=True),
    ),
    Litmus(
        "a group is what was committed", "wgmma_not_waited",
        **group(f"{READY}\n{MULTIPLY.replace(COMMIT, COMMIT + ' //right')}\n{DONE}\n{SHOW}\n"
                f"{COMMIT}\n{DONE}", expect=RESULT, numbers=True),
    ),
    Litmus(
        "a wait may leave no group out", "wgmma_not_waited",
        **group(f"{READY}\n{MULTIPLY}\n{DONE} //right\nwgmma.wait_group.sync.aligned 1; //wrong\n"
                f"{SHOW}\n{DONE}", expect=RESULT, numbers=True),
    ),
    Litmus(
        "a wgmma must be waited for before the end", "exit_with_work_in_flight",
        **group(f"{READY}\n{MULTIPLY}\n{DONE} //right\n{store(1)}",
                expect=dict.fromkeys(ALL, 1), end=None),
    ),
    Litmus(
        "registers are handed over by wgmma.fence", "wgmma_fence_missing",
        **group(f"{READY}\n{MULTIPLY.replace(FENCE, FENCE + ' //right')}\n{DONE}\n{SHOW}",
                expect=RESULT),
    ),
    Litmus(
        "registers of A, too", "wgmma_fence_missing",
        **group(f"{READY}\n{START}\n{FENCE} //wrong\n{ONES_IN_REGISTERS}\nadd.u32 %r0, %r0, 0;\n"
                f"{FENCE} //right\n{FROM_REGISTERS}\n{COMMIT}\n{DONE}\n{SHOW}", expect=RESULT),
    ),
    Litmus(
        "registers of A stay until the wait", "wgmma_operand_overwritten",
        **group(f"{READY}\n{START}\n{ONES_IN_REGISTERS}\n{FENCE}\n{FROM_REGISTERS}\n{COMMIT}\n"
                f"{DONE} //right\nadd.u32 %r0, %r0, 1;\n{DONE}\n{SHOW}", expect=RESULT),
    ),
    Litmus(
        "operands written by a warp need a proxy fence", "missing_proxy_fence",
        **group(f"{fill()}\n{PROXY} //right\n{MEET}\n{MULTIPLY}\n{DONE}\n{SHOW}", expect=RESULT),
    ),
    Litmus(
        "operands written by other warps need a barrier",
        ("smem_race", "smem_unwritten_read", "mma_operand_overwritten"),
        **group(f"{fill()}\n{PROXY}\n{MEET} //right\n{MULTIPLY}\n{DONE}\n{SHOW}", expect=RESULT),
    ),
    Litmus(
        "an operand that TMA brings must be waited for", "tma_load_not_waited",
        **group(f"{fill(b=False)}\n{PROXY}\nsetp.eq.u32 %p3, %warp, 0;\n@!%p3 bra SENT;\n"
                f"{expect(0, B_BYTES)}\n{bulk_load(B_AT, B_BYTES, 0, start=4096)}\nSENT:\n{MEET}\n"
                f"{wait(0, 0, '//right')}\n{MULTIPLY}\n{DONE}\n{SHOW}\n{wait(0, 0)}",
                setup=init(0), expect=RESULT),
    ),
    Litmus(
        "an operand must not be overwritten before the wait", "mma_operand_overwritten",
        **group(f"{READY}\n{MULTIPLY}\n{DONE} //right\n{MEET}\n{fill(b=False)}\n{DONE}\n{SHOW}",
                expect=RESULT),
    ),
    Litmus(
        "a copy over an operand waits, too", "mma_operand_overwritten",
        **group(f"{READY}\n{MULTIPLY}\n{DONE} //right\n{MEET}\nsetp.eq.u32 %p3, %warp, 0;\n"
                f"@!%p3 bra SENT;\n{expect(0, B_BYTES)}\n{bulk_load(B_AT, B_BYTES, 0)}\n"
                f"{wait(0, 0)}\nSENT:\n{DONE}\n{SHOW}", setup=init(0), expect=RESULT),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", PORTABLE, ids=lambda case: case.name)
def test_portable_pairs(case):
    check_right(case, FEW)
    check_wrong(case, FEW)


@pytest.mark.parametrize("case", WGMMA, ids=lambda case: case.name)
def test_right(case):
    check_right(case)


@pytest.mark.parametrize("case", WGMMA, ids=lambda case: case.name)
def test_wrong(case):
    check_wrong(case)
