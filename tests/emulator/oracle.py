"""The oracle: what each straight-line PTX instruction gives for one thread, in plain Python.

`SPECS` maps an opcode to its register kinds and a function on register bits. It is written from
the PTX ISA 9.1 text alone (section numbers below) and lists only opcodes that the text allows, so
it also says which opcodes the emulator's table must not accept. Slow and exact: integers of any
length, no numpy, no host floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from . import oracle_float as fp
from .oracle_float import BF16, F16, F32, F64

Bits = int | fp.Near | fp.NearPair


@dataclass(frozen=True)
class Spec:
    """An opcode. ``dst`` and ``src`` are operand kinds: how the values are sampled, and the width
    of the register in their digits (``s32``, ``f32x2``, ``pred``, ``u8.32``: 8 bits in a .b32).
    ``fn`` maps source bits to destination bits. ``template`` places operands, d0.. and s0...
    ``imm`` is the set of sources that may be immediates, ``must_imm`` of those that must be."""

    op: str
    dst: tuple[str, ...]
    src: tuple[str, ...]
    fn: Callable[..., Any]
    template: str = ""
    imm: tuple[int, ...] = ()
    values: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (source, the values to draw from)


SPECS: dict[str, list[Spec]] = {}


def _has_literals(kind: str) -> bool:
    """Whether a source of the type may be an immediate: halves and packed floats have none."""
    return width(kind) >= 16 and kind not in ("f16", "bf16", "f16x2", "bf16x2", "f32x2")


def define(
    op: str, dst: str, src: str, fn: Callable[..., Any], template: str = "", **more: Any
) -> None:
    """Adds an opcode, one spec for each way that registers may be wider than the instruction."""
    d, s = tuple(dst.split()), tuple(src.split())
    imm = more.pop("imm", tuple(i for i, kind in enumerate(s) if _has_literals(kind)))
    SPECS.setdefault(op, []).append(Spec(op, d, s, fn, template, imm, **more))


def width(kind: str) -> int:
    """Bits of the register that holds an operand of this kind; 1 for a predicate."""
    if kind == "pred":
        return 1
    if "x2" in kind:
        return 64 if kind == "f32x2" else 32
    return int("".join(ch for ch in kind.split(".")[-1] if ch.isdigit()))


def mask(bits: int) -> int:
    return (1 << bits) - 1


def signed(x: int, bits: int) -> int:
    x &= mask(bits)
    return x - (1 << bits) if x >> (bits - 1) else x


def typed(x: int, kind: str, bits: int) -> int:
    return signed(x, bits) if kind == "s" else x & mask(bits)


# -- integers (9.7.1) -----------------------------------------------------------------------------


def truncated_div(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def _int(f: Callable[..., int], kind: str, bits: int, out: int | None = None) -> Any:
    """f on typed integers, wrapped to ``out`` bits."""
    return lambda *xs: f(*(typed(x, kind, bits) for x in xs)) & mask(out or bits)


def _integers() -> None:
    arithmetic: dict[str, tuple[int, Callable[..., int]]] = {
        "add": (2, lambda a, b: a + b),
        "sub": (2, lambda a, b: a - b),
        "mul.lo": (2, lambda a, b: a * b),
        "mad.lo": (3, lambda a, b, c: a * b + c),
        "min": (2, min),
        "max": (2, max),
        "neg": (1, lambda a: -a),
        "abs": (1, abs),
    }
    for (name, (n, f)), kind, bits in product(arithmetic.items(), "us", (16, 32, 64)):
        if kind == "s" or name not in ("neg", "abs"):
            t = f"{kind}{bits}"
            define(f"{name}.{t}", t, " ".join([t] * n), _int(f, kind, bits))
    for name, least in (("min", min), ("max", max)):
        relu = _int(lambda a, b, f=least: max(f(a, b), 0), "s", 32)
        define(f"{name}.relu.s32", "s32", "s32 s32", relu)
    for kind, bits in product("us", (16, 32, 64)):
        t, wide = f"{kind}{bits}", 2 * bits
        high = lambda a, b, bits=bits: (a * b) >> bits
        define(f"mul.hi.{t}", t, f"{t} {t}", _int(high, kind, bits))
        if bits == 32:
            plus = lambda a, b, c, bits=bits: ((a * b) >> bits) + c
            define(f"mad.hi.{t}", t, f"{t} {t} {t}", _int(plus, kind, bits))
        if bits < 64:
            times = _int(lambda a, b: a * b, kind, bits, wide)
            define(f"mul.wide.{t}", f"{kind}{wide}", f"{t} {t}", times)
            define(
                f"mad.wide.{t}",
                f"{kind}{wide}",
                f"{t} {t} {kind}{wide}",
                lambda a, b, c, times=times, wide=wide: (times(a, b) + c) & mask(wide),
            )
        _division(kind, bits)


def _division(kind: str, bits: int) -> None:
    """By zero: unspecified (9.7.1.8), but no fault; an H200 and the emulator give all ones."""
    t = f"{kind}{bits}"

    def div(a: int, b: int) -> int:
        a, b = typed(a, kind, bits), typed(b, kind, bits)
        return truncated_div(a, b) & mask(bits) if b else mask(bits)

    def rem(a: int, b: int) -> int:
        a, b = typed(a, kind, bits), typed(b, kind, bits)
        return (a - b * truncated_div(a, b)) & mask(bits) if b else mask(bits)

    define(f"div.{t}", t, f"{t} {t}", div)
    define(f"rem.{t}", t, f"{t} {t}", rem)


def _bits() -> None:
    for bits in (32, 64):
        t = f"b{bits}"
        define(f"popc.{t}", "u32", t, lambda a: a.bit_count())
        define(f"clz.{t}", "u32", t, lambda a, bits=bits: bits - a.bit_length())
        define(f"brev.{t}", t, t, lambda a, bits=bits: int(f"{a:0{bits}b}"[::-1], 2))
        for kind in "us":
            extract = lambda a, p, n, kind=kind, bits=bits: bfe(a, p, n, kind, bits)
            # Beyond 255, to which the text restricts them, silicon does not mask the 64-bit form.
            small = tuple(range(70)) + (96, 127, 128, 200, 255) + (256, 300) * (bits == 32)
            define(
                f"bfe.{kind}{bits}",
                f"{kind}{bits}",
                f"{kind}{bits} u32 u32",
                extract,
                values=((1, small), (2, small)),
            )
    logic = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}
    for (name, f), bits in product(logic.items(), (16, 32, 64)):
        define(f"{name}.b{bits}", f"b{bits}", f"b{bits} b{bits}", f)
    for name, f in logic.items():
        define(f"{name}.pred", "pred", "pred pred", f)
    for bits in (16, 32, 64):
        define(f"not.b{bits}", f"b{bits}", f"b{bits}", lambda a, bits=bits: a ^ mask(bits))
    define("not.pred", "pred", "pred", lambda a: a ^ 1)
    _shifts()
    for table in (0x80, 0xFE, 0x40, 0x1A, 0x00, 0xFF, 0x96, 0xE8, 0xCA):
        define(
            "lop3.b32",
            "b32",
            "b32 b32 b32",
            lambda a, b, c, table=table: lop3(a, b, c, table),
            f"lop3.b32 {{d0}}, {{s0}}, {{s1}}, {{s2}}, {table:#x};",
        )
    define("prmt.b32", "b32", "b32 b32 b32", prmt)


def _shifts() -> None:
    amounts = tuple(range(70)) + (255, 256, 0x10000, 0x80000000, 0xFFFFFFFF)
    for bits, kind in product((16, 32, 64), "bus"):
        t, drawn = f"{kind}{bits}", ((1, amounts),)
        if kind == "b":
            left = lambda a, n, bits=bits: (a << min(n, bits)) & mask(bits)
            define(f"shl.{t}", t, f"{t} u32", left, values=drawn)
        right = lambda a, n, kind=kind, bits=bits: typed(a, kind, bits) >> min(n, bits) & mask(bits)
        define(f"shr.{t}", t, f"{t} u32", right, values=drawn)
    for mode, limit in (("clamp", lambda n: min(n, 32)), ("wrap", lambda n: n & 31)):
        left = lambda a, b, n, limit=limit: ((b << 32 | a) << limit(n)) >> 32 & mask(32)
        right = lambda a, b, n, limit=limit: ((b << 32 | a) >> limit(n)) & mask(32)
        for direction, f in (("l", left), ("r", right)):
            op = f"shf.{direction}.{mode}.b32"
            define(op, "b32", "b32 b32 u32", f, values=((2, amounts),))


def bfe(a: int, pos: int, length: int, kind: str, bits: int) -> int:
    """9.7.1.19, bit by bit."""
    msb, pos, length = bits - 1, pos & 0xFF, length & 0xFF
    sbit = 0 if kind == "u" or length == 0 else a >> min(pos + length - 1, msb) & 1
    out = 0
    for i in range(bits):
        out |= (a >> (pos + i) & 1 if i < length and pos + i <= msb else sbit) << i
    return out


def lop3(a: int, b: int, c: int, table: int) -> int:
    """9.7.8.6: the table's bit number is (a, b, c) of each position, a the highest."""
    out = 0
    for i in range(32):
        row = (a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1
        out |= (table >> row & 1) << i
    return out


def prmt(a: int, b: int, selector: int) -> int:
    """9.7.9.7, generic form."""
    source = (b << 32 | a).to_bytes(8, "little")
    out = []
    for i in range(4):
        control = selector >> 4 * i & 15
        byte = source[control & 7]
        out.append(byte if control < 8 else (255 if byte >> 7 else 0))
    return int.from_bytes(bytes(out), "little")


# -- comparison and selection (9.7.6) -------------------------------------------------------------

BOOLEAN: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
_SIGNED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {**_SIGNED, "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _setp(op: str, suffix: str, kind: str, test: Callable[[int, int], bool]) -> None:
    """The plain form, and each Boolean operator: p = t op c, q = !t op c (9.7.6.2)."""
    d0, two = "{d0}", "{s0}, {s1}"
    define(f"{op}.{suffix}", "pred", f"{kind} {kind}", lambda a, b: int(test(a, b)))
    both = lambda a, b: (int(test(a, b)), int(not test(a, b)))
    define(
        f"{op}.{suffix}", "pred pred", f"{kind} {kind}", both, f"{op}.{suffix} {d0}|{{d1}}, {two};"
    )
    for name, f in BOOLEAN.items():
        p = lambda a, b, c, f=f: f(int(test(a, b)), c)
        pq = lambda a, b, c, f=f: (f(int(test(a, b)), c), f(int(not test(a, b)), c))
        qn = lambda a, b, c, f=f: f(int(not test(a, b)), c ^ 1)
        full = f"{op}.{name}.{suffix}"
        src = f"{kind} {kind} pred"
        define(full, "pred", src, p)
        define(full, "pred pred", src, pq, f"{full} {d0}|{{d1}}, {two}, {{s2}};")
        define(full, "pred", src, qn, f"{full} _|{d0}, {two}, !{{s2}};")


def _comparisons() -> None:
    for kind, bits in product("bus", (16, 32, 64)):
        names = {"b": ("eq", "ne"), "s": _SIGNED, "u": _UNSIGNED}[kind]
        for name in names:
            compare = _COMPARE[_UNSIGNED[name]]
            test = lambda a, b, kind=kind, bits=bits, compare=compare: compare(
                typed(a, kind, bits), typed(b, kind, bits)
            )
            _setp(f"setp.{name}", f"{kind}{bits}", f"{kind}{bits}", test)
    ordered = ("eq", "ne", "lt", "le", "gt", "ge")
    for name in (*ordered, *(f"{n}u" for n in ordered), "num", "nan"):
        _setp(f"setp.{name}", "f32", "f32", lambda a, b, name=name: fp.compare(a, b, name))
        flushed = lambda a, b, name=name: fp.compare(fp.flush(a), fp.flush(b), name)
        _setp(f"setp.{name}", "ftz.f32", "f32", flushed)
        _setp(f"setp.{name}", "f64", "f64", lambda a, b, name=name: fp.compare(a, b, name, F64))
    pick = lambda a, b, p: a if p else b
    for t in [f"{k}{n}" for k, n in product("bus", (16, 32, 64))] + ["f32", "f64"]:
        define(f"selp.{t}", t, f"{t} {t} pred", pick)
        define(f"mov.{t}", t, t, lambda a: a)
    define("mov.pred", "pred", "pred", lambda a: a)


# -- floating point (9.7.3) -----------------------------------------------------------------------


def _post(bits: Bits, ftz: str, sat: str) -> Bits:
    assert isinstance(bits, int)
    bits = fp.flush(bits) if ftz else bits
    return fp.saturate(bits) if sat else bits


def _float_arithmetic() -> None:
    operations = {"add": (2, fp.add), "sub": (2, fp.sub), "mul": (2, fp.mul), "fma": (3, fp.fma)}
    roundings = ("", ".rn", ".rz", ".rm", ".rp")
    for (name, (n, f)), rnd, ftz in product(operations.items(), roundings, ("", ".ftz")):
        if name == "fma" and not rnd:
            continue

        def one(*xs: int, f: Any = f, rnd: str = rnd, ftz: str = ftz, sat: str = "") -> Bits:
            xs = tuple(fp.flush(x) if ftz else x for x in xs)
            return _post(f(*xs, F32, rnd[1:] or "rn"), ftz, sat)

        def two(*xs: int, one: Any = one) -> int:
            low, high = one(*(x & mask(32) for x in xs)), one(*(x >> 32 for x in xs))
            return int(high << 32 | low)

        for sat in ("", ".sat"):
            op = f"{name}{rnd}{ftz}{sat}.f32"
            define(
                op, "f32", " ".join(["f32"] * n), lambda *xs, one=one, sat=sat: one(*xs, sat=sat)
            )
        define(f"{name}{rnd}{ftz}.f32x2", "f32x2", " ".join(["f32x2"] * n), two)
        if not ftz:
            wide = lambda *xs, f=f, rnd=rnd: fp.propagated64(f(*xs, F64, rnd[1:] or "rn"), xs)
            define(f"{name}{rnd}.f64", "f64", " ".join(["f64"] * n), wide)


def _float_selection() -> None:
    for which, ftz, nan, absolute, n in product(
        ("min", "max"), ("", ".ftz"), ("", ".NaN"), ("", ".abs"), (2, 3)
    ):

        def pick(
            *xs: int, which: str = which, ftz: str = ftz, nan: str = nan, a: str = absolute
        ) -> int:
            xs = tuple(fp.flush(x) if ftz else x for x in xs)
            xs = tuple(x & mask(31) if a else x for x in xs)
            return fp.min_max(which, bool(nan), xs)

        # .xorsign goes with .abs and two sources, .abs alone with three.
        for sign in (".xorsign",) if absolute and n == 2 else ("",):

            def signed_pick(*xs: int, pick: Any = pick, ftz: str = ftz, sign: str = sign) -> int:
                out = pick(*xs)
                if not sign or fp.decode(out, F32).kind == "nan":
                    return int(out)
                return int(out & mask(31) | ((xs[0] ^ xs[1]) & F32.sign))

            op = f"{which}{ftz}{nan}{sign}{absolute}.f32"
            define(op, "f32", " ".join(["f32"] * n), signed_pick)
    for ftz in ("", ".ftz"):
        # NaN: PTX leaves its payload open; an H200 and the emulator give the canonical NaN.
        define(f"neg{ftz}.f32", "f32", "f32", lambda a, z=ftz: _nan_or(_ftz(a, z) ^ F32.sign))
        define(f"abs{ftz}.f32", "f32", "f32", lambda a, z=ftz: _nan_or(_ftz(a, z) & mask(31)))
    define("copysign.f32", "f32", "f32 f32", lambda a, b: a & F32.sign | b & mask(31))
    tests: dict[str, Callable[[fp.Num, int], bool]] = {
        "finite": lambda a, x: a.kind == "finite",
        "infinite": lambda a, x: a.kind == "inf",
        "notanumber": lambda a, x: a.kind == "nan",
        "number": lambda a, x: a.kind != "nan",
        # As a special case, zeros are normal (9.7.3.1).
        "normal": lambda a, x: a.kind == "finite" and (a.zero or fp.flush(x) == x),
        "subnormal": lambda a, x: a.kind == "finite" and not a.zero and fp.flush(x) != x,
    }
    for name, test in tests.items():
        define(f"testp.{name}.f32", "pred", "f32", lambda x, t=test: int(t(fp.decode(x, F32), x)))


def _ftz(x: int, ftz: str) -> int:
    return fp.flush(x) if ftz else x


def _nan_or(x: int) -> int:
    return F32.nan if fp.decode(x, F32).kind == "nan" else x


# How far silicon's ex2, rcp and roots, which the emulator has bit for bit, are from the true value:
# approx_sm90.json, and half a unit. Without .ftz small powers are squares of the unit's.
_UNIT_ULPS = {"ex2": 2.5, "rcp": 1.5, "rsqrt": 2.5, "sqrt": 1.5}
_SQUARED_ULPS = 5.5


def _unit_ulps(name: str, ftz: str) -> float:
    return _SQUARED_ULPS if (name, ftz) == ("ex2", "") else _UNIT_ULPS.get(name, 0.51)


def _functions() -> None:
    for name, ftz in product(("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos"), ("", ".ftz")):
        approximate = lambda a, n=name, z=ftz: fp.approximation(
            n, a, bool(z), ulps=_unit_ulps(n, z)
        )
        define(f"{name}.approx{ftz}.f32", "f32", "f32", approximate)
    define("tanh.approx.f32", "f32", "f32", lambda a: fp.approximation("tanh", a, False))
    one = 0x3F800000
    for rnd, ftz in product(("rn", "rz", "rm", "rp"), ("", ".ftz")):
        exact = {
            f"rcp.{rnd}{ftz}.f32": lambda a, m=rnd: fp.div(one, a, F32, m),
            f"sqrt.{rnd}{ftz}.f32": lambda a, m=rnd: fp.sqrt(a, F32, m),
            f"div.{rnd}{ftz}.f32": lambda a, b, m=rnd: fp.div(a, b, F32, m),
        }
        for op, f in exact.items():
            wrapped = lambda *xs, f=f, z=ftz: _post(f(*(_ftz(x, z) for x in xs)), z, "")
            define(op, "f32", "f32 f32" if op.startswith("div") else "f32", wrapped)
    for form, ftz in product(("full", "approx"), ("", ".ftz")):
        define(
            f"div.{form}{ftz}.f32", "f32", "f32 f32", lambda a, b, z=ftz, f=form: _quick(a, b, z, f)
        )


def _quick(a: int, b: int, ftz: str, form: str) -> Bits:
    """div.full and div.approx are within 2 ulp on silicon; the emulator rounds exactly, except that
    div.approx.f32 by more than 2**126 gives zero or NaN (9.7.3.8)."""
    a, b = _ftz(a, ftz), _ftz(b, ftz)
    huge = 0x7E800000 < (b & mask(31)) < F32.inf
    if form == "approx" and huge and fp.decode(a, F32).kind != "nan":
        return F32.nan if fp.decode(a, F32).kind == "inf" else (a ^ b) & F32.sign
    return _post(fp.div(a, b), ftz, "")


# -- conversions (9.7.9.21) -----------------------------------------------------------------------

_REGISTERS = {8: (16, 32, 64), 16: (16, 32, 64), 32: (32, 64), 64: (64,)}


def _int_conversions() -> None:
    types = [(k, n) for k, n in product("us", (8, 16, 32, 64))]
    for (dk, dn), (sk, sn), sat in product(types, types, ("", ".sat")):
        low, high = (-(1 << dn - 1), mask(dn - 1)) if dk == "s" else (0, mask(dn))
        slow, shigh = (-(1 << sn - 1), mask(sn - 1)) if sk == "s" else (0, mask(sn))
        if sat and low <= slow and shigh <= high:
            continue  # illegal: saturation is not possible
        for dr, sr in product(_REGISTERS[dn], _REGISTERS[sn]):

            def convert(x: int, t: Any = (dk, dn, sk, sn, dr, sat, low, high)) -> int:
                dk, dn, sk, sn, dr, sat, low, high = t
                value = typed(x, sk, sn)
                value = min(max(value, low), high) if sat else typed(value, dk, dn)
                return value & mask(dr)

            op = f"cvt{sat}.{dk}{dn}.{sk}{sn}"
            define(op, f"{dk}{dn}.{dr}", f"{sk}{sn}.{sr}", convert, imm=())


def _float_conversions() -> None:
    for mode, kind, bits in product(("rn", "rz", "rm", "rp"), "us", (8, 16, 32, 64)):
        for register in _REGISTERS[bits]:
            f = lambda x, t=(kind, bits, mode): fp.from_int(typed(x, t[0], t[1]), F32, t[2])
            op = f"cvt.{mode}.f32.{kind}{bits}"
            define(op, "f32", f"{kind}{bits}.{register}", f, imm=())
    for mode, ftz, sat in product(("rni", "rzi", "rmi", "rpi"), ("", ".ftz"), ("", ".sat")):
        whole = lambda x, m=mode, z=ftz, s=sat: _post(fp.to_integral(_ftz(x, z), m), z, s)
        define(f"cvt.{mode}{ftz}{sat}.f32.f32", "f32", "f32", whole, imm=())
        for kind, bits in product("us", (8, 16, 32, 64)):
            op = f"cvt.{mode}{ftz}{sat}.{kind}{bits}.f32"
            for register in _REGISTERS[bits]:
                define(
                    op,
                    f"{kind}{bits}.{register}",
                    "f32",
                    lambda x, t=(mode, ftz, kind, bits, register): _extended_int(x, *t),
                    imm=(),
                )
    for ftz, sat in product(("", ".ftz"), ("", ".sat")):
        # A plain copy keeps a NaN's bits (measured: an H200; PTX leaves it open).
        same = lambda x, z=ftz, s=sat: _post(_nan_or(_ftz(x, z)), z, s) if z or s else x
        define(f"cvt{ftz}{sat}.f32.f32", "f32", "f32", same, imm=())
    define("cvt.rn.f32.f64", "f32", "f64", lambda x: fp.convert_keeping_nan(x, F64, F32), imm=())
    define("cvt.f64.f32", "f64", "f32", lambda x: fp.convert_keeping_nan(x, F32, F64), imm=())
    _half_conversions()


def _extended_int(x: int, mode: str, ftz: str, kind: str, bits: int, register: int) -> int:
    value = fp.to_int(_ftz(x, ftz), mode, bits, kind == "s")
    return typed(value, kind, bits) & mask(register)


def _half_conversions() -> None:
    for (name, fmt), mode, relu in product(
        (("f16", F16), ("bf16", BF16)), ("rn", "rz"), ("", ".relu")
    ):

        def half(x: int, fmt: fp.Format = fmt, mode: str = mode, relu: str = relu) -> int:
            out = fp.convert(x, F32, fmt, mode)
            return 0 if relu and out & fmt.sign else out

        op = f"cvt.{mode}{relu}.{name}"
        define(f"{op}x2.f32", "b32", "f32 f32", lambda a, b, half=half: half(a) << 16 | half(b))
        define(f"{op}.f32", "b16", "f32", half, imm=())
    define("cvt.f32.f16", "f32", "f16", lambda x: fp.convert(x, F16, F32), imm=())
    # NaN: open in PTX, kept by an H200.
    define("cvt.f32.bf16", "f32", "bf16", lambda x: x << 16, imm=())


for _fill in (
    _integers,
    _bits,
    _comparisons,
    _float_arithmetic,
    _float_selection,
    _functions,
    _int_conversions,
    _float_conversions,
):
    _fill()


# They add their opcodes to SPECS.
from . import oracle_half, oracle_wide  # noqa: E402, F401


def all_specs() -> Iterator[Spec]:
    for specs in SPECS.values():
        yield from specs
