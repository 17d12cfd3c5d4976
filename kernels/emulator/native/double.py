"""Double precision beyond add, mul and fma (PTX ISA 9.1 section 9.7.3).

NaN results: PTX leaves the payload open; what is done here was measured on an H200.
"""

from __future__ import annotations

import re

from ..ptx.ast import Instr
from .builder import BlockBuilder
from .floating import propagate_nan64
from .ir import F64, I1, I64, ZERO, Code, splat_f64, splat_i
from .odd import sum_error
from .table import native

_SIGN, _MAGNITUDE = splat_i(64, 1 << 63), splat_i(64, (1 << 63) - 1)
_UPPER_WORD = splat_i(64, 0xFFFFFFFF00000000)
_NAN = splat_i(64, 0x7FFFFFFF00000000)  # of the gross approximations (sections 9.7.3.14 and .17)


def _step(b: Code, x: str, up: str, down: str) -> str:
    """x moved one double up where ``up``, one down where ``down``; x is not zero there."""
    bits = b.t(f"bitcast {F64} {x} to {I64}")
    negative = b.t(f"icmp slt {I64} {bits}, {ZERO}")
    moves = b.t(f"or {I1} {up}, {down}")
    grows = b.t(f"xor {I1} {up}, {negative}")
    delta = b.t(f"select {I1} {grows}, {I64} {splat_i(64, 1)}, {I64} {splat_i(64, -1)}")
    bits_moved = b.t(f"add {I64} {bits}, {delta}")
    bits = b.t(f"select {I1} {moves}, {I64} {bits_moved}, {I64} {bits}")
    return b.t(f"bitcast {I64} {bits} to {F64}")


def _directed_sum(b: Code, rounding: str, x: str, y: str) -> str:
    """The sum to nearest, stepped where the exact error says so. It is never subnormal and inexact;
    where it overflows although both terms are finite, a step back gives the largest number."""
    s = b.t(f"fadd {F64} {x}, {y}")
    error = sum_error(b, x, y, s)
    above = b.t(f"fcmp ogt {F64} {error}, {ZERO}")
    below = b.t(f"fcmp olt {F64} {error}, {ZERO}")
    bits = b.t(f"bitcast {F64} {s} to {I64}")
    negative = b.t(f"icmp slt {I64} {bits}, {ZERO}")
    positive = b.t(f"xor {I1} {negative}, {splat_i(1, 1)}")
    sizes = [b.call(F64, "llvm.fabs.v32f64", (F64, v)) for v in (s, x, y)]
    infinite = [b.t(f"fcmp oeq {F64} {v}, {splat_f64(float('inf'))}") for v in sizes]
    given = b.t(f"or {I1} {infinite[1]}, {infinite[2]}")
    overflow = b.t(f"and {I1} {infinite[0]}, {b.t(f'xor {I1} {given}, {splat_i(1, 1)}')}")
    above = b.t(f"or {I1} {above}, {b.t(f'and {I1} {overflow}, {negative}')}")
    below = b.t(f"or {I1} {below}, {b.t(f'and {I1} {overflow}, {positive}')}")
    never = splat_i(1, 0)
    if rounding == "rp":
        return _step(b, s, above, never)
    if rounding == "rz":
        return _step(
            b, s, b.t(f"and {I1} {negative}, {above}"), b.t(f"and {I1} {positive}, {below}")
        )
    out = _step(b, s, never, below)
    # An exact zero sum is -0 when rounding down, unless both terms are +0 (IEEE 754 section 6.3).
    terms = [b.t(f"bitcast {F64} {v} to {I64}") for v in (x, y)]
    any_negative = b.t(f"icmp slt {I64} {b.t(f'or {I64} {terms[0]}, {terms[1]}')}, {ZERO}")
    minus = b.t(f"and {I1} {b.t(f'fcmp oeq {F64} {s}, {ZERO}')}, {any_negative}")
    return b.t(f"select {I1} {minus}, {F64} {splat_f64(-0.0)}, {F64} {out}")


@native(r"(add|sub)\.(rz|rm|rp)\.f64")
def directed_sum(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x, y = ins.operands

    def emit(c: Code, x: str, y: str) -> str:
        right = c.t(f"fneg {F64} {y}") if m[1] == "sub" else y
        return propagate_nan64(c, _directed_sum(c, m[2], x, right), [y, x])

    b.set_f64(d, b.outlined(F64, ins.op, emit, (F64, b.f64(x)), (F64, b.f64(y))))


@native(r"(div|rcp|sqrt)\.rn\.f64")
def exact(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, *sources = ins.operands

    def emit(c: Code, x: str, y: str = "") -> str:
        if m[1] == "sqrt":
            out = c.call(F64, "llvm.sqrt.v32f64", (F64, x))
        else:
            terms = (splat_f64(1.0), x) if m[1] == "rcp" else (x, y)
            out = c.t(f"fdiv {F64} {terms[0]}, {terms[1]}")
        return propagate_nan64(c, out, [x, y] if y else [x])

    b.set_f64(d, b.outlined(F64, ins.op, emit, *((F64, b.f64(v)) for v in sources)))


@native(r"(neg|abs)\.f64")
def neg_abs(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """A NaN becomes quiet and keeps the rest of its bits, the sign too."""
    d, x = ins.operands
    op, mask = ("xor", _SIGN) if m[1] == "neg" else ("and", _MAGNITUDE)

    def emit(c: Code, x: str) -> str:
        out = c.t(f"{op} {I64} {c.t(f'bitcast {F64} {x} to {I64}')}, {mask}")
        return propagate_nan64(c, c.t(f"bitcast {I64} {out} to {F64}"), [x])

    b.set_f64(d, b.outlined(F64, ins.op, emit, (F64, b.f64(x))))


@native(r"copysign\.f64")
def copysign(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """The sign of the first source on the magnitude of the second (PTX ISA 9.7.3.2)."""
    d, sign, magnitude = ins.operands
    s = b.t(f"and {I64} {b.i64(sign)}, {_SIGN}")
    b.set_i64(d, b.t(f"or {I64} {s}, {b.t(f'and {I64} {b.i64(magnitude)}, {_MAGNITUDE}')}"))


@native(r"(min|max)\.f64")
def min_max(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """-0 is below +0; a NaN loses, of two the second stays."""
    d, x, y = ins.operands

    def emit(c: Code, x: str, y: str) -> str:
        out = c.call(F64, f"llvm.{m[1]}imumnum.v32f64", (F64, x), (F64, y))
        return propagate_nan64(c, out, [y, x])

    b.set_f64(d, b.outlined(F64, ins.op, emit, (F64, b.f64(x)), (F64, b.f64(y))))


@native(r"testp\.(finite|infinite|notanumber|number|normal|subnormal)\.f64")
def testp(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    bits = b.t(f"and {I64} {b.i64(x)}, {_MAGNITUDE}")
    inf, tiny = splat_i(64, 0x7FF0 << 48), splat_i(64, 0x0010 << 48)
    tests = {
        "finite": [("ult", inf)],
        "infinite": [("eq", inf)],
        "notanumber": [("ugt", inf)],
        "number": [("ule", inf)],
        "normal": [("ult", inf), ("uge", tiny)],  # or zero, below
        "subnormal": [("ult", tiny), ("ne", ZERO)],
    }[m[1]]
    out = splat_i(1, 1)
    for cmp, bound in tests:
        out = b.t(f"and {I1} {out}, {b.t(f'icmp {cmp} {I64} {bits}, {bound}')}")
    if m[1] == "normal":  # "as a special case, zeros are considered normal" (PTX ISA 9.7.3.1)
        out = b.t(f"or {I1} {out}, {b.t(f'icmp eq {I64} {bits}, {ZERO}')}")
    b.set_p(d, out)


@native(r"(rcp|rsqrt)\.approx\.ftz\.f64")
@native(r"(rsqrt)\.approx\.f64")
def approximation(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """.ftz: a gross approximation of the upper word's value, itself an upper word (sections
    9.7.3.14 and 9.7.3.17). Without: of the value, within 1 ulp, far better than silicon's 2**-23.
    """
    d, x = ins.operands
    gross = ins.op.endswith("ftz.f64")

    def emit(c: Code, x: str) -> str:
        bits = c.t(f"bitcast {F64} {x} to {I64}")
        if gross:
            bits = _flush(c, c.t(f"and {I64} {bits}, {_UPPER_WORD}"))
        value = c.t(f"bitcast {I64} {bits} to {F64}")
        if m[1] == "rsqrt":
            # -0 gives -infinity: its root is -0.
            value = c.call(F64, "llvm.sqrt.v32f64", (F64, value))
        out = c.t(f"fdiv {F64} {splat_f64(1.0)}, {value}")
        if not gross:
            return propagate_nan64(c, out, [x])
        result = c.t(f"and {I64} {c.t(f'bitcast {F64} {out} to {I64}')}, {_UPPER_WORD}")
        nan = c.t(f"fcmp uno {F64} {out}, {ZERO}")
        result = c.t(f"select {I1} {nan}, {I64} {_NAN}, {I64} {_flush(c, result)}")
        return c.t(f"bitcast {I64} {result} to {F64}")

    b.set_f64(d, b.outlined(F64, ins.op, emit, (F64, b.f64(x))))


def _flush(b: Code, bits: str) -> str:
    """.ftz: a subnormal double becomes a zero of its sign."""
    magnitude = b.t(f"and {I64} {bits}, {_MAGNITUDE}")
    small = b.t(f"icmp ult {I64} {magnitude}, {splat_i(64, 1 << 52)}")
    sign = b.t(f"and {I64} {bits}, {_SIGN}")
    return b.t(f"select {I1} {small}, {I64} {sign}, {I64} {bits}")
