"""Straight-line PTX compiled to host vector code, 32 lanes at a time."""

from . import (  # noqa: F401  (they fill the table)
    convert,
    double,
    extended,
    floating,
    half,
    integer,
    narrow,
    rounded,
)
from .builder import BlockBuilder, Places
from .collective import find_collective, source_lanes
from .jit import NativeModule, compile_blocks
from .table import find

__all__ = [
    "BlockBuilder",
    "NativeModule",
    "Places",
    "compile_blocks",
    "find",
    "find_collective",
    "source_lanes",
]
