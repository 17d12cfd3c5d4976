"""cvt to and from pairs of 8-, 6- and 4-bit floats and of scale factors (PTX ISA 9.1 section
9.7.9.21).

e4m3: 4 bits of exponent (bias 7), 3 of fraction, no infinity, NaN 0x7f, largest 448.
e5m2: 5 and 2 bits, the upper half of a float16; .satfinite never gives infinity, largest 57344.
e2m3, e3m2, e2m1: neither infinity nor NaN; a NaN becomes the largest number, 7.5, 28 or 6.
ue8m0: the exponent of a float32, no sign; 0xff is NaN. What the text leaves open is as in CUDA's
cuda_fp8.hpp: the sign is dropped, and below 2**-127 everything rounds to it.
s2f6: a signed fixed-point number of 6 fraction bits, scaled by a ue8m0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..ptx.ast import Instr, Operand
from .builder import BlockBuilder
from .convert import to_16, widen_16
from .ir import F32, I1, I16, I32, ZERO, Code, splat_f32, splat_i
from .table import native


@dataclass(frozen=True)
class _Float:
    """A format: fraction bits, exponent of the least normal number, largest number and its code,
    the place of the sign, and the code of NaN."""

    fraction_bits: int
    min_exponent: int
    largest: float
    largest_code: int
    sign_bit: int
    nan: int


_FLOATS = {
    "e4m3": _Float(3, -6, 448.0, 0x7E, 7, 0x7F),
    "e5m2": _Float(2, -14, 57344.0, 0x7B, 7, 0x7F),
    "e2m3": _Float(3, 0, 7.5, 0x1F, 5, 0x1F),
    "e3m2": _Float(2, -2, 28.0, 0x1F, 5, 0x1F),
    "e2m1": _Float(1, 0, 6.0, 0x7, 3, 0x7),
}
_NARROW = "e4m3|e5m2|e2m3|e3m2|e2m1"


def _encode(b: Code, x: str, fmt: str) -> str:
    """float32 -> a code in the low bits of 32, to nearest even, at most the largest number.

    Adding 1.5 * 2**(e + 23 - p), e the exponent of x, rounds x to p bits of fraction. What is then
    a whole number of units of the last place is a code, as exponent and fraction are adjacent.
    """
    f = _FLOATS[fmt]
    p = f.fraction_bits
    bits = b.t(f"bitcast {F32} {x} to {I32}")
    magnitude = b.t(f"and {I32} {bits}, {splat_i(32, 0x7FFFFFFF)}")
    exponent = b.t(f"lshr {I32} {magnitude}, {splat_i(32, 23)}")
    low = splat_i(32, 127 + f.min_exponent)
    exponent = b.call(I32, "llvm.smax.v32i32", (I32, exponent), (I32, low))
    exponent = b.call(I32, "llvm.smin.v32i32", (I32, exponent), (I32, splat_i(32, 127 + 16)))
    # Units of the last place: x / 2**(e - p), exact, then rounded to a whole number.
    scale = b.t(f"sub {I32} {splat_i(32, 254 + p)}, {exponent}")
    scale = b.t(f"bitcast {I32} {b.t(f'shl {I32} {scale}, {splat_i(32, 23)}')} to {F32}")
    size = b.t(f"bitcast {I32} {magnitude} to {F32}")
    size = b.call(F32, "llvm.minnum.v32f32", (F32, size), (F32, splat_f32(2.0 * f.largest)))
    units = b.call(F32, "llvm.rint.v32f32", (F32, b.t(f"fmul {F32} {size}, {scale}")))
    units = b.t(f"fptosi {F32} {units} to {I32}")
    # Code = (e - emin) * 2**p + units, where a normal number has at least 2**p units.
    steps = b.t(f"shl {I32} {b.t(f'sub {I32} {exponent}, {low}')}, {splat_i(32, p)}")
    code = b.t(f"add {I32} {steps}, {units}")
    top = splat_i(32, f.largest_code)
    code = b.call(I32, "llvm.smin.v32i32", (I32, code), (I32, top))
    moved = b.t(f"lshr {I32} {bits}, {splat_i(32, 31 - f.sign_bit)}")
    sign = b.t(f"and {I32} {moved}, {splat_i(32, 1 << f.sign_bit)}")
    code = b.t(f"or {I32} {code}, {sign}")
    nan = b.t(f"fcmp uno {F32} {x}, {ZERO}")
    return b.t(f"select {I1} {nan}, {I32} {splat_i(32, f.nan)}, {I32} {code}")


def _decode(b: Code, code: str, fmt: str) -> str:
    """The low bits of 32 -> float32, exact; NaN stays NaN."""
    f = _FLOATS[fmt]
    bias, p = 1 - f.min_exponent, f.fraction_bits
    bit = 1 << f.sign_bit
    sign = b.t(f"and {I32} {code}, {splat_i(32, bit)}")
    sign = b.t(f"shl {I32} {sign}, {splat_i(32, 31 - f.sign_bit)}")
    body = b.t(f"and {I32} {code}, {splat_i(32, bit - 1)}")
    # Put into float32's fields the exponent is too small by 127 - bias: subnormals come out right.
    placed = b.t(f"shl {I32} {body}, {splat_i(32, 23 - p)}")
    placed = b.t(f"bitcast {I32} {placed} to {F32}")
    size = b.t(f"fmul {F32} {placed}, {splat_f32(2.0 ** (127 - bias))}")
    bits = b.t(f"bitcast {F32} {size} to {I32}")
    if f.sign_bit == 7:
        first = 0x7C if fmt == "e5m2" else 0x7F  # infinity, or NaN
        beyond = b.t(f"icmp uge {I32} {body}, {splat_i(32, first)}")
        rest = b.t(f"sub {I32} {body}, {splat_i(32, 0x7C)}")
        rest = b.t(f"shl {I32} {rest}, {splat_i(32, 21)}")
        special = b.t(f"or {I32} {rest}, {splat_i(32, 0x7F800000)}")
        bits = b.t(f"select {I1} {beyond}, {I32} {special}, {I32} {bits}")
    return b.t(f"bitcast {I32} {b.t(f'or {I32} {bits}, {sign}')} to {F32}")


def _relu(b: Code, x: str) -> str:
    """Negative becomes +0, NaN stays."""
    return b.call(F32, "llvm.maximum.v32f32", (F32, x), (F32, splat_f32(0.0)))


def _apart(fmt: str) -> int:
    """Bits from one number of a pair to the other."""
    return 4 if fmt == "e2m1" else 8


def _set(b: BlockBuilder, d: Operand, value: str, fmt: str) -> None:
    """Writes a pair, given in 32 bits; two 4-bit numbers go to a .b8 register."""
    put = b.set_i8 if fmt == "e2m1" else b.set_i16
    put(d, b.t(f"trunc {I32} {value} to {I16}"))


def _get(b: BlockBuilder, x: Operand, fmt: str) -> str:
    return b.t(f"zext {I16} {b.i8(x) if fmt == 'e2m1' else b.i16(x)} to {I32}")


def _two_floats(b: BlockBuilder, sources: list[Operand], from_: str) -> tuple[str, str]:
    """The upper and the lower number as float32: two float32, or a pair of 16-bit floats."""
    if from_ == "f32":
        high, low = (b.f32(v) for v in sources)
        return high, low
    bits = b.i32(*sources)
    upper = b.t(f"lshr {I32} {bits}, {splat_i(32, 16)}")
    parts = [b.t(f"trunc {I32} {v} to {I16}") for v in (upper, bits)]
    high, low = (widen_16(b, v, from_) for v in parts)
    return high, low


@native(rf"cvt\.rn\.satfinite(\.relu)?\.({_NARROW})x2\.(f32)")
@native(rf"cvt\.rn\.satfinite(\.relu)?\.({_NARROW})x2\.(f16|bf16)x2")
def to_narrow(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Of two float32, the first goes to the upper place; of a pair, each half to its own."""
    d, *sources = ins.operands
    relu, fmt, from_ = m.groups()

    def emit(c: Code, high: str, low: str) -> str:
        if relu:
            high, low = _relu(c, high), _relu(c, low)
        upper = c.t(f"shl {I32} {_encode(c, high, fmt)}, {splat_i(32, _apart(fmt))}")
        return c.t(f"or {I32} {upper}, {_encode(c, low, fmt)}")

    high, low = _two_floats(b, sources, from_)
    name = f"{fmt}x2{relu or ''}"
    _set(b, d, b.outlined(I32, name, emit, (F32, high), (F32, low)), fmt)


@native(rf"cvt\.rn(\.relu)?\.(f16)x2\.({_NARROW})x2")
def from_narrow(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    relu, to, fmt = m.groups()

    def emit(c: Code, pair: str) -> str:
        out = ZERO
        for k in range(2):
            code = c.t(f"lshr {I32} {pair}, {splat_i(32, _apart(fmt) * k)}")
            value = _decode(c, code, fmt)
            half = to_16(c, _relu(c, value) if relu else value, to, "rn")
            out = c.t(f"or {I32} {out}, {c.t(f'shl {I32} {half}, {splat_i(32, 16 * k)}')}")
        return out

    b.set_i32(d, b.outlined(I32, ins.op, emit, (I32, _get(b, x, fmt))))


# -- scale factors --------------------------------------------------------------------------------


def _exponent(b: Code, x: str, up: bool, finite: bool) -> str:
    """float32 -> ue8m0 in 32 bits."""
    bits = b.t(f"bitcast {F32} {x} to {I32}")
    size = b.t(f"and {I32} {bits}, {splat_i(32, 0x7FFFFFFF)}")
    code = b.t(f"lshr {I32} {size}, {splat_i(32, 23)}")
    if up:
        fraction = b.t(f"and {I32} {size}, {splat_i(32, 0x7FFFFF)}")
        inexact = b.t(f"icmp ne {I32} {fraction}, {ZERO}")
        above = b.t(f"icmp ugt {I32} {size}, {splat_i(32, 0x00400000)}")  # 2**-127
        number = b.t(f"icmp ult {I32} {size}, {splat_i(32, 0x7F800000)}")
        more = b.t(f"and {I1} {inexact}, {b.t(f'and {I1} {above}, {number}')}")
        code = b.t(f"add {I32} {code}, {b.t(f'zext {I1} {more} to {I32}')}")
    if finite:
        number = b.t(f"icmp ule {I32} {size}, {splat_i(32, 0x7F800000)}")
        most = b.call(I32, "llvm.umin.v32i32", (I32, code), (I32, splat_i(32, 0xFE)))
        code = b.t(f"select {I1} {number}, {I32} {most}, {I32} {code}")
    return code


@native(r"cvt\.(rz|rp)(\.satfinite)?\.ue8m0x2\.(f32)")
@native(r"cvt\.(rz|rp)(\.satfinite)?\.ue8m0x2\.(bf16)x2")
def to_scale(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, *sources = ins.operands
    up, finite = m[1] == "rp", m[2] is not None

    def emit(c: Code, high: str, low: str) -> str:
        upper = c.t(f"shl {I32} {_exponent(c, high, up, finite)}, {splat_i(32, 8)}")
        return c.t(f"or {I32} {upper}, {_exponent(c, low, up, finite)}")

    high, low = _two_floats(b, sources, m[3])
    name = f"ue8m0x2.{m[1]}{m[2] or ''}"
    _set(b, d, b.outlined(I32, name, emit, (F32, high), (F32, low)), "ue8m0")


def _power(b: Code, code: str) -> str:
    """ue8m0 in the low byte of 32 bits -> float32; exact, 0xff becomes NaN."""
    code = b.t(f"and {I32} {code}, {splat_i(32, 0xFF)}")
    normal = b.t(f"shl {I32} {code}, {splat_i(32, 23)}")
    least = b.t(f"icmp eq {I32} {code}, {ZERO}")
    bits = b.t(f"select {I1} {least}, {I32} {splat_i(32, 0x00400000)}, {I32} {normal}")
    nan = b.t(f"icmp eq {I32} {code}, {splat_i(32, 0xFF)}")
    bits = b.t(f"select {I1} {nan}, {I32} {splat_i(32, 0x7FFFFFFF)}, {I32} {bits}")
    return b.t(f"bitcast {I32} {bits} to {F32}")


@native(r"cvt\.rn\.bf16x2\.ue8m0x2")
def from_scale(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands

    def emit(c: Code, pair: str) -> str:
        out = ZERO
        for k in range(2):
            half = to_16(
                c, _power(c, c.t(f"lshr {I32} {pair}, {splat_i(32, 8 * k)}")), "bf16", "rn"
            )
            out = c.t(f"or {I32} {out}, {c.t(f'shl {I32} {half}, {splat_i(32, 16 * k)}')}")
        return out

    b.set_i32(d, b.outlined(I32, ins.op, emit, (I32, _get(b, x, "ue8m0"))))


@native(r"cvt\.rn(\.satfinite)?(\.relu)?(\.scaled::n2::ue8m0)?\.bf16x2\.s2f6x2")
def from_fixed(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Each byte of the pair is a signed number of 64ths, multiplied by its scale factor."""
    finite, relu, scaled = (part is not None for part in m.groups())
    d, x, *factors = ins.operands
    if len(factors) != scaled:
        raise b.unsupported("a scale factor goes with .scaled::n2::ue8m0, and only with it")
    powers = b.t(f"zext {I16} {b.i16(factors[0])} to {I32}") if scaled else splat_i(32, 0x7F7F)

    def emit(c: Code, pair: str, scale: str) -> str:
        out = ZERO
        for k in range(2):
            byte = c.t(f"shl {I32} {pair}, {splat_i(32, 24 - 8 * k)}")
            whole = c.t(f"ashr {I32} {byte}, {splat_i(32, 24)}")
            value = c.t(f"sitofp {I32} {whole} to {F32}")
            value = c.t(f"fmul {F32} {value}, {splat_f32(2.0**-6)}")
            power = _power(c, c.t(f"lshr {I32} {scale}, {splat_i(32, 8 * k)}"))
            value = c.t(f"fmul {F32} {value}, {power}")
            half = to_16(c, _relu(c, value) if relu else value, "bf16", "rn")
            if finite:
                size = c.t(f"and {I32} {half}, {splat_i(32, 0x7FFF)}")
                infinite = c.t(f"icmp eq {I32} {size}, {splat_i(32, 0x7F80)}")
                largest = c.t(f"sub {I32} {half}, {splat_i(32, 1)}")
                half = c.t(f"select {I1} {infinite}, {I32} {largest}, {I32} {half}")
            out = c.t(f"or {I32} {out}, {c.t(f'shl {I32} {half}, {splat_i(32, 16 * k)}')}")
        return out

    name = f"s2f6x2{m[1] or ''}{m[2] or ''}"
    b.set_i32(d, b.outlined(I32, name, emit, (I32, _get(b, x, "s2f6")), (I32, powers)))
