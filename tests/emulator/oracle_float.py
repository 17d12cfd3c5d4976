"""Exact floating point in plain integers, for the oracle: decode, one rounding, encode.

A finite value is ``sign``, ``mant`` and ``exp``: (-1)**sign * mant * 2**exp with an integer mant.
All arithmetic is exact on integers of any length and rounded once, by the rules of IEEE 754 and the
modifiers of PTX (.ftz, .sat). Nothing here uses host floating point, numpy or the emulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mpmath import mp, mpf


@dataclass(frozen=True)
class Format:
    """A binary interchange format. ``nan``: the bits of an arithmetic result that is NaN."""

    bits: int
    precision: int  # of a normal number, with the hidden bit
    nan: int

    @property
    def emin(self) -> int:
        """Exponent of the smallest subnormal."""
        return 2 - (1 << (self.bits - self.precision - 1)) - (self.precision - 1)

    @property
    def inf(self) -> int:
        return ((1 << (self.bits - self.precision)) - 1) << (self.precision - 1)

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def max_finite(self) -> int:
        return self.inf - 1

    @property
    def min_normal(self) -> int:
        return 1 << (self.precision - 1)


F16 = Format(16, 11, 0x7FFF)
BF16 = Format(16, 8, 0x7FFF)
F32 = Format(32, 24, 0x7FFFFFFF)
F64 = Format(64, 53, 0xFFF8000000000000)  # of an invalid operation; see propagated64


@dataclass(frozen=True)
class Num:
    """A decoded float: ``kind`` is ``finite``, ``inf`` or ``nan``."""

    kind: str
    sign: int
    mant: int = 0
    exp: int = 0

    @property
    def zero(self) -> bool:
        return self.kind == "finite" and self.mant == 0

    @property
    def value(self) -> tuple[int, int]:
        """(signed mantissa, exponent)"""
        return (-self.mant if self.sign else self.mant), self.exp


def decode(bits: int, fmt: Format) -> Num:
    sign = bits >> (fmt.bits - 1)
    body = bits & (fmt.sign - 1)
    if body > fmt.inf:
        return Num("nan", sign)
    if body == fmt.inf:
        return Num("inf", sign)
    biased = body >> (fmt.precision - 1)
    fraction = body & (fmt.min_normal - 1)
    if biased == 0:
        return Num("finite", sign, fraction, fmt.emin)
    return Num("finite", sign, fraction | fmt.min_normal, fmt.emin + biased - 1)


def flush(bits: int, fmt: Format = F32) -> int:
    """.ftz: a subnormal becomes a zero of its sign."""
    body = bits & (fmt.sign - 1)
    return bits & fmt.sign if body < fmt.min_normal else bits


def rounded(sign: int, mant: int, exp: int, sticky: bool, fmt: Format, mode: str) -> int:
    """(-1)**sign * (mant + something below 1 if sticky) * 2**exp, rounded once, as bits."""
    if mant == 0 and not sticky:
        return fmt.sign * sign
    mant, exp = mant << 2 | (1 if sticky else 0), exp - 2
    unit = max(mant.bit_length() + exp - fmt.precision, fmt.emin)
    shift = unit - exp
    if shift <= 0:
        quotient, rest, half = mant << -shift, 0, 1
    else:
        quotient, rest, half = mant >> shift, mant & ((1 << shift) - 1), 1 << (shift - 1)
    up = {
        "rn": rest > half or (rest == half and quotient & 1 == 1),
        "rz": False,
        "rm": bool(rest) and sign == 1,
        "rp": bool(rest) and sign == 0,
    }[mode]
    quotient += up
    if quotient.bit_length() > fmt.precision:
        quotient, unit = quotient >> 1, unit + 1
    normal = quotient >= fmt.min_normal
    body = (unit - fmt.emin + 1 << fmt.precision - 1) + quotient - fmt.min_normal
    body = body if normal else quotient
    if body >= fmt.inf:
        to_inf = mode == "rn" or mode == ("rm" if sign else "rp")
        body = fmt.inf if to_inf else fmt.max_finite
    return fmt.sign * sign | body


def add(x: int, y: int, fmt: Format = F32, mode: str = "rn") -> int:
    return fma_num(decode(x, fmt), Num("finite", 0, 1, 0), decode(y, fmt), fmt, mode)


def sub(x: int, y: int, fmt: Format = F32, mode: str = "rn") -> int:
    return add(x, y ^ fmt.sign, fmt, mode)


def mul(x: int, y: int, fmt: Format = F32, mode: str = "rn") -> int:
    a, b = decode(x, fmt), decode(y, fmt)
    sign = a.sign ^ b.sign
    if (
        "nan" in (a.kind, b.kind)
        or (a.kind, b.zero) == ("inf", True)
        or ((b.kind, a.zero) == ("inf", True))
    ):
        return fmt.nan
    if "inf" in (a.kind, b.kind):
        return fmt.sign * sign | fmt.inf
    return rounded(sign, a.mant * b.mant, a.exp + b.exp, False, fmt, mode)


def fma(x: int, y: int, z: int, fmt: Format = F32, mode: str = "rn") -> int:
    return fma_num(decode(x, fmt), decode(y, fmt), decode(z, fmt), fmt, mode)


def fma_num(a: Num, b: Num, c: Num, fmt: Format, mode: str) -> int:
    sign = a.sign ^ b.sign
    if "nan" in (a.kind, b.kind, c.kind):
        return fmt.nan
    if "inf" in (a.kind, b.kind):
        if a.zero or b.zero or (c.kind == "inf" and c.sign != sign):
            return fmt.nan
        return fmt.sign * sign | fmt.inf
    if c.kind == "inf":
        return fmt.sign * c.sign | fmt.inf
    product, exp = a.mant * b.mant, a.exp + b.exp
    if product == 0 and c.mant == 0 and sign == c.sign:
        return fmt.sign * sign
    low = min(exp, c.exp)
    total = (-product if sign else product) << (exp - low)
    total += c.value[0] << (c.exp - low)
    if total == 0:  # an exact zero sum of unlike signs is -0 only when rounding down
        return fmt.sign * (mode == "rm")
    return rounded(int(total < 0), abs(total), low, False, fmt, mode)


def div(x: int, y: int, fmt: Format = F32, mode: str = "rn") -> int:
    a, b = decode(x, fmt), decode(y, fmt)
    sign = fmt.sign * (a.sign ^ b.sign)
    if "nan" in (a.kind, b.kind) or (a.kind == b.kind == "inf") or (a.zero and b.zero):
        return fmt.nan
    if a.kind == "inf" or b.zero:
        return sign | fmt.inf
    if b.kind == "inf" or a.zero:
        return sign
    scale = 2 * fmt.precision + 4
    quotient, rest = divmod(a.mant << scale, b.mant)
    return rounded(a.sign ^ b.sign, quotient, a.exp - b.exp - scale, rest != 0, fmt, mode)


def sqrt(x: int, fmt: Format = F32, mode: str = "rn") -> int:
    a = decode(x, fmt)
    if a.kind == "nan" or (a.sign and not a.zero):
        return fmt.nan
    if a.zero or a.kind == "inf":
        return x
    scale = 2 * fmt.precision + 4 + (a.exp & 1)
    root = math.isqrt(a.mant << scale)
    exact = root * root == a.mant << scale
    return rounded(0, root, (a.exp - scale) // 2, not exact, fmt, mode)


def saturate(x: int, fmt: Format = F32) -> int:
    """.sat: clamped to [+0, 1]; NaN becomes +0."""
    a = decode(x, fmt)
    one = (fmt.bits - fmt.precision and (1 << (fmt.bits - fmt.precision - 1)) - 1) << (
        fmt.precision - 1
    )
    if a.kind == "nan" or a.sign:
        return 0
    return min(x, one)


def order_key(x: int, fmt: Format = F32) -> int:
    """Sorts as numbers, -0 below +0. Not for NaN."""
    body = x & (fmt.sign - 1)
    return -body - 1 if x & fmt.sign else body


def min_max(which: str, keep_nan: bool, xs: tuple[int, ...], fmt: Format = F32) -> int:
    """PTX ISA 9.1 sections 9.7.3.11 and 9.7.3.12, also the three-input form."""
    out = xs[0]
    for x in xs[1:]:
        nans = [decode(v, fmt).kind == "nan" for v in (out, x)]
        if all(nans) or (keep_nan and any(nans)):
            out = fmt.nan
        elif any(nans):
            out = x if nans[0] else out
        else:
            out = (min if which == "min" else max)(out, x, key=lambda v: order_key(v, fmt))
    return fmt.nan if decode(out, fmt).kind == "nan" else out


def compare(x: int, y: int, op: str, fmt: Format = F32) -> bool:
    """setp's ordered (``lt``) and unordered (``ltu``) comparisons, ``num`` and ``nan``."""
    unordered = "nan" in (decode(x, fmt).kind, decode(y, fmt).kind)
    if op in ("num", "nan"):
        return unordered == (op == "nan")
    if unordered:
        return len(op) == 3
    kx, ky = (0 if v & (fmt.sign - 1) == 0 else order_key(v, fmt) for v in (x, y))
    return {
        "eq": kx == ky,
        "ne": kx != ky,
        "lt": kx < ky,
        "le": kx <= ky,
        "gt": kx > ky,
        "ge": kx >= ky,
    }[op[:2]]


def convert(x: int, src: Format, dst: Format, mode: str = "rn") -> int:
    a = decode(x, src)
    if a.kind == "nan":
        return dst.nan
    if a.kind == "inf":
        return dst.sign * a.sign | dst.inf
    return rounded(a.sign, a.mant, a.exp, False, dst, mode)


def propagated64(out: int, xs: tuple[int, ...]) -> int:
    """A double NaN result is a quiet source NaN, the first in the order b, c, a (measured: an H200;
    PTX leaves it open)."""
    if decode(out, F64).kind == "nan":
        for x in (*xs[1:], xs[0]):
            if decode(x, F64).kind == "nan":
                return x | 1 << 51
    return out


def convert_keeping_nan(x: int, src: Format, dst: Format) -> int:
    """Between float32 and float64, to nearest: a NaN becomes quiet and keeps sign and the payload's
    upper part (measured: an H200)."""
    if decode(x, src).kind != "nan":
        return convert(x, src, dst)
    shift = dst.precision - src.precision
    payload = x & (src.min_normal - 1) | src.min_normal >> 1
    payload = payload << shift if shift > 0 else payload >> -shift
    return (dst.sign if x & src.sign else 0) | dst.inf | payload


def from_int(value: int, fmt: Format, mode: str) -> int:
    return rounded(int(value < 0), abs(value), 0, False, fmt, mode)


def integral(x: int, mode: str, fmt: Format = F32) -> int | None:
    """The value rounded to an integer by rni, rzi, rmi or rpi; None for infinities and NaN."""
    a = decode(x, fmt)
    if a.kind != "finite":
        return None
    n, exp = a.value
    if exp >= 0:
        return n << exp
    floor, rest = n >> -exp, n & ((1 << -exp) - 1)
    half = 1 << (-exp - 1)
    if mode == "rni":
        return floor + (rest > half or (rest == half and floor & 1 == 1))
    if mode == "rzi":
        return floor + (rest != 0 and n < 0)
    return floor + (mode == "rpi" and rest != 0)


def to_int(x: int, mode: str, bits: int, signed: bool, fmt: Format = F32) -> int:
    """Float to integer: clamped to the destination's range; NaN gives 0, or from .f64 and to 64
    bits only the top bit (PTX ISA 9.1 section 9.7.9.21)."""
    a = decode(x, fmt)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    if a.kind == "nan":
        return 1 << (bits - 1) if bits == 64 or fmt is F64 else 0
    if a.kind == "inf":
        return (low if a.sign else high) & ((1 << bits) - 1)
    value = integral(x, mode, fmt)
    assert value is not None
    return min(max(value, low), high) & ((1 << bits) - 1)


def to_integral(x: int, mode: str, fmt: Format = F32) -> int:
    """Float to an integer in float format; the sign survives at zero."""
    a = decode(x, fmt)
    if a.kind == "nan":
        return fmt.nan
    value = integral(x, mode, fmt)
    if value is None:
        return x
    return from_int(value, fmt, "rn") or fmt.sign * a.sign


# -- functions without an exact rounding ----------------------------------------------------------


@dataclass(frozen=True)
class Near:
    """Any float within ``ulps`` of a true real value; .ftz may flush what is nearly subnormal."""

    true: mpf
    ftz: bool = False
    ulps: float = 0.51
    fmt: Format = F32

    @property
    def unit(self) -> mpf:
        """The distance of floats at the true value."""
        with mp.workprec(200):
            size, emin = abs(self.true), self.fmt.emin
            if not size:
                return mpf(2) ** emin
            return mpf(2) ** max(int(mp.floor(mp.log(size, 2))) - self.fmt.precision + 1, emin)

    def accepts(self, got: int) -> bool:
        a, fmt = decode(got, self.fmt), self.fmt
        with mp.workprec(200):
            size = abs(self.true)
            slack = self.unit * self.ulps
            if a.kind == "nan":
                return False
            if a.kind == "inf":
                largest = decode(fmt.max_finite, fmt)
                # Rounds to infinity from here on.
                top = (mpf(largest.mant) + mpf(1) / 2) * mpf(2) ** largest.exp
                return bool((size >= top - slack) and (self.true < 0) == bool(a.sign))
            if self.ftz and flush(got, fmt) != got:
                return False
            value = mpf(a.value[0]) * mpf(2) ** a.exp
            if self.ftz and a.zero:
                return bool(size <= mpf(fmt.min_normal) * mpf(2) ** fmt.emin + slack)
            return bool(abs(value - self.true) <= slack)

    def __str__(self) -> str:
        return f"{mp.nstr(self.true, 12)} within {self.ulps} ulp{' (ftz)' if self.ftz else ''}"


@dataclass(frozen=True)
class NearPair:
    """Two 16-bit results in one register, each exact or near."""

    low: int | Near
    high: int | Near

    def accepts(self, got: int) -> bool:
        return all(
            half == bits if isinstance(half, int) else half.accepts(bits)
            for half, bits in ((self.low, got & 0xFFFF), (self.high, got >> 16))
        )

    def __str__(self) -> str:
        return f"{{{self.low}, {self.high}}}"


def real(x: int, fmt: Format = F32) -> mpf:
    n, exp = decode(x, fmt).value
    with mp.workprec(200):
        return mpf(n) * mpf(2) ** exp


def approximation(
    function: str, x: int, ftz: bool, fmt: Format = F32, ulps: float = 0.51
) -> int | Near:
    """ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh: special values by PTX ISA 9.1 section 9.7.3.13
    to 9.7.3.22, else the true value."""
    x = flush(x, fmt) if ftz else x
    a = decode(x, fmt)
    if a.kind == "nan":
        return fmt.nan
    special = _SPECIAL[function](a, x, fmt)
    if special is not None:
        return special
    with mp.workprec(200):
        return Near(_REAL[function](real(x, fmt)), ftz, ulps, fmt)


def one(fmt: Format) -> int:
    return (1 << (fmt.bits - fmt.precision - 1)) - 1 << fmt.precision - 1


_REAL: dict[str, Callable[[mpf], mpf]] = {
    "ex2": lambda v: mpf(2) ** v if abs(v) < 5000 else (mpf(2) ** (5000 if v > 0 else -5000)),
    "lg2": lambda v: mp.log(v) / mp.log(2),
    "rcp": lambda v: 1 / v,
    "rsqrt": lambda v: 1 / mp.sqrt(v),
    "sqrt": mp.sqrt,
    "sin": mp.sin,
    "cos": mp.cos,
    "tanh": mp.tanh,
}


def _root(a: Num, fmt: Format, at_zero: int, at_inf: int) -> int | None:
    if a.zero:
        return at_zero
    if a.sign:
        return fmt.nan
    return at_inf if a.kind == "inf" else None


_SPECIAL: dict[str, Callable[[Num, int, Format], int | None]] = {
    "ex2": lambda a, x, f: (
        one(f) if a.zero else (0 if a.sign else f.inf) if a.kind == "inf" else None
    ),
    "lg2": lambda a, x, f: 0 if x == one(f) else _root(a, f, f.sign | f.inf, f.inf),
    "rcp": lambda a, x, f: (
        (x & f.sign) | f.inf if a.zero else x & f.sign if a.kind == "inf" else None
    ),
    "rsqrt": lambda a, x, f: _root(a, f, (x & f.sign) | f.inf, 0),
    "sqrt": lambda a, x, f: _root(a, f, x, f.inf),
    "sin": lambda a, x, f: x if a.zero else f.nan if a.kind == "inf" else None,
    "cos": lambda a, x, f: one(f) if a.zero else f.nan if a.kind == "inf" else None,
    "tanh": lambda a, x, f: x if a.zero else (x & f.sign) | one(f) if a.kind == "inf" else None,
}
