"""Half precision arithmetic: f16, bf16, packed pairs, and mixed with float32.

PTX ISA 9.1 sections 9.7.4, 9.7.5 and 9.7.7.2. Operands are widened, which is exact; a result is
rounded once, to nearest even. float32 holds the sums of both formats and the products of float16
well enough for that (24 bits >= 2p + 2; Figueroa, "When is double rounding innocuous?", 1995);
where it does not, double precision and rounding to odd come between (`odd`).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..ptx.ast import Instr, Operand, RegPair, Sink
from .builder import BlockBuilder
from .convert import to_16, widen_16
from .floating import FCMP, binary, exp2_f64, fma, min_max2, saturate, widen
from .integer import put_predicate
from .ir import F32, F64, I1, I16, I32, ZERO, Code, splat_f32, splat_i
from .odd import add_odd, narrow_odd
from .table import native

_MIN_NORMAL_F16 = 0x0400


def _flush(b: Code, bits: str) -> str:
    """.ftz on float16 bits: a subnormal becomes a zero of its sign."""
    magnitude = b.t(f"and {I16} {bits}, {splat_i(16, 0x7FFF)}")
    small = b.t(f"icmp ult {I16} {magnitude}, {splat_i(16, _MIN_NORMAL_F16)}")
    sign = b.t(f"and {I16} {bits}, {splat_i(16, 0x8000)}")
    return b.t(f"select {I1} {small}, {I16} {sign}, {I16} {bits}")


def _split(b: BlockBuilder, op: Operand, packed: bool) -> list[str]:
    """The 16-bit values of an operand, the lower half first."""
    if not packed:
        return [b.i16(op)]
    bits = b.i32(op)
    high = b.t(f"lshr {I32} {bits}, {splat_i(32, 16)}")
    return [b.t(f"trunc {I32} {v} to {I16}") for v in (bits, high)]


def _each(
    b: BlockBuilder, ins: Instr, packed: bool, emit: Callable[..., str], name: str = ""
) -> None:
    """Applies ``emit(code, *bits) -> bits`` to the operand, or to its two halves."""
    d, *sources = ins.operands
    columns = [_split(b, op, packed) for op in sources]
    out = [
        b.outlined(I16, name or ins.op.replace("x2", ""), emit, *((I16, v) for v in values))
        for values in zip(*columns, strict=True)
    ]
    if not packed:
        b.set_i16(d, out[0])
        return
    low, high = (b.t(f"zext {I16} {v} to {I32}") for v in out)
    b.set_i32(d, b.t(f"or {I32} {low}, {b.t(f'shl {I32} {high}, {splat_i(32, 16)}')}"))


def _bits(b: Code, x: str, fmt: str) -> str:
    """A float32 rounded to 16 bits."""
    return b.t(f"trunc {I32} {to_16(b, x, fmt, 'rn')} to {I16}")


# -- arithmetic ----------------------------------------------------------------------------------


def _float32(b: Code, op: str, fmt: str, values: list[str]) -> str:
    """The result as a float32 that rounds to the 16-bit result."""
    if op == "fma":
        x, y, z = (widen(b, v) for v in values)
        return narrow_odd(b, add_odd(b, b.t(f"fmul {F64} {x}, {y}"), z))
    x, y = values
    if op == "mul" and fmt == "bf16":  # float32 has too few exponents
        return narrow_odd(b, b.t(f"fmul {F64} {widen(b, x)}, {widen(b, y)}"))
    return binary(b, op, "rn", x, y)


@native(r"(add|sub|mul)(?:\.rn)?(\.ftz)?(\.sat)?()\.(f16)(x2)?")
@native(r"(add|sub|mul)(?:\.rn)?()()()\.(bf16)(x2)?")
@native(r"(fma)\.rn(\.ftz)?(\.sat)?()\.(f16)(x2)?")
@native(r"(fma)\.rn(\.ftz)?()(\.relu)\.(f16)(x2)?")
@native(r"(fma)\.rn()()(\.relu)?\.(bf16)(x2)?")
def arith(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    op, ftz, sat, relu, fmt, packed = m.groups()

    def emit(c: Code, *bits: str) -> str:
        bits = tuple(_flush(c, v) for v in bits) if ftz else bits
        x = _float32(c, op, fmt, [widen_16(c, v, fmt) for v in bits])
        if sat:
            x = saturate(c, x)
        if relu:  # negative becomes +0, NaN stays
            x = c.call(F32, "llvm.maximum.v32f32", (F32, x), (F32, splat_f32(0.0)))
        out = _bits(c, x, fmt)
        return _flush(c, out) if ftz else out

    _each(b, ins, bool(packed), emit)


@native(r"(min|max)(\.ftz)?(\.NaN)?(\.xorsign\.abs)?\.(f16)(x2)?")
@native(r"(min|max)()(\.NaN)?(\.xorsign\.abs)?\.(bf16)(x2)?")
def min_max(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    which, ftz, keep_nan, xorsign, fmt, packed = m.groups()

    def emit(c: Code, x: str, y: str) -> str:
        if ftz:
            x, y = _flush(c, x), _flush(c, y)
        values = [widen_16(c, v, fmt) for v in (x, y)]
        if xorsign:
            values = [c.call(F32, "llvm.fabs.v32f32", (F32, v)) for v in values]
        out = _bits(c, min_max2(c, which, bool(keep_nan), *values), fmt)
        if not xorsign:
            return out
        sign = c.t(f"and {I16} {c.t(f'xor {I16} {x}, {y}')}, {splat_i(16, 0x8000)}")
        nan = c.t(f"icmp eq {I16} {out}, {splat_i(16, 0x7FFF)}")  # then the sign is ignored
        sign = c.t(f"select {I1} {nan}, {I16} {ZERO}, {I16} {sign}")
        return c.t(f"or {I16} {out}, {sign}")

    _each(b, ins, bool(packed), emit)


@native(r"(neg|abs)(\.ftz)?\.(f16)(x2)?")
@native(r"(neg|abs)()\.(bf16)(x2)?")
def neg_abs(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """NaN: PTX leaves its payload open, an H200 gives the canonical one."""
    op, ftz, fmt, packed = m.groups()

    def emit(c: Code, x: str) -> str:
        x = _flush(c, x) if ftz else x
        magnitude = c.t(f"and {I16} {x}, {splat_i(16, 0x7FFF)}")
        inf = splat_i(16, 0x7C00 if fmt == "f16" else 0x7F80)
        nan = c.t(f"icmp ugt {I16} {magnitude}, {inf}")
        out = magnitude if op == "abs" else c.t(f"xor {I16} {x}, {splat_i(16, 0x8000)}")
        return c.t(f"select {I1} {nan}, {I16} {splat_i(16, 0x7FFF)}, {I16} {out}")

    _each(b, ins, bool(packed), emit)


_COMPARE = r"setp\.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)(?:\.(and|or|xor))?"


@native(_COMPARE + r"(\.ftz)?\.(f16)(x2)?")
@native(_COMPARE + r"()\.(bf16)(x2)?")
def setp(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Of pairs, ``p|q`` are the results for the lower and the upper half."""
    comparison, combine, ftz, fmt, packed = m.groups()
    d = ins.operands[0]
    columns = [_split(b, op, bool(packed)) for op in ins.operands[1:3]]
    results = []
    for values in zip(*columns, strict=True):
        x, y = (widen_16(b, _flush(b, v) if ftz else v, fmt) for v in values)
        results.append(b.t(f"fcmp {FCMP.get(comparison, 'o' + comparison)} {F32} {x}, {y}"))
    if not packed:
        if isinstance(d, RegPair):
            raise b.unsupported("two destinations")
        put_predicate(b, ins, results[0], combine)
        return
    if not isinstance(d, RegPair):
        raise b.unsupported("one destination")
    extra = b.p(ins.operands[3]) if combine else None
    for target, value in zip((d.first, d.second), results, strict=True):
        if combine:
            value = b.t(f"{combine} {I1} {value}, {extra}")
        if not isinstance(target, Sink):
            b.set_p(target, value)


# -- functions -----------------------------------------------------------------------------------


@native(r"(ex2|tanh)\.approx()\.(f16)(x2)?")
@native(r"(ex2)\.approx(\.ftz)\.(bf16)(x2)?")
@native(r"(tanh)\.approx()\.(bf16)(x2)?")
def function(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Within 0.51 ulp of the true value. bfloat16's subnormals are those of float32: .ftz makes
    2**x of one 1 and of a large negative number 0."""
    name, ftz, fmt, packed = m.groups()

    def emit(c: Code, bits: str) -> str:
        x = widen_16(c, bits, fmt)
        if name == "tanh":
            y = c.call(F64, "llvm.tanh.v32f64", (F64, widen(c, x)))
        else:
            y = exp2_f64(c, x)
        y = narrow_odd(c, y)
        nan = c.t(f"fcmp uno {F32} {x}, {ZERO}")
        out = _bits(c, c.t(f"select {I1} {nan}, {F32} {x}, {F32} {y}"), fmt)
        if not ftz:
            return out
        small = c.t(f"icmp ult {I16} {out}, {splat_i(16, 0x0080)}")
        return c.t(f"select {I1} {small}, {I16} {ZERO}, {I16} {out}")

    _each(b, ins, bool(packed), emit)


# -- with float32 --------------------------------------------------------------------------------


@native(r"(add|sub)(?:\.(rn|rz|rm|rp))?(\.sat)?\.f32\.(f16|bf16)")
@native(r"(fma)\.(rn|rz|rm|rp)(\.sat)?\.f32\.(f16|bf16)")
def mixed(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """The 16-bit operands come first; the last and the result are float32."""
    d, *narrow, last = ins.operands
    op, rounding, sat, fmt = m.groups()
    x, *y = (widen_16(b, b.i16(v), fmt) for v in narrow)
    if op == "fma":
        out = fma(b, rounding, x, y[0], b.f32(last))
    else:
        out = binary(b, op, rounding or "rn", x, b.f32(last))
    b.set_f32(d, saturate(b, out) if sat else out)
