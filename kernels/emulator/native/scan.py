"""What the race detector does with the thousand cells of an MMA's operand, in one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from .jit import NativeModule, compile_functions
from .loops import Function

_SIGNATURE = ("ptr", "ptr", "ptr", "ptr", "i64", "i64")


def scan_and_fill() -> Callable[[int, int, int, int, int, int], None]:
    """The function f(values, others, cells, ends, count, fill) of addresses of int64 arrays: for
    each of ``count`` indices ``cells`` (one at least) it reads values[cell] and sets others[cell]
    to ``fill``; the least and the greatest value go to ends[0] and ends[1]."""
    return _module().functions["scan_and_fill"]


@cache
def _module() -> NativeModule:
    f = Function("scan_and_fill", "void", _SIGNATURE)
    least, greatest = str((1 << 63) - 1), str(-(1 << 63))
    with f.loop("%p4", ("i64", least), ("i64", greatest)) as cells:
        cell = f.load("i64", f.at("i64", "%p2", cells.index), 8)
        value = f.load("i64", f.at("i64", "%p0", cell), 8)
        f.store("i64", "%p5", f.at("i64", "%p1", cell), 8)
        low, high = (("i64", v) for v in cells.values)
        cells.after = [
            f.call("i64", "llvm.smin.i64", low, ("i64", value)),
            f.call("i64", "llvm.smax.i64", high, ("i64", value)),
        ]
    for k, end in enumerate(cells.values):
        f.store("i64", end, f.at("i64", "%p3", str(k)), 8)
    types = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 2
    text = "\n".join([*sorted(f.intrinsics), f.text()])
    return compile_functions(text, {f.name: ctypes.CFUNCTYPE(None, *types)})
