"""The less common forms of tcgen05.mma, all in one general function: block scaling, integers,
sparse A, weight-stationary (.ws). `tensorcore` has the common ones, faster.

Arithmetic as there, mode ``exact-f32``: products, scaled by the factors of their block, are exact
in float64, summed there with the accumulator and rounded once. Integer sums are exact modulo
2 ** 32, or clamped with the saturate bit.

Where D lies (PTX ISA 9.1 section 9.7.16.10.5; CUTLASS's tmem_frg and tmem_frg_ws): in one *part*,
or in several, each with rows in lanes of its own and columns of N of its own. A in Tensor Memory
and scale factors are read from the lanes of the part that they are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault, UnsupportedPTX
from ..memory.shared import SharedMemory
from ..memory.tensor import LANES, WARP_LANES, TensorMemory, TmemAddress
from .descriptors import InstrDescriptor
from .formats import CHUNK_BYTES, chunk_elements
from .operands import smem_operand, tmem_operand
from .scales import ScaleFactors
from .sparsity import Metadata, expanded

_WARPS = LANES // WARP_LANES
_HALF_LANES = 16
_INT32 = np.iinfo(np.int32)
_PIECE = 1 << 18  # multiplications that OpenBLAS does on one thread


@dataclass(frozen=True)
class Form:
    """What the opcode says. block: elements of K that share a scale factor, 0 for none; with a
    sparse A they are twice as many as without."""

    kind: str
    ctas: int
    block: int = 0
    sparse: bool = False
    ws: bool = False


@dataclass(frozen=True)
class Operands:
    """What the registers say. a: a descriptor or, with a_in_tmem, an address; d, scale_a, scale_b,
    metadata: Tensor Memory addresses; disabled: masks of lanes whose D stays as it is, four a CTA;
    scale_d: D is scaled by 2 ** -scale_d first."""

    idesc: int
    a: int
    b: int
    d: int
    a_in_tmem: bool
    accumulate: bool
    scale_a: int = 0
    scale_b: int = 0
    metadata: int = 0
    disabled: Sequence[int] | None = None
    scale_d: int = 0


@dataclass(frozen=True)
class Part:
    """A part of a CTA's D: ``lanes[r]`` holds row r, for columns first .. first + count of N, in
    Tensor Memory columns 0 .. count of D."""

    lanes: NDArray[np.int64]
    first: int
    count: int

    @property
    def warps(self) -> tuple[int, ...]:
        """The warps whose lanes it spans."""
        return tuple(sorted(set((self.lanes // WARP_LANES).tolist())))

    def masks(self) -> NDArray[np.uint32]:
        masks = np.zeros(_WARPS, np.uint32)
        np.bitwise_or.at(masks, self.lanes // WARP_LANES, np.uint32(1) << (self.lanes % WARP_LANES))
        return masks


def decode(form: Form, idesc: int) -> InstrDescriptor:
    """The instruction descriptor, checked against the form."""
    inst = InstrDescriptor.decode(idesc, form.kind, form.ctas, form.sparse, form.ws)
    if form.block:
        _check_scales(form, inst, idesc)
    return inst


def _check_scales(form: Form, inst: InstrDescriptor, idesc: int) -> None:
    blocks = depth(inst) // form.block
    steps = {1: (0, 1, 2, 3), 2: (0, 2), 3: (0, 1, 2, 3), 4: (0,), 6: (0, 2)}[blocks]
    rule = None
    if inst.scale_dtype == "ue4m3" and form.block != (32 if form.sparse else 16):
        rule = "scale factors of ue4m3 (bit 23) need blocks of 16"
    for name, byte in (("A", inst.scale_a_byte), ("B", inst.scale_b_byte)):
        if byte not in steps:
            rule = f"scale factor {name} ID is {byte}; with {blocks} factors it is one of {steps}"
    if rule:
        raise EmulatorFault(
            "mma_bad_descriptor", f"instruction descriptor {idesc:#010x}: {rule}",
            descriptor=f"{idesc:#010x}",
        )  # fmt: skip


def depth(inst: InstrDescriptor) -> int:
    """K: of D = A B, whole where A is sparse."""
    elements = inst.k_bytes // CHUNK_BYTES * chunk_elements(inst.a_dtype)
    return elements * (2 if inst.sparse else 1)


def scale_factors(form: Form, inst: InstrDescriptor, ops: Operands) -> list[ScaleFactors]:
    """Of A and of B as a part of D needs them; none without block scaling."""
    if not form.block:
        return []
    blocks = depth(inst) // form.block
    columns = parts(form, inst, ops.d, "D")[0].count
    return [
        ScaleFactors(ops.scale_a, inst.scale_a_byte, inst.m // form.ctas, blocks, "A"),
        ScaleFactors(ops.scale_b, inst.scale_b_byte, columns, blocks, "B"),
    ]


def metadata(form: Form, inst: InstrDescriptor, ops: Operands) -> Metadata:
    """Of sparse A. Raises `UnsupportedPTX` for fewer than 128 rows a CTA."""
    if inst.m // form.ctas != LANES:
        raise UnsupportedPTX(f"tcgen05.mma.sp with M = {inst.m} on {form.ctas} CTA(s)")
    return Metadata(ops.metadata, inst.selector, form.kind)


def parts(form: Form, inst: InstrDescriptor, taddr: int, name: str) -> list[Part]:
    """The parts of one CTA's D (or of A, whose rows are in the same lanes), layouts A to G."""
    rows, lane = inst.m // form.ctas, taddr >> 16
    split = 1  # parts side by side in the lanes
    half_used = rows == LANES // 2 and not form.ws and (form.ctas == 1 or inst.sparse)
    if rows < LANES and not half_used:
        split = LANES // rows
    if lane not in ((0, _HALF_LANES) if half_used else (0,)):
        raise EmulatorFault(
            "tmem_lane_access",
            f"tcgen05.mma operand {name} of {rows} rows a CTA at {TmemAddress.decode(taddr)}: the"
            f" lane must be {'0 or 16' if half_used else '0'}",
            address=taddr,
            operand=name,
        )
    row = np.arange(rows)
    if half_used:
        lanes = row // _HALF_LANES * WARP_LANES + row % _HALF_LANES + lane
        return [Part(lanes, 0, inst.n)]
    count = inst.n // split
    return [Part(row + rows * k, count * k, count) for k in range(split)]


def multiply(
    form: Form, ops: Operands, smem: Sequence[SharedMemory], tmem: Sequence[TensorMemory]
) -> None:
    """D = A @ B (+ D), on one CTA's memories or on those of the even and the odd CTA of a pair.

    Raises `EmulatorFault` mma_bad_descriptor, mma_scale_not_duplicated, mma_bad_metadata, smem_*
    and tmem_* naming the operand, and `UnsupportedPTX`.
    """
    inst = decode(form, ops.idesc)
    if ops.disabled is not None and len(ops.disabled) != _WARPS * form.ctas:
        raise EmulatorFault(
            "mma_bad_descriptor",
            f"disable-output-lane has {len(ops.disabled)} masks; with cta_group::{form.ctas} it"
            f" has {_WARPS * form.ctas}",
        )
    column = ops.d & 0xFFFF
    placed = parts(form, inst, ops.d, "D")
    for memory in tmem:
        memory.check_columns(column, placed[0].count, "tcgen05.mma writing D")
    with np.errstate(all="ignore"):  # NaN, infinity and overflow are values here
        b = _operand_b(inst, ops, smem)
        products = []  # of every CTA before any D is written: A of both is read first
        for k, memory in enumerate(tmem):
            reader = _Reader(form, inst, ops, smem[k], memory)
            products.append([reader.product(part, b) for part in placed])
        for k, memory in enumerate(tmem):
            off = ops.disabled[_WARPS * k : _WARPS * (k + 1)] if ops.disabled is not None else None
            for part, product in zip(placed, products[k], strict=True):
                _store(inst, memory, column, part, product, ops, off)


def _operand_b(
    inst: InstrDescriptor, ops: Operands, smem: Sequence[SharedMemory]
) -> NDArray[np.float64]:
    """B as float64[K, N]: each CTA holds its share of the columns."""
    k_bytes = inst.k_bytes * (2 if inst.sparse else 1)
    columns = inst.n // len(smem)
    held = [
        smem_operand(memory, ops.b, columns, inst.b_mn_major, inst.b_dtype, "B", k_bytes)
        for memory in smem
    ]
    return np.concatenate(held, axis=1)


@dataclass(frozen=True)
class _Reader:
    """Reads what one CTA holds, and multiplies."""

    form: Form
    inst: InstrDescriptor
    ops: Operands
    smem: SharedMemory
    tmem: TensorMemory

    def product(self, part: Part, b: NDArray[np.float64]) -> NDArray[np.float64]:
        """A B of a part, float64[columns, rows]."""
        inst = self.inst
        a = self._a(part)
        if inst.sparse:
            a = expanded(a, metadata(self.form, inst, self.ops).indices(self.tmem), self.form.kind)
        b = b[:, part.first : part.first + part.count]
        if self.form.block:
            assert inst.scale_dtype is not None
            of_a, of_b = scale_factors(self.form, inst, self.ops)
            every = tuple(range(_WARPS))
            scale_a = of_a.read(self.tmem, every, inst.scale_dtype)
            scale_b = of_b.read(self.tmem, part.warps, inst.scale_dtype)
            a = a * np.repeat(scale_a, self.form.block, axis=0)
            b = b * np.repeat(scale_b, self.form.block, axis=0)
        out = np.empty((part.count, a.shape[1]), np.float64)
        step = max(_PIECE // a.size, 1)
        for first in range(0, part.count, step):
            piece = slice(first, first + step)
            np.matmul(b[:, piece].T, a, out=out[piece])
        if inst.a_negate != inst.b_negate:
            np.negative(out, out=out)
        return out

    def _a(self, part: Part) -> NDArray[np.float64]:
        """A as it is stored, float64[K or K / 2, rows]."""
        inst, rows = self.inst, len(part.lanes)
        if not self.ops.a_in_tmem:
            return smem_operand(
                self.smem, self.ops.a, rows, inst.a_mn_major, inst.a_dtype, "A", inst.k_bytes
            )
        if inst.a_mn_major:
            raise EmulatorFault(
                "mma_bad_descriptor", "transpose A (bit 15) is set, but A lies in Tensor Memory"
            )
        placed = parts(self.form, inst, self.ops.a, "A")
        mine = next(x for x in placed if x.first == part.first)
        if (mine.lanes != part.lanes).any():
            raise EmulatorFault(
                "tmem_lane_access",
                f"tcgen05.mma with M = {inst.m}: A starts at lane {self.ops.a >> 16}, D at"
                f" {self.ops.d >> 16}; both must use one lane alignment",
                address=self.ops.a,
                operand="A",
            )
        column, count = self.ops.a & 0xFFFF, inst.k_bytes // 4
        what = "tcgen05.mma reading operand A"
        self.tmem.check_columns(column, count, what)
        self.tmem.check_written(column, count, mine.masks(), what)
        return tmem_operand(self.tmem.data[column : column + count][:, mine.lanes], inst.a_dtype)


def _store(
    inst: InstrDescriptor,
    tmem: TensorMemory,
    column: int,
    part: Part,
    product: NDArray[np.float64],
    ops: Operands,
    disabled: Sequence[int] | None,
) -> None:
    """Adds D, rounds and writes one part; a 16-bit D lies in the low half of its cell."""
    cells = tmem.data[column : column + part.count]
    masks = part.masks()
    old = cells[:, part.lanes]
    if ops.accumulate:
        tmem.check_written(column, part.count, masks, "tcgen05.mma reading D")
    new = _rounded(inst, product, old if ops.accumulate else None, float(2.0**-ops.scale_d))
    if disabled is not None:
        off = np.array([mask & 0xFFFFFFFF for mask in disabled], np.uint32)
        keep = off[part.lanes // WARP_LANES] >> (part.lanes % WARP_LANES).astype(np.uint32) & 1
        new = np.where(keep.astype(np.bool_), old, new)
        masks = masks & ~off
    cells[:, part.lanes] = new
    tmem.mark_written(column, part.count, masks)


def _rounded(
    inst: InstrDescriptor,
    product: NDArray[np.float64],
    old: NDArray[np.uint32] | None,
    factor: float,
) -> NDArray[np.uint32]:
    """product + old * factor as cell bits of D's type."""
    if inst.d_dtype == "int32":
        sums = product.astype(np.int64)
        if old is not None:
            sums += old.view(np.int32)
        if inst.saturate:
            sums = sums.clip(_INT32.min, _INT32.max)
        return sums.astype(np.uint32)
    half = inst.d_dtype == "float16"
    if old is not None:
        values = old.astype(np.uint16).view(np.float16) if half else old.view(np.float32)
        product = product + values.astype(np.float64) * factor
    if half:
        return product.astype(np.float16).view(np.uint16).astype(np.uint32)
    return product.astype(np.float32).view(np.uint32)
