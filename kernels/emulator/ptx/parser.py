"""Parser for the PTX that the CuTe DSL (NVVM) emits, inline-asm scopes included.

PTX is line-oriented only by habit: statements end in ``;``, labels in ``:``, scopes are braces.
Scoped names (inline asm repeats ``P1`` and ``LAB_WAIT`` in every scope) are renamed to unique ones.
Grammar: PTX ISA 9.1, chapter 4. Whatever is not recognised raises `PTXSyntaxError` with its line;
PTX that the emulator does not model (device functions, .local variables) raises `UnsupportedPTX`.
"""

from __future__ import annotations

import bisect
import re
import struct
from dataclasses import dataclass, field
from typing import Any

from ..findings import UnsupportedPTX
from .ast import (
    Entry,
    Imm,
    Instr,
    Label,
    Mem,
    Module,
    Operand,
    Param,
    Reg,
    RegPair,
    SharedVar,
    Sink,
    Special,
    Sym,
    Vec,
)

_TYPE_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_IDENT = r"[A-Za-z_$%][A-Za-z0-9_$]*"
_RE_SPACE = re.compile(r"\s*")
_RE_LABEL = re.compile(rf"({_IDENT})\s*:(?!:)")
_RE_REG = re.compile(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)$", re.S)
_RE_REG_RANGE = re.compile(rf"^({_IDENT})<(\d+)>$")
_RE_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_RE_FILE = re.compile(r'\.file\s+(\d+)\s+"((?:[^"\\]|\\.)*)"')
_RE_VAR = re.compile(
    rf"^(?:\.(?:extern|visible|weak)\s+)*\.shared\s+(?:\.align\s+(\d+)\s+)?\.([a-z])(\d+)\s+"
    rf"({_IDENT})\s*(?:\[\s*(\d*)\s*\])?\s*$"
)
_RE_PARAM = re.compile(
    rf"^\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)\s+"
    rf"(?:\.ptr\S*\s+(?:\.\w+\s+)*(?:\.align\s+\d+\s+)?)?({_IDENT})\s*(?:\[\s*(\d+)\s*\])?\s*$"
)
_RE_GUARD = re.compile(rf"^@(!?)\s*({_IDENT})\s+")
_RE_OPCODE = re.compile(r"^([a-z][a-z0-9_]*(?:(?:\.|::)[A-Za-z0-9_]+)*)\s*")
_RE_FLOAT = re.compile(r"^0(?:[fF]([0-9A-Fa-f]{8})|[dD]([0-9A-Fa-f]{16}))$")
_RE_INT = re.compile(r"^-?(?:0[xX][0-9A-Fa-f]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
_RE_DECIMAL = re.compile(r"^-?\d+\.\d*(?:[eE][+-]?\d+)?$")
_SPECIALS = re.compile(
    r"^%(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$|"
    r"^%(?:laneid|warpid|nwarpid|smid|nsmid|gridid|cluster_ctarank|cluster_nctarank|clock|clock_hi|"
    r"clock64|globaltimer|globaltimer_lo|globaltimer_hi|dynamic_smem_size|total_smem_size|"
    r"lanemask_(?:eq|le|lt|ge|gt)|is_explicit_cluster|envreg\d+)$"
)


class PTXSyntaxError(ValueError):
    """The text is not PTX that this front end understands; the message names the line."""


@dataclass(slots=True)
class _Scope:
    """Names declared between one pair of braces."""

    suffix: str
    regs: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> (unique, kind)
    ranges: dict[str, tuple[int, str]] = field(default_factory=dict)  # prefix -> (count, kind)
    vectors: dict[str, Vec] = field(default_factory=dict)  # registers of vector type
    labels: set[str] = field(default_factory=set)


def parse(text: str) -> Module:
    """Parses a whole PTX file. Raises `PTXSyntaxError`."""
    return _Parser(text).module()


def _int(text: str) -> int:
    """An integer literal: decimal, 0x, 0b, octal by its leading 0 (PTX ISA 9.1 section 4.5.1)."""
    body = text.rstrip("U")
    digits = body.lstrip("-")
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    return int(body, 8 if octal else 0)


_RE_QUIET = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.S)


def _blank(text: str, strings: bool) -> str:
    """Comments, and with ``strings`` the insides of strings, become spaces: offsets stay."""

    def replace(match: re.Match[str]) -> str:
        piece = match.group(0)
        if not piece.startswith('"'):
            return re.sub(r"[^\n]", " ", piece)
        return f'"{" " * (len(piece) - 2)}"' if strings else piece

    return _RE_QUIET.sub(replace, text)


def _split_top(text: str) -> list[str]:
    """Splits on commas that are outside braces, brackets and parentheses."""
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


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.clean = _blank(text, strings=True)
        self.line_starts = [0] + [m.end() for m in re.finditer("\n", text)]
        self.scopes: list[_Scope] = []
        self.scope_count = 0
        self.shared: list[SharedVar] = []
        self.entry: Entry | None = None
        self.loc = (0, 0, 0)

    # -- positions ---------------------------------------------------------------------------

    def line_of(self, pos: int) -> int:
        return bisect.bisect_right(self.line_starts, pos)

    def place(self, pos: int, message: str) -> str:
        line = self.line_of(pos)
        shown = self.text.splitlines()[line - 1].strip()
        return f"ptx:{line}: {message}: {shown[:160]!r}"

    def error(self, pos: int, message: str) -> PTXSyntaxError:
        return PTXSyntaxError(self.place(pos, message))

    def unsupported(self, pos: int, message: str) -> UnsupportedPTX:
        return UnsupportedPTX(self.place(pos, message))

    # -- module level --------------------------------------------------------------------------

    def module(self) -> Module:
        version = re.search(r"^\s*\.version\s+(\S+)", self.clean, re.M)
        target = re.search(r"^\s*\.target\s+([^\n]+)", self.clean, re.M)
        if version is None or target is None:
            raise PTXSyntaxError("not a PTX file: it has no .version and .target directives")
        named = _blank(self.text, strings=False)
        files = {int(m[1]): m[2] for m in _RE_FILE.finditer(named)}
        entries: dict[str, Entry] = {}
        pos = 0
        header = re.compile(r"\.(entry|func)\b")
        spans: list[tuple[int, int]] = []
        while (m := header.search(self.clean, pos)) is not None:
            if m[1] == "func":
                raise self.unsupported(m.start(), "device functions (.func) are not modelled")
            entry, end = self.parse_entry(m.end())
            entries[entry.name] = entry
            spans.append((m.start(), end))
            pos = end
        self.module_variables(spans)
        for entry in entries.values():
            entry.shared = self.shared + entry.shared
        return Module(version[1], target[1].strip(), entries, self.shared, files, self.text)

    def module_variables(self, entry_spans: list[tuple[int, int]]) -> None:
        start = 0
        for span_start, span_end in [*entry_spans, (len(self.clean), 0)]:
            pos = start
            for statement in self.clean[start:span_start].split(";"):
                if m := re.search(r"\.(shared|global|const)\b", statement):
                    declared = statement[statement.rfind("\n", 0, m.start()) + 1 :].strip()
                    self.shared.append(self.shared_var(pos + m.start(), declared))
                pos += len(statement) + 1
            start = span_end

    def shared_var(self, pos: int, statement: str) -> SharedVar:
        m = _RE_VAR.match(" ".join(statement.split()))
        if m is None:
            raise self.unsupported(pos, "of variables only .shared ones are modelled")
        align, _, bits, name, count = m.groups()
        item = _TYPE_BYTES[bits]
        extern = ".extern" in statement
        nbytes = 0 if extern else item * (int(count) if count else 1)
        return SharedVar(name, nbytes, int(align or item), extern)

    def parse_entry(self, pos: int) -> tuple[Entry, int]:
        m = re.compile(rf"\s*({_IDENT})\s*").match(self.clean, pos)
        if m is None:
            raise self.error(pos, "an entry needs a name")
        name, pos = m[1], m.end()
        params: list[Param] = []
        if self.clean[pos] == "(":
            close = self.clean.index(")", pos)
            offset = 0
            for item in _split_top(self.clean[pos + 1 : close]):
                if item:
                    params.append(param := self.param(pos, item, offset))
                    offset = param.offset + param.nbytes
            pos = close + 1
        brace = self.clean.index("{", pos)
        directives = {
            d.split(None, 1)[0]: (d.split(None, 1) + [""])[1].strip()
            for d in self.clean[pos:brace].split("\n")
            if d.strip().startswith(".")
            for d in [d.strip()]
        }
        self.entry = Entry(name, tuple(params), directives=directives)
        end = self.body(brace)
        return self.entry, end

    def param(self, pos: int, item: str, offset: int) -> Param:
        m = _RE_PARAM.match(" ".join(item.split()))
        if m is None:
            raise self.error(pos, f"parameter {item!r} is not understood")
        align, _, bits, name, count = m.groups()
        item_bytes = _TYPE_BYTES[bits]
        alignment = int(align or item_bytes)
        start = (offset + alignment - 1) // alignment * alignment
        return Param(name, item_bytes * int(count or 1), alignment, start)

    # -- bodies ---------------------------------------------------------------------------------

    def body(self, pos: int) -> int:
        """Parses from the opening brace; returns the position behind the closing one.

        Two passes: the first cuts statements and notes which labels each scope owns (a branch may
        come before its label), the second resolves names.
        """
        items, end = self.cut_statements(pos)
        assert self.entry is not None
        self.scopes = []
        for kind, at, value in items:
            if kind == "open":
                self.scopes.append(value)
            elif kind == "close":
                self.scopes.pop()
            elif kind == "label":
                self.entry.labels[self.unique_label(value, at)] = len(self.entry.body)
            elif kind == "directive":
                self.directive(at, value)
            else:
                self.instruction(at, value)
        self.check_labels()
        return end

    def cut_statements(self, pos: int) -> tuple[list[tuple[str, int, Any]], int]:
        text = self.clean
        items: list[tuple[str, int, Any]] = []
        scopes: list[_Scope] = []
        while True:
            pos = _RE_SPACE.match(text, pos).end()  # type: ignore[union-attr]
            if pos >= len(text):
                raise self.error(len(text) - 1, "the entry's body is not closed")
            ch = text[pos]
            if ch == "{":
                scopes.append(_Scope(f"@{self.scope_count}" if scopes else ""))
                self.scope_count += 1
                items.append(("open", pos, scopes[-1]))
                pos += 1
            elif ch == "}":
                scopes.pop()
                items.append(("close", pos, None))
                pos += 1
                if not scopes:
                    return items, pos
            elif ch == ";":
                pos += 1
            elif m := _RE_LOC.match(text, pos):
                # inlined_at and function_name attributes follow on the same line
                items.append(("directive", pos, m[0]))
                end = text.find("\n", m.end())
                pos = len(text) if end < 0 else end
            elif m := _RE_LABEL.match(text, pos):
                if m[1] in scopes[-1].labels:
                    raise self.error(pos, f"label {m[1]!r} is defined twice in its scope")
                scopes[-1].labels.add(m[1])
                items.append(("label", pos, m[1]))
                pos = m.end()
            else:
                end = text.find(";", pos)
                if end < 0:
                    raise self.error(pos, "statement has no end")
                items.append(("directive" if ch == "." else "instr", pos, text[pos:end]))
                pos = end + 1

    def unique_label(self, name: str, pos: int) -> str:
        for scope in reversed(self.scopes):
            if name in scope.labels:
                return name + scope.suffix
        raise self.error(pos, f"label {name!r} is not defined in this scope")

    def check_labels(self) -> None:
        assert self.entry is not None
        known = self.entry.labels
        for instr in self.entry.body:
            for operand in instr.operands:
                if isinstance(operand, Label) and operand.name not in known:
                    raise PTXSyntaxError(
                        f"ptx:{instr.line}: branch to unknown label {operand.name!r}"
                    )

    def directive(self, pos: int, raw: str) -> None:
        if m := _RE_LOC.match(raw):
            self.loc = (int(m[1]), int(m[2]), int(m[3]))
            return
        statement = raw.strip()
        if m := _RE_REG.match(statement):
            kind = m[2] if m[2] == "pred" else "b" + m[2].lstrip("busf")
            if kind not in ("pred", "b8", "b16", "b32", "b64", "b128"):
                raise self.unsupported(pos, f"register type .{m[2]} is not modelled")
            for item in _split_top(m[3]):
                if m[1]:
                    self.declare_vector(pos, item, kind, int(m[1]))
                elif r := _RE_REG_RANGE.match(item):
                    self.scopes[-1].ranges[r[1]] = (int(r[2]), kind)
                else:
                    self.declare(pos, item, kind)
        elif statement.startswith(".pragma"):
            pass
        elif ".shared" in statement:
            assert self.entry is not None
            self.entry.shared.append(self.shared_var(pos, statement))
        else:
            raise self.unsupported(pos, "directive is not modelled")

    def declare(self, pos: int, name: str, kind: str) -> str:
        assert self.entry is not None
        scope = self.scopes[-1]
        if name in scope.regs or not re.fullmatch(_IDENT, name):
            raise self.error(pos, f"register {name!r} is declared twice, or is not a name")
        unique = name + scope.suffix
        scope.regs[name] = (unique, kind)
        self.entry.registers[unique] = kind
        return unique

    def declare_vector(self, pos: int, name: str, kind: str, count: int) -> None:
        """A register of vector type is its elements, which .x .y .z .w or .r .g .b .a name
        (PTX ISA 9.1 section 6.4.3)."""
        if name in self.scopes[-1].vectors or not re.fullmatch(_IDENT, name):
            raise self.error(pos, f"register {name!r} is declared twice, or is not a name")
        scope = self.scopes[-1]
        elements = []
        for position, colour in list(zip("xyzw", "rgba", strict=True))[:count]:
            unique = f"{name}.{position}{scope.suffix}"
            scope.regs[f"{name}.{position}"] = scope.regs[f"{name}.{colour}"] = (unique, kind)
            assert self.entry is not None
            self.entry.registers[unique] = kind
            elements.append(Reg(unique, kind))
        scope.vectors[name] = Vec(tuple(elements))

    def register(self, name: str, pos: int, negated: bool = False) -> Reg | None:
        for scope in reversed(self.scopes):
            if name in scope.regs:
                unique, kind = scope.regs[name]
                return Reg(unique, kind, negated)
            m = re.match(r"^(.*?)(\d+)$", name)
            while m is not None:
                prefix, number = m[1], m[2]
                if prefix in scope.ranges and int(number) < scope.ranges[prefix][0]:
                    kind = scope.ranges[prefix][1]
                    unique = name + scope.suffix
                    scope.regs[name] = (unique, kind)
                    assert self.entry is not None
                    self.entry.registers[unique] = kind
                    return Reg(unique, kind, negated)
                m = (
                    re.match(rf"^({re.escape(prefix)}\d+?)(\d+)$", name)
                    if len(number) > 1
                    else None
                )
        return None

    # -- instructions ---------------------------------------------------------------------------

    def instruction(self, pos: int, raw: str) -> None:
        assert self.entry is not None
        text = " ".join(raw.split())
        guard = None
        if m := _RE_GUARD.match(text):
            guard = self.register(m[2], pos, negated=bool(m[1]))
            if guard is None or guard.kind != "pred":
                raise self.error(pos, f"guard {m[2]!r} is not a predicate register")
            text = text[m.end() :]
        m = _RE_OPCODE.match(text)
        if m is None:
            raise self.error(pos, "not an instruction")
        op, rest = m[1], text[m.end() :]
        branch = op.split(".")[0] in ("bra", "brx", "call")
        operands = tuple(self.operand(item, pos, branch) for item in _split_top(rest))
        line = self.line_of(pos)
        self.entry.body.append(Instr(op, operands, guard, line, self.loc, text))

    def operand(self, item: str, pos: int, branch: bool = False) -> Operand:
        if item == "_":
            return Sink()
        if item.startswith("{"):
            return Vec(tuple(self.operand(x, pos) for x in _split_top(item[1:-1])))
        if item.startswith("["):
            return self.memory(item[1:-1].strip(), pos)
        if "|" in item:
            first, second = item.split("|", 1)
            return RegPair(self.operand(first.strip(), pos), self.operand(second.strip(), pos))
        if branch:
            return Label(self.unique_label(item, pos))
        for scope in reversed(self.scopes):
            if item in scope.vectors:
                return scope.vectors[item]
        return self.scalar(item, pos)

    def scalar(self, item: str, pos: int) -> Reg | Special | Imm | Sym:
        for scope in reversed(self.scopes):  # what most operands are
            if item in scope.regs:
                return Reg(*scope.regs[item])
        negated = item.startswith("!")
        name = item.lstrip("!").strip()
        if _RE_INT.match(item):
            return Imm(_int(item))
        if m := _RE_FLOAT.match(item):
            return Imm(int(m[1] or m[2], 16), True, 32 if m[1] else 64)
        if _RE_DECIMAL.match(item):
            return Imm(struct.unpack("<Q", struct.pack("<d", float(item)))[0], True, 64)
        if _SPECIALS.match(name):
            return Special(name)
        if (reg := self.register(name, pos, negated)) is not None:
            return reg
        if m := re.match(rf"^({_IDENT})\s*(?:\+\s*(-?\d+))?$", name):
            if name.startswith("%"):
                raise self.error(pos, f"register {name!r} is not declared")
            return Sym(m[1], int(m[2] or 0))
        raise self.error(pos, f"operand {item!r} is not understood")

    def memory(self, inner: str, pos: int) -> Mem:
        parts = _split_top(inner)
        coords = None
        if len(parts) == 2 and parts[1].startswith("{"):
            vec = self.operand(parts[1], pos)
            assert isinstance(vec, Vec)
            coords = vec.items
        elif len(parts) != 1:
            raise self.error(pos, f"address [{inner}] is not understood")
        m = re.match(r"^(.*?)\s*(?:([+-])\s*(-?\w+))?$", parts[0])
        assert m is not None
        base = self.scalar(m[1].strip(), pos)
        if m[3] and not _RE_INT.match(m[3]):
            raise self.error(pos, f"address [{inner}] is not understood")
        offset = _int(m[3]) * (-1 if m[2] == "-" else 1) if m[3] else 0
        if isinstance(base, Sym):
            base, offset = Sym(base.name), offset + base.offset
        return Mem(base, offset, coords)
