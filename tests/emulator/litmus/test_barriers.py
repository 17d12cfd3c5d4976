# SPDX-License-Identifier: Apache-2.0
"""mbarriers, named barriers, clusters, Tensor Memory's life, and other rules of a run."""

import pytest

from .harness import (
    A_AT,
    A_BYTES,
    AFTER,
    B_AT,
    B_BYTES,
    BEFORE,
    PROXY,
    Litmus,
    arrive,
    bulk_load,
    check_right,
    check_wrong,
    commit,
    expect,
    init,
    mma,
    operands,
    store,
    tld,
    wait,
)
from .test_memory import ONES, READ, WRITE, lane_plus

INIT = "@%lead mbarrier.init.shared::cta.b64 [smem], 1;"
ARRIVE = "@%lead mbarrier.arrive.shared::cta.b64 _, [smem];"
FENCE = "@%lead fence.mbarrier_init.release.cluster;"

MBARRIER = [
    Litmus(
        "initialised before use", "mbarrier_not_initialised",
        {0: f"{arrive(0)}\n{wait(0, 0)}\n{store(1)}"}, setup=f"{INIT} //right", expect={0: 1},
    ),
    Litmus(
        "initialised where others can know it", ("mbarrier_init_race", "mbarrier_not_initialised"),
        {0: f"{INIT}\n{arrive(16)}\n{arrive(0)}",
         1: f"{wait(16, 0, '//right')}\n{wait(0, 0)}\n{store(1)}"},
        setup=init(16), expect={1: 1},
    ),
    Litmus(
        "shown to the async proxy", "missing_mbarrier_init_fence",
        {0: f"{expect(0, 128)}\n{bulk_load(1024, 128, 0)}\n{wait(0, 0)}\n{READ}"},
        setup=f"{INIT}\n{FENCE} //right", expect={0: ONES},
    ),
    Litmus(
        "shown to the tensor core", "missing_mbarrier_init_fence",
        {0: f"{expect(8, A_BYTES + B_BYTES)}\n{bulk_load(A_AT, A_BYTES, 8)}\n"
            f"{bulk_load(B_AT, B_BYTES, 8, start=A_BYTES)}\n{wait(8, 0)}\n{mma()}\n{commit(0)}\n"
            f"{wait(0, 0)}\n{AFTER}\n{tld()}\ntcgen05.wait::ld.sync.aligned;\n{store('%r2')}"},
        setup=f"{init(8)}\n{INIT}\n{FENCE} //right", expect={0: 0x42000000}, tmem=32,
    ),
    Litmus(
        "initialised once", "mbarrier_double_init",
        {0: f"{arrive(0)}\n{wait(0, 0)}\n{INIT} //wrong\n{store(1)}"}, setup=INIT, expect={0: 1},
    ),
    Litmus(
        "initialised with one count", "mbarrier_double_init",
        {0: f"{arrive(0)}\n{wait(0, 0)}\n{store(1)}"},
        setup=f"{INIT.replace('1;', '2;')} //wrong\n{INIT}", expect={0: 1},
    ),
    Litmus(
        "initialised once, to the letter", "mbarrier_double_init",
        {0: f"{arrive(0)}\n{wait(0, 0)}\n{store(1)}"}, setup=f"{INIT}\n{INIT} //wrong",
        expect={0: 1}, profiles=("isa",),
    ),
    Litmus(
        "not used after inval", "mbarrier_not_initialised",
        {0: f"{arrive(0)}\n{wait(0, 0)}\n@%lead mbarrier.inval.shared::cta.b64 [smem]; //wrong\n"
            f"{ARRIVE}\n{wait(0, 1)}\n{store(1)}"},
        setup=INIT, expect={0: 1},
    ),
    Litmus(
        "as many arrivals as it expects", "mbarrier_overflow",
        {0: f"{expect(0, 16)}\n{ARRIVE} //wrong\n{bulk_load(1024, 16, 0)}\n{wait(0, 0)}\n"
            f"{store(1)}"},
        setup=init(0), expect={0: 1},
    ),
    Litmus(
        "no fewer", "deadlock",
        {0: arrive(0), 1: f"{arrive(0)} //right".replace(";\n@", "; //right\n@"),
         2: f"{wait(0, 0)}\n{store(1)}"},
        setup=init(0, count=2), threads=96, expect={2: 1},
    ),
    Litmus(
        "the parity of the phase that is next", "deadlock",
        {0: arrive(0), 1: f"{wait(0, 0)}\n{wait(0, 1, '//wrong')}\n{store(1)}"},
        setup=init(0), expect={1: 1},
    ),
    Litmus(
        "every phase is seen by who waits for each", "mbarrier_missed_phase",
        {0: f"{arrive(0)}\n{wait(8, 0, '//right')}\n{arrive(0)}\n{wait(8, 1, '//right')}\n"
            f"{arrive(0)}\n{arrive(16)}",
         1: f"{wait(16, 0, '//wrong')}\n{wait(0, 0)}\n{arrive(8)}\n{wait(0, 1)}\n{arrive(8)}\n"
            f"{wait(0, 0)}\n{store(1)}"},
        setup=init(0, 8, 16), expect={1: 1},
    ),
    Litmus(
        "its bytes are nobody else's", "mbarrier_ordinary_access",
        {0: f"{store(1)}\n@%lead st.shared.b32 [smem+4], %lane; //wrong\n"
            "@%lead st.shared.b32 [smem+8], %lane; //right"},
        setup=INIT, expect={0: 1},
    ),
    Litmus(
        "a token of this phase or the last", "mbarrier_stale_token",
        {0: "@%lead mbarrier.arrive.shared::cta.b64 %rd3, [smem];\n"
            f"{wait(0, 0)}\n@%lead mbarrier.arrive.shared::cta.b64 %rd3, [smem]; //right\n"
            f"{ARRIVE} //wrong\n{wait(0, 1)}\n"
            "@!%lead bra SKIP;\n"
            "mbarrier.test_wait.shared::cta.b64 %p2, [smem], %rd3;\nSKIP:\nbar.warp.sync -1;\n"
            f"{store(1)}"},
        setup=INIT, expect={0: 1},
    ),
    Litmus(
        "noComplete does not complete", "mbarrier_unexpected_completion",
        {0: "@%lead mbarrier.arrive.noComplete.shared::cta.b64 %rd3, [smem], 1;\n"
            f"{ARRIVE} //right\n{wait(0, 0, '//right')}\n{store(1)}"},
        setup="@%lead mbarrier.init.shared::cta.b64 [smem], 2; //right\n"
              "@%lead mbarrier.init.shared::cta.b64 [smem], 1; //wrong",
        expect={0: 1},
    ),
    Litmus(
        "a count from 1", "mbarrier_bad_count",
        {0: f"{arrive(0)}\n{wait(0, 0)}\n{store(1)}"},
        setup=f"{INIT} //right\n@%lead mbarrier.init.shared::cta.b64 [smem], 0; //wrong",
        expect={0: 1},
    ),
    Litmus(
        "a multiple of 8", "mbarrier_misaligned",
        {0: store(1)}, setup=f"{INIT} //right\n{INIT.replace('smem', 'smem+4')} //wrong",
        expect={0: 1},
    ),
    Litmus(
        "a transaction count in range", "mbarrier_tx_overflow",
        {0: f"{store(1)}\n@%lead mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [smem], 1048575;\n"
            "@%lead mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [smem], 1; //wrong"},
        setup=INIT, expect={0: 1},
    ),
]  # fmt: skip

SYNC = "bar.sync 1, 64;"
NAMED = [
    Litmus(
        "a count of threads that come", "deadlock",
        {0: f"{SYNC} //right\nbar.sync 1, 96; //wrong\n{store(1)}",
         1: f"{SYNC} //right\nbar.sync 1, 96; //wrong\n{store(1)}"},
        expect={0: 1, 1: 1},
    ),
    Litmus(
        "the same count for all", "named_barrier_count_mismatch",
        {0: f"{SYNC}\n{store(1)}", 1: f"{SYNC} //right\nbar.sync 1, 96; //wrong\n{store(1)}"},
        expect={0: 1, 1: 1},
    ),
    Litmus(
        "whole warps", "named_barrier_bad_count",
        {0: f"{SYNC} //right\nbar.sync 1, 48; //wrong\n{store(1)}", 1: f"{SYNC}\n{store(1)}"},
        expect={0: 1, 1: 1},
    ),
    Litmus(
        "one of sixteen", "named_barrier_bad_id",
        {0: f"bar.sync 15, 32; //right\nbar.sync 16, 32; //wrong\n{store(1)}"}, expect={0: 1},
    ),
    Litmus(
        "who only arrives has not waited", "smem_race",
        {0: f"{WRITE}\n{SYNC}", 1: f"{SYNC} //right\nbar.arrive 1, 64; //wrong\n{READ}"},
        setup=WRITE.replace("100", "50"), expect={1: lane_plus(100)},
    ),
    Litmus(
        "who arrives orders what it did", "smem_race",
        {0: f"bar.arrive 1, 64; //wrong\n{WRITE}\nbar.arrive 1, 64; //right",
         1: f"{SYNC}\n{READ}"},
        setup=WRITE.replace("100", "50"), expect={1: lane_plus(100)},
    ),
    Litmus(
        "each its own", "smem_race",
        {0: f"{WRITE}\n{SYNC}", 1: f"{SYNC} //right\nbar.sync 2, 64; //wrong\n{READ}",
         2: "bar.sync 2, 64; //wrong", 3: "bar.sync 1, 64; //wrong"},
        setup=WRITE.replace("100", "50"), threads=128, expect={1: lane_plus(100)},
    ),
    Litmus(
        "more come than it counts", ("named_barrier_race", "smem_race", "deadlock"),
        {w: f"{WRITE if w == 3 else ''}\nbar.sync 1, 128; //right\nbar.sync 1, 96; //wrong\n"
            f"{READ if w == 0 else store(1)}" for w in range(4)},
        setup=WRITE.replace("100", "50"), threads=128, expect={0: lane_plus(100), 3: 1},
    ),
    Litmus(
        "two groups, one barrier, in turn", "named_barrier_race",
        {w: f"{SYNC}\n{store(1)}\nbar.sync 2, 128; //right" if w < 2 else
            f"bar.sync 2, 128; //right\n{SYNC}\n{store(2)}" for w in range(4)},
        threads=128, expect={0: 1, 1: 1, 2: 2, 3: 2},
    ),
    Litmus(
        "all lanes of the warp", "divergent_aligned",
        {0: f"bar.sync 1, 32; //right\n@%lead bar.sync 1, 32; //wrong\n{store(1)}"},
        expect={0: 1},
    ),
]  # fmt: skip

ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+128], {};"
FREE = "ld.shared.b32 %r0, [smem+128];\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r0, {};"
PERMIT = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
PUT = (
    "ld.shared.b32 %r0, [smem+128];\n"
    "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r0], {%lane};\ntcgen05.wait::st.sync.aligned;"
)
TMEM = [
    Litmus(
        "freed", "tmem_not_freed",
        {0: f"{FREE.format(32).splitlines()[0]}\n{FREE.format(32).splitlines()[1]} //right\n"
            f"{store(1)}"},
        setup=ALLOC.format(32), expect={0: 1},
    ),
    Litmus(
        "freed once", "tmem_double_dealloc",
        {0: f"{FREE.format(32)}\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r0, 32; //wrong\n"
            f"{store(1)}"},
        setup=ALLOC.format(32), expect={0: 1},
    ),
    Litmus(
        "freed as allocated", "tmem_dealloc_mismatch",
        {0: "ld.shared.b32 %r0, [smem+128];\n"
            "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r0, 64; //right\n"
            f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r0, 32; //wrong\n{store(1)}"},
        setup=ALLOC.format(64), expect={0: 1},
    ),
    Litmus(
        "not used before", "tmem_use_before_alloc",
        {0: f"{PUT} //right".replace(";\n", "; //right\n") + "\nmov.b32 %r0, 0; //wrong\n"
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r0], {%lane}; //wrong\n"
            f"{store(1)}\n{FREE.format(32)} //right".replace(
                f"{FREE.format(32)} //right", FREE.format(32).replace(";", "; //right"))},
        setup=f"{ALLOC.format(32)} //right", expect={0: 1},
    ),
    Litmus(
        "not used after", "tmem_use_after_dealloc",
        {0: f"{PUT}\n{FREE.format(32)}\n"
            f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r0], {{%lane}}; //wrong\n{store(1)}"},
        setup=ALLOC.format(32), expect={0: 1},
    ),
    Litmus(
        "not more than there is", "deadlock",
        {0: f"{FREE.format(512)}\n{store(1)}"},
        setup=f"{ALLOC.format(512)}\n{ALLOC.format(512).replace('128', '132')} //wrong",
        expect={0: 1},
    ),
    Litmus(
        "a power of two", "tmem_alloc_bad_size",
        {0: f"{FREE.format(64)}\n{store(1)}"},
        setup=f"{ALLOC.format(64)} //right\n{ALLOC.format(48)} //wrong", expect={0: 1},
    ),
    Litmus(
        "not after the permit is given up", "tmem_alloc_after_relinquish",
        {0: f"{FREE.format(32)}\n{store(1)}"},
        setup=f"{PERMIT} //wrong\n{ALLOC.format(32)}", expect={0: 1},
    ),
    Litmus(
        "a warp's own lanes", "tmem_lane_access",
        {1: "ld.shared.b32 %r0, [smem+128];\nadd.u32 %r0, %r0, 2097152; //right\n"
            "add.u32 %r0, %r0, 4194304; //wrong\n"
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r0], {%lane};\n"
            f"tcgen05.wait::st.sync.aligned;\n{store(1)}"},
        tmem=32, expect={1: 1},
    ),
    Litmus(
        "a warp's own lanes, by their name", "tmem_lane_access",
        {1: "ld.shared.b32 %r0, [smem+128];\nadd.u32 %r0, %r0, 2097152; //right\n"
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r0], {%lane};\n"
            f"tcgen05.wait::st.sync.aligned;\n{store(1)}"},
        tmem=32, expect={1: 1}, profiles=("isa",),
    ),
    Litmus(
        "written before it is read", "tmem_unwritten_read",
        {0: f"{PUT.splitlines()[0]}\n{PUT.splitlines()[1]} //right\n{PUT.splitlines()[2]}\n"
            f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r2}}, [%r0];\n"
            f"tcgen05.wait::ld.sync.aligned;\n{store('%r2')}"},
        tmem=32, expect={0: lambda lane: lane},
    ),
    Litmus(
        "freed when everybody is done", "tmem_access_before_commit",
        {0: f"{operands()}\n{PROXY}\nbar.warp.sync -1;\n{mma()}\n{commit(0)}\n"
            f"{wait(0, 0, '//right')}\n{FREE.format(32)}\n{store(1)}\n{wait(0, 0)}"},
        setup=f"{ALLOC.format(32)}\n{init(0)}", expect={0: 1},
    ),
    Litmus(
        "freed behind others' loads and their fence", "missing_tcgen05_fence",
        {1: "ld.shared.b32 %r0, [smem+128];\nadd.u32 %r0, %r0, 2097152;\n"
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r0], {%lane};\n"
            f"tcgen05.wait::st.sync.aligned;\n{BEFORE} //right\n{arrive(0)}\n{store(1)}",
         0: f"{wait(0, 0)}\n{FREE.format(32)}"},
        setup=f"{ALLOC.format(32)}\n{init(0)}", expect={1: 1}, profiles=("isa",),
    ),
]  # fmt: skip

REGISTERS = [
    Litmus(
        "setmaxnreg.inc does not shrink", "setmaxnreg_direction",
        {0: "setmaxnreg.inc.sync.aligned.u32 96;\nsetmaxnreg.inc.sync.aligned.u32 104; //right\n"
            f"setmaxnreg.inc.sync.aligned.u32 64; //wrong\n{store(1)}"},
        expect={0: 1},
    ),
    Litmus(
        "a loop that nobody ends", "instruction_limit",
        {0: "mov.b32 %r2, 0;\nLOOP:\nadd.u32 %r2, %r2, 1; //right\nsetp.lt.u32 %p2, %r2, 100;\n"
            f"@%p2 bra LOOP;\n{store('%r2')}"},
        expect={0: 100},
    ),
    Litmus(
        "a shuffle reads lanes that take part", "shfl_inactive_lane",
        {0: "setp.ge.u32 %p2, %lane, 16;\n@%p2 bra HIGH;\n"
            "shfl.sync.bfly.b32 %r2, %lane, 8, 31, 65535; //right\n"
            "shfl.sync.bfly.b32 %r2, %lane, 16, 31, 65535; //wrong\n"
            f"{store('%r2')}\nbra OUT;\nHIGH:\nxor.b32 %r2, %lane, 8;\n{store('%r2')}\nOUT:\n"
            "bar.warp.sync -1;"},
        expect={0: lambda lane: lane ^ 8}, profiles=("isa",),
    ),
    Litmus(
        "the member mask names who takes part", "warp_sync_mask",
        {0: "vote.sync.ballot.b32 %r2, %lead, -1; //right\n"
            f"vote.sync.ballot.b32 %r2, %lead, 65535; //wrong\n{store('%r2')}"},
        expect={0: 1},
    ),
]  # fmt: skip

CASES = MBARRIER + NAMED + TMEM + REGISTERS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right(case):
    check_right(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong(case):
    check_wrong(case)
