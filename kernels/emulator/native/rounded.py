"""cvt of float32 to tf32, to 16 bits without infinity, and stochastic rounding (PTX ISA 9.1
section 9.7.9.21).

Stochastic rounding adds random bits below the last place of the result and drops what is then below
it: 16 bits for bf16, 13 for f16 (subnormal results included). That is how quack's emulation of the
instruction does it (quack/rounding.py), which its authors have compared with a B200 bit for bit.
Only .satfinite is modelled, for neither text nor emulation says what becomes of what overflows.
"""

from __future__ import annotations

import re
from typing import Any

from ..ptx.ast import Instr
from .builder import BlockBuilder
from .convert import to_16
from .ir import F32, F64, I1, I16, I32, ZERO, Code, splat_f32, splat_f64, splat_i
from .table import native

_DROPPED = {"bf16": 16, "f16": 13}  # bits of float32's fraction
_LARGEST = {"bf16": float.fromhex("0x1.fep127"), "f16": 65504.0}
_LARGEST_BITS = {"bf16": 0x7F7F, "f16": 0x7BFF}
_SIGN, _SIZE, _NAN = 0x80000000, 0x7FFFFFFF, 0x7FFFFFFF


def _relu(b: Code, x: str) -> str:
    """Negative becomes +0, NaN stays."""
    return b.call(F32, "llvm.maximum.v32f32", (F32, x), (F32, splat_f32(0.0)))


# -- tf32 -----------------------------------------------------------------------------------------


@native(r"cvt\.(rna)()(\.satfinite)?\.tf32\.f32")
@native(r"cvt\.(rn|rz)(\.satfinite)?()\.tf32\.f32")
@native(r"cvt\.(rn|rz)(\.satfinite)?(\.relu)\.tf32\.f32")
def to_tf32(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """19 bits of a float32; the 13 below are zero. rna: to nearest, ties away from zero."""
    d, x = ins.operands
    mode, finite, relu = m[1], ".satfinite" in ins.op, ".relu" in ins.op

    def emit(c: Code, x: str) -> str:
        x = _relu(c, x) if relu else x
        bits = c.t(f"bitcast {F32} {x} to {I32}")
        if mode == "rna":
            raised = c.t(f"add {I32} {bits}, {splat_i(32, 0x1000)}")
        elif mode == "rn":
            odd = c.t(f"lshr {I32} {bits}, {splat_i(32, 13)}")
            odd = c.t(f"and {I32} {odd}, {splat_i(32, 1)}")
            raised = c.t(f"add {I32} {bits}, {c.t(f'add {I32} {odd}, {splat_i(32, 0xFFF)}')}")
        else:
            raised = bits
        out = c.t(f"and {I32} {raised}, {splat_i(32, 0xFFFFE000)}")
        if finite:
            size = c.t(f"and {I32} {out}, {splat_i(32, _SIZE)}")
            beyond = c.t(f"icmp uge {I32} {size}, {splat_i(32, 0x7F800000)}")
            sign = c.t(f"and {I32} {bits}, {splat_i(32, _SIGN)}")
            largest = c.t(f"or {I32} {sign}, {splat_i(32, 0x7F7FE000)}")
            out = c.t(f"select {I1} {beyond}, {I32} {largest}, {I32} {out}")
        nan = c.t(f"fcmp uno {F32} {x}, {ZERO}")
        return c.t(f"select {I1} {nan}, {I32} {splat_i(32, _NAN)}, {I32} {out}")

    b.set_i32(d, b.outlined(I32, ins.op, emit, (F32, b.f32(x))))


# -- 16 bits, finite ------------------------------------------------------------------------------


def _finite(b: Code, x: str, half: str, fmt: str) -> str:
    """The largest number for what is larger, its sign kept."""
    infinite = splat_i(32, _LARGEST_BITS[fmt] + 1)
    size = b.t(f"and {I32} {half}, {splat_i(32, 0x7FFF)}")
    beyond = b.t(f"icmp eq {I32} {size}, {infinite}")
    return b.t(
        f"select {I1} {beyond}, {I32} {b.t(f'sub {I32} {half}, {splat_i(32, 1)}')}, {I32} {half}"
    )


@native(r"cvt\.(rn|rz)(\.relu)?\.satfinite\.(bf16|f16)(x2)?\.f32")
@native(r"cvt\.(rn|rz)\.satfinite(\.relu)\.(bf16|f16)(x2)?\.f32")
def to_finite_16(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, *sources = ins.operands
    mode, relu, fmt, pair = m.groups()

    def one(c: Code, x: str) -> str:
        x = _relu(c, x) if relu else x
        return _finite(c, x, to_16(c, x, fmt, mode), fmt)

    _put(b, d, [b.f32(v) for v in sources], one, bool(pair), f"{mode}{relu or ''}.satfinite.{fmt}")


def _put(
    b: BlockBuilder, d: Any, values: list[str], one: Any, pair: bool, name: str, *more: str
) -> None:
    """Writes one number, or two of which the first goes to the upper half."""
    if len(values) != 1 + pair:
        raise b.unsupported(f"{1 + pair} sources are expected")

    def emit(c: Code, *xs: str) -> str:
        floats, rest = xs[: len(values)], xs[len(values) :]
        low = one(c, floats[-1], *rest)
        if not pair:
            return str(low)
        upper = [c.t(f"lshr {I32} {bits}, {splat_i(32, 16)}") for bits in rest]
        high = c.t(f"shl {I32} {one(c, floats[0], *upper)}, {splat_i(32, 16)}")
        return c.t(f"or {I32} {high}, {low}")

    arguments = [*((F32, v) for v in values), *((I32, v) for v in more)]
    out = b.outlined(I32, name + ("x2" if pair else ""), emit, *arguments)
    if pair:
        b.set_i32(d, out)
    else:
        b.set_i16(d, b.t(f"trunc {I32} {out} to {I16}"))


@native(r"cvt\.rs(\.relu)?\.satfinite\.(bf16|f16)x2\.f32")
def to_16_by_chance(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """The upper 16 bits of the last operand are the first number's random bits."""
    d, *sources, random = ins.operands
    relu, fmt = m.groups()

    def one(c: Code, x: str, chance: str) -> str:
        x = _relu(c, x) if relu else x
        chance = c.t(f"and {I32} {chance}, {splat_i(32, (1 << _DROPPED[fmt]) - 1)}")
        sign = c.t(f"bitcast {F32} {x} to {I32}")
        sign = c.t(
            f"lshr {I32} {c.t(f'and {I32} {sign}, {splat_i(32, _SIGN)}')}, {splat_i(32, 16)}"
        )
        size = c.call(F32, "llvm.fabs.v32f32", (F32, x))
        raised = (_raised_bf16 if fmt == "bf16" else _raised_f16)(c, size, chance)
        large = c.t(f"fcmp ogt {F32} {size}, {splat_f32(_LARGEST[fmt])}")
        top = splat_i(32, _LARGEST_BITS[fmt])
        raised = c.t(f"select {I1} {large}, {I32} {top}, {I32} {raised}")
        out = c.t(f"or {I32} {raised}, {sign}")
        nan = c.t(f"fcmp uno {F32} {x}, {ZERO}")
        return c.t(f"select {I1} {nan}, {I32} {splat_i(32, 0x7FFF)}, {I32} {out}")

    values = [b.f32(v) for v in sources]
    _put(b, d, values, one, True, f"rs{relu or ''}.{fmt}", b.i32(random))


def _raised_bf16(c: Code, size: str, chance: str) -> str:
    bits = c.t(f"add {I32} {c.t(f'bitcast {F32} {size} to {I32}')}, {chance}")
    return c.t(f"lshr {I32} {bits}, {splat_i(32, 16)}")


def _raised_f16(c: Code, size: str, chance: str) -> str:
    """In units of the last place, a double: the sum is exact, and so is what the floor gives."""
    exponent = c.t(f"lshr {I32} {c.t(f'bitcast {F32} {size} to {I32}')}, {splat_i(32, 23)}")
    exponent = c.call(I32, "llvm.smax.v32i32", (I32, exponent), (I32, splat_i(32, 127 - 14)))
    exponent = c.call(I32, "llvm.smin.v32i32", (I32, exponent), (I32, splat_i(32, 127 + 15)))
    scale = c.t(f"sub {I32} {splat_i(32, 254 + 10)}, {exponent}")
    scale = c.t(f"bitcast {I32} {c.t(f'shl {I32} {scale}, {splat_i(32, 23)}')} to {F32}")
    units = c.t(f"fpext {F32} {c.t(f'fmul {F32} {size}, {scale}')} to {F64}")
    part = c.t(f"fmul {F64} {c.t(f'uitofp {I32} {chance} to {F64}')}, {splat_f64(2.0**-13)}")
    units = c.call(F64, "llvm.floor.v32f64", (F64, c.t(f"fadd {F64} {units}, {part}")))
    whole = c.t(f"fptosi {F64} {units} to {I32}")
    # Exponent and fraction are adjacent, so steps of the exponent add 1024 units.
    steps = c.t(f"sub {I32} {exponent}, {splat_i(32, 127 - 14)}")
    return c.t(f"add {I32} {c.t(f'shl {I32} {steps}, {splat_i(32, 10)}')}, {whole}")
