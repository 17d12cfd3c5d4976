# SPDX-License-Identifier: Apache-2.0
"""Flags in global and shared memory, their scopes and fences; what a tensor remembers of accesses
(PTX ISA 9.1 sections 8.5, 8.7, 8.8)."""

import pytest

from .harness import PROFILES, Litmus, arrive, check_right, check_wrong, init, store, wait
from .test_global import FIRST, FLAG, GET, PUT, SECOND, raise_flag, see_flag
from .test_memory import AT, READ, WRITE, lane_plus

BOTH = {0: lane_plus(100), 1: lane_plus(100)}
TWO = {"grid": 2, "threads": 32}
# A ticket: each CTA adds 1 to a word; who finds 1 there is the last of two.
TICKET = (
    f"{FLAG}\nmov.b32 %r7, 0;\n@!%lead bra GOT;\n"
    "atom.relaxed.gpu.global.add.u32 %r7, [%rd3], 1;\nGOT:\n"
    "shfl.sync.idx.b32 %r7, %r7, 0, 31, -1;\nsub.u32 %r7, %r7, 0x3c003c00;\n"
    "setp.ne.u32 %p2, %r7, 1;\n@%p2 bra LEAVE;"
)


def last_block(fence):
    """Each CTA stores a row; the last one to take a ticket reads the first CTA's."""
    return f"{PUT}\nbar.warp.sync -1;\n{fence}\n{TICKET}\nfence.acq_rel.gpu;\n{GET}\nLEAVE:"


def in_second(text):
    """In the second CTA only, for another warp than the one that `SECOND` is for."""
    return f"setp.eq.u32 %p3, %cta, 0;\n@%p3 bra NONE;\n{text}\nNONE:"


def reset_by_last(order, note):
    """Three CTAs take a ticket (None: only count), fences around; the third resets the count."""
    count = f"atom.{order}.gpu.global.add.u32 %r7, [%rd3], 1;"
    if order is None:
        count = "red.relaxed.gpu.global.add.u32 [%rd3], 1;\nadd.u32 %r7, %cta, 0x3c003c00;"
    text = (
        f"{FLAG}\n@!%lead bra LEAVE;\nfence.acq_rel.gpu;\n{count}\nfence.acq_rel.gpu;\n"
        "sub.u32 %r7, %r7, 0x3c003c00;\nsetp.ne.u32 %p2, %r7, 2;\n@%p2 bra LEAVE;\n"
        "st.global.b32 [%rd3], 0;\nst.global.b32 [%out], %r7;"
    )
    return "".join(f"{line} {note}\n" for line in text.splitlines())


BETWEEN = [
    Litmus(
        "the last block reads what the others have fenced", "sync_scope_too_narrow",
        {0: last_block("fence.acq_rel.gpu; //right")}, expect=BOTH, **TWO,
    ),
    Litmus(
        "a fence of the CTA does not reach another", "sync_scope_too_narrow",
        {0: last_block("fence.acq_rel.gpu; //right\nfence.acq_rel.cta; //wrong")},
        expect=BOTH, **TWO,
    ),
    Litmus(
        "membar.cta is none for the GPU", "sync_scope_too_narrow",
        {0: last_block("membar.gl; //right\nmembar.cta; //wrong")}, expect=BOTH, **TWO,
    ),
    Litmus(
        "a fence belongs behind the writes", "sync_scope_too_narrow",
        {0: f"fence.acq_rel.gpu; //wrong\n{last_block('fence.acq_rel.gpu; //right')}"},
        expect=BOTH, **TWO,
    ),
    Litmus(
        "a release of the CTA does not reach another", "sync_scope_too_narrow",
        {0: SECOND.format(
            raise_flag(".release.gpu", "//right").join([f"{PUT}\n", "\n"])
            + "@%lead st.release.cta.global.b32 [%rd3], %r6; //wrong",
            f"{see_flag('.acquire.gpu')}\n{GET}")},
        expect=BOTH, **TWO,
    ),
    Litmus(
        "an acquire of the CTA does not reach another", "sync_scope_too_narrow",
        {0: SECOND.format(
            f"{PUT}\n{raise_flag('.release.gpu')}",
            f"{see_flag('.acquire.gpu', '//right')}\n{see_flag('.acquire.cta', '//wrong')}\n{GET}",
        )},
        expect=BOTH, **TWO,
    ),
    Litmus(
        "a release by one warp covers another's writes behind a barrier", "global_race",
        {1: SECOND.format(f"{PUT}\nbar.sync 1, 64; //right", see_flag(".acquire.gpu") + f"""
{FIRST}
add.s64 %rd1, %rd1, 128;
ld.global.b32 %r5, [%rd1];
{store("%r5")}"""),
         0: "setp.ne.u32 %p3, %cta, 0;\n@%p3 bra NONE;\n"
            f"bar.sync 1, 64; //right\n{raise_flag('.release.gpu')}\nNONE:"},
        expect={1: lane_plus(100), 3: lane_plus(100)}, grid=2,
    ),
    Litmus(
        "one thread's release does not cover its neighbours", "global_race",
        {0: SECOND.format(
            f"{PUT}\n{FLAG}\nmov.b32 %r6, 7;\nbar.warp.sync -1; //right\n"
            "@%lead st.release.gpu.global.b32 [%rd3], %r6;",
            f"{see_flag('.acquire.gpu')}\n{GET}")},
        expect=BOTH, profiles=("isa",), **TWO,
    ),
    Litmus(
        "a fence of the CTA takes in nothing from another", "sync_scope_too_narrow",
        {0: SECOND.format(
            f"{PUT}\n{raise_flag('.release.gpu')}",
            f"{see_flag('.relaxed.gpu')}\nfence.acq_rel.gpu; //right\n"
            f"fence.acq_rel.cta; //wrong\n{GET}")},
        expect=BOTH, profiles=("isa",), **TWO,
    ),
    Litmus(
        "what is read at the CTA's scope no fence mends", "sync_scope_too_narrow",
        {0: SECOND.format(
            f"{PUT}\n{raise_flag('.release.gpu')}",
            f"{see_flag('.relaxed.gpu', '//right')}\n{see_flag('.relaxed.cta', '//wrong')}\n"
            f"fence.acq_rel.gpu;\n{GET}")},
        expect=BOTH, profiles=("isa",), **TWO,
    ),
    Litmus(
        "who was told of the flag, not who runs beside", "global_race",
        {0: SECOND.format(f"{PUT}\n{raise_flag('.release.gpu')}",
                          f"{see_flag('.acquire.gpu')}\nbar.sync 1, 64; //right"),
         1: in_second(f"bar.sync 1, 64; //right\n{GET}")},
        expect={3: lane_plus(100)}, grid=2,
    ),
    Litmus(
        "an acquire of the CTA, then a barrier", "sync_scope_too_narrow",
        {0: SECOND.format(f"{PUT}\n{raise_flag('.release.gpu')}",
                          f"{see_flag('.acquire.gpu', '//right')}\n"
                          f"{see_flag('.acquire.cta', '//wrong')}\nbar.sync 1, 64;"),
         1: in_second(f"bar.sync 1, 64;\n{GET}")},
        expect={3: lane_plus(100)}, grid=2,
    ),
    Litmus(
        "a reset behind one's own ticket", "sync_scope_too_narrow",
        {0: reset_by_last("acq_rel", "//right") + reset_by_last("relaxed", "//wrong") + "LEAVE:"},
        profiles=("isa",), grid=3, threads=32,
    ),
    Litmus(
        "a reset behind a count that nobody looks at", "global_race",
        {0: reset_by_last("acq_rel", "//right") + reset_by_last(None, "//wrong") + "LEAVE:"},
        grid=3, threads=32,
    ),
    Litmus(
        "what a volatile flag announces needs its fence", "sync_scope_too_narrow",
        {0: SECOND.format(
            f"{PUT}\nbar.warp.sync -1;\nfence.sc.gpu; //right\n{raise_flag('.volatile')}",
            f"{see_flag('.volatile')}\nfence.sc.gpu;\n{GET}")},
        expect=BOTH, **TWO,
    ),
]  # fmt: skip

TENSOR = [
    Litmus(
        "halfwords of one word are two places", "global_race",
        {w: f"mov.b32 %r2, {w + 5};\n@%lead st.global.u16 [%in+{2 * w}], %r2; //right\n"
            "@%lead st.global.u16 [%in], %r2; //wrong" for w in range(2)},
        end=f"ld.global.b32 %r2, [%in];\n{store('%r2')}",
        expect={1: 6 << 16 | 5},
    ),
    Litmus(
        "bytes written, words read", "global_race",
        {0: "ld.param.b64 %rd1, [p_out];\ncvt.u64.u32 %rd2, %lane;\nadd.s64 %rd1, %rd1, %rd2;\n"
            "st.global.u8 [%rd1], %lane;\nbar.sync 1, 64; //right",
         1: f"bar.sync 1, 64; //right\nld.param.b64 %rd1, [p_out];\n"
            f"ld.global.b32 %r5, [%rd1+4];\n{store('%r5')}"},
        expect={1: 0x07060504},
    ),
    Litmus(
        "every reader before the next write", "global_race",
        {0: f"{wait(0, 0, '//right')}\n{wait(8, 0)}\n{PUT}\n{wait(0, 0)}",
         1: f"{GET}\n{arrive(0)}\n{arrive(16)}", 2: f"{wait(16, 0)}\n{GET}\n{arrive(8)} //right\n",
         3: "bar.warp.sync -1;\n@%lead mbarrier.arrive.shared::cta.b64 _, [smem+8]; //wrong"},
        setup=init(0, 8, 16), threads=128, expect={0: lane_plus(100)},
    ),
    Litmus(
        "every count before the sum is read", "global_race",
        {0: f"{FIRST}\nred.relaxed.gpu.global.add.u32 [%rd1], 1;\n{arrive(0)} //right",
         1: f"{FIRST}\nred.relaxed.gpu.global.add.u32 [%rd1], 1;\n{arrive(0)}",
         2: f"{wait(0, 0)}\n{GET}"},
        setup=f"{init(0, count=2)} //right".replace(";\n", "; //right\n") + "\n" +
              f"{init(0)} //wrong".replace(";\n", "; //wrong\n"),
        threads=96, expect={2: 0xEEEEEEF0},
    ),
    Litmus(
        "two warps, two values", "global_race",
        {w: f"{FIRST}\nmov.b32 %r2, 5; //right\nmov.b32 %r2, {w + 5}; //wrong\n"
            + ("bar.sync 1, 64; //right\n" if w else "") + "st.global.b32 [%rd1], %r2;"
            + ("" if w else "\nbar.sync 1, 64; //right") for w in range(2)}, expect={0: 5},
    ),
    Litmus(
        "an atomic behind an ordinary store", "global_race",
        {0: f"{FIRST}\nst.global.b32 [%rd1], 5;\n{arrive(0)}\n{arrive(8)}",
         1: f"{wait(0, 0)}\n{FIRST}\nred.relaxed.gpu.global.add.u32 [%rd1], 1;",
         2: f"{wait(8, 0, '//right')}\n{FIRST}\nred.relaxed.gpu.global.add.u32 [%rd1], 1;"},
        setup=init(0, 8), threads=96, expect={0: 7},
    ),
    Litmus(
        "a neighbour's word, behind bar.warp.sync", "global_race",
        {0: f"{PUT}\nbar.warp.sync -1; //right\nxor.b64 %rd1, %out, 4;\n"
            f"ld.global.b32 %r5, [%rd1];\nbar.warp.sync -1;\n{store('%r5')}"},
        expect={0: lambda lane: (lane ^ 1) + 100},
    ),
    Litmus(
        "one store, one value a word", "global_race",
        {0: "ld.param.b64 %rd1, [p_out];\nmov.b32 %r2, 5; //right\nmov.b32 %r2, %lane; //wrong\n"
            "st.global.b32 [%rd1+128], %r2;"}, expect={},
    ),
    Litmus(
        "cp.async reads global memory as any load does", "global_race",
        {0: f"{PUT}\nbar.sync 1, 64; //right",
         1: f"bar.sync 1, 64; //right\n{FIRST}\nmov.u32 %r3, smem;\nshl.b32 %r4, %lane, 2;\n"
            f"add.u32 %r3, %r3, %r4;\ncp.async.ca.shared.global [%r3+{AT}], [%rd1], 4;\n"
            f"cp.async.wait_all;\n{READ}"},
        expect={1: lane_plus(100)},
    ),
]  # fmt: skip

SPOT = "ld{}.shared.b32 %r7, [smem+64];"


def see(order, note=""):
    label = f"SEE{next(_serial)}"
    spin = (f"{label}:", SPOT.format(order), "setp.ne.u32 %p2, %r7, 7;", f"@%p2 bra {label};")
    lines = (f"@!%lead bra {label}_END;", *spin, f"{label}_END:", "bar.warp.sync -1;")
    return "\n".join(f"{line} {note}" for line in lines)


_serial = iter(range(1000))
SHARED = [
    Litmus(
        "a flag in shared memory is released and acquired", "smem_race",
        {0: f"{WRITE}\nbar.warp.sync -1;\n@%lead st.release.cta.shared.b32 [smem+64], 7; //right\n"
            "@%lead st.shared.b32 [smem+64], 7; //wrong",
         1: f"{see('.acquire.cta')}\n{READ}"},
        setup=f"{WRITE.replace('100', '50')}\n@%lead st.shared.b32 [smem+64], 0;",
        expect={1: lane_plus(100)},
    ),
    Litmus(
        "and orders what came before it only", "smem_race",
        {0: f"@%lead st.release.cta.shared.b32 [smem+64], 7; //wrong\n{WRITE}\nbar.warp.sync -1;\n"
            "@%lead st.release.cta.shared.b32 [smem+64], 7; //right",
         1: f"{see('.acquire.cta')}\n{READ}"},
        setup=f"{WRITE.replace('100', '50')}\n@%lead st.shared.b32 [smem+64], 0;",
        expect={1: lane_plus(100)},
    ),
    Litmus(
        "a lock of atomics", "smem_race",
        {w: f"TRY{w}:\n@!%lead bra IN{w}; //right\natom.acquire.cta.shared.cas.b32 %r7, [smem+64], "
            f"0, 1; //right\nsetp.ne.u32 %p2, %r7, 0; //right\n@%p2 bra TRY{w}; //right\nIN{w}:\n"
            f"bar.warp.sync -1;\n@%lead ld.shared.b32 %r5, [smem+{AT}];\n"
            f"@%lead add.u32 %r5, %r5, 1;\n@%lead st.shared.b32 [smem+{AT}], %r5;\n"
            "@%lead atom.release.cta.shared.exch.b32 %r7, [smem+64], 0;"
         for w in range(2)},
        setup=f"mov.b32 %r5, 0;\n@%lead st.shared.b32 [smem+64], 0;\n"
              f"@%lead st.shared.b32 [smem+{AT}], 0;",
        end=f"ld.shared.b32 %r5, [smem+{AT}];\n{store('%r5')}", expect={0: 2},
    ),
    Litmus(
        "a relaxed flag needs its fences", "sync_scope_too_narrow",
        {0: f"{WRITE}\nbar.warp.sync -1;\nfence.acq_rel.cta; //right\n"
            "@%lead st.relaxed.cta.shared.b32 [smem+64], 7;",
         1: f"{see('.relaxed.cta')}\nfence.acq_rel.cta;\n{READ}"},
        setup=f"{WRITE.replace('100', '50')}\n@%lead st.shared.b32 [smem+64], 0;",
        expect={1: lane_plus(100)}, profiles=("isa",),
    ),
]  # fmt: skip

CASES = BETWEEN + TENSOR + SHARED


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right(case):
    check_right(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong(case):
    check_wrong(case)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_fence_in_front_of_a_barrier_covers_another_threads_flag_on_silicon(profile):
    """All threads write and fence, then meet, and one raises the flag: usual in CUDA, though by
    the text the fence belongs to the thread whose flag it is."""
    case = Litmus(
        "fence, barrier, flag", "",
        {0: SECOND.format(
            f"{PUT}\nfence.acq_rel.gpu;\nbar.sync 1, 64;\n",
            f"{see_flag('.acquire.gpu')}\n{GET}"),
         1: "setp.ne.u32 %p3, %cta, 0;\n@%p3 bra NONE;\nbar.sync 1, 64;\n"
            f"{raise_flag('.relaxed.gpu')}\nNONE:"},
        grid=2, end=None,
    )  # fmt: skip
    ran, _ = case.run(True, profile=profile)
    codes = [finding.code for finding in ran.findings]
    assert codes == ([] if profile == "silicon" else ["sync_scope_too_narrow"])


@pytest.mark.parametrize("space", ["shared", "global"])
def test_two_warps_may_store_one_value_on_silicon(space):
    """As NVIDIA's mla_decode examples do; that a third has read the word before remains a race."""
    place = f"[smem+{AT}]" if space == "shared" else "[%rd1]"
    put = f"ld.param.b64 %rd1, [p_out];\nmov.b32 %r2, 7;\n@%lead st.{space}.b32 {place}, %r2;"
    read = f"ld.param.b64 %rd1, [p_out];\n@%lead ld.{space}.b32 %r2, {place};\n"
    for warps, wants in (
        ({0: put, 1: put}, ["", f"{space}_race".replace("shared", "smem")]),
        ({0: put, 1: put, 2: read}, [f"{space}_race".replace("shared", "smem")] * 2),
    ):
        setup = f"st.shared.b32 [smem+{AT}], 7;"
        case = Litmus("one value", "", warps, setup=f"mov.b32 %r2, 7;\n{setup}", threads=96)
        for profile, want in zip(PROFILES, wants, strict=True):
            ran, _ = case.run(True, profile=profile)
            assert [finding.code for finding in ran.findings] == ([want] if want else [])
