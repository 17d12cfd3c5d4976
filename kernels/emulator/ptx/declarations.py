"""Variables as PTX declares them (PTX ISA 9.1 sections 5.4 and 11.6), and function headers."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from .ast import Param, Variable
from .source import unsupported
from .syntax import IDENT, Statement

TYPE_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_RE_VARIABLE = re.compile(
    r"^(?:\.(?:extern|visible|weak)\s+)*\.(shared|local|param|global|const)\s+"
    rf"(?:\.align\s+(\d+)\s+)?\.([busf])(8|16|32|64|128)\s+({IDENT})\s*"
    r"((?:\[\s*\d*\s*\]\s*)*)(?:=\s*(.*))?$"
)
_RE_PARAM = re.compile(
    rf"^\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)\s+"
    rf"(?:\.ptr\S*\s+(?:\.\w+\s+)*(?:\.align\s+\d+\s+)?)?({IDENT})\s*(?:\[\s*(\d+)\s*\])?\s*$"
)
_RE_ITEM = re.compile(r"(?:[^,{}\[\]()]++|\{[^{}]*+\}|\[[^\[\]]*+\]|\([^()]*+\))++")
RE_INT = re.compile(r"^-?(?:0[xX][0-9A-Fa-f]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
RE_FLOAT = re.compile(r"^0(?:[fF]([0-9A-Fa-f]{8})|[dD]([0-9A-Fa-f]{16}))$")
RE_DECIMAL = re.compile(r"^-?\d+\.\d*(?:[eE][+-]?\d+)?$")


@dataclass(frozen=True, slots=True)
class Function:
    """A device function: names of what it returns and takes; ``body``: its statements from the
    opening brace to the closing one, empty if only declared."""

    name: str
    results: tuple[str, ...]
    params: tuple[str, ...]
    body: tuple[Statement, ...] = ()


def parse_int(text: str) -> int:
    """An integer literal: decimal, 0x, 0b, octal by its leading 0 (PTX ISA 9.1 section 4.5.1)."""
    body = text.rstrip("U")
    digits = body.lstrip("-")
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    return int(body, 8 if octal else 0)


def split_top(text: str) -> list[str]:
    """Splits on commas that are outside braces, brackets and parentheses."""
    items = _RE_ITEM.findall(text)
    if sum(map(len, items)) + len(items) == len(text) + 1:
        return [item.strip() for item in items]
    return _split_slowly(text)


def _split_slowly(text: str) -> list[str]:
    """`split_top` of text with empty items, deeper nesting or brackets that do not match."""
    out: list[str] = []
    depth = start = 0
    for i, ch in enumerate(text):
        if ch in "{[(":
            depth += 1
        elif ch in "}])":
            depth -= 1
        elif ch == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    tail = text[start:].strip()
    if tail or out:
        out.append(tail)
    return out


def declared_variable(text: str, line: int, statement: str) -> Variable:
    """The variable that a statement declares. Raises UnsupportedPTX if it is not understood."""
    found = variable(statement)
    if found is None:
        why = "a variable so declared or initialised is not modelled"
        raise unsupported(text, line, why)
    return found


def variable(statement: str) -> Variable | None:
    """The variable that a statement declares, or None if it is not understood."""
    m = _RE_VARIABLE.match(" ".join(statement.split()))
    if m is None:
        return None
    space, align, kind, bits, name, dims, init = m.groups()
    item, extern = TYPE_BYTES[bits], ".extern" in statement
    count, open_ended = 1, False
    for dim in re.findall(r"\[\s*(\d*)\s*\]", dims):
        count *= int(dim or 1)
        open_ended = open_ended or not dim
    data = b""
    if init is not None:
        packed = _initial(init, kind, item)
        if packed is None or len(packed) > item * count and not open_ended:
            return None
        data = packed
    nbytes = 0 if extern else max(len(data), 0 if open_ended and data else item * count)
    return Variable(name, nbytes, int(align or item), extern, space, data)


def _initial(text: str, kind: str, item: int) -> bytes | None:
    """Bytes of ``{1, 2, ...}`` or of one number; None where there is anything but numbers."""
    out = b""
    for word in re.findall(r"[^\s{},]+", text):
        value = _number(word, kind, item)
        if value is None:
            return None
        out += (value & (1 << 8 * item) - 1).to_bytes(item, "little")
    return out


def _number(word: str, kind: str, item: int) -> int | None:
    if m := RE_FLOAT.match(word):
        if m[1] and item == 4 or m[2] and item == 8:
            return int(m[1] or m[2], 16)
        return None
    if RE_DECIMAL.match(word) or (kind == "f" and RE_INT.match(word)):
        if kind != "f" or item not in (4, 8):
            return None
        return int.from_bytes(struct.pack("<f" if item == 4 else "<d", float(word)), "little")
    return parse_int(word) if RE_INT.match(word) else None


def parameter(item: str, offset: int) -> Param | None:
    """A parameter behind ``offset`` bytes of others, or None if it is not understood."""
    m = _RE_PARAM.match(" ".join(item.split()))
    if m is None:
        return None
    align, _, bits, name, count = m.groups()
    item_bytes = TYPE_BYTES[bits]
    alignment = int(align or item_bytes)
    start = (offset + alignment - 1) // alignment * alignment
    return Param(name, item_bytes * int(count or 1), alignment, start)
