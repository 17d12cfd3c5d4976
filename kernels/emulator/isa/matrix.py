"""Matrices that a warp moves: ldmatrix, stmatrix and movmatrix (PTX ISA 9.1 section 9.7.14.5).

Fragments are held as arrays over (register, lane).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..ptx.ast import Operand, Vec
from .memory import accessors
from .table import Binding, Handler, machine

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


@machine(
    r"ldmatrix\.sync\.aligned\.m16n16\.x([12])\.trans(?:\.(shared(?:::cta)?))?\.b8", converged=True
)
def load_bytes(b: Binding) -> Handler:
    """1 or 2 matrices of 16 by 16 bytes, by columns of 16 bytes: lane 4 g + t gets, of columns
    4 t .. 4 t + 3, the bytes of rows g and g + 8, two columns a register (CUTLASS's
    SM100_U8x8_LDSM_T, cute/atom/copy_traits_sm100.hpp)."""
    target, source = b.ins.operands
    count = int(b.match[1])
    rows = _registers(b, target, 2 * count)
    address, (fetch, _) = b.addresses(source), accessors(b.match[2] or "")

    def run(w: Warp, mask: int) -> None:
        columns = fetch(w, address(w)[: 16 * count], _ROW_BYTES)
        # [matrix, t, register, column of it, half of the rows, g]
        parts = np.ascontiguousarray(columns).reshape(count, 4, 2, 2, 2, 8)
        held = np.ascontiguousarray(parts.transpose(0, 2, 5, 1, 4, 3))
        w.r32[rows] = held.reshape(2 * count, 32, 4).view(np.uint32)[:, :, 0]

    return run


@machine(
    r"stmatrix\.sync\.aligned\.m16n8\.x([124])\.trans(?:\.(shared(?:::cta)?))?\.b8", converged=True
)
def store_bytes(b: Binding) -> Handler:
    """1, 2 or 4 matrices of 16 by 8 bytes, by columns of 16 bytes: lane 4 g + t gives, of columns
    2 t and 2 t + 1, the bytes of rows g and g + 8 (CUTLASS's SM100_U8x4_STSM_T)."""
    target, source = b.ins.operands
    count = int(b.match[1])
    rows = _registers(b, source, count)
    address, (_, put) = b.addresses(target), accessors(b.match[2] or "")

    def run(w: Warp, mask: int) -> None:
        # [matrix, g, t, half of the rows, column]
        parts = np.ascontiguousarray(w.r32[rows]).view(np.uint8).reshape(count, 8, 4, 2, 2)
        columns = np.ascontiguousarray(parts.transpose(0, 2, 4, 3, 1)).reshape(-1, _ROW_BYTES)
        put(w, address(w)[: 8 * count], columns)
        w.cta.machine.events += 1

    return run


def _registers(b: Binding, op: Operand, count: int) -> slice | NDArray[np.int64]:
    if (len(op.items) if isinstance(op, Vec) else 1) != count:
        raise b.unsupported(f"{op} should have {count} registers")
    return b.vector_rows(op)


@machine(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", converged=True)
def movmatrix(b: Binding) -> Handler:
    d, source = b.row(b.ins.operands[0], "b32"), b.row(b.ins.operands[1], "b32")

    def run(w: Warp, mask: int) -> None:
        w.r32[d] = _to_lanes(_from_lanes(w.r32[source][None], False), True)[0]

    return run
