# SPDX-License-Identifier: Apache-2.0
"""Shared memory, its two proxies, and copies in and out (PTX ISA 9.1 sections 8 and 9.7.9)."""

import pytest

from .harness import (
    PROXY,
    Litmus,
    arrive,
    bulk_load,
    check_right,
    check_wrong,
    expect,
    init,
    store,
    wait,
)

AT = 1024
WRITE = f"""
add.u32 %r2, %lane, 100;
mov.u32 %r3, smem;
shl.b32 %r4, %lane, 2;
add.u32 %r3, %r3, %r4;
st.shared.b32 [%r3+{AT}], %r2;
"""
READ = f"""
mov.u32 %r3, smem;
shl.b32 %r4, %lane, 2;
add.u32 %r3, %r3, %r4;
ld.shared.b32 %r5, [%r3+{AT}];
{store("%r5")}
"""
ONES, TWOS = 0x3C003C00, 0x40004000  # what the input holds: f16 1.0, then 2.0


def lane_plus(number):
    return lambda lane: lane + number


def bulk_store(at=AT, nbytes=128):
    """From smem to the block's part of out."""
    return f"@%lead cp.async.bulk.global.shared::cta.bulk_group [%out], [smem+{at}], {nbytes};"


COMMIT = "@%lead cp.async.bulk.commit_group;"
READ_WAIT = "@%lead cp.async.bulk.wait_group.read 0;"

SHARED = [
    Litmus(
        "a barrier between writer and reader", "smem_race",
        {0: f"{WRITE}\nbar.sync 1, 64; //right", 1: f"bar.sync 1, 64; //right\n{READ}"},
        setup=WRITE.replace("100", "50"), expect={1: lane_plus(100)},
    ),
    Litmus(
        "an mbarrier between writer and reader", "smem_race",
        {0: f"{WRITE}\n{arrive(0)}", 1: f"{wait(0, 0, '//right')}\n{READ}\n{wait(0, 0)}"},
        setup=f"{WRITE.replace('100', '50')}\n{init(0)}", expect={1: lane_plus(100)},
    ),
    Litmus(
        "a reader before the next write", "smem_race",
        {0: f"{wait(0, 0, '//right')}\n{WRITE}\n{wait(0, 0)}", 1: f"{READ}\n{arrive(0)}"},
        setup=f"{WRITE.replace('100', '50')}\n{init(0)}", expect={1: lane_plus(50)},
    ),
    Litmus(
        "an arrival behind the write, not before", "smem_race",
        {0: f"{arrive(0)} //wrong\n".replace(";\n@", "; //wrong\n@") + f"{WRITE}\n"
            + arrive(0).replace(";", "; //right"),
         1: f"{wait(0, 0)}\n{READ}"},
        setup=f"{WRITE.replace('100', '50')}\n{init(0)}", expect={1: lane_plus(100)},
    ),
    Litmus(
        "one thread's arrival does not cover its neighbours", "smem_race",
        {0: f"{WRITE}\nbar.warp.sync -1; //right\n"
            "@%lead mbarrier.arrive.shared::cta.b64 _, [smem];",
         1: f"{wait(0, 0)}\n{READ}"},
        setup=f"{WRITE.replace('100', '50')}\n{init(0)}", expect={1: lane_plus(100)},
        profiles=("isa",),
    ),
    Litmus(
        "a relaxed arrival publishes nothing by itself", "sync_scope_too_narrow",
        {0: f"{WRITE}\nfence.acq_rel.cta; //right\n{arrive(0, '.relaxed.cta')}",
         1: f"{wait(0, 0)}\n{READ}"},
        setup=f"{WRITE.replace('100', '50')}\n{init(0)}", expect={1: lane_plus(100)},
        profiles=("isa",),
    ),
    Litmus(
        "a relaxed wait takes nothing in by itself", "sync_scope_too_narrow",
        {0: f"{WRITE}\n{arrive(0)}",
         1: f"{wait(0, 0, order='.relaxed.cta')}\nfence.acq_rel.cta; //right\n{READ}"},
        setup=f"{WRITE.replace('100', '50')}\n{init(0)}", expect={1: lane_plus(100)},
        profiles=("isa",),
    ),
    Litmus(
        "memory must be written before it is read", "smem_unwritten_read",
        {0: f"{WRITE.rstrip()} //right", 1: ""},
        expect={}, end=READ,
    ),
]  # fmt: skip


def narrow(bits, write):
    """`WRITE` or `READ` by elements of 16 or 8 bits."""
    text = WRITE if write else READ
    scale = "shl.b32 %r4, %lane, 2;"
    shift = {16: "shl.b32 %r4, %lane, 1;", 8: "mov.b32 %r4, %lane;"}[bits]
    text = text.replace(scale, shift).replace("shared.b32", f"shared.u{bits}")
    return text


NARROW = [
    Litmus(
        f"elements of {bits} bits, too", "smem_race",
        {0: f"{narrow(bits, True)}\nbar.sync 1, 64; //right",
         1: f"bar.sync 1, 64; //right\n{narrow(bits, False)}"},
        setup=narrow(bits, True).replace("100", "50"), expect={1: lane_plus(100)},
    )
    for bits in (16, 8)
] + [
    Litmus(
        "neighbours in one word are no race, the same halfword is", "smem_race",
        {w: f"mov.u32 %r3, smem;\nmov.b32 %r2, {w + 5};\n@%lead st.shared.u16 [%r3+{at}], %r2; "
            f"//right\n@%lead st.shared.u16 [%r3+{AT}], %r2; //wrong"
         for w, at in ((0, AT), (1, AT + 2))},
        end=f"ld.shared.b32 %r2, [smem+{AT}]; //right\nmov.b32 %r2, 0; //wrong\n{store('%r2')}",
        expect={0: 6 << 16 | 5},
    ),
    Litmus(
        "a copy over halfwords", ("smem_race", "tma_load_not_waited"),
        {0: f"{wait(8, 0, '//right')}\n{PROXY}\n{expect(0, 128)}\n{bulk_load(AT, 128, 0)}\n"
            f"{wait(0, 0)}\n{wait(8, 0)}",
         1: f"{narrow(16, False)}\n{PROXY}\n{arrive(8)}"},
        setup=f"{narrow(16, True)}\n{PROXY}\n{init(0, 8)}", expect={1: lane_plus(100)},
    ),
]  # fmt: skip

COPIES = [
    Litmus(
        "a copy in must be waited for", "tma_load_not_waited",
        {0: f"{expect(0, 128)}\n{bulk_load(AT, 128, 0)}\n{wait(0, 0, '//right')}\n{READ}\n"
            f"{wait(0, 0)}"},
        setup=f"{WRITE}\n{PROXY}\n{init(0)}", expect={0: ONES}, numbers=True,
    ),
    Litmus(
        "by every reader", "tma_load_not_waited",
        {0: f"{expect(0, 128)}\n{bulk_load(AT, 128, 0)}\n{wait(0, 0)}\n{READ}",
         1: f"{wait(8, 0)}\n{wait(0, 0, '//right')}\n{READ}", 2: arrive(8)},
        setup=f"{WRITE}\n{PROXY}\n{init(0, 8)}", expect={0: ONES, 1: ONES}, threads=96,
    ),
    Litmus(
        "expect_tx must count all the bytes", ("tma_load_not_waited", "exit_with_work_in_flight"),
        {0: f"{expect(0, 256)} //right\n{expect(0, 128)} //wrong\n{bulk_load(1152, 128, 0)}\n"
            f"{bulk_load(AT, 128, 0)}\n{wait(0, 0)}\n{READ}"},
        setup=f"{WRITE}\n{PROXY}\n{init(0)}", expect={0: ONES},
    ),
    Litmus(
        "and no more", "deadlock",
        {0: f"{expect(0, 128)} //right\n{expect(0, 144)} //wrong\n{bulk_load(AT, 128, 0)}\n"
            f"{wait(0, 0)}\n{READ}"},
        setup=f"{WRITE}\n{PROXY}\n{init(0)}", expect={0: ONES},
    ),
    Litmus(
        "a copy over ordinary writes needs the proxy fence", "missing_proxy_fence",
        {0: f"{WRITE}\n{PROXY} //right\nbar.warp.sync -1;\n{expect(0, 128)}\n"
            f"{bulk_load(AT, 128, 0)}\n{wait(0, 0)}\n{READ}"},
        setup=init(0), expect={0: ONES},
    ),
    Litmus(
        "a copy over what was read needs the proxy fence, by the text", "missing_proxy_fence",
        {0: f"{READ}\n{PROXY} //right\nbar.warp.sync -1;\n{expect(0, 128)}\n"
            f"{bulk_load(AT, 128, 0)}\n{wait(0, 0)}"},
        setup=f"{WRITE}\n{PROXY}\n{init(0)}", expect={0: lane_plus(100)}, profiles=("isa",),
    ),
    Litmus(
        "a copy must not overtake the readers", ("smem_race", "tma_load_not_waited"),
        {0: f"{wait(8, 0, '//right')}\n{PROXY}\n{expect(0, 128)}\n{bulk_load(AT, 128, 0)}\n"
            f"{wait(0, 0)}\n{wait(8, 0)}",
         1: f"{wait(16, 0)}\n{READ}\n{PROXY}\n{arrive(8)}", 2: arrive(16)},
        setup=f"{WRITE}\n{PROXY}\n{init(0, 8, 16)}", expect={1: lane_plus(100)}, threads=96,
        end="",
    ),
    Litmus(
        "a copy out reads what the proxy fence has shown it", "missing_proxy_fence",
        {0: f"{WRITE}\n{PROXY} //right\nbar.warp.sync -1;\n{bulk_store()}\n{COMMIT}\n{READ_WAIT}"},
        expect={0: lane_plus(100)},
    ),
    Litmus(
        "a proxy fence for global memory is none for shared", "missing_proxy_fence",
        {0: f"{WRITE}\n{PROXY} //right\nfence.proxy.async.global; //wrong\nbar.warp.sync -1;\n"
            f"{bulk_store()}\n{COMMIT}\n{READ_WAIT}"},
        expect={0: lane_plus(100)},
    ),
    Litmus(
        "a copy out needs the other warp's writes", ("smem_race", "tma_store_not_waited"),
        {0: f"{wait(0, 0, '//right')}\n{bulk_store()}\n{COMMIT}\n{READ_WAIT}\n{wait(0, 0)}",
         1: f"{wait(8, 0)}\n{WRITE}\n{PROXY}\n{arrive(0)}", 2: arrive(8)},
        setup=f"{WRITE.replace('100', '50')}\n{PROXY}\n{init(0, 8)}", threads=96,
        expect={0: lane_plus(100)},
    ),
    Litmus(
        "what a copy out reads must not be overwritten", "tma_store_not_waited",
        {0: f"{bulk_store()}\n{COMMIT}\n{READ_WAIT} //right\nbar.warp.sync -1;\n"
            f"{WRITE.replace('100', '50')}\n{READ_WAIT}"},
        setup=f"{WRITE}\n{PROXY}", expect={0: lane_plus(100)}, numbers=True,
    ),
    Litmus(
        "a group is what was committed", "tma_store_not_waited",
        {0: f"{bulk_store()}\n{COMMIT} //right\n{READ_WAIT}\nbar.warp.sync -1;\n"
            f"{WRITE.replace('100', '50')}\n{COMMIT}\n{READ_WAIT}"},
        setup=f"{WRITE}\n{PROXY}", expect={0: lane_plus(100)}, numbers=True,
    ),
    Litmus(
        "a wait may leave no group out", "tma_store_not_waited",
        {0: f"{bulk_store()}\n{COMMIT}\n{READ_WAIT} //right\n"
            "@%lead cp.async.bulk.wait_group.read 1; //wrong\nbar.warp.sync -1;\n"
            f"{WRITE.replace('100', '50')}\n{READ_WAIT}"},
        setup=f"{WRITE}\n{PROXY}", expect={0: lane_plus(100)}, numbers=True,
    ),
    Litmus(
        "a copy out must be waited for before the end", "exit_with_work_in_flight",
        {0: f"{bulk_store()}\n{COMMIT}\n{READ_WAIT} //right"},
        setup=f"{WRITE}\n{PROXY}", expect={0: lane_plus(100)},
    ),
    Litmus(
        "a copy in must be waited for before the end", "exit_with_work_in_flight",
        {0: f"{expect(0, 128)}\n{bulk_load(AT, 128, 0)}\n{wait(0, 0, '//right')}"},
        setup=init(0), expect={},
    ),
    Litmus(
        "cp.async must be waited for", "cp_async_not_waited",
        {0: "shl.b32 %r4, %lane, 2;\nmov.u32 %r3, smem;\nadd.u32 %r3, %r3, %r4;\n"
            f"cp.async.ca.shared.global [%r3+{AT}], [%in], 4;\ncp.async.commit_group;\n"
            f"cp.async.wait_group 0; //right\n{READ}\ncp.async.wait_group 0;"},
        setup=WRITE, expect={0: ONES}, numbers=True,
    ),
    Litmus(
        "cp.async is waited for by its own thread only", "cp_async_not_waited",
        {0: "shl.b32 %r4, %lane, 2;\nmov.u32 %r3, smem;\nadd.u32 %r3, %r3, %r4;\n"
            f"cp.async.ca.shared.global [%r3+{AT}], [%in], 4;\ncp.async.commit_group;\n"
            f"cp.async.wait_group 0; //right\n{arrive(0)}\ncp.async.wait_group 0;",
         1: f"{wait(0, 0)}\n{READ}"},
        setup=f"{WRITE}\n{init(0)}", expect={1: ONES},
    ),
]  # fmt: skip

BOUNDS = [
    Litmus(
        "inside shared memory", "smem_out_of_bounds",
        {0: "@%lead st.shared.b32 [smem+16380], %lane; //right\n"
            f"@%lead st.shared.b32 [smem+16384], %lane; //wrong\n{store(1)}"}, expect={0: 1},
    ),
    Litmus(
        "aligned", "smem_misaligned",
        {0: "@%lead st.shared.b32 [smem+1024], %lane; //right\n"
            f"@%lead st.shared.b32 [smem+1026], %lane; //wrong\n{store(1)}"}, expect={0: 1},
    ),
    Litmus(
        "inside a tensor", "global_out_of_bounds",
        {0: "ld.global.b32 %r2, [%in+12284]; //right\n"
            f"ld.global.b32 %r2, [%in+12288]; //wrong\n{store('%r2')}"}, expect={0: TWOS},
    ),
    Litmus(
        "a register that was written", "register_unwritten_read",
        {0: f"mov.b32 %r7, 3; //right\nadd.u32 %r7, %r7, 1;\n{store('%r7')}"}, expect={0: 4},
    ),
]  # fmt: skip

CASES = SHARED + NARROW + COPIES + BOUNDS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right(case):
    check_right(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong(case):
    check_wrong(case)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.code in ("smem_unwritten_read", "register_unwritten_read")],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("profile", ["silicon", "isa"])
def test_what_nobody_wrote_may_be_poison(case, profile):
    """Where the caller asks for it: no finding, and what is read shows in the numbers."""
    ran, out = case.run(False, unwritten="poison", profile=profile)
    assert ran.findings == []
    if case.code == "smem_unwritten_read":
        assert (out == 0xFFFFFFFF).all()
    else:
        assert not case.is_right(out)
