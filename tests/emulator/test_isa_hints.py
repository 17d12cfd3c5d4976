"""Prefetches and cache policies are hints that change nothing; what only looks like one is not."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.emulator.findings import UnsupportedPTX
from kernels.emulator.tensormap import TensorMap
from tests.emulator.cluster_harness import clean, launch, module

BODY = """
.reg .b32 %t, %base, %bar, %at, %x<4>; .reg .b64 %d, %o, %w, %m, %p1, %p2; .reg .pred %f, %done;
mov.u32 %t, %tid.x; mov.u32 %base, smem; setp.eq.u32 %f, %t, 0; add.u32 %bar, %base, 1024;
ld.param.b64 %d, [data]; ld.param.b64 %o, [out]; mov.b32 %x0, 0; cvta.param.u64 %m, map_data;
createpolicy.fractional.L2::evict_first.b64 %p1;
createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %p2, 0f3F000000;
createpolicy.range.global.L2::evict_last.L2::evict_first.b64 %p2, [%d], 256, 512;
prefetch.global.L2 [%d]; prefetch.global.L2::evict_last [%d]; prefetchu.L1 [%d];
applypriority.global.L2::evict_normal [%d], 128;
@%f cp.async.bulk.prefetch.L2.global [%d], 512;
@%f cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%m, {%x0, %x0}];
@%f mbarrier.init.shared::cta.b64 [%bar], 1;
@%f fence.mbarrier_init.release.cluster;
bar.sync 0;
@%f mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;
@%f cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint
  [%base], [%d], 512, [%bar], %p1;
SPIN: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
@!%done bra SPIN;
shl.b32 %at, %t, 4; add.u32 %at, %at, %base; mul.wide.u32 %w, %t, 16; add.u64 %o, %o, %w;
ld.shared.v4.b32 {%x0, %x1, %x2, %x3}, [%at]; st.global.v4.b32 [%o], {%x0, %x1, %x2, %x3};
"""


def run(body: str) -> tuple[np.ndarray, np.ndarray]:
    data, out = np.arange(128, dtype=np.uint32).reshape(8, 16), np.zeros((8, 16), np.uint32)
    tmap = TensorMap(data.ctypes.data, "uint32", (16, 8), (64,), (16, 8), (1, 1))
    text = module("data out map_data", body, shared=2048)
    clean(launch(text, [data, out, tmap]))
    return data, out


def test_hints_change_nothing() -> None:
    data, out = run(BODY)
    assert np.array_equal(data, out)
    assert np.array_equal(data, np.arange(128, dtype=np.uint32).reshape(8, 16))


@pytest.mark.parametrize(
    "line", ["discard.global.L2 [%d], 128;", "cp.async.bulk.prefetch.L2.shared::cta [%d], 512;"]
)
def test_what_is_no_hint_is_refused(line: str) -> None:
    """discard gives up the memory's contents."""
    with pytest.raises(UnsupportedPTX):
        run(BODY.replace("prefetchu.L1 [%d];", line))
