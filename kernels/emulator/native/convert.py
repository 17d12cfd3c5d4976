"""cvt between integers and floats of 16, 32 and 64 bits (PTX ISA 9.1 section 9.7.9.21).

Every conversion rounds once: what comes from a wider type passes through float32 or double rounded
to odd (`odd`).
"""

from __future__ import annotations

import math
import re

from ..ptx.ast import Instr, Operand, Reg
from .builder import BlockBuilder
from .floating import directed, flush, saturate, widen
from .integer import get, put
from .ir import F16, F32, F64, I1, I16, I32, I64, ZERO, Code, splat_f32, splat_f64, splat_i
from .odd import add_odd, narrow_odd
from .table import native

_ROUND_INT = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


def _register_bits(op: Operand, bits: str) -> str:
    """Width of the register that holds the operand: at least ``bits``."""
    return op.kind[1:] if isinstance(op, Reg) else bits


def _resize(b: BlockBuilder, value: str, width: int, to: int, sign: str) -> str:
    """Cuts, or extends by the sign."""
    if width == to:
        return value
    op = "trunc" if width > to else "sext" if sign == "s" else "zext"
    return b.t(f"{op} <32 x i{width}> {value} to <32 x i{to}>")


def _narrow_source(b: BlockBuilder, x: Operand, bits: str) -> str:
    """A source of ``bits``: the low part of its register (PTX ISA 9.1 section 9.4.1)."""
    width = _register_bits(x, bits)
    if width == "8" == bits:
        return _resize(b, b.i8(x), 16, 8, "u")
    if width not in ("16", "32", "64") or int(width) < int(bits):
        raise b.unsupported(f"a source of {bits} bits in {x}")
    return _resize(b, get(b, width, x), int(width), int(bits), "u")


def _put_extended(b: BlockBuilder, d: Operand, value: str, bits: str, sign: str) -> None:
    """A result of ``bits`` fills its register: sign-extended if signed, else with zeros."""
    width = _register_bits(d, bits)
    if width == "8" == bits:
        b.set_i8(d, _resize(b, value, 8, 16, "u"))
        return
    if width not in ("16", "32", "64") or int(width) < int(bits):
        raise b.unsupported(f"a result of {bits} bits in {d}")
    put(b, width, d, _resize(b, value, int(bits), int(width), sign))


@native(r"cvt()\.([us])(8|16|32|64)\.([us])(8|16|32|64)")
@native(r"cvt(\.sat)\.(u)(8|16|32|64)\.(s)(8|16|32|64)")  # wherever saturation is possible
@native(r"cvt(\.sat)\.([us])(8)\.(u)(16|32|64)")
@native(r"cvt(\.sat)\.([us])(16)\.(u)(32|64)")
@native(r"cvt(\.sat)\.([us])(32)\.(u)(64)")
@native(r"cvt(\.sat)\.(s)(8)\.(u)(8)")
@native(r"cvt(\.sat)\.(s)(16)\.(u)(16)")
@native(r"cvt(\.sat)\.(s)(32)\.(u)(32)")
@native(r"cvt(\.sat)\.(s)(64)\.(u)(64)")
@native(r"cvt(\.sat)\.(s)(8)\.(s)(16|32|64)")
@native(r"cvt(\.sat)\.(s)(16)\.(s)(32|64)")
@native(r"cvt(\.sat)\.(s)(32)\.(s)(64)")
def int_to_int(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """The source is read at its own width, clamped (.sat) or cut or extended to the destination's,
    which fills its register."""
    d, x = ins.operands
    value, width, to = _narrow_source(b, x, m[5]), int(m[5]), int(m[3])
    if m[1]:
        value = _clamp(b, value, width, m[4], m[2], to)
    value = _resize(b, value, width, to, m[4])
    _put_extended(b, d, value, m[3], m[2])


def _clamp(b: BlockBuilder, value: str, width: int, sign: str, to_sign: str, to: int) -> str:
    """Into the range of the destination type, as far as the source type can leave it."""
    ty = f"<32 x i{width}>"
    high = (1 << (to - (to_sign == "s"))) - 1
    low = -(1 << (to - 1)) if to_sign == "s" else 0
    if high < (1 << (width - (sign == "s"))) - 1:
        name = f"llvm.{sign}min.v32i{width}"
        value = b.call(ty, name, (ty, value), (ty, splat_i(width, high)))
    if sign == "s" and low > -(1 << (width - 1)):
        value = b.call(ty, f"llvm.smax.v32i{width}", (ty, value), (ty, splat_i(width, low)))
    return value


@native(r"cvt\.(rn)\.f32\.([us])(8|16|32|64)")
@native(r"cvt\.(rz|rm|rp)\.f32\.([us])(8|16|32)")
def int_to_f32(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    value, ty = _narrow_source(b, x, m[3]), f"<32 x i{m[3]}>"
    op = "sitofp" if m[2] == "s" else "uitofp"
    r = b.t(f"{op} {ty} {value} to {F32}")
    if m[1] != "rn":
        exact = b.t(f"{op} {ty} {value} to {F64}")
        r = directed(b, m[1], r, b.t(f"fsub {F64} {exact}, {widen(b, r)}"))
    b.set_f32(d, r, raw=False)


@native(r"cvt\.rn\.f64\.([us])(8|16|32|64)")
def int_to_f64(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    value = _narrow_source(b, x, m[2])
    b.set_f64(d, b.t(f"{m[1]}itofp <32 x i{m[2]}> {value} to {F64}"))


def _exact_width(b: BlockBuilder, op: Operand, bits: str) -> None:
    """Between integers and bfloat16 the assembler takes registers of the integer's width alone."""
    if _register_bits(op, bits) != bits:
        raise b.unsupported(f"a register of another width than {bits} bits")


@native(r"cvt\.rn\.(f16)\.([us])(8|16|32|64)")
@native(r"cvt\.rn\.(bf16)\.([us])(8|16|32|64)")
def int_to_16(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    fmt, sign, bits = m.groups()
    if fmt == "bf16":
        _exact_width(b, x, bits)
    value, ty = _narrow_source(b, x, bits), f"<32 x i{bits}>"

    def emit(c: Code, value: str) -> str:
        if bits != "64":  # a double holds it
            exact = c.t(f"{sign}itofp {ty} {value} to {F64}")
        else:
            shift = "ashr" if sign == "s" else "lshr"
            high = c.t(f"{shift} {ty} {value}, {splat_i(64, 32)}")
            high = c.t(f"{sign}itofp {ty} {high} to {F64}")
            high = c.t(f"fmul {F64} {high}, {splat_f64(2.0**32)}")
            low = c.t(f"and {ty} {value}, {splat_i(64, 0xFFFFFFFF)}")
            exact = add_odd(c, high, c.t(f"uitofp {ty} {low} to {F64}"))
        return to_16(c, narrow_odd(c, exact), fmt, "rn")

    out = b.outlined(I32, ins.op, emit, (ty, value))
    b.set_i16(d, b.t(f"trunc {I32} {out} to {I16}"))


def _source(b: BlockBuilder, x: Operand, fmt: str) -> str:
    """A float operand: float16 and bfloat16 widened to float32."""
    if fmt == "f64":
        return b.f64(x)
    return b.f32(x) if fmt == "f32" else widen_16(b, b.i16(x), fmt)


@native(r"cvt\.(rni|rzi|rmi|rpi)(\.ftz)?(?:\.sat)?\.([us])(8|16|32|64)\.(f32)")
@native(r"cvt\.(rni|rzi|rmi|rpi)()(?:\.sat)?\.([us])(8|16|32|64)\.(f16|f64)")
@native(r"cvt\.(rni|rzi|rmi|rpi)()\.([us])(16|32|64)\.(bf16)")
def float_to_int(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Out-of-range values clamp to the destination's range. NaN gives 0, but from .f64 or to 64
    bits the destination's top bit (PTX ISA 9.1 section 9.7.9.21)."""
    d, x = ins.operands
    mode, ftz, sign, bits, fmt = m.groups()
    if fmt == "bf16":
        _exact_width(b, d, bits)
    source = _source(b, x, fmt)
    source = flush(b, source) if ftz else source
    size = "f64" if fmt == "f64" else "f32"
    fty, ty = (F64 if fmt == "f64" else F32), f"<32 x i{bits}>"
    value = b.call(fty, f"llvm.{_ROUND_INT[mode]}.v32{size}", (fty, source))
    out = b.call(ty, f"llvm.fpto{sign}i.sat.v32i{bits}.v32{size}", (fty, value))
    if bits == "64" or fmt == "f64":
        nan = b.t(f"fcmp uno {fty} {source}, {ZERO}")
        top = splat_i(int(bits), 1 << int(bits) - 1)
        out = b.t(f"select {I1} {nan}, {ty} {top}, {ty} {out}")
    _put_extended(b, d, out, bits, sign)


@native(r"cvt\.(rni|rzi|rmi|rpi)(\.ftz)?(\.sat)?\.f32\.f32")
def f32_to_integral(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    value = flush(b, b.f32(x)) if m[2] else b.f32(x)
    value = b.call(F32, f"llvm.{_ROUND_INT[m[1]]}.v32f32", (F32, value))
    b.set_f32(d, saturate(b, value) if m[3] else value)


@native(r"cvt\.(rni|rzi|rmi|rpi)\.(f16)\.f16")
@native(r"cvt\.(rni|rzi|rmi|rpi)\.(bf16)\.bf16")
def half_to_integral(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    value = widen_16(b, b.i16(x), m[2])
    value = b.call(F32, f"llvm.{_ROUND_INT[m[1]]}.v32f32", (F32, value))
    b.set_i16(d, b.t(f"trunc {I32} {to_16(b, value, m[2], 'rn')} to {I16}"))


@native(r"cvt\.(rni|rzi|rmi|rpi)\.f64\.f64")
def f64_to_integral(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """A NaN becomes quiet and keeps the rest of its bits."""
    d, x = ins.operands
    b.set_f64(d, b.call(F64, f"llvm.{_ROUND_INT[m[1]]}.v32f64", (F64, b.f64(x))))


@native(r"cvt(\.ftz)?(\.sat)?\.f32\.f32")
def f32_to_f32(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Without modifiers a move: a NaN keeps its bits, as on an H200."""
    d, x = ins.operands
    if not m[1] and not m[2]:
        b.set_i32(d, b.i32(x))
        return
    value = flush(b, b.f32(x)) if m[1] else b.f32(x)
    b.set_f32(d, saturate(b, value) if m[2] else value)


@native(r"cvt\.rn\.f32\.f64")
def f64_to_f32(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """A NaN keeps the upper part of its payload."""
    d, x = ins.operands
    b.set_f32(d, b.t(f"fptrunc {F64} {b.f64(x)} to {F32}"), raw=False)


@native(r"cvt\.f64\.f32")
def f32_to_f64(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    b.set_f64(d, widen(b, b.f32(x)))


# -- 16-bit floats -------------------------------------------------------------------------------


def widen_16(b: Code, bits: str, fmt: str) -> str:
    """float16 or bfloat16 bits as the equal float32."""
    if fmt == "f16":
        return b.t(f"fpext {F16} {b.t(f'bitcast {I16} {bits} to {F16}')} to {F32}")
    wide = b.t(f"zext {I16} {bits} to {I32}")
    return b.t(f"bitcast {I32} {b.t(f'shl {I32} {wide}, {splat_i(32, 16)}')} to {F32}")


def _to_bf16(b: Code, x: str, rounding: str) -> str:
    """float32 -> bfloat16 bits in the low half of 32. NaN becomes 0x7fff."""
    bits = b.t(f"bitcast {F32} {x} to {I32}")
    if rounding == "rn":
        lsb = b.t(f"lshr {I32} {bits}, {splat_i(32, 16)}")
        lsb = b.t(f"and {I32} {lsb}, {splat_i(32, 1)}")
        bits = b.t(f"add {I32} {bits}, {b.t(f'add {I32} {lsb}, {splat_i(32, 0x7FFF)}')}")
    out = b.t(f"lshr {I32} {bits}, {splat_i(32, 16)}")
    nan = b.t(f"fcmp uno {F32} {x}, {ZERO}")
    return b.t(f"select {I1} {nan}, {I32} {splat_i(32, 0x7FFF)}, {I32} {out}")


def _to_f16(b: Code, x: str, rounding: str) -> str:
    """float32 -> float16 bits in the low half of 32. NaN becomes 0x7fff. Rounding towards zero
    steps back from a nearest result that is larger than the source."""
    half = b.t(f"fptrunc {F32} {x} to {F16}")
    bits = b.t(f"bitcast {F16} {half} to {I16}")
    if rounding == "rz":
        sizes = [
            b.call(F32, "llvm.fabs.v32f32", (F32, v))
            for v in (b.t(f"fpext {F16} {half} to {F32}"), x)
        ]
        infinite = b.t(f"fcmp oeq {F32} {sizes[1]}, {splat_f32(math.inf)}")
        larger = b.t(f"fcmp ogt {F32} {sizes[0]}, {sizes[1]}")
        larger = b.t(f"and {I1} {larger}, {b.t(f'xor {I1} {infinite}, {splat_i(1, 1)}')}")
        bits = b.t(f"sub {I16} {bits}, {b.t(f'zext {I1} {larger} to {I16}')}")
    out = b.t(f"zext {I16} {bits} to {I32}")
    nan = b.t(f"fcmp uno {F32} {x}, {ZERO}")
    return b.t(f"select {I1} {nan}, {I32} {splat_i(32, 0x7FFF)}, {I32} {out}")


def to_16(b: Code, x: str, fmt: str, rounding: str) -> str:
    """float32 -> float16 or bfloat16 bits in the low half of 32 (``rn`` or ``rz``)."""
    return {"bf16": _to_bf16, "f16": _to_f16}[fmt](b, x, rounding)


def _relu_to_16(b: Code, x: str, m: re.Match[str]) -> str:
    """m: (rounding, .relu, format)"""
    if m[2]:  # .relu: negative becomes +0, NaN stays
        x = b.call(F32, "llvm.maximum.v32f32", (F32, x), (F32, splat_f32(0.0)))
    return to_16(b, x, m[3], m[1])


@native(r"cvt\.(rn|rz)(\.relu)?\.(bf16|f16)x2\.f32")
def to_16x2(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """``cvt.rn.bf16x2.f32 d, a, b``: a goes to the upper half, b to the lower."""
    d, high, low = ins.operands

    def emit(c: Code, high: str, low: str) -> str:
        upper = c.t(f"shl {I32} {_relu_to_16(c, high, m)}, {splat_i(32, 16)}")
        return c.t(f"or {I32} {upper}, {_relu_to_16(c, low, m)}")

    b.set_i32(d, b.outlined(I32, ins.op, emit, (F32, b.f32(high)), (F32, b.f32(low))))


@native(r"cvt\.(rn|rz)(\.relu)?\.(bf16|f16)\.f32")
def f32_to_16(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    b.set_i16(d, b.t(f"trunc {I32} {_relu_to_16(b, b.f32(x), m)} to {I16}"))


@native(r"cvt\.rn\.(bf16|f16)\.f64")
def f64_to_16(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """A NaN becomes quiet and keeps sign and the payload's upper part (measured: an H200)."""
    d, x = ins.operands
    fraction, quiet = (10, 0x7E00) if m[1] == "f16" else (7, 0x7FC0)

    def emit(c: Code, x: str) -> str:
        out = to_16(c, narrow_odd(c, x), m[1], "rn")
        bits = c.t(f"bitcast {F64} {x} to {I64}")
        payload = c.t(f"lshr {I64} {bits}, {splat_i(64, 52 - fraction)}")
        payload = c.t(f"and {I64} {payload}, {splat_i(64, (1 << fraction) - 1)}")
        sign = c.t(f"lshr {I64} {bits}, {splat_i(64, 48)}")
        sign = c.t(f"and {I64} {sign}, {splat_i(64, 0x8000)}")
        kept = c.t(f"or {I64} {sign}, {c.t(f'or {I64} {payload}, {splat_i(64, quiet)}')}")
        nan = c.t(f"fcmp uno {F64} {x}, {ZERO}")
        kept = c.t(f"trunc {I64} {kept} to {I32}")
        return c.t(f"select {I1} {nan}, {I32} {kept}, {I32} {out}")

    out = b.outlined(I32, ins.op, emit, (F64, b.f64(x)))
    b.set_i16(d, b.t(f"trunc {I32} {out} to {I16}"))


@native(r"cvt\.f32\.(bf16|f16)")
def from_16(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """A bfloat16 NaN keeps its bits (PTX leaves it open, an H200 does), a float16 one does not."""
    d, x = ins.operands
    value = widen_16(b, b.i16(x), m[1])
    if m[1] == "bf16":
        b.set_i32(d, b.t(f"bitcast {F32} {value} to {I32}"))
    else:
        b.set_f32(d, value)


@native(r"cvt\.f64\.(bf16|f16)")
def from_16_to_f64(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """A NaN becomes quiet and keeps its payload."""
    d, x = ins.operands
    b.set_f64(d, widen(b, widen_16(b, b.i16(x), m[1])))
