"""Matrices that a warp moves: ldmatrix, stmatrix and movmatrix (PTX ISA 9.1 section 9.7.14.5).

Fragments are held as arrays over (register, lane).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..ptx.ast import Vec
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


@machine(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", converged=True)
def movmatrix(b: Binding) -> Handler:
    d, source = b.row(b.ins.operands[0], "b32"), b.row(b.ins.operands[1], "b32")

    def run(w: Warp, mask: int) -> None:
        w.r32[d] = _to_lanes(_from_lanes(w.r32[source][None], False), True)[0]

    return run
