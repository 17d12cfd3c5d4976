"""Warp-level matrices: ldmatrix, stmatrix, movmatrix and mma.sync (PTX ISA 9.1 section 9.7.14.5).

Fragments are held as arrays over (register, lane). mma.sync computes as the tensor core does here:
products exact in float64, summed there and rounded once (mode ``exact-f32``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..engines.formats import widen
from ..ptx.ast import Imm, Operand, Reg, Vec
from .memory import accessors
from .table import FULL, Binding, Handler, machine

if TYPE_CHECKING:
    from ..state import Warp

_ROW_BYTES = 16  # of an 8x8 matrix of 16-bit elements


@machine(
    r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?(?:\.(shared(?:::cta)?))?\.b16",
    converged=True,
)
def matrices(b: Binding) -> Handler:
    """1, 2 or 4 matrices of 8 rows; lanes 8 i .. 8 i + 7 hold the addresses of matrix i's rows."""
    loads, count, transposed = b.match[1] == "ld", int(b.match[2]), b.match[3] is not None
    target, source = b.ins.operands if loads else reversed(b.ins.operands)
    rows = b.vector_rows(target)
    if not isinstance(target, Vec) or len(target.items) != count:
        raise b.unsupported(f".x{count} takes {count} registers")
    address = b.addresses(source)
    fetch, put = accessors(b.match[4] or "")

    def load(w: Warp, mask: int) -> None:
        data = fetch(w, address(w)[: 8 * count], _ROW_BYTES)
        w.r32[rows] = _to_lanes(data, transposed)

    def store(w: Warp, mask: int) -> None:
        put(w, address(w)[: 8 * count], _from_lanes(w.r32[rows], transposed))
        w.cta.machine.events += 1

    return load if loads else store


def _to_lanes(data: NDArray[np.uint8], transposed: bool) -> NDArray[np.uint32]:
    """Rows, uint8[8 n, 16], to registers, uint32[n, 32]: lane t holds elements 2 (t % 4) and the
    next of row t / 4 (transposed: of column t / 4)."""
    elements = np.ascontiguousarray(data).view(np.uint16).reshape(-1, 8, 8)
    if transposed:
        elements = elements.transpose(0, 2, 1)
    return np.ascontiguousarray(elements).view(np.uint32).reshape(-1, 32)


def _from_lanes(registers: NDArray[np.uint32], transposed: bool) -> NDArray[np.uint8]:
    elements = np.ascontiguousarray(registers).view(np.uint16).reshape(-1, 8, 8)
    if transposed:
        elements = elements.transpose(0, 2, 1)
    return np.ascontiguousarray(elements).view(np.uint8).reshape(-1, _ROW_BYTES)


@machine(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", converged=True)
def movmatrix(b: Binding) -> Handler:
    d, source = b.row(b.ins.operands[0], "b32"), b.row(b.ins.operands[1], "b32")

    def run(w: Warp, mask: int) -> None:
        w.r32[d] = _to_lanes(_from_lanes(w.r32[source][None], False), True)[0]

    return run


# -- mma.sync ------------------------------------------------------------------------------------


@machine(
    r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.(f32|f16)\.(f16|bf16)\.\3\.\2", converged=True
)
def mma_sync(b: Binding) -> Handler:
    """D = A B + C: A (16, K) row-major, B (K, 8) column-major, C and D (16, 8)."""
    k, d_type, ab_type = int(b.match[1]), b.match[2], b.match[3]
    if d_type == "f16" and ab_type != "f16":
        raise b.unsupported("an f16 accumulator takes f16 operands")
    d, a, bb, c = b.ins.operands
    halves = d_type == "f16"
    rows_d = _fragment(b, d, 2 if halves else 4)
    read_c = _accumulator(b, c, 2 if halves else 4)
    rows_a, rows_b = _fragment(b, a, k // 4), _fragment(b, bb, k // 8)
    dtype = "bfloat16" if ab_type == "bf16" else "float16"
    unpack = _unpack_f16 if halves else _unpack_f32
    pack = _pack_f16 if halves else _pack_f32

    def run(w: Warp, mask: int) -> None:
        with np.errstate(all="ignore"):
            a_ = _pairs(w.r32[rows_a], dtype, *_a_places(k), (16, k))
            b_ = _pairs(w.r32[rows_b], dtype, *_b_places(k), (k, 8))
            w.r32[rows_d] = pack(a_ @ b_ + unpack(read_c(w)))

    return run


def _fragment(b: Binding, op: Operand, count: int) -> Any:
    if (len(op.items) if isinstance(op, Vec) else 1) != count:
        raise b.unsupported(f"the fragment {op} should have {count} registers")
    return b.vector_rows(op)


def _accumulator(b: Binding, op: Operand, count: int):  # type: ignore[no-untyped-def]
    """Reader of C, whose registers may be immediates (zeros)."""
    items = op.items if isinstance(op, Vec) else (op,)
    if len(items) != count:
        raise b.unsupported(f"the fragment {op} should have {count} registers")
    if any(isinstance(item, Imm) for item in items):
        fixed = [
            np.full(32, x.value & FULL, np.uint32) if isinstance(x, Imm) else None for x in items
        ]
        rows = [b.row(x, "b32") if isinstance(x, Reg) else -1 for x in items]
        return lambda w: np.stack(
            [w.r32[r] if f is None else f for f, r in zip(fixed, rows, strict=True)]
        )
    rows_c = b.vector_rows(op)
    return lambda w: w.r32[rows_c]


Places = tuple[NDArray[np.int64], NDArray[np.int64]]  # row and column of each element


@lru_cache(maxsize=8)
def _a_places(k: int) -> Places:
    """Of A's elements over (register, lane, half): figures of m16n8k8 and m16n8k16."""
    reg, lane, half = np.meshgrid(np.arange(k // 4), np.arange(32), np.arange(2), indexing="ij")
    return lane // 4 + 8 * (reg % 2), 2 * (lane % 4) + half + 8 * (reg // 2)


@lru_cache(maxsize=8)
def _b_places(k: int) -> Places:
    reg, lane, half = np.meshgrid(np.arange(k // 8), np.arange(32), np.arange(2), indexing="ij")
    return 2 * (lane % 4) + half + 8 * reg, lane // 4


def _d_places(registers: int, halves: int) -> Places:
    """Of C's and D's: register pairs (f32) or halves (f16) are neighbours in a row."""
    reg, lane, half = np.meshgrid(
        np.arange(registers), np.arange(32), np.arange(halves), indexing="ij"
    )
    index = reg * halves + half
    return lane // 4 + 8 * (index // 2), 2 * (lane % 4) + index % 2


_D_F32 = _d_places(4, 1)
_D_F16 = _d_places(2, 2)


def _pairs(
    registers: NDArray[np.uint32],
    dtype: str,
    row: NDArray[np.int64],
    column: NDArray[np.int64],
    shape: tuple[int, int],
) -> NDArray[np.float64]:
    bits = np.ascontiguousarray(registers).view(np.uint16).reshape(row.shape)
    out = np.empty(shape, np.float64)
    out[row, column] = widen(bits, dtype)
    return out


def _unpack_f32(registers: NDArray[np.uint32]) -> NDArray[np.float64]:
    out = np.empty((16, 8), np.float64)
    out[_D_F32] = np.ascontiguousarray(registers).view(np.float32)[:, :, None]
    return out


def _pack_f32(values: NDArray[np.float64]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values[_D_F32][:, :, 0].astype(np.float32)).view(np.uint32)


def _unpack_f16(registers: NDArray[np.uint32]) -> NDArray[np.float64]:
    return _pairs(registers, "float16", *_D_F16, (16, 8))


def _pack_f16(values: NDArray[np.float64]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values[_D_F16].astype(np.float16)).view(np.uint32)[:, :, 0]
