"""tcgen05.mma against a slow reading of the ISA's layout text, element by element."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from kernels.emulator.engines import InstrDescriptor, SmemDescriptor, mma, tensorcore
from kernels.emulator.findings import EmulatorFault, UnsupportedPTX
from kernels.emulator.memory import SharedMemory, TensorMemory

BASE, SMEM_BYTES = 1024, 96 * 1024
SWIZZLE_CODE = {1: 0, 2: 6, 4: 4, 8: 2}  # 16-byte chunks in a swizzled row -> descriptor code
FORMAT = {"float16": 0, "bfloat16": 1}

# PTX ISA 9.1 section 5.5.7: row i of the pattern, entry j: which 16-byte chunk lies at place j.
# The pattern of W chunks repeats along the 128-byte line; each listed row is one 128-byte line.
ISA_SWIZZLE = {
    1: ["01234567"],
    2: ["01234567", "10325476"],
    4: ["01234567", "10325476", "23016745", "32107654"],
    8: [
        "01234567",
        "10325476",
        "23016745",
        "32107654",
        "45670123",
        "54761032",
        "67452301",
        "76543210",
    ],
}


def instr(m: int, n: int, dtype: str = "bfloat16", d: int = 1, **bits: int) -> int:
    """An instruction descriptor; bits: a_mn, b_mn, a_neg, b_neg."""
    value = d << 4 | FORMAT[dtype] << 7 | FORMAT[dtype] << 10 | n >> 3 << 17 | m >> 4 << 24
    place = {"a_neg": 13, "b_neg": 14, "a_mn": 15, "b_mn": 16}
    for name, bit in bits.items():
        value |= bit << place[name]
    return value


def smem_desc(start: int, leading: int, stride: int, width: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLE_CODE[width] << 61


def element_address(
    row: int, k: int, start: int, leading: int, stride: int, width: int, mn_major: bool
) -> int:
    """Byte address of element (row, k) by the canonical layout table of section 9.7.16.3.3.

    The layouts are written there in elements, T = 8 of them to 128 bits; LBO and SBO are bytes.
    """
    t = 8
    if mn_major and width == 1:  # ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO))
        offset = 2 * (row % t) + stride * (row // t) + 2 * t * (k % 8) + leading * (k // 8)
    elif mn_major:  # ((T,W,m),(8,k)):((1,T,LBO),(WT,SBO))
        offset = 2 * (row % t) + 2 * t * (row // t % width) + leading * (row // (t * width))
        offset += 2 * width * t * (k % 8) + stride * (k // 8)
    elif width == 1:  # ((8,m),(T,2k)):((1T,SBO),(1,LBO))
        offset = 2 * t * (row % 8) + stride * (row // 8) + 2 * (k % t) + leading * (k // t)
    else:  # ((8,m),(T,2k)):((WT,SBO),(1,T))
        offset = 2 * width * t * (row % 8) + stride * (row // 8) + 2 * (k % t) + 2 * t * (k // t)
    address = start + offset
    pattern = ISA_SWIZZLE[width]
    line, place = address // 128 % len(pattern), address // 16 % 8
    return address // 128 * 128 + 16 * int(pattern[line][place]) + address % 16


class Bench:
    """Shared memory full of small integers as 16-bit floats, and an empty Tensor Memory."""

    def __init__(self, dtype: str = "bfloat16", seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        values = rng.integers(-8, 9, SMEM_BYTES // 2).astype(np.float32)
        self.bits = narrow(values, dtype)
        self.values = values.astype(np.float64)
        self.smem = SharedMemory(SMEM_BYTES)
        self.smem.write_bytes(BASE, self.bits.view(np.uint8))
        self.tmem = TensorMemory()
        self.tmem.alloc(512)

    def operand(self, rows: int, **layout: int) -> np.ndarray:
        """float64[rows, 16], one element after the other."""
        out = np.empty((rows, 16))
        for row, k in product(range(rows), range(16)):
            address = element_address(row, k, **layout)
            out[row, k] = self.values[(address - BASE) // 2]
        return out

    def d(self, column: int, n: int) -> np.ndarray:
        """D's columns as float32[128 lanes, n]."""
        return self.tmem.data[column : column + n].view(np.float32).T

    def code_of(self, *args, **kwargs) -> str:
        kwargs = {"accumulate": False, "a_in_tmem": False, **kwargs}
        with pytest.raises(EmulatorFault) as caught:
            mma(*args, self.smem, self.tmem, **kwargs)
        return caught.value.code


def narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    """Bits of float32 values in a 16-bit type that holds them exactly (bf16: truncated)."""
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def random_layout(rng: np.random.Generator, mn_major: bool, width: int) -> dict:
    """A layout somewhere in shared memory, its strides arbitrary multiples of 16 bytes."""
    align = 128 * len(ISA_SWIZZLE[width])
    start = BASE + align * int(rng.integers(0, 16))
    if not mn_major and width > 2:
        start += 32 * int(rng.integers(0, width // 2))  # advanced along K inside the swizzled row
    stride, leading = 16 * rng.integers(1, 120, 2)
    return {
        "start": start,
        "leading": int(leading),
        "stride": int(stride),
        "width": width,
        "mn_major": mn_major,
    }


def descriptor(layout: dict) -> int:
    return smem_desc(layout["start"], layout["leading"], layout["stride"], layout["width"])


def rows_of(m: int, align: int = 0) -> np.ndarray:
    """Lane of each row of D: layout D for M = 128, layout F for M = 64 (figures 211 and 215)."""
    if m == 128:
        return np.arange(128)
    return np.array([32 * (r // 16) + r % 16 + align for r in range(64)])


SHAPES = [(128, 128), (128, 256), (64, 64), (128, 8), (64, 24), (128, 144)]


@pytest.mark.parametrize("a_mn,b_mn", list(product((False, True), repeat=2)))
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_ss_reads_the_canonical_layouts(a_mn: bool, b_mn: bool, width: int) -> None:
    bench = Bench(seed=width)
    rng = np.random.default_rng([a_mn, b_mn, width])
    for m, n in SHAPES:
        la = random_layout(rng, a_mn, width)
        lb = random_layout(rng, b_mn, (1, 2, 4, 8)[(width + n) % 4])
        mma(
            instr(m, n, a_mn=a_mn, b_mn=b_mn),
            descriptor(la),
            descriptor(lb),
            32,
            bench.smem,
            bench.tmem,
            accumulate=False,
            a_in_tmem=False,
        )
        want = bench.operand(m, **la) @ bench.operand(n, **lb).T
        assert np.array_equal(bench.d(32, n)[rows_of(m)], want), (m, n)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m,align", [(128, 0), (64, 0), (64, 16)])
def test_ts_reads_pairs_from_tensor_memory(dtype: str, m: int, align: int) -> None:
    bench = Bench(dtype)
    rng = np.random.default_rng(m + align)
    a = rng.integers(-8, 9, (m, 16)).astype(np.float64)
    pairs = narrow(a.reshape(m, 8, 2), dtype).astype(np.uint32)
    words = pairs[..., 0] | pairs[..., 1] << 16
    bench.tmem.data[40:48, rows_of(m, align)] = words.T
    bench.tmem.valid[:, 40:48] = 0xFFFFFFFF if m == 128 else 0xFFFF << align
    lb = random_layout(rng, True, 8)
    mma(
        instr(m, 96, dtype, b_mn=1),
        align << 16 | 40,
        descriptor(lb),
        align << 16 | 128,
        bench.smem,
        bench.tmem,
        accumulate=False,
        a_in_tmem=True,
    )
    want = a @ bench.operand(96, **lb).T
    assert np.array_equal(bench.d(128, 96)[rows_of(m, align)], want)


def plain(width: int = 8, start: int = BASE, b_start: int = BASE + 32768) -> tuple[int, int]:
    return smem_desc(start, 16, 128 * width, width), smem_desc(b_start, 16, 128 * width, width)


@pytest.mark.parametrize("m,align", [(128, 0), (64, 0), (64, 16)])
def test_only_d_is_written(m: int, align: int) -> None:
    bench = Bench()
    before = bench.tmem.data.copy()
    idesc, taddr = instr(m, 40), align << 16 | 64
    mma(idesc, *plain(), taddr, bench.smem, bench.tmem, accumulate=False, a_in_tmem=False)
    written = np.zeros((128, 512), bool)
    written[np.ix_(rows_of(m, align), np.arange(64, 104))] = True
    lanes = bench.tmem.valid[:, :, None] >> np.arange(32, dtype=np.uint32) & 1
    assert np.array_equal(lanes.transpose(0, 2, 1).reshape(128, 512), written)
    assert np.array_equal(bench.tmem.data.T[~written], before.T[~written])


def test_accumulation_negation_and_scaling() -> None:
    bench = Bench()
    a, b = plain()
    la = {"start": BASE, "leading": 16, "stride": 1024, "width": 8, "mn_major": False}
    ab = bench.operand(128, **la) @ bench.operand(64, **{**la, "start": BASE + 32768}).T

    def run(idesc: int, accumulate: bool, **kwargs) -> np.ndarray:
        mma(
            idesc, a, b, 0, bench.smem, bench.tmem,
            accumulate=accumulate, a_in_tmem=False, **kwargs,
        )  # fmt: skip
        return bench.d(0, 64).astype(np.float64)

    assert np.array_equal(run(instr(128, 64), False), ab)
    assert np.array_equal(run(instr(128, 64), True), 2 * ab)
    assert np.array_equal(run(instr(128, 64), True, scale_d=0), 3 * ab)
    assert np.array_equal(run(instr(128, 64, a_neg=1), True), 2 * ab)
    assert np.array_equal(run(instr(128, 64, b_neg=1), False), -ab)
    assert np.array_equal(run(instr(128, 64, a_neg=1, b_neg=1), False), ab)
    assert np.array_equal(run(instr(128, 64), True, scale_d=3), ab / 8 + ab)
    assert bench.code_of(instr(128, 64), a, b, 0, scale_d=16, accumulate=True) == (
        "mma_bad_descriptor"
    )
    assert bench.code_of(instr(128, 64), a, b, 0, scale_d=1) == "mma_bad_descriptor"


def test_disabled_lanes_keep_what_they_had() -> None:
    for m, taddr in ((128, 0), (64, 16 << 16)):
        bench = Bench()
        rng = np.random.default_rng(m)
        old = rng.integers(0, 1 << 32, (32, 128), np.uint32)
        bench.tmem.data[:32] = old
        masks = rng.integers(0, 1 << 32, 4, np.uint32)
        args = (instr(m, 32), *plain(), taddr, bench.smem, bench.tmem)
        mma(*args, accumulate=False, a_in_tmem=False, disable_output_lane=masks.tolist())
        masked, valid = bench.tmem.data[:32].copy(), bench.tmem.valid[:, :32].copy()
        mma(*args, accumulate=False, a_in_tmem=False, disable_output_lane=(0, 0, 0, 0))
        for lane in range(128):
            used = m == 128 or lane % 32 >= 16
            off = masks[lane // 32] >> np.uint32(lane % 32) & 1
            expect = old[:, lane] if off or not used else bench.tmem.data[:32, lane]
            assert np.array_equal(masked[:, lane], expect), lane
            bits = valid[lane // 32] >> np.uint32(lane % 32) & 1
            assert (bits == (used and not off)).all()


@pytest.mark.parametrize(
    "dtype,d_dtype",
    [("bfloat16", "float32"), ("float16", "float32"), ("float16", "float16")],
)
def test_sums_are_rounded_once(dtype: str, d_dtype: str) -> None:
    """Random data: every element is the exact sum of its 17 terms, rounded to D's type."""
    bench = Bench()
    rng = np.random.default_rng(7)
    scale = 2.0 ** rng.integers(-3, 4, SMEM_BYTES // 2)
    bits = narrow((rng.standard_normal(SMEM_BYTES // 2) * scale).astype(np.float32), dtype)
    bench.smem.write_bytes(BASE, bits.view(np.uint8))
    bench.values = (
        bits.view(np.float16).astype(np.float64)
        if dtype == "float16"
        else (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    )
    la = {"start": BASE, "leading": 16, "stride": 1024, "width": 8, "mn_major": False}
    a = bench.operand(128, **la)
    b = bench.operand(16, **{**la, "start": BASE + 32768})
    out = np.float32 if d_dtype == "float32" else np.float16
    d = (rng.standard_normal((16, 128)) * 40).astype(out)
    if out is np.float32:
        bench.tmem.data[:16] = d.view(np.uint32)
    else:
        bench.tmem.data[:16] = d.view(np.uint16)
    bench.tmem.valid[:, :16] = 0xFFFFFFFF
    mma(
        instr(128, 16, dtype, d=int(out is np.float32)),
        *plain(),
        0,
        bench.smem,
        bench.tmem,
        accumulate=True,
        a_in_tmem=False,
    )
    for n, m in product(range(16), range(128)):
        exact = math.fsum([*(a[m] * b[n]), float(d[n, m])])
        cell = bench.tmem.data[n, m]
        got = cell.view(np.float32) if out is np.float32 else np.uint16(cell).view(np.float16)
        assert got == out(exact)
        assert out is np.float32 or cell >> 16 == 0


@pytest.mark.filterwarnings("error")
def test_nan_and_infinity_propagate_without_a_warning() -> None:
    bench = Bench()
    a = np.full((128, 16), 0x3F80, np.uint16)  # bfloat16 ones
    b = a.copy()
    a[3, 5] = 0x7F81  # a signalling NaN
    a[4, 0] = 0x7F80  # infinity
    a[5, 0], a[5, 9] = 0x7F80, 0xFF80  # infinity - infinity
    a[6, 1] = b[2, 1] = 0x7F7F  # the largest finite value: its square overflows float32
    for start, rows in ((BASE, a), (BASE + 4096, b)):  # unswizzled: both K chunks one after another
        chunks = np.ascontiguousarray(rows.reshape(128, 2, 8).swapaxes(0, 1))
        bench.smem.write_bytes(start, chunks.view(np.uint8).reshape(-1))
    mma(
        instr(128, 8),
        smem_desc(BASE, 2048, 128, 1),
        smem_desc(BASE + 4096, 2048, 128, 1),
        0,
        bench.smem,
        bench.tmem,
        accumulate=False,
        a_in_tmem=False,
    )
    d = bench.d(0, 8)
    assert np.isnan(d[3]).all() and np.isnan(d[5]).all()
    assert np.isposinf(d[4]).all() and np.isposinf(d[6, 2])
    assert np.isfinite(d[6, [0, 1, 3]]).all() and d[0, 0] == 16
    assert np.isnan(d).sum() == 16 and np.isinf(d).sum() == 9


def test_unwritten_operand_bytes_are_named() -> None:
    for operand, start in (("A", BASE), ("B", BASE + 32768)):
        bench = Bench()
        bench.smem.window_valid[start + 5 * 1024 + 2 * 128 + 7] = 0  # row 42, in its first chunk
        a, b = smem_desc(BASE, 16, 1024, 8), smem_desc(BASE + 32768, 16, 1024, 8)
        hit = start + 5 * 1024 + 2 * 128 + 7
        with pytest.raises(EmulatorFault) as caught:
            for step in range(4):  # one of the four K steps of the 64-wide row holds the byte
                mma(
                    instr(128, 128), a + 2 * step, b + 2 * step, 0, bench.smem, bench.tmem,
                    accumulate=False, a_in_tmem=False,
                )  # fmt: skip
        assert caught.value.code == "smem_unwritten_read"
        assert f"operand {operand}" in caught.value.message
        assert caught.value.details["address"] == hit
        assert step == 1  # line 2 of the pattern swaps 32-byte halves of a 64-byte half


def test_unwritten_bytes_between_rows_do_not_matter() -> None:
    bench = Bench()
    bench.smem.window_valid[BASE : BASE + 16384].reshape(-1, 128)[:, 64:] = 0
    a, b = smem_desc(BASE, 16, 512, 1), smem_desc(BASE + 32768, 16, 1024, 8)
    for row in range(16):  # an unswizzled A of 8-row groups, 512 bytes apart: it uses 144 of them
        bench.smem.window_valid[BASE + 512 * row : BASE + 512 * row + 144] = 1
    mma(instr(128, 64), a, b, 0, bench.smem, bench.tmem, accumulate=False, a_in_tmem=False)
    bench.smem.window_valid[BASE + 512 * 3 + 143] = 0
    assert bench.code_of(instr(128, 64), a, b, 0) == "smem_unwritten_read"


def test_operand_over_a_live_mbarrier_and_out_of_bounds() -> None:
    bench = Bench()
    bench.smem.mark_mbarrier(BASE + 1024)
    a, b = plain()
    assert bench.code_of(instr(128, 64), a, b, 0) == "mbarrier_ordinary_access"
    late = smem_desc(BASE + SMEM_BYTES - 8192, 16, 1024, 8)
    assert bench.code_of(instr(128, 64), late, b, 0) == "smem_out_of_bounds"
    reserved = smem_desc(0, 16, 1024, 8)
    assert bench.code_of(instr(128, 64), b, reserved, 0) == "smem_out_of_bounds"


def test_unwritten_tensor_memory_operands() -> None:
    bench = Bench()
    a, b = plain()
    with pytest.raises(EmulatorFault) as caught:
        mma(instr(128, 64), a, b, 0, bench.smem, bench.tmem, accumulate=True, a_in_tmem=False)
    assert caught.value.code == "tmem_unwritten_read" and "D" in caught.value.message
    with pytest.raises(EmulatorFault) as caught:
        mma(instr(128, 64), 128, b, 0, bench.smem, bench.tmem, accumulate=False, a_in_tmem=True)
    assert caught.value.code == "tmem_unwritten_read" and "operand A" in caught.value.message
    # An M = 64 accumulator leaves half the lanes unwritten: M = 128 may not read them.
    mma(instr(64, 64), a, b, 0, bench.smem, bench.tmem, accumulate=False, a_in_tmem=False)
    mma(instr(64, 64), a, b, 0, bench.smem, bench.tmem, accumulate=True, a_in_tmem=False)
    assert bench.code_of(instr(128, 64), a, b, 0, accumulate=True) == "tmem_unwritten_read"


def test_tensor_memory_places() -> None:
    bench = Bench()
    a, b = plain()
    assert bench.code_of(instr(128, 64), a, b, 449) == "tmem_out_of_bounds"
    assert bench.code_of(instr(128, 64), a, b, 32 << 16) == "tmem_lane_access"
    assert bench.code_of(instr(64, 64), a, b, 8 << 16) == "tmem_lane_access"
    assert bench.code_of(instr(64, 64), 64, b, 16 << 16, a_in_tmem=True) == "tmem_lane_access"
    assert bench.code_of(instr(128, 64, a_mn=1), 64, b, 0, a_in_tmem=True) == "mma_bad_descriptor"
    bench.tmem.dealloc(0, 512)
    assert bench.code_of(instr(128, 64), a, b, 0) == "tmem_use_after_dealloc"


def test_descriptors_that_flash_attention_uses() -> None:
    """Constants of the compiled sm_100a forward of flash-attn-4, head_dim 128."""
    qk, pv = InstrDescriptor.decode(0x8200490), InstrDescriptor.decode(0x8210490)
    assert (qk.m, qk.n, qk.a_dtype, qk.d_dtype) == (128, 128, "bfloat16", "float32")
    assert not qk.a_mn_major and not qk.b_mn_major and not pv.a_mn_major and pv.b_mn_major
    q = SmemDescriptor.decode(0x40004040 << 32 | 0x10C0)
    assert (q.start, q.stride_bytes, q.swizzle_chunks) == (0x10C00, 1024, 8)
    v = SmemDescriptor.decode(0x40004040 << 32 | 67108864 | 0x20C0)
    assert (v.start, v.leading_bytes) == (0x20C00, 16384)


@pytest.mark.parametrize("bit", [2, 0, 30, 31])
def test_bits_of_other_forms(bit: int) -> None:
    """Sparsity, its selector, shifts of .ws."""
    with pytest.raises(EmulatorFault, match="bit 2|bits 0-1|bits 30-31"):
        InstrDescriptor.decode(instr(128, 64) | 1 << bit)


@pytest.mark.parametrize(
    "value",
    [
        instr(128, 64) | 1 << 3,
        instr(128, 64) | 1 << 6,
        instr(128, 64) | 1 << 23,
        instr(128, 64) | 1 << 29,
        instr(128, 64) | 1 << 32,
        instr(128, 64, d=2),
        instr(128, 64, d=3),
        instr(128, 64, d=0),
        instr(128, 64) | 1 << 8,
        instr(128, 64) | 1 << 11,
        instr(128, 0),
        instr(128, 264),
        instr(256, 64),
        instr(0, 64),
        instr(32, 64),
        instr(112, 64),
    ],
)
def test_bad_instruction_descriptors(value: int) -> None:
    with pytest.raises(EmulatorFault) as caught:
        InstrDescriptor.decode(value)
    assert caught.value.code == "mma_bad_descriptor"
    assert f"{value:#010x}" in caught.value.message


def test_unmodelled_forms_are_refused() -> None:
    with pytest.raises(UnsupportedPTX, match="kind::f64"):
        InstrDescriptor.decode(instr(128, 64), "f64")
    with pytest.raises(UnsupportedPTX, match="shifts"):
        InstrDescriptor.decode(instr(128, 64) | 1 << 30, "f16", 1, ws=True)
    with pytest.raises(UnsupportedPTX):  # A f16, B bf16
        InstrDescriptor.decode(instr(128, 64) & ~(7 << 7))


GOOD = smem_desc(BASE, 16, 1024, 8)


@pytest.mark.parametrize("bit", [14, 15, 30, 31, 47, 48, *range(53, 61), 64])
def test_constant_bits_of_the_shared_memory_descriptor(bit: int) -> None:
    with pytest.raises(EmulatorFault) as caught:
        SmemDescriptor.decode(GOOD | 1 << bit)
    assert caught.value.code == "mma_bad_descriptor"


def test_bad_and_unmodelled_shared_memory_descriptors() -> None:
    unswizzled = GOOD & ~(7 << 61)
    for value in (
        GOOD & ~(1 << 46), GOOD | 1 << 61, unswizzled | 5 << 61, GOOD | 5 << 61,
        unswizzled | 1 << 52,
    ):  # fmt: skip
        with pytest.raises(EmulatorFault) as caught:
            SmemDescriptor.decode(value)
        assert caught.value.code == "mma_bad_descriptor"
    for value in (GOOD | 1 << 49, GOOD | 1 << 51):
        with pytest.raises(UnsupportedPTX):
            SmemDescriptor.decode(value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m,align", [(128, 0), (64, 0), (64, 16)])
@pytest.mark.parametrize("source", ["K-major", "M-major", "Tensor Memory"])
def test_one_call_gives_the_bits_of_the_steps(
    dtype: str, m: int, align: int, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random bits, NaN and infinity among them, wherever operands and D may lie; the steps are what
    every other form of MMA goes through."""
    rng = np.random.default_rng([m, align, len(source)])
    bits = rng.integers(0, 256, SMEM_BYTES, np.uint8)
    cells = rng.standard_normal((512, 128)).astype(np.float32).view(np.uint32)
    in_tmem, a_mn = source == "Tensor Memory", source == "M-major"
    for n, b_mn, negate, accumulate in product((24, 256), (0, 1), (0, 1), (False, True)):
        a = descriptor(random_layout(rng, a_mn, 8)) if not in_tmem else align << 16 | 40
        b = descriptor(random_layout(rng, bool(b_mn), 4))
        idesc = instr(m, n, dtype, a_mn=int(a_mn), b_mn=b_mn, a_neg=negate)
        results = []
        for planned in (tensorcore._planned, lambda *_: None):
            monkeypatch.setattr(tensorcore, "_planned", planned)
            smem, tmem = SharedMemory(SMEM_BYTES), TensorMemory()
            smem.write_bytes(BASE, bits)
            tmem.alloc(512)
            tmem.data[:], tmem.valid[:] = cells, 0xFFFFFFFF
            taddr = align << 16 | 128
            mma(idesc, a, b, taddr, smem, tmem, accumulate=accumulate, a_in_tmem=in_tmem)
            results.append(tmem.data)
            monkeypatch.undo()
        assert np.array_equal(*results), (n, b_mn, negate, accumulate)
        assert not np.array_equal(results[0], cells)


def test_one_call_names_the_unwritten_operand() -> None:
    """A plan that has run before meets memory in which a chunk is missing."""
    for name, missing in (("A", BASE), ("B", BASE + 32768)):
        bench = Bench()
        at = (instr(128, 64), *plain(), 64, bench.smem, bench.tmem)
        mma(*at, accumulate=False, a_in_tmem=False)
        before = bench.tmem.data.copy()
        bench.smem.window_valid[missing + 5] = 0
        with pytest.raises(EmulatorFault, match=f"operand {name} of shared memory") as caught:
            mma(*at, accumulate=False, a_in_tmem=False)
        assert caught.value.code == "smem_unwritten_read"
        assert np.array_equal(bench.tmem.data, before)
