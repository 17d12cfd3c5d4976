"""The body of an entry: statements to instructions, device functions inlined where called.

A function's statements are read again for each call, in a scope of its own, and the .param
variables of a call become .local ones. The carry CC.CF, which some opcodes use without naming it,
becomes an operand: ``d|cc`` sets it, a last source reads it. ``brx.idx`` becomes a chain of
comparisons and branches that ends in a trap: an index past the list is undefined.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

from .ast import Entry, Imm, Instr, Label, Mem, Operand, Reg, RegPair, Special, Sym
from .declarations import Function, declared_variable, split_top
from .immediates import bad_immediate
from .names import Names, labels_of_scopes
from .operands import read_operand
from .signatures import problem
from .source import PTXSyntaxError, error, unsupported
from .syntax import IDENT, Statement
from .targets import lacking

_RE_REG = re.compile(r"\.reg\s*(?:\.v([24])\s*)?\.(\w+)\s+(.*)$", re.S)
_RE_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_RE_GUARD = re.compile(rf"@\s*(!?)\s*({IDENT})\s*")
_RE_OPCODE = re.compile(r"([a-z][a-z0-9_]*+(?:(?:\.|::)[A-Za-z0-9_]++)*+)\s*+")
_RE_CARRY = re.compile(r"(?:add|sub|mad)(c)?(?:\.hi|\.lo)?(\.cc)?\.[us](?:32|64)$")
_RE_PARAM_ACCESS = re.compile(r"(ld|st)\.param(?:::func)?\.(.*)$")
_RE_TARGETS = re.compile(r"\.branchtargets\s+(.*)$", re.S)
# How a mov from a clock is named from here on: no register holds a clock.
_CLOCKS = {
    "%clock": ("mov.[bsu]32", "clock.lo"),
    "%clock_hi": ("mov.[bsu]32", "clock.hi"),
    "%clock64": ("mov.[bsu]64", "clock.b64"),
    "%globaltimer": ("mov.[bsu]64", "clock.b64"),
    "%globaltimer_lo": ("mov.[bsu]32", "clock.lo"),
    "%globaltimer_hi": ("mov.[bsu]32", "clock.hi"),
}
_SPACES = ("shared", "global", "local", "param", "const")
_CARRY = Reg("%CC.CF", "pred", type="pred")


@cache
def _space(op: str) -> str | None:
    """The state space that a load or store names, "generic" if it names none; None for others."""
    family, *mods = op.split(".")
    if family not in ("ld", "ldu", "st", "atom", "red"):
        return None
    named = [mod.partition("::")[0] for mod in mods]
    return next((space for space in named if space in _SPACES), "generic")


class BodyReader:
    """Reads one entry's body into ``entry``. ``functions``: the module's, by name; ``target``: what
    instructions may use; ``symbols``: state spaces of the module's variables and functions."""

    def __init__(
        self,
        text: str,
        target: str,
        entry: Entry,
        functions: Mapping[str, Function],
        symbols: Mapping[str, str],
    ) -> None:
        self.text = text
        self.target = target
        self.entry = entry
        self.functions = functions
        self.names = Names(text, entry, symbols)
        self.calls: list[str] = []  # functions being inlined
        self.loc = (0, 0, 0)
        self.line = 0
        self.label: str | None = None  # the one just read: .branchtargets are named by it

    def read(self, statements: Sequence[Statement]) -> None:
        """``statements``: from the opening brace to the closing one."""
        self.statements(statements, outermost=True)
        known = self.entry.labels
        for instr in self.entry.body:
            for operand in instr.operands:
                if isinstance(operand, Label) and operand.name not in known:
                    raise PTXSyntaxError(
                        f"ptx:{instr.line}: branch to unknown label {operand.name!r}"
                    )

    def statements(
        self,
        statements: Sequence[Statement],
        outermost: bool = False,
        given: Mapping[str, str] | None = None,
    ) -> None:
        """``given``: of an inlined function, the variables that its parameters are."""
        labels = labels_of_scopes(self.text, statements)
        names = self.names
        for index, statement in enumerate(statements):
            self.line, kind = statement.line, statement.kind
            if kind == "instruction":
                self.instruction(statement.code)
            elif kind == "words":
                self.words(statement)
            elif kind == "directive":
                self.directive(statement.code)
            elif kind == "label":
                self.label = statement.text[:-1].rstrip()
                self.entry.labels[names.label(self.label, self.line)] = len(self.entry.body)
            elif kind == "open":
                scope = names.open(labels[index], outermost)
                outermost = False
                if given is not None:
                    scope.variables, scope.leave = dict(given), f"leave{scope.suffix}"
                    given = None
            elif kind == "close":
                names.scopes.pop()

    def error(self, message: str) -> PTXSyntaxError:
        return error(self.text, self.line, message)

    def operand(self, item: str) -> Operand:
        return read_operand(self.names, item, self.line)

    # -- declarations ---------------------------------------------------------------------------

    def words(self, statement: Statement) -> None:
        # NVVM counts the lines of inline assembly on from the line of its call, which is the one
        # that the author knows.
        if not statement.in_asm and (m := _RE_LOC.match(statement.text)):
            self.loc = (int(m[1]), int(m[2]), int(m[3]))

    def directive(self, code: str) -> None:
        if m := _RE_REG.match(code):
            for item in split_top(m[3]):
                if m[1]:
                    self.names.declare_vector(item, m[2], int(m[1]), self.line)
                else:
                    self.names.declare(item, m[2], self.line)
        elif code.startswith(".pragma"):
            pass
        elif (m := _RE_TARGETS.match(code)) and self.label is not None:
            self.names.scopes[-1].targets[self.label] = tuple(split_top(m[1]))
        elif re.match(r"(?:\.extern\s+)?\.shared\b", code):
            self.names.declare_shared(declared_variable(self.text, self.line, code))
        elif re.match(r"\.(?:local|param)\b", code):
            self.names.declare_variable(declared_variable(self.text, self.line, code))
        elif code.startswith((".callprototype", ".calltargets")):
            raise unsupported(self.text, self.line, "calls through pointers are not modelled")
        else:
            raise unsupported(self.text, self.line, "directive is not modelled")

    # -- instructions ---------------------------------------------------------------------------

    def instruction(self, code: str) -> None:
        guard, text = None, code
        if code[0] == "@" and (m := _RE_GUARD.match(code)):
            found = self.names.register(m[2])
            if found is None or found.kind != "pred":
                raise self.error(f"guard {m[2]!r} is not a predicate register")
            guard = Reg(found.name, "pred", True, "pred") if m[1] else found
            text = code[m.end() :]
        m = _RE_OPCODE.match(text)
        if m is None:
            raise self.error("not an instruction")
        op, rest = m[1], text[m.end() :]
        if op in ("call", "call.uni"):
            self.call(rest, guard)
        elif op in ("ret", "ret.uni") and self.calls:
            label = next(s.leave for s in reversed(self.names.scopes) if s.leave)
            self.add("bra", (Label(label),), guard, text)
        elif op.startswith("brx"):
            self.indexed_branch(split_top(rest), guard, text)
        elif op in ("bra", "bra.uni"):
            labels = (Label(self.names.label(item, self.line)) for item in split_top(rest))
            self.add(op, tuple(labels), guard, text)
        else:
            operands = tuple(map(self.operand, split_top(rest)))
            wrong = (
                problem(op, operands)
                or bad_immediate(op, operands)
                or lacking(op, self.target, len(operands))
                or self.wrong_space(op, operands)
            )
            if wrong is not None:
                raise self.error(wrong)
            if (carry := _RE_CARRY.match(op)) is not None and (carry[1] or carry[2]):
                operands = self.carried(operands, carry)
            if (param := _RE_PARAM_ACCESS.match(op)) is not None and self.is_local(operands):
                op = f"{param[1]}.local.{param[2]}"
            if len(operands) == 2 and isinstance(operands[1], Special):
                op, operands = self.special(op, operands[0], operands[1])
            self.add(op, operands, guard, text)

    def wrong_space(self, op: str, operands: tuple[Operand, ...]) -> str | None:
        """What is wrong with the state space of a variable that is loaded or stored, or None."""
        if (want := _space(op)) is None:
            return None
        for operand in operands:
            if isinstance(operand, Mem) and isinstance(operand.base, Sym):
                name = operand.base.name
                have = self.names.symbols[name]
                generic = want == "generic" and have in ("shared", "global", "local")
                argument = want == "param" and have == "local"  # of a call
                if want != have and not generic and not argument:
                    return f"{name} lies in .{have}, and {op} does not take it from there"
        return None

    def add(self, op: str, operands: tuple[Operand, ...], guard: Reg | None, text: str) -> None:
        self.entry.body.append(Instr(op, operands, guard, self.line, self.loc, text))

    def carried(self, operands: tuple[Operand, ...], m: re.Match[str]) -> tuple[Operand, ...]:
        """CC.CF made visible: set by .cc, read by addc, subc and madc."""
        self.entry.registers[_CARRY.name] = _CARRY.kind
        first: Operand = RegPair(operands[0], _CARRY) if m[2] else operands[0]
        return (first, *operands[1:], *((_CARRY,) if m[1] else ()))

    def is_local(self, operands: tuple[Operand, ...]) -> bool:
        """Whether one of them is an address in a .param variable of a call."""
        bases = [op.base for op in operands if isinstance(op, Mem)]
        return any(
            isinstance(base, Sym) and self.names.symbols[base.name] == "local" for base in bases
        )

    def special(
        self, op: str, first: Operand, second: Special
    ) -> tuple[str, tuple[Operand, ...]]:
        """A mov from a special register: clocks are read by an instruction of their own."""
        if second.name not in _CLOCKS:
            return op, (first, second)
        pattern, name = _CLOCKS[second.name]
        if re.fullmatch(pattern, op) is None:
            raise self.error(f"{second.name} is read by {pattern}, not by {op}")
        return name, (first,)

    def indexed_branch(self, items: list[str], guard: Reg | None, text: str) -> None:
        """``brx.idx{.uni} index, list`` (PTX ISA 9.1 section 9.7.12.4)."""
        index = self.operand(items[0]) if len(items) == 2 else None
        if not isinstance(index, Reg) or index.type not in ("u32", "b32", "s32"):
            raise self.error("brx.idx takes a 32-bit index and a list of .branchtargets")
        labels = self.names.targets(items[1], self.line)
        here = len(self.entry.body)
        beyond = f"beyond@{here}"
        if guard is not None:
            skip = Reg(guard.name, "pred", not guard.negated, "pred")
            self.add("bra", (Label(beyond),), skip, text)
        taken = Reg(f"%brx@{here}", "pred", type="pred")
        self.entry.registers[taken.name] = taken.kind
        for value, label in enumerate(labels):
            self.add("setp.eq.u32", (taken, index, Imm(value)), None, text)
            self.add("bra", (Label(label),), taken, text)
        self.add("trap", (), None, text)
        self.entry.labels[beyond] = len(self.entry.body)

    # -- calls ----------------------------------------------------------------------------------

    def call(self, rest: str, guard: Reg | None) -> None:
        """``call{.uni} (results), function, (parameters)``: the function's body stands here."""
        parts = split_top(rest)
        results = parts.pop(0)[1:-1] if parts and parts[0].startswith("(") else ""
        name = parts[0] if parts else ""
        given = parts[1][1:-1] if len(parts) > 1 else ""
        function = self.functions.get(name)
        if function is None or len(parts) > 2 or guard is not None:
            why = "calls through a register, or under a guard, not modelled"
            raise unsupported(self.text, self.line, why)
        arguments = self.arguments(split_top(results), function.results, f"results of {name}")
        arguments |= self.arguments(split_top(given), function.params, f"parameters of {name}")
        if not function.body:
            self.external(name, list(arguments.values()), [*split_top(results), *split_top(given)])
            return
        if name in self.calls:
            why = f"{name} calls itself: recursion is not modelled"
            raise unsupported(self.text, self.line, why)
        self.calls.append(name)
        leave = f"leave@{self.names.count}"  # what the scope of its outermost brace will be
        scopes, self.names.scopes = self.names.scopes, []
        self.statements(function.body, given=arguments)
        self.names.scopes = scopes
        self.calls.pop()
        self.entry.labels[leave] = len(self.entry.body)

    def arguments(
        self, given: list[str], declared: Sequence[str], what: str
    ) -> dict[str, str]:
        """The unique names of the variables that are given, by the names a function has for them"""
        if len(given) != len(declared):
            raise self.error(f"{len(given)} {what} are given, {len(declared)} declared")
        unique = [self.names.variable(name) for name in given]
        for name, found in zip(given, unique, strict=True):
            if found is None:
                raise self.error(f"variable {name!r} is not declared in this scope")
        return {own: found for own, found in zip(declared, unique, strict=True) if found}

    def external(self, name: str, args: list[str], written: list[str]) -> None:
        """A function that the driver provides: of these, printf's is known."""
        if name != "vprintf" or len(args) != 3:
            why = f"the function {name} is not in this file, and only printf's is built in"
            raise unsupported(self.text, self.line, why)
        operands = tuple(Mem(Sym(arg)) for arg in args)
        self.add("call.vprintf", operands, None, f"call {name}, ({', '.join(written)})")
