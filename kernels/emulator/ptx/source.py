"""The text of a PTX file: comments blanked, positions, and errors that name the line."""

from __future__ import annotations

import bisect
import re

from ..findings import UnsupportedPTX


class PTXSyntaxError(ValueError):
    """The text is not PTX that this front end understands; the message names the line."""


_RE_QUIET = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.S)


def blank(text: str, strings: bool) -> str:
    """Comments, and with ``strings`` the insides of strings, become spaces: offsets stay."""

    def replace(match: re.Match[str]) -> str:
        piece = match.group(0)
        if not piece.startswith('"'):
            return re.sub(r"[^\n]", " ", piece)
        return f'"{" " * (len(piece) - 2)}"' if strings else piece

    return _RE_QUIET.sub(replace, text)


class Source:
    """``clean``: the text with comments and the insides of strings blanked, offsets unchanged."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.clean = blank(text, strings=True)
        self.line_starts = [0] + [m.end() for m in re.finditer("\n", text)]

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
