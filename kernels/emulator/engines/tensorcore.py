"""tcgen05.mma as one product of matrices (PTX ISA 9.1 section 9.7.16.10).

Arithmetic, mode ``exact-f32``: products are exact in float64; those of an element are summed in
float64 over ascending k, its accumulator is added last, and the sum is rounded once to D's type.
Hardware instead truncates aligned significands (arXiv 2512.07004 models it bit for bit): its last
bit can differ.
NaN and infinity propagate; a NaN's sign and payload are the host's, not hardware's 0x7fffffff.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from ..memory.shared import SharedMemory
from ..memory.tensor import EVERY_LANE, LANES, TensorMemory, TmemAddress
from ..native.matmul import NEGATE, functions
from .descriptors import InstrDescriptor
from .formats import ELEMENT_BYTES
from .operands import OperandChunks, operand_chunks, tmem_operand
from .product import (
    Packed,
    block_distance,
    mma_plan,
    multiply_into,
    packed,
    product,
    smem_packed,
    tmem_packed,
)

_WARPS = 4
_HALF_LANES = 16
A_COLUMNS = 8  # of A in Tensor Memory: 32 bytes of K, whatever its type
_READING_A, _READING_B = (f"tcgen05.mma reading operand {name}" for name in "AB")
_READING_D, _WRITING_D = (f"tcgen05.mma {what} D" for what in ("reading", "writing"))
# Layout D (M = 128) is the identity; layout F (M = 64) puts 16 rows in each warp's 32 lanes, at
# lane 0 or 16 of them (PTX ISA 9.1 section 9.7.16.10.5).
_LAYOUT_F_LANES = {
    0: np.full(_WARPS, 0x0000FFFF, np.uint32),
    16: np.full(_WARPS, 0xFFFF0000, np.uint32),
}


def mma(
    idesc: int,
    a: int,
    b_desc: int,
    d_taddr: int,
    smem: SharedMemory,
    tmem: TensorMemory,
    *,
    accumulate: bool,
    a_in_tmem: bool,
    kind: str = "f16",
    disable_output_lane: Sequence[int] | None = None,
    scale_d: int | None = None,
) -> None:
    """D = A @ B (+ D): A is (M, K), B is (K, N), D is (M, N) in Tensor Memory at ``d_taddr``. K is
    32 bytes of operand: 16 of 16-bit types, 8 of tf32, 32 of 8-bit floats.

    idesc: the 32-bit instruction descriptor; a: A's shared memory descriptor or, with a_in_tmem,
    its Tensor Memory address; b_desc: B's descriptor; accumulate: ``enable-input-d``;
    disable_output_lane: four 32-bit masks of lanes whose D stays as it is; scale_d: D is scaled by
    2 ** -scale_d first. Raises `EmulatorFault`: mma_bad_descriptor, smem_* and tmem_* naming the
    operand; `UnsupportedPTX` for what is not modelled.
    """
    if not scale_d and (disable_output_lane is None or not any(disable_output_lane)):
        plan = _planned(idesc, a, b_desc, d_taddr, a_in_tmem, kind)
        if plan is not None and plan.run(smem, tmem, accumulate):
            return
    inst = InstrDescriptor.decode(idesc, kind, 1)
    lanes, align = _output_lanes(inst.m, d_taddr, "D")
    column = d_taddr & 0xFFFF
    tmem.check_columns(column, inst.n, _WRITING_D)
    out = _Output(tmem, column, inst.n, inst, lanes, align)
    factor = _d_factor(accumulate, scale_d)
    operand_a = _operand_a(inst, a, smem, tmem, a_in_tmem, align)
    operand_b = _operand_b(inst, b_desc, smem, inst.n, "B")
    part = _Part((operand_a, operand_b), (inst.m, inst.n), 0)
    out.multiply((part,), factor if accumulate else None, disable_output_lane)


def mma_pair(
    idesc: int,
    a: int,
    b_desc: int,
    d_taddr: int,
    smem: tuple[SharedMemory, SharedMemory],
    tmem: tuple[TensorMemory, TensorMemory],
    *,
    accumulate: bool,
    a_in_tmem: bool,
    kind: str = "f16",
    disable_output_lane: Sequence[int] | None = None,
    scale_d: int | None = None,
) -> None:
    """`mma` of a CTA pair (``cta_group::2``); memories are those of the even and the odd CTA.

    Each CTA holds half of A's rows, half of B's columns and half of D's rows, all at the same
    addresses. M = 256 (layout A): a CTA's 128 rows of D lie in its 128 lanes. M = 128 (layout B,
    "2x2"): a CTA's 64 rows lie in lanes 0..63 for the first N / 2 columns of D and in lanes 64..127
    for the others, so that N / 2 columns of Tensor Memory are taken; A in Tensor Memory is read by
    each half of the lanes for its own part of D, so its 64 rows must be there twice (CUTLASS's
    TmemAllocMode::Duplicated). disable_output_lane: eight masks, the even CTA's four first.
    """
    inst = InstrDescriptor.decode(idesc, kind, 2)
    for name, taddr in (("D", d_taddr), ("A", a if a_in_tmem else 0)):
        _output_lanes(LANES, taddr, name)
    if a_in_tmem and inst.a_mn_major:
        _transposed_a()
    halves = 2 if inst.m == LANES else 1  # of the lanes, each with its own columns of D
    ncols, column = inst.n // halves, d_taddr & 0xFFFF
    for part in tmem:
        part.check_columns(column, ncols, _WRITING_D)
    factor = _d_factor(accumulate, scale_d)
    off = disable_output_lane
    if off is not None and len(off) != 2 * _WARPS:
        _bad_disable_lanes(len(off), 2)
    operands_b = [
        _operand_b(inst, b_desc, part, inst.n // 2, f"B{k}") for k, part in enumerate(smem)
    ]
    operands_a = [  # of both CTAs, read before either's D is written
        _tmem_a(inst, a, tmem[k], (EVERY_LANE, 0), LANES, f"A{k}")
        if a_in_tmem
        else _smem_a(inst, a, smem[k], inst.m // 2, f"A{k}")
        for k in range(2)
    ]
    rows, columns = inst.m // 2, inst.n // 2  # of D: a CTA's, and those that come of a CTA's B
    for k, part in enumerate(tmem):
        parts = []
        for which, operand_b in enumerate(operands_b):
            lane, first = (which * rows, 0) if halves == 2 else (0, which * columns)
            operand_a = operands_a[k].rows_from(lane) if a_in_tmem else operands_a[k]
            parts.append(_Part((operand_a, operand_b), (rows, columns), lane, first))
        out = _Output(part, column, ncols, inst, EVERY_LANE, 0)
        masks = off[_WARPS * k : _WARPS * (k + 1)] if off is not None else None
        out.multiply(parts, factor if accumulate else None, masks)


class _Planned(NamedTuple):
    """An MMA of 16-bit operands into float32, all of it in one native call."""

    native: Callable[..., int]
    fields: NDArray[np.int64]  # an `MmaPlan`
    address: int  # of ``fields``
    a: OperandChunks | int  # or A's column of Tensor Memory
    b: OperandChunks
    column: int
    columns: int
    lanes: NDArray[np.uint32]  # of D, and of A in Tensor Memory

    def run(self, smem: SharedMemory, tmem: TensorMemory, accumulate: bool) -> bool:
        """False, and nothing is done, where an operand was not written."""
        tmem.check_columns(self.column, self.columns, _WRITING_D)
        for operand, what in ((self.a, _READING_A), (self.b, _READING_B)):
            if isinstance(operand, int):
                tmem.check_columns(operand, A_COLUMNS, what)
                tmem.check_written(operand, A_COLUMNS, self.lanes, what)
            else:
                smem.check_range(operand.low, operand.high - operand.low, what)
        if accumulate:
            tmem.check_written(self.column, self.columns, self.lanes, _READING_D)
        memory = (smem.window_address, smem.flags_address, tmem.address)
        if not self.native(self.address, *memory, accumulate):
            return False
        tmem.mark_written(self.column, self.columns, self.lanes)
        return True


@lru_cache(maxsize=4096)
def _planned(
    idesc: int, a: int, b_desc: int, d_taddr: int, a_in_tmem: bool, kind: str
) -> _Planned | None:
    """None for types and places of operands that `mma` handles in steps."""
    inst = InstrDescriptor.decode(idesc, kind, 1)
    if ELEMENT_BYTES[inst.a_dtype] != 2 or inst.d_dtype != "float32":
        return None
    lanes, align = _output_lanes(inst.m, d_taddr, "D")
    if a_in_tmem and (inst.a_mn_major or a >> 16 != d_taddr >> 16):
        return None
    operand_a: OperandChunks | int = a & 0xFFFF
    if not a_in_tmem:
        operand_a = operand_chunks(a, inst.m, inst.a_mn_major)
    b = operand_chunks(b_desc, inst.n, inst.b_mn_major)
    plan = mma_plan(
        operand_a, b, (inst.m, inst.n), (inst.a_mn_major, inst.b_mn_major), d_taddr & 0xFFFF, align
    )
    negate = NEGATE * (inst.a_negate != inst.b_negate)
    fields = np.array(plan._replace(flags=negate), np.int64)
    source = "words" if a_in_tmem else "gathered" if inst.a_mn_major else "turned"
    return _Planned(
        native=functions().functions[f"mma_{source}_{inst.a_dtype}"],
        fields=fields,
        address=fields.ctypes.data,
        a=operand_a,
        b=b,
        column=d_taddr & 0xFFFF,
        columns=inst.n,
        lanes=lanes,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A product that is a part of D: its operands, its (M, N), and where in D it starts: the lane,
    and the column."""

    operands: tuple[Packed, Packed]
    shape: tuple[int, int]
    lane: int
    column: int = 0


@dataclass(frozen=True, slots=True)
class _Output:
    """Where one CTA's part of D lies: ``ncols`` columns from ``column``, the lanes of ``lanes``
    (masks of the four warps' 32), rows from lane ``align`` of each warp."""

    tmem: TensorMemory
    column: int
    ncols: int
    inst: InstrDescriptor
    lanes: NDArray[np.uint32]
    align: int

    def multiply(
        self, parts: Sequence[_Part], factor: float | None, disabled: Sequence[int] | None
    ) -> None:
        """Forms the parts of D, adds D * factor (None: D is not read), rounds and writes."""
        tmem, inst, every_lane = self.tmem, self.inst, self.lanes is EVERY_LANE
        if factor is not None:
            tmem.check_written(self.column, self.ncols, self.lanes, _READING_D)
        negate = inst.a_negate != inst.b_negate
        if (
            inst.d_dtype == "float32"
            and (factor is None or factor == 1.0)
            and (disabled is None or not any(disabled))
        ):
            distance = block_distance(LANES if every_lane else LANES // 2)
            for part in parts:
                at = (self.column + part.column, self.align + part.lane, distance)
                accumulate = factor is not None
                multiply_into(
                    tmem, at, part.operands, part.shape, accumulate=accumulate, negate=negate
                )
            tmem.mark_written(self.column, self.ncols, self.lanes)
            return
        rows = LANES if every_lane else LANES // 2
        total = _scratch(self.ncols, rows)
        for part in parts:
            (m, n), column = part.shape, part.column
            product(part.operands, total[column : column + n, part.lane : part.lane + m])
        with np.errstate(all="ignore"):  # NaN, infinity and overflow are values here
            if negate:
                np.negative(total, out=total)
            self._store(total, factor, disabled)

    def _store(
        self, total: NDArray[np.float64], factor: float | None, disabled: Sequence[int] | None
    ) -> None:
        """Adds D * factor, rounds and writes; ``total``: (ncols, rows)."""
        tmem, lanes, dtype = self.tmem, self.lanes, self.inst.d_dtype
        cells = _d_cells(tmem, self.column, self.ncols, lanes is EVERY_LANE, self.align)
        total = total.reshape(cells.shape)
        if factor is not None:
            _accumulate(total, cells, dtype, factor)
        if disabled is not None and any(disabled):
            keep, lanes = _enabled_lanes(cells.shape, lanes, disabled, self.align)
            cells[:, keep] = _rounded(total, dtype)[:, keep]
        else:
            cells[...] = _rounded(total, dtype)
        tmem.mark_written(self.column, self.ncols, lanes)


@lru_cache(maxsize=64)
def _scratch(n: int, m: int) -> NDArray[np.float64]:
    """A buffer for one product; its contents live no longer than one `mma`."""
    return np.empty((n, m), np.float64)


def _output_lanes(m: int, taddr: int, name: str) -> tuple[NDArray[np.uint32], int]:
    """Lanes of a TMEM operand with M rows, and the lane within each warp where its rows start."""
    lane = taddr >> 16
    if m == LANES and lane == 0:
        return EVERY_LANE, 0
    if m == LANES // 2 and lane in _LAYOUT_F_LANES:
        return _LAYOUT_F_LANES[lane], lane
    raise EmulatorFault(
        "tmem_lane_access",
        f"tcgen05.mma operand {name} of {m} rows at {TmemAddress.decode(taddr)}: the lane must be"
        f" {'0' if m == LANES else '0 or 16'}",
        address=taddr,
        operand=name,
    )


def _d_factor(accumulate: bool, scale_d: int | None) -> float:
    if not scale_d:
        return 1.0
    if not 0 <= scale_d <= 15 or not accumulate:
        raise EmulatorFault(
            "mma_bad_descriptor",
            f"scale-input-d is {scale_d} with enable-input-d {accumulate}: it is from 0 to 15 and"
            " scales the D that is read",
            scale_input_d=scale_d,
        )
    return float(2.0**-scale_d)


def _operand_b(
    inst: InstrDescriptor, descriptor: int, smem: SharedMemory, rows: int, name: str
) -> Packed:
    """``rows`` columns of B from shared memory, into the buffer ``name``."""
    chunks = operand_chunks(descriptor, rows, inst.b_mn_major, ELEMENT_BYTES[inst.b_dtype])
    return smem_packed(smem, chunks, inst.b_mn_major, inst.b_dtype, name, _READING_B)


def _smem_a(
    inst: InstrDescriptor, descriptor: int, smem: SharedMemory, rows: int, name: str
) -> Packed:
    chunks = operand_chunks(descriptor, rows, inst.a_mn_major, ELEMENT_BYTES[inst.a_dtype])
    return smem_packed(smem, chunks, inst.a_mn_major, inst.a_dtype, name, _READING_A)


def _operand_a(
    inst: InstrDescriptor,
    a: int,
    smem: SharedMemory,
    tmem: TensorMemory,
    in_tmem: bool,
    d_align: int,
) -> Packed:
    if not in_tmem:
        return _smem_a(inst, a, smem, inst.m, "A")
    if inst.a_mn_major:
        _transposed_a()
    lanes, align = _output_lanes(inst.m, a, "A")
    if align != d_align:
        raise EmulatorFault(
            "tmem_lane_access",
            f"tcgen05.mma with M = {inst.m}: A starts at lane {align}, D at {d_align};"
            " both must use one lane alignment",
            address=a,
            operand="A",
        )
    return _tmem_a(inst, a, tmem, (lanes, align), inst.m, "A")


def _tmem_a(
    inst: InstrDescriptor,
    a: int,
    tmem: TensorMemory,
    place: tuple[NDArray[np.uint32], int],
    rows: int,
    name: str,
) -> Packed:
    """``rows`` rows of A from Tensor Memory; place: the lanes as masks, and where in each warp's
    they start."""
    column, (lanes, align) = a & 0xFFFF, place
    tmem.check_columns(column, A_COLUMNS, _READING_A)
    tmem.check_written(column, A_COLUMNS, lanes, _READING_A)
    if ELEMENT_BYTES[inst.a_dtype] == 2:
        return tmem_packed(tmem, column, rows, align, inst.a_dtype, name)
    words = tmem.data[column : column + A_COLUMNS]
    if rows != LANES:
        words = words.reshape(A_COLUMNS, _WARPS, -1)[:, :, align : align + _HALF_LANES]
        words = words.reshape(A_COLUMNS, rows)
    with np.errstate(all="ignore"):
        return packed(tmem_operand(words, inst.a_dtype), name)


def _transposed_a() -> NoReturn:
    raise EmulatorFault(
        "mma_bad_descriptor", "transpose A (bit 15) is set, but A lies in Tensor Memory"
    )


def _d_cells(
    tmem: TensorMemory, column: int, ncols: int, every_lane: bool, align: int
) -> NDArray[np.uint32]:
    """A view of D's cells: [N, 128], or [N, 4, 16] for 64 rows of layout F."""
    cells = tmem.data[column : column + ncols]
    if every_lane:
        return cells
    return cells.reshape(ncols, _WARPS, -1)[:, :, align : align + _HALF_LANES]


def _accumulate(
    product: NDArray[np.float64], d_cells: NDArray[np.uint32], d_dtype: str, factor: float
) -> None:
    """product += D * factor, in place; D is read as its type."""
    d_values: NDArray[Any]
    if d_dtype == "float32":
        d_values = d_cells.view(np.float32)
    else:
        d_values = d_cells.astype(np.uint16).view(np.float16)
    if factor == 1.0:
        product += d_values
    else:
        product += d_values.astype(np.float64) * factor


def _rounded(values: NDArray[np.float64], dtype: str) -> NDArray[np.uint32]:
    """Round to D's type, as cell bits; a 16-bit D lies in the low half of its cell.

    The ISA leaves the upper half open; the model writes zeros.
    """
    if dtype == "float32":
        return values.astype(np.float32).view(np.uint32)
    return values.astype(np.float16).view(np.uint16).astype(np.uint32)


def _enabled_lanes(
    shape: tuple[int, ...], lanes: NDArray[np.uint32], disabled: Sequence[int], align: int
) -> tuple[NDArray[np.bool_], NDArray[np.uint32]]:
    """Lanes that ``disable-output-lane`` leaves on: over D's cells of a column, and as masks."""
    if len(disabled) != _WARPS:
        _bad_disable_lanes(len(disabled), 1)
    enabled = lanes & ~np.array([mask & 0xFFFFFFFF for mask in disabled], np.uint32)
    per_warp = _HALF_LANES if len(shape) == 3 else LANES // _WARPS
    bits = enabled[:, None] >> np.arange(align, align + per_warp, dtype=np.uint32) & np.uint32(1)
    return bits.astype(np.bool_).reshape(shape[1:]), enabled


def _bad_disable_lanes(count: int, cta_group: int) -> NoReturn:
    raise EmulatorFault(
        "mma_bad_descriptor",
        f"disable-output-lane has {count} masks; with cta_group::{cta_group} it has"
        f" {_WARPS * cta_group}",
    )
