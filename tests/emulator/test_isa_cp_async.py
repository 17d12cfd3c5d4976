"""cp.async: sizes, zero fill, groups, the mbarrier form, and what a missing wait does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.cluster_harness import clean, code_of, every_way, launch, module

HEAD = """
.reg .b32 %t, %base, %at, %n, %x<4>; .reg .b64 %d, %o, %s, %w; .reg .pred %p;
mov.u32 %t, %tid.x; mov.u32 %base, smem; ld.param.b64 %d, [data]; ld.param.b64 %o, [out];
shl.b32 %at, %t, 4; add.u32 %at, %at, %base;
mul.wide.u32 %w, %t, 16; add.u64 %d, %d, %w; add.u64 %o, %o, %w;
"""
TAIL = """
ld.shared.v4.b32 {%x0, %x1, %x2, %x3}, [%at];
st.global.v4.b32 [%o], {%x0, %x1, %x2, %x3};
"""


@pytest.mark.parametrize("way", ["cg", "ca"])
@pytest.mark.parametrize("taken", [0, 3, 8, 15, 16])
def test_what_is_not_taken_is_zero(way: str, taken: int) -> None:
    """src-size bytes come from the source, the rest is filled; src-size is a register."""
    data = np.random.default_rng(taken).integers(0, 256, (32, 16), np.uint8)
    out = np.zeros_like(data)
    body = f"""{HEAD}
mov.b32 %n, {taken};
cp.async.{way}.shared.global.L2::128B [%at], [%d], 16, %n;
cp.async.commit_group; cp.async.wait_group 0;
{TAIL}"""
    clean(launch(module("data out", body, shared=512), [data, out]))
    want = data.copy()
    want[:, taken:] = 0
    assert np.array_equal(out, want)


def test_a_source_that_is_ignored_is_not_touched() -> None:
    """Odd lanes ignore an address that is nowhere."""
    data, out = np.arange(512, dtype=np.uint8).reshape(32, 16), np.zeros((32, 16), np.uint8)
    body = f"""{HEAD}
and.b32 %n, %t, 1; setp.ne.u32 %p, %n, 0; @%p mov.b64 %d, 16;
cp.async.ca.shared.global [%at], [%d], 8, %p;
cp.async.ca.shared.global [%at+8], [%d], 4, %p;
cp.async.ca.shared.global [%at+12], [%d], 4, %p;
cp.async.wait_all;
{TAIL}"""
    clean(launch(module("data out", body, shared=512), [data, out]))
    want = np.concatenate([data[:, :8], data[:, :4], data[:, :4]], axis=1)
    want[1::2] = 0
    assert np.array_equal(out, want)
    ran = launch(module("data out", body.replace("8, %p", "8"), shared=512), [data, out])
    assert code_of(ran) == "global_out_of_bounds"


GROUPS = f"""{HEAD}
cp.async.cg.shared.global [%at], [%d], 16; cp.async.commit_group;
cp.async.cg.shared.global [%at+512], [%d+512], 16; cp.async.commit_group;
cp.async.cg.shared.global [%at+1024], [%d+1024], 16; cp.async.commit_group;
cp.async.wait_group {{first}};
ld.shared.v4.b32 {{{{%x0, %x1, %x2, %x3}}}}, [%at];
st.global.v4.b32 [%o], {{{{%x0, %x1, %x2, %x3}}}};
cp.async.wait_group {{second}};
ld.shared.v4.b32 {{{{%x0, %x1, %x2, %x3}}}}, [%at+512];
st.global.v4.b32 [%o+512], {{{{%x0, %x1, %x2, %x3}}}};
cp.async.wait_group {{third}};
ld.shared.v4.b32 {{{{%x0, %x1, %x2, %x3}}}}, [%at+1024];
st.global.v4.b32 [%o+1024], {{{{%x0, %x1, %x2, %x3}}}};
"""


@every_way
def test_groups_complete_in_order(way: dict) -> None:
    data = np.random.default_rng(2).integers(0, 256, (96, 16), np.uint8)

    def run(first: int, second: int, third: int, **options):  # type: ignore[no-untyped-def]
        out = np.zeros_like(data)
        body = GROUPS.format(first=first, second=second, third=third)
        ran = launch(module("data out", body, shared=1536), [data, out], **way, **options)
        return ran, out

    ran, out = run(2, 1, 0)
    clean(ran)
    assert np.array_equal(out, data)
    for waits in ((3, 1, 0), (2, 2, 0), (2, 1, 1)):
        assert code_of(run(*waits)[0]) == "cp_async_not_waited", waits
        if way["visibility"] == "late" and way["schedule"] != "random":
            assert code_of(run(*waits, checks=False)[0]) == "smem_unwritten_read", waits


def test_lanes_have_groups_of_their_own() -> None:
    """Odd lanes commit once more in between: their wait_group 1 leaves another group open."""
    data = np.random.default_rng(4).integers(0, 256, (32, 16), np.uint8)
    out = np.zeros_like(data)
    body = f"""{HEAD}
and.b32 %n, %t, 1; setp.ne.u32 %p, %n, 0;
cp.async.ca.shared.global [%at], [%d], 8; cp.async.commit_group;
cp.async.ca.shared.global [%at+8], [%d+8], 8; cp.async.commit_group;
@%p cp.async.commit_group;
@%p cp.async.wait_group 1;
@!%p cp.async.wait_group 0;
{TAIL}"""
    clean(launch(module("data out", body, shared=512), [data, out], visibility="late"))
    assert np.array_equal(out, data)


BARRIER = """
.reg .b32 %t, %w0, %base, %bar, %at, %x<4>; .reg .b64 %d, %o, %w; .reg .pred %p, %done;
mov.u32 %t, %tid.x; mov.u32 %base, smem; ld.param.b64 %d, [data]; ld.param.b64 %o, [out];
add.u32 %bar, %base, 1024; setp.eq.u32 %p, %t, 0;
@%p mbarrier.init.shared.b64 [%bar], {count};
bar.sync 0;
shl.b32 %at, %t, 4; add.u32 %at, %at, %base; mul.wide.u32 %w, %t, 16;
setp.lt.u32 %p, %t, 32;
@!%p bra CONSUME;
add.u64 %d, %d, %w;
cp.async.cg.shared.global [%at], [%d], 16;
{arrive}
bra END;
CONSUME:
{wait}
ld.shared.v4.b32 {{%x0, %x1, %x2, %x3}}, [%at+-512];
add.u64 %o, %o, %w; sub.u64 %o, %o, 512;
st.global.v4.b32 [%o], {{%x0, %x1, %x2, %x3}};
END:
"""
WAIT = "SPIN: mbarrier.try_wait.parity.shared.b64 %done, [%bar], 0; @!%done bra SPIN;"
NOINC = "cp.async.mbarrier.arrive.noinc.shared.b64 [%bar];"
WITH = "cp.async.mbarrier.arrive.shared.b64 [%bar]; mbarrier.arrive.shared.b64 _, [%bar];"


@every_way
def test_an_mbarrier_tracks_copies(way: dict) -> None:
    data = np.random.default_rng(3).integers(0, 256, (32, 16), np.uint8)

    def run(**parts):  # type: ignore[no-untyped-def]
        parts = {"count": 32, "arrive": NOINC, "wait": WAIT, **parts}
        out = np.zeros_like(data)
        text = module("data out", BARRIER.format(**parts), shared=2048)
        return launch(text, [data, out], threads=64, **way), out

    for parts in ({}, {"arrive": WITH}):
        ran, out = run(**parts)
        clean(ran)
        assert np.array_equal(out, data)
    assert code_of(run(arrive=NOINC.replace(".noinc", ""))[0]) == "deadlock"
    plain = "mbarrier.arrive.shared.b64 _, [%bar];"  # does not wait for the copies
    assert code_of(run(arrive=plain)[0]) in ("cp_async_not_waited", "smem_unwritten_read")
    assert code_of(run(wait="")[0]) in ("cp_async_not_waited", "smem_unwritten_read")
