"""The less common forms of tcgen05.mma against float64: block scaling, 6- and 4-bit floats,
integers, sparse A, weight-stationary. Operands are random codes; what is expected is computed from
values that are decoded here, and all sums are exact, so that results are compared bit for bit.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from kernels.emulator.engines import InstrDescriptor, formats, mma
from kernels.emulator.engines.forms import Form, Operands, multiply
from kernels.emulator.findings import EmulatorFault, UnsupportedPTX
from kernels.emulator.memory import SharedMemory, TensorMemory
from tests.emulator.oracle_half import _narrow_value
from tests.emulator.test_tensorcore import BASE, smem_desc

BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4, "e2m1x2": 4, "s8": 8, "u8": 8,
        "f16": 16, "tf32": 32}  # fmt: skip
CODE = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5, "e2m1x2": 1, "u8": 0, "s8": 1,
        "f16": 0, "tf32": 2}  # fmt: skip
A_AT, B_AT = BASE, BASE + 65536
SCALE_A, SCALE_B, META, A_TMEM = 256, 288, 320, 352  # columns; D starts at 0


def decode(codes: np.ndarray, dtype: str) -> np.ndarray:
    """Values of codes, by definition."""
    if dtype in ("s8", "u8"):
        return codes.astype(np.uint8).view(np.int8 if dtype == "s8" else np.uint8).astype(float)
    if dtype in ("f16", "tf32"):
        return codes.astype(float)  # small integers stand for themselves
    name = dtype.removesuffix("x2")
    sign = 1 << BITS[dtype] - 1
    table = np.zeros(2 * sign)
    for code in range(2 * sign):
        value = _narrow_value(code & sign - 1, name)
        assert isinstance(value, Fraction) or code & 0x7C in (0x7C, 0x7F)
        size = float(value) if isinstance(value, Fraction) else np.nan
        table[code] = -size if code & sign else size
    return table[codes]


def random_codes(rng: np.random.Generator, dtype: str, shape: tuple[int, int]) -> np.ndarray:
    """Finite numbers, those of 8 bits of a few binades so that sums are exact."""
    if dtype in ("e4m3", "e5m2"):
        low, high = {"e4m3": (0x28, 0x50), "e5m2": (0x34, 0x48)}[dtype]
        return rng.integers(low, high, shape) | rng.integers(0, 2, shape) << 7
    if dtype in ("f16", "tf32"):
        return rng.integers(-8, 9, shape)
    return rng.integers(0, 1 << BITS[dtype], shape)


def packed_row(codes: np.ndarray, dtype: str) -> bytes:
    """A row as it lies in shared memory: bits one after the other, 6- and 4-bit elements in groups
    of 16 that take 16 bytes (padding: 0xee), e2m1x2 without padding."""
    if dtype == "f16":
        return codes.astype(np.float16).tobytes()
    if dtype == "tf32":
        return codes.astype(np.float32).tobytes()
    out = b""
    for group in codes.reshape(-1, 16):
        bits = sum(int(code) << BITS[dtype] * k for k, code in enumerate(group))
        data = bits.to_bytes(2 * BITS[dtype], "little")
        out += data if dtype == "e2m1x2" else data.ljust(16, b"\xee")
    return out


def place(smem: SharedMemory, at: int, codes: np.ndarray, dtype: str) -> int:
    """Writes a K-major operand without swizzle, rows by K; its descriptor."""
    rows = np.array([np.frombuffer(packed_row(row, dtype), np.uint8) for row in codes])
    chunks = rows.reshape(len(rows) // 8, 8, -1, 16).transpose(0, 2, 1, 3)
    smem.write_bytes(at, np.ascontiguousarray(chunks).reshape(-1))
    return smem_desc(at, 128, 8 * rows.shape[1], 1)


def cta() -> tuple[SharedMemory, TensorMemory]:
    smem, tmem = SharedMemory(160 * 1024), TensorMemory()
    tmem.alloc(512)
    return smem, tmem


def put(tmem: TensorMemory, column: int, cells: np.ndarray) -> None:
    """uint32[columns, 128 lanes]."""
    tmem.data[column : column + len(cells)] = cells
    tmem.valid[:, column : column + len(cells)] = 0xFFFFFFFF


def scale_cells(codes: np.ndarray, first: int, halves: bool = False) -> np.ndarray:
    """Scale factors, uint8[rows, blocks], as the cells of Tensor Memory: row r in lane r % 32 (of
    each warp, or of one half's warps) and column r / 32, block k in byte first + k."""
    rows, blocks = codes.shape
    per = rows // 2 if halves else rows
    group = 4 * -(-per // 128)
    cells = np.zeros((3 * group, 128), np.uint32)
    for r in range(rows):
        for k in range(blocks):
            word, byte = divmod(first + k, 4)
            column = word * group + r % per // 32
            for warp in range(4):
                if not halves or warp // 2 == r // per:
                    cells[column, 32 * warp + r % 32] |= int(codes[r, k]) << 8 * byte
    return cells


def d_of(tmem: TensorMemory, n: int) -> np.ndarray:
    return tmem.data[:n].view(np.float32).T


# -- types ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "e2m1x2"])
def test_elements_of_shared_and_tensor_memory(dtype: str) -> None:
    codes = np.random.default_rng(len(dtype)).integers(0, 1 << BITS[dtype], (8, 64))
    if dtype in ("e4m3", "e5m2"):
        codes &= 0xBB  # no NaN, no infinity
    raw = np.frombuffer(b"".join(packed_row(row, dtype) for row in codes), "V16").reshape(8, -1)
    want = decode(codes, dtype)
    assert np.array_equal(formats.chunk_values(raw.copy(), dtype), want)
    if dtype == "e2m1x2":
        held = codes[:, ::2] | codes[:, 1::2] << 4
    else:
        held = codes << {"e2m1": 2, "e2m3": 1, "e3m2": 1}.get(dtype, 0)
    assert np.array_equal(formats.byte_values(held.T.astype(np.uint8), dtype), want.T)


FLOATS = ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"]


def plain_idesc(m: int, n: int, a: str, b: str, d: int = 1, **bits: int) -> int:
    other = sum(1 << {"sparse": 2, "saturate": 3}[name] for name, on in bits.items() if on)
    return d << 4 | CODE[a] << 7 | CODE[b] << 10 | n >> 3 << 17 | m >> 4 << 24 | other


@pytest.mark.parametrize("a", FLOATS)
@pytest.mark.parametrize("b", FLOATS)
def test_any_two_small_floats(a: str, b: str) -> None:
    rng = np.random.default_rng([FLOATS.index(a), FLOATS.index(b)])
    smem, tmem = cta()
    of_a, of_b = random_codes(rng, a, (128, 32)), random_codes(rng, b, (64, 32))
    ops = Operands(
        plain_idesc(128, 64, a, b), place(smem, A_AT, of_a, a), place(smem, B_AT, of_b, b), 0,
        False, False,
    )  # fmt: skip
    want = decode(of_a, a) @ decode(of_b, b).T
    multiply(Form("f8f6f4", 1), ops, [smem], [tmem])
    assert np.array_equal(d_of(tmem, 64), want)
    # What the machine calls for this kind, with A in shared and in Tensor Memory.
    shift = {"e2m1": 2, "e2m3": 1, "e3m2": 1}.get(a, 0)
    cells = np.ascontiguousarray(of_a << shift).astype(np.uint8).view(np.uint32).T
    put(tmem, A_TMEM, cells)
    for in_tmem in (False, True):
        tmem.data[:64] = 0
        mma(
            ops.idesc, A_TMEM if in_tmem else ops.a, ops.b, 0, smem, tmem, accumulate=False,
            a_in_tmem=in_tmem, kind="f8f6f4",
        )  # fmt: skip
        assert np.array_equal(d_of(tmem, 64), want)


@pytest.mark.parametrize("dtype", ["e2m1", "e2m3", "e3m2", "e5m2"])
def test_padding_need_not_be_written(dtype: str) -> None:
    rng = np.random.default_rng(1)
    smem, tmem = cta()
    codes = random_codes(rng, dtype, (128, 32))
    desc = place(smem, A_AT, codes, dtype)
    at = np.arange(A_AT, A_AT + 128 * 32)
    smem.window_valid[at[at % 16 >= 2 * BITS[dtype]]] = 0
    ops = Operands(plain_idesc(128, 64, dtype, dtype), desc, desc, 0, False, False)
    multiply(Form("f8f6f4", 1), ops, [smem], [tmem])
    smem.window_valid[A_AT + 16 * 5 + 2 * BITS[dtype] - 1] = 0
    with pytest.raises(EmulatorFault) as caught:
        multiply(Form("f8f6f4", 1), ops, [smem], [tmem])
    assert caught.value.code == "smem_unwritten_read"


# -- block scaling --------------------------------------------------------------------------------

SCALED = [  # kind, A, B, block, scale type, byte of A's and of B's first factor, K = 96
    *[("mxf8f6f4", a, b, 32, "ue8m0", i, 3 - i, False)
      for i, (a, b) in enumerate(zip(FLOATS[:4], FLOATS[:0:-1], strict=True))],
    ("mxf4", "e2m1x2", "e2m1x2", 32, "ue8m0", 0, 2, False),
    ("mxf4nvf4", "e2m1x2", "e2m1x2", 32, "ue8m0", 2, 0, False),
    ("mxf4nvf4", "e2m1x2", "e2m1x2", 16, "ue8m0", 0, 0, False),
    ("mxf4nvf4", "e2m1x2", "e2m1x2", 16, "ue4m3", 0, 0, False),
    *[("mxf4", "e2m1x2", "e2m1x2", 32, "ue8m0", i, 3 - i, True) for i in range(4)],
    ("mxf4nvf4", "e2m1x2", "e2m1x2", 16, "ue4m3", 2, 0, True),
    ("mxf4nvf4", "e2m1x2", "e2m1x2", 16, "ue8m0", 0, 2, True),
]  # fmt: skip


def scaled_idesc(
    m: int, n: int, a: str, b: str, scale: str, a_byte: int, b_byte: int, long_k: bool
) -> int:
    types = CODE[a] << 7 | CODE[b] << 10 | (scale == "ue8m0") << 23
    return b_byte << 4 | types | n >> 3 << 17 | m >> 4 << 24 | a_byte << 29 | long_k << 31


def scale_codes(rng: np.random.Generator, scale: str, shape: tuple[int, int]) -> np.ndarray:
    """Powers of two, or e4m3 without a sign, whose bit 7 does not count."""
    if scale == "ue8m0":
        return rng.integers(124, 131, shape)
    return rng.integers(0x30, 0x48, shape) | rng.integers(0, 2, shape) << 7


def scales(codes: np.ndarray, scale: str) -> np.ndarray:
    return 2.0 ** (codes - 127) if scale == "ue8m0" else decode(codes & 0x7F, "e4m3")


@pytest.mark.parametrize("kind,a,b,block,scale,a_byte,b_byte,long_k", SCALED)
@pytest.mark.parametrize("n", [256, 72, 8])
def test_block_scaling(
    kind: str,
    a: str,
    b: str,
    block: int,
    scale: str,
    a_byte: int,
    b_byte: int,
    long_k: bool,
    n: int,
) -> None:
    rng = np.random.default_rng([n, block, a_byte, b_byte, long_k])
    k = (64 if a == "e2m1x2" else 32) * (3 if long_k else 2) // 2
    smem, tmem = cta()
    of_a, of_b = random_codes(rng, a, (128, k)), random_codes(rng, b, (n, k))
    s_a, s_b = (scale_codes(rng, scale, (rows, k // block)) for rows in (128, n))
    put(tmem, SCALE_A, scale_cells(s_a, a_byte))
    put(tmem, SCALE_B, scale_cells(s_b, b_byte))
    start = rng.integers(-64, 65, (n, 128)).astype(np.float32)
    put(tmem, 0, start.view(np.uint32))
    idesc = scaled_idesc(128, n, a, b, scale, a_byte, b_byte, long_k)
    ops = Operands(
        idesc, place(smem, A_AT, of_a, a), place(smem, B_AT, of_b, b), 0, False, True,
        # CUTLASS leaves the byte in the address, too
        scale_a=SCALE_A | a_byte << 30, scale_b=SCALE_B | b_byte << 30,
    )  # fmt: skip
    multiply(Form(kind, 1, block), ops, [smem], [tmem])
    left = decode(of_a, a) * np.repeat(scales(s_a, scale), block, axis=1)
    right = decode(of_b, b) * np.repeat(scales(s_b, scale), block, axis=1)
    assert np.array_equal(d_of(tmem, n), (left @ right.T + start.T).astype(np.float32))


@pytest.mark.parametrize("m", [256, 128])
@pytest.mark.parametrize("n", [256, 64])
@pytest.mark.parametrize("in_tmem", [False, True])
def test_block_scaling_on_a_pair(m: int, n: int, in_tmem: bool) -> None:
    """M = 128: a CTA's 64 rows are in lanes 0-63 for one half of N and in 64-127 for the other."""
    rng = np.random.default_rng([m, n])
    halves = m == 128
    ctas = [cta(), cta()]
    of_a, of_b = random_codes(rng, "e2m1x2", (m, 64)), random_codes(rng, "e2m1x2", (n, 64))
    s_a, s_b = (scale_codes(rng, "ue4m3", (rows, 4)) for rows in (m, n))
    descs = set()
    for k, (smem, tmem) in enumerate(ctas):
        mine = of_a[k * m // 2 : (k + 1) * m // 2]
        descs.add((
            place(smem, A_AT, mine, "e2m1x2"),
            place(smem, B_AT, of_b[k * n // 2 : (k + 1) * n // 2], "e2m1x2"),
        ))  # fmt: skip
        put(tmem, SCALE_A, scale_cells(s_a[k * m // 2 : (k + 1) * m // 2], 0))
        put(tmem, SCALE_B, scale_cells(s_b, 0, halves))
        words = np.array([np.frombuffer(packed_row(row, "e2m1x2"), np.uint32) for row in mine])
        put(tmem, A_TMEM, np.tile(words, (2 if halves else 1, 1)).T)
    ((a_desc, b_desc),) = descs
    ops = Operands(
        scaled_idesc(m, n, "e2m1x2", "e2m1x2", "ue4m3", 0, 0, False),
        A_TMEM if in_tmem else a_desc, b_desc, 0, in_tmem, False, SCALE_A, SCALE_B,
    )  # fmt: skip
    multiply(Form("mxf4nvf4", 2, 16), ops, [c[0] for c in ctas], [c[1] for c in ctas])
    left = decode(of_a, "e2m1x2") * np.repeat(scales(s_a, "ue4m3"), 16, axis=1)
    want = left @ (decode(of_b, "e2m1x2") * np.repeat(scales(s_b, "ue4m3"), 16, axis=1)).T
    got = []
    for _, tmem in ctas:
        d = d_of(tmem, n // 2 if halves else n)
        got.append(np.concatenate((d[:64], d[64:]), axis=1) if halves else d)
    assert np.array_equal(np.concatenate(got), want.astype(np.float32))


def test_k_96_goes_on_at_an_absolute_address() -> None:
    """Rows of 128 bytes, swizzled: 48 bytes from byte 96 on are the row's last 32, and the first 16
    of the row in the next buffer."""
    rng = np.random.default_rng(96)
    smem, tmem = cta()
    of = {name: random_codes(rng, "e2m1x2", (128, 96)) for name in "AB"}
    descs = []
    for name, at in (("A", A_AT), ("B", B_AT)):
        first, beyond = at, at + 32768
        for r, row in enumerate(of[name]):
            for j, chunk in enumerate(np.frombuffer(packed_row(row, "e2m1x2"), "V16")):
                line = (first, first, beyond)[j] + 128 * r
                place_ = (6, 7, 0)[j] ^ r % 8
                smem.write_bytes(line + 16 * place_, np.frombuffer(chunk.tobytes(), np.uint8))
        descs.append(smem_desc(first + 96, beyond, 1024, 8) | 1 << 52)
    s = [scale_codes(rng, "ue8m0", (128, 3)) for _ in "AB"]
    put(tmem, SCALE_A, scale_cells(s[0], 0))
    put(tmem, SCALE_B, scale_cells(s[1], 0))
    idesc = scaled_idesc(128, 128, "e2m1x2", "e2m1x2", "ue8m0", 0, 0, True)
    ops = Operands(idesc, *descs, 0, False, False, SCALE_A, SCALE_B)
    multiply(Form("mxf4", 1, 32), ops, [smem], [tmem])
    left, right = (
        decode(of[n], "e2m1x2") * np.repeat(scales(x, "ue8m0"), 32, axis=1)
        for n, x in zip("AB", s, strict=True)
    )
    assert np.array_equal(d_of(tmem, 128), (left @ right.T).astype(np.float32))


def test_scale_factors_that_are_wrong() -> None:
    rng = np.random.default_rng(2)
    smem, tmem = cta()
    desc = place(smem, A_AT, random_codes(rng, "e4m3", (128, 32)), "e4m3")
    ones = np.full((128, 1), 127)

    form, idesc = (
        Form("mxf8f6f4", 1, 32),
        scaled_idesc(128, 128, *["e4m3"] * 2, "ue8m0", 0, 0, False),
    )

    def run(**other: int) -> None:
        where = {"scale_a": SCALE_A, "scale_b": SCALE_B} | other
        multiply(form, Operands(idesc, desc, desc, 0, False, False, **where), [smem], [tmem])

    for column in (SCALE_A, SCALE_B):
        put(tmem, column, scale_cells(ones, 0))
    run()
    for change, code in (
        (lambda: tmem.valid.__setitem__((3, SCALE_B + 3), 1), "tmem_unwritten_read"),
        (lambda: tmem.data.__setitem__((SCALE_A + 1, 40), 126), "mma_scale_not_duplicated"),
    ):
        for column in (SCALE_A, SCALE_B):
            put(tmem, column, scale_cells(ones, 0))
        change()
        with pytest.raises(EmulatorFault) as caught:
            run()
        assert caught.value.code == code
    put(tmem, SCALE_A, scale_cells(ones, 0) | 0xA5 << 8)  # another factor may differ between copies
    tmem.data[SCALE_A, 33] ^= 0x5A00
    put(tmem, SCALE_B, scale_cells(ones, 0))
    run()
    with pytest.raises(EmulatorFault, match="lane must be 0"):
        run(scale_a=SCALE_A | 32 << 16)
    with pytest.raises(EmulatorFault, match="columns"):
        run(scale_b=510)


@pytest.mark.parametrize(
    "kind,block,idesc,rule",
    [
        ("mxf4", 32, (128, 64, "ue8m0", 1, 0, False), "scale factor A ID is 1"),
        ("mxf4nvf4", 16, (128, 64, "ue8m0", 0, 2, False), "scale factor B ID is 2"),
        ("mxf4nvf4", 16, (128, 64, "ue8m0", 0, 1, True), "scale factor B ID is 1"),
        ("mxf4", 32, (128, 64, "ue4m3", 0, 0, False), "takes ue8m0"),
        ("mxf4nvf4", 32, (128, 64, "ue4m3", 0, 0, False), "blocks of 16"),
        ("mxf4", 32, (64, 64, "ue8m0", 0, 0, False), "bit 26"),
        ("mxf4", 32, (256, 64, "ue8m0", 0, 0, False), "M is 256"),
        ("mxf4", 32, (128, 264, "ue8m0", 0, 0, False), "N is 264"),
        ("mxf8f6f4", 32, (128, 64, "ue8m0", 0, 0, True), "bit 31"),
    ],
)
def test_descriptors_of_block_scaling(kind: str, block: int, idesc: tuple, rule: str) -> None:
    m, n, scale, a_byte, b_byte, long_k = idesc
    smem, tmem = cta()
    put(tmem, SCALE_A, np.zeros((24, 128), np.uint32))
    put(tmem, SCALE_B, np.zeros((24, 128), np.uint32))
    value = scaled_idesc(m, n, "e2m1x2", "e2m1x2", scale, a_byte, b_byte, long_k)
    desc = place(smem, A_AT, np.zeros((128, 96), int), "e2m1x2")
    ops = Operands(value, desc, desc, 0, False, False, SCALE_A, SCALE_B)
    with pytest.raises(EmulatorFault, match=rule):
        multiply(Form(kind, 1, block), ops, [smem], [tmem])


# -- integers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("a,b", [("s8", "s8"), ("u8", "s8"), ("s8", "u8"), ("u8", "u8")])
@pytest.mark.parametrize("saturate", [False, True])
def test_integers(a: str, b: str, saturate: bool) -> None:
    rng = np.random.default_rng([len(a), saturate])
    smem, tmem = cta()
    of_a, of_b = random_codes(rng, a, (128, 32)), random_codes(rng, b, (48, 32))
    start = rng.integers(-(2**31), 2**31, (48, 128))
    start[::2] = rng.choice([2**31 - 1, -(2**31)], (24, 128))
    put(tmem, 0, start.astype(np.int32).view(np.uint32))
    idesc = plain_idesc(128, 48, a, b, 2, saturate=saturate)
    ops = Operands(
        idesc, place(smem, A_AT, of_a, a), place(smem, B_AT, of_b, b), 0, False, True
    )  # fmt: skip
    multiply(Form("i8", 1), ops, [smem], [tmem])
    exact = (decode(of_a, a) @ decode(of_b, b).T).astype(np.int64).T + start
    want = exact.clip(-(2**31), 2**31 - 1) if saturate else (exact + 2**31) % 2**32 - 2**31
    assert ((exact < -(2**31)) | (exact >= 2**31)).any()
    assert np.array_equal(tmem.data[:48].view(np.int32), want)


@pytest.mark.parametrize("n,good", [(8, True), (24, True), (32, True), (40, False), (256, True)])
def test_integer_widths(n: int, good: bool) -> None:
    smem, tmem = cta()
    desc = place(smem, A_AT, np.ones((256, 32), int), "u8")
    ops = Operands(plain_idesc(128, n, "u8", "u8", 2), desc, desc, 0, False, False)
    if good:
        multiply(Form("i8", 1), ops, [smem], [tmem])
        assert (tmem.data[:n] == 32).all()
        return
    with pytest.raises(EmulatorFault, match="multiple of 16"):
        multiply(Form("i8", 1), ops, [smem], [tmem])


# -- sparse A -------------------------------------------------------------------------------------

# kind -> type, stored elements of a row, elements of a chunk that move together
SPARSE = {
    "f16": ("f16", 16, 1), "tf32": ("tf32", 8, 1), "f8f6f4": ("e4m3", 32, 1), "i8": ("s8", 32, 1),
    "mxf8f6f4": ("e2m3", 32, 1), "mxf4": ("e2m1x2", 64, 2),
}  # fmt: skip
PAIRS = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (2, 1)]


def sparse_a(rng: np.random.Generator, stored: np.ndarray, kind: str) -> tuple[np.ndarray, list]:
    """The whole of A from its stored half, and the index of each chunk, [row][chunk]."""
    rows, half = stored.shape
    whole, indices = np.zeros((rows, 2 * half), stored.dtype), []
    together = SPARSE[kind][2]
    for r in range(rows):
        indices.append([])
        for c in range(half if kind == "tf32" else half // (2 * together)):
            if kind == "tf32":
                second = int(rng.integers(0, 2))
                whole[r, 2 * c + second] = stored[r, c]
                indices[-1].append(0b1110 if second else 0b0100)
                continue
            pair = PAIRS[rng.integers(0, len(PAIRS))]
            indices[-1].append(pair[0] | pair[1] << 2)
            for which, at in enumerate(pair):
                for k in range(together):
                    source = (2 * c + which) * together + k
                    whole[r, (4 * c + at) * together + k] = stored[r, source]
    return whole, indices


def metadata_cells(indices: list, kind: str) -> np.ndarray:
    """CUTLASS's layouts (tmem_e_frg): of 16- and 32-bit types lane 8 (2 (m / 16) + k half) + m % 8,
    bits 16 (m / 8 % 2) and on; of the others lane m, all bits in order."""
    cells = np.zeros((2, 128), np.uint64)
    for m, row in enumerate(indices):
        for c, index in enumerate(row):
            if kind in ("f16", "tf32"):
                lane, bit = m % 8 + 16 * (m // 16) + 8 * (c // 4), 16 * (m // 8 % 2) + 4 * (c % 4)
            else:
                lane, bit = m, 4 * c
            cells[bit // 32, lane] |= index << bit % 32
    return cells.astype(np.uint32)


@pytest.mark.parametrize("kind", list(SPARSE))
@pytest.mark.parametrize("ctas", [1, 2])
def test_sparse_a(kind: str, ctas: int) -> None:
    rng = np.random.default_rng([list(SPARSE).index(kind), ctas])
    dtype, half, _ = SPARSE[kind]
    m, n, scaled = 128 * ctas, 64, kind.startswith("mx")
    stored = random_codes(rng, dtype, (m, half))
    whole, indices = sparse_a(rng, stored, kind)
    of_b = random_codes(rng, dtype, (n, 2 * half))
    memories = [cta() for _ in range(ctas)]
    block = 64 if scaled else 0  # 32 elements that are stored
    s_a, s_b = (scale_codes(rng, "ue8m0", (rows, half // 32)) for rows in (m, n))
    for k, (smem, tmem) in enumerate(memories):
        rows = slice(128 * k, 128 * (k + 1))
        a_desc = place(smem, A_AT, stored[rows], dtype)
        b_desc = place(smem, B_AT, of_b[n // ctas * k : n // ctas * (k + 1)], dtype)
        put(tmem, META, metadata_cells(indices[rows], kind))
        if scaled:
            put(tmem, SCALE_A, scale_cells(s_a[rows], 0))
            put(tmem, SCALE_B, scale_cells(s_b, 0))
    if scaled:
        idesc = scaled_idesc(m, n, dtype, dtype, "ue8m0", 0, 0, False) | 4
    else:
        idesc = plain_idesc(m, n, dtype, dtype, 2 if kind == "i8" else 1, sparse=1)
    ops = Operands(idesc, a_desc, b_desc, 0, False, False, SCALE_A, SCALE_B, META)
    multiply(
        Form(kind, ctas, block, True), ops, [c[0] for c in memories], [c[1] for c in memories]
    )  # fmt: skip
    left, right = decode(whole, dtype), decode(of_b, dtype)
    if scaled:
        left = left * np.repeat(scales(s_a, "ue8m0"), 64, axis=1)
        right = right * np.repeat(scales(s_b, "ue8m0"), 64, axis=1)
    got = np.concatenate([tmem.data[:n].T for _, tmem in memories])
    got = got.view(np.int32) if kind == "i8" else got.view(np.float32)
    assert np.array_equal(got, left @ right.T)


def test_metadata_that_mean_nothing() -> None:
    smem, tmem = cta()
    desc = place(smem, A_AT, np.ones((128, 32), int), "f16")
    ops = Operands(
        plain_idesc(128, 64, "f16", "f16", 1, sparse=1), desc, desc, 0, False, False, metadata=META
    )
    put(tmem, META, np.full((2, 128), 0x44444444, np.uint32))
    multiply(Form("f16", 1, 0, True), ops, [smem], [tmem])
    tmem.data[META, 77] = 0x44454444  # row 69, chunk 4: places 1 and 1
    with pytest.raises(EmulatorFault, match=r"row 77, chunk 4 is 0b0101") as caught:
        multiply(Form("f16", 1, 0, True), ops, [smem], [tmem])
    assert caught.value.code == "mma_bad_metadata"
    with pytest.raises(UnsupportedPTX, match="M = 64"):
        small = plain_idesc(64, 64, "f16", "f16", 1, sparse=1)
        changed = Operands(small, desc, desc, 0, False, False, metadata=META)
        multiply(Form("f16", 1, 0, True), changed, [smem], [tmem])
    packed = scaled_idesc(128, 64, "e2m1x2", "e2m1x2", "ue8m0", 0, 0, False) | 1 << 12
    assert InstrDescriptor.decode(packed, "mxf4") == InstrDescriptor.decode(
        packed ^ 1 << 12, "mxf4"
    )
    with pytest.raises(EmulatorFault, match=r"is not \.sp"):
        multiply(Form("f16", 1), ops, [smem], [tmem])


# -- weight-stationary ----------------------------------------------------------------------------


@pytest.mark.parametrize("m", [32, 64, 128])
@pytest.mark.parametrize("n", [64, 256])
@pytest.mark.parametrize("in_tmem", [False, True])
def test_weight_stationary(m: int, n: int, in_tmem: bool) -> None:
    """128 / M parts of D side by side: each M lanes hold their own N columns."""
    rng = np.random.default_rng([m, n])
    smem, tmem = cta()
    of_a, of_b = random_codes(rng, "f16", (m, 16)), random_codes(rng, "f16", (n, 16))
    words = np.array([np.frombuffer(packed_row(row, "f16"), np.uint32) for row in of_a])
    put(tmem, A_TMEM, np.tile(words, (128 // m, 1)).T)
    parts = 128 // m
    start = rng.integers(-64, 65, (n // parts, 128)).astype(np.float32)
    put(tmem, 0, start.view(np.uint32))
    a = A_TMEM if in_tmem else place(smem, A_AT, of_a, "f16")
    ops = Operands(
        plain_idesc(m, n, "f16", "f16"), a, place(smem, B_AT, of_b, "f16"), 0, in_tmem, True
    )
    multiply(Form("f16", 1, ws=True), ops, [smem], [tmem])
    whole = (of_a @ of_b.T).reshape(m, parts, -1).transpose(1, 0, 2).reshape(128, -1)
    assert np.array_equal(d_of(tmem, n // parts), whole + start.T)


def test_shapes_of_weight_stationary() -> None:
    smem, tmem = cta()
    desc = place(smem, A_AT, np.ones((256, 16), int), "f16")
    for m, n in ((256, 64), (64, 32), (64, 192)):
        ops = Operands(plain_idesc(m, n, "f16", "f16"), desc, desc, 0, False, False)
        with pytest.raises(EmulatorFault, match="with cta_group::1 and .ws it is"):
            multiply(Form("f16", 1, ws=True), ops, [smem], [tmem])


# -- lanes that stay ------------------------------------------------------------------------------


def test_lanes_that_are_disabled_and_d_that_is_scaled() -> None:
    rng = np.random.default_rng(5)
    smem, tmem = cta()
    stored = random_codes(rng, "f16", (128, 16))
    whole, indices = sparse_a(rng, stored, "f16")
    of_b = random_codes(rng, "f16", (64, 32))
    put(tmem, META, metadata_cells(indices, "f16"))
    start = rng.integers(-64, 65, (64, 128)).astype(np.float32)
    put(tmem, 0, start.view(np.uint32))
    off = [int(x) for x in rng.integers(0, 2**32, 4)]
    ops = Operands(
        plain_idesc(128, 64, "f16", "f16", 1, sparse=1), place(smem, A_AT, stored, "f16"),
        place(smem, B_AT, of_b, "f16"), 0, False, True, metadata=META, disabled=off, scale_d=3,
    )  # fmt: skip
    multiply(Form("f16", 1, 0, True), ops, [smem], [tmem])
    want = whole @ of_b.T + start.T / 8
    keep = np.array([off[lane // 32] >> lane % 32 & 1 for lane in range(128)], bool)
    want[keep] = start.T[keep]
    assert np.array_equal(d_of(tmem, 64), want.astype(np.float32))
