# SPDX-License-Identifier: Apache-2.0
"""Global memory, within a CTA and between CTAs; clusters (PTX ISA 9.1 section 8)."""

import pytest

from .harness import PROXY, Litmus, arrive, check_right, check_wrong, expect, init, store, wait
from .test_memory import COMMIT, READ, WRITE, bulk_store, lane_plus

AT = 1024
PUT = "add.u32 %r2, %lane, 100;\nst.global.b32 [%out], %r2;"
# The word of the same lane in warp 0 of block 0; where the flag is: behind all threads' words.
FIRST = """ld.param.b64 %rd1, [p_out];
mul.wide.u32 %rd2, %lane, 4;
add.s64 %rd1, %rd1, %rd2;"""
GET = f"{FIRST}\nld.global.b32 %r5, [%rd1];\n{store('%r5')}"
FLAG = "ld.param.b64 %rd3, [p_data];\nadd.s64 %rd3, %rd3, 256;"  # in the input, which holds ones


def raise_flag(order, note=""):
    """Lane 0 stores 7 to the flag, after the warp's writes."""
    return (
        f"{FLAG}\nmov.b32 %r6, 7;\nbar.warp.sync -1;\n@%lead st{order}.global.b32 [%rd3], %r6; "
        f"{note}"
    )


_serial = iter(range(1000))


def see_flag(order, note=""):
    """Lane 0 waits until the flag is 7, then the warp goes on."""
    label = f"SPIN{next(_serial)}"
    return "\n".join(
        f"{line} {note}"
        for line in (
            *FLAG.splitlines(),
            f"@!%lead bra {label}_END;",
            f"{label}:",
            f"ld{order}.global.b32 %r7, [%rd3];",
            "setp.ne.u32 %p2, %r7, 7;",
            f"@%p2 bra {label};",
            f"{label}_END:",
            "bar.warp.sync -1;",
        )
    )


WITHIN = [
    Litmus(
        "a barrier between writer and reader", "global_race",
        {0: f"{PUT}\nbar.sync 1, 64; //right", 1: f"bar.sync 1, 64; //right\n{GET}"},
        expect={0: lane_plus(100)},
    ),
    Litmus(
        "a reader before the next write", "global_race",
        {0: f"{wait(0, 0, '//right')}\n{PUT}\n{wait(0, 0)}", 1: f"{GET}\n{arrive(0)}"},
        setup=init(0), expect={0: lane_plus(100)},
    ),
    Litmus(
        "a release and an acquire", "global_race",
        {0: f"{PUT}\n{raise_flag('.release.gpu')}",
         1: f"{see_flag('.acquire.gpu', '//right')}\n{GET}"},
        expect={0: lane_plus(100)},
    ),
    Litmus(
        "a flag is no ordinary word", "global_race",
        {0: f"{PUT}\n{raise_flag('.release.gpu', '//right')}\n"
            "@%lead st.global.b32 [%rd3], %r6; //wrong",
         1: f"{see_flag('.acquire.gpu')}\n{GET}"},
        expect={1: lane_plus(100)},
    ),
    Litmus(
        "a relaxed flag needs a fence in front", "sync_scope_too_narrow",
        {0: f"{PUT}\nbar.warp.sync -1;\nfence.acq_rel.gpu; //right\n{raise_flag('.relaxed.gpu')}",
         1: f"{see_flag('.acquire.gpu')}\n{GET}"},
        expect={1: lane_plus(100)},
    ),
    Litmus(
        "a relaxed look needs a fence behind", "sync_scope_too_narrow",
        {0: f"{PUT}\n{raise_flag('.release.gpu')}",
         1: f"{see_flag('.relaxed.gpu')}\nfence.acq_rel.gpu; //right\n{GET}"},
        expect={1: lane_plus(100)}, profiles=("isa",),
    ),
    Litmus(
        "atomics do not race with each other", "global_race",
        {w: f"{FIRST}\nred.relaxed.gpu.global.add.u32 [%rd1], 1; //right\n"
            + ("red.relaxed.gpu.global.add.u32 [%rd1], 1; //wrong" if w else
               "ld.global.b32 %r2, [%rd1]; //wrong\nadd.u32 %r2, %r2, 1; //wrong\n"
               "st.global.b32 [%rd1], %r2; //wrong")
         for w in range(2)},
        expect={0: 0xEEEEEEF0},
    ),
    Litmus(
        "a copy out has written when it was waited for, not only read", "tma_store_not_waited",
        {0: f"{bulk_store()}\n{COMMIT}\n@%lead cp.async.bulk.wait_group 0; //right\n"
            f"@%lead cp.async.bulk.wait_group.read 0; //wrong\n{arrive(0)}",
         1: f"{wait(0, 0)}\n{GET}"},
        setup=f"{WRITE}\n{PROXY}\n{init(0)}", expect={1: lane_plus(100)},
    ),
    Litmus(
        "a copy in reads what the proxy fence has shown it", "missing_proxy_fence",
        {0: f"{PUT}\nfence.proxy.async.global; //right\nbar.warp.sync -1;\n{FIRST}\n"
            f"{expect(0, 128)}\n@%lead cp.async.bulk.shared::cluster.global.mbarrier::"
            f"complete_tx::bytes [smem+{AT}], [%rd1], 128, [smem];\n{wait(0, 0)}\n{READ}"},
        setup=init(0), expect={0: lane_plus(100)},
    ),
    Litmus(
        "a proxy fence for shared memory is none for global", "missing_proxy_fence",
        {0: f"{PUT}\nfence.proxy.async.global; //right\n{PROXY} //wrong\nbar.warp.sync -1;\n"
            f"{FIRST}\n{expect(0, 128)}\n@%lead cp.async.bulk.shared::cluster.global.mbarrier::"
            f"complete_tx::bytes [smem+{AT}], [%rd1], 128, [smem];\n{wait(0, 0)}\n{READ}"},
        setup=init(0), expect={0: lane_plus(100)},
    ),
    Litmus(
        "a copy must not read what is written meanwhile", "global_race",
        {0: f"{wait(8, 0, '//right')}\n{FIRST}\n{expect(0, 128)}\n@%lead cp.async.bulk."
            f"shared::cluster.global.mbarrier::complete_tx::bytes [smem+{AT}], [%rd1], 128, "
            f"[smem];\n{wait(0, 0)}\n{wait(8, 0)}",
         1: f"{FIRST}\nadd.u32 %r2, %lane, 100;\nst.global.b32 [%rd1], %r2;\n"
            f"fence.proxy.async.global;\n{arrive(8)}"},
        setup=init(0, 8), expect={0: lane_plus(100)},
    ),
]  # fmt: skip

SECOND = "setp.ne.u32 %p3, %cta, 0;\n@%p3 bra SECOND;\n{}\nbra DONE;\nSECOND:\n{}\nDONE:"
BETWEEN = [
    Litmus(
        "CTAs meet only through flags", "global_race",
        {0: SECOND.format(f"{PUT}\n{raise_flag('.release.gpu')}",
                          f"{see_flag('.acquire.gpu', '//right')}\n{GET}")},
        expect={0: lane_plus(100), 1: lane_plus(100)}, grid=2, threads=32,
    ),
    Litmus(
        "two CTAs, one word", "global_race",
        {0: f"{FIRST}\nadd.u32 %r2, %lane, %cta;\nst.global.b32 [%rd1], %r2; //wrong\n"
            "red.relaxed.gpu.global.add.u32 [%rd1], 1; //right"},
        expect={0: 0xEEEEEEF0}, grid=2, threads=32,
    ),
    Litmus(
        "a relaxed flag between CTAs needs its fences", "sync_scope_too_narrow",
        {0: SECOND.format(
            f"{PUT}\nbar.warp.sync -1;\nfence.acq_rel.gpu; //right\n{raise_flag('.relaxed.gpu')}",
            f"{see_flag('.acquire.gpu')}\n{GET}")},
        expect={0: lane_plus(100), 1: lane_plus(100)}, grid=2, threads=32,
    ),
    Litmus(
        "a copy out, then a flag, then another CTA's load", "global_race",
        {0: SECOND.format(
            f"{WRITE}\n{PROXY}\nbar.warp.sync -1;\n{bulk_store()}\n{COMMIT}\n"
            "@%lead cp.async.bulk.wait_group 0;\n"
            f"{raise_flag('.release.gpu')}",
            f"{see_flag('.acquire.gpu', '//right')}\n{GET}")},
        expect={0: lane_plus(100), 1: lane_plus(100)}, grid=2, threads=32,
    ),
]  # fmt: skip

MEET = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
PEER = "mapa.shared::cluster.u32 %r13, %r12, 0;"  # of CTA 0
CLUSTER = [
    Litmus(
        "another CTA's shared memory, behind the cluster's barrier", "smem_race",
        {0: f"{WRITE}\n{MEET}\n"
            + SECOND.format("", "mov.u32 %r12, smem;\n" + PEER + "\nshl.b32 %r4, %lane, 2;\n"
                            f"add.u32 %r13, %r13, %r4;\nadd.u32 %r2, %lane, 200;\n"
                            f"st.shared::cluster.b32 [%r13+{AT}], %r2;")
            + f"\nbarrier.cluster.arrive.aligned; //right\nbarrier.cluster.wait.aligned; //right\n"
            f"setp.eq.u32 %p3, %cta, 1;\n@%p3 bra FAR;\n{READ}\nFAR:\n{MEET}"},
        expect={0: lane_plus(200)}, grid=2, cluster=2, threads=32,
    ),
    Litmus(
        "a remote arrival releases at cluster scope", "sync_scope_too_narrow",
        {0: f"{WRITE}\n{MEET}\n"
            + SECOND.format(
                f"{wait(0, 0, order='.acquire.cluster')}\n{READ}",
                "mov.u32 %r12, smem;\n" + PEER + "\nshl.b32 %r4, %lane, 2;\n"
                "add.u32 %r14, %r13, %r4;\nadd.u32 %r2, %lane, 200;\n"
                f"st.shared::cluster.b32 [%r14+{AT}], %r2;\nbar.warp.sync -1;\n"
                "@%lead mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r13]; //right\n"
                "@%lead mbarrier.arrive.shared::cluster.b64 _, [%r13]; //wrong")
            + f"\n{MEET}"},
        setup=init(0), expect={0: lane_plus(200)}, grid=2, cluster=2, threads=32,
        profiles=("isa",),
    ),
    Litmus(
        "each lane tells the CTA that it wrote to", "sync_scope_too_narrow",
        {0: f"{WRITE}\n{MEET}\n"
            + SECOND.format(
                "",
                "mov.u32 %r12, smem;\nsetp.gt.u32 %p2, %lane, 1;\n@%p2 bra SENT;\n"
                f"ld.shared.b32 %r5, [smem+{AT + 64}];\n"
                "mapa.shared::cluster.u32 %r13, %r12, %lane;\nadd.u32 %r2, %lane, 200;\n"
                f"st.shared::cluster.b32 [%r13+{AT}], %r2;\n"
                "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r13]; //right\n"
                "mbarrier.arrive.shared::cluster.b64 _, [%r13]; //wrong\nSENT:")
            + f"\n{wait(0, 0, order='.acquire.cluster')}\n@%lead ld.shared.b32 %r5, [smem+{AT}];"
            f"\nshfl.sync.idx.b32 %r5, %r5, 0, 31, -1;\n{store('%r5')}\n{MEET}"},
        setup=init(0), expect={0: 200, 1: 201}, grid=2, cluster=2, threads=32, profiles=("isa",),
    ),
    Litmus(
        "a wait for a remote arrival acquires at cluster scope", "sync_scope_too_narrow",
        {0: f"{WRITE}\n{MEET}\n"
            + SECOND.format(
                f"{wait(0, 0, '//right', order='.acquire.cluster')}\n{wait(0, 0, '//wrong')}\n"
                f"{READ}",
                "mov.u32 %r12, smem;\n" + PEER + "\nshl.b32 %r4, %lane, 2;\n"
                "add.u32 %r14, %r13, %r4;\nadd.u32 %r2, %lane, 200;\n"
                f"st.shared::cluster.b32 [%r14+{AT}], %r2;\nbar.warp.sync -1;\n"
                "@%lead mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r13];")
            + f"\n{MEET}"},
        setup=init(0), expect={0: lane_plus(200)}, grid=2, cluster=2, threads=32,
        profiles=("isa",),
    ),
    Litmus(
        "one arrival a phase", "cluster_barrier_rearrive",
        {0: f"barrier.cluster.arrive.aligned; //wrong\n{MEET}\n{store(1)}"},
        expect={0: 1, 1: 1}, grid=2, cluster=2, threads=32,
    ),
    Litmus(
        "who waits has arrived", "cluster_barrier_no_arrive",
        {0: "barrier.cluster.arrive.aligned; //right\nbarrier.cluster.wait.aligned;\n" + store(1)},
        expect={0: 1, 1: 1}, grid=2, cluster=2, threads=32,
    ),
]  # fmt: skip

CASES = WITHIN + BETWEEN + CLUSTER


def test_the_other_access_is_of_another_cta():
    """A race in shared memory names the CTA of the other access where that is not the same."""
    ran, _ = CLUSTER[0].run(False)
    message, other = ran.findings[0].message, ran.findings[0].details["other"]
    assert ran.findings[0].cta == (1, 0, 0) and other["agent"] == "warp 0 of CTA (0, 0, 0)"
    assert "after the read by warp 0 of CTA (0, 0, 0)" in message


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right(case):
    check_right(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong(case):
    check_wrong(case)
