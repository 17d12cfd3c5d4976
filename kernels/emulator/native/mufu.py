"""The special-function unit's ex2, rcp, rsqrt and sqrt, bit for bit as an H200 computes them.

The unit adds the terms of a quadratic in fixed point (Oberman and Siu, ARITH 2005), truncating on
the way; neither its coefficients nor where it truncates is published. So what it gives was recorded
on silicon over all significands (tests/emulator/hardware/record_mufu.py): two bits a significand,
the distance of the unit's result from a reference value, in units of the last place. A table is
read when the first kernel that needs it is compiled or found in the cache. sm_100's unit was not
recorded and may differ.

Each function is its table and a rule that was found to hold for every input recorded:

- ex2: |x| is truncated to 23 fraction bits; a negative x that is no integer then has the ones'
  complement of that, an integer its negative. 2**fraction comes from the table.
- rcp: the significand's. rsqrt, sqrt: the significand's, for even and for odd exponents.

Subnormal inputs and results are zero. The forms without .ftz are those that ptxas makes of it:
a scaled operand, and the result scaled back.
"""

from __future__ import annotations

import lzma
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .ir import F32, F64, I1, I32, I64, ZERO, Code, V, splat_f32, splat_f64, splat_i

# The recorded distance is what the table holds less this.
BIAS = {"ex2": 1, "rcp": 1, "rsqrt": 2, "sqrt": 1}
# 2**(1/2 + f) for |f| <= 1/2: Taylor's terms, which leave less than 0.1 units of the last place.
EX2_TERMS = [math.sqrt(2) * math.log(2) ** k / math.factorial(k) for k in range(8)]
_SYMBOL = re.compile(r"^@mufu\.(\w+) = external", re.MULTILINE)
_PER_WORD = 16  # distances
_SIGNIFICAND, _EXPONENT = (1 << 23) - 1, 23
_ONE = 127 << _EXPONENT
_MAX = 250.0  # 2**x is infinite or zero long before; x * 2**23 still is an int32
_INF = splat_f32(math.inf)


@cache
def table(name: str) -> NDArray[np.uint32]:
    """The packed distances of ``name``: 16 a word, the first in the lowest bits."""
    data = lzma.decompress((Path(__file__).parent / f"mufu_{name}.xz").read_bytes())
    return np.frombuffer(data, "<u4")


def symbols(text: str) -> dict[str, int]:
    """The tables that a module's IR names, with their addresses in this process."""
    return {f"mufu.{name}": table(name).ctypes.data for name in _SYMBOL.findall(text)}


def _and(b: Code, x: str, mask: int) -> str:
    return b.t(f"and {I32} {x}, {splat_i(32, mask)}")


def _bits(b: Code, x: str) -> str:
    return b.t(f"bitcast {F32} {x} to {I32}")


def _float(b: Code, bits: str) -> str:
    return b.t(f"bitcast {I32} {bits} to {F32}")


def _select(b: Code, condition: str, yes: str, no: str, ty: str = I32) -> str:
    return b.t(f"select {I1} {condition}, {ty} {yes}, {ty} {no}")


def _corrected(b: Code, name: str, index: str, reference: str) -> str:
    """The bits ``reference`` and the distance recorded at ``index``."""
    b.intrinsics.add(f"@mufu.{name} = external global i32")
    word = b.t(f"zext {I32} {b.t(f'lshr {I32} {index}, {splat_i(32, 4)}')} to {I64}")
    places = b.t(f"getelementptr i32, ptr @mufu.{name}, {I64} {word}")
    words = b.call(
        I32, "llvm.masked.gather.v32i32.v32p0", (f"<{V} x ptr>", places), ("i32", "4"),
        (I1, splat_i(1, 1)), (I32, ZERO),
    )  # fmt: skip
    shift = b.t(f"shl {I32} {_and(b, index, _PER_WORD - 1)}, {splat_i(32, 1)}")
    distance = _and(b, b.t(f"lshr {I32} {words}, {shift}"), 3)
    distance = b.t(f"sub {I32} {distance}, {splat_i(32, BIAS[name])}")
    return b.t(f"add {I32} {reference}, {distance}")


def _scaled(b: Code, bits: str, exponent: str) -> str:
    """``bits``, of a number about 1, times 2**exponent: infinity or zero beyond the normal ones."""
    moved = b.t(f"shl {I32} {exponent}, {splat_i(32, _EXPONENT)}")
    moved = b.t(f"add {I32} {bits}, {moved}")
    place = b.t(f"ashr {I32} {bits}, {splat_i(32, _EXPONENT)}")
    place = b.t(f"add {I32} {place}, {exponent}")
    large = b.t(f"icmp sgt {I32} {place}, {splat_i(32, 254)}")
    small = b.t(f"icmp slt {I32} {place}, {splat_i(32, 1)}")
    return _select(b, small, ZERO, _select(b, large, splat_i(32, 0x7F800000), moved))


def _ex2(b: Code, x: str) -> str:
    magnitude = b.call(F32, "llvm.fabs.v32f32", (F32, x))
    held = b.call(F32, "llvm.minnum.v32f32", (F32, magnitude), (F32, splat_f32(_MAX)))
    fixed = b.t(f"fptosi {F32} {b.t(f'fmul {F32} {held}, {splat_f32(2.0**23)}')} to {I32}")
    whole = b.t(f"icmp eq {I32} {_and(b, fixed, _SIGNIFICAND)}, {ZERO}")
    minus = b.t(f"sub {I32} {ZERO}, {fixed}")
    ones = b.t(f"xor {I32} {fixed}, {splat_i(32, -1)}")
    negative = b.t(f"icmp slt {I32} {_bits(b, x)}, {ZERO}")
    fixed = _select(b, negative, _select(b, whole, minus, ones), fixed)
    index = _and(b, fixed, _SIGNIFICAND)
    f = b.t(f"fmul {F64} {b.t(f'sitofp {I32} {index} to {F64}')}, {splat_f64(2.0**-23)}")
    f = b.t(f"fsub {F64} {f}, {splat_f64(0.5)}")
    value = splat_f64(EX2_TERMS[-1])
    for term in EX2_TERMS[-2::-1]:  # each step rounded, as NumPy does when tables are made
        value = b.t(f"fadd {F64} {b.t(f'fmul {F64} {value}, {f}')}, {splat_f64(term)}")
    reference = _bits(b, b.t(f"fptrunc {F64} {value} to {F32}"))
    exponent = b.t(f"ashr {I32} {fixed}, {splat_i(32, _EXPONENT)}")
    out = _float(b, _scaled(b, _corrected(b, "ex2", index, reference), exponent))
    return _select(b, b.t(f"fcmp uno {F32} {x}, {ZERO}"), x, out, F32)


def _rcp(b: Code, x: str) -> str:
    bits = _bits(b, x)
    index = _and(b, bits, _SIGNIFICAND)
    about_1 = _float(b, b.t(f"or {I32} {index}, {splat_i(32, _ONE)}"))
    reference = _bits(b, b.t(f"fdiv {F32} {splat_f32(1.0)}, {about_1}"))
    biased = _and(b, b.t(f"lshr {I32} {bits}, {splat_i(32, _EXPONENT)}"), 255)
    exponent = b.t(f"sub {I32} {splat_i(32, 127)}, {biased}")
    out = _scaled(b, _corrected(b, "rcp", index, reference), exponent)
    none = b.t(f"icmp eq {I32} {biased}, {ZERO}")
    out = _select(b, none, splat_i(32, 0x7F800000), out)
    infinite = b.t(f"icmp eq {I32} {biased}, {splat_i(32, 255)}")
    out = _select(b, infinite, ZERO, out)
    out = b.t(f"or {I32} {out}, {_and(b, bits, 1 << 31)}")
    return _select(b, b.t(f"fcmp uno {F32} {x}, {ZERO}"), x, _float(b, out), F32)


def _root(name: str) -> Callable[[Code, str], str]:
    def emit(b: Code, x: str) -> str:
        bits = _bits(b, x)
        # 1 to 4, and the even power of two that remains: half of it is the result's.
        index = b.t(f"add {I32} {bits}, {splat_i(32, 1 << _EXPONENT)}")
        index = _and(b, index, 2 * _SIGNIFICAND + 1)
        about_1 = b.t(f"add {I32} {index}, {splat_i(32, _ONE)}")
        biased = b.t(f"lshr {I32} {bits}, {splat_i(32, _EXPONENT)}")
        exponent = b.t(f"sub {I32} {biased}, {splat_i(32, 127)}")
        exponent = b.t(f"ashr {I32} {exponent}, {splat_i(32, 1)}")
        if name == "sqrt":
            reference = b.call(F32, "llvm.sqrt.v32f32", (F32, _float(b, about_1)))
        else:
            wide = b.t(f"fpext {F32} {_float(b, about_1)} to {F64}")
            root = b.call(F64, "llvm.sqrt.v32f64", (F64, wide))
            wide = b.t(f"fdiv {F64} {splat_f64(1.0)}, {root}")
            reference = b.t(f"fptrunc {F64} {wide} to {F32}")
            exponent = b.t(f"sub {I32} {ZERO}, {exponent}")
        out = _scaled(b, _corrected(b, name, index, _bits(b, reference)), exponent)
        return _root_of_special(b, name, x, _float(b, out))

    return emit


def _root_of_special(b: Code, name: str, x: str, out: str) -> str:
    """Zero and subnormals, infinity, NaN and what is negative; ``out`` for other numbers."""
    magnitude = b.call(F32, "llvm.fabs.v32f32", (F32, x))
    infinite = b.t(f"fcmp oeq {F32} {x}, {_INF}")
    out = _select(b, infinite, _INF if name == "sqrt" else ZERO, out, F32)
    known = b.t(f"fcmp oge {F32} {x}, {ZERO}")
    out = _select(b, known, out, splat_f32(math.nan), F32)
    tiny = b.t(f"fcmp olt {F32} {magnitude}, {splat_f32(2.0**-126)}")
    zero = ZERO if name == "sqrt" else _INF
    zero = b.call(F32, "llvm.copysign.v32f32", (F32, zero), (F32, x))
    return _select(b, tiny, zero, out, F32)


UNIT: dict[str, Callable[[Code, str], str]] = {
    "ex2": _ex2,
    "rcp": _rcp,
    "rsqrt": _root("rsqrt"),
    "sqrt": _root("sqrt"),
}


def _multiply(b: Code, x: str, y: str) -> str:
    return b.t(f"fmul {F32} {x}, {y}")


def approximation(b: Code, name: str, ftz: bool, x: str) -> str:
    """``name``.approx of float32 values: the unit's, scaled around it where there is no .ftz."""
    if ftz:
        return UNIT[name](b, x)
    one = splat_f32(1.0)
    if name == "ex2":
        low = b.t(f"fcmp olt {F32} {x}, {splat_f32(-126.0)}")
        y = UNIT[name](b, _multiply(b, x, _select(b, low, splat_f32(0.5), one, F32)))
        return _select(b, low, _multiply(b, y, y), y, F32)
    magnitude = b.call(F32, "llvm.fabs.v32f32", (F32, x))
    tiny = b.t(f"fcmp olt {F32} {magnitude}, {splat_f32(2.0**-126)}")
    before = _select(b, tiny, splat_f32(2.0**24), one, F32)
    if name == "rcp":
        huge = b.t(f"fcmp ogt {F32} {magnitude}, {splat_f32(2.0**126)}")
        before = after = _select(b, huge, splat_f32(0.25), before, F32)
    else:
        back = splat_f32(2.0**12 if name == "rsqrt" else 2.0**-12)
        after = _select(b, tiny, back, one, F32)
    return _multiply(b, UNIT[name](b, _multiply(b, x, before)), after)
