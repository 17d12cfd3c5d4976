"""The table of instructions that compile to native code: opcode pattern -> emitter.

An opcode matches as a whole or not at all, so an unknown modifier is refused, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from ..ptx.ast import Instr
from .builder import BlockBuilder

Emitter = Callable[[BlockBuilder, Instr, "re.Match[str]"], None]
_PATTERNS: list[tuple[re.Pattern[str], Emitter]] = []


def native(pattern: str) -> Callable[[Emitter], Emitter]:
    """Registers the emitter of every opcode that ``pattern`` matches in full."""

    def register(emit: Emitter) -> Emitter:
        _PATTERNS.append((re.compile(pattern), emit))
        find.cache_clear()
        return emit

    return register


@cache
def find(op: str) -> tuple[Emitter, re.Match[str]] | None:
    """The emitter of an opcode, or None where the machine executes it (or nobody does)."""
    for pattern, emit in _PATTERNS:
        match = pattern.fullmatch(op)
        if match is not None:
            return emit, match
    return None
