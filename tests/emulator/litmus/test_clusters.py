# SPDX-License-Identifier: Apache-2.0
"""CTAs of a cluster: distributed shared memory, remote arrivals, multicast, beginning and end (PTX
ISA 9.1 sections 9.7.13.3, 9.7.13.4 and 9.7.13.15; CUDA C++ Programming Guide, distributed shared
memory). Two CTAs of one warp each; CTA 1 goes to the memory of CTA 0."""

import pytest

from .harness import PROXY, Litmus, check_right, check_wrong, expect, init, wait
from .test_global import MEET, PEER, SECOND
from .test_memory import AT, ONES, READ, WRITE, lane_plus

PAIR = {"grid": 2, "cluster": 2, "threads": 32}
RELAXED = "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;"
FAR = f"mov.u32 %r12, smem;\n{PEER}\nshl.b32 %r4, %lane, 2;\nadd.u32 %r14, %r13, %r4;"
TWO_HUNDRED = "add.u32 %r2, %lane, 200;"
PUT = f"{FAR}\n{TWO_HUNDRED}\nst.shared::cluster.b32 [%r14+{AT}], %r2;"
REMOTE = "bar.warp.sync -1;\n@%lead mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r13];"
WAIT = wait(0, 0, order=".acquire.cluster")
ONLY_ZERO = "setp.ne.u32 %p3, %cta, 0;\n@%p3 bra ONLY;\n{}\nONLY:"


def right(text):
    return "\n".join(f"{line} //right" for line in text.splitlines())


def wrong(text):
    return "\n".join(f"{line} //wrong" for line in text.splitlines())


LIFE = [
    Litmus(
        "a CTA must have started when it is written to", "cluster_cta_not_started",
        {0: f"{right(MEET)}\n{SECOND.format('', PUT)}\n{MEET}\n{ONLY_ZERO.format(READ)}"},
        expect={0: lane_plus(200)}, **PAIR,
    ),
    Litmus(
        "and must not end before", "cluster_cta_exited",
        {0: f"{MEET}\n{SECOND.format('', PUT)}\n{right(MEET)}"}, end=None, **PAIR,
    ),
    Litmus(
        "nor before it is read", "cluster_cta_exited",
        {0: f"{WRITE}\n{MEET}\n"
            + SECOND.format("", f"{FAR}\nld.shared::cluster.b32 %r5, [%r14+{AT}];\n"
                                "st.global.b32 [%out], %r5;") + f"\n{right(MEET)}"},
        expect={1: lane_plus(100)}, end=None, **PAIR,
    ),
    Litmus(
        "nor before the last arrival at its barrier", "cluster_cta_exited",
        {0: f"{MEET}\n" + SECOND.format(right(WAIT), f"mov.u32 %r12, smem;\n{PEER}\n{REMOTE}")},
        setup=init(0), end=None, **PAIR,
    ),
    Litmus(
        "a relaxed arrival is enough to stay", "cluster_cta_exited",
        {0: f"{MEET}\n" + SECOND.format("", f"{FAR}\nld.shared::cluster.b32 %r5, [%r14+{AT}];")
            + f"\n{right(RELAXED)}"},
        setup=WRITE, end=None, **PAIR,
    ),
]  # fmt: skip

ORDER = [
    Litmus(
        "a relaxed arrival at the cluster's barrier publishes nothing", "sync_scope_too_narrow",
        {0: f"{WRITE}\n{MEET}\n{SECOND.format('', PUT)}\n{right(MEET)}\n{wrong(RELAXED)}\n"
            f"{ONLY_ZERO.format(READ)}"},
        expect={0: lane_plus(200)}, **PAIR,
    ),
    Litmus(
        "but what a fence of the cluster covers", "sync_scope_too_narrow",
        {0: f"{WRITE}\n{MEET}\n{SECOND.format('', PUT)}\nfence.acq_rel.cluster; //right\n"
            f"fence.acq_rel.cta; //wrong\n{RELAXED}\n{ONLY_ZERO.format(READ)}"},
        expect={0: lane_plus(200)}, **PAIR,
    ),
    Litmus(
        "and the barriers that fence.mbarrier_init shows", "mbarrier_init_race",
        {0: f"@%lead mbarrier.init.shared::cta.b64 [smem], 1;\n"
            f"@%lead fence.mbarrier_init.release.cluster; //right\n{RELAXED}\n"
            + SECOND.format(WAIT, f"mov.u32 %r12, smem;\n{PEER}\n{REMOTE}") + f"\n{MEET}"},
        end=None, **PAIR,
    ),
    Litmus(
        "a remote store, then a remote arrival", "smem_race",
        {0: f"{WRITE}\n{MEET}\n" + SECOND.format(
            f"{WAIT}\n{READ}",
            f"{FAR}\n{TWO_HUNDRED}\n{wrong(REMOTE)}\nst.shared::cluster.b32 [%r14+{AT}], %r2;\n"
            f"{right(REMOTE)}") + f"\n{MEET}"},
        setup=init(0), expect={0: lane_plus(200)}, **PAIR,
    ),
    Litmus(
        "read before a neighbour overwrites it", "smem_race",
        {0: f"{WRITE}\n{MEET}\n" + SECOND.format(f"{READ}\n{right(MEET)}", f"{right(MEET)}\n{PUT}")
            + f"\n{MEET}"},
        expect={0: lane_plus(100)}, **PAIR,
    ),
    Litmus(
        "a flag in another CTA's memory reaches it at cluster scope", "sync_scope_too_narrow",
        {0: f"{WRITE}\n@%lead st.shared.b32 [smem+64], 0;\n{MEET}\n" + SECOND.format(
            "@!%lead bra SEEN;\nSEE:\nld.acquire.cluster.shared.b32 %r7, [smem+64];\n"
            f"setp.ne.u32 %p2, %r7, 7;\n@%p2 bra SEE;\nSEEN:\nbar.warp.sync -1;\n{READ}",
            f"{PUT}\nbar.warp.sync -1;\n"
            "@%lead st.release.cluster.shared::cluster.b32 [%r13+64], 7; //right\n"
            "@%lead st.release.cta.shared::cluster.b32 [%r13+64], 7; //wrong") + f"\n{MEET}"},
        expect={0: lane_plus(200)}, **PAIR,
    ),
]  # fmt: skip

ST_ASYNC = (
    f"{FAR}\n{TWO_HUNDRED}\nst.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 "
    f"[%r14+{AT}], %r2, [%r13];"
)
MULTICAST = (
    "mov.b16 %h0, 3;\n@%lead cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    f".multicast::cluster [smem+{AT}], [%in], 128, [smem], %h0;"
)
FREE = f"{PROXY}\nbar.warp.sync -1;\n{MEET}"  # both CTAs are done with the words that come anew
ASYNC = [
    Litmus(
        "a store that a barrier counts must be waited for", ("st_async_not_waited", "smem_race"),
        {0: f"{WRITE}\n@%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem], 128;\n{MEET}\n"
            + SECOND.format(f"{right(WAIT)}\n{READ}\n{wait(0, 0)}", ST_ASYNC) + f"\n{MEET}"},
        setup=init(0), expect={0: lane_plus(200)}, **PAIR,
    ),
    Litmus(
        "with the bytes that come, not more", "deadlock",
        {0: "@%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem], 128; //right\n"
            "@%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem], 132; //wrong\n"
            f"{MEET}\n" + SECOND.format(f"{WAIT}\n{READ}", ST_ASYNC) + f"\n{MEET}"},
        setup=init(0), expect={0: lane_plus(200)}, **PAIR,
    ),
    Litmus(
        "nor fewer", ("st_async_not_waited", "mbarrier_tx_underflow", "cluster_cta_exited"),
        {0: f"{WRITE}\n@%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem], 128; //right\n"
            "@%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem], 64; //wrong\n"
            f"{MEET}\n" + SECOND.format(
                f"{WAIT}\n{READ}",
                f"{FAR}\n{TWO_HUNDRED}\nsetp.lt.u32 %p2, %lane, 16;\n@%p2 "
                + ST_ASYNC.splitlines()[-1] + "\n@!%p2 " + ST_ASYNC.splitlines()[-1])
            + f"\n{MEET}"},
        setup=init(0), expect={0: lane_plus(200)}, **PAIR,
    ),
    Litmus(
        "a multicast needs every CTA's place free", ("smem_race", "tma_load_not_waited"),
        {0: f"{WRITE}\n{MEET}\nld.shared.b32 %r5, [%r3+{AT}];\n{PROXY}\nbar.warp.sync -1;\n"
            f"{right(MEET)}\n{expect(0, 128)}\n"
            + ONLY_ZERO.format(MULTICAST) + f"\n{wait(0, 0)}\n{READ}\n{MEET}"},
        setup=f"{WRITE}\n{init(0)}", expect={0: ONES, 1: ONES}, **PAIR,
    ),
    Litmus(
        "and every CTA's barrier there", "mbarrier_init_race",
        {0: f"{PROXY}\n{MEET}\n{init(0)}\n{right(MEET)}\n"
            + f"{expect(0, 128)}\n" + ONLY_ZERO.format(f"{wait(8, 0)}\n{MULTICAST}")
            + f"\n{wait(0, 0)}\n{READ}\n{MEET}"},
        setup=f"{init(8)}\n@%lead mbarrier.arrive.shared::cta.b64 _, [smem+8];",
        expect={0: ONES, 1: ONES}, **PAIR,
    ),
    Litmus(
        "every CTA of a multicast waits for itself", ("tma_load_not_waited", "smem_race"),
        {0: f"{WRITE}\n{FREE}\n{expect(0, 128)}\n" + ONLY_ZERO.format(MULTICAST) + "\n"
            + SECOND.format(f"{wait(0, 0)}\n{READ}", f"{right(wait(0, 0))}\n{READ}\n{wait(0, 0)}")
            + f"\n{MEET}"},
        setup=init(0), expect={0: ONES, 1: ONES}, **PAIR,
    ),
    Litmus(
        "a copy to another CTA must be waited for there", ("tma_load_not_waited", "smem_race"),
        {0: f"{WRITE}\n{PROXY}\n{expect(0, 128)}\n{MEET}\n" + SECOND.format(
            f"{right(wait(0, 0))}\n{READ}\n{wait(0, 0)}",
            f"mov.u32 %r12, smem;\n{PEER}\n@%lead cp.async.bulk.shared::cluster.shared::cta."
            f"mbarrier::complete_tx::bytes [%r13+{AT}], [smem+{AT}], 128, [%r13];")
            + f"\n{MEET}"},
        setup=init(0), expect={0: lane_plus(100)}, **PAIR,
    ),
]  # fmt: skip

CASES = LIFE + ORDER + ASYNC


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right(case):
    check_right(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong(case):
    check_wrong(case)
