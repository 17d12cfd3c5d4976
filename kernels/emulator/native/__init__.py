"""Straight-line PTX compiled to host vector code, 32 lanes at a time."""

from . import convert, floating, integer  # noqa: F401  (they fill the table)
from .builder import BlockBuilder
from .collective import find_collective
from .jit import NativeModule, compile_blocks
from .table import find

__all__ = ["BlockBuilder", "NativeModule", "compile_blocks", "find", "find_collective"]
