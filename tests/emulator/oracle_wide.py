"""The oracle's extended precision, rarer integer instructions and double precision.

PTX ISA 9.1 sections 9.7.1, 9.7.2 and 9.7.3.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from . import oracle_float as fp
from .oracle import define, mask, signed, typed
from .oracle_float import F64

# -- extended precision ----------------------------------------------------------------------------


def _carries() -> None:
    """Each opcode between two that set the carry to the third source and read it back."""
    for kind, bits in product("us", (32, 64)):
        t = f"{kind}{bits}"
        one = mask(bits)

        def add(x: int, y: int, c: int = 0, bits: int = bits) -> tuple[int, int]:
            total = x + y + c
            return total & mask(bits), total >> bits

        def sub(x: int, y: int, c: int = 0, bits: int = bits) -> tuple[int, int]:
            difference = x - y - c
            return difference & mask(bits), -(difference < 0) & mask(bits)

        read = {"add": f"addc.{t} {{d1}}, 0, 0;", "sub": f"subc.{t} {{d1}}, 0, 0;"}
        give = {
            "add": f"add.cc.{t} {{d1}}, {{s2}}, {one};",
            "sub": f"sub.cc.{t} {{d1}}, 0, {{s2}};",
        }
        for name, f in (("add", add), ("sub", sub)):
            op = f"{name}.cc.{t}"
            body = f"{op} {{d0}}, {{s0}}, {{s1}}; {read[name]}"
            define(op, f"{t} {t}", f"{t} {t}", f, body)
            src, drawn = f"{t} {t} {t}", ((2, (0, 1)),)
            op = f"{name}c.cc.{t}"
            body = f"{give[name]} {op} {{d0}}, {{s0}}, {{s1}}; {read[name]}"
            define(op, f"{t} {t}", src, f, body, values=drawn, imm=(0, 1))
            op = f"{name}c.{t}"
            body = f"{give[name]} {op} {{d0}}, {{s0}}, {{s1}};"
            only = lambda x, y, c, f=f: f(x, y, c)[0]
            define(op, t, src, only, body.replace("{d1}", "{d0}"), values=drawn, imm=(0, 1))
        _mad(t, kind, bits, add)


def _mad(t: str, kind: str, bits: int, add: Callable[..., tuple[int, int]]) -> None:
    for part in ("lo", "hi"):

        def f(a: int, b: int, c: int, carry: int = 0, t: Any = (part, kind, bits)) -> Any:
            part, kind, bits = t
            product_ = typed(a, kind, bits) * typed(b, kind, bits)
            return add(product_ >> (bits if part == "hi" else 0) & mask(bits), c, carry)

        op, read = f"mad.{part}.cc.{t}", f"addc.{t} {{d1}}, 0, 0;"
        body = f"{op} {{d0}}, {{s0}}, {{s1}}, {{s2}}; {read}"
        define(op, f"{t} {t}", f"{t} {t} {t}", f, body)
        give = f"add.cc.{t} {{d1}}, {{s3}}, {mask(bits)};"
        src, more = f"{t} {t} {t} {t}", {"values": ((3, (0, 1)),), "imm": (0, 1, 2)}
        op = f"madc.{part}.cc.{t}"
        body = f"{give} {op} {{d0}}, {{s0}}, {{s1}}, {{s2}}; {read}"
        define(op, f"{t} {t}", src, f, body, **more)
        op = f"madc.{part}.{t}"
        body = f"{give} {op} {{d0}}, {{s0}}, {{s1}}, {{s2}};".replace("{d1}", "{d0}")
        define(op, t, src, lambda *xs, f=f: f(*xs)[0], body, **more)


# -- rarer integer instructions --------------------------------------------------------------------


def _rarer_integers() -> None:
    low, high = -(1 << 31), (1 << 31) - 1
    clamp = lambda v: min(max(v, low), high) & mask(32)
    define("add.sat.s32", "s32", "s32 s32", lambda a, b: clamp(signed(a, 32) + signed(b, 32)))
    define("sub.sat.s32", "s32", "s32 s32", lambda a, b: clamp(signed(a, 32) - signed(b, 32)))
    small = tuple(range(70)) + (96, 127, 128, 200, 255)
    for bits in (32, 64):
        insert = lambda a, b, p, n, bits=bits: _bfi(a, b, p, n, bits)
        values = ((2, small), (3, small))
        define(f"bfi.b{bits}", f"b{bits}", f"b{bits} b{bits} u32 u32", insert, values=values)
        for kind, shift in product("us", ("", ".shiftamt")):
            find = lambda a, t=(kind, bits, bool(shift)): _bfind(a, *t)
            define(f"bfind{shift}.{kind}{bits}", "u32", f"{kind}{bits}", find)
    for ka, kb in product("us", "us"):
        src = f"{ka}32 {kb}32 {'u' if ka == kb == 'u' else 's'}32"
        dst = src.split()[-1]
        four = lambda a, b, c, k=(ka, kb): _dot(a, b, c, k, 4, 8, 0)
        define(f"dp4a.{ka}32.{kb}32", dst, src, four)
        for part, start in (("lo", 0), ("hi", 2)):
            two = lambda a, b, c, k=(ka, kb), s=start: _dot(a, b, c, k, 2, 16, s)
            define(f"dp2a.{part}.{ka}32.{kb}32", dst, src, two)
    for kind, part in product("us", ("hi", "lo")):
        times = lambda a, b, c=0, t=(kind, 16 if part == "hi" else 0): (
            (typed(a, t[0], 24) * typed(b, t[0], 24) >> t[1]) + c & mask(32)
        )
        define(f"mul24.{part}.{kind}32", f"{kind}32", f"{kind}32 {kind}32", times)
        define(f"mad24.{part}.{kind}32", f"{kind}32", f"{kind}32 {kind}32 {kind}32", times)
    for kind, bits in product("us", (16, 32, 64)):
        distance = lambda a, b, c, t=(kind, bits): c + abs(typed(a, *t) - typed(b, *t)) & mask(t[1])
        t = f"{kind}{bits}"
        define(f"sad.{t}", t, f"{t} {t} {t}", distance)


def _bfi(a: int, b: int, pos: int, length: int, bits: int) -> int:
    """9.7.1.20, bit by bit."""
    for i in range(length & 0xFF):
        if (pos & 0xFF) + i < bits:
            at = (pos & 0xFF) + i
            b = b & ~(1 << at) | (a >> i & 1) << at
    return b


def _bfind(a: int, kind: str, bits: int, shift: bool) -> int:
    """9.7.1.16"""
    if kind == "s" and a >> (bits - 1):
        a ^= mask(bits)
    if a == 0:
        return mask(32)
    return bits - a.bit_length() if shift else a.bit_length() - 1


def _dot(a: int, b: int, c: int, kinds: tuple[str, str], count: int, wide: int, start: int) -> int:
    """9.7.1.23 and 9.7.1.24"""
    for i in range(count):
        x = typed(a >> wide * i, kinds[0], wide)
        c += x * typed(b >> 8 * (start + i), kinds[1], 8)
    return c & mask(32)


# -- double precision ------------------------------------------------------------------------------

_ONE = fp.one(F64)
_UPPER = 0xFFFFFFFF00000000
_GROSS_NAN = 0x7FFFFFFF00000000


def _double() -> None:
    keep = fp.propagated64
    # NaN: PTX leaves them open; so an H200 does.
    known = lambda a, f: keep(F64.nan, (a,)) if fp.decode(a, F64).kind == "nan" else f(a)
    define("neg.f64", "f64", "f64", lambda a: known(a, lambda v: v ^ F64.sign))
    define("abs.f64", "f64", "f64", lambda a: known(a, lambda v: v & ~F64.sign))
    define("copysign.f64", "f64", "f64 f64", lambda a, b: a & F64.sign | b & ~F64.sign)
    define("div.rn.f64", "f64", "f64 f64", lambda a, b: keep(fp.div(a, b, F64), (b, a)))
    define("rcp.rn.f64", "f64", "f64", lambda a: keep(fp.div(_ONE, a, F64), (a,)))
    define("sqrt.rn.f64", "f64", "f64", lambda a: keep(fp.sqrt(a, F64), (a,)))
    for which in ("min", "max"):
        pick = lambda a, b, w=which: keep(fp.min_max(w, False, (a, b), F64), (a, b))
        define(f"{which}.f64", "f64", "f64 f64", pick)
    tests: dict[str, Callable[[fp.Num, int], bool]] = {
        "finite": lambda a, x: a.kind == "finite",
        "infinite": lambda a, x: a.kind == "inf",
        "notanumber": lambda a, x: a.kind == "nan",
        "number": lambda a, x: a.kind != "nan",
        "normal": lambda a, x: a.kind == "finite" and (a.zero or fp.flush(x, F64) == x),
        "subnormal": lambda a, x: a.kind == "finite" and not a.zero and fp.flush(x, F64) != x,
    }
    for name, test in tests.items():
        define(f"testp.{name}.f64", "pred", "f64", lambda x, t=test: int(t(fp.decode(x, F64), x)))
    for name in ("rcp", "rsqrt"):
        define(f"{name}.approx.ftz.f64", "f64", "f64", lambda x, n=name: _gross(n, x))
    define("rsqrt.approx.f64", "f64", "f64", _root)


def _gross(name: str, x: int) -> int | fp.Near:
    """9.7.3.14 and 9.7.3.17: of the upper word alone, to its 20 bits of fraction."""
    out = fp.approximation(name, x & _UPPER, True, F64, 1.01 * 2**32)
    return _GROSS_NAN if out == F64.nan else out


def _root(x: int) -> int | fp.Near:
    out = fp.approximation("rsqrt", x, False, F64, 1.5)
    return fp.propagated64(out, (x,)) if isinstance(out, int) else out


for _fill in (_carries, _rarer_integers, _double):
    _fill()
