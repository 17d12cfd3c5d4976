"""Integer, logic, comparison and moves (PTX ISA 9.1 sections 9.7.1, 9.7.6, 9.7.8, 9.7.9)."""

from __future__ import annotations

import re

from ..memory.local import LOCAL_GENERIC_BASE
from ..ptx.ast import Imm, Instr, Operand, Reg, RegPair, Sink, Special, Sym, Vec
from .builder import V32, BlockBuilder
from .ir import F32, I1, I16, I32, I64, Code, splat_i
from .table import native

INT = {"16": I16, "32": I32, "64": I64}


def get(b: BlockBuilder, bits: str, op: Operand) -> str:
    return {"16": b.i16, "32": b.i32, "64": b.i64}[bits](op)


def put(b: BlockBuilder, bits: str, op: Operand, name: str) -> None:
    {"16": b.set_i16, "32": b.set_i32, "64": b.set_i64}[bits](op, name)


@native(r"(add|sub)\.[us](16|32|64)")
def add_sub(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x, y = ins.operands
    put(b, m[2], d, b.t(f"{m[1]} {INT[m[2]]} {get(b, m[2], x)}, {get(b, m[2], y)}"))


@native(r"mul\.lo\.[us](16|32|64)")
def mul_lo(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x, y = ins.operands
    put(b, m[1], d, b.t(f"mul {INT[m[1]]} {get(b, m[1], x)}, {get(b, m[1], y)}"))


def _wide(b: BlockBuilder, sign: str, bits: int, x: Operand, y: Operand) -> str:
    """The full product, in twice the width."""
    narrow, wide = f"<32 x i{bits}>", f"<32 x i{2 * bits}>"
    ext = "sext" if sign == "s" else "zext"
    left = b.t(f"{ext} {narrow} {get(b, str(bits), x)} to {wide}")
    right = b.t(f"{ext} {narrow} {get(b, str(bits), y)} to {wide}")
    return b.t(f"mul {wide} {left}, {right}")


@native(r"mul\.(hi|wide)\.([us])(16|32)")
def mul_wide(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x, y = ins.operands
    bits = int(m[3])
    product = _wide(b, m[2], bits, x, y)
    if m[1] == "wide":
        put(b, str(2 * bits), d, product)
        return
    wide = f"<32 x i{2 * bits}>"
    high = b.t(f"lshr {wide} {product}, {splat_i(2 * bits, bits)}")
    put(b, m[3], d, b.t(f"trunc {wide} {high} to {INT[m[3]]}"))


@native(r"mul\.hi\.([us])64")
def mul_hi64(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x, y = ins.operands
    product = _wide(b, m[1], 64, x, y)
    high = b.t(f"lshr <32 x i128> {product}, {splat_i(128, 64)}")
    b.set_i64(d, b.t(f"trunc <32 x i128> {high} to {I64}"))


@native(r"mad\.lo\.[us](16|32|64)")
def mad_lo(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x, y, z = ins.operands
    product = b.t(f"mul {INT[m[1]]} {get(b, m[1], x)}, {get(b, m[1], y)}")
    put(b, m[1], d, b.t(f"add {INT[m[1]]} {product}, {get(b, m[1], z)}"))


@native(r"mad\.wide\.([us])(16|32)")
def mad_wide(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x, y, z = ins.operands
    bits = 2 * int(m[2])
    product = _wide(b, m[1], int(m[2]), x, y)
    put(b, str(bits), d, b.t(f"add <32 x i{bits}> {product}, {get(b, str(bits), z)}"))


@native(r"mad\.hi\.([us])32")
def mad_hi(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x, y, z = ins.operands
    high = b.t(f"lshr {I64} {_wide(b, m[1], 32, x, y)}, {splat_i(64, 32)}")
    b.set_i32(d, b.t(f"add {I32} {b.t(f'trunc {I64} {high} to {I32}')}, {b.i32(z)}"))


@native(r"(div|rem)\.([us])(16|32|64)")
def div_rem(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Division by zero gives an unspecified value in PTX (all ones here), never a trap; the host
    would trap, also on INT_MIN / -1."""
    d, x, y = ins.operands
    ty, bits = INT[m[3]], int(m[3])
    left, right = get(b, m[3], x), get(b, m[3], y)
    zero = b.t(f"icmp eq {ty} {right}, zeroinitializer")
    safe = b.t(f"select {I1} {zero}, {ty} {splat_i(bits, 1)}, {ty} {right}")
    if m[2] == "s":
        is_min = b.t(f"icmp eq {ty} {left}, {splat_i(bits, 1 << (bits - 1))}")
        is_m1 = b.t(f"icmp eq {ty} {right}, {splat_i(bits, -1)}")
        wraps = b.t(f"and {I1} {is_min}, {is_m1}")
        safe = b.t(f"select {I1} {wraps}, {ty} {splat_i(bits, 1)}, {ty} {safe}")
    value = b.t(f"{m[2]}{m[1]} {ty} {left}, {safe}")
    if m[2] == "s" and m[1] == "rem":
        value = b.t(f"select {I1} {wraps}, {ty} zeroinitializer, {ty} {value}")
    put(b, m[3], d, b.t(f"select {I1} {zero}, {ty} {splat_i(bits, -1)}, {ty} {value}"))


@native(r"(min|max)()\.([us])(16|32|64)")
@native(r"(min|max)(\.relu)\.(s)(32)")
def min_max(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """.relu raises negative results to 0."""
    d, x, y = ins.operands
    ty, pred = INT[m[4]], m[3] + ("lt" if m[1] == "min" else "gt")
    left, right = get(b, m[4], x), get(b, m[4], y)
    take = b.t(f"icmp {pred} {ty} {left}, {right}")
    out = b.t(f"select {I1} {take}, {ty} {left}, {ty} {right}")
    if m[2]:
        negative = b.t(f"icmp slt {ty} {out}, zeroinitializer")
        out = b.t(f"select {I1} {negative}, {ty} zeroinitializer, {ty} {out}")
    put(b, m[4], d, out)


@native(r"(neg|abs)\.s(16|32|64)")
def neg_abs(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    ty = INT[m[2]]
    value = get(b, m[2], x)
    negative = b.t(f"sub {ty} zeroinitializer, {value}")
    if m[1] == "abs":
        below = b.t(f"icmp slt {ty} {value}, zeroinitializer")
        negative = b.t(f"select {I1} {below}, {ty} {negative}, {ty} {value}")
    put(b, m[2], d, negative)


@native(r"(popc|clz|brev)\.b(32|64)")
def count_bits(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    ty, name = INT[m[2]], {"popc": "ctpop", "clz": "ctlz", "brev": "bitreverse"}[m[1]]
    args = [(ty, get(b, m[2], x))] + ([("i1", "false")] if m[1] == "clz" else [])
    value = b.call(ty, f"llvm.{name}.v32i{m[2]}", *args)
    if m[1] == "brev":
        put(b, m[2], d, value)
    else:
        b.set_i32(d, b.t(f"trunc {I64} {value} to {I32}") if m[2] == "64" else value)


@native(r"(and|or|xor)\.b(16|32|64)")
def logic(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x, y = ins.operands
    put(b, m[2], d, b.t(f"{m[1]} {INT[m[2]]} {get(b, m[2], x)}, {get(b, m[2], y)}"))


@native(r"not\.b(16|32|64)")
def logic_not(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    put(b, m[1], d, b.t(f"xor {INT[m[1]]} {get(b, m[1], x)}, {splat_i(int(m[1]), -1)}"))


@native(r"(and|or|xor)\.pred")
def logic_pred(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x, y = ins.operands
    b.set_p(d, b.t(f"{m[1]} {I1} {b.p(x)}, {b.p(y)}"))


@native(r"not\.pred")
def not_pred(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    b.set_p(d, b.t(f"xor {I1} {b.p(x)}, {splat_i(1, 1)}"))


@native(r"(shl)\.(b)(16|32|64)")
@native(r"(shr)\.([bus])(16|32|64)")
def shift(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Amounts above the width are clamped to it (PTX ISA 9.7.8.7): zeros, or the sign."""
    d, x, amount = ins.operands
    bits, ty = int(m[3]), INT[m[3]]
    value = get(b, m[3], x)
    arithmetic = m[1] == "shr" and m[2] == "s"
    op = "shl" if m[1] == "shl" else ("ashr" if arithmetic else "lshr")
    if isinstance(amount, Imm):
        n = amount.value & 0xFFFFFFFF
        if n >= bits and not arithmetic:
            put(b, m[3], d, b.t(f"and {ty} {value}, zeroinitializer"))
        else:
            put(b, m[3], d, b.t(f"{op} {ty} {value}, {splat_i(bits, min(n, bits - 1))}"))
        return
    by = b.i32(amount)
    over = b.t(f"icmp uge {I32} {by}, {splat_i(32, bits)}")
    safe = b.t(f"select {I1} {over}, {I32} {splat_i(32, bits - 1)}, {I32} {by}")
    if bits != 32:
        safe = b.t(f"{'zext' if bits == 64 else 'trunc'} {I32} {safe} to {ty}")
    out = b.t(f"{op} {ty} {value}, {safe}")
    if not arithmetic:
        out = b.t(f"select {I1} {over}, {ty} zeroinitializer, {ty} {out}")
    put(b, m[3], d, out)


@native(r"shf\.([lr])\.(wrap|clamp)\.b32")
def funnel(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, lo, hi, amount = ins.operands
    by = b.i32(amount)
    if m[2] == "wrap":
        name = "llvm.fshl.v32i32" if m[1] == "l" else "llvm.fshr.v32i32"
        b.set_i32(d, b.call(I32, name, (I32, b.i32(hi)), (I32, b.i32(lo)), (I32, by)))
        return
    over = b.t(f"icmp ugt {I32} {by}, {splat_i(32, 32)}")
    by = b.t(f"select {I1} {over}, {I32} {splat_i(32, 32)}, {I32} {by}")
    by = b.t(f"zext {I32} {by} to {I64}")
    low = b.t(f"zext {I32} {b.i32(lo)} to {I64}")
    high = b.t(f"shl {I64} {b.t(f'zext {I32} {b.i32(hi)} to {I64}')}, {splat_i(64, 32)}")
    both = b.t(f"or {I64} {low}, {high}")
    if m[1] == "r":
        out = b.t(f"lshr {I64} {both}, {by}")
    else:
        out = b.t(f"shl {I64} {both}, {by}")
        out = b.t(f"lshr {I64} {out}, {splat_i(64, 32)}")
    b.set_i32(d, b.t(f"trunc {I64} {out} to {I32}"))


@native(r"lop3\.b32")
def lop3(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Sum of the minterms whose bit is set in the table (a=0xF0, b=0xCC, c=0xAA)."""
    d, x, y, z, table = ins.operands
    if not isinstance(table, Imm):
        raise b.unsupported("the truth table must be an immediate")
    values = [b.i32(x), b.i32(y), b.i32(z)]
    inverse = [b.t(f"xor {I32} {v}, {splat_i(32, -1)}") for v in values]
    out = "zeroinitializer"
    for minterm in range(8):
        if table.value >> minterm & 1:
            picks = [values[i] if minterm >> (2 - i) & 1 else inverse[i] for i in range(3)]
            term = b.t(f"and {I32} {b.t(f'and {I32} {picks[0]}, {picks[1]}')}, {picks[2]}")
            out = b.t(f"or {I32} {out}, {term}")
    b.set_i32(d, b.t(f"or {I32} {out}, zeroinitializer"))


@native(r"prmt\.b32")
def prmt(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Default mode: four nibbles choose bytes, bit 3 replicates the byte's sign."""
    d, x, y, selector = ins.operands
    if not isinstance(selector, Imm):
        args = ((I32, b.i32(v)) for v in (x, y, selector))
        b.set_i32(d, b.outlined(I32, "prmt", _prmt, *args))
        return
    sources = (b.i32(x), b.i32(y))
    out = "zeroinitializer"
    for i in range(4):
        nibble = selector.value >> (4 * i) & 15
        byte = b.t(f"lshr {I32} {sources[(nibble >> 2) & 1]}, {splat_i(32, 8 * (nibble & 3))}")
        if nibble & 8:
            byte = b.t(f"shl {I32} {byte}, {splat_i(32, 24)}")
            byte = b.t(f"ashr {I32} {byte}, {splat_i(32, 31)}")
        byte = b.t(f"and {I32} {byte}, {splat_i(32, 0xFF)}")
        out = b.t(f"or {I32} {out}, {b.t(f'shl {I32} {byte}, {splat_i(32, 8 * i)}')}")
    b.set_i32(d, b.t(f"or {I32} {out}, zeroinitializer"))


def _prmt(b: Code, x: str, y: str, selector: str) -> str:
    """Each lane has a selector of its own."""
    high = b.t(f"shl {I64} {b.t(f'zext {I32} {y} to {I64}')}, {splat_i(64, 32)}")
    source = b.t(f"or {I64} {high}, {b.t(f'zext {I32} {x} to {I64}')}")
    out = "zeroinitializer"
    for i in range(4):
        nibble = b.t(f"lshr {I32} {selector}, {splat_i(32, 4 * i)}")
        at = b.t(f"shl {I32} {b.t(f'and {I32} {nibble}, {splat_i(32, 7)}')}, {splat_i(32, 3)}")
        moved = b.t(f"lshr {I64} {source}, {b.t(f'zext {I32} {at} to {I64}')}")
        byte = b.t(f"trunc {I64} {moved} to <32 x i8>")
        signs = b.t(f"ashr <32 x i8> {byte}, {splat_i(8, 7)}")
        flag = b.t(f"and {I32} {nibble}, {splat_i(32, 8)}")
        wants_sign = b.t(f"icmp ne {I32} {flag}, zeroinitializer")
        byte = b.t(f"select {I1} {wants_sign}, <32 x i8> {signs}, <32 x i8> {byte}")
        byte = b.t(f"zext <32 x i8> {byte} to {I32}")
        out = b.t(f"or {I32} {out}, {b.t(f'shl {I32} {byte}, {splat_i(32, 8 * i)}')}")
    return out


@native(r"bfe\.([us])(32|64)")
def bfe(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Bits pos to pos+len-1, extended (PTX ISA 9.1 section 9.7.1.19)."""
    d, x, pos, length = ins.operands
    ty, sign = INT[m[2]], m[1]
    emit = lambda c, x, p, n: _bfe(c, sign, int(m[2]), x, p, n)
    args = ((ty, get(b, m[2], x)), (I32, b.i32(pos)), (I32, b.i32(length)))
    put(b, m[2], d, b.outlined(ty, f"bfe.{sign}{m[2]}", emit, *args))


def _bfe(b: Code, sign: str, bits: int, x: str, pos: str, length: str) -> str:
    """The field is moved to the top and back down; shifts as wide as the register or wider, which
    the host leaves undefined, do not occur: amounts are cut, a shift right is done in two steps."""
    ty, top = INT[str(bits)], bits - 1
    p, n = (b.t(f"and {I32} {v}, {splat_i(32, 0xFF)}") for v in (pos, length))
    empty = b.t(f"icmp eq {I32} {n}, zeroinitializer")
    if bits == 64:
        x, p, n = x, b.t(f"zext {I32} {p} to {ty}"), b.t(f"zext {I32} {n} to {ty}")
    shift = "ashr" if sign == "s" else "lshr"
    beyond = b.t(f"icmp ugt {ty} {p}, {splat_i(bits, top)}")
    held = b.t(f"select {I1} {beyond}, {ty} {splat_i(bits, top)}, {ty} {p}")
    field = b.t(f"{shift} {ty} {x}, {held}")
    if sign == "u":
        field = b.t(f"select {I1} {beyond}, {ty} zeroinitializer, {ty} {field}")
    whole = b.t(f"icmp ugt {ty} {n}, {splat_i(bits, top)}")
    unused = b.t(f"sub {ty} {splat_i(bits, bits)}, {n}")
    unused = b.t(f"select {I1} {whole}, {ty} zeroinitializer, {ty} {unused}")
    unused = b.t(f"and {ty} {unused}, {splat_i(bits, top)}")  # n = 0 is overridden below
    field = b.t(f"{shift} {ty} {b.t(f'shl {ty} {field}, {unused}')}, {unused}")
    return b.t(f"select {I1} {empty}, {ty} zeroinitializer, {ty} {field}")


@native(r"selp\.[bus](16|32|64)")
@native(r"selp\.f(32|64)")
def selp(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Keeps the bits of what it selects, so a host NaN beside a value from elsewhere must become
    canonical first."""
    d, x, y, p = ins.operands
    ty = INT[m[1]]
    if ins.op == "selp.f32" and (raw := _same_rawness(b, x, y)) is not None:
        b.set_f32(d, b.t(f"select {I1} {b.p(p)}, {F32} {b.f32(x)}, {F32} {b.f32(y)}"), raw=raw)
        return
    put(b, m[1], d, b.t(f"select {I1} {b.p(p)}, {ty} {get(b, m[1], x)}, {ty} {get(b, m[1], y)}"))


def _same_rawness(b: BlockBuilder, x: Operand, y: Operand) -> bool | None:
    """Whether both may hold a host NaN (True) or both may not (False); None if they differ. A
    constant that is no NaN goes with either."""
    seen = set()
    for op in (x, y):
        if isinstance(op, Imm) and not 0x7F800000 < b.imm_bits(op, 32) & 0x7FFFFFFF:
            continue
        value = _value(b, op)
        seen.add(isinstance(value, V32) and value.raw)
    return seen.pop() if len(seen) == 1 else None if seen else False


def _value(b: BlockBuilder, op: Operand) -> object:
    return b.value(op.name) if isinstance(op, Reg) else None


_ICMP = {
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
    "lo": "lt",
    "ls": "le",
    "hi": "gt",
    "hs": "ge",
}


@native(r"setp\.(eq|ne)(?:\.(and|or|xor))?\.(b)(16|32|64)")
@native(r"setp\.(eq|ne|lt|le|gt|ge)(?:\.(and|or|xor))?\.(s)(16|32|64)")
@native(r"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)(?:\.(and|or|xor))?\.(u)(16|32|64)")
def setp(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    cmp = _ICMP[m[1]]
    if cmp not in ("eq", "ne"):
        cmp = m[3] + cmp
    x, y = ins.operands[1:3]
    value = b.t(f"icmp {cmp} {INT[m[4]]} {get(b, m[4], x)}, {get(b, m[4], y)}")
    put_predicate(b, ins, value, m[2])


def put_predicate(b: BlockBuilder, ins: Instr, value: str, combine: str | None) -> None:
    """setp's destination ``p`` or ``p|q`` (q is the complement), combined with a third operand."""
    d = ins.operands[0]
    targets: list[tuple[Operand, str]] = [(d, value)]
    if isinstance(d, RegPair):
        complement = b.t(f"xor {I1} {value}, {splat_i(1, 1)}")
        targets = [(d.first, value), (d.second, complement)]
    extra = b.p(ins.operands[3]) if combine else None
    for target, v in targets:
        if combine:
            v = b.t(f"{combine} {I1} {v}, {extra}")
        if not isinstance(target, Sink):
            b.set_p(target, v)


# -- moves ---------------------------------------------------------------------------------------


@native(r"mov\.(?:[bus](16|32|64)|pred)")
@native(r"mov\.f(32|64)")
def mov(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    d, x = ins.operands
    if isinstance(d, Vec):
        _unpack(b, d, x, m[1])
    elif isinstance(x, Vec):
        _pack(b, d, x, m[1])
    elif isinstance(x, Reg) and not x.negated:
        b.copy(d, x)
    elif isinstance(x, Special):
        _mov_special(b, d, x)
    elif m[1] is None:
        b.set_p(d, b.t(f"or {I1} {b.p(x)}, zeroinitializer"))
    elif isinstance(x, Sym) and m[1] == "64":
        b.set_i64(d, b.t(f"or {I64} {b.i64(x)}, zeroinitializer"))
    else:
        put(b, m[1], d, get(b, m[1], x))


def _mov_special(b: BlockBuilder, d: Operand, x: Special) -> None:
    value = b.value(x.name)
    assert isinstance(value, V32)
    b.set_i32(d, b.bits32(value))


def _pack(b: BlockBuilder, d: Operand, x: Vec, bits: str) -> None:
    if bits == "64" and len(x.items) == 2:
        lo, hi = (V32(i=b.i32(v)) if not isinstance(v, Reg) else b.value(v.name) for v in x.items)
        if not isinstance(lo, V32) or not isinstance(hi, V32):
            raise b.unsupported("packing needs two 32-bit registers")
        b.set_pair(d, lo, hi)
    elif bits == "32" and len(x.items) == 2:
        lo16 = b.t(f"zext {I16} {b.i16(x.items[0])} to {I32}")
        hi16 = b.t(f"zext {I16} {b.i16(x.items[1])} to {I32}")
        hi16 = b.t(f"shl {I32} {hi16}, {splat_i(32, 16)}")
        b.set_i32(d, b.t(f"or {I32} {lo16}, {hi16}"))
    elif bits == "64" and len(x.items) == 4:
        out = "zeroinitializer"
        for k, item in enumerate(x.items):
            part = b.t(f"zext {I16} {b.i16(item)} to {I64}")
            out = b.t(f"or {I64} {out}, {b.t(f'shl {I64} {part}, {splat_i(64, 16 * k)}')}")
        b.set_i64(d, out)
    elif (bits, len(x.items)) in (("32", 4), ("16", 2)):
        out, ty = "zeroinitializer", INT[bits]
        for k, item in enumerate(x.items):
            part = b.i8(item) if bits == "16" else b.t(f"zext {I16} {b.i8(item)} to {I32}")
            out = b.t(f"or {ty} {out}, {b.t(f'shl {ty} {part}, {splat_i(int(bits), 8 * k)}')}")
        put(b, bits, d, out)
    else:
        raise b.unsupported(f"packing {len(x.items)} parts into {bits} bits is not modelled")


def _unpack(b: BlockBuilder, d: Vec, x: Operand, bits: str) -> None:
    if bits == "64" and len(d.items) == 2:
        for target, half in zip(d.items, b.pair(x), strict=True):
            if not isinstance(target, Sink):
                b.set_v32(target, V32(half.i, half.f, half.raw))
        return
    count = len(d.items)
    if count not in (2, 4) or int(bits) // count not in (8, 16):
        raise b.unsupported(f"unpacking {bits} bits into {count} parts is not modelled")
    ty, value, part_bits = INT[bits], get(b, bits, x), int(bits) // count
    for k, target in enumerate(d.items):
        if isinstance(target, Sink):
            continue
        part = b.t(f"lshr {ty} {value}, {splat_i(int(bits), part_bits * k)}")
        part = part if bits == "16" else b.t(f"trunc {ty} {part} to {I16}")
        if part_bits == 16:
            b.set_i16(target, part)
        else:
            b.set_i8(target, b.t(f"and {I16} {part}, {splat_i(16, 0xFF)}"))


@native(r"cvta(?:\.to)?\.(param|global|const)\.u64")
def cvta(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Parameters and globals have their generic address already."""
    d, x = ins.operands
    b.set_i64(d, b.t(f"or {I64} {b.i64(x)}, zeroinitializer"))


@native(r"cvta(\.to)?\.local\.u64")
def cvta_local(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """The local window lies among generic addresses, above those of the host."""
    d, x = ins.operands
    op = "sub" if m[1] else "add"
    b.set_i64(d, b.t(f"{op} {I64} {b.i64(x)}, {splat_i(64, LOCAL_GENERIC_BASE)}"))


@native(r"ld\.param(?:\.(v2|v4))?\.([bus])(8|16|32|64)")
@native(r"ld\.param(?:\.(v2|v4))?\.(f)(32|64)")
def ld_param(b: BlockBuilder, ins: Instr, m: re.Match[str]) -> None:
    """Parameters are the same for every lane: one scalar load, then a splat."""
    d, source = ins.operands
    base = getattr(source, "base", None)
    if not isinstance(base, Sym) or base.name not in b.places.params:
        raise b.unsupported("ld.param needs a kernel parameter")
    bits = int(m[3])
    items = d.items if isinstance(d, Vec) else (d,)
    for k, target in enumerate(items):
        offset = b.places.params[base.name] + base.offset + source.offset + k * bits // 8  # type: ignore[union-attr]
        address = b.t(f"getelementptr i8, ptr %params, i64 {offset}")
        scalar = b.t(f"load i{bits}, ptr {address}, align 1")
        kind = target.kind if isinstance(target, Reg) else "b32"
        width = int(kind[1:])
        if width < bits:
            raise b.unsupported(f"a .{kind} register cannot hold {bits} bits")
        if width > bits:
            scalar = b.t(f"{'sext' if m[2] == 's' else 'zext'} i{bits} {scalar} to i{width}")
        ty = f"<32 x i{width}>"
        one = b.t(f"insertelement {ty} poison, i{width} {scalar}, i64 0")
        all_ = b.t(f"shufflevector {ty} {one}, {ty} poison, {I32} zeroinitializer")
        if not isinstance(target, Sink):
            put(b, str(width), target, all_)
