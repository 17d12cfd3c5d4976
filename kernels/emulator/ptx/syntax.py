"""PTX text as a list of statements that loses nothing: printed, it is the text that was read.

A `Statement` holds what stands in front of it (white space, comments) and itself as written, so
``str(cut(text)) == text`` for every text that can be cut, and a tool that replaces a statement
changes that statement and nothing else:

    syntax = cut(text)
    syntax.statements[7] = syntax.statements[7].with_code("add.s32 %r1, %r1, 1;")
    print(syntax)

Everything of the text belongs to some statement: what fits no rule of the grammar raises
`PTXSyntaxError` with its line. Grammar: PTX ISA 9.1, chapters 4, 5 and 11.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from .source import PTXSyntaxError, error

IDENT = r"(?:[A-Za-z][\w$]*+|[_$%][\w$]++)"
_QUIET = r"//[^\n]*+|/\*.*?\*/"
_TEXT = r'[^;{}"/]++|"(?:[^"\\\n]|\\.)*+"|' + _QUIET
_INNER = rf"(?:{_TEXT})*+"
# Braces inside a statement: vectors, and initialisers, which nest.
_BRACES = rf"\{{{_INNER}(?:\{{{_INNER}(?:\{{{_INNER}\}}{_INNER})*+\}}{_INNER})*+\}}"

_RE_TRIVIA = re.compile(rf"(?:\s++|{_QUIET})*+", re.S)
_RE_GAP = re.compile(_QUIET, re.S)
_RE_LABEL = re.compile(rf"{IDENT}\s*+:(?!:)")
_RE_STATEMENT = re.compile(rf"(?:{_TEXT}|{_BRACES})*+;", re.S)
_RE_HEADER = re.compile(rf"\.(?:entry|func)\b(?:{_TEXT})*+(?:;|(?=\{{))", re.S)
_RE_LINKED = re.compile(r"(?:\.(?:extern|visible|weak|common)\s++)+(?=\.(?:entry|func)\b)")
_RE_SECTION = re.compile(r"\.section\s++[.\w]++\s*+\{[^}]*+\}")
# Directives that end with their last word, not with a semicolon (PTX ISA 9.1 sections 11.1, 11.5).
_RE_WORDS = re.compile(
    r"\.version\s++\d++\.\d++|\.target\s++\w++(?:\s*+,\s*+\w++)*+|\.address_size\s++\d++|"
    r"\.loc\s++\d++\s++\d++\s++\d++"
    r"(?:\s*+,\s*+(?:function_name\s++[\w$]++(?:\s*+\+\s*+\d++)?|inlined_at\s++\d++\s++\d++\s++\d++))*+|"
    r'\.file\s++\d++\s++"(?:[^"\\\n]|\\.)*+"(?:\s*+,\s*+\d++){0,2}+'
)  # fmt: skip
_IN_ASM = re.compile(r"//\s*(begin|end) inline asm")


class Statement(NamedTuple):
    """One statement, label or brace.

    kind: ``header`` (of an entry or function, up to its brace or semicolon), ``open``, ``close``,
        ``label``, ``instruction``, ``directive``, ``section``, or ``words`` for a directive that
        needs no semicolon.
    lead: white space and comments in front of it; ``text``: the statement as written, with its
        semicolon; ``line``: 1-based, where its text begins.
    in_asm: inside inline assembly, as NVVM's comments mark it.
    """

    kind: str
    lead: str
    text: str
    line: int
    in_asm: bool = False

    @property
    def code(self) -> str:
        """The text without comments, semicolon and superfluous white space."""
        text = _RE_GAP.sub(" ", self.text) if "/" in self.text else self.text
        return " ".join(text.rstrip(";").split())

    def with_code(self, text: str) -> Statement:
        """Another statement in the same place. Raises `PTXSyntaxError` if it is not one alone."""
        syntax = cut(text, inside=self.kind != "header")
        if len(syntax.statements) != 1 or str(syntax) != syntax.statements[0].text:
            raise PTXSyntaxError(f"{text!r} is not one statement alone")
        return self._replace(kind=syntax.statements[0].kind, text=text)

    def __str__(self) -> str:
        return self.lead + self.text


@dataclass(slots=True)
class Syntax:
    """A file: its statements in order, and what follows the last."""

    statements: list[Statement]
    tail: str

    def __str__(self) -> str:
        return "".join([*map(str, self.statements), self.tail])


def cut(text: str, inside: bool = False) -> Syntax:
    """Cuts a file, or with ``inside`` a part of a function's body, into statements. Raises
    `PTXSyntaxError` for text that no rule takes and for braces that do not match."""
    statements: list[Statement] = []
    opened: list[int] = []  # lines of the braces still open
    pos, line, in_asm = 0, 1, False
    end_of_text = len(text)
    while True:
        start, pos = pos, _RE_TRIVIA.match(text, pos).end()  # type: ignore[union-attr]
        lead = text[start:pos]
        if "inline asm" in lead and (marks := _IN_ASM.findall(lead)):
            in_asm = marks[-1] == "begin"
        line += lead.count("\n")
        if pos == end_of_text:
            break
        kind, end = _statement(text, pos, line, inside or bool(opened))
        if kind == "open":
            opened.append(line)
        elif kind == "close":
            if not opened:
                raise error(text, line, "no brace is open here")
            opened.pop()
        body = text[pos:end]
        statements.append(Statement(kind, lead, body, line, in_asm))
        line += body.count("\n")
        pos = end
    if opened:
        raise error(text, opened[-1], "the body that opens here is not closed")
    return Syntax(statements, lead)


def _statement(text: str, pos: int, line: int, inside: bool) -> tuple[str, int]:
    """Kind and end of the statement that begins at ``pos``."""
    ch = text[pos]
    if ch == "." and (m := _RE_WORDS.match(text, pos)):
        return "words", m.end()
    if not inside:
        return _outside(text, pos, line)
    if ch == "{":
        return "open", pos + 1
    if ch == "}":
        return "close", pos + 1
    if ch == ";":
        raise error(text, line, "a semicolon ends no statement here")
    if m := _RE_LABEL.match(text, pos):
        return "label", m.end()
    if m := _RE_STATEMENT.match(text, pos):
        return "directive" if ch == "." else "instruction", m.end()
    raise error(text, line, "statement has no end")


def _outside(text: str, pos: int, line: int) -> tuple[str, int]:
    """A declaration of the module."""
    if text[pos] == "{":
        return "open", pos + 1
    if text[pos] == "}":
        return "close", pos + 1
    start = m.end() if (m := _RE_LINKED.match(text, pos)) else pos
    if m := _RE_HEADER.match(text, start):
        trimmed = text[pos : m.end()].rstrip()
        return "header", pos + len(trimmed)
    if m := _RE_SECTION.match(text, pos):
        return "section", m.end()
    if text[pos] == "." and (m := _RE_STATEMENT.match(text, pos)):
        return "directive", m.end()
    raise error(text, line, "not a declaration, or one that has no end")


__all__ = ["IDENT", "PTXSyntaxError", "Statement", "Syntax", "cut"]
