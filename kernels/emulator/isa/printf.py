"""printf from a kernel: the call of vprintf, which the driver provides.

CUDA C++ Programming Guide, "Formatted Output": vprintf takes a format string and a buffer in which
the arguments are packed, each aligned to its size (floats as doubles), and returns how many there
are. A GPU keeps the text until the host synchronises; here it goes to standard output at once, a
line for each thread, which begins with the thread's block and number.
"""

from __future__ import annotations

import re
import struct
import sys
from typing import TYPE_CHECKING

import numpy as np

from ..findings import EmulatorFault
from ..memory.local import LOCAL_GENERIC_BASE
from ..ptx.ast import Mem, Operand, Sym
from .memory import load_generic
from .table import LANES, Binding, Handler, machine

if TYPE_CHECKING:
    from ..state import Warp

_CONVERSION = re.compile(r"%(?P<flags>[-+ #0]*\d*(?:\.\d+)?)(?P<size>hh|h|ll|l|j|z|t)?(?P<type>.)")
_LONGEST = 1 << 16  # of a string; more is taken for one without an end


@machine(r"call\.vprintf")
def vprintf(b: Binding) -> Handler:
    count_at, format_at, buffer_at = (_slot(b, op) for op in b.ins.operands)

    def run(w: Warp, mask: int) -> None:
        lanes = LANES[mask]
        formats = _pointers(w, lanes, format_at)
        buffers = _pointers(w, lanes, buffer_at)
        counts = []
        for lane, form, buffer in zip(lanes.tolist(), formats, buffers, strict=True):
            text, count = _format(w, lane, form, buffer)
            _print(w, lane, text)
            counts.append(count)
        values = np.array(counts, np.int32).view(np.uint8).reshape(-1, 4)
        w.local.store(lanes, np.full(len(lanes), count_at, np.int64), values)

    return run


def _slot(b: Binding, op: Operand) -> int:
    """Local address of an argument of the call."""
    assert isinstance(op, Mem) and isinstance(op.base, Sym)
    return b.program.local[op.base.name]


def _pointers(w: Warp, lanes: np.ndarray, at: int) -> list[int]:
    data = w.local.load(lanes, np.full(len(lanes), at, np.int64), 8)
    return [int(v) for v in np.ascontiguousarray(data).view(np.int64)[:, 0]]


def _bytes(w: Warp, lane: int, address: int, nbytes: int) -> bytes:
    """Bytes at a thread's generic address; they are naturally aligned."""
    at = np.array([address], np.int64)
    if LOCAL_GENERIC_BASE <= address < 2 * LOCAL_GENERIC_BASE:
        return w.local.load(np.array([lane]), at - LOCAL_GENERIC_BASE, nbytes).tobytes()
    return load_generic(w, at, nbytes).tobytes()


def _string(w: Warp, lane: int, address: int) -> str:
    out = bytearray()
    while (byte := _bytes(w, lane, address + len(out), 1)) != b"\0":
        out += byte
        if len(out) > _LONGEST:
            raise EmulatorFault(
                "printf_string", f"the string at {address:#x} has no end", address=address
            )
    return out.decode("utf-8", "replace")


def _format(w: Warp, lane: int, form: int, buffer: int) -> tuple[str, int]:
    """The text, and how many arguments it took."""
    count, at = 0, buffer

    def take(nbytes: int) -> bytes:
        nonlocal at, count
        at = (at + nbytes - 1) // nbytes * nbytes
        data = _bytes(w, lane, at, nbytes)
        at, count = at + nbytes, count + 1
        return data

    def replace(m: re.Match[str]) -> str:
        flags, size, kind = m["flags"], m["size"] or "", m["type"]
        if kind == "%":
            return "%"
        if kind in "fFeEgGaA":
            value: float = struct.unpack("<d", take(8))[0]
            return value.hex() if kind in "aA" else f"%{flags}{kind}" % value
        if kind == "s":
            return f"%{flags}s" % _string(w, lane, int.from_bytes(take(8), "little"))
        if kind == "p":
            return hex(int.from_bytes(take(8), "little"))
        if kind in "diouxXc":
            wide = size in ("l", "ll", "j", "z", "t")
            number = int.from_bytes(take(8 if wide else 4), "little", signed=kind in "di")
            return chr(number & 0xFF) if kind == "c" else f"%{flags}{kind}" % number
        raise EmulatorFault("printf_format", f"printf does not know {m[0]!r}", format=m[0])

    return _CONVERSION.sub(replace, _string(w, lane, form)), count


def _print(w: Warp, lane: int, text: str) -> None:
    x, y, z = w.cta.block
    thread = 32 * w.index + lane
    sys.stdout.write(f"[block {x},{y},{z} thread {thread}] {text.rstrip(chr(10))}\n")
