"""Moves, packing, parameters, special registers, constants; and what happens to NaN on the way."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kernels.emulator.gpus import GPUS
from kernels.emulator.host_runtime import Launch
from kernels.emulator.machine import run_launch
from kernels.emulator.memory import GlobalMemory
from kernels.emulator.ptx import PTXSyntaxError

from . import cluster_harness
from .ptx_harness import HEADER, execute, launch_text, run

RNG = np.random.default_rng()
CANONICAL = 0x7FFFFFFF
PAYLOADS = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0xFFFFFFFF, 0x7FA5A5A5], np.uint32)


def bits(dtype: type, n: int = 64) -> np.ndarray:
    return np.frombuffer(RNG.bytes(n * np.dtype(dtype).itemsize), dtype)


def test_pack_and_unpack_64() -> None:
    a, q = bits(np.uint32), bits(np.uint64)
    body = "mov.b64 %d, {%a, %b}; mov.b64 {%lo, %hi}, %q; mov.b64 {_, %only}, %q;"
    b = a[::-1].copy()
    got = execute(body, {"a": a, "b": b, "q": q}, {"d": "u8", "lo": "u4", "hi": "u4", "only": "u4"})
    np.testing.assert_array_equal(got["d"], a | b.astype(np.uint64) << np.uint64(32))
    np.testing.assert_array_equal(got["lo"], q.astype(np.uint32))
    np.testing.assert_array_equal(got["hi"], (q >> np.uint64(32)).astype(np.uint32))
    np.testing.assert_array_equal(got["only"], got["hi"])


def test_pack_and_unpack_16() -> None:
    h, w, q = bits(np.uint16), bits(np.uint32), bits(np.uint64)
    outputs = {"d": "u4", "e": "u8", **{f"x{i}": "u2" for i in range(7)}}
    body = """mov.b32 %d, {%h, %g}; mov.b64 %e, {%h, %g, %g, %h}; mov.b32 {%x0, %x1}, %w;
              mov.b64 {%x2, %x3, %x4, %x5}, %q; mov.b32 {_, %x6}, %w;"""
    g = h[::-1].copy()
    got = execute(body, {"h": h, "g": g, "w": w, "q": q}, outputs)
    np.testing.assert_array_equal(got["d"].view(np.uint16).reshape(-1, 2), np.stack([h, g], 1))
    np.testing.assert_array_equal(
        got["e"].view(np.uint16).reshape(-1, 4), np.stack([h, g, g, h], 1)
    )
    for i in range(2):
        np.testing.assert_array_equal(got[f"x{i}"], w.view(np.uint16).reshape(-1, 2)[:, i])
    for i in range(4):
        np.testing.assert_array_equal(got[f"x{i + 2}"], q.view(np.uint16).reshape(-1, 4)[:, i])
    np.testing.assert_array_equal(got["x6"], got["x1"])


def test_packing_swaps_in_place() -> None:
    """Sources are read before destinations are written."""
    q = bits(np.uint64)
    body = ".reg .b32 %a, %b; mov.b64 {%a, %b}, %q; mov.b64 %d, {%b, %a}; mov.b64 {%b, %a}, %d;"
    got = execute(body + "mov.b64 %d, {%a, %b};", {"q": q}, {"d": np.uint64})["d"]
    np.testing.assert_array_equal(got, q)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0x7fffffff", 0x7FFFFFFF), ("-1", -1), ("-0x10", -16), ("0b1011", 11), ("4294967295", -1),
        ("7U", 7), ("0f3F800000", 0x3F800000), ("0F7fC00001", 0x7FC00001),
        ("0d3FF0000000000000", 0x3F800000), ("1.5", 0x3FC00000), ("-0.0", 0x80000000 - (1 << 32)),
        ("1.0e-3", struct.unpack("<i", struct.pack("<f", 1e-3))[0]),
    ],
)  # fmt: skip
def test_constants_32(text: str, value: int) -> None:
    """A double constant in a .f32 place is rounded to float32 (PTX ISA 9.1 section 4.5.2)."""
    op = "mov.f32" if "." in text or text[:2] in ("0f", "0F", "0d") else "mov.b32"
    got = execute(f"{op} %d, {text};", {}, {"d": np.int32})["d"]
    assert got.tolist() == [value] * 32


@pytest.mark.parametrize(
    ("text", "value"),
    [("-1", -1), ("0xFFFFFFFFFFFFFFFF", -1), ("0x123456789ABCDEF", 0x123456789ABCDEF)],
)
def test_constants_64(text: str, value: int) -> None:
    got = execute(f"mov.b64 %d, {text};", {}, {"d": np.int64})["d"]
    assert got.tolist() == [value] * 32


def test_float_constant_of_double() -> None:
    body = "mov.f64 %d, 0d400921FB54442D18; add.rn.f64 %e, %d, 1.0; mov.f64 %f, 0f40400000;"
    got = execute(body, {}, {"d": "f8", "e": "f8", "f": "f8"})
    assert (got["d"][0], got["e"][0], got["f"][0]) == (np.pi, np.pi + 1.0, 3.0)


def test_predicate_moves_and_constants() -> None:
    p = RNG.random(64) < 0.5
    body = "mov.pred %a, %p; not.pred %b, %p; mov.pred %c, -1; xor.pred %d, %p, %c;"
    got = execute(body, {"p": p}, {"a": bool, "b": bool, "c": bool, "d": bool})
    np.testing.assert_array_equal(got["a"], p)
    np.testing.assert_array_equal(got["b"], ~p)
    assert got["c"].all()
    np.testing.assert_array_equal(got["d"], ~p)


# -- special registers and addresses --------------------------------------------------------------

LANE = np.arange(32)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tid.x", LANE), ("tid.y", 0), ("ntid.x", 32), ("ctaid.x", 0), ("nctaid.x", 1),
        ("laneid", LANE), ("warpid", 0), ("lanemask_eq", 1 << LANE),
        ("lanemask_lt", (1 << LANE) - 1), ("lanemask_le", (2 << LANE) - 1),
        ("lanemask_gt", ~((2 << LANE) - 1)), ("lanemask_ge", ~((1 << LANE) - 1)),
    ],
)  # fmt: skip
def test_special_registers(name: str, value: object) -> None:
    got = execute(f"mov.u32 %d, %{name};", {}, {"d": np.uint32})["d"]
    np.testing.assert_array_equal(got, np.asarray(value, np.int64).astype(np.uint32) + got * 0)


def test_special_registers_are_moved_first() -> None:
    """PTX ISA 9.1 section 10: only mov and cvt read them."""
    with pytest.raises(PTXSyntaxError, match="operand 2 of add.s32"):
        run("add.s32 %d, %tid.x, 5;", {}, {"d": np.uint32})


def test_unmodelled_special_register() -> None:
    with pytest.raises(PTXSyntaxError, match="%pm0"):
        run("mov.u32 %d, %pm0;", {}, {"d": np.uint32})


def test_shared_addresses() -> None:
    """Statics in order of declaration behind the reserved KiB, aligned; offsets are bytes."""
    shared = ".shared .align 4 .b8 one[6];\n.shared .align 16 .b8 two[32];"
    body = "mov.b32 %a, one; mov.b32 %b, two; mov.b32 %c, two+8; sub.s32 %d, %c, %a;"
    got = execute(body, {}, {"a": "u4", "b": "u4", "c": "u4", "d": "u4"}, shared=shared)
    a, b, c, d = (int(got[k][0]) for k in "abcd")
    assert (a, b, c, d) == (1024, 1024 + 16, b + 8, c - a)


# -- parameters -----------------------------------------------------------------------------------


def test_parameter_loads() -> None:
    """Sizes, vectors, offsets, sign; a wider register is filled by extension."""
    code = """
    .visible .entry k(.param .u64 out, .param .align 8 .b8 p[24]) {
      .reg .b64 %out, %q; .reg .b32 %r, %s, %t, %u, %v, %w; .reg .b16 %h;
      ld.param.u64 %out, [out];
      ld.param.b64 %q, [p]; ld.param.v2.b32 {%r, %s}, [p+8]; ld.param.s8 %t, [p+16];
      ld.param.u8 %u, [p+16]; ld.param.s16 %v, [p+18]; ld.param.b16 %h, [p+18];
      cvt.u32.u16 %w, %h;
      st.global.b64 [%out], %q; st.global.v2.b32 [%out+8], {%r, %s};
      st.global.b32 [%out+16], %t; st.global.b32 [%out+20], %u;
      st.global.b32 [%out+24], %v; st.global.b32 [%out+28], %w;
      ret; }"""
    params = np.frombuffer(RNG.bytes(16) + bytes([0x85, 0, 0x34, 0x92, 0, 0, 0, 0]), np.uint8)
    out = np.zeros(8, np.uint32)
    memory = GlobalMemory()
    memory.add_array(out, "out")
    given = (int(out.ctypes.data).to_bytes(8, "little"), params.tobytes())
    launch = Launch("k", (1, 1, 1), (1, 1, 1), params=given)
    assert not run_launch(HEADER + code, launch, GPUS["b200"], memory).findings
    np.testing.assert_array_equal(out[:4], params[:16].view(np.uint32))
    assert [hex(v) for v in out[4:]] == ["0xffffff85", "0x85", "0xffff9234", "0x9234"]


def test_parameter_address() -> None:
    """The address of a parameter, as prefetches and TMA take it, is generic and the same in every
    lane; cvta leaves it alone."""
    code = """
    .visible .entry k(.param .u64 p_out, .param .u64 p_x) {
      .reg .b64 %out, %a, %b; .reg .b32 %t;
      mov.b64 %a, p_x; cvta.param.u64 %b, %a; mov.b64 %a, p_out; sub.s64 %a, %b, %a;
      ld.param.b64 %out, [p_out];
      cvta.to.global.u64 %out, %out; mov.u32 %t, %tid.x; mad.wide.u32 %out, %t, 8, %out;
      st.global.b64 [%out], %a; ret; }"""
    arrays = {"out": np.zeros(32, np.uint64), "x": np.zeros(1, np.uint64)}
    assert not launch_text(HEADER + code, arrays, threads=32).findings
    assert set(arrays["out"].tolist()) == {8}


# -- NaN ------------------------------------------------------------------------------------------


def _nans() -> dict[str, np.ndarray]:
    return {"n": np.resize(PAYLOADS, 32), "p": RNG.random(32) < 0.5}


@pytest.mark.parametrize(
    "line",
    [
        "mov.f32 %d, %n;", "mov.b32 %d, %n;", "selp.f32 %d, %n, 0f3F800000, 1;",
        "selp.f32 %d, 0f3F800000, %n, 0;",
        "{ .reg .b64 %q; mov.b64 %q, {%n, %n}; mov.b64 {%d, _}, %q; }",
        "xor.b32 %d, %n, 0;", "prmt.b32 %d, %n, 0, 0x3210;",
    ],
)  # fmt: skip
def test_moves_keep_payloads(line: str) -> None:
    got = execute(line, _nans(), {"d": np.uint32})["d"]
    np.testing.assert_array_equal(got, np.resize(PAYLOADS, 32))


@pytest.mark.parametrize(
    "line",
    [
        "add.f32 %d, %n, 0f3F800000;", "mul.rn.f32 %d, 0f3F800000, %n;",
        "fma.rn.f32 %d, %n, %n, %n;",
        "max.f32 %d, %n, %n;", "max.NaN.f32 %d, %n, 0f3F800000;", "min.NaN.f32 %d, 0f00000000, %n;",
        "sub.f32 %d, 0f7F800000, 0f7F800000;", "ex2.approx.ftz.f32 %d, %n;",
        "lg2.approx.f32 %d, %n;",
        "sqrt.rn.f32 %d, 0fBF800000;", "rcp.approx.ftz.f32 %d, %n;", "cvt.rni.f32.f32 %d, %n;",
        # PTX leaves these open; ours are canonical.
        "neg.f32 %d, %n;", "abs.f32 %d, %n;",
    ],
)  # fmt: skip
def test_arithmetic_gives_the_canonical_nan(line: str) -> None:
    assert set(execute(line, _nans(), {"d": np.uint32})["d"].tolist()) == {CANONICAL}


@pytest.mark.parametrize("first", ["%s, %n", "%n, %s"])
def test_selection_between_made_and_moved_nan(first: str) -> None:
    """A NaN from arithmetic becomes canonical and the one beside it keeps its bits, whether or not
    the sum's bits were looked at before."""
    inputs = _nans()
    for look in ("", "xor.b32 %x, %s, 0;"):
        body = f".reg .b32 %s, %x; add.f32 %s, %n, 0f3F800000; {look} selp.f32 %d, {first}, %p;"
        got = execute(body, inputs, {"d": np.uint32})["d"]
        made = inputs["p"] if first.startswith("%s") else ~inputs["p"]
        np.testing.assert_array_equal(got, np.where(made, CANONICAL, inputs["n"]))


def test_selection_with_a_constant_nan() -> None:
    inputs = _nans()
    body = ".reg .b32 %s; add.f32 %s, %n, 0f3F800000; selp.f32 %d, 0f7FC00001, %s, %p;"
    got = execute(body, inputs, {"d": np.uint32})["d"]
    np.testing.assert_array_equal(got, np.where(inputs["p"], 0x7FC00001, CANONICAL))


def test_made_nan_through_pairs_halves_and_blocks() -> None:
    """The packed sum's NaN is canonical whether it leaves as a pair, a half, or over a branch."""
    inputs = {"n": np.resize(PAYLOADS, 32)}
    body = """.reg .b64 %q, %one; .reg .pred %p;
      mov.b64 %q, {%n, %n}; mov.b64 %one, {0f3F800000, 0f3F800000};
      add.rn.f32x2 %q, %q, %one;
      mov.b64 {%d, %e}, %q; setp.lt.u32 %p, %thread_, 10; @%p bra OVER; xor.b32 %d, %d, 0;
      OVER: mov.b64 %w, %q;"""
    got = execute(body, inputs, {"d": "u4", "e": "u4", "w": "u8"})
    assert set(got["d"].tolist()) == set(got["e"].tolist()) == {CANONICAL}
    assert set(got["w"].tolist()) == {CANONICAL << 32 | CANONICAL}


def test_parameters_of_float_types() -> None:
    body = """.reg .f32 %f; .reg .f64 %g; .reg .b64 %o;
ld.param.f32 %f, [single]; ld.param.f64 %g, [double]; ld.param.b64 %o, [out];
st.global.f32 [%o], %f; st.global.f64 [%o+8], %g;"""
    out = np.zeros(2, np.float64)
    single, double = np.float32(-3.1).tobytes() + bytes(4), np.float64(1e300 / 3).tobytes()
    ran = cluster_harness.launch(
        cluster_harness.module("single double out", body), [single, double, out], threads=1
    )
    assert ran.findings == []
    assert out.view(np.float32)[0] == np.float32(-3.1)
    assert out[1] == np.float64(1e300 / 3)
