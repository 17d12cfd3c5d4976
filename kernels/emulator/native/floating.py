"""Floating-point arithmetic (PTX ISA 9.1 sections 9.7.3 and 9.7.4), scalar and packed f32x2.

Directed rounding is exact without touching the host's rounding mode: the round-to-nearest result is
stepped by one ulp where the exact error (TwoSum, or a product in double) says so.
ex2, rcp, rsqrt and sqrt.approx have silicon's bits (mufu). The other approximations (lg2, sin, cos,
tanh) are computed in double and rounded once: at most 0.51 ulp from the true value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from ..ptx.ast import Instr
from .builder import V32, BlockBuilder
from .integer import put_predicate
from .ir import F32, F64, I1, I32, I64, ZERO, Code, splat_f32, splat_f64, splat_i
from .mufu import approximation
from .odd import sum_error
from .table import native

_OPS = {"add": "fadd", "sub": "fsub", "mul": "fmul"}
_INF = splat_f32(math.inf)


def flush(b: Code, x: str) -> str:
    """.ftz: subnormals become zero of the same sign."""
    bits = b.t(f"bitcast {F32} {x} to {I32}")
    magnitude = b.t(f"and {I32} {bits}, {splat_i(32, 0x7FFFFFFF)}")
    small = b.t(f"icmp ult {I32} {magnitude}, {splat_i(32, 0x00800000)}")
    sign = b.t(f"and {I32} {bits}, {splat_i(32, 0x80000000)}")
    bits = b.t(f"select {I1} {small}, {I32} {sign}, {I32} {bits}")
    return b.t(f"bitcast {I32} {bits} to {F32}")


def _step(b: Code, x: str, up: str, down: str) -> str:
    """x moved one float up where ``up``, one down where ``down`` (never both). Zero steps to the
    smallest subnormal, the largest finite number to infinity and back."""
    bits = b.t(f"bitcast {F32} {x} to {I32}")
    negative = b.t(f"icmp slt {I32} {bits}, {ZERO}")
    magnitude = b.t(f"and {I32} {bits}, {splat_i(32, 0x7FFFFFFF)}")
    is_zero = b.t(f"icmp eq {I32} {magnitude}, {ZERO}")
    moves = b.t(f"or {I1} {up}, {down}")
    grows = b.t(f"xor {I1} {up}, {negative}")  # away from zero
    delta = b.t(f"select {I1} {grows}, {I32} {splat_i(32, 1)}, {I32} {splat_i(32, -1)}")
    stepped = b.t(f"add {I32} {bits}, {delta}")
    tiny = b.t(f"select {I1} {up}, {I32} {splat_i(32, 1)}, {I32} {splat_i(32, 0x80000001)}")
    stepped = b.t(f"select {I1} {is_zero}, {I32} {tiny}, {I32} {stepped}")
    bits = b.t(f"select {I1} {moves}, {I32} {stepped}, {I32} {bits}")
    return b.t(f"bitcast {I32} {bits} to {F32}")


def directed(b: Code, rounding: str, nearest: str, error: str) -> str:
    """``nearest`` stepped so that it rounds as ``rounding``. ``error``: a double with the sign of
    exact - nearest; infinite where only ``nearest`` overflowed, NaN where nothing is to be done."""
    above = b.t(f"fcmp ogt {F64} {error}, {ZERO}")  # the exact value lies above
    below = b.t(f"fcmp olt {F64} {error}, {ZERO}")
    never = splat_i(1, 0)
    if rounding == "rp":
        return _step(b, nearest, above, never)
    if rounding == "rm":
        return _step(b, nearest, never, below)
    bits = b.t(f"bitcast {F32} {nearest} to {I32}")  # rz
    negative = b.t(f"icmp slt {I32} {bits}, {ZERO}")
    up = b.t(f"and {I1} {negative}, {above}")
    positive = b.t(f"xor {I1} {negative}, {splat_i(1, 1)}")
    return _step(b, nearest, up, b.t(f"and {I1} {positive}, {below}"))


def widen(b: Code, x: str) -> str:
    return b.t(f"fpext {F32} {x} to {F64}")


def _directed_product(b: Code, rounding: str, x: str, y: str) -> str:
    r = b.t(f"fmul {F32} {x}, {y}")
    exact = b.t(f"fmul {F64} {widen(b, x)}, {widen(b, y)}")  # 48 bits
    return directed(b, rounding, r, b.t(f"fsub {F64} {exact}, {widen(b, r)}"))


def _directed_sum(b: Code, rounding: str, x: str, y: str, r: str) -> str:
    """x + y of two doubles whose float32 sum, rounded to nearest, is ``r``."""
    s = b.t(f"fadd {F64} {x}, {y}")
    low = sum_error(b, x, y, s)
    high = b.t(f"fsub {F64} {s}, {widen(b, r)}")  # exact: r is s rounded, or next to it
    out = directed(b, rounding, r, b.t(f"fadd {F64} {high}, {low}"))
    if rounding != "rm":
        return out
    # An exact zero sum is -0 when rounding down, unless both terms are +0 (IEEE 754 section 6.3).
    cancels = b.t(f"fcmp oeq {F64} {s}, {ZERO}")
    bits = [b.t(f"bitcast {F64} {v} to {I64}") for v in (x, y)]
    either = b.t(f"or {I64} {bits[0]}, {bits[1]}")
    any_negative = b.t(f"icmp slt {I64} {either}, {ZERO}")
    minus = b.t(f"and {I1} {cancels}, {any_negative}")
    return b.t(f"select {I1} {minus}, {F32} {splat_f32(-0.0)}, {F32} {out}")


def binary(b: Code, op: str, rounding: str, x: str, y: str) -> str:
    if rounding == "rn":
        return b.t(f"{_OPS[op]} {F32} {x}, {y}")

    def emit(c: Code, x: str, y: str) -> str:
        if op == "mul":
            return _directed_product(c, rounding, x, y)
        r = c.t(f"{_OPS[op]} {F32} {x}, {y}")
        wide_y = widen(c, y)
        if op == "sub":
            wide_y = c.t(f"fneg {F64} {wide_y}")
        return _directed_sum(c, rounding, widen(c, x), wide_y, r)

    return b.outlined(F32, f"{op}.{rounding}", emit, (F32, x), (F32, y))


def fma(b: Code, rounding: str, x: str, y: str, z: str) -> str:
    if rounding == "rn":
        return b.call(F32, "llvm.fma.v32f32", (F32, x), (F32, y), (F32, z))

    def emit(c: Code, x: str, y: str, z: str) -> str:
        r = fma(c, "rn", x, y, z)
        product = c.t(f"fmul {F64} {widen(c, x)}, {widen(c, y)}")  # exact: 48 bits
        return _directed_sum(c, rounding, product, widen(c, z), r)

    return b.outlined(F32, f"fma.{rounding}", emit, (F32, x), (F32, y), (F32, z))


def _maybe_flush(b: Code, ftz: bool, x: str) -> str:
    return flush(b, x) if ftz else x


def saturate(b: Code, x: str) -> str:
    """.sat clamps to [+0, 1]; NaN becomes +0."""
    x = b.call(F32, "llvm.maximumnum.v32f32", (F32, x), (F32, splat_f32(0.0)))
    return b.call(F32, "llvm.minimumnum.v32f32", (F32, x), (F32, splat_f32(1.0)))


@native(r"(add|sub|mul)(?:\.(rn|rz|rm|rp))?(\.ftz)?(\.sat)?\.f32")
def arith(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x, y = ins.operands
    left, right = (_maybe_flush(b, bool(m[3]), b.f32(v)) for v in (x, y))
    out = _maybe_flush(b, bool(m[3]), binary(b, m[1], m[2] or "rn", left, right))
    b.set_f32(d, saturate(b, out) if m[4] else out)


@native(r"fma\.(rn|rz|rm|rp)(\.ftz)?(\.sat)?\.f32")
def fma_f32(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, *sources = ins.operands
    x, y, z = (_maybe_flush(b, bool(m[2]), b.f32(v)) for v in sources)
    out = _maybe_flush(b, bool(m[2]), fma(b, m[1], x, y, z))
    b.set_f32(d, saturate(b, out) if m[3] else out)


@native(r"(add|sub|mul)(?:\.(rn|rz|rm|rp))?(\.ftz)?\.f32x2")
@native(r"(fma)\.(rn|rz|rm|rp)(\.ftz)?\.f32x2")
def packed(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Two independent float32 operations on the halves of 64-bit registers."""
    d, *sources = ins.operands
    halves = [b.pair(v) for v in sources]
    out = []
    for k in range(2):
        args = [_maybe_flush(b, bool(m[3]), b.float32(h[k])) for h in halves]
        rounding = m[2] or "rn"
        r = fma(b, rounding, *args) if m[1] == "fma" else binary(b, m[1], rounding, *args)
        out.append(V32(f=_maybe_flush(b, bool(m[3]), r), raw=True))
    b.set_pair(d, out[0], out[1])


@native(r"(add|sub|mul)(?:\.rn)?\.f64")
@native(r"(fma)\.rn\.f64")
def arith64(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, *sources = ins.operands

    def emit(c: Code, *args: str) -> str:
        if m[1] == "fma":
            out = c.call(F64, "llvm.fma.v32f64", *((F64, v) for v in args))
        else:
            out = c.t(f"{_OPS[m[1]]} {F64} {args[0]}, {args[1]}")
        return propagate_nan64(c, out, [*args[1:], args[0]])

    b.set_f64(d, b.outlined(F64, f"{m[1]}.f64", emit, *((F64, b.f64(v)) for v in sources)))


def propagate_nan64(b: Code, out: str, sources: list[str]) -> str:
    """A NaN result is the first NaN among ``sources``, made quiet, or the negative default NaN;
    the sources come in the order b, c, a. PTX leaves it open, an H200 does so (measured)."""
    bits = splat_i(64, 0xFFF8000000000000)
    for v in reversed(sources):
        quiet = b.t(f"or {I64} {b.t(f'bitcast {F64} {v} to {I64}')}, {splat_i(64, 1 << 51)}")
        nan = b.t(f"fcmp uno {F64} {v}, {ZERO}")
        bits = b.t(f"select {I1} {nan}, {I64} {quiet}, {I64} {bits}")
    made = b.t(f"bitcast {I64} {bits} to {F64}")
    nan = b.t(f"fcmp uno {F64} {out}, {ZERO}")
    return b.t(f"select {I1} {nan}, {F64} {made}, {F64} {out}")


def min_max2(b: Code, which: str, keep_nan: bool, x: str, y: str) -> str:
    """PTX min/max order -0 below +0; without .NaN a NaN operand loses, with it it wins."""
    name = f"llvm.{which}imum{'' if keep_nan else 'num'}.v32f32"
    return b.call(F32, name, (F32, x), (F32, y))


@native(r"(min|max)(\.ftz)?(\.NaN)?()(\.abs)?\.f32")
@native(r"(min|max)(\.ftz)?(\.NaN)?(\.xorsign)(\.abs)\.f32")
def min_max(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Two or (sm_100) three sources. .xorsign is for two, .abs alone for three."""
    d, *sources = ins.operands
    if len(sources) not in ((2,) if m[4] else (3,) if m[5] else (2, 3)):
        raise b.unsupported(f"{len(sources)} sources")
    values = [_maybe_flush(b, bool(m[2]), b.f32(v)) for v in sources]
    signs = [b.t(f"bitcast {F32} {v} to {I32}") for v in values] if m[4] else []
    if m[5]:
        values = [b.call(F32, "llvm.fabs.v32f32", (F32, v)) for v in values]
    out = values[0]
    for v in values[1:]:
        out = min_max2(b, m[1], bool(m[3]), out, v)
    if signs:
        sign = b.t(f"bitcast {I32} {b.t(f'xor {I32} {signs[0]}, {signs[1]}')} to {F32}")
        out = b.call(F32, "llvm.copysign.v32f32", (F32, out), (F32, sign))
    b.set_f32(d, out)


@native(r"(neg|abs)(\.ftz)?\.f32")
def neg_abs(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    value = _maybe_flush(b, bool(m[2]), b.f32(x))
    if m[1] == "neg":
        b.set_f32(d, b.t(f"fneg {F32} {value}"))
    else:
        b.set_f32(d, b.call(F32, "llvm.fabs.v32f32", (F32, value)))


FCMP = {
    "equ": "ueq",
    "neu": "une",
    "ltu": "ult",
    "leu": "ule",
    "gtu": "ugt",
    "geu": "uge",
    "num": "ord",
    "nan": "uno",
}


@native(
    r"setp\.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)(?:\.(and|or|xor))?(\.ftz)?\.f(32)"
)
@native(r"setp\.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)(?:\.(and|or|xor))?()\.f(64)")
def setp(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    cmp = FCMP.get(m[1], "o" + m[1])
    x, y = ins.operands[1:3]
    if m[4] == "64":
        value = b.t(f"fcmp {cmp} {F64} {b.f64(x)}, {b.f64(y)}")
    else:
        left, right = (_maybe_flush(b, bool(m[3]), b.f32(v)) for v in (x, y))
        value = b.t(f"fcmp {cmp} {F32} {left}, {right}")
    put_predicate(b, ins, value, m[2])


# -- special functions -----------------------------------------------------------------------------


def exp2_f64(b: Code, x: str) -> str:
    """2**x of a float32 in double: x = n + f with |f| <= 1/2, Taylor of exp(f ln 2) to degree 9
    (relative error below 1e-11), n added to the exponent. Beyond +-200 the float32 result has
    long been infinite or zero."""
    high = b.call(F32, "llvm.minnum.v32f32", (F32, x), (F32, splat_f32(200.0)))
    held = b.call(F32, "llvm.maxnum.v32f32", (F32, high), (F32, splat_f32(-200.0)))
    n = b.call(F32, "llvm.rint.v32f32", (F32, held))
    f = widen(b, b.t(f"fsub {F32} {held}, {n}"))
    out = splat_f64(math.log(2) ** 9 / math.factorial(9))
    for k in range(8, -1, -1):
        coefficient = splat_f64(math.log(2) ** k / math.factorial(k))
        out = b.call(F64, "llvm.fma.v32f64", (F64, out), (F64, f), (F64, coefficient))
    exponent = b.t(f"sext {I32} {b.t(f'fptosi {F32} {n} to {I32}')} to {I64}")
    exponent = b.t(f"shl {I64} {exponent}, {splat_i(64, 52)}")
    bits = b.t(f"add {I64} {b.t(f'bitcast {F64} {out} to {I64}')}, {exponent}")
    return b.t(f"bitcast {I64} {bits} to {F64}")


def _narrow(b: Code, x: str) -> str:
    return b.t(f"fptrunc {F64} {x} to {F32}")


def _libm(name: str) -> Callable[[Code, str], str]:
    """In double, then rounded once. Rare in kernels: the host's libm runs lane by lane."""
    return lambda b, x: _narrow(b, b.call(F64, f"llvm.{name}.v32f64", (F64, widen(b, x))))


_FUNCTIONS: dict[str, Callable[[Code, str], str]] = {
    "lg2": _libm("log2"),
    "sin": _libm("sin"),
    "cos": _libm("cos"),
    "tanh": _libm("tanh"),
    "rcp": lambda b, x: b.t(f"fdiv {F32} {splat_f32(1.0)}, {x}"),
    "sqrt": lambda b, x: b.call(F32, "llvm.sqrt.v32f32", (F32, x)),
}


@native(r"(ex2|rcp|rsqrt|sqrt)\.approx(\.ftz)?\.f32")
def unit(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """One function of one float32, with an H200's bits."""
    d, x = ins.operands
    emit = lambda c, x: approximation(c, m[1], bool(m[2]), x)
    b.set_f32(d, b.outlined(F32, f"{m[1]}.approx{m[2] or ''}", emit, (F32, b.f32(x))))


@native(r"(lg2|sin|cos)\.approx(\.ftz)?\.f32")
@native(r"(rcp|sqrt)\.rn(\.ftz)?\.f32")
@native(r"(tanh)\.approx()\.f32")
def function(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """rcp and sqrt exactly rounded; approximations in double and rounded once, 0.51 ulp."""
    d, x = ins.operands
    ftz = bool(m[2])

    def emit(c: Code, x: str) -> str:
        return _maybe_flush(c, ftz, _FUNCTIONS[m[1]](c, _maybe_flush(c, ftz, x)))

    b.set_f32(d, b.outlined(F32, f"{m[1]}{m[2] or ''}", emit, (F32, b.f32(x))))


@native(r"div\.(rn|full|approx)(\.ftz)?\.f32")
def div(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Exactly rounded, also where silicon may be off by 2 ulp. div.approx multiplies by 1/b, which
    is zero beyond 2**126 (PTX ISA 9.1 section 9.7.3.8): then 0, or NaN for an infinite dividend."""
    d, x, y = ins.operands
    left, right = (_maybe_flush(b, bool(m[2]), b.f32(v)) for v in (x, y))
    if m[1] == "approx":
        magnitude = b.call(F32, "llvm.fabs.v32f32", (F32, right))
        huge = b.t(f"fcmp ogt {F32} {magnitude}, {splat_f32(2.0**126)}")
        signed_inf = b.call(F32, "llvm.copysign.v32f32", (F32, _INF), (F32, right))
        right = b.t(f"select {I1} {huge}, {F32} {signed_inf}, {F32} {right}")
    b.set_f32(d, _maybe_flush(b, bool(m[2]), b.t(f"fdiv {F32} {left}, {right}")))


@native(r"copysign\.f32")
def copysign(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """The sign of the first source on the magnitude of the second (PTX ISA 9.7.3.2)."""
    d, sign, magnitude = ins.operands
    s = b.t(f"and {I32} {b.i32(sign)}, {splat_i(32, 0x80000000)}")
    v = b.t(f"and {I32} {b.i32(magnitude)}, {splat_i(32, 0x7FFFFFFF)}")
    b.set_i32(d, b.t(f"or {I32} {s}, {v}"))


@native(r"testp\.(finite|infinite|notanumber|number|normal|subnormal)\.f32")
def testp(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    bits = b.t(f"and {I32} {b.i32(x)}, {splat_i(32, 0x7FFFFFFF)}")
    inf, tiny = splat_i(32, 0x7F800000), splat_i(32, 0x00800000)
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
        out = b.t(f"and {I1} {out}, {b.t(f'icmp {cmp} {I32} {bits}, {bound}')}")
    if m[1] == "normal":  # "as a special case, zeros are considered normal" (PTX ISA 9.7.3.1)
        out = b.t(f"or {I1} {out}, {b.t(f'icmp eq {I32} {bits}, {ZERO}')}")
    b.set_p(d, out)
