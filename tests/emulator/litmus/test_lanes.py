# SPDX-License-Identifier: Apache-2.0
"""Lanes of one warp: threads that nothing orders but what they meet at (PTX ISA 9.1 sections 8.9.5
and 9.7.13.2). Instructions that lanes converge for (.sync) do so under ``silicon`` only."""

import pytest

from .harness import Litmus, check_right, check_wrong, init, store, wait
from .test_memory import AT, ONES, lane_plus

PLACE = "shl.b32 %r4, %lane, 2;\nmov.u32 %r3, smem;\nadd.u32 %r3, %r3, %r4;"
NEXT = "xor.b32 %r6, %r3, 4;"  # the neighbour's word
PUT = f"{PLACE}\nadd.u32 %r2, %lane, 100;\nst.shared.b32 [%r3+{AT}], %r2;"
GET = f"{NEXT}\nld.shared.b32 %r5, [%r6+{AT}];\n{store('%r5')}"
SYNC = "bar.warp.sync -1;"


def swapped(lane):
    return (lane ^ 1) + 100



SHARED = [
    Litmus(
        "a neighbour's word, behind bar.warp.sync", "smem_race",
        {0: f"{PUT}\n{SYNC} //right\n{GET}"}, expect={0: swapped},
    ),
    Litmus(
        "read before the neighbour overwrites it", "smem_race",
        {0: f"{PUT}\n{SYNC}\n{GET}\n{SYNC} //right\nst.shared.b32 [%r3+{AT}], %lane;"},
        expect={0: swapped},
    ),
    Litmus(
        "one word, two writers", "smem_race",
        {0: f"{PUT}\n{SYNC} //right\n{NEXT}\nst.shared.b32 [%r6+{AT}], %lane;\n{SYNC}\n"
            f"ld.shared.b32 %r5, [%r3+{AT}];\n{store('%r5')}"},
        expect={0: lambda lane: lane ^ 1},
    ),
    Litmus(
        "any barrier of the warp's will do", "smem_race",
        {0: f"{PUT}\nbar.sync 1, 32; //right\n{GET}"}, expect={0: swapped},
    ),
    Litmus(
        "an mbarrier that all arrived at, too", "smem_race",
        {0: f"{PUT}\nmbarrier.arrive.shared::cta.b64 _, [smem];\n{wait(0, 0, '//right')}\n{GET}\n"
            f"{wait(0, 0)}"},
        setup=init(0, count=32), expect={0: swapped},
    ),
    Litmus(
        "who waits is who may read", "smem_race",
        {0: f"{PUT}\nmbarrier.arrive.shared::cta.b64 _, [smem];\n"
            "@!%lead bra WAITED; //wrong\n"
            f"{wait(0, 0)}\nWAITED:\n{GET}"},
        setup=init(0, count=32), expect={0: swapped},
    ),
    Litmus(
        "a tree in shared memory meets in every round", "smem_race",
        {0: f"{PUT}\n{SYNC}\n" + "\n".join(
            f"setp.lt.u32 %p2, %lane, {n};\n@%p2 ld.shared.b32 %r5, [%r3+{AT + 4 * n}];\n"
            f"@%p2 add.u32 %r2, %r2, %r5;\n@%p2 st.shared.b32 [%r3+{AT}], %r2;\n"
            + (f"{SYNC} //right" if n == 4 else SYNC) for n in (16, 8, 4, 2, 1))
            + f"\nld.shared.b32 %r5, [smem+{AT}];\n{store('%r5')}"},
        expect={0: sum(range(100, 132))},
    ),
    Litmus(
        "lanes that stay away are not met", "smem_race",
        {0: f"{PUT}\nsetp.ge.u32 %p2, %lane, 16;\n@%p2 bra HIGH;\n"
            "bar.warp.sync 65535;\nxor.b32 %r6, %r3, 4; //right\nxor.b32 %r6, %r3, 64; //wrong\n"
            f"ld.shared.b32 %r5, [%r6+{AT}];\n{store('%r5')}\nbra OUT;\nHIGH:\n{store(7)}\nOUT:\n"
            f"{SYNC}"},
        expect={0: lambda lane: (lane ^ 1) + 100 if lane < 16 else 7},
    ),
    Litmus(
        "a shuffle promises no order of memory", "smem_race",
        {0: f"{PUT}\n{SYNC} //right\nshfl.sync.bfly.b32 %r7, %lane, 1, 31, -1;\n{GET}"},
        expect={0: swapped}, profiles=("isa",),
    ),
    Litmus(
        "nor does a vote", "smem_race",
        {0: f"{PUT}\n{SYNC} //right\nvote.sync.ballot.b32 %r7, %lead, -1;\n{GET}"},
        expect={0: swapped}, profiles=("isa",),
    ),
    Litmus(
        "nor does ldmatrix", "smem_race",
        {0: f"{PUT}\n{SYNC} //right\nshl.b32 %r7, %lane, 4;\nmov.u32 %r8, smem;\n"
            f"add.u32 %r7, %r7, %r8;\nldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r5}}, "
            f"[%r7+{AT}];\n{store('%r5')}"},
        expect={0: lane_plus(100)}, profiles=("isa",),
    ),
    Litmus(
        "what a warp's cp.async brought, by another lane", "cp_async_not_waited",
        {0: f"{PLACE}\ncp.async.ca.shared.global [%r3+{AT}], [%in], 4;\n"
            f"cp.async.commit_group;\n{SYNC} //wrong\ncp.async.wait_group 0;\n{SYNC} //right\n"
            f"{GET}"},
        expect={0: ONES},
    ),
    Litmus(
        "a count by atomics, then its result", "smem_race",
        {0: f"red.shared.add.u32 [smem+{AT}], 1;\n{SYNC} //right\n"
            f"ld.shared.b32 %r5, [smem+{AT}];\n{store('%r5')}"},
        setup=f"@%lead st.shared.b32 [smem+{AT}], 0;", expect={0: 32},
    ),
    Litmus(
        "one store, one value a word", "smem_race",
        {0: f"mov.b32 %r2, 5; //right\nmov.b32 %r2, %lane; //wrong\nst.shared.b32 [smem+{AT}], "
            f"%r2;\n{SYNC}\nld.shared.b32 %r5, [smem+{AT}];\n{store('%r5')}"},
        expect={0: 5},
    ),
    Litmus(
        "halfwords of one word are two places", "smem_race",
        {0: "shl.b32 %r4, %lane, 1; //right\nand.b32 %r4, %lane, 62; //wrong\nmov.u32 %r3, smem;\n"
            f"add.u32 %r3, %r3, %r4;\nst.shared.u16 [%r3+{AT}], %lane;\n{SYNC}\n"
            f"ld.shared.u16 %r5, [%r3+{AT}];\n{store('%r5')}"},
        expect={0: lambda lane: lane},
    ),
    Litmus(
        "parts of a warp arrive in turn", "smem_race",
        {0: f"setp.ge.u32 %p2, %lane, 16;\n@%p2 bra HIGH;\n{PUT}\n"
            "mbarrier.arrive.shared::cta.b64 _, [smem];\nbra OUT;\nHIGH:\n"
            f"mbarrier.arrive.shared::cta.b64 _, [smem]; //wrong\n{PUT}\n"
            "mbarrier.arrive.shared::cta.b64 _, [smem]; //right\nOUT:\nbar.warp.sync -1;",
         1: f"{wait(0, 0)}\n{PLACE}\nld.shared.b32 %r5, [%r3+{AT}];\n{store('%r5')}"},
        setup=f"{init(0, count=32)}\n{PUT.replace('100', '50')}", expect={1: lane_plus(100)},
    ),
]  # fmt: skip

CASES = SHARED


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right(case):
    check_right(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong(case):
    check_wrong(case)


def test_a_message_names_both_lanes():
    (case,) = [case for case in SHARED if case.name.startswith("a neighbour's word")]
    (finding,) = case.run(False)[0].findings
    assert "warp 0, lane 0" in finding.message and "warp 0, lane 1" in finding.message
    assert "bar.warp.sync" in finding.message
    assert finding.details["other"]["instruction"].startswith("st.shared")
