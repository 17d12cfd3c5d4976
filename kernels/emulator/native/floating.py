"""Floating-point arithmetic (PTX ISA 9.1 sections 9.7.3 and 9.7.4), scalar and packed f32x2.

Directed rounding is exact without touching the host's rounding mode: the round-to-nearest result is
stepped by one ulp where the exact error (TwoSum, or a product in double) says so.
Approximations (ex2, lg2, rcp, ...) are computed in double and rounded once: at most 0.51 ulp from
the true value. Silicon is within 2 ulp (PTX ISA 9.7.3.21); its exact bits are not modelled here.
"""

from __future__ import annotations

import math
import re

from ..ptx.ast import Instr
from .builder import F32, F64, I1, I32, I64, V32, BlockBuilder, splat_f32, splat_f64, splat_i
from .integer import put_predicate
from .table import native

_ZERO = "zeroinitializer"
_OPS = {"add": "fadd", "sub": "fsub", "mul": "fmul"}


def flush(b: BlockBuilder, x: str) -> str:
    """.ftz: subnormals become zero of the same sign."""
    bits = b.t(f"bitcast {F32} {x} to {I32}")
    magnitude = b.t(f"and {I32} {bits}, {splat_i(32, 0x7FFFFFFF)}")
    small = b.t(f"icmp ult {I32} {magnitude}, {splat_i(32, 0x00800000)}")
    sign = b.t(f"and {I32} {bits}, {splat_i(32, 0x80000000)}")
    bits = b.t(f"select {I1} {small}, {I32} {sign}, {I32} {bits}")
    return b.t(f"bitcast {I32} {bits} to {F32}")


def _step(b: BlockBuilder, x: str, up: str, down: str) -> str:
    """x moved one float up where ``up``, one down where ``down`` (never both); zero steps to the
    smallest subnormal; infinities and NaN stay."""
    bits = b.t(f"bitcast {F32} {x} to {I32}")
    negative = b.t(f"icmp slt {I32} {bits}, {_ZERO}")
    magnitude = b.t(f"and {I32} {bits}, {splat_i(32, 0x7FFFFFFF)}")
    is_zero = b.t(f"icmp eq {I32} {magnitude}, {_ZERO}")
    finite = b.t(f"icmp ult {I32} {magnitude}, {splat_i(32, 0x7F800000)}")
    moves = b.t(f"and {I1} {b.t(f'or {I1} {up}, {down}')}, {finite}")
    grows = b.t(f"xor {I1} {up}, {negative}")  # away from zero
    delta = b.t(f"select {I1} {grows}, {I32} {splat_i(32, 1)}, {I32} {splat_i(32, -1)}")
    stepped = b.t(f"add {I32} {bits}, {delta}")
    tiny = b.t(f"select {I1} {up}, {I32} {splat_i(32, 1)}, {I32} {splat_i(32, 0x80000001)}")
    stepped = b.t(f"select {I1} {is_zero}, {I32} {tiny}, {I32} {stepped}")
    bits = b.t(f"select {I1} {moves}, {I32} {stepped}, {I32} {bits}")
    return b.t(f"bitcast {I32} {bits} to {F32}")


def _directed(b: BlockBuilder, rounding: str, nearest: str, error: str, ty: str) -> str:
    """``nearest`` stepped so that it rounds as ``rounding``, given the sign of exact - nearest."""
    above = b.t(f"fcmp ogt {ty} {error}, {_ZERO}")  # the exact value lies above
    below = b.t(f"fcmp olt {ty} {error}, {_ZERO}")
    never = splat_i(1, 0)
    if rounding == "rp":
        return _step(b, nearest, above, never)
    if rounding == "rm":
        return _step(b, nearest, never, below)
    bits = b.t(f"bitcast {F32} {nearest} to {I32}")  # rz
    negative = b.t(f"icmp slt {I32} {bits}, {_ZERO}")
    up = b.t(f"and {I1} {negative}, {above}")
    positive = b.t(f"xor {I1} {negative}, {splat_i(1, 1)}")
    return _step(b, nearest, up, b.t(f"and {I1} {positive}, {below}"))


def _sum_error(b: BlockBuilder, ty: str, x: str, y: str, s: str) -> str:
    """Knuth's TwoSum: exact (x + y) - s."""
    t = b.t(f"fsub {ty} {s}, {x}")
    left = b.t(f"fsub {ty} {x}, {b.t(f'fsub {ty} {s}, {t}')}")
    return b.t(f"fadd {ty} {left}, {b.t(f'fsub {ty} {y}, {t}')}")


def _widen(b: BlockBuilder, x: str) -> str:
    return b.t(f"fpext {F32} {x} to {F64}")


def binary(b: BlockBuilder, op: str, rounding: str, x: str, y: str) -> str:
    r = b.t(f"{_OPS[op]} {F32} {x}, {y}")
    if rounding == "rn":
        return r
    if op == "mul":
        exact = b.t(f"fmul {F64} {_widen(b, x)}, {_widen(b, y)}")
        return _directed(b, rounding, r, b.t(f"fsub {F64} {exact}, {_widen(b, r)}"), F64)
    if op == "sub":
        y = b.t(f"fneg {F32} {y}")
    stepped = _directed(b, rounding, r, _sum_error(b, F32, x, y, r), F32)
    if rounding != "rm":
        return stepped
    # An exact zero sum of non-zero or unlike-signed operands is -0 when rounding down (IEEE 754 6.3).
    zero = b.t(f"fcmp oeq {F32} {stepped}, {_ZERO}")
    either = b.t(
        f"or {I32} {b.t(f'bitcast {F32} {x} to {I32}')}, {b.t(f'bitcast {F32} {y} to {I32}')}"
    )
    exact_zero = b.t(f"fcmp oeq {F32} {x}, {b.t(f'fneg {F32} {y}')}")
    zero = b.t(f"and {I1} {zero}, {exact_zero}")
    any_negative = b.t(f"icmp slt {I32} {either}, {_ZERO}")
    minus = b.t(f"and {I1} {zero}, {any_negative}")
    return b.t(f"select {I1} {minus}, {F32} {splat_f32(-0.0)}, {F32} {stepped}")


def fma(b: BlockBuilder, rounding: str, x: str, y: str, z: str) -> str:
    r = b.call(F32, "llvm.fma.v32f32", (F32, x), (F32, y), (F32, z))
    if rounding == "rn":
        return r
    product = b.t(f"fmul {F64} {_widen(b, x)}, {_widen(b, y)}")  # exact: 48 bits
    wide_z = _widen(b, z)
    s = b.t(f"fadd {F64} {product}, {wide_z}")
    low = _sum_error(b, F64, product, wide_z, s)
    high = b.t(f"fsub {F64} {s}, {_widen(b, r)}")  # exact: r is s rounded
    error = b.t(f"fadd {F64} {high}, {low}")
    return _directed(b, rounding, r, error, F64)


def _maybe_flush(b: BlockBuilder, ftz: bool, x: str) -> str:
    return flush(b, x) if ftz else x


def _saturate(b: BlockBuilder, x: str) -> str:
    """.sat clamps to [0, 1]; NaN becomes +0."""
    x = b.call(F32, "llvm.maxnum.v32f32", (F32, x), (F32, splat_f32(0.0)))
    return b.call(F32, "llvm.minnum.v32f32", (F32, x), (F32, splat_f32(1.0)))


@native(r"(add|sub|mul)(?:\.(rn|rz|rm|rp))?(\.ftz)?(\.sat)?\.f32")
def arith(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x, y = ins.operands
    left, right = (_maybe_flush(b, bool(m[3]), b.f32(v)) for v in (x, y))
    out = _maybe_flush(b, bool(m[3]), binary(b, m[1], m[2] or "rn", left, right))
    b.set_f32(d, _saturate(b, out) if m[4] else out)


@native(r"fma\.(rn|rz|rm|rp)(\.ftz)?(\.sat)?\.f32")
def fma_f32(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, *sources = ins.operands
    x, y, z = (_maybe_flush(b, bool(m[2]), b.f32(v)) for v in sources)
    out = _maybe_flush(b, bool(m[2]), fma(b, m[1], x, y, z))
    b.set_f32(d, _saturate(b, out) if m[3] else out)


@native(r"(add|sub|mul|fma)(?:\.(rn|rz|rm|rp))?(\.ftz)?\.f32x2")
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


@native(r"(add|sub|mul|fma)(?:\.rn)?\.f64")
def arith64(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, *sources = ins.operands
    args = [b.f64(v) for v in sources]
    if m[1] == "fma":
        b.set_f64(d, b.call(F64, "llvm.fma.v32f64", *((F64, v) for v in args)))
    else:
        b.set_f64(d, b.t(f"{_OPS[m[1]]} {F64} {args[0]}, {args[1]}"))


def min_max2(b: BlockBuilder, which: str, keep_nan: bool, x: str, y: str) -> str:
    """PTX min/max order -0 below +0; without .NaN a NaN operand loses, with it it wins."""
    name = f"llvm.{which}imum{'' if keep_nan else 'num'}.v32f32"
    return b.call(F32, name, (F32, x), (F32, y))


@native(r"(min|max)(\.ftz)?(\.NaN)?(\.abs)?\.f32")
def min_max(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Two or (sm_100) three sources."""
    d, *sources = ins.operands
    values = [_maybe_flush(b, bool(m[2]), b.f32(v)) for v in sources]
    if m[4]:
        values = [b.call(F32, "llvm.fabs.v32f32", (F32, v)) for v in values]
    out = values[0]
    for v in values[1:]:
        out = min_max2(b, m[1], bool(m[3]), out, v)
    b.set_f32(d, out)


@native(r"(neg|abs)(\.ftz)?\.f32")
def neg_abs(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    value = _maybe_flush(b, bool(m[2]), b.f32(x))
    if m[1] == "neg":
        b.set_f32(d, b.t(f"fneg {F32} {value}"))
    else:
        b.set_f32(d, b.call(F32, "llvm.fabs.v32f32", (F32, value)))


_FCMP = {
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
    r"setp\.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)(?:\.(and|or|xor))?(\.ftz)?\.f(32|64)"
)
def setp(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    cmp = _FCMP.get(m[1], "o" + m[1])
    x, y = ins.operands[1:3]
    if m[4] == "64":
        value = b.t(f"fcmp {cmp} {F64} {b.f64(x)}, {b.f64(y)}")
    else:
        left, right = (_maybe_flush(b, bool(m[3]), b.f32(v)) for v in (x, y))
        value = b.t(f"fcmp {cmp} {F32} {left}, {right}")
    put_predicate(b, ins, value, m[2])


# -- special functions -----------------------------------------------------------------------------


def exp2_f64(b: BlockBuilder, x: str) -> str:
    """2**x of a float32 in double: x = n + f with |f| <= 1/2, Taylor of exp(f ln 2) to degree 9
    (relative error below 1e-11), n added to the exponent. Beyond +-200 the float32 result has
    long been infinite or zero."""
    high = b.call(F32, "llvm.minnum.v32f32", (F32, x), (F32, splat_f32(200.0)))
    held = b.call(F32, "llvm.maxnum.v32f32", (F32, high), (F32, splat_f32(-200.0)))
    n = b.call(F32, "llvm.rint.v32f32", (F32, held))
    f = _widen(b, b.t(f"fsub {F32} {held}, {n}"))
    out = splat_f64(math.log(2) ** 9 / math.factorial(9))
    for k in range(8, -1, -1):
        coefficient = splat_f64(math.log(2) ** k / math.factorial(k))
        out = b.call(F64, "llvm.fma.v32f64", (F64, out), (F64, f), (F64, coefficient))
    exponent = b.t(f"sext {I32} {b.t(f'fptosi {F32} {n} to {I32}')} to {I64}")
    exponent = b.t(f"shl {I64} {exponent}, {splat_i(64, 52)}")
    bits = b.t(f"add {I64} {b.t(f'bitcast {F64} {out} to {I64}')}, {exponent}")
    return b.t(f"bitcast {I64} {bits} to {F64}")


@native(r"ex2\.approx(\.ftz)?\.f32")
def ex2(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, source = ins.operands
    x = b.f32(source)
    if m[1]:
        x = flush(b, x)
    out = b.t(f"fptrunc {F64} {exp2_f64(b, x)} to {F32}")
    if m[1]:
        out = flush(b, out)
    nan = b.t(f"fcmp uno {F32} {x}, {_ZERO}")
    b.set_f32(d, b.t(f"select {I1} {nan}, {F32} {x}, {F32} {out}"))


_UNARY = {"lg2": "log2", "sin": "sin", "cos": "cos", "tanh": "tanh", "sqrt": "sqrt"}


@native(r"(lg2|sin|cos|tanh|sqrt)\.approx(\.ftz)?\.f32")
def unary(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """In double, then rounded once. Rare in kernels: the host's libm runs lane by lane."""
    d, x = ins.operands
    wide = _widen(b, _maybe_flush(b, bool(m[2]), b.f32(x)))
    wide = b.call(F64, f"llvm.{_UNARY[m[1]]}.v32f64", (F64, wide))
    out = b.t(f"fptrunc {F64} {wide} to {F32}")
    b.set_f32(d, _maybe_flush(b, bool(m[2]), out))


@native(r"sqrt\.rn(\.ftz)?\.f32")
def sqrt_rn(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    value = _maybe_flush(b, bool(m[1]), b.f32(x))
    b.set_f32(d, _maybe_flush(b, bool(m[1]), b.call(F32, "llvm.sqrt.v32f32", (F32, value))))


def _reciprocal(b: BlockBuilder, x: str, root: bool) -> str:
    wide = _widen(b, x)
    if root:
        wide = b.call(F64, "llvm.sqrt.v32f64", (F64, wide))
    return b.t(f"fptrunc {F64} {b.t(f'fdiv {F64} {splat_f64(1.0)}, {wide}')} to {F32}")


@native(r"(rcp|rsqrt)\.(?:approx|rn)(\.ftz)?\.f32")
def reciprocal(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """1/x and 1/sqrt(x) in double, rounded once: rcp.rn exactly so, the approximations within ulps."""
    if m[1] == "rsqrt" and ".rn" in ins.op:
        raise b.unsupported("rsqrt has no .rn form")
    d, x = ins.operands
    value = _maybe_flush(b, bool(m[2]), b.f32(x))
    b.set_f32(d, _maybe_flush(b, bool(m[2]), _reciprocal(b, value, m[1] == "rsqrt")))


@native(r"div\.(rn|full|approx)(\.ftz)?\.f32")
def div(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x, y = ins.operands
    left, right = (_maybe_flush(b, bool(m[2]), b.f32(v)) for v in (x, y))
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
        "normal": [("ult", inf), ("uge", tiny)],
        "subnormal": [("ult", tiny), ("ne", _ZERO)],
    }[m[1]]
    out = splat_i(1, 1)
    for cmp, bound in tests:
        out = b.t(f"and {I1} {out}, {b.t(f'icmp {cmp} {I32} {bits}, {bound}')}")
    b.set_p(d, out)
