"""mbarrier waits whose lanes do not agree: each lane waits for its own barrier and phase."""

import numpy as np
import pytest

from tests.emulator import ptx_harness

LANE = np.arange(32, dtype=np.uint32)
SETUP = """
  .reg .pred %go, %first; .reg .b32 %bar;
  mov.b32 %bar, bars;
  setp.eq.u32 %first, %thread_, 0;
  @%first mbarrier.init.shared.b64 [%bar], 1;
  @%first mbarrier.init.shared.b64 [%bar+8], 1;
  bar.sync 0;
"""
SPIN = """
  WAIT: mbarrier.try_wait.parity.shared.b64 %go, [%at], %parity;
  @%go bra DONE; bra WAIT;
  DONE: mov.b32 %out, 1;
"""


def run(body: str, parity: np.ndarray, offset: np.ndarray):
    inputs = {"parity": parity.astype(np.uint32), "offset": offset.astype(np.uint32)}
    at = ".reg .b32 %at; add.u32 %at, %bar, %offset;"
    return ptx_harness.run(
        SETUP + at + body,
        inputs,
        {"out": np.uint32},
        shared=".shared .align 8 .b8 bars[16];",
    )


@pytest.mark.parametrize("offset", [0 * LANE, 8 * (LANE % 2)])
def test_lanes_that_wait_for_the_open_phase_hang_and_the_others_pass(offset) -> None:
    """Even lanes ask for the phase before the first, which counts as over."""
    parity = (LANE + 1) % 2
    result = run(SPIN, parity, offset)
    (finding,) = result.findings
    assert finding.code == "deadlock"
    (blocked,) = finding.details["blocked"]
    assert blocked["lanes"] == int(sum(1 << int(k) for k in LANE[parity == 0]))


def test_lanes_that_pass_release_the_others() -> None:
    """The lanes whose wait is over arrive, which ends the others' wait."""
    arrive = "setp.eq.u32 %first, %thread_, 1; @%first mbarrier.arrive.shared.b64 _, [%bar];"
    spin = SPIN.replace("DONE:", f"DONE: {arrive}")
    result = run(spin, (LANE % 2), 0 * LANE)  # odd lanes pass, lane 1 arrives, even lanes follow
    assert result.findings == []
    assert (result["out"] == 1).all()


def test_a_test_wait_answers_each_lane() -> None:
    body = "mbarrier.test_wait.parity.shared.b64 %go, [%at], %parity; selp.b32 %out, 1, 0, %go;"
    result = run(body, LANE % 2, 8 * (LANE // 16))
    assert result.findings == [] and np.array_equal(result["out"], LANE % 2)


def test_each_lane_initialises_with_its_own_count() -> None:
    body = """
      .reg .b32 %count; .reg .pred %two;
      add.u32 %count, %thread_, 1;
      setp.lt.u32 %two, %thread_, 2;
      @%two mbarrier.inval.shared.b64 [%at];
      @%two mbarrier.init.shared.b64 [%at], %count;
      bar.sync 0;
      setp.eq.u32 %first, %thread_, 0;
      @%first mbarrier.arrive.shared.b64 _, [%bar];
      @%first mbarrier.arrive.shared.b64 _, [%bar+8];
      bar.sync 0;
      mbarrier.test_wait.parity.shared.b64 %go, [%at], 0; selp.b32 %out, 1, 0, %go;
    """
    result = run(body, 0 * LANE, 8 * (LANE % 2))
    assert result.findings == [] and np.array_equal(result["out"], (LANE + 1) % 2)
