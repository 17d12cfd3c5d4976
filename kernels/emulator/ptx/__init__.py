"""PTX front end: text -> `Module` (declarations, entries, statements), with source lines kept."""

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
    Sym,
    Variable,
    Vec,
)
from .parser import parse
from .source import PTXSyntaxError
from .syntax import Statement, Syntax, cut

__all__ = [
    "Entry",
    "Imm",
    "Instr",
    "Label",
    "Mem",
    "Module",
    "Operand",
    "PTXSyntaxError",
    "Param",
    "Reg",
    "RegPair",
    "Sink",
    "Statement",
    "Sym",
    "Syntax",
    "Variable",
    "Vec",
    "cut",
    "parse",
]
