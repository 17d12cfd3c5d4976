"""Text of LLVM IR: names, types, constants, and functions that blocks share.

All vectors are 32 lanes wide. Longer sequences (2**x, a conversion to bfloat16, a directed
rounding) are emitted once a module, as functions of their own: inlined at every use they would be
half of a kernel's code and of its compile time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

V = 32  # lanes
I1, I16, I32, I64 = (f"<{V} x i{n}>" for n in (1, 16, 32, 64))
F16, F32, F64 = f"<{V} x half>", f"<{V} x float>", f"<{V} x double>"
ZERO = "zeroinitializer"


def splat_i(bits: int, value: int) -> str:
    return f"splat (i{bits} {value & ((1 << bits) - 1)})"


def splat_f32(value: float) -> str:
    """A float32 splat constant; LLVM writes floats as the hex bits of the equal double."""
    as_f32 = struct.unpack("<f", struct.pack("<f", value))[0]
    bits = struct.unpack("<Q", struct.pack("<d", as_f32))[0]
    return f"splat (float 0x{bits:016X})"


def splat_f64(value: float) -> str:
    return f"splat (double 0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X})"


@dataclass(frozen=True, slots=True)
class Helper:
    """A function that blocks call: its definition, and the declarations that it needs."""

    text: str
    intrinsics: frozenset[str]


_helpers: dict[str, Helper] = {}  # by name; a name says all that the function depends on


class Code:
    """Lines of IR in SSA form."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.intrinsics: set[str] = set()
        self.helpers: dict[str, Helper] = {}
        self.n = 0

    def t(self, expr: str) -> str:
        """Emits one instruction and returns the name of its result."""
        self.n += 1
        name = f"%v{self.n}"
        self.lines.append(f"  {name} = {expr}")
        return name

    def call(self, ret: str, name: str, *args: tuple[str, str]) -> str:
        """Calls an intrinsic; ``args`` are (type, value)."""
        self.intrinsics.add(f"declare {ret} @{name}({', '.join(t for t, _ in args)})")
        return self.t(f"call {ret} @{name}({', '.join(f'{t} {v}' for t, v in args)})")

    def outlined(
        self, ret: str, name: str, emit: Callable[..., str], *args: tuple[str, str]
    ) -> str:
        """Calls the shared function ``ptx.<name>``, whose body is ``emit(code, *parameters)``. The
        prefix keeps it apart from the host's libm, which the compiler calls by name."""
        name = f"ptx.{name}"
        if name not in _helpers:
            body = Code()
            out = emit(body, *(f"%a{i}" for i in range(len(args))))
            parameters = ", ".join(f"{t} %a{i}" for i, (t, _) in enumerate(args))
            head = f"define internal {ret} @{name}({parameters}) noinline #0 {{"
            text = "\n".join([head, *body.lines, f"  ret {ret} {out}", "}"])
            _helpers[name] = Helper(text, frozenset(body.intrinsics))
        self.helpers[name] = _helpers[name]
        return self.t(f"call {ret} @{name}({', '.join(f'{t} {v}' for t, v in args)})")
