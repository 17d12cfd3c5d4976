"""Builds one LLVM function per straight-line block: 32 lanes wide, registers as SSA values.

A register's value is kept in whichever form it was made (bits or float, one 64-bit vector or two
32-bit halves) and changed only when somebody needs another form. ``mov.b64 {a, b}`` therefore costs
nothing, and ``fma.rn.f32x2`` is two plain vector FMAs. Values cross blocks through the warp's
register file in memory (`RegisterFile` gives the layout), masked by the active lanes.

NaN: float32 arithmetic returns the one canonical NaN 0x7fffffff (CUDA C++ Programming Guide,
"Floating-Point Standard"; PTX ISA 9.1 names it for min.NaN and max.NaN); the host's
differs. Results are canonicalised when their *bits* become visible, not at every operation.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..findings import UnsupportedPTX
from ..ptx.ast import Imm, Instr, Operand, Reg, Special, Sym
from ..registers import POISON, RegisterFile
from .ir import F32, F64, I1, I16, I32, I64, ZERO, Code, V, splat_i


@dataclass(slots=True)
class V16:
    i: str


@dataclass(slots=True)
class V32:
    """32 bits a lane: ``i`` (bits), ``f`` (float), or both. ``raw``: ``f`` may hold a host NaN."""

    i: str | None = None
    f: str | None = None
    raw: bool = False


@dataclass(slots=True)
class V64:
    """64 bits a lane: halves, or one vector ``q``, or both."""

    lo: V32 | None = None
    hi: V32 | None = None
    q: str | None = None


@dataclass(slots=True)
class VPred:
    p: str


Value = V16 | V32 | V64 | VPred


@dataclass(frozen=True)
class Places:
    """Where named variables are: shared-window addresses, offsets of kernel parameters in their
    block, addresses of local variables, and offsets of .global and .const variables in the
    parameter block. ``clustered``: shared addresses carry the CTA's rank."""

    shared: dict[str, int]
    params: dict[str, int]
    local: dict[str, int]
    variables: dict[str, int]
    clustered: bool = False


class BlockBuilder(Code):
    """Emits the body of one block function. ``regs`` gives each register its place in memory."""

    def __init__(self, name: str, regs: RegisterFile, places: Places) -> None:
        super().__init__()
        self.name = name
        self.regs = regs
        self.places = places
        self.env: dict[str, Value] = {}
        self.defs: dict[str, None] = {}  # registers written here, in order
        self.guard: str | None = None  # <32 x i1> of the instruction being built
        self.instr: Instr | None = None

    def unsupported(self, why: str) -> UnsupportedPTX:
        assert self.instr is not None
        return UnsupportedPTX(f"ptx:{self.instr.line}: {self.instr.text!r}: {why}")

    # -- memory of registers ----------------------------------------------------------------------

    def _address(self, offset: int) -> str:
        return self.t(f"getelementptr i8, ptr %regs, i64 {offset}")

    def _load(self, reg: str) -> Value:
        kind = self.regs.kind(reg)
        if reg not in self.regs:
            return self._poison(kind)
        offset = self.regs.offset(reg)
        if kind == "pred":
            bits = self.t(f"load i32, ptr {self._address(offset)}, align 4")
            return VPred(self.t(f"bitcast i32 {bits} to {I1}"))
        if kind in ("b16", "b8"):  # eight bits lie in the low half, the rest is zero
            return V16(self.t(f"load {I16}, ptr {self._address(offset)}, align 64"))
        lo = V32(i=self.t(f"load {I32}, ptr {self._address(offset)}, align 64"))
        if kind == "b32":
            return lo
        if kind == "b64":
            hi = V32(i=self.t(f"load {I32}, ptr {self._address(offset + 128)}, align 64"))
            return V64(lo, hi)
        raise self.unsupported(f"registers of type .{kind} are not modelled")

    def _poison(self, kind: str) -> Value:
        """What a register holds that has no place because nobody wrote it before: the old value
        under a guarded first write, or what a move copies without anybody using it."""
        low = V32(i=splat_i(32, POISON))
        if kind == "pred":
            return VPred(ZERO)
        if kind in ("b16", "b8"):
            return V16(splat_i(16, POISON & (0xFFFF if kind == "b16" else 0xFF)))
        return low if kind == "b32" else V64(low, V32(i=splat_i(32, POISON)))

    def value(self, reg: str) -> Value:
        if reg not in self.env:
            self.env[reg] = self._load(reg)
        return self.env[reg]

    def store_live(self, live_out: set[str]) -> None:
        """Writes back the block's results that somebody reads later, for the active lanes only."""
        for reg in self.defs:
            if reg not in live_out:
                continue
            value, offset = self.env[reg], self.regs.offset(reg)
            if isinstance(value, VPred):
                new = self.t(f"bitcast {I1} {value.p} to i32")
                address = self._address(offset)
                old = self.t(f"load i32, ptr {address}, align 4")
                flip = self.t(f"xor i32 {new}, {old}")
                flip = self.t(f"and i32 {flip}, %mask")
                self.lines.append(
                    f"  store i32 {self.t(f'xor i32 {old}, {flip}')}, ptr {address}, align 4"
                )
            elif isinstance(value, V16):
                self._store_masked(I16, "v32i16", value.i, offset)
            elif isinstance(value, V32):
                self._store_masked(I32, "v32i32", self.bits32(value), offset)
            else:
                lo, hi = self.halves(value)
                self._store_masked(I32, "v32i32", self.bits32(lo), offset)
                self._store_masked(I32, "v32i32", self.bits32(hi), offset + 128)

    def _store_masked(self, ty: str, suffix: str, value: str, offset: int) -> None:
        name = f"llvm.masked.store.{suffix}.p0"
        self.intrinsics.add(f"declare void @{name}({ty}, ptr, i32, {I1})")
        address = self._address(offset)
        self.lines.append(f"  call void @{name}({ty} {value}, ptr {address}, i32 64, {I1} %lanes)")

    # -- forms ---------------------------------------------------------------------------------

    def bits32(self, value: V32) -> str:
        if value.i is None:
            assert value.f is not None
            bits = self.t(f"bitcast {F32} {value.f} to {I32}")
            if value.raw:
                nan = self.t(f"fcmp uno {F32} {value.f}, {ZERO}")
                bits = self.t(f"select {I1} {nan}, {I32} {splat_i(32, 0x7FFFFFFF)}, {I32} {bits}")
            value.i = bits
        return value.i

    def float32(self, value: V32) -> str:
        if value.f is None:
            value.f = self.t(f"bitcast {I32} {value.i} to {F32}")
        return value.f

    def halves(self, value: V64) -> tuple[V32, V32]:
        if value.lo is None or value.hi is None:
            value.lo = V32(i=self.t(f"trunc {I64} {value.q} to {I32}"))
            high = self.t(f"lshr {I64} {value.q}, {splat_i(64, 32)}")
            value.hi = V32(i=self.t(f"trunc {I64} {high} to {I32}"))
        return value.lo, value.hi

    def bits64(self, value: V64) -> str:
        if value.q is None:
            assert value.lo is not None and value.hi is not None
            lo = self.t(f"zext {I32} {self.bits32(value.lo)} to {I64}")
            hi = self.t(f"zext {I32} {self.bits32(value.hi)} to {I64}")
            hi = self.t(f"shl {I64} {hi}, {splat_i(64, 32)}")
            value.q = self.t(f"or {I64} {lo}, {hi}")
        return value.q

    # -- operands: sources ----------------------------------------------------------------------

    def p(self, op: Operand) -> str:
        if isinstance(op, Imm):
            return splat_i(1, 1 if op.value else 0)
        value = self.value(self._reg(op, "pred"))
        assert isinstance(value, VPred)
        if isinstance(op, Reg) and op.negated:
            return self.t(f"xor {I1} {value.p}, {splat_i(1, 1)}")
        return value.p

    def _reg(self, op: Operand, *kinds: str) -> str:
        if isinstance(op, Special):
            return op.name
        if not isinstance(op, Reg):
            raise self.unsupported(f"operand {op} should be a register")
        if op.kind not in kinds:
            raise self.unsupported(f"register {op.name} is .{op.kind}, not {' or .'.join(kinds)}")
        return op.name

    def i16(self, op: Operand) -> str:
        if isinstance(op, Imm):
            return splat_i(16, op.value)
        value = self.value(self._reg(op, "b16"))
        assert isinstance(value, V16)
        return value.i

    def i8(self, op: Operand) -> str:
        """An 8-bit register as 16 bits, the upper ones zero."""
        value = self.value(self._reg(op, "b8"))
        assert isinstance(value, V16)
        return value.i

    def i32(self, op: Operand) -> str:
        if isinstance(op, Imm):
            return splat_i(32, self.imm_bits(op, 32))
        if isinstance(op, Sym):
            return self.symbol32(op)
        value = self.value(self._reg(op, "b32"))
        assert isinstance(value, V32)
        return self.bits32(value)

    def f32(self, op: Operand) -> str:
        if isinstance(op, Imm):
            return f"bitcast ({I32} {splat_i(32, self.imm_bits(op, 32))} to {F32})"
        value = self.value(self._reg(op, "b32"))
        assert isinstance(value, V32)
        return self.float32(value)

    def pair(self, op: Operand) -> tuple[V32, V32]:
        if isinstance(op, Imm):
            return (V32(i=splat_i(32, op.value)), V32(i=splat_i(32, op.value >> 32)))
        value = self.value(self._reg(op, "b64"))
        assert isinstance(value, V64)
        return self.halves(value)

    def i64(self, op: Operand) -> str:
        if isinstance(op, Imm):
            return splat_i(64, self.imm_bits(op, 64))
        if isinstance(op, Sym):
            return self.symbol64(op)
        value = self.value(self._reg(op, "b64"))
        assert isinstance(value, V64)
        return self.bits64(value)

    def f64(self, op: Operand) -> str:
        return self.t(f"bitcast {I64} {self.i64(op)} to {F64}")

    def imm_bits(self, op: Imm, bits: int) -> int:
        if not op.is_float or op.bits == bits:
            return op.value
        as_double = (
            struct.unpack("<d", struct.pack("<Q", op.value))[0]
            if op.bits == 64
            else (struct.unpack("<f", struct.pack("<I", op.value))[0])
        )
        fmt = ("<f", "<I") if bits == 32 else ("<d", "<Q")
        return int(struct.unpack(fmt[1], struct.pack(fmt[0], as_double))[0])

    def symbol(self, op: Sym) -> int:
        if op.name not in self.places.shared:
            raise self.unsupported(f"{op.name!r} has no 32-bit address (only shared variables do)")
        return self.places.shared[op.name] + op.offset

    def symbol32(self, op: Sym) -> str:
        """A shared variable's address; in a cluster the CTA's rank stands in bits 31 to 24."""
        offset = splat_i(32, self.symbol(op))
        if not self.places.clustered:
            return offset
        rank = self.value("%cluster_ctarank")
        assert isinstance(rank, V32)
        window = self.t(f"shl {I32} {self.bits32(rank)}, {splat_i(32, 24)}")
        return self.t(f"or {I32} {window}, {offset}")

    def symbol64(self, op: Sym) -> str:
        if op.name in self.places.local:
            return splat_i(64, self.places.local[op.name] + op.offset)
        behind = self.places.params | self.places.variables
        if op.name in behind:
            base = self.t("ptrtoint ptr %params to i64")
            total = self.t(f"add i64 {base}, {behind[op.name] + op.offset}")
            one = self.t(f"insertelement {I64} poison, i64 {total}, i64 0")
            zeros = f"<{V} x i32> zeroinitializer"
            return self.t(f"shufflevector {I64} {one}, {I64} poison, {zeros}")
        return self.t(f"zext {I32} {self.symbol32(op)} to {I64}")

    # -- operands: destinations -------------------------------------------------------------------

    def _put(self, op: Operand, value: Value) -> None:
        assert isinstance(op, Reg)
        self.env[op.name] = value
        self.defs[op.name] = None

    def _blend(self, ty: str, new: str, old: str) -> str:
        return self.t(f"select {I1} {self.guard}, {ty} {new}, {ty} {old}")

    def set_p(self, op: Operand, name: str) -> None:
        self._reg(op, "pred")
        if self.guard is not None:
            name = self._blend(I1, name, self.p(op))
        self._put(op, VPred(name))

    def set_i16(self, op: Operand, name: str) -> None:
        self._reg(op, "b16")
        if self.guard is not None:
            name = self._blend(I16, name, self.i16(op))
        self._put(op, V16(name))

    def set_i8(self, op: Operand, name: str) -> None:
        """``name``: 16 bits, the upper ones zero."""
        self._reg(op, "b8")
        if self.guard is not None:
            name = self._blend(I16, name, self.i8(op))
        self._put(op, V16(name))

    def set_i32(self, op: Operand, name: str) -> None:
        self._reg(op, "b32")
        if self.guard is not None:
            name = self._blend(I32, name, self.i32(op))
        self._put(op, V32(i=name))

    def set_f32(self, op: Operand, name: str, *, raw: bool = True) -> None:
        self.set_v32(op, V32(f=name, raw=raw))

    def set_v32(self, op: Operand, value: V32) -> None:
        if self.guard is not None:
            self.set_i32(op, self.bits32(value))
            return
        self._reg(op, "b32")
        self._put(op, value)

    def set_i64(self, op: Operand, name: str) -> None:
        self._reg(op, "b64")
        if self.guard is not None:
            name = self._blend(I64, name, self.i64(op))
        self._put(op, V64(q=name))

    def set_f64(self, op: Operand, name: str) -> None:
        """Double NaNs keep their payload on the GPU; the emitters see to it."""
        self.set_i64(op, self.t(f"bitcast {F64} {name} to {I64}"))

    def set_pair(self, op: Operand, lo: V32, hi: V32) -> None:
        self._reg(op, "b64")
        if self.guard is not None:
            old_lo, old_hi = self.pair(op)
            lo = V32(i=self._blend(I32, self.bits32(lo), self.bits32(old_lo)))
            hi = V32(i=self._blend(I32, self.bits32(hi), self.bits32(old_hi)))
        self._put(op, V64(lo, hi))

    def copy(self, dst: Operand, src: Reg) -> None:
        """A register move keeps the value's form."""
        value = self.value(src.name)
        if isinstance(value, V32):
            self.set_v32(dst, V32(value.i, value.f, value.raw))
        elif isinstance(value, V64):
            if value.lo is not None and value.hi is not None:
                self.set_pair(dst, value.lo, value.hi)
            else:
                assert value.q is not None
                self.set_i64(dst, value.q)
        elif isinstance(value, V16):
            self.set_i16(dst, value.i)
        else:
            self.set_p(dst, self.p(src))
