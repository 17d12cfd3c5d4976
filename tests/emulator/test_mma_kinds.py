"""tf32 and 8-bit float operands of both tensor cores, element by element.

K is 32 bytes whatever the type; the canonical layouts are written in units of T elements, 16 bytes
(PTX ISA 9.1 sections 9.7.16.3.3 and 9.7.15.5). torch decodes the 8-bit floats.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from kernels.emulator.engines import mma, mma_pair
from kernels.emulator.engines.formats import widen
from kernels.emulator.findings import EmulatorFault, UnsupportedPTX
from kernels.emulator.memory import SharedMemory, TensorMemory
from kernels.emulator.ptx import PTXSyntaxError
from tests.emulator.cluster_harness import clean, launch, module
from tests.emulator.test_tensorcore import BASE, ISA_SWIZZLE, descriptor, rows_of
from tests.emulator.test_wgmma import descriptor as wgmma_descriptor
from tests.emulator.test_wgmma import fragment

BYTES = {"tf32": 4, "e4m3": 1, "e5m2": 1}
FORMAT = {"tf32": 2, "e4m3": 0, "e5m2": 1}
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SMEM_BYTES = 64 * 1024


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Bits of small integers; tf32 gets noise in the 13 bits that do not count."""
    if dtype == "tf32":
        noise = np.random.default_rng(values.size).integers(0, 1 << 13, values.shape, np.uint32)
        return values.astype(np.float32).view(np.uint32) | noise * (values != 0)
    return torch.from_numpy(values.astype(np.float32)).to(TORCH[dtype]).view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", list(TORCH))
def test_every_8_bit_float(dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(codes).view(TORCH[dtype]).to(torch.float64).numpy()
    assert np.array_equal(widen(codes, dtype), want, equal_nan=True)


def address(row: int, k: int, layout: dict, nbytes: int) -> int:
    t, width = 16 // nbytes, layout["width"]
    leading, stride = layout["leading"], layout["stride"]
    if layout["mn_major"]:
        offset = nbytes * (row % t)
        if width == 1:
            offset += stride * (row // t) + 16 * (k % 8) + leading * (k // 8)
        else:
            offset += 16 * (row // t % width) + leading * (row // (t * width))
            offset += 16 * width * (k % 8) + stride * (k // 8)
    else:
        along = leading if width == 1 else 16
        offset = 16 * width * (row % 8) + stride * (row // 8) + nbytes * (k % t) + along * (k // t)
    at = layout["start"] + offset
    pattern = ISA_SWIZZLE[width]
    line, place = at // 128 % len(pattern), at // 16 % 8
    return at // 128 * 128 + 16 * int(pattern[line][place]) + at % 16


def layout(rng: np.random.Generator, mn_major: bool, width: int, room: int = 90) -> dict:
    start = BASE + 1024 * int(rng.integers(0, 4))
    leading, stride = (16 * int(x) for x in rng.integers(1, room, 2))
    return {
        "start": start, "leading": leading, "stride": stride, "width": width, "mn_major": mn_major,
    }  # fmt: skip


class Bench:
    def __init__(self, a: str, b: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.values = {
            t: rng.integers(-8, 9, SMEM_BYTES // BYTES[t]).astype(np.float64) for t in {a, b}
        }
        self.kinds = (a, b)
        self.smem, self.tmem = SharedMemory(2 * SMEM_BYTES), TensorMemory()
        self.tmem.alloc(512)
        for k, t in enumerate(dict.fromkeys((a, b))):
            self.smem.write_bytes(
                BASE + k * SMEM_BYTES,
                np.ascontiguousarray(encode(self.values[t], t)).view(np.uint8),
            )

    def shift(self, which: int) -> int:
        """Where the operand's type has its part of shared memory."""
        return SMEM_BYTES * (which and self.kinds[0] != self.kinds[1])

    def operand(self, which: int, rows: int, where: dict) -> np.ndarray:
        t = self.kinds[which]
        n = BYTES[t]
        out = np.empty((rows, 32 // n))
        for row, k in product(range(rows), range(32 // n)):
            at = address(row, k, where, n) - BASE
            out[row, k] = self.values[t][at // n]
        return out


def instr(m: int, n: int, a: str, b: str, d: int = 1, a_mn: int = 0, b_mn: int = 0) -> int:
    types = FORMAT[a] << 7 | FORMAT[b] << 10
    return d << 4 | types | a_mn << 15 | b_mn << 16 | n >> 3 << 17 | m >> 4 << 24


CASES = [
    ("tf32", "tf32", 0, 0), ("e4m3", "e4m3", 0, 0), ("e5m2", "e4m3", 0, 0), ("e4m3", "e5m2", 1, 0),
    ("e4m3", "e4m3", 0, 1), ("e5m2", "e5m2", 1, 1),
]  # fmt: skip


def shifted(where: dict, by: int) -> int:
    start = where["start"] + by
    return descriptor({**where, "start": start})


@pytest.mark.parametrize("a,b,a_mn,b_mn", CASES)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_tcgen05_operands_in_shared_memory(
    a: str, b: str, a_mn: int, b_mn: int, width: int
) -> None:
    bench, rng = Bench(a, b, width), np.random.default_rng([width, a_mn, b_mn])
    for m, n in ((128, 128), (64, 256)):
        la, lb = layout(rng, bool(a_mn), width), layout(rng, bool(b_mn), (8, 4, 2, 1)[width % 4])
        b_desc = shifted(lb, bench.shift(1))
        kind = "tf32" if a == "tf32" else "f8f6f4"
        mma(
            instr(m, n, a, b, 1, a_mn, b_mn), descriptor(la), b_desc, 0, bench.smem, bench.tmem,
            accumulate=False, a_in_tmem=False, kind=kind,
        )  # fmt: skip
        want = bench.operand(0, m, la) @ bench.operand(1, n, lb).T
        assert np.array_equal(bench.tmem.data[:n].view(np.float32).T[rows_of(m)], want)


def wide_atom_address(row: int, k: int, where: dict) -> int:
    """MN-major tf32: 128-byte rows of 32 elements of MN, four rows (of k) to an atom; of the four
    32-byte atoms of a row, number j lies at place j ^ (row % 4)."""
    offset = row // 32 * where["leading"] + k // 4 * where["stride"] + k % 4 * 128 + row % 32 * 4
    at = where["start"] + offset
    line, atom = at // 128, at // 32 % 4
    return line * 128 + 32 * (atom ^ line % 4) + at % 32


@pytest.mark.parametrize("a_mn,b_mn", [(1, 0), (0, 1), (1, 1)])
def test_tf32_major_in_mn(a_mn: int, b_mn: int) -> None:
    bench, rng = Bench("tf32", "tf32", 5), np.random.default_rng([a_mn, b_mn])
    for m, n in ((128, 128), (64, 256)):
        places, values = [], []
        for rows, mn_major in ((m, a_mn), (n, b_mn)):
            where = layout(rng, False, 8)
            values.append(bench.operand(0, rows, where))
            places.append(descriptor(where))
            if mn_major:
                pairs = [[wide_atom_address(r, k, where) for k in range(8)] for r in range(rows)]
                values[-1] = bench.values["tf32"][(np.array(pairs) - BASE) // 4]
                places[-1] = descriptor(where) & ~(7 << 61) | 1 << 61
        idesc = instr(m, n, "tf32", "tf32", 1, a_mn, b_mn)
        mma(
            idesc, places[0], places[1], 0, bench.smem, bench.tmem, accumulate=False,
            a_in_tmem=False, kind="tf32",
        )  # fmt: skip
        want = values[0] @ values[1].T
        assert np.array_equal(bench.tmem.data[:n].view(np.float32).T[rows_of(m)], want)


@pytest.mark.parametrize("kind", ["tf32", "e4m3", "e5m2"])
def test_tcgen05_a_in_tensor_memory(kind: str) -> None:
    """A column's word holds successive K from its low bits up; K takes 8 columns."""
    bench, rng = Bench(kind, kind, 3), np.random.default_rng(9)
    k = 32 // BYTES[kind]
    a = rng.integers(-8, 9, (128, k)).astype(np.float64)
    bits = np.ascontiguousarray(encode(a, kind))
    bench.tmem.data[40:48] = bits.view(np.uint32).reshape(128, 8).T
    bench.tmem.valid[:, 40:48] = 0xFFFFFFFF
    lb = layout(rng, False, 8)
    name = "tf32" if kind == "tf32" else "f8f6f4"
    mma(
        instr(128, 64, kind, kind), 40, descriptor(lb), 128, bench.smem, bench.tmem,
        accumulate=False, a_in_tmem=True, kind=name,
    )  # fmt: skip
    want = a @ bench.operand(1, 64, lb).T
    assert np.array_equal(bench.tmem.data[128:192].view(np.float32).T, want)


def test_a_pair_of_ctas_multiplies_8_bit_floats() -> None:
    one, two = Bench("e4m3", "e4m3", 1), Bench("e4m3", "e4m3", 2)
    where = layout(np.random.default_rng(0), False, 8)
    at = descriptor(where)
    mma_pair(
        instr(256, 64, "e4m3", "e4m3", 0), at, at, 0, (one.smem, two.smem), (one.tmem, two.tmem),
        accumulate=False, a_in_tmem=False, kind="f8f6f4",
    )  # fmt: skip
    a = np.concatenate([x.operand(0, 128, where) for x in (one, two)])
    b = np.concatenate([x.operand(1, 32, where) for x in (one, two)])
    got = np.concatenate(
        [x.tmem.data[:64].astype(np.uint16).view(np.float16).T for x in (one, two)]
    )
    assert np.array_equal(got.astype(np.float64), a @ b.T)


def test_what_the_kinds_refuse() -> None:
    bench = Bench("tf32", "tf32", 0)
    where = descriptor(layout(np.random.default_rng(0), False, 8))

    def call(idesc: int, kind: str) -> None:
        mma(
            idesc, where, where, 0, bench.smem, bench.tmem, accumulate=False, a_in_tmem=False,
            kind=kind,
        )  # fmt: skip

    with pytest.raises(EmulatorFault, match="32-byte atoms"):  # of MN-major 32-bit elements
        call(instr(128, 64, "tf32", "tf32", 1, 1), "tf32")
    with pytest.raises(EmulatorFault, match="A or B type"):  # code 2 is nothing
        call(instr(128, 64, "e4m3", "e4m3") | 2 << 7, "f8f6f4")
    for idesc, kind in (
        (instr(128, 64, "tf32", "tf32", 0), "tf32"),
        (instr(128, 64, "e4m3", "e4m3"), "tf32"),
        (instr(128, 64, "tf32", "tf32"), "f8f6f4"),
    ):
        with pytest.raises(EmulatorFault, match="A or B type|D of f16"):
            call(idesc, kind)


# -- wgmma ---------------------------------------------------------------------------------------


def wgmma_body(a: str, b: str, n: int, a_operand: str, b_desc: int, count: int) -> str:
    k, d_type = 32 // BYTES[a], "f32" if count == n // 2 else "f16"
    zeros = " ".join(f"mov.b32 %d{i}, 0;" for i in range(count))
    fills = "\n".join(
        f"ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%s+{16 * i}];"
        f" st.shared.v4.b32 [%at+{16 * i}], {{%x0, %x1, %x2, %x3}};"
        for i in range(16)
    )
    return f"""
.reg .b32 %t, %base, %at, %x<4>, %a<4>, %d<{count}>; .reg .b64 %s, %o, %w, %da, %db, %in;
.reg .pred %p;
mov.u32 %t, %tid.x; mov.u32 %base, smem; ld.param.b64 %s, [data]; ld.param.b64 %o, [out];
ld.param.b64 %in, [regs]; mul.wide.u32 %w, %t, 16; add.u64 %in, %in, %w;
shl.b32 %at, %t, 8; add.u32 %at, %at, %base; mul.wide.u32 %w, %t, 256; add.u64 %s, %s, %w;
{fills}
ld.global.v4.b32 {fragment(4, "a")}, [%in];
{zeros}
mul.wide.u32 %w, %t, {4 * count}; add.u64 %o, %o, %w;
fence.proxy.async.shared::cta; bar.sync 0;
mov.b64 %db, {b_desc}; {f"mov.b64 %da, {a_operand};" if a_operand.isdigit() else ""}
setp.eq.u32 %p, %t, %t;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d_type}.{a}.{b} {fragment(count)},
  {"%da" if a_operand.isdigit() else a_operand}, %db, %p, 1, -1;
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
{" ".join(f"st.global.b32 [%o+{4 * i}], %d{i};" for i in range(count))}
"""


@pytest.mark.parametrize(
    "a,b", [("tf32", "tf32"), ("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")]
)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("registers", [False, True])
def test_wgmma(a: str, b: str, half: bool, registers: bool) -> None:
    if a == "tf32" and half:
        half = False
    n, nbytes, size = 32, BYTES[a], 32 * 1024
    k, rng = 32 // nbytes, np.random.default_rng([len(a), nbytes, registers, half])
    count = n // 4 if half else n // 2
    kinds = {a: 0, b: size // 2 * (a != b)}  # where each type's elements are
    values = {t: rng.integers(-8, 9, size // 2 // BYTES[t]).astype(np.float64) for t in kinds}
    data = np.zeros(size, np.uint8)
    for t, at in kinds.items():
        data[at : at + size // 2] = np.ascontiguousarray(encode(values[t], t)).view(np.uint8)
    wide = {t: layout(rng, False, w, 60) for t, w in zip(kinds, (8, 4), strict=False)}

    def operand(t: str, rows: int) -> np.ndarray:
        out = np.empty((rows, k))
        for row, j in product(range(rows), range(k)):
            out[row, j] = values[t][(address(row, j, wide[t], BYTES[t]) - BASE) // BYTES[t]]
        return out

    def desc(t: str) -> int:
        where = wide[t]
        start = where["start"] + kinds[t]
        return wgmma_descriptor(start, where["leading"], where["stride"], where["width"])

    a_rows = rng.integers(-8, 9, (64, k)).astype(np.float64)
    words = np.ascontiguousarray(encode(a_rows, a)).view(np.uint32).reshape(64, 8)
    regs = np.zeros((128, 4), np.uint32)
    for thread in range(128):  # word t of each half of K; rows g and g + 8
        warp, lane = divmod(thread, 32)
        for r in range(4):
            regs[thread, r] = words[16 * warp + lane // 4 + 8 * (r % 2), lane % 4 + 4 * (r // 2)]
    out = np.zeros((128, count), np.uint32)
    body = wgmma_body(a, b, n, fragment(4, "a") if registers else str(desc(a)), desc(b), count)
    text = module("data regs out", body, shared=size, target="sm_90a")
    clean(launch(text, [data, regs, out], threads=128, gpu="h200", visibility="late"))
    want = -(a_rows if registers else operand(a, 64)) @ operand(b, n).T
    got = np.full((64, n), np.nan)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        mine = out[thread].view(np.float16 if half else np.float32)
        for group, e in product(range(n // 8), range(4)):
            row = 16 * warp + lane // 4 + 8 * (e // 2)
            got[row, 8 * group + 2 * (lane % 4) + e % 2] = mine[4 * group + e]
    assert np.array_equal(got, want)


@pytest.mark.parametrize("a,b", list(product(("s8", "u8"), repeat=2)))
@pytest.mark.parametrize("clamp", ["", ".satfinite"])
def test_wgmma_of_integers(a: str, b: str, clamp: str) -> None:
    """A in registers, B K-major; the accumulator starts near the ends of its range."""
    n, rng = 48, np.random.default_rng([ord(a[0]), ord(b[0])])
    types = {"s8": np.int8, "u8": np.uint8}
    data = rng.integers(0, 256, 32 * 1024, np.uint8)
    where = layout(rng, False, 8, 60)
    at = np.array([[address(r, k, where, 1) - BASE for k in range(32)] for r in range(n)])
    b_rows = data[at].view(types[b]).astype(np.int64)
    a_rows = rng.integers(0, 256, (64, 32), np.uint8)
    words = a_rows.view(np.uint32)
    regs = np.zeros((128, 4), np.uint32)
    start = rng.choice([2**31 - 1, -(2**31), 77], (128, n // 2))
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for r in range(4):
            regs[thread, r] = words[16 * warp + lane // 4 + 8 * (r % 2), lane % 4 + 4 * (r // 2)]
    out = start.astype(np.int32)
    count = n // 2
    d_desc = wgmma_descriptor(where["start"], where["leading"], where["stride"], 8)
    body = wgmma_body("e4m3", "e4m3", n, fragment(4, "a"), d_desc, count)
    body = body.replace("n48k32.f32.e4m3.e4m3", f"n48k32{clamp}.s32.{a}.{b}").replace(
        "%p, 1, -1;", "%p;"
    )
    for i in range(count):
        body = body.replace(f"mov.b32 %d{i}, 0;", "")
    loads = " ".join(f"ld.global.b32 %d{i}, [%o+{4 * i}];" for i in range(count))
    body = body.replace("setp.eq.u32 %p", f"{loads}\nsetp.eq.u32 %p")
    text = module("data regs out", body, shared=32 * 1024, target="sm_90a")
    clean(launch(text, [data, regs, out], threads=128, gpu="h200", visibility="late"))
    exact = a_rows.view(types[a]).astype(np.int64) @ b_rows.T
    over = 0
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(count):
            row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
            want = exact[row, 8 * (i // 4) + 2 * (lane % 4) + i % 2] + start[thread, i]
            over += abs(want) > 2**31
            wrapped = (want + 2**31) % 2**32 - 2**31
            assert out[thread, i] == (min(max(want, -(2**31)), 2**31 - 1) if clamp else wrapped)
    assert over > 100


@pytest.mark.parametrize("op", ["n40k32.s32.s8.s8", "n48k16.s32.s8.s8", "n48k32.f32.s8.s8"])
def test_wgmma_of_integers_that_do_not_exist(op: str) -> None:
    body = wgmma_body("e4m3", "e4m3", int(op[1:3]), fragment(4, "a"), 0, int(op[1:3]) // 2)
    body = body.replace(f"{op[:6]}.f32.e4m3.e4m3", op).replace("n48k32.f32.e4m3.e4m3", op)
    assert op in body
    with pytest.raises((UnsupportedPTX, PTXSyntaxError)):
        out = np.zeros((128, 24), np.uint32)
        body = body.replace("%p, 1, -1;", "%p;")
        text = module("data regs out", body, shared=32768, target="sm_90a")
        launch(text, [np.zeros(32768, np.uint8), out, out], threads=128, gpu="h200")
