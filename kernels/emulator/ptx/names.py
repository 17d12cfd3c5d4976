"""Names of a body: which register, vector, label or variable a word means in the current scope.

Scopes are braces. Inline assembly repeats its names (``P1``, ``LAB_WAIT``) in every scope, so names
of inner scopes get a suffix that makes them unique in the entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from .ast import Entry, Reg, Variable, Vec
from .source import error, unsupported
from .syntax import IDENT, Statement

_RE_IDENT = re.compile(IDENT)
_RE_TYPE = re.compile(r"pred|[bus](?:8|16|32|64)|b128|f(?:16|16x2|32|64)")


@dataclass(slots=True)
class Scope:
    """Names declared between one pair of braces."""

    suffix: str
    labels: set[str]
    regs: dict[str, Reg] = field(default_factory=dict)
    ranges: dict[str, tuple[int, str]] = field(default_factory=dict)  # prefix -> (count, type)
    vectors: dict[str, Vec] = field(default_factory=dict)  # registers of vector type
    variables: dict[str, str] = field(default_factory=dict)  # .local and .param: name -> unique
    targets: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of .branchtargets
    leave: str = ""  # of an inlined function: the label behind it


@cache
def kind_of(declared: str) -> str:
    """The register kind of a declared type: ``f32`` and ``f16x2`` live in a ``b32``."""
    return {"pred": "pred", "f16x2": "b32"}.get(declared) or "b" + declared[1:]


def _splits(name: str) -> Iterator[tuple[str, int]]:
    """Ways to read ``%r11`` as one of a range: (%r, 11) and (%r1, 1)."""
    for at in range(len(name.rstrip("0123456789")), len(name)):
        if name[at] != "0" or at == len(name) - 1:
            yield name[:at], int(name[at:])


class Names:
    """The scopes that are open at one point of an entry's body. ``text``: the file, for errors;
    ``symbols``: state spaces of what the module declares, by name."""

    def __init__(self, text: str, entry: Entry, symbols: Mapping[str, str]) -> None:
        self.text = text
        self.entry = entry
        self.symbols = {**symbols, **{param.name: "param" for param in entry.params}}
        self.scopes: list[Scope] = []
        self.count = 0

    def open(self, labels: set[str], outermost: bool = False) -> Scope:
        """Enters a scope that owns ``labels`` (known at once: branches go forward too)."""
        scope = Scope("" if outermost else f"@{self.count}", labels)
        self.count += 1
        self.scopes.append(scope)
        return scope

    # -- registers ------------------------------------------------------------------------------

    def declare(self, name: str, declared: str, line: int) -> None:
        """``.reg .<declared> name``. Raises PTXSyntaxError for what is declared already."""
        if _RE_TYPE.fullmatch(declared) is None:
            raise unsupported(self.text, line, f"register type .{declared} is not modelled")
        if m := re.fullmatch(rf"({IDENT})\s*<\s*(\d+)\s*>", name):
            self._check_new(m[1], m[1] in self.scopes[-1].ranges, line)
            self.scopes[-1].ranges[m[1]] = (int(m[2]), declared)
        else:
            self._check_new(name, name in self.scopes[-1].regs, line)
            self._add(self.scopes[-1], name, declared)

    def declare_vector(self, name: str, declared: str, count: int, line: int) -> None:
        """A register of vector type is its elements, which .x .y .z .w or .r .g .b .a name
        (PTX ISA 9.1 section 6.4.3)."""
        scope = self.scopes[-1]
        self._check_new(name, name in scope.vectors, line)
        elements = []
        for position, colour in list(zip("xyzw", "rgba", strict=True))[:count]:
            reg = self._add(scope, f"{name}.{position}", declared)
            scope.regs[f"{name}.{colour}"] = reg
            elements.append(reg)
        scope.vectors[name] = Vec(tuple(elements))

    def _check_new(self, name: str, known: bool, line: int) -> None:
        if known or not _RE_IDENT.fullmatch(name):
            raise error(self.text, line, f"register {name!r} is declared twice, or is not a name")

    def _add(self, scope: Scope, name: str, declared: str) -> Reg:
        reg = Reg(name + scope.suffix, kind_of(declared), type=declared)
        scope.regs[name] = reg
        self.entry.registers[reg.name] = reg.kind
        return reg

    def register(self, name: str) -> Reg | None:
        numbered = name[-1:].isdigit()
        for scope in reversed(self.scopes):
            if (reg := scope.regs.get(name)) is not None:
                return reg
            if numbered and scope.ranges:
                for prefix, number in _splits(name):
                    if prefix in scope.ranges and number < scope.ranges[prefix][0]:
                        return self._add(scope, name, scope.ranges[prefix][1])
        return None

    def vector(self, name: str) -> Vec | None:
        for scope in reversed(self.scopes):
            if name in scope.vectors:
                return scope.vectors[name]
        return None

    # -- labels and variables -------------------------------------------------------------------

    def label(self, name: str, line: int) -> str:
        """The unique name of a label."""
        for scope in reversed(self.scopes):
            if name in scope.labels:
                return name + scope.suffix
        raise error(self.text, line, f"label {name!r} is not defined in this scope")

    def targets(self, name: str, line: int) -> tuple[str, ...]:
        """The labels of a ``.branchtargets`` list, by their unique names."""
        for scope in reversed(self.scopes):
            if name in scope.targets:
                return tuple(self.label(target, line) for target in scope.targets[name])
        raise error(self.text, line, f"{name!r} is no list of .branchtargets in this scope")

    def declare_variable(self, found: Variable) -> None:
        """A .local variable, or a .param variable of a call, which becomes one."""
        unique = found.name + self.scopes[-1].suffix
        self.scopes[-1].variables[found.name] = unique
        self.entry.local.append(replace(found, name=unique, space="local"))
        self.symbols[unique] = "local"

    def declare_shared(self, found: Variable) -> None:
        self.entry.shared.append(found)
        self.symbols[found.name] = "shared"

    def symbol(self, name: str, line: int) -> str:
        """The unique name of a variable, parameter or function."""
        if (unique := self.variable(name)) is not None:
            return unique
        if name not in self.symbols:
            raise error(self.text, line, f"{name!r} is not declared")
        return name

    def variable(self, name: str) -> str | None:
        """The unique name of a .local or .param variable."""
        for scope in reversed(self.scopes):
            if name in scope.variables:
                return scope.variables[name]
        return None


def labels_of_scopes(text: str, statements: Sequence[Statement]) -> dict[int, set[str]]:
    """Labels that each scope owns, by the index of its opening brace. ``statements``: one body.
    Raises PTXSyntaxError for a label that its scope defines twice."""
    found: dict[int, set[str]] = {}
    opened: list[set[str]] = []
    for index, statement in enumerate(statements):
        if statement.kind == "open":
            found[index] = set()
            opened.append(found[index])
        elif statement.kind == "close":
            opened.pop()
        elif statement.kind == "label":
            name = statement.text[:-1].rstrip()
            if name in opened[-1]:
                message = f"label {name!r} is defined twice in its scope"
                raise error(text, statement.line, message)
            opened[-1].add(name)
    return found
