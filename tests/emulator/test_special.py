"""Special registers of a launch of clusters."""

from __future__ import annotations

import numpy as np

from tests.emulator.cluster_harness import launch

TEXT = """
.version 8.7
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out) {
  .reg .b64 %rd<4>;
  .reg .b32 %r<8>;
  ld.param.u64 %rd0, [out];
  mov.u32 %r0, %ctaid.x;
  mov.u32 %r1, %ctaid.y;
  mad.lo.u32 %r0, %r1, 4, %r0;
  mul.wide.u32 %rd1, %r0, 4;
  add.u64 %rd0, %rd0, %rd1;
  mov.u32 %r2, %smid;
  st.global.b32 [%rd0], %r2;
  ret;
}
"""


def test_ctas_have_sms_of_their_own_as_far_as_there_are() -> None:
    """4 x 40 CTAs on 148 SMs, pair after pair along x."""
    out = np.zeros((40, 4), np.uint32)
    ran = launch(TEXT, [out], threads=1, grid=(4, 40, 1), cluster=2)
    assert ran.findings == []
    assert (out.reshape(-1) == np.arange(160) % 148).all()
