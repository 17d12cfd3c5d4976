"""bar.sync without a count waits for the CTA's threads that have not returned."""

import numpy as np
import pytest

from tests.emulator import ptx_harness

THREAD = np.arange(96, dtype=np.uint32)
SHARED = ".shared .align 4 .b8 box[512];"
EXCHANGE = """
  mov.b32 %at, box;
  mad.lo.u32 %at, %thread_, 4, %at;
  st.shared.b32 [%at], %a;
"""


def run(body: str):
    return ptx_harness.run(
        ".reg .pred %q; .reg .b32 %at, %n;" + body,
        {"a": THREAD * 3 + 1},
        {"d": np.uint32},
        shared=SHARED,
        block=96,
    )


@pytest.mark.parametrize("first", ["early", "late"])
def test_warps_that_have_returned_are_not_waited_for(first: str) -> None:
    """Warp 2 leaves before the others reach the barrier, or while they wait at it."""
    spin = "mov.b32 %n, 0; MORE: add.u32 %n, %n, 1; setp.lt.u32 %q, %n, 50; @%q bra MORE;"
    leaves = f"L: {spin if first == 'late' else ''} ret;"
    body = EXCHANGE + "setp.ge.u32 %q, %thread_, 64; @%q bra L; bar.sync 0;"
    body += "xor.b32 %at, %at, 128; ld.shared.b32 %d, [%at]; bra KEEP;" + leaves + "KEEP:"
    result = run(body)
    assert result.findings == []
    assert np.array_equal(result["d"][:64], (THREAD[:64] ^ 32) * 3 + 1)  # from the other warp


def test_a_count_that_is_given_does_not_shrink() -> None:
    body = EXCHANGE + "setp.ge.u32 %q, %thread_, 64; @%q bra L; bar.sync 0, 96; bra KEEP;"
    (finding,) = run(body + "L: ret; KEEP: mov.b32 %d, 1;").findings
    assert finding.code == "deadlock"
    assert {row["pending_arrivals"] for row in finding.details["blocked"]} == {32}


def test_whole_barriers_and_counted_ones_do_not_mix() -> None:
    body = "setp.ge.u32 %q, %thread_, 32; @%q bra L; bar.sync 0, 64; bra KEEP; L: bar.sync 0;"
    (finding,) = run(body + "KEEP: mov.b32 %d, 1;").findings
    assert finding.code == "named_barrier_count_mismatch"


@pytest.mark.parametrize("threads", ["", ", 64"])
@pytest.mark.parametrize("name", ["bar.red", "barrier.cta.red", "barrier.red"])
def test_reductions(name: str, threads: str) -> None:
    """All, any, and how many: of the warps that take part, in several phases of one barrier."""
    aligned = ".aligned" if name == "barrier.red" else ""
    body = f"""
    .reg .pred %all, %any, %not, %v; .reg .b32 %k, %x, %bits;
    setp.ge.u32 %q, %thread_, {64 if threads else 96}; mov.b32 %d, 0; @%q bra KEEP;
    mov.b32 %k, 0;
    MORE:
    // phase k: those with a > k vote true
    setp.gt.u32 %v, %a, %k;
    {name}.and{aligned}.pred %all, 3{threads}, %v;
    {name}.or{aligned}.pred %any, 3{threads}, %v;
    {name}.or{aligned}.pred %not, 3{threads}, !%v;
    {name}.popc{aligned}.u32 %x, 3{threads}, %v;
    selp.u32 %n, 1, 0, %all; selp.u32 %at, 2, 0, %any; add.u32 %n, %n, %at;
    selp.u32 %at, 4, 0, %not; add.u32 %n, %n, %at; shl.b32 %x, %x, 3; add.u32 %n, %n, %x;
    mad.lo.u32 %d, %d, 31, %n;
    add.u32 %k, %k, 100; setp.lt.u32 %q, %k, 500; @%q bra MORE;
    KEEP:
    """
    result = run(body)
    assert result.findings == []
    a = THREAD[: 64 if threads else 96] * 3 + 1
    want = 0
    for k in range(0, 500, 100):
        vote = a > k
        bits = int(vote.all()) + 2 * int(vote.any()) + 4 * int((~vote).any()) + 8 * int(vote.sum())
        want = want * 31 + bits
    assert set(result["d"][: a.size].tolist()) == {want % 2**32}
    assert not result["d"][a.size :].any()


def test_a_reduction_and_a_sync_share_a_barrier() -> None:
    """Warps that only synchronise do not vote."""
    body = """
    .reg .pred %v;
    setp.ge.u32 %q, %thread_, 32; @%q bra SYNC;
    setp.lt.u32 %v, %thread_, 20; bar.red.popc.u32 %d, 0, %v; bra KEEP;
    SYNC: bar.sync 0; mov.b32 %d, 7;
    KEEP:
    """
    result = run(body)
    assert result.findings == []
    assert set(result["d"][:32].tolist()) == {20} and set(result["d"][32:].tolist()) == {7}
