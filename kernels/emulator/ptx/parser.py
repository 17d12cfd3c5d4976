"""Parser of whole PTX files, as the CuTe DSL, NVVM and nvcc emit them, inline assembly included.

`syntax.cut` makes statements of the text, this file reads those of the module and `body.BodyReader`
those of entries. PTX is line-oriented only by habit: statements end in ``;``, labels in ``:``,
scopes are braces. Grammar: PTX ISA 9.1, chapters 4, 5 and 11. Whatever is not recognised raises
`PTXSyntaxError` with its line; PTX that the emulator does not model (indirect calls, textures)
raises `UnsupportedPTX`.
"""

from __future__ import annotations

import re

from .ast import Entry, Module, Param, Variable
from .body import BodyReader
from .declarations import Function, declared_variable, parameter, split_top
from .source import PTXSyntaxError, error, unsupported
from .syntax import IDENT, Statement, Syntax, cut
from .targets import bad_settings

_RE_HEADER = re.compile(
    rf"(?:\.\w+ ?)*?\.(entry|func)\b ?(?:\.noreturn ?)?(\([^)]*\))? ?({IDENT}) ?(\([^)]*\))? ?(.*)"
)
_RE_DIRECTIVE = re.compile(r"(\.\w+)\s*([^.]*)")
_RE_FILE = re.compile(r'\.file\s+(\d+)\s+"((?:[^"\\]|\\.)*)"')
_RE_VARIABLE = re.compile(r"(?:\.(?:extern|visible|weak|common) )*\.(?:shared|global|const)\b")


def parse(text: str) -> Module:
    """Parses a whole PTX file. Raises `PTXSyntaxError` or `UnsupportedPTX`."""
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.shared: list[Variable] = []
        self.variables: list[Variable] = []
        self.functions: dict[str, Function] = {}
        self.entries: list[tuple[Entry, list[Statement]]] = []
        self.files: dict[int, str] = {}
        self.settings: dict[str, str] = {}  # .version, .target, .address_size
        self.lines: dict[str, int] = {}  # where those are

    def module(self) -> Module:
        self.preamble()
        syntax = cut(self.text)
        self.declarations(syntax)
        self.check_settings()
        symbols = {v.name: v.space for v in (*self.shared, *self.variables)}
        symbols |= dict.fromkeys([*self.functions, *(e.name for e, _ in self.entries)], "code")
        for entry, statements in self.entries:
            reader = BodyReader(self.text, self.target, entry, self.functions, symbols)
            reader.read(statements)
            entry.shared = self.shared + entry.shared
        return Module(
            version=self.settings[".version"],
            target=self.settings[".target"],
            entries={entry.name: entry for entry, _ in self.entries},
            shared=self.shared,
            files=self.files,
            syntax=syntax,
            variables=self.variables,
            address_bits=int(self.settings.get(".address_size", "32")),
        )

    def preamble(self) -> None:
        """A file that has no .version and .target is refused as a whole, not at some line."""
        if not (re.search(r"\.version\s", self.text) and re.search(r"\.target\s", self.text)):
            raise PTXSyntaxError("not a PTX file: it has no .version and .target directives")

    def declarations(self, syntax: Syntax) -> None:
        """Everything outside bodies; bodies are kept for when all functions are known."""
        statements = syntax.statements
        index = 0
        while index < len(statements):
            statement = statements[index]
            index += 1
            if statement.kind == "header":
                end = _end_of_body(statements, index)
                self.function(statement, statements[index:end])
                index = end
            elif statement.kind == "words":
                self.words(statement)
            elif statement.kind == "directive":
                self.directive(statement)
            elif statement.kind != "section":
                raise error(self.text, statement.line, "this stands outside every function")
        for name in (".version", ".target"):
            if name not in self.settings:
                raise PTXSyntaxError(f"not a PTX file: it has no {name} directive")

    def words(self, statement: Statement) -> None:
        if m := _RE_FILE.match(statement.text):
            self.files[int(m[1])] = m[2]
        elif not statement.text.startswith(".loc"):
            name, value = statement.code.split(None, 1)
            if name in self.settings:
                raise error(self.text, statement.line, f"a second {name}")
            self.settings[name] = value
            self.lines[name] = statement.line

    @property
    def target(self) -> str:
        """The architecture: other words of .target are about textures and debugging."""
        return self.settings[".target"].split(",")[0].strip()

    def check_settings(self) -> None:
        """Raises PTXSyntaxError for a .version, .target or .address_size that there is not."""
        bits = int(self.settings.get(".address_size", "32"))
        wrong = bad_settings(self.settings[".version"], self.target, bits)
        if wrong is not None:
            raise error(self.text, self.lines.get(wrong[0], 1), wrong[1])

    def directive(self, statement: Statement) -> None:
        code = statement.code
        if _RE_VARIABLE.match(code):
            found = declared_variable(self.text, statement.line, code)
            (self.shared if found.space == "shared" else self.variables).append(found)
        elif not code.startswith(".pragma"):
            raise unsupported(self.text, statement.line, "this declaration is not modelled")

    def function(self, header: Statement, body: list[Statement]) -> None:
        """Notes an entry or a device function. ``body``: empty for a mere declaration."""
        m = _RE_HEADER.fullmatch(header.code)
        if m is None or body and body[0].kind != "open":
            raise unsupported(self.text, header.line, "this function header is not modelled")
        what, results, name, given, rest = m.groups()
        params = self.parameters(header.line, (given or "()")[1:-1])
        if what == "entry":
            if any(entry.name == name for entry, _ in self.entries):
                raise error(self.text, header.line, f"a second entry {name}")
            directives = {
                key: ", ".join(split_top(value.strip()))
                for key, value in _RE_DIRECTIVE.findall(rest)
            }
            if body:
                self.entries.append((Entry(name, tuple(params), directives=directives), body))
            return
        returned = self.parameters(header.line, (results or "()")[1:-1])
        if body or name not in self.functions:
            gives, takes = (tuple(p.name for p in part) for part in (returned, params))
            self.functions[name] = Function(name, gives, takes, tuple(body))

    def parameters(self, line: int, text: str) -> list[Param]:
        out: list[Param] = []
        for item in split_top(text):
            offset = out[-1].offset + out[-1].nbytes if out else 0
            found = parameter(item, offset)
            if found is None:
                raise error(self.text, line, f"parameter {item!r} is not understood")
            out.append(found)
        return out


def _end_of_body(statements: list[Statement], start: int) -> int:
    """The index behind the body that opens at ``start``; ``start`` itself if none does."""
    depth = 0
    for index in range(start, len(statements)):
        kind = statements[index].kind
        depth += (kind == "open") - (kind == "close")
        if depth == 0:
            return index + (kind == "close")
    return start
