"""cvt: conversions between integers and floats of all widths (PTX ISA 9.1 section 9.7.9.21)."""

from __future__ import annotations

import re

from ..ptx.ast import Instr
from .builder import F32, F64, I1, I16, I32, BlockBuilder, splat_f32, splat_i
from .floating import _directed, _saturate, _widen, flush
from .integer import get, put
from .table import native

_ZERO = "zeroinitializer"
_ROUND_INT = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@native(r"cvt(\.sat)?\.([us])(8|16|32|64)\.([us])(8|16|32|64)")
def int_to_int(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """The source is read at its own width, then extended or cut; 8-bit values live in wider
    registers, the destination register is filled by extension."""
    if m[1]:
        raise b.unsupported("cvt.sat between integers is not modelled")
    d, x = ins.operands
    dst_kind, src_kind = (getattr(op, "kind", f"b{m[k]}") for op, k in ((d, 3), (x, 5)))
    value, width = get(b, src_kind[1:], x), int(src_kind[1:])
    for bits, sign in ((int(m[5]), m[4]), (int(m[3]), m[2])):
        if width > bits:
            value = b.t(f"trunc <32 x i{width}> {value} to <32 x i{bits}>")
            width = bits
        target = max(int(m[3]), int(dst_kind[1:])) if bits == int(m[5]) else int(dst_kind[1:])
        if width < target:
            op = "sext" if sign == "s" else "zext"
            value = b.t(f"{op} <32 x i{width}> {value} to <32 x i{target}>")
            width = target
    put(b, dst_kind[1:], d, value)


@native(r"cvt\.(rn|rz|rm|rp)\.f32\.([us])(8|16|32|64)")
def int_to_f32(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    kind = getattr(x, "kind", f"b{m[3]}")
    value, width = get(b, kind[1:], x), int(kind[1:])
    if width > int(m[3]):
        value = b.t(f"trunc <32 x i{width}> {value} to <32 x i{m[3]}>")
        width = int(m[3])
    ty, op = f"<32 x i{width}>", "sitofp" if m[2] == "s" else "uitofp"
    r = b.t(f"{op} {ty} {value} to {F32}")
    if m[1] != "rn":
        if width == 64:
            raise b.unsupported("directed rounding of 64-bit integers is not modelled")
        exact = b.t(f"{op} {ty} {value} to {F64}")
        r = _directed(b, m[1], r, b.t(f"fsub {F64} {exact}, {_widen(b, r)}"), F64)
    b.set_f32(d, r, raw=False)


@native(r"cvt\.(rni|rzi|rmi|rpi)(\.ftz)?(\.sat)?\.([us])(16|32|64)\.f32")
def f32_to_int(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Out-of-range values clamp to the destination's range; NaN gives 0."""
    d, x = ins.operands
    value = flush(b, b.f32(x)) if m[2] else b.f32(x)
    value = b.call(F32, f"llvm.{_ROUND_INT[m[1]]}.v32f32", (F32, value))
    ty = f"<32 x i{m[5]}>"
    out = b.call(ty, f"llvm.fpto{m[4]}i.sat.v32i{m[5]}.v32f32", (F32, value))
    put(b, m[5], d, out)


@native(r"cvt\.(rni|rzi|rmi|rpi)(\.ftz)?(\.sat)?\.f32\.f32")
def f32_to_integral(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    value = flush(b, b.f32(x)) if m[2] else b.f32(x)
    value = b.call(F32, f"llvm.{_ROUND_INT[m[1]]}.v32f32", (F32, value))
    b.set_f32(d, _saturate(b, value) if m[3] else value)


@native(r"cvt(\.ftz)?(\.sat)?\.f32\.f32")
def f32_to_f32(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    value = flush(b, b.f32(x)) if m[1] else b.f32(x)
    b.set_f32(d, _saturate(b, value) if m[2] else value)


@native(r"cvt\.rn\.f32\.f64")
def f64_to_f32(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    b.set_f32(d, b.t(f"fptrunc {F64} {b.f64(x)} to {F32}"))


@native(r"cvt\.f64\.f32")
def f32_to_f64(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    b.set_f64(d, _widen(b, b.f32(x)))


# -- 16-bit floats -------------------------------------------------------------------------------


def to_bf16(b: BlockBuilder, x: str, rounding: str = "rn") -> str:
    """float32 -> bfloat16 bits in the low half of 32. NaN becomes 0x7fff."""
    bits = b.t(f"bitcast {F32} {x} to {I32}")
    if rounding == "rn":
        lsb = b.t(f"lshr {I32} {bits}, {splat_i(32, 16)}")
        lsb = b.t(f"and {I32} {lsb}, {splat_i(32, 1)}")
        bits = b.t(f"add {I32} {bits}, {b.t(f'add {I32} {lsb}, {splat_i(32, 0x7FFF)}')}")
    out = b.t(f"lshr {I32} {bits}, {splat_i(32, 16)}")
    nan = b.t(f"fcmp uno {F32} {x}, {_ZERO}")
    return b.t(f"select {I1} {nan}, {I32} {splat_i(32, 0x7FFF)}, {I32} {out}")


def to_f16(b: BlockBuilder, x: str, rounding: str = "rn") -> str:
    """float32 -> float16 bits in the low half of 32. NaN becomes 0x7fff."""
    if rounding != "rn":
        raise b.unsupported(f"rounding .{rounding} to f16 is not modelled")
    half = b.t(f"fptrunc {F32} {x} to <32 x half>")
    out = b.t(f"zext {I16} {b.t(f'bitcast <32 x half> {half} to {I16}')} to {I32}")
    nan = b.t(f"fcmp uno {F32} {x}, {_ZERO}")
    return b.t(f"select {I1} {nan}, {I32} {splat_i(32, 0x7FFF)}, {I32} {out}")


_TO16 = {"bf16": to_bf16, "f16": to_f16}


@native(r"cvt\.(rn|rz)(\.relu)?\.(bf16|f16)x2\.f32")
def to_16x2(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """``cvt.rn.bf16x2.f32 d, a, b``: a goes to the upper half, b to the lower."""
    d, high, low = ins.operands
    parts = []
    for source in (high, low):
        x = b.f32(source)
        if m[2]:
            x = b.call(F32, "llvm.maximum.v32f32", (F32, x), (F32, splat_f32(0.0)))
        parts.append(_TO16[m[3]](b, x, m[1]))
    upper = b.t(f"shl {I32} {parts[0]}, {splat_i(32, 16)}")
    b.set_i32(d, b.t(f"or {I32} {upper}, {parts[1]}"))


@native(r"cvt\.(rn|rz)\.(bf16|f16)\.f32")
def to_16(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    b.set_i16(d, b.t(f"trunc {I32} {_TO16[m[2]](b, b.f32(x), m[1])} to {I16}"))


@native(r"cvt\.f32\.(bf16|f16)")
def from_16(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    bits = b.i16(x)
    if m[1] == "bf16":
        wide = b.t(f"zext {I16} {bits} to {I32}")
        out = b.t(f"bitcast {I32} {b.t(f'shl {I32} {wide}, {splat_i(32, 16)}')} to {F32}")
    else:
        half = b.t(f"bitcast {I16} {bits} to <32 x half>")
        out = b.t(f"fpext <32 x half> {half} to {F32}")
    b.set_f32(d, out)
