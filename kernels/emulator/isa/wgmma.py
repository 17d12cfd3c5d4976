"""wgmma: the fourth-generation tensor core's warpgroup MMA (PTX ISA 9.1 section 9.7.15.5).

A warp of the warpgroup computes its own 16 rows of D; all four execute every instruction. The
operation is asynchronous: D is undefined, and A's registers must not change, until its group has
been waited for. Arithmetic as in `engines.tensorcore` (mode ``exact-f32``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..engines.descriptors import wgmma_descriptor
from ..engines.formats import ELEMENT_BYTES, widen
from ..engines.operands import K_BYTES, OperandChunks, operand_chunks, part_of
from ..engines.product import packed, product, smem_packed
from ..findings import EmulatorFault
from ..ptx.ast import Imm, Vec
from ..registers import POISON
from ..schedule import AsyncOp, PendingLoad
from .table import Binding, Handler, first_lane, machine
from .wgmma_fence import unfenced

if TYPE_CHECKING:
    from ..state import Warp

WARP_ROWS = 16
WARPS = 4  # of a warpgroup
Rows = slice | NDArray[np.int64]
_DTYPES = {"f16": "float16", "bf16": "bfloat16", "tf32": "tf32", "e4m3": "e4m3", "e5m2": "e5m2",
           "s8": "s8", "u8": "u8"}  # fmt: skip


@dataclass(slots=True, eq=False)
class Multiply:
    """One wgmma that a warp has issued: its clock, and how its registers are guarded."""

    op: AsyncOp
    clock: int
    pending: PendingLoad


@dataclass(slots=True)
class Groups:
    """A warp's wgmma operations. ``values``: accumulators that pending operations hold (late
    visibility), by register row; ``users``: how many of them do."""

    open: list[Multiply] = field(default_factory=list)
    committed: deque[list[Multiply]] = field(default_factory=deque)
    values: dict[int, NDArray[np.uint32]] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    issued: int = 0


@dataclass(frozen=True)
class Form:
    """An instruction as far as it is known when decoded. ``d_type``: f32, f16 or s32; ``at_d``:
    the rows of D's registers as an index; ``rows_a``: of A's, or None; ``clamp``: of integer sums,
    which wrap otherwise."""

    n: int
    a_dtype: str
    b_dtype: str
    d_type: str
    rows_d: tuple[int, ...]
    at_d: Rows
    rows_a: Rows | None
    negate: bool
    a_mn_major: bool
    b_mn_major: bool
    clamp: bool = False


_MMA = r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(8|16|32)"


# The grammar puts .satfinite in front of the types, the ISA's examples put it behind them.
@machine(rf"{_MMA}(?:\.satfinite)?\.(s32)\.([su]8)\.([su]8)(?:\.satfinite)?", converged=True)
@machine(
    rf"{_MMA}\.(f32|f16)\.(f16|bf16|tf32|e4m3|e5m2)\.(f16|bf16|tf32|e4m3|e5m2)", converged=True
)
def mma_async(b: Binding) -> Handler:
    form, in_registers = _form(b)
    _, a, b_desc, scale_d = b.ins.operands[:4]
    read_a = None if in_registers else b.scalar(a)
    read_b, enable = b.scalar(b_desc), b.predicate(scale_d)
    not_fenced = {p: b.index in unfenced(b.program, p == "isa") for p in ("silicon", "isa")}

    def run(w: Warp, mask: int) -> None:
        if not_fenced[w.cta.machine.options.profile]:
            raise EmulatorFault(
                "wgmma_fence_missing",
                "registers of the wgmma were written since the last wgmma.fence, or there was none",
            )
        if not w.alive == mask == 0xFFFFFFFF:
            raise EmulatorFault("divergent_aligned", "wgmma needs all 32 lanes of each warp")
        lane, cta = first_lane(mask), w.cta
        if w.index | WARPS - 1 >= len(cta.warps):
            raise EmulatorFault(
                "wgmma_no_warpgroup", f"{w.name} is not one of a warpgroup of {WARPS} warps"
            )
        a_desc = wgmma_descriptor(read_a(w, lane)) if read_a is not None else None
        operands = (a_desc, wgmma_descriptor(read_b(w, lane)))
        accumulate = bool(enable(w) >> lane & 1)
        _issue(w, form, operands, accumulate)
        cta.machine.events += 1

    return run


def _form(b: Binding) -> tuple[Form, bool]:
    n, d_type, types = int(b.match[1]), b.match[3], (b.match[4], b.match[5])
    a_dtype, b_dtype = (_DTYPES[t] for t in types)
    narrow = ELEMENT_BYTES[a_dtype] == 2
    d, a, _, _, *rest = b.ins.operands
    in_registers = isinstance(a, Vec)
    integer = d_type == "s32"
    if n % (16 if integer and n > 32 else 8) or not 8 <= n <= 256:
        raise b.unsupported(
            f"N is a multiple of 8 from 8 to 256{', of 16 beyond 32' if integer else ''}"
        )
    if int(b.match[2]) * ELEMENT_BYTES[a_dtype] != K_BYTES:
        raise b.unsupported(f"K of .{types[0]} operands is {K_BYTES // ELEMENT_BYTES[a_dtype]}")
    if types[0] != types[1] and ELEMENT_BYTES[a_dtype] + ELEMENT_BYTES[b_dtype] != 2:
        raise b.unsupported("only 8-bit operands may be of two types")
    if d_type == "f16" and types[0] in ("bf16", "tf32"):
        raise b.unsupported(f"an f16 accumulator does not take {types[0]} operands")
    if not b.program.module.target.startswith("sm_90"):
        raise b.unsupported(f"wgmma needs sm_90a, the module is for {b.program.module.target}")
    if integer and not rest:
        rest = [Imm(1), Imm(1)]
    elif integer:
        raise b.unsupported("nothing stands behind scale-d")
    if len(rest) != 2 + narrow * (2 - in_registers) or not all(isinstance(x, Imm) for x in rest):
        raise b.unsupported("operands after scale-d: scale-a, scale-b, (trans-a,) trans-b")
    scale_a, scale_b, *trans = [_signed(x) for x in rest]
    if abs(scale_a) != 1 or abs(scale_b) != 1 or any(t not in (0, 1) for t in trans):
        raise b.unsupported("scales are 1 or -1, transpositions 0 or 1")
    count = n // 4 if d_type == "f16" else n // 2
    if not isinstance(d, Vec) or len(d.items) != count:
        raise b.unsupported(f"D takes {count} registers")
    if isinstance(a, Vec) and len(a.items) != 4:
        raise b.unsupported("A takes 4 registers")
    form = Form(
        n=n,
        a_dtype=a_dtype,
        b_dtype=b_dtype,
        d_type=d_type,
        rows_d=tuple(b.row(x, "b32") for x in d.items),
        at_d=b.vector_rows(d),
        rows_a=b.vector_rows(a) if in_registers else None,
        negate=scale_a != scale_b,
        a_mn_major=narrow and not in_registers and bool(trans[0]),
        b_mn_major=narrow and bool(trans[-1]),
        clamp="satfinite" in b.ins.mods,
    )
    return form, in_registers


def _signed(op: Any) -> int:
    value = int(op.value)
    return value - (1 << 32) if value >> 31 == 1 else value


Operands = tuple[int | None, int]  # descriptors of A (None: registers) and of B


def _issue(w: Warp, form: Form, operands: Operands, accumulate: bool) -> None:
    machine, groups = w.cta.machine, w.wgmma
    clock = 0
    groups.issued += 1
    if machine.race is not None:
        a_desc, b_desc = operands
        b_bytes, part = ELEMENT_BYTES[form.b_dtype], w.index % WARPS
        cells = [cells_of(b_desc, form.n, form.b_mn_major, b_bytes, None)]
        if a_desc is not None:
            a_bytes = ELEMENT_BYTES[form.a_dtype]
            cells.append(cells_of(a_desc, 64, form.a_mn_major, a_bytes, part))
        clock = machine.race.wgmma(w, cells, groups.issued)
    late = machine.asyncs.late
    if late:
        for row in form.rows_d:
            if row not in groups.values:
                groups.values[row] = w.r32[row].copy()
                w.r32[row] = POISON
            groups.users[row] = groups.users.get(row, 0) + 1
    effect = partial(_multiply, w, form, operands, accumulate, late)
    op = AsyncOp("wgmma", w, w.pc, effect)
    pending = PendingLoad(w.pc, clock, None, "wgmma_not_waited")
    if late:
        pending.effect = partial(_finish_through, w, op)
    multiply = Multiply(op, clock, pending)
    groups.open.append(multiply)
    w.pending_ld.append(pending)
    machine.asyncs.issue(("wgmma", w), op)


def _multiply(w: Warp, form: Form, operands: Operands, accumulate: bool, late: bool) -> None:
    groups, a_desc = w.wgmma, operands[0]
    smem = w.cta.smem
    values = groups.values
    if late:
        registers = np.stack([values[row] for row in form.rows_d])
    else:
        registers = w.r32[form.at_d]
    if a_desc is None:
        with np.errstate(all="ignore"):
            a = packed(_a_matrix(w.r32[form.rows_a], form.a_dtype).T, "A")
    else:
        a_bytes = ELEMENT_BYTES[form.a_dtype]
        chunks = part_chunks(a_desc, form.a_mn_major, a_bytes, w.index % WARPS)
        a = smem_packed(smem, chunks, form.a_mn_major, form.a_dtype, "A", "wgmma reading A")
    chunks = operand_chunks(operands[1], form.n, form.b_mn_major, ELEMENT_BYTES[form.b_dtype])
    b = smem_packed(smem, chunks, form.b_mn_major, form.b_dtype, "B", "wgmma reading B")
    total = product((a, b), np.empty((form.n, WARP_ROWS))).T
    with np.errstate(all="ignore"):
        if form.negate:
            np.negative(total, out=total)
        if accumulate:
            total += _d_matrix(registers, form)
        registers = _d_registers(total, form)
    if not late:
        w.r32[form.at_d] = registers
        return
    for row, value in zip(form.rows_d, registers, strict=True):
        groups.users[row] -= 1
        if groups.users[row]:
            values[row] = value
        else:
            w.r32[row] = value
            del values[row], groups.users[row]


def _finish_through(w: Warp, last: AsyncOp) -> None:
    """Operations of a warp complete in order: those up to ``last`` do now."""
    for multiply in [*(m for group in w.wgmma.committed for m in group), *w.wgmma.open]:
        w.cta.machine.asyncs.force(multiply.op)
        if multiply.op is last:
            return


@machine(r"wgmma\.fence\.sync\.aligned", converged=True)
def fence(b: Binding) -> Handler:
    """Orders register accesses; whether one is missing is known when the code is decoded."""
    return lambda w, mask: None


@machine(r"wgmma\.commit_group\.sync\.aligned", converged=True)
def commit_group(b: Binding) -> Handler:
    def run(w: Warp, mask: int) -> None:
        w.wgmma.committed.append(w.wgmma.open)
        w.wgmma.open = []

    return run


@machine(r"wgmma\.wait_group\.sync\.aligned", converged=True)
def wait_group(b: Binding) -> Handler:
    """All but the newest N groups complete now, the latest that is legal."""
    count = b.ins.operands[0]
    if not isinstance(count, Imm):
        raise b.unsupported("the number of groups must be an immediate")
    allowed = count.value

    def run(w: Warp, mask: int) -> None:
        machine, groups = w.cta.machine, w.wgmma
        done: set[int] = set()
        while len(groups.committed) > allowed:
            group = groups.committed[0]
            for multiply in group:
                machine.asyncs.force(multiply.op)
                done.add(id(multiply.pending))
            if group and machine.race is not None:
                machine.race.wgmma_wait(w, group[-1].clock)
            groups.committed.popleft()
        if done:
            w.pending_ld = [load for load in w.pending_ld if id(load) not in done]

    return run


# -- layouts --------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def part_chunks(descriptor: int, mn_major: bool, element_bytes: int, part: int) -> OperandChunks:
    """A's chunks for one warp: rows 16 part .. 16 part + 15 of 64."""
    chunks = operand_chunks(descriptor, 64, mn_major, element_bytes)
    return part_of(chunks, mn_major, part * WARP_ROWS, WARP_ROWS)


@lru_cache(maxsize=4096)
def cells_of(
    descriptor: int, rows: int, mn_major: bool, element_bytes: int, part: int | None
) -> NDArray[np.int64]:
    """The 4-byte cells (address / 4) of an operand, or of one warp's part of it."""
    if part is None:
        chunks = operand_chunks(descriptor, rows, mn_major, element_bytes)
    else:
        chunks = part_chunks(descriptor, mn_major, element_bytes, part)
    return np.sort((chunks.index.reshape(-1, 1) * 4 + np.arange(4)).reshape(-1))


def _a_matrix(registers: NDArray[np.uint32], dtype: str) -> NDArray[np.float64]:
    """A warp's 16 rows of A from its 4 registers, uint32[4, 32] (figures 148, 150, 152): lane
    4 g + t holds rows g and g + 8 (registers 0, 2 and 1, 3): of K's 32 bytes the t-th word of the
    first 16, and of the last 16."""
    words = registers.reshape(2, 2, 8, 4).transpose(1, 2, 0, 3).reshape(WARP_ROWS, 8)
    bits = np.ascontiguousarray(words).view(f"u{ELEMENT_BYTES[dtype]}")
    return widen(bits, dtype)


def _d_matrix(registers: NDArray[np.uint32], form: Form) -> NDArray[np.float64]:
    """A warp's 16 rows of D from its registers (figure 149): of each 8 columns lane 4 g + t holds
    columns 2 t and 2 t + 1 of row g, then of row g + 8."""
    if form.d_type == "f16":
        halves = np.ascontiguousarray(registers).view(np.uint16).reshape(-1, 2, 8, 4, 2)
        return widen(halves.transpose(1, 2, 0, 3, 4).reshape(WARP_ROWS, form.n), "float16")
    values = registers.view(np.int32 if form.d_type == "s32" else np.float32)
    values = values.reshape(-1, 2, 2, 8, 4)
    return values.transpose(1, 3, 0, 4, 2).reshape(WARP_ROWS, form.n).astype(np.float64)


def _d_registers(values: NDArray[np.float64], form: Form) -> NDArray[np.uint32]:
    parts = values.reshape(2, 8, -1, 4, 2)
    if form.d_type == "f16":
        halves = np.ascontiguousarray(parts.transpose(2, 0, 1, 3, 4).astype(np.float16))
        return halves.view(np.uint32).reshape(-1, 32)
    parts = parts.transpose(2, 0, 4, 1, 3)
    if form.d_type == "s32":
        sums = parts.astype(np.int64)  # exact: their size is below 2 ** 53
        if form.clamp:
            sums = sums.clip(-(1 << 31), (1 << 31) - 1)
        return np.ascontiguousarray(sums.astype(np.uint32)).reshape(-1, 32)
    return np.ascontiguousarray(parts, np.float32).view(np.uint32).reshape(-1, 32)
