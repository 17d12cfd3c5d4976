"""Matrices of a warp and 16-bit mma.sync against the ISA's figures, element by element.

PTX ISA 9.1 section 9.7.14.5: lane t holds, of an 8x8 matrix, elements 2 (t % 4) and the next one of
row t / 4.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.emulator.cluster_harness import clean, code_of, launch, module

RNG = np.random.default_rng


def matrix_body(op: str, count: int) -> str:
    regs = ", ".join(f"%r{k}" for k in range(count))
    move = (
        f"ldmatrix.sync.aligned.m8n8.x{count}{op}.shared.b16 {{{regs}}}, [%row];"
        if op in ("", ".trans")
        else f"stmatrix.sync.aligned.m8n8.x{count}{op[3:]}.shared.b16 [%row], {{{regs}}};"
    )
    return move


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, trans: str) -> None:
    rng = RNG(count)
    data = rng.integers(0, 1 << 16, (64, 8), np.uint16)  # 64 rows of 16 bytes in shared memory
    rows = rng.permutation(64)[:32].astype(np.uint32)  # which row each lane points at
    out = np.zeros((32, count), np.uint32)
    regs = ", ".join(f"%r{k}" for k in range(count))
    body = f"""
.reg .b32 %t, %base, %row, %x<4>, %r<4>; .reg .b64 %d, %p, %o, %w;
mov.u32 %t, %tid.x; mov.u32 %base, smem; ld.param.b64 %d, [data]; ld.param.b64 %p, [rows];
ld.param.b64 %o, [out];
mul.wide.u32 %w, %t, 32; add.u64 %d, %d, %w;
shl.b32 %row, %t, 5; add.u32 %row, %row, %base;
ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%d]; st.shared.v4.b32 [%row], {{%x0, %x1, %x2, %x3}};
ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%d+16];
st.shared.v4.b32 [%row+16], {{%x0, %x1, %x2, %x3}};
bar.warp.sync -1;
mul.wide.u32 %w, %t, 4; add.u64 %p, %p, %w; ld.global.b32 %row, [%p];
shl.b32 %row, %row, 4; add.u32 %row, %row, %base;
ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{regs}}}, [%row];
mul.wide.u32 %w, %t, {4 * count}; add.u64 %o, %o, %w;
{chr(10).join(f"st.global.b32 [%o+{4 * k}], %r{k};" for k in range(count))}
"""
    clean(launch(module("data rows out", body, shared=1024), [data, rows, out]))
    for lane, reg in product(range(32), range(count)):
        for half in range(2):
            i, j = lane // 4, 2 * (lane % 4) + half
            i, j = (j, i) if trans else (i, j)
            want = data[rows[8 * reg + i], j]
            assert out[lane, reg] >> 16 * half & 0xFFFF == want, (lane, reg, half)


BYTES_HEAD = """
.reg .b32 %t, %base, %row, %x<4>, %r<4>; .reg .b64 %d, %p, %o, %w;
mov.u32 %t, %tid.x; mov.u32 %base, smem; ld.param.b64 %d, [data]; ld.param.b64 %p, [rows];
ld.param.b64 %o, [out];
mul.wide.u32 %w, %t, 4; add.u64 %p, %p, %w; ld.global.b32 %row, [%p];
shl.b32 %row, %row, 4; add.u32 %row, %row, %base;
"""


@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_of_bytes(count: int) -> None:
    """A lane loads 4 consecutive columns across 2 rows; a column is 16 bytes of shared memory."""
    rng = RNG(count)
    data = rng.integers(0, 256, (32, 16), np.uint8)
    rows = rng.permutation(32).astype(np.uint32)  # which column each lane points at
    out = np.zeros((32, 2 * count, 4), np.uint8)
    regs = ", ".join(f"%r{k}" for k in range(2 * count))
    body = f"""{BYTES_HEAD}
mul.wide.u32 %w, %t, 16; add.u64 %d, %d, %w; ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%d];
shl.b32 %x4, %t, 4; add.u32 %x4, %x4, %base; st.shared.v4.b32 [%x4], {{%x0, %x1, %x2, %x3}};
bar.warp.sync -1;
ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8 {{{regs}}}, [%row];
mul.wide.u32 %w, %t, {8 * count}; add.u64 %o, %o, %w;
{chr(10).join(f"st.global.b32 [%o+{4 * k}], %r{k};" for k in range(2 * count))}
""".replace("%x<4>", "%x<5>")
    clean(launch(module("data rows out", body, shared=1024), [data, rows, out]))
    for lane, matrix, column, half in product(range(32), range(count), range(4), range(2)):
        g, t = divmod(lane, 4)
        want = data[rows[16 * matrix + 4 * t + column], g + 8 * half]
        assert out[lane, 2 * matrix + column // 2, column % 2 + 2 * half] == want


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_of_bytes(count: int) -> None:
    """A lane stores 2 columns across 2 rows, as mma.sync's accumulator holds them."""
    rng = RNG(count)
    data = rng.integers(0, 256, (32, count, 4), np.uint8)  # registers of each lane
    rows = rng.permutation(32).astype(np.uint32)
    out = np.zeros((32, 16), np.uint8)
    regs = ", ".join(f"%r{k}" for k in range(count))
    body = f"""{BYTES_HEAD}
shl.b32 %x4, %t, 4; add.u32 %x4, %x4, %base; mov.b32 %x0, 0;
st.shared.v4.b32 [%x4], {{%x0, %x0, %x0, %x0}};
bar.warp.sync -1;
mul.wide.u32 %w, %t, {4 * count}; add.u64 %d, %d, %w;
{chr(10).join(f"ld.global.b32 %r{k}, [%d+{4 * k}];" for k in range(count))}
stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%row], {{{regs}}};
bar.warp.sync -1;
ld.shared.v4.b32 {{%x0, %x1, %x2, %x3}}, [%x4];
mul.wide.u32 %w, %t, 16; add.u64 %o, %o, %w; st.global.v4.b32 [%o], {{%x0, %x1, %x2, %x3}};
""".replace("%x<4>", "%x<5>")
    clean(launch(module("data rows out", body, shared=1024), [data, rows, out]))
    want = np.zeros((32, 16), np.uint8)
    for lane, matrix, column, half in product(range(32), range(count), range(2), range(2)):
        g, t = divmod(lane, 4)
        place = rows[8 * matrix + 2 * t + column]
        want[place, g + 8 * half] = data[lane, matrix, column + 2 * half]
    assert np.array_equal(out, want)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(count: int, trans: str) -> None:
    rng = RNG(10 + count)
    values = rng.integers(0, 1 << 32, (32, 4), np.uint32)
    rows = rng.permutation(32).astype(np.uint32)
    out = np.zeros((32, 8), np.uint16)
    regs = ", ".join(f"%r{k}" for k in range(count))
    body = f"""
.reg .b32 %t, %base, %row, %at, %r<4>; .reg .b64 %v, %p, %o, %w;
mov.u32 %t, %tid.x; mov.u32 %base, smem; ld.param.b64 %v, [values]; ld.param.b64 %p, [rows];
ld.param.b64 %o, [out];
shl.b32 %at, %t, 4; add.u32 %at, %at, %base;
mov.b32 %r0, 0; st.shared.v4.b32 [%at], {{%r0, %r0, %r0, %r0}};
bar.warp.sync -1;
mul.wide.u32 %w, %t, 16; add.u64 %v, %v, %w; add.u64 %o, %o, %w;
ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%v];
mul.wide.u32 %w, %t, 4; add.u64 %p, %p, %w; ld.global.b32 %row, [%p];
shl.b32 %row, %row, 4; add.u32 %row, %row, %base;
stmatrix.sync.aligned.m8n8.x{count}{trans}.shared::cta.b16 [%row], {{{regs}}};
bar.warp.sync -1;
ld.shared.v4.b32 {{%r0, %r1, %r2, %r3}}, [%at];
st.global.v4.b32 [%o], {{%r0, %r1, %r2, %r3}};
"""
    clean(launch(module("values rows out", body, shared=512), [values, rows, out]))
    want = np.zeros((32, 8), np.uint16)
    for lane, reg, half in product(range(32), range(count), range(2)):
        i, j = lane // 4, 2 * (lane % 4) + half
        i, j = (j, i) if trans else (i, j)
        want[rows[8 * reg + i], j] = values[lane, reg] >> 16 * half & 0xFFFF
    assert np.array_equal(out, want)


def test_movmatrix_transposes() -> None:
    values, out = RNG(3).integers(0, 1 << 32, 32, np.uint32), np.zeros(32, np.uint32)
    body = """
.reg .b32 %t, %r<2>; .reg .b64 %v, %o, %w;
mov.u32 %t, %tid.x; ld.param.b64 %v, [values]; ld.param.b64 %o, [out];
mul.wide.u32 %w, %t, 4; add.u64 %v, %v, %w; add.u64 %o, %o, %w; ld.global.b32 %r0, [%v];
movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r0;
st.global.b32 [%o], %r1;
"""
    clean(launch(module("values out", body), [values, out]))
    matrix = values.view(np.uint16).reshape(8, 8)
    assert np.array_equal(out.view(np.uint16).reshape(8, 8), matrix.T)


def test_rows_must_be_aligned_and_written() -> None:
    body = """
.reg .b32 %t, %row, %r; mov.u32 %row, smem; mov.u32 %t, %tid.x;
{init}
ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r}}, [%row+{offset}];
"""
    init = "shl.b32 %r, %t, 2; add.u32 %r, %r, %row; st.shared.b32 [%r], %t; bar.warp.sync -1;"
    good = launch(module("", body.format(init=init, offset=16), shared=128), [])
    assert code_of(good) == "ok"
    late = launch(module("", body.format(init=init, offset=8), shared=128), [])
    assert code_of(late) == "smem_misaligned"
    never = launch(module("", body.format(init="", offset=16), shared=128), [])
    assert code_of(never) == "smem_unwritten_read"


# -- mma.sync ------------------------------------------------------------------------------------


def bits16(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize(
    "k,d_kind,kind",
    [(16, "f32", "bf16"), (16, "f32", "f16"), (8, "f32", "bf16"), (8, "f32", "f16"),
     (16, "f16", "f16"), (8, "f16", "f16")],
)  # fmt: skip
@pytest.mark.parametrize("zero_c", [False, True])
def test_mma_sync(k: int, d_kind: str, kind: str, zero_c: bool) -> None:
    rng = RNG(k)
    a, b = rng.integers(-8, 9, (16, k)), rng.integers(-8, 9, (k, 8))
    c = np.zeros((16, 8)) if zero_c else rng.integers(-99, 100, (16, 8)).astype(np.float64)
    na, nb, nc = k // 4, k // 8, 4 if d_kind == "f32" else 2
    lanes = np.zeros((32, na + nb + nc), np.uint32)
    halves = lanes.view(np.uint16).reshape(32, -1, 2)
    a16, b16 = bits16(a, kind), bits16(b, kind)
    place_c = {}
    for lane in range(32):
        g, t = divmod(lane, 4)
        for reg, half in product(range(na), range(2)):  # a0: (g, .), a1: (g + 8, .), a2: k + 8
            halves[lane, reg, half] = a16[g + 8 * (reg & 1), 2 * t + half + 8 * (reg >> 1)]
        for reg, half in product(range(nb), range(2)):
            halves[lane, na + reg, half] = b16[2 * t + half + 8 * reg, g]
        for e in range(4):  # c0, c1: row g; c2, c3: row g + 8
            place_c[lane, e] = (g + 8 * (e >> 1), 2 * t + (e & 1))
            value = c[place_c[lane, e]]
            if d_kind == "f32":
                lanes[lane, na + nb + e] = np.float32(value).view(np.uint32)
            else:
                halves[lane, na + nb + e // 2, e % 2] = np.float16(value).view(np.uint16)
    regs = [f"%v{i}" for i in range(na + nb + nc)]
    vec = [", ".join(part) for part in (regs[:na], regs[na : na + nb], regs[na + nb :])]
    d = ", ".join(f"%d{i}" for i in range(nc))
    if zero_c:
        vec[2] = ", ".join(["0f00000000" if d_kind == "f32" else "%zero"] * nc)
    b_op = f"{{{vec[1]}}}"
    body = f"""
.reg .b32 %t, %v<12>, %d<4>, %zero; .reg .b64 %i, %o, %w; mov.b32 %zero, 0;
mov.u32 %t, %tid.x; ld.param.b64 %i, [values]; ld.param.b64 %o, [out];
mul.wide.u32 %w, %t, {4 * len(regs)}; add.u64 %i, %i, %w;
mul.wide.u32 %w, %t, {4 * nc}; add.u64 %o, %o, %w;
{" ".join(f"ld.global.b32 {r}, [%i+{4 * n}];" for n, r in enumerate(regs))}
mma.sync.aligned.m16n8k{k}.row.col.{d_kind}.{kind}.{kind}.{d_kind} {{{d}}}, {{{vec[0]}}}, {b_op}, {{{vec[2]}}};
{" ".join(f"st.global.b32 [%o+{4 * n}], %d{n};" for n in range(nc))}
"""  # noqa: E501
    out = np.zeros((32, nc), np.uint32)
    clean(launch(module("values out", body), [lanes, out]))
    want = a.astype(np.float64) @ b + c
    for lane, e in product(range(32), range(4)):
        if d_kind == "f32":
            got = float(out[lane, e : e + 1].view(np.float32)[0])
        else:
            got = float(out.view(np.float16).reshape(32, 4)[lane, e])
        assert got == want[place_c[lane, e]], (lane, e)
