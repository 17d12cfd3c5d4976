"""tcgen05.mma with cta_group::2 against a slow reading of the text on layouts A and B.

PTX ISA 9.1 sections 9.7.16.5.1 and 9.7.16.10.5: each CTA of the pair brings half of A's rows and
half of B's columns; it keeps its own rows of D.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kernels.emulator.engines import InstrDescriptor, mma_pair
from kernels.emulator.findings import EmulatorFault
from tests.emulator.test_tensorcore import BASE, Bench, descriptor, instr, narrow, random_layout


def pair_instr(m: int, n: int, dtype: str = "bfloat16", **bits: int) -> int:
    return instr(m, n, dtype, **bits)


class Pair:
    """Two CTAs with different contents."""

    def __init__(self, dtype: str = "bfloat16", seed: int = 0) -> None:
        self.cta = (Bench(dtype, seed), Bench(dtype, seed + 1000))
        self.smem = tuple(c.smem for c in self.cta)
        self.tmem = tuple(c.tmem for c in self.cta)

    def operand(self, rows: int, **layout: int) -> np.ndarray:
        """Rows of the whole operand: the even CTA's half, then the odd CTA's."""
        return np.concatenate([c.operand(rows // 2, **layout) for c in self.cta])

    def run(self, idesc: int, a: int, b: int, d: int, **kwargs) -> None:
        kwargs = {"accumulate": False, "a_in_tmem": False, **kwargs}
        mma_pair(idesc, a, b, d, self.smem, self.tmem, **kwargs)

    def d(self, m: int, n: int, column: int) -> np.ndarray:
        """D element by element, where layouts A and B put it."""
        out = np.empty((m, n))
        for row, col in product(range(m), range(n)):
            cta, inside = divmod(row, m // 2)
            lane, at = inside, col
            if m == 128:  # 2x2: the second half of the columns lies in the upper 64 lanes
                lane, at = inside + 64 * (col // (n // 2)), col % (n // 2)
            out[row, col] = self.tmem[cta].data[column + at, lane : lane + 1].view(np.float32)[0]
        return out


@pytest.mark.parametrize("a_mn,b_mn", list(product((False, True), repeat=2)))
@pytest.mark.parametrize("m,n", [(256, 256), (256, 64), (256, 16), (128, 256), (128, 32)])
def test_ss(m: int, n: int, a_mn: bool, b_mn: bool) -> None:
    if n == 16 and b_mn:
        n = 32  # half of 16 is one chunk of an MN-major operand, too few for a swizzled row
    pair, rng = Pair(seed=m + n), np.random.default_rng([m, n, a_mn, b_mn])
    la = random_layout(rng, a_mn, (1, 2, 4, 8)[n // 16 % 4])
    lb = random_layout(rng, b_mn, 8)
    idesc = pair_instr(m, n, a_mn=a_mn, b_mn=b_mn)
    pair.run(idesc, descriptor(la), descriptor(lb), 32)
    want = pair.operand(m, **la) @ pair.operand(n, **lb).T
    assert np.array_equal(pair.d(m, n, 32), want)
    pair.run(idesc, descriptor(la), descriptor(lb), 32, accumulate=True)
    assert np.array_equal(pair.d(m, n, 32), 2 * want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m", [256, 128])
def test_ts(m: int, dtype: str) -> None:
    """With M = 128 A's 64 rows of a CTA are read by both halves of the lanes."""
    pair, rng, n = Pair(dtype, 5), np.random.default_rng(m), 96
    a = rng.integers(-8, 9, (m, 16)).astype(np.float64)
    for k, tmem in enumerate(pair.tmem):
        mine = a[k * m // 2 : (k + 1) * m // 2]
        bits = narrow(mine.reshape(m // 2, 8, 2), dtype).astype(np.uint32)
        words = (bits[..., 0] | bits[..., 1] << 16).T
        tmem.data[40:48] = np.tile(words, 256 // m)
        tmem.valid[:, 40:48] = 0xFFFFFFFF
    lb = random_layout(rng, True, 4)
    pair.run(pair_instr(m, n, dtype, b_mn=1), 40, descriptor(lb), 64, a_in_tmem=True)
    assert np.array_equal(pair.d(m, n, 64), a @ pair.operand(n, **lb).T)
    for tmem in pair.tmem:  # only the first half of the lanes: not enough for M = 128
        tmem.valid[2:, 40:48] = 0
    with pytest.raises(EmulatorFault) as caught:
        pair.run(pair_instr(m, n, dtype, b_mn=1), 40, descriptor(lb), 64, a_in_tmem=True)
    assert caught.value.code == "tmem_unwritten_read"


@pytest.mark.parametrize("m", [256, 128])
def test_only_d_is_written_and_lanes_are_disabled(m: int) -> None:
    pair, n = Pair(), 64
    before = [t.data.copy() for t in pair.tmem]
    la = {"start": BASE, "leading": 16, "stride": 1024, "width": 8, "mn_major": False}
    masks = tuple(int(x) for x in np.random.default_rng(m).integers(0, 1 << 32, 8))
    idesc, a = pair_instr(m, n), descriptor(la)
    pair.run(idesc, a, a, 64, disable_output_lane=masks)
    full = Pair()
    full.run(idesc, a, a, 64)
    columns = n if m == 256 else n // 2
    for k, tmem in enumerate(pair.tmem):
        keep = np.array([masks[4 * k + lane // 32] >> (lane % 32) & 1 for lane in range(128)], bool)
        want = before[k].copy()
        want[64 : 64 + columns, ~keep] = full.tmem[k].data[64 : 64 + columns, ~keep]
        assert np.array_equal(tmem.data, want)
        lanes = tmem.valid[:, :, None] >> np.arange(32, dtype=np.uint32) & 1
        written = np.zeros((128, 512), bool)
        written[~keep, 64 : 64 + columns] = True
        assert np.array_equal(lanes.transpose(0, 2, 1).reshape(128, 512), written)


@pytest.mark.parametrize(
    "m,n,good",
    [(256, 256, 1), (256, 16, 1), (128, 32, 1), (64, 64, 0), (192, 64, 0), (256, 24, 0)],
)
def test_shapes_of_a_pair(m: int, n: int, good: bool) -> None:
    if good:
        assert InstrDescriptor.decode(pair_instr(m, n), "f16", 2).m == m
        return
    with pytest.raises(EmulatorFault) as caught:
        InstrDescriptor.decode(pair_instr(m, n), "f16", 2)
    assert caught.value.code == "mma_bad_descriptor"


def test_faults_of_a_pair() -> None:
    pair = Pair()
    la = {"start": BASE, "leading": 16, "stride": 1024, "width": 8, "mn_major": False}
    a, idesc = descriptor(la), pair_instr(256, 64)

    def code(*args: int, **kwargs) -> str:
        with pytest.raises(EmulatorFault) as caught:
            pair.run(*args, **kwargs)
        return caught.value.code

    assert code(idesc, a, a, 16 << 16) == "tmem_lane_access"
    assert code(idesc, a, a, 0, disable_output_lane=(1, 2, 3, 4)) == "mma_bad_descriptor"
    assert code(idesc, a, a, 0, accumulate=True) == "tmem_unwritten_read"
    transposed = pair_instr(256, 64, a_mn=1)
    assert code(transposed, 0, a, 64, a_in_tmem=True) == "mma_bad_descriptor"
    outside = descriptor({**la, "start": 95 * 1024})
    assert code(idesc, a, outside, 0) == "smem_out_of_bounds"
    pair.tmem[1].dealloc(0, 512)
    assert code(idesc, a, a, 0) == "tmem_use_after_dealloc"
