"""mma.sync of every type: fragments as the figures of PTX ISA 9.1 section 9.7.14.5 place them, each
written down here for its own shape, and exact results."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from kernels.emulator.findings import UnsupportedPTX
from kernels.emulator.ptx import PTXSyntaxError
from tests.emulator.cluster_harness import clean, launch, module
from tests.emulator.test_mma_forms import decode, random_codes

# shape -> (A's row, A's column, B's row) of element i of a thread's fragment, as the figures say;
# g = lane / 4, t = lane % 4.
FIGURES = {
    ("f16", 8): (lambda g, t, i: (g + 8 * (i > 1), 2 * t + i % 2), lambda t, i: 2 * t + i),
    ("f16", 16): (
        lambda g, t, i: (g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i > 3)),
        lambda t, i: 2 * t + i % 2 + 8 * (i > 1),
    ),
    ("tf32", 4): (lambda g, t, i: (g + 8 * i, t), lambda t, i: t),
    ("tf32", 8): (lambda g, t, i: (g + 8 * (i % 2), t + 4 * (i > 1)), lambda t, i: t + 4 * i),
    ("byte", 16): (lambda g, t, i: (g + 8 * (i > 3), 4 * t + i % 4), lambda t, i: 4 * t + i),
    ("byte", 32): (
        lambda g, t, i: (g + 8 * (i // 4 % 2), 4 * t + i % 4 + 16 * (i > 7)),
        lambda t, i: 4 * t + i % 4 + 16 * (i > 3),
    ),
    ("m8 byte", 16): (lambda g, t, i: (g, 4 * t + i), lambda t, i: 4 * t + i),
    ("m8 nibble", 32): (lambda g, t, i: (g, 8 * t + i), lambda t, i: 8 * t + i),
    ("nibble", 32): (lambda g, t, i: (g + 8 * (i > 7), 8 * t + i % 8), lambda t, i: 8 * t + i),
    ("nibble", 64): (
        lambda g, t, i: (g + 8 * (i // 8 % 2), 8 * t + i % 8 + 32 * (i > 15)),
        lambda t, i: 8 * t + i % 8 + 32 * (i > 7),
    ),
    ("m8 f64", 4): (lambda g, t, i: (g, t), lambda t, i: t),
    ("f64", 4): (lambda g, t, i: (g + 8 * i, t), lambda t, i: t),
    ("f64", 8): (lambda g, t, i: (g + 8 * (i % 2), t + 4 * (i > 1)), lambda t, i: t + 4 * i),
    ("f64", 16): (lambda g, t, i: (g + 8 * (i % 2), t + 4 * (i // 2)), lambda t, i: t + 4 * i),
}
REFUSED = (UnsupportedPTX, PTXSyntaxError)  # by the emulator, or by the rules of PTX before that


def fragment(matrix: np.ndarray, where, per_lane: int, kind: str) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Registers, [lane, register]; ``where(g, t, i)``: the place of element i."""
    rows = []
    for lane in range(32):
        items = [matrix[where(lane // 4, lane % 4, i)] for i in range(per_lane)]
        if kind in ("s4", "u4"):
            bits = sum((int(x) & 15) << 4 * k for k, x in enumerate(items))
            rows.append(np.frombuffer(bits.to_bytes(len(items) // 2, "little"), np.uint32))
        elif kind == "bf16":
            rows.append((np.array(items, np.float32).view(np.uint32) >> 16).astype(np.uint16))
        else:
            types = {"f16": "f2", "tf32": "f4", "f32": "f4", "s32": "i4", "f64": "f8"}
            rows.append(np.array(items).astype(types.get(kind, "u1")))
    return np.array(rows)


def execute(op: str, arrays: list[np.ndarray], out_bytes: int, wide: bool = False) -> np.ndarray:
    """d = op(a, b, c); arrays by lane; the bytes of d's registers, [lane, bytes]."""
    size, kind = (8, "b64") if wide else (4, "b32")
    counts = [a.nbytes // 32 // size for a in arrays]
    out = np.zeros((32, out_bytes), np.uint8)
    body = [".reg .b32 %t; .reg .b64 %p, %w; mov.u32 %t, %tid.x;"]
    names: list[str] = []
    for name, count in zip("abc", counts, strict=True):
        body.append(f".reg .{kind} %{name}<{count}>; ld.param.b64 %p, [{name}];")
        body.append(f"mul.wide.u32 %w, %t, {size * count}; add.u64 %p, %p, %w;")
        body += [f"ld.global.{kind} %{name}{k}, [%p+{size * k}];" for k in range(count)]
        names.append("{" + ", ".join(f"%{name}{k}" for k in range(count)) + "}")
    count = out_bytes // size
    d = "{" + ", ".join(f"%d{k}" for k in range(count)) + "}"
    body.append(f".reg .{kind} %d<{count}>; {op} {d}, {', '.join(names)};")
    body.append(f"ld.param.b64 %p, [out]; mul.wide.u32 %w, %t, {out_bytes}; add.u64 %p, %p, %w;")
    body += [f"st.global.{kind} [%p+{size * k}], %d{k};" for k in range(count)]
    clean(launch(module("a b c out", "\n".join(body), target="sm_90a"), [*arrays, out], gpu="h100"))
    return out


def accumulator(lane: int, i: int) -> tuple[int, int]:
    return lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2


def multiply(op: str, figure: tuple, m: int, k: int, a, b, c, kinds) -> np.ndarray:  # type: ignore[no-untyped-def]
    """The D of one mma.sync, [m, 8]."""
    at_a, at_b = FIGURES[figure]
    registers = [
        fragment(a, at_a, m * k // 32, kinds[0]),
        fragment(b, lambda g, t, i: (at_b(t, i), g), k * 8 // 32, kinds[1]),
        fragment(c, lambda g, t, i: accumulator(4 * g + t, i), m // 4, kinds[2]),
    ]
    wide = kinds[2] == "f64"
    raw = execute(op, [np.ascontiguousarray(r) for r in registers], registers[2].nbytes // 32, wide)
    got = raw.view({"f32": "f4", "f16": "f2", "s32": "i4", "f64": "f8"}[kinds[2]])
    out = np.empty((m, 8), got.dtype)
    for lane in range(32):
        for i in range(m // 4):
            out[accumulator(lane, i)] = got[lane, i]
    return out


@pytest.mark.parametrize("kind,k", [("f16", 8), ("f16", 16), ("bf16", 8), ("bf16", 16),
                                    ("tf32", 4), ("tf32", 8)])  # fmt: skip
@pytest.mark.parametrize("d", ["f32", "f16"])
def test_16_and_32_bit_floats(kind: str, k: int, d: str) -> None:
    if d == "f16" and kind != "f16":
        with pytest.raises(REFUSED):
            execute(f"mma.sync.aligned.m16n8k{k}.row.col.f16.{kind}.{kind}.f16",
                    [np.zeros((32, 4), np.uint32)] * 3, 8)  # fmt: skip
        return
    rng = np.random.default_rng(k)
    a, b, c = (rng.integers(-8, 9, shape).astype(float) for shape in ((16, k), (k, 8), (16, 8)))
    op = f"mma.sync.aligned.m16n8k{k}.row.col.{d}.{kind}.{kind}.{d}"
    figure = ("f16" if kind == "bf16" else kind, k)
    assert np.array_equal(multiply(op, figure, 16, k, a, b, c, (kind, kind, d)), a @ b + c)


@pytest.mark.parametrize("a_kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize("b_kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize("k", [16, 32])
@pytest.mark.parametrize("d", ["f32", "f16"])
def test_8_bit_floats(a_kind: str, b_kind: str, k: int, d: str) -> None:
    rng = np.random.default_rng(k)
    a, b = random_codes(rng, a_kind, (16, k)), random_codes(rng, b_kind, (k, 8))
    c = rng.integers(-64, 65, (16, 8)) / 8
    op = f"mma.sync.aligned.m16n8k{k}.row.col.{d}.{a_kind}.{b_kind}.{d}"
    got = multiply(op, ("byte", k), 16, k, a, b, c, (a_kind, b_kind, d))
    want = (decode(a, a_kind) @ decode(b, b_kind) + c).astype(got.dtype)
    assert np.array_equal(got, want)


INTEGERS = [
    (m, k, a, b)
    for bits, shapes in ((8, ((8, 16), (16, 16), (16, 32))), (4, ((8, 32), (16, 32), (16, 64))))
    for m, k in shapes
    for a, b in ((f"s{bits}", f"u{bits}"), (f"u{bits}", f"s{bits}"), (f"s{bits}", f"s{bits}"))
]


@pytest.mark.parametrize("m,k,a_kind,b_kind", INTEGERS)
@pytest.mark.parametrize("clamp", ["", ".satfinite"])
def test_integers(m: int, k: int, a_kind: str, b_kind: str, clamp: str) -> None:
    rng = np.random.default_rng([m, k])
    bits = int(a_kind[1])
    span = {"s": (-(1 << bits - 1), 1 << bits - 1), "u": (0, 1 << bits)}
    a = rng.integers(*span[a_kind[0]], (m, k))
    b = rng.integers(*span[b_kind[0]], (k, 8))
    c = rng.choice([2**31 - 1, -(2**31), 0, 12345], (m, 8))
    op = f"mma.sync.aligned.m{m}n8k{k}.row.col{clamp}.s32.{a_kind}.{b_kind}.s32"
    name = "byte" if bits == 8 else "nibble"
    figure = (f"m8 {name}" if m == 8 else name, k)
    got = multiply(op, figure, m, k, a & (1 << bits) - 1, b & (1 << bits) - 1, c,
                   (a_kind, b_kind, "s32"))  # fmt: skip
    exact = a @ b + c
    assert (np.abs(exact) >= 2**31).any()
    want = exact.clip(-(2**31), 2**31 - 1) if clamp else (exact + 2**31) % 2**32 - 2**31
    assert np.array_equal(got, want)


@pytest.mark.parametrize("m,k", [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_doubles_are_rounded_once(m: int, k: int) -> None:
    rng = np.random.default_rng([m, k])
    a, b, c = (rng.normal(size=shape) for shape in ((m, k), (k, 8), (m, 8)))
    a[:, 0] *= 2.0**60  # so that sums cancel and last bits matter
    a[:, 1] = -a[:, 0] * (1 + 2.0**-40)
    b[1] = b[0]
    op = f"mma.sync.aligned.m{m}n8k{k}.row.col.f64.f64.f64.f64{'.rn' if m == 16 else ''}"
    figure = ("m8 f64" if m == 8 else "f64", k)
    got = multiply(op, figure, m, k, a, b, c, ("f64", "f64", "f64"))
    exact = [
        [
            float(sum((Fraction(a[i, x]) * Fraction(b[x, j]) for x in range(k)), Fraction(c[i, j])))
            for j in range(8)
        ]
        for i in range(m)
    ]
    assert np.array_equal(got, exact)


def test_doubles_that_are_not_finite() -> None:
    a, b, c = np.ones((8, 4)), np.ones((4, 8)), np.zeros((8, 8))
    a[0, 0], a[1, 1], b[2, 3], c[7, 7] = np.inf, np.nan, -np.inf, 1e308
    a[7], b[:, 7] = 1e308, 1.0
    op = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"
    with np.errstate(all="ignore"):
        want = a @ b + c
    got = multiply(op, ("m8 f64", 4), 8, 4, a, b, c, ("f64", "f64", "f64"))
    assert np.array_equal(got, want, equal_nan=True)


@pytest.mark.parametrize(
    "op",
    [
        "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e3m2.e2m3.f32",  # sm_120
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0",
        "mma.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s4.s32",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
    ],
)
def test_forms_that_are_refused(op: str) -> None:
    with pytest.raises(REFUSED, match="ptx:"):
        execute(op, [np.zeros((32, 4), np.uint32)] * 3, 16)
