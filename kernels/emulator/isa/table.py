"""The table of instructions that the machine executes itself: memory, synchronisation, engines.

A *binder* is called once per instruction at decode time; it resolves operands and returns the
handler that runs it. A handler takes the warp and the mask of lanes that execute (never zero), and
returns None when the instruction is done, or a `Wait` when the warp's fragment must block.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..findings import UnsupportedPTX
from ..ptx.ast import Imm, Instr, Mem, Operand, Reg, Sink, Special, Sym, Vec

if TYPE_CHECKING:
    from ..program import Program
    from ..state import Warp

FULL = 0xFFFFFFFF
WARP = 32  # lanes
# Where the shared window lies among generic addresses: above every address of the host, which are
# the addresses of global memory.
SHARED_GENERIC_BASE = 1 << 56


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a fragment blocks. ``key``: the event that wakes it. ``retry``: run the instruction again
    when woken (else it is done). ``soft``: the instruction may give up and report failure, as a
    try_wait outside a spin loop does. ``detail``: for the deadlock report."""

    key: tuple[Any, ...]
    what: str
    retry: bool = True
    soft: bool = False
    detail: tuple[tuple[str, Any], ...] = ()


Handler = Callable[["Warp", int], "Wait | None"]
Binder = Callable[["Binding"], Handler]
_PATTERNS: list[tuple[re.Pattern[str], Binder, bool]] = []


def machine(pattern: str, *, converged: bool = False) -> Callable[[Binder], Binder]:
    """Registers the binder of every opcode that ``pattern`` matches in full. ``converged``: the
    instruction is .aligned, so all of the warp's live lanes must execute it together."""

    def register(binder: Binder) -> Binder:
        _PATTERNS.append((re.compile(pattern), binder, converged))
        return binder

    return register


@dataclass(slots=True)
class Binding:
    """What a binder sees: the instruction, the match of its opcode, and operand readers."""

    program: Program
    ins: Instr
    match: re.Match[str]
    index: int  # segment

    def unsupported(self, why: str) -> UnsupportedPTX:
        return UnsupportedPTX(f"ptx:{self.ins.line}: {self.ins.text!r}: {why}")

    def row(self, op: Operand, *kinds: str) -> int:
        """Row of a register operand in `WarpRegisters.r32`."""
        if not isinstance(op, Reg | Special):
            raise self.unsupported(f"operand {op} should be a register")
        kind = "b32" if isinstance(op, Special) else op.kind
        if kind not in kinds:
            raise self.unsupported(f"register {op.name} is .{kind}, not .{' or .'.join(kinds)}")
        return self.program.layout.row(op.name)

    def lanes32(self, op: Operand) -> Callable[[Warp], NDArray[np.uint32]]:
        """Reader of a 32-bit operand: uint32[32]."""
        if isinstance(op, Sym):
            at = self.constant(op)
            return lambda w: np.full(32, at + w.cta.window, np.uint32)
        if isinstance(op, Imm):
            value = np.full(32, op.value & FULL, np.uint32)
            return lambda w: value
        row = self.row(op, "b32")
        return lambda w: w.r32[row]

    def lanes64(self, op: Operand) -> Callable[[Warp], NDArray[np.uint64]]:
        """Reader of a 64-bit operand: uint64[32]."""
        if isinstance(op, Imm):
            value = np.full(32, op.value & (1 << 64) - 1, np.uint64)
            return lambda w: value
        row = self.row(op, "b64")
        return lambda w: (
            w.r32[row].astype(np.uint64) | w.r32[row + 1].astype(np.uint64) << np.uint64(32)
        )

    def scalar(self, op: Operand) -> Callable[[Warp, int], int]:
        """Reader of one lane's 16-, 32- or 64-bit operand: f(warp, lane) -> int (unsigned)."""
        if isinstance(op, Sym):
            at = self.constant(op)
            return lambda w, lane: at + w.cta.window
        if isinstance(op, Imm):
            value = op.value
            return lambda w, lane: value
        row = self.row(op, "b16", "b32", "b64")
        if isinstance(op, Reg) and op.kind == "b16":
            return lambda w, lane: int(w.r16[row, lane])
        low = row * WARP
        if isinstance(op, Reg) and op.kind == "b64":
            high = low + WARP
            return lambda w, lane: w.words[low + lane] | w.words[high + lane] << 32
        return lambda w, lane: w.words[low + lane]

    def uniform(self, op: Operand) -> Callable[[Warp], int | None]:
        """Reader of a 32-bit operand that all 32 lanes hold alike: f(warp) -> int (unsigned), or
        None where they do not."""
        if isinstance(op, Sym | Imm):
            scalar = self.scalar(op)
            return lambda w: scalar(w, 0) & FULL
        row = self.row(op, "b32")
        first = row * WARP

        def read(w: Warp) -> int | None:
            lanes = w.r32[row].tobytes()
            return w.words[first] if lanes == lanes[:4] * WARP else None

        return read

    def uniform_address(self, op: Operand) -> Callable[[Warp], int | None]:
        """`uniform` for an address ``[base + offset]`` of 32 bits."""
        if not isinstance(op, Mem):
            raise self.unsupported(f"operand {op} should be an address")
        base, offset = self.uniform(op.base), op.offset
        if not offset:
            return base

        def read(w: Warp) -> int | None:
            value = base(w)
            return None if value is None else value + offset & FULL

        return read

    def signed(self, op: Operand) -> Callable[[Warp, int], int]:
        if isinstance(op, Imm):
            value = op.value
            return lambda w, lane: value
        row = self.row(op, "b32")
        return lambda w, lane: int(w.i32[row, lane])

    def predicate(self, op: Operand) -> Callable[[Warp], int]:
        """Reader of a predicate as a lane mask."""
        if isinstance(op, Imm):
            value = FULL if op.value else 0
            return lambda w: value
        if not isinstance(op, Reg) or op.kind != "pred":
            raise self.unsupported(f"operand {op} should be a predicate")
        index, flip = self.program.layout.pred(op.name), FULL if op.negated else 0
        return lambda w: w.flags[index] ^ flip

    def constant(self, op: Sym) -> int:
        if op.name not in self.program.symbols:
            raise self.unsupported(f"{op.name!r} has no shared address")
        return self.program.symbols[op.name] + op.offset

    def address(self, op: Operand) -> Callable[[Warp, int], int]:
        """Reader of one lane's address ``[base + offset]``."""
        if not isinstance(op, Mem):
            raise self.unsupported(f"operand {op} should be an address")
        base, offset = self.scalar(op.base), op.offset
        if isinstance(op.base, Reg) and op.base.kind == "b32":
            return lambda w, lane: base(w, lane) + offset & FULL
        return lambda w, lane: base(w, lane) + offset

    def addresses(self, op: Operand) -> Callable[[Warp], NDArray[np.int64]]:
        """Reader of all lanes' addresses: int64[32]."""
        if not isinstance(op, Mem):
            raise self.unsupported(f"operand {op} should be an address")
        offset = op.offset
        if isinstance(op.base, Sym) and op.base.name in self.program.variables:
            name, offset = op.base.name, op.base.offset + offset
            return lambda w: np.full(32, w.cta.machine.variable_address(name) + offset, np.int64)
        if isinstance(op.base, Sym) and op.base.name in self.program.local:
            at = self.program.local[op.base.name] + op.base.offset + offset
            return lambda w: np.full(32, at, np.int64)
        if isinstance(op.base, Sym):
            start = self.constant(op.base) + offset
            return lambda w: np.full(32, start + w.cta.window, np.int64)
        if isinstance(op.base, Imm):
            value = np.full(32, op.base.value + offset, np.int64)
            return lambda w: value
        row = self.row(op.base, "b32", "b64")
        if isinstance(op.base, Reg) and op.base.kind == "b64":
            low = self.lanes64(op.base)
            return lambda w: low(w).view(np.int64) + offset
        # A 32-bit address wraps: compilers put a large offset on a base that is negative.
        return lambda w: w.r32[row].astype(np.int64) + offset & FULL

    def vector_rows(self, op: Operand) -> slice | NDArray[np.int64]:
        """Rows of a vector of 32-bit registers (or of one): a slice where they are consecutive."""
        items = op.items if isinstance(op, Vec) else (op,)
        rows = [self.row(item, "b32") for item in items]
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return slice(rows[0], rows[0] + len(rows))
        return np.array(rows, np.int64)

    def put32(self, op: Operand) -> Callable[[Warp, int, Any], None]:
        """Writer f(warp, mask, value) of a 32-bit destination; value is a scalar or uint32[32]."""
        if isinstance(op, Sink):
            return lambda w, mask, value: None
        row = self.row(op, "b32")

        def put(w: Warp, mask: int, value: Any) -> None:
            if mask == FULL:
                w.r32[row] = value
            else:
                lanes = LANES[mask]
                w.r32[row, lanes] = value[lanes] if isinstance(value, np.ndarray) else value

        return put

    def put_predicate(self, op: Operand) -> Callable[[Warp, int, int], None]:
        """Writer f(warp, mask, value mask) of a predicate destination."""
        if isinstance(op, Sink):
            return lambda w, mask, value: None
        if not isinstance(op, Reg) or op.kind != "pred":
            raise self.unsupported(f"operand {op} should be a predicate")
        index = self.program.layout.pred(op.name)

        def put(w: Warp, mask: int, value: int) -> None:
            w.flags[index] = w.flags[index] & ~mask | value & mask

        return put


class _LaneTable(dict[int, NDArray[np.int64]]):
    """mask -> indices of its lanes."""

    def __missing__(self, mask: int) -> NDArray[np.int64]:
        lanes = np.array([i for i in range(32) if mask >> i & 1], np.int64)
        self[mask] = lanes
        return lanes


LANES = _LaneTable()


def first_lane(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def find_binder(program: Program, ins: Instr) -> tuple[Binder, re.Match[str], bool]:
    """The binder of an opcode, its match, and whether it needs a converged warp."""
    for pattern, binder, converged in _PATTERNS:
        match = pattern.fullmatch(ins.op)
        if match is not None:
            return binder, match, converged
    source = program.module.source_of(ins)
    raise UnsupportedPTX(
        f"ptx:{ins.line}{f' ({source})' if source else ''}: {ins.text!r}: opcode {ins.op!r} is not"
        " modelled"
    )


def bind(program: Program, index: int, ins: Instr) -> tuple[Handler, bool]:
    """The handler of one instruction, and whether it needs a converged warp."""
    binder, match, converged = find_binder(program, ins)
    binding = Binding(program, ins, match, index)
    try:
        return binder(binding), converged
    except UnsupportedPTX:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise binding.unsupported(f"its operands are not understood ({error})") from error
