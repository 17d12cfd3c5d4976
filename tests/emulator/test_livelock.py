# SPDX-License-Identifier: Apache-2.0
"""Loops that nobody ends are found without a limit; slow ones that somebody ends are not."""

import numpy as np
import pytest

from tests.emulator.cluster_harness import clean, every_way, launch, module

HEAD = """
.reg .b32 %t, %x<8>; .reg .b64 %o, %f, %w; .reg .pred %p, %lead;
mov.u32 %t, %tid.x; ld.param.b64 %o, [out]; ld.param.b64 %f, [flag];
mul.wide.u32 %w, %t, 4; add.u64 %o, %o, %w; setp.eq.u32 %lead, %t, 0;
"""
SPIN = {
    "volatile": "SPIN: ld.volatile.global.b32 %x0, [%f]; setp.ne.u32 %p, %x0, 1; @%p bra SPIN;",
    "back-off": "SPIN: nanosleep.u32 20; ld.relaxed.gpu.global.b32 %x0, [%f];"
    " setp.ne.u32 %p, %x0, 1; @%p bra SPIN;",
    "lock": "SPIN: @!%lead bra IN; atom.acquire.gpu.global.cas.b32 %x0, [%f], 1, 0;"
    " setp.ne.u32 %p, %x0, 1; @%p bra SPIN; IN: bar.warp.sync -1;",
    "through memory of its own": "SPIN: ld.volatile.global.b32 %x0, [%f]; st.local.b32 [room], %x0;"
    " ld.local.b32 %x1, [room]; setp.ne.u32 %p, %x1, 1; @%p bra SPIN;",
}
LOCAL = ".local .align 4 .b8 room[4];"


def run(body: str, **options):
    out, flag = np.zeros(64, np.uint32), np.zeros(1, np.uint32)
    ran = launch(module("out flag", LOCAL + HEAD + body), [out, flag], threads=64, **options)
    return ran, out


def assert_livelock(spin: str, **way) -> None:
    ran, _ = run(SPIN[spin] + "st.global.b32 [%o], 1;", **way)
    (finding,) = ran.findings
    assert finding.code == "livelock"
    assert 0 in {row["warp"] for row in finding.details["blocked"]}
    assert finding.ptx_line is not None and finding.role.startswith("warp ")


@every_way
def test_nobody_raises_the_flag(way: dict) -> None:
    assert_livelock("volatile", **way, checks=False)


@pytest.mark.parametrize("spin", SPIN)
def test_other_ways_to_spin(spin: str) -> None:
    assert_livelock(spin)


@pytest.mark.parametrize("spin", SPIN)
@pytest.mark.parametrize("policy", ["round_robin", "random"])
def test_somebody_raises_it_late(policy: str, spin: str) -> None:
    """The other warp counts to 10000 first, and touches no memory."""
    body = f"""
setp.lt.u32 %p, %t, 32;
@%p bra WAITS;
mov.b32 %x2, 0;
COUNT: add.u32 %x2, %x2, 1; setp.lt.u32 %p, %x2, 10000; @%p bra COUNT;
mov.b32 %x3, 1;
setp.eq.u32 %p, %t, 32;
@%p st.release.gpu.global.b32 [%f], %x3;
bra DONE;
WAITS:
{SPIN[spin]}
DONE:
st.global.b32 [%o], 5;
"""
    ran, out = run(body, schedule=policy, checks=False, max_instructions=100_000_000)
    clean(ran)
    assert (out == 5).all()


def test_a_loop_with_a_period_longer_than_a_turn() -> None:
    """3000 rounds of an inner loop, over and over."""
    body = """
OUTER: mov.b32 %x2, 0;
INNER: add.u32 %x2, %x2, 1; setp.lt.u32 %p, %x2, 3000; @%p bra INNER;
ld.volatile.global.b32 %x0, [%f]; setp.ne.u32 %p, %x0, 1; @%p bra OUTER;
st.global.b32 [%o], 1;
"""
    ran, _ = run(body, checks=False, max_instructions=100_000_000)
    assert [finding.code for finding in ran.findings] == ["livelock"]


@every_way
def test_work_that_is_due_completes_while_somebody_spins(way: dict) -> None:
    """A copy brings the flag that another thread polls, however late copies may be."""
    body = """
.shared .align 16 .b8 box[32];
.reg .b32 %a;
mov.u32 %a, box;
@%lead st.shared.v4.b32 [%a], {1, 1, 1, 1};
fence.proxy.async.shared::cta;
bar.sync 0;
@%lead cp.async.bulk.global.shared::cta.bulk_group [%f], [%a], 16;
@%lead cp.async.bulk.commit_group;
SPIN: ld.volatile.global.b32 %x0, [%f]; setp.ne.u32 %p, %x0, 1; @%p bra SPIN;
@%lead cp.async.bulk.wait_group 0;
st.global.b32 [%o], %x0;
"""
    flag = np.zeros(8, np.uint32)
    flag = flag[(-flag.ctypes.data % 16) // 4 :][:4]
    out = np.zeros(64, np.uint32)
    ran = launch(module("out flag", HEAD + body), [out, flag], threads=64, checks=False, **way)
    clean(ran)
    assert (out == 1).all()


def test_a_livelock_names_what_others_are_blocked_on() -> None:
    """Two warps allocate all of Tensor Memory; the one that has it polls the other's flag."""
    body = f"""
.shared .align 4 .b8 at[8];
setp.lt.u32 %p, %t, 32;
@%p bra FIRST;
bar.sync 1, 64;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [at+4], 512;
st.release.gpu.global.b32 [%f], 1;
bra DONE;
FIRST:
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [at], 512;
bar.sync 1, 64;
{SPIN["volatile"]}
DONE:
st.global.b32 [%o], 1;
"""
    (finding,) = run(body, checks=False)[0].findings
    assert finding.code == "livelock"
    assert "tcgen05.alloc of 512 columns" in finding.message
