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


def _fp8_value(code: int, fmt: str) -> Fraction | str:
    """Value of a code without its sign, or what else it is."""
    bits, bias = (3, 7) if fmt == "e4m3" else (2, 15)
    exponent, fraction = code >> bits, Fraction(code & (1 << bits) - 1, 1 << bits)
    if fmt == "e4m3" and code == 0x7F or fmt == "e5m2" and code > 0x7C:
        return "nan"
    if fmt == "e5m2" and code == 0x7C:
        return "inf"
    if exponent == 0:
        return fraction * Fraction(2) ** (1 - bias)
    return (1 + fraction) * Fraction(2) ** (exponent - bias)


def _to_fp8(x: int, source: Format, fmt: str, relu: bool) -> int:
    """The nearest of all finite codes; of two, the even one."""
    a = fp.decode(x, source)
    if a.kind == "nan":
        return 0x7F
    if relu and a.sign:
        return 0
    finite = [c for c in range(128) if isinstance(_fp8_value(c, fmt), Fraction)]
    if a.kind == "inf":
        return finite[-1] | a.sign << 7
    size = a.mant * Fraction(2) ** a.exp
    return min(finite, key=lambda c: (abs(_fp8_value(c, fmt) - size), c & 1)) | a.sign << 7  # type: ignore[operator]


def _from_fp8(code: int, fmt: str, relu: bool) -> int:
    value, sign = _fp8_value(code & 0x7F, fmt), code >> 7
    if value == "nan":
        return F16.nan
    if relu and sign:
        return 0
    if value == "inf":
        return F16.inf | sign << 15
    assert isinstance(value, Fraction)
    scale = 40
    return fp.rounded(sign, int(value * 2**scale), -scale, False, F16, "rn")


def _fp8() -> None:
    for fmt, relu in product(("e4m3", "e5m2"), ("", ".relu")):
        op = f"cvt.rn.satfinite{relu}.{fmt}x2"
        to = lambda x, s, t=(fmt, bool(relu)): _to_fp8(x, s, *t)
        define(f"{op}.f32", "b16", "f32 f32", lambda a, b, to=to: to(a, F32) << 8 | to(b, F32))
        for name, source in _FORMATS.items():
            two = lambda x, to=to, s=source: to(x >> 16, s) << 8 | to(x & 0xFFFF, s)
            define(f"{op}.{name}x2", "b16", f"{name}x2", two, imm=())
        back = lambda x, t=(fmt, bool(relu)): _from_fp8(x >> 8, *t) << 16 | _from_fp8(x & 255, *t)
        define(f"cvt.rn{relu}.f16x2.{fmt}x2", "b32", "b16", back, imm=())


for _fill in (_arithmetic, _selection, _comparisons, _functions, _mixed, _conversions, _fp8):
    _fill()
