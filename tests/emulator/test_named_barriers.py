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
