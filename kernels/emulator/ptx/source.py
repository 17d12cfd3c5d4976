"""Errors of the PTX front end: each names the line and shows it."""

from __future__ import annotations

from ..findings import UnsupportedPTX


class PTXSyntaxError(ValueError):
    """The text is not PTX that this front end understands; the message names the line."""


def place(text: str, line: int, message: str) -> str:
    """``message`` with the 1-based line of ``text`` that it is about."""
    lines = text.splitlines()
    shown = lines[line - 1].strip() if line <= len(lines) else ""
    return f"ptx:{line}: {message}: {shown[:160]!r}"


def error(text: str, line: int, message: str) -> PTXSyntaxError:
    return PTXSyntaxError(place(text, line, message))


def unsupported(text: str, line: int, message: str) -> UnsupportedPTX:
    return UnsupportedPTX(place(text, line, message))
