"""Extended precision: arithmetic with a carry, and integer instructions of the rarer kind.

PTX ISA 9.1 sections 9.7.2 (add.cc, addc, sub.cc, subc, mad.cc, madc) and 9.7.1 (bfi, bfind, dp4a,
dp2a, mul24, mad24, sad, add.sat, sub.sat). The parser makes the carry CC.CF an operand: what sets
it has the destination ``d|cc``, what reads it has it as the last source.
"""

from __future__ import annotations

import re

from ..ptx.ast import Instr, Operand, Reg, RegPair
from .builder import BlockBuilder
from .integer import INT, get, put
from .ir import I1, I32, I64, ZERO, splat_i
from .table import native


def _put_with_carry(b: BlockBuilder, d: Operand, width: str, value: str, carry: str) -> None:
    """Writes the result and, if the instruction sets it, the carry."""
    if isinstance(d, RegPair):
        put(b, width, d.first, value)
        b.set_p(d.second, carry)
    else:
        put(b, width, d, value)


def _carry_in(b: BlockBuilder, ty: str, cc: Operand | None) -> str:
    if cc is None:
        return ZERO
    if not isinstance(cc, Reg):
        raise b.unsupported("no carry")
    return b.t(f"zext {I1} {b.p(cc)} to {ty}")


def _add(b: BlockBuilder, ty: str, x: str, y: str, carry: str) -> tuple[str, str]:
    """x + y + carry, and the carry out of the top."""
    s = b.t(f"add {ty} {x}, {y}")
    first = b.t(f"icmp ult {ty} {s}, {x}")
    total = b.t(f"add {ty} {s}, {carry}")
    second = b.t(f"icmp ult {ty} {total}, {s}")
    return total, b.t(f"or {I1} {first}, {second}")


@native(r"(add)()\.cc\.[us](32|64)")
@native(r"(add)(c)(?:\.cc)?\.[us](32|64)")
@native(r"(sub)()\.cc\.[us](32|64)")
@native(r"(sub)(c)(?:\.cc)?\.[us](32|64)")
def add_sub(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Of a subtraction CC.CF is the borrow."""
    op, reads, width = m.groups()
    d, x, y, *rest = ins.operands
    ty = INT[width]
    left, right = get(b, width, x), get(b, width, y)
    carry = _carry_in(b, ty, rest[0] if reads else None)
    if op == "add":
        out, carried = _add(b, ty, left, right, carry)
    else:
        difference = b.t(f"sub {ty} {left}, {right}")
        first = b.t(f"icmp ult {ty} {left}, {right}")
        out = b.t(f"sub {ty} {difference}, {carry}")
        second = b.t(f"icmp ult {ty} {difference}, {carry}")
        carried = b.t(f"or {I1} {first}, {second}")
    _put_with_carry(b, d, width, out, carried)


@native(r"mad()\.(hi|lo)\.cc\.([us])(32|64)")
@native(r"mad(c)\.(hi|lo)(?:\.cc)?\.([us])(32|64)")
def mad(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """The carry is that of the addition."""
    reads, part, sign, width = m.groups()
    d, x, y, z, *rest = ins.operands
    bits, ty = int(width), INT[width]
    wide, extend = f"<32 x i{2 * bits}>", "sext" if sign == "s" else "zext"
    factors = [b.t(f"{extend} {ty} {get(b, width, v)} to {wide}") for v in (x, y)]
    product = b.t(f"mul {wide} {factors[0]}, {factors[1]}")
    if part == "hi":
        product = b.t(f"lshr {wide} {product}, {splat_i(2 * bits, bits)}")
    product = b.t(f"trunc {wide} {product} to {ty}")
    carry = _carry_in(b, ty, rest[0] if reads else None)
    out, carried = _add(b, ty, product, get(b, width, z), carry)
    _put_with_carry(b, d, width, out, carried)


# -- rarer integer instructions ------------------------------------------------------------------


@native(r"(add|sub)\.sat\.s32")
def saturating(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x, y = ins.operands
    args = ((I32, b.i32(x)), (I32, b.i32(y)))
    b.set_i32(d, b.call(I32, f"llvm.s{m[1]}.sat.v32i32", *args))


@native(r"bfi\.b(32|64)")
def bfi(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """The low bits of a, placed in b. Widths and positions up to 255 are legal."""
    d, x, y, pos, length = ins.operands
    bits, ty = int(m[1]), INT[m[1]]
    value, into = get(b, m[1], x), get(b, m[1], y)
    p, n = (b.t(f"and {I32} {b.i32(v)}, {splat_i(32, 0xFF)}") for v in (pos, length))
    beyond = b.t(f"icmp uge {I32} {p}, {splat_i(32, bits)}")
    whole = b.t(f"icmp uge {I32} {n}, {splat_i(32, bits)}")
    p, n = (b.t(f"and {I32} {v}, {splat_i(32, bits - 1)}") for v in (p, n))
    if bits == 64:
        p, n = (b.t(f"zext {I32} {v} to {I64}") for v in (p, n))
    field = b.t(f"sub {ty} {b.t(f'shl {ty} {splat_i(bits, 1)}, {n}')}, {splat_i(bits, 1)}")
    field = b.t(f"select {I1} {whole}, {ty} {splat_i(bits, -1)}, {ty} {field}")
    field = b.t(f"shl {ty} {field}, {p}")
    field = b.t(f"select {I1} {beyond}, {ty} {ZERO}, {ty} {field}")
    inserted = b.t(f"and {ty} {b.t(f'shl {ty} {value}, {p}')}, {field}")
    kept = b.t(f"and {ty} {into}, {b.t(f'xor {ty} {field}, {splat_i(bits, -1)}')}")
    put(b, m[1], d, b.t(f"or {ty} {inserted}, {kept}"))


@native(r"bfind(\.shiftamt)?\.([us])(32|64)")
def bfind(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    bits, ty = int(m[3]), INT[m[3]]
    value = get(b, m[3], x)
    if m[2] == "s":
        signs = b.t(f"ashr {ty} {value}, {splat_i(bits, bits - 1)}")
        value = b.t(f"xor {ty} {value}, {signs}")
    above = b.call(ty, f"llvm.ctlz.v32i{bits}", (ty, value), ("i1", "false"))
    out = above if m[1] else b.t(f"sub {ty} {splat_i(bits, bits - 1)}, {above}")
    none = b.t(f"icmp eq {ty} {value}, {ZERO}")
    out = b.t(f"select {I1} {none}, {ty} {splat_i(bits, -1)}, {ty} {out}")
    b.set_i32(d, b.t(f"trunc {ty} {out} to {I32}") if bits == 64 else out)


@native(r"(dp4a)\.([us])32\.([us])32")
@native(r"(dp2a)\.(?:lo|hi)\.([us])32\.([us])32")
def dot(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """dp4a: four products of bytes; dp2a: the halves of a with two bytes of b, low or high."""
    d, x, y, z = ins.operands
    four = m[1] == "dp4a"
    count, bits = (4, 8) if four else (2, 16)
    start = 16 if ins.op.startswith("dp2a.hi") else 0
    left, right, out = b.i32(x), b.i32(y), b.i32(z)
    for i in range(count):
        u = _field(b, left, bits * i, bits, m[2])
        v = _field(b, right, start + 8 * i, 8, m[3])
        out = b.t(f"add {I32} {out}, {b.t(f'mul {I32} {u}, {v}')}")
    b.set_i32(d, out)


def _field(b: BlockBuilder, value: str, at: int, bits: int, sign: str) -> str:
    """Bits ``at`` and up, extended to 32."""
    top = b.t(f"shl {I32} {value}, {splat_i(32, 32 - bits - at)}")
    return b.t(f"{'ashr' if sign == 's' else 'lshr'} {I32} {top}, {splat_i(32, 32 - bits)}")


@native(r"(mul|mad)24\.(hi|lo)\.([us])32")
def mul24(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Bits 47 to 16 (hi) or 31 to 0 (lo) of the product of 24-bit numbers."""
    d, x, y, *z = ins.operands
    extend = "sext" if m[3] == "s" else "zext"
    factors = [b.t(f"{extend} {I32} {_field(b, b.i32(v), 0, 24, m[3])} to {I64}") for v in (x, y)]
    product = b.t(f"mul {I64} {factors[0]}, {factors[1]}")
    if m[2] == "hi":
        product = b.t(f"lshr {I64} {product}, {splat_i(64, 16)}")
    out = b.t(f"trunc {I64} {product} to {I32}")
    if (m[1] == "mad") != (len(z) == 1):
        raise b.unsupported("operands")
    b.set_i32(d, b.t(f"add {I32} {out}, {b.i32(z[0])}") if z else out)


@native(r"sad\.([us])(16|32|64)")
def sad(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """c + |a - b|"""
    d, x, y, z = ins.operands
    ty = INT[m[2]]
    left, right = get(b, m[2], x), get(b, m[2], y)
    below = b.t(f"icmp {m[1]}lt {ty} {left}, {right}")
    up, down = (b.t(f"sub {ty} {u}, {v}") for u, v in ((left, right), (right, left)))
    distance = b.t(f"select {I1} {below}, {ty} {down}, {ty} {up}")
    put(b, m[2], d, b.t(f"add {ty} {get(b, m[2], z)}, {distance}"))
