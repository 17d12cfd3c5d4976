"""Operands of instructions, from their text to `Operand` (PTX ISA 9.1 chapters 4.5 and 6)."""

from __future__ import annotations

import re
import struct

from .ast import Imm, Mem, Operand, Reg, RegPair, Sink, Special, Sym, Vec
from .declarations import RE_DECIMAL, RE_FLOAT, RE_INT, parse_int, split_top
from .names import Names
from .source import error
from .syntax import IDENT

_SPECIALS = re.compile(
    r"%(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]|"
    r"%(?:laneid|warpid|nwarpid|smid|nsmid|gridid|cluster_ctarank|cluster_nctarank|clock|clock_hi|"
    r"clock64|globaltimer|globaltimer_lo|globaltimer_hi|dynamic_smem_size|total_smem_size|"
    r"aggr_smem_size|lanemask_(?:eq|le|lt|ge|gt)|is_explicit_cluster|envreg\d+)"
)
_RE_SYMBOL = re.compile(rf"({IDENT})\s*(?:\+\s*(-?\d+))?")
_RE_ADDRESS = re.compile(r"(.*?)\s*(?:([+-])\s*(-?\w+))?")


def read_operand(names: Names, item: str, line: int) -> Operand:
    """One operand. Raises PTXSyntaxError for what is not declared or not understood."""
    if item[:1] == "{":
        if item[-1] != "}":
            raise error(names.text, line, f"vector {item!r} is not closed")
        return Vec(tuple(read_operand(names, x, line) for x in split_top(item[1:-1])))
    if item[:1] == "[":
        if item[-1] != "]":
            raise error(names.text, line, f"address {item!r} is not closed")
        return _memory(names, item[1:-1].strip(), line)
    if (reg := names.register(item)) is not None:  # what most operands are
        return reg
    if item == "_":
        return Sink()
    if "|" in item:
        first, second = item.split("|", 1)
        return RegPair(
            read_operand(names, first.strip(), line), read_operand(names, second.strip(), line)
        )
    return names.vector(item) or _scalar(names, item, line)


def _scalar(names: Names, item: str, line: int) -> Reg | Special | Imm | Sym:
    """What is no register, vector or address."""
    if RE_INT.match(item):
        return Imm(parse_int(item))
    if m := RE_FLOAT.match(item):
        return Imm(int(m[1] or m[2], 16), True, 32 if m[1] else 64)
    if RE_DECIMAL.match(item):
        return Imm(struct.unpack("<Q", struct.pack("<d", float(item)))[0], True, 64)
    if item[:1] == "!" and (reg := names.register(item[1:].strip())) is not None:
        if reg.kind != "pred":
            raise error(names.text, line, f"{item!r}: only predicates are negated")
        return Reg(reg.name, reg.kind, True, reg.type)
    if _SPECIALS.fullmatch(item):
        return Special(item)
    if m := _RE_SYMBOL.fullmatch(item):
        if item[0] == "%":
            raise error(names.text, line, f"register {item!r} is not declared")
        return Sym(names.symbol(m[1], line), int(m[2] or 0))
    raise error(names.text, line, f"operand {item!r} is not understood")


def _memory(names: Names, inner: str, line: int) -> Mem:
    """``base + offset``, and the coordinates in a tensor map."""
    parts = split_top(inner)
    coords = None
    if len(parts) == 2 and parts[1].startswith("{"):
        vec = read_operand(names, parts[1], line)
        assert isinstance(vec, Vec)
        coords = vec.items
    elif len(parts) != 1:
        raise error(names.text, line, f"address [{inner}] is not understood")
    m = _RE_ADDRESS.fullmatch(parts[0])
    assert m is not None
    word = m[1].strip()
    base = names.register(word) or _scalar(names, word, line)
    if m[3] and not RE_INT.match(m[3]):
        raise error(names.text, line, f"address [{inner}] is not understood")
    offset = parse_int(m[3]) * (-1 if m[2] == "-" else 1) if m[3] else 0
    if isinstance(base, Sym):
        base, offset = Sym(base.name), offset + base.offset
    return Mem(base, offset, coords)
