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
    SharedVar,
    Sink,
    Sym,
    Vec,
)
from .parser import PTXSyntaxError, parse

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
    "SharedVar",
    "Sink",
    "Sym",
    "Vec",
    "parse",
]
