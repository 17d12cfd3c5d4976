"""cvt to and from pairs of 8-bit floats, e4m3 and e5m2 (PTX ISA 9.1 section 9.7.9.21).

e4m3: 4 bits of exponent (bias 7), 3 of fraction, no infinity, NaN 0x7f, largest 448.
e5m2: 5 and 2 bits, the upper half of a float16; .satfinite never gives infinity, largest 57344.
"""

from __future__ import annotations

import re

from ..ptx.ast import Instr
from .builder import BlockBuilder
from .convert import to_16, widen_16
from .ir import F32, I1, I16, I32, ZERO, Code, splat_f32, splat_i
from .table import native

_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
_FRACTION_BITS = {"e4m3": 3, "e5m2": 2}
_MIN_EXPONENT = {"e4m3": -6, "e5m2": -14}  # of a normal number
_CODE_OF_LARGEST = {"e4m3": 0x7E, "e5m2": 0x7B}
_NAN = {"e4m3": 0x7F, "e5m2": 0x7F}


def _encode(b: Code, x: str, fmt: str) -> str:
    """float32 -> 8 bits in the low byte of 32, to nearest even, at most the largest number.

    Adding 1.5 * 2**(e + 23 - p), e the exponent of x, rounds x to p bits of fraction. What is then
    a whole number of units of the last place is a code, as exponent and fraction are adjacent.
    """
    p, emin = _FRACTION_BITS[fmt], _MIN_EXPONENT[fmt]
    bits = b.t(f"bitcast {F32} {x} to {I32}")
    magnitude = b.t(f"and {I32} {bits}, {splat_i(32, 0x7FFFFFFF)}")
    exponent = b.t(f"lshr {I32} {magnitude}, {splat_i(32, 23)}")
    low = splat_i(32, 127 + emin)
    exponent = b.call(I32, "llvm.smax.v32i32", (I32, exponent), (I32, low))
    exponent = b.call(I32, "llvm.smin.v32i32", (I32, exponent), (I32, splat_i(32, 127 + 16)))
    # Units of the last place: x / 2**(e - p), exact, then rounded to a whole number.
    scale = b.t(f"sub {I32} {splat_i(32, 254 + p)}, {exponent}")
    scale = b.t(f"bitcast {I32} {b.t(f'shl {I32} {scale}, {splat_i(32, 23)}')} to {F32}")
    size = b.t(f"bitcast {I32} {magnitude} to {F32}")
    size = b.call(F32, "llvm.minnum.v32f32", (F32, size), (F32, splat_f32(2.0 * _LARGEST[fmt])))
    units = b.call(F32, "llvm.rint.v32f32", (F32, b.t(f"fmul {F32} {size}, {scale}")))
    units = b.t(f"fptosi {F32} {units} to {I32}")
    # Code = (e - emin) * 2**p + units, where a normal number has at least 2**p units.
    steps = b.t(f"shl {I32} {b.t(f'sub {I32} {exponent}, {low}')}, {splat_i(32, p)}")
    code = b.t(f"add {I32} {steps}, {units}")
    top = splat_i(32, _CODE_OF_LARGEST[fmt])
    code = b.call(I32, "llvm.smin.v32i32", (I32, code), (I32, top))
    sign = b.t(f"and {I32} {b.t(f'lshr {I32} {bits}, {splat_i(32, 24)}')}, {splat_i(32, 0x80)}")
    code = b.t(f"or {I32} {code}, {sign}")
    nan = b.t(f"fcmp uno {F32} {x}, {ZERO}")
    return b.t(f"select {I1} {nan}, {I32} {splat_i(32, _NAN[fmt])}, {I32} {code}")


def _decode(b: Code, code: str, fmt: str) -> str:
    """The low byte of 32 bits -> float32, exact; NaN stays NaN."""
    bias = 1 - _MIN_EXPONENT[fmt]
    p = _FRACTION_BITS[fmt]
    sign = b.t(f"shl {I32} {b.t(f'and {I32} {code}, {splat_i(32, 0x80)}')}, {splat_i(32, 24)}")
    body = b.t(f"and {I32} {code}, {splat_i(32, 0x7F)}")
    # Put into float32's fields the exponent is too small by 127 - bias: subnormals come out right.
    placed = b.t(f"shl {I32} {body}, {splat_i(32, 23 - p)}")
    placed = b.t(f"bitcast {I32} {placed} to {F32}")
    size = b.t(f"fmul {F32} {placed}, {splat_f32(2.0 ** (127 - bias))}")
    first = 0x7C if fmt == "e5m2" else 0x7F  # infinity, or NaN
    beyond = b.t(f"icmp uge {I32} {body}, {splat_i(32, first)}")
    fraction = b.t(f"shl {I32} {b.t(f'sub {I32} {body}, {splat_i(32, 0x7C)}')}, {splat_i(32, 21)}")
    special = b.t(f"or {I32} {fraction}, {splat_i(32, 0x7F800000)}")
    bits = b.t(f"bitcast {F32} {size} to {I32}")
    bits = b.t(f"select {I1} {beyond}, {I32} {special}, {I32} {bits}")
    return b.t(f"bitcast {I32} {b.t(f'or {I32} {bits}, {sign}')} to {F32}")


def _relu(b: Code, x: str) -> str:
    """Negative becomes +0, NaN stays."""
    return b.call(F32, "llvm.maximum.v32f32", (F32, x), (F32, splat_f32(0.0)))


@native(r"cvt\.rn\.satfinite(\.relu)?\.(e4m3|e5m2)x2\.(f32)")
@native(r"cvt\.rn\.satfinite(\.relu)?\.(e4m3|e5m2)x2\.(f16|bf16)x2")
def to_fp8(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Of two float32, the first goes to the upper byte; of a pair, each half to its byte."""
    d, *sources = ins.operands
    relu, fmt, from_ = m.groups()

    def emit(c: Code, high: str, low: str) -> str:
        if relu:
            high, low = _relu(c, high), _relu(c, low)
        upper = c.t(f"shl {I32} {_encode(c, high, fmt)}, {splat_i(32, 8)}")
        return c.t(f"or {I32} {upper}, {_encode(c, low, fmt)}")

    if from_ == "f32":
        high, low = (b.f32(v) for v in sources)
    else:
        bits = b.i32(*sources)
        upper = b.t(f"lshr {I32} {bits}, {splat_i(32, 16)}")
        parts = [b.t(f"trunc {I32} {v} to {I16}") for v in (upper, bits)]
        high, low = (widen_16(b, v, from_) for v in parts)
    name = f"{fmt}x2{relu or ''}"
    out = b.outlined(I32, name, emit, (F32, high), (F32, low))
    b.set_i16(d, b.t(f"trunc {I32} {out} to {I16}"))


@native(r"cvt\.rn(\.relu)?\.(f16)x2\.(e4m3|e5m2)x2")
def from_fp8(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    relu, to, fmt = m.groups()

    def emit(c: Code, pair: str) -> str:
        out = ZERO
        for byte in range(2):
            value = _decode(c, c.t(f"lshr {I32} {pair}, {splat_i(32, 8 * byte)}"), fmt)
            half = to_16(c, _relu(c, value) if relu else value, to, "rn")
            out = c.t(f"or {I32} {out}, {c.t(f'shl {I32} {half}, {splat_i(32, 16 * byte)}')}")
        return out

    bits = b.t(f"zext {I16} {b.i16(x)} to {I32}")
    b.set_i32(d, b.outlined(I32, ins.op, emit, (I32, bits)))
