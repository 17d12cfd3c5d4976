"""Parser for the PTX that the CuTe DSL (NVVM) emits, inline-asm scopes included.

PTX is line-oriented only by habit: statements end in ``;``, labels in ``:``, scopes are braces.
Scoped names (inline asm repeats ``P1`` and ``LAB_WAIT`` in every scope) are renamed to unique ones.
Grammar: PTX ISA 9.1, chapter 4. Whatever is not recognised raises `PTXSyntaxError` with its line;
PTX that the emulator does not model (indirect calls, textures) raises `UnsupportedPTX`.

Device functions are inlined where they are called: the body is parsed again for each call, in a
scope of its own, and the .param variables of a call become .local ones. The carry CC.CF, which some
opcodes use without naming it, becomes an operand: ``d|cc`` sets it, a last source reads it.
"""

from __future__ import annotations

import bisect
import re
import struct
from dataclasses import dataclass, field, replace
from typing import Any

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
    Sink,
    Special,
    Sym,
    Variable,
    Vec,
)
from .declarations import (
    IDENT,
    RE_DECIMAL,
    RE_FLOAT,
    RE_INT,
    Function,
    parameter,
    parse_int,
    split_top,
    variable,
)
from .source import PTXSyntaxError, Source, blank

_RE_SPACE = re.compile(r"\s*")
_RE_LABEL = re.compile(rf"({IDENT})\s*:(?!:)")
_RE_REG = re.compile(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)$", re.S)
_RE_REG_RANGE = re.compile(rf"^({IDENT})<(\d+)>$")
_RE_INLINE = re.compile(r"// begin inline asm.*?// end inline asm", re.S)
_RE_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_RE_FILE = re.compile(r'\.file\s+(\d+)\s+"((?:[^"\\]|\\.)*)"')
_RE_CARRY = re.compile(r"(?:add|sub|mad)(c)?(?:\.hi|\.lo)?(\.cc)?\.[us](?:32|64)$")
_RE_PARAM_ACCESS = re.compile(r"(ld|st)\.param(?:::func)?\.(.*)$")
_CARRY = Reg("%CC.CF", "pred")
_RE_GUARD = re.compile(rf"^@(!?)\s*({IDENT})\s+")
_RE_OPCODE = re.compile(r"^([a-z][a-z0-9_]*(?:(?:\.|::)[A-Za-z0-9_]+)*)\s*")
_SPECIALS = re.compile(
    r"^%(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$|"
    r"^%(?:laneid|warpid|nwarpid|smid|nsmid|gridid|cluster_ctarank|cluster_nctarank|clock|clock_hi|"
    r"clock64|globaltimer|globaltimer_lo|globaltimer_hi|dynamic_smem_size|total_smem_size|"
    r"lanemask_(?:eq|le|lt|ge|gt)|is_explicit_cluster|envreg\d+)$"
)


@dataclass(slots=True)
class _Scope:
    """Names declared between one pair of braces."""

    suffix: str
    regs: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> (unique, kind)
    ranges: dict[str, tuple[int, str]] = field(default_factory=dict)  # prefix -> (count, kind)
    vectors: dict[str, Vec] = field(default_factory=dict)  # registers of vector type
    labels: set[str] = field(default_factory=set)
    variables: dict[str, str] = field(default_factory=dict)  # .local and .param: name -> unique
    leave: str = ""  # of an inlined function: the label behind it


def parse(text: str) -> Module:
    """Parses a whole PTX file. Raises `PTXSyntaxError`."""
    return _Parser(text).module()


class _Parser(Source):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.scopes: list[_Scope] = []
        self.scope_count = 0
        self.shared: list[Variable] = []
        self.variables: list[Variable] = []
        self.functions: dict[str, Function] = {}
        self.calls: list[str] = []  # functions being inlined
        self.entry: Entry | None = None
        self.loc = (0, 0, 0)
        self.asm_spans = [m.span() for m in _RE_INLINE.finditer(text)]

    # -- module level --------------------------------------------------------------------------

    def module(self) -> Module:
        version = re.search(r"^\s*\.version\s+(\S+)", self.clean, re.M)
        target = re.search(r"^\s*\.target\s+([^\n]+)", self.clean, re.M)
        if version is None or target is None:
            raise PTXSyntaxError("not a PTX file: it has no .version and .target directives")
        named = blank(self.text, strings=False)
        files = {int(m[1]): m[2] for m in _RE_FILE.finditer(named)}
        entries: dict[str, Entry] = {}
        spans = self.function_headers()
        pos = 0
        header = re.compile(r"\.entry\b")
        while (m := header.search(self.clean, pos)) is not None:
            entry, pos = self.parse_entry(m.end())
            entries[entry.name] = entry
            spans.append((m.start(), pos))
        self.module_variables(sorted(spans))
        for entry in entries.values():
            entry.shared = self.shared + entry.shared
        return Module(
            version[1],
            target[1].strip(),
            entries,
            self.shared,
            files,
            self.text,
            self.variables,
        )

    def function_headers(self) -> list[tuple[int, int]]:
        """Notes every device function, and gives where their text is."""
        header = re.compile(
            rf"\.func\b\s*(?:\.noreturn\s*)?(\([^)]*\))?\s*({IDENT})\s*(\([^)]*\))?\s*"
            r"(?:\.noreturn\s*)?([{;])"
        )
        spans = []
        for m in re.finditer(r"\.func\b", self.clean):
            found = header.match(self.clean, m.start())
            if found is None:
                raise self.unsupported(m.start(), "this function header is not modelled")
            results, name, params, opener = found.groups()
            given, taken = (
                tuple(p.name for p in self.parameters(m.start(), (part or "()")[1:-1]))
                for part in (results, params)
            )
            body, end = None, found.end()
            if opener == "{":
                body = found.end() - 1
                end = self.cut_statements(body)[1]
            if body is not None or name not in self.functions:
                self.functions[name] = Function(name, given, taken, body)
            spans.append((m.start(), end))
        return spans

    def module_variables(self, spans: list[tuple[int, int]]) -> None:
        start = 0
        for span_start, span_end in [*spans, (len(self.clean), 0)]:
            pos = start
            for statement in self.clean[start:span_start].split(";"):
                if m := re.search(r"\.(shared|global|const)\b", statement):
                    declared = statement[statement.rfind("\n", 0, m.start()) + 1 :].strip()
                    found = self.declared(pos + m.start(), declared)
                    (self.shared if found.space == "shared" else self.variables).append(found)
                pos += len(statement) + 1
            start = span_end

    def declared(self, pos: int, statement: str) -> Variable:
        found = variable(statement)
        if found is None:
            raise self.unsupported(pos, "a variable so declared or initialised is not modelled")
        return found

    def parameters(self, pos: int, text: str) -> list[Param]:
        out: list[Param] = []
        for item in split_top(text):
            offset = out[-1].offset + out[-1].nbytes if out else 0
            if item and (found := parameter(item, offset)) is None:
                raise self.error(pos, f"parameter {item!r} is not understood")
            if item:
                assert found is not None
                out.append(found)
        return out

    def parse_entry(self, pos: int) -> tuple[Entry, int]:
        m = re.compile(rf"\s*({IDENT})\s*").match(self.clean, pos)
        if m is None:
            raise self.error(pos, "an entry needs a name")
        name, pos = m[1], m.end()
        params: list[Param] = []
        if self.clean[pos] == "(":
            close = self.clean.index(")", pos)
            params = self.parameters(pos, self.clean[pos + 1 : close])
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

    # -- bodies ---------------------------------------------------------------------------------

    def body(self, pos: int) -> int:
        """Parses from the opening brace; returns the position behind the closing one.

        Two passes: the first cuts statements and notes which labels each scope owns (a branch may
        come before its label), the second resolves names.
        """
        items, end = self.cut_statements(pos)
        self.scopes = []
        self.statements(items)
        self.check_labels()
        return end

    def statements(self, items: list[tuple[str, int, Any]]) -> None:
        assert self.entry is not None
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

    def inline(self, pos: int, text: str, guard: Reg | None) -> None:
        """``call{.uni} (results), function, (parameters)``: the function's body stands here."""
        assert self.entry is not None
        parts = split_top(text)
        results = parts.pop(0)[1:-1] if parts and parts[0].startswith("(") else ""
        name = parts[0] if parts else ""
        given = parts[1][1:-1] if len(parts) > 1 else ""
        function = self.functions.get(name)
        if function is None or len(parts) > 2 or guard is not None:
            raise self.unsupported(pos, "calls through a register, or under a guard, not modelled")
        names = [
            *zip(function.results, split_top(results), strict=True),
            *zip(function.params, split_top(given), strict=True),
        ]
        if function.body is None:
            self.external(pos, name, [arg for _, arg in names])
            return
        if name in self.calls:
            raise self.unsupported(pos, f"{name} calls itself: recursion is not modelled")
        items, _ = self.cut_statements(function.body)
        scope: _Scope = items[0][2]
        scope.suffix = f"@{self.scope_count}"
        self.scope_count += 1
        scope.variables = {own: self.variable_name(arg, pos) for own, arg in names}
        scope.leave = f"leave{scope.suffix}"
        outer, self.scopes = self.scopes, []
        self.calls.append(name)
        self.statements(items)
        self.calls.pop()
        self.scopes = outer
        self.entry.labels[scope.leave] = len(self.entry.body)

    def external(self, pos: int, name: str, args: list[str]) -> None:
        """A function that the driver provides: of these, printf's is known."""
        assert self.entry is not None
        if name != "vprintf" or len(args) != 3:
            raise self.unsupported(
                pos, f"the function {name} is not in this file, and only printf's is built in"
            )
        operands = tuple(Mem(Sym(self.variable_name(arg, pos))) for arg in args)
        text = f"call {name}, ({', '.join(args)})"
        line = self.line_of(pos)
        self.entry.body.append(Instr("call.vprintf", operands, None, line, self.loc, text))

    def variable_name(self, name: str, pos: int) -> str:
        """The unique name of a .local or .param variable in scope."""
        for scope in reversed(self.scopes):
            if name in scope.variables:
                return scope.variables[name]
        raise self.error(pos, f"variable {name!r} is not declared in this scope")

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
            # NVVM counts the lines of inline assembly on from the line of its call, which is the
            # one that the author knows.
            at = bisect.bisect(self.asm_spans, (pos, len(self.text))) - 1
            if at < 0 or pos >= self.asm_spans[at][1]:
                self.loc = (int(m[1]), int(m[2]), int(m[3]))
            return
        statement = raw.strip()
        if m := _RE_REG.match(statement):
            kind = m[2] if m[2] == "pred" else "b" + m[2].lstrip("busf")
            if kind not in ("pred", "b8", "b16", "b32", "b64", "b128"):
                raise self.unsupported(pos, f"register type .{m[2]} is not modelled")
            for item in split_top(m[3]):
                if m[1]:
                    self.declare_vector(pos, item, kind, int(m[1]))
                elif r := _RE_REG_RANGE.match(item):
                    self.scopes[-1].ranges[r[1]] = (int(r[2]), kind)
                else:
                    self.declare(pos, item, kind)
        elif statement.startswith(".pragma"):
            pass
        elif re.match(r"(?:\.extern\s+)?\.shared\b", statement):
            assert self.entry is not None
            self.entry.shared.append(self.declared(pos, statement))
        elif re.match(r"\.(?:local|param)\b", statement):
            assert self.entry is not None
            found = self.declared(pos, statement)
            unique = found.name + self.scopes[-1].suffix
            self.scopes[-1].variables[found.name] = unique
            self.entry.local.append(replace(found, name=unique, space="local"))
        else:
            raise self.unsupported(pos, "directive is not modelled")

    def declare(self, pos: int, name: str, kind: str) -> str:
        assert self.entry is not None
        scope = self.scopes[-1]
        if name in scope.regs or not re.fullmatch(IDENT, name):
            raise self.error(pos, f"register {name!r} is declared twice, or is not a name")
        unique = name + scope.suffix
        scope.regs[name] = (unique, kind)
        self.entry.registers[unique] = kind
        return unique

    def declare_vector(self, pos: int, name: str, kind: str, count: int) -> None:
        """A register of vector type is its elements, which .x .y .z .w or .r .g .b .a name
        (PTX ISA 9.1 section 6.4.3)."""
        if name in self.scopes[-1].vectors or not re.fullmatch(IDENT, name):
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
        line = self.line_of(pos)
        if op in ("call", "call.uni"):
            self.inline(pos, rest, guard)
            return
        if op in ("ret", "ret.uni") and self.calls:
            label = next(scope.leave for scope in self.scopes if scope.leave)
            self.entry.body.append(Instr("bra", (Label(label),), guard, line, self.loc, text))
            return
        branch = op.split(".")[0] in ("bra", "brx")
        operands = tuple(self.operand(item, pos, branch) for item in split_top(rest))
        if (carry := _RE_CARRY.match(op)) is not None and (carry[1] or carry[2]):
            operands = self.carried(operands, carry)
        if (param := _RE_PARAM_ACCESS.match(op)) is not None and self.is_local(operands):
            op = f"{param[1]}.local.{param[2]}"
        self.entry.body.append(Instr(op, operands, guard, line, self.loc, text))

    def carried(self, operands: tuple[Operand, ...], m: re.Match[str]) -> tuple[Operand, ...]:
        """CC.CF made visible: set by .cc, read by addc, subc and madc."""
        assert self.entry is not None
        self.entry.registers[_CARRY.name] = _CARRY.kind
        first: Operand = RegPair(operands[0], _CARRY) if m[2] else operands[0]
        return (first, *operands[1:], *((_CARRY,) if m[1] else ()))

    def is_local(self, operands: tuple[Operand, ...]) -> bool:
        """Whether one of them is an address in a .param variable of a call."""
        bases = [op.base for op in operands if isinstance(op, Mem)]
        names = {v.name for v in self.entry.local} if self.entry is not None else set()
        return any(isinstance(base, Sym) and base.name in names for base in bases)

    def operand(self, item: str, pos: int, branch: bool = False) -> Operand:
        if item == "_":
            return Sink()
        if item.startswith("{"):
            return Vec(tuple(self.operand(x, pos) for x in split_top(item[1:-1])))
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
        if RE_INT.match(item):
            return Imm(parse_int(item))
        if m := RE_FLOAT.match(item):
            return Imm(int(m[1] or m[2], 16), True, 32 if m[1] else 64)
        if RE_DECIMAL.match(item):
            return Imm(struct.unpack("<Q", struct.pack("<d", float(item)))[0], True, 64)
        if _SPECIALS.match(name):
            return Special(name)
        if (reg := self.register(name, pos, negated)) is not None:
            return reg
        if m := re.match(rf"^({IDENT})\s*(?:\+\s*(-?\d+))?$", name):
            if name.startswith("%"):
                raise self.error(pos, f"register {name!r} is not declared")
            for scope in reversed(self.scopes):
                if m[1] in scope.variables:
                    return Sym(scope.variables[m[1]], int(m[2] or 0))
            return Sym(m[1], int(m[2] or 0))
        raise self.error(pos, f"operand {item!r} is not understood")

    def memory(self, inner: str, pos: int) -> Mem:
        parts = split_top(inner)
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
        if m[3] and not RE_INT.match(m[3]):
            raise self.error(pos, f"address [{inner}] is not understood")
        offset = parse_int(m[3]) * (-1 if m[2] == "-" else 1) if m[3] else 0
        if isinstance(base, Sym):
            base, offset = Sym(base.name), offset + base.offset
        return Mem(base, offset, coords)
