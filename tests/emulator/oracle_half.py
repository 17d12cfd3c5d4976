"""The oracle's half precision: f16, bf16, mixed with f32, and 8-bit floats.

PTX ISA 9.1 sections 9.7.4, 9.7.5, 9.7.7.2 and 9.7.9.21.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

from . import oracle_float as fp
from .oracle import BOOLEAN, define, mask, typed
from .oracle_float import BF16, F16, F32, F64, Format

_FORMATS: dict[str, Format] = {"f16": F16, "bf16": BF16}
_NO_FTZ, _FTZ = ("",), ("", ".ftz")


def _pair(one: Callable[..., Any]) -> Callable[..., Any]:
    """``one`` on the lower and on the upper halves."""

    def two(*xs: int) -> Any:
        low, high = one(*(x & 0xFFFF for x in xs)), one(*(x >> 16 for x in xs))
        if isinstance(low, int) and isinstance(high, int):
            return high << 16 | low
        return fp.NearPair(low, high)

    return two


def _both(op: str, fmt: str, n: int, one: Callable[..., Any]) -> None:
    """The scalar and the packed form."""
    define(f"{op}.{fmt}", fmt, " ".join([fmt] * n), one, imm=())
    define(f"{op}.{fmt}x2", f"{fmt}x2", " ".join([f"{fmt}x2"] * n), _pair(one), imm=())


def _arithmetic() -> None:
    operations = {"add": (2, fp.add), "sub": (2, fp.sub), "mul": (2, fp.mul), "fma": (3, fp.fma)}
    for (name, (n, f)), (fmt_name, fmt) in product(operations.items(), _FORMATS.items()):
        ieee = fmt is F16
        clamps = [""] + [".sat"] * ieee + [".relu"] * (name == "fma")
        for ftz, clamp in product(_FTZ if ieee else _NO_FTZ, clamps):

            def one(*xs: int, t: Any = (f, fmt, ftz, clamp)) -> int:
                f, fmt, ftz, clamp = t
                out = f(*(fp.flush(x, fmt) if ftz else x for x in xs), fmt)
                out = fp.flush(out, fmt) if ftz else out
                if clamp == ".relu":
                    negative = out & fmt.sign and fp.decode(out, fmt).kind != "nan"
                    return 0 if negative else out
                return fp.saturate(out, fmt) if clamp else out

            for rnd in (".rn",) if name == "fma" else ("", ".rn"):
                _both(f"{name}{rnd}{ftz}{clamp}", fmt_name, n, one)


def _selection() -> None:
    for (fmt_name, fmt), which, nan, sign in product(
        _FORMATS.items(), ("min", "max"), ("", ".NaN"), ("", ".xorsign.abs")
    ):
        for ftz in _FTZ if fmt is F16 else _NO_FTZ:

            def one(*xs: int, t: Any = (fmt, which, nan, sign, ftz)) -> int:
                fmt, which, nan, sign, ftz = t
                xs = tuple(fp.flush(x, fmt) if ftz else x for x in xs)
                sizes = tuple(x & ~fmt.sign if sign else x for x in xs)
                out = fp.min_max(which, bool(nan), sizes, fmt)
                if not sign or fp.decode(out, fmt).kind == "nan":
                    return out
                return out | (xs[0] ^ xs[1]) & fmt.sign

            _both(f"{which}{ftz}{nan}{sign}", fmt_name, 2, one)
    for fmt_name, fmt in _FORMATS.items():
        for ftz in _FTZ if fmt is F16 else _NO_FTZ:
            flushed = lambda x, fmt=fmt, ftz=ftz: fp.flush(x, fmt) if ftz else x
            # NaN: PTX leaves its payload open; an H200 gives the canonical one.
            known = lambda x, f, fmt=fmt: fmt.nan if fp.decode(x, fmt).kind == "nan" else f(x)
            negated = lambda x, z=flushed, k=known: k(z(x), lambda v: v ^ 0x8000)
            size = lambda x, z=flushed, k=known: k(z(x), lambda v: v & 0x7FFF)
            _both(f"neg{ftz}", fmt_name, 1, negated)
            _both(f"abs{ftz}", fmt_name, 1, size)


def _comparisons() -> None:
    ordered = ("eq", "ne", "lt", "le", "gt", "ge")
    names = (*ordered, *(f"{n}u" for n in ordered), "num", "nan")
    for name, (fmt_name, fmt) in product(names, _FORMATS.items()):
        for ftz in _FTZ if fmt is F16 else _NO_FTZ:

            def test(x: int, y: int, t: Any = (fmt, name, ftz)) -> int:
                fmt, name, ftz = t
                if ftz:
                    x, y = fp.flush(x, fmt), fp.flush(y, fmt)
                return int(fp.compare(x, y, name, fmt))

            def two(x: int, y: int, test: Any = test) -> tuple[int, int]:
                return test(x & 0xFFFF, y & 0xFFFF), test(x >> 16, y >> 16)

            kinds = f"{fmt_name} {fmt_name}"
            suffix = f"{ftz}.{fmt_name}"
            define(f"setp.{name}{suffix}", "pred", kinds, test, imm=())
            pairs, full = f"{fmt_name}x2 {fmt_name}x2", f"setp.{name}{suffix}x2"
            template = f"{full} {{d0}}|{{d1}}, {{s0}}, {{s1}};"
            define(full, "pred pred", pairs, two, template, imm=())
            for combine, f in BOOLEAN.items():
                full = f"setp.{name}.{combine}{suffix}"
                one = lambda x, y, c, t=test, f=f: f(t(x, y), c)
                define(full, "pred", f"{kinds} pred", one, imm=())
                both = lambda x, y, c, t=two, f=f: tuple(f(v, c) for v in t(x, y))
                template = f"{full}x2 {{d0}}|{{d1}}, {{s0}}, {{s1}}, {{s2}};"
                define(f"{full}x2", "pred pred", f"{pairs} pred", both, template, imm=())


def _functions() -> None:
    for fmt_name, fmt in _FORMATS.items():
        ftz = fmt is BF16
        name = "ex2.approx" + ".ftz" * ftz
        power = lambda x, t=(ftz, fmt): fp.approximation("ex2", x, *t)
        _both(name, fmt_name, 1, power)
        _both("tanh.approx", fmt_name, 1, lambda x, f=fmt: fp.approximation("tanh", x, False, f))


def _mixed() -> None:
    operations = {"add": (2, fp.add), "sub": (2, fp.sub), "fma": (3, fp.fma)}
    roundings = ("", ".rn", ".rz", ".rm", ".rp")
    for (name, (n, f)), rnd, sat, (fmt_name, fmt) in product(
        operations.items(), roundings, ("", ".sat"), _FORMATS.items()
    ):
        if name == "fma" and not rnd:
            continue

        def one(*xs: int, t: Any = (f, rnd, sat, fmt)) -> int:
            f, rnd, sat, fmt = t
            wide = (fp.convert(x, fmt, F32) for x in xs[:-1])
            out = f(*wide, xs[-1], F32, rnd[1:] or "rn")
            return fp.saturate(out) if sat else int(out)

        src = " ".join([fmt_name] * (n - 1) + ["f32"])
        define(f"{name}{rnd}{sat}.f32.{fmt_name}", "f32", src, one, imm=(n - 1,))


# -- conversions -----------------------------------------------------------------------------------

_REGISTERS = {8: (16, 32, 64), 16: (16, 32, 64), 32: (32, 64), 64: (64,)}


def _conversions() -> None:
    sources = {**_FORMATS, "f64": F64}
    for (name, fmt), mode, kind, bits, sat in product(
        sources.items(), ("rni", "rzi", "rmi", "rpi"), "us", (8, 16, 32, 64), ("", ".sat")
    ):
        if fmt is BF16 and (sat or bits == 8):
            continue  # the assembler refuses them, and registers of another width
        for register in (bits,) if fmt is BF16 else _REGISTERS[bits]:

            def whole(x: int, t: Any = (mode, kind, bits, register, fmt)) -> int:
                mode, kind, bits, register, fmt = t
                value = fp.to_int(x, mode, bits, kind == "s", fmt)
                return typed(value, kind, bits) & mask(register)

            op = f"cvt.{mode}{sat}.{kind}{bits}.{name}"
            define(op, f"{kind}{bits}.{register}", name, whole, imm=())
    for (name, fmt), kind, bits in product(sources.items(), "us", (8, 16, 32, 64)):
        if fmt is BF16 and bits == 8:
            continue
        for register in (bits,) if fmt is BF16 else _REGISTERS[bits]:
            exact = lambda x, t=(kind, bits, fmt): fp.from_int(typed(x, t[0], t[1]), t[2], "rn")
            op = f"cvt.rn.{name}.{kind}{bits}"
            define(op, name, f"{kind}{bits}.{register}", exact, imm=())
    for (name, fmt), mode in product(_FORMATS.items(), ("rni", "rzi", "rmi", "rpi")):
        integral = lambda x, m=mode, f=fmt: fp.to_integral(x, m, f)
        define(f"cvt.{mode}.{name}.{name}", name, name, integral, imm=())
    for mode in ("rni", "rzi", "rmi", "rpi"):
        integral = lambda x, m=mode: fp.propagated64(fp.to_integral(x, m, F64), (x,))
        define(f"cvt.{mode}.f64.f64", "f64", "f64", integral, imm=())
    for name, fmt in _FORMATS.items():
        narrow = lambda x, f=fmt: fp.convert_keeping_nan(x, F64, f)
        define(f"cvt.rn.{name}.f64", name, "f64", narrow, imm=())
        wide = lambda x, f=fmt: fp.convert_keeping_nan(x, f, F64)
        define(f"cvt.f64.{name}", "f64", name, wide, imm=())


# Bits of fraction and bias of the narrow floats; the bit of their sign.
_NARROW = {"e4m3": (3, 7, 7), "e5m2": (2, 15, 7), "e2m3": (3, 1, 5), "e3m2": (2, 3, 5),
           "e2m1": (1, 1, 3)}  # fmt: skip


def _narrow_value(code: int, fmt: str) -> Fraction | str:
    """Value of a code without its sign, or what else it is."""
    bits, bias, _ = _NARROW[fmt]
    exponent, fraction = code >> bits, Fraction(code & (1 << bits) - 1, 1 << bits)
    if fmt == "e4m3" and code == 0x7F or fmt == "e5m2" and code > 0x7C:
        return "nan"
    if fmt == "e5m2" and code == 0x7C:
        return "inf"
    if exponent == 0:
        return fraction * Fraction(2) ** (1 - bias)
    return (1 + fraction) * Fraction(2) ** (exponent - bias)


def _to_narrow(x: int, source: Format, fmt: str, relu: bool) -> int:
    """The nearest of all finite codes; of two, the even one. A NaN without a code of its own
    becomes the largest number."""
    a, sign_bit = fp.decode(x, source), _NARROW[fmt][2]
    if a.kind == "nan":
        return (1 << sign_bit) - 1
    if relu and a.sign:
        return 0
    finite = [c for c in range(1 << sign_bit) if isinstance(_narrow_value(c, fmt), Fraction)]
    sign = a.sign << sign_bit
    if a.kind == "inf":
        return finite[-1] | sign
    size = a.mant * Fraction(2) ** a.exp
    distance = {c: abs(_narrow_value(c, fmt) - size) for c in finite}  # type: ignore[operator]
    return min(finite, key=lambda c: (distance[c], c & 1)) | sign


def _from_narrow(code: int, fmt: str, relu: bool) -> int:
    sign_bit = _NARROW[fmt][2]
    value, sign = _narrow_value(code & (1 << sign_bit) - 1, fmt), code >> sign_bit & 1
    if value == "nan":
        return F16.nan
    if relu and sign:
        return 0
    if value == "inf":
        return F16.inf | sign << 15
    assert isinstance(value, Fraction)
    scale = 40
    return fp.rounded(sign, int(value * 2**scale), -scale, False, F16, "rn")


def _narrow() -> None:
    for fmt, relu in product(_NARROW, ("", ".relu")):
        op, apart = f"cvt.rn.satfinite{relu}.{fmt}x2", 4 if fmt == "e2m1" else 8
        # A pair of 4-bit numbers lives in a .b8 register, which only mov can read and write.
        pack = unpack = ""
        if fmt == "e2m1":
            pack = "{{ .reg .b8 t, z; mov.b16 {{z, _}}, 0; %s t, %s; mov.b16 {d0}, {{t, z}}; }}"
            unpack = "{{ .reg .b8 t; mov.b16 {{t, _}}, {s0}; %s {d0}, t; }}"
        to = lambda x, s, t=(fmt, bool(relu)): _to_narrow(x, s, *t)
        join = lambda a, b, s, to=to, n=apart: to(a, s) << n | to(b, s)
        text = pack and pack % (f"{op}.f32", "{s0}, {s1}")
        define(f"{op}.f32", "b16", "f32 f32", lambda a, b, j=join: j(a, b, F32), text)
        for name, source in _FORMATS.items():
            two = lambda x, j=join, s=source: j(x >> 16, x & 0xFFFF, s)
            text = pack and pack % (f"{op}.{name}x2", "{s0}")
            define(f"{op}.{name}x2", "b16", f"{name}x2", two, text, imm=())
        one = lambda x, t=(fmt, bool(relu)): _from_narrow(x, *t)
        back = lambda x, f=one, n=apart: f(x >> n & (1 << n) - 1) << 16 | f(x & (1 << n) - 1)
        op = f"cvt.rn{relu}.f16x2.{fmt}x2"
        define(op, "b32", "b16", back, unpack and unpack % op, imm=())


def _to_scale(x: int, source: Format, up: bool, finite: bool) -> int:
    """The power of two below (above: ``up``) the size, as its exponent + 127; NaN is 255."""
    a = fp.decode(x, source)
    if a.kind == "nan":
        return 255
    if a.kind == "inf":
        return 254 if finite else 255
    size = a.mant * Fraction(2) ** a.exp
    codes = [k for k in range(256) if Fraction(2) ** (k - 127) <= size]
    code = codes[-1] if codes else 0
    if up and size > Fraction(2) ** (code - 127):
        code += 1
    return min(code, 254 if finite else 255)


def _scales() -> None:
    for mode, finite in product(("rz", "rp"), ("", ".satfinite")):
        op = f"cvt.{mode}{finite}.ue8m0x2"
        to = lambda x, s, t=(mode == "rp", bool(finite)): _to_scale(x, s, *t)
        define(f"{op}.f32", "b16", "f32 f32", lambda a, b, to=to: to(a, F32) << 8 | to(b, F32))
        pair = lambda x, to=to: to(x >> 16, BF16) << 8 | to(x & 0xFFFF, BF16)
        define(f"{op}.bf16x2", "b16", "bf16x2", pair, imm=())

    def power(code: int, whole: int = 1, limit: bool = False) -> int:
        """whole * 2**(code - 127) as bf16."""
        if code == 255:
            return BF16.nan
        got = fp.rounded(int(whole < 0), abs(whole), code - 127, False, BF16, "rn")
        return got - 1 if limit and got & 0x7FFF == BF16.inf else got

    both = lambda x: power(x >> 8) << 16 | power(x & 255)
    define("cvt.rn.bf16x2.ue8m0x2", "b32", "b16", both, imm=())
    for finite, relu, scaled in product(("", ".satfinite"), ("", ".relu"), (False, True)):
        op = f"cvt.rn{finite}{relu}{'.scaled::n2::ue8m0' * scaled}.bf16x2.s2f6x2"

        def fixed(x: int, scale: int = 0x7F7F, t: tuple[bool, bool] = (bool(finite), bool(relu))):  # type: ignore[no-untyped-def]
            out = 0
            for k in range(2):
                whole, code = (x >> 8 * k & 255 ^ 128) - 128, scale >> 8 * k & 255
                if code == 255:
                    half = BF16.nan
                elif whole < 0 and t[1] or whole == 0:
                    half = 0
                else:
                    half = fp.rounded(int(whole < 0), abs(whole), code - 133, False, BF16, "rn")
                    half -= int(t[0] and half & 0x7FFF == BF16.inf)
                out |= half << 16 * k
            return out

        define(op, "b32", "b16 b16" if scaled else "b16", fixed, imm=())


def _rounded() -> None:
    """tf32, 16 bits without infinity, and stochastic rounding."""
    tf32 = Format(19, 11, 0x3FFFF)

    def nearest_away(x: int) -> int:
        a = fp.decode(x, F32)
        if a.kind != "finite":
            return fp.convert(x, F32, tf32)
        down, up = (fp.rounded(a.sign, a.mant, a.exp, False, tf32, m) for m in ("rz", "rn"))
        size = a.mant * Fraction(2) ** a.exp
        lower = fp.decode(down, tf32)
        least = lower.mant * Fraction(2) ** lower.exp
        step = fp.decode(down + 1, tf32)
        if step.kind == "finite":
            half = (least + step.mant * Fraction(2) ** step.exp) / 2
            return down + 1 if size >= half else down
        return up

    def widened(x: int, limit: bool, relu: bool, mode: str) -> int:
        a = fp.decode(x, F32)
        if a.kind == "nan":
            return 0x7FFFFFFF
        if relu and a.sign:
            return 0
        out = nearest_away(x) if mode == "rna" else fp.convert(x, F32, tf32, mode)
        if limit and out & 0x3FFFF == tf32.inf:
            out -= 1
        return out << 13

    for mode, limit, relu in product(("rna", "rn", "rz"), ("", ".satfinite"), ("", ".relu")):
        if mode == "rna" and relu:
            continue
        op = f"cvt.{mode}{limit}{relu}.tf32.f32"
        f = lambda x, t=(bool(limit), bool(relu), mode): widened(x, *t)
        define(op, "b32", "f32", f, imm=())

    def finite(x: int, fmt: Format, mode: str, relu: bool) -> int:
        a = fp.decode(x, F32)
        if a.kind == "nan":
            return fmt.nan
        if relu and a.sign:
            return 0
        out = fp.convert(x, F32, fmt, mode)
        return out - 1 if out & 0x7FFF == fmt.inf else out

    for mode, (name, fmt), words in product(
        ("rn", "rz"), _FORMATS.items(), (".satfinite", ".relu.satfinite", ".satfinite.relu")
    ):
        one = lambda x, t=(fmt, mode, "relu" in words): finite(x, *t)
        define(f"cvt.{mode}{words}.{name}.f32", name, "f32", one, imm=())
        both = lambda a, b, f=one: f(a) << 16 | f(b)
        define(f"cvt.{mode}{words}.{name}x2.f32", f"{name}x2", "f32 f32", both, imm=())

    def chance(x: int, r: int, fmt: Format, relu: bool) -> int:
        a = fp.decode(x, F32)
        if a.kind == "nan":
            return fmt.nan
        if relu and a.sign:
            return 0
        if a.kind == "inf":
            return fmt.sign * a.sign | fmt.max_finite
        size = a.mant * Fraction(2) ** a.exp
        top = fp.decode(fmt.max_finite, fmt)
        if size > top.mant * Fraction(2) ** top.exp:
            return fmt.sign * a.sign | fmt.max_finite
        below = fp.rounded(0, a.mant, a.exp, False, fmt, "rz")
        low, high = fp.decode(below, fmt), fp.decode(below + 1, fmt)
        least = low.mant * Fraction(2) ** low.exp
        bits = 16 if fmt is BF16 else 13
        step = high.mant * Fraction(2) ** high.exp - least if high.kind == "finite" else None
        part = Fraction(r & (1 << bits) - 1, 1 << bits)
        up = step is not None and size + part * step >= least + step
        return below + up | fmt.sign * a.sign

    for (name, fmt), relu in product(_FORMATS.items(), ("", ".relu")):
        f = lambda x, r, t=(fmt, bool(relu)): chance(x, r, *t)
        pair = lambda a, b, r, f=f: f(a, r >> 16) << 16 | f(b, r & 0xFFFF)
        define(f"cvt.rs{relu}.satfinite.{name}x2.f32", f"{name}x2", "f32 f32 b32", pair, imm=())
    for kind in "us":
        op = f"cvt.rn.bf16.{kind}8"
        text = f"{{{{ .reg .b8 t; mov.b16 {{{{t, _}}}}, {{s0}}; {op} {{d0}}, t; }}}}"
        exact = lambda x, k=kind: fp.from_int(typed(x, k, 8), BF16, "rn")
        define(op, "bf16", "b16", exact, text, imm=())


for _fill in (
    _arithmetic,
    _selection,
    _comparisons,
    _functions,
    _mixed,
    _conversions,
    _narrow,
    _scales,
    _rounded,
):
    _fill()
