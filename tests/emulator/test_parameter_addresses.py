"""ld.param through a register: parameters that a thread chooses by an index."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.cluster_harness import launch

TEXT = """
.version 8.7
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out, .param .align 16 .b8 table[64]) {
  .reg .b64 %rd<8>;
  .reg .b32 %r<8>;
  .reg .pred %p<2>;
  ld.param.u64 %rd0, [out];
  mov.u32 %r0, %tid.x;
  mul.wide.u32 %rd1, %r0, 8;
  add.u64 %rd0, %rd0, %rd1;
  mov.b64 %rd2, table;
  and.b32 %r1, %r0, 7;
  mul.wide.u32 %rd3, %r1, 8;
  add.u64 %rd2, %rd2, %rd3;
  {load}
  st.global.v2.b32 [%rd0], {%r2, %r3};
  ret;
}
"""
TABLE = np.random.default_rng(5).integers(0, 1 << 32, 16, dtype=np.uint32)


def run(load: str) -> tuple[list[str], np.ndarray]:
    out = np.zeros((32, 2), np.uint32)
    ran = launch(TEXT.replace("{load}", load), [out, TABLE.tobytes()], threads=32)
    return [finding.code for finding in ran.findings], out


def test_each_lane_has_its_own() -> None:
    codes, out = run("ld.param.v2.b32 {%r2, %r3}, [%rd2];")
    assert codes == []
    assert (out == np.tile(TABLE.reshape(8, 2), (4, 1))).all()


def test_of_lanes_that_are_guarded_off_the_address_does_not_matter() -> None:
    codes, out = run(
        "mov.b32 %r2, 1; mov.b32 %r3, 2; setp.lt.u32 %p0, %r0, 4; @!%p0 mov.b64 %rd2, 0;"
        " @%p0 ld.param.v2.b32 {%r2, %r3}, [%rd2];"
    )
    assert codes == []
    assert (out[:4] == TABLE.reshape(8, 2)[:4]).all() and (out[4:] == [1, 2]).all()


@pytest.mark.parametrize(
    ("load", "code"),
    [
        ("ld.param.v2.b32 {%r2, %r3}, [%rd2+8];", "global_out_of_bounds"),
        ("ld.param.b32 %r2, [%rd2+2]; mov.b32 %r3, 0;", "global_misaligned"),
        ("mov.b32 %r2, 0; mov.b32 %r3, 0; st.global.b32 [%rd2], %r2;", "global_read_only"),
    ],
)
def test_parameters_end_where_they_end(load: str, code: str) -> None:
    codes, _ = run(load)
    assert codes == [code]
