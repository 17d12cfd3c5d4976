"""tcgen05.cp: rows of a matrix in shared memory to lanes of Tensor Memory (PTX ISA 9.1 section
9.7.16.9.2).

Rows lie in shared memory as those of a K-major operand do. Where each goes is CUTLASS's
(cute/atom/copy_traits_sm100.hpp): row r to lane r, or to several lanes, or (4x256b) to lane 32 r.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from ..memory.shared import SharedMemory
from ..memory.tensor import LANES, WARP_LANES, TensorMemory, TmemAddress
from .formats import data_bytes, nibbles, six_bits
from .operands import operand_chunks, raw_chunks

_WHAT = "tcgen05.cp"
# Name of the packing -> bytes of data in 16.
_DATA_BYTES = {"b6x16_p32": 12, "b4x16_p64": 8}


@dataclass(frozen=True)
class Copy:
    """A shape. ``lanes[c, r]``: lane of copy c of row r, beyond that of the address."""

    rows: int
    row_bytes: int
    lanes: tuple[tuple[int, ...], ...]
    free_lane: bool = False  # the address may name any lane of the first warp's

    @property
    def columns(self) -> int:
        return self.row_bytes // 4


_IN_ORDER = tuple(range(LANES))
_WARP_PAIRS = {"02_13": ((0, 1), (2, 3)), "01_23": ((0, 2), (1, 3))}


def _by_warp(warps: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(WARP_LANES * warp + lane for warp in warps for lane in range(WARP_LANES))


COPIES = {
    "128x256b": Copy(128, 32, (_IN_ORDER,)),
    "128x128b": Copy(128, 16, (_IN_ORDER,)),
    "4x256b": Copy(4, 32, (tuple(range(0, LANES, WARP_LANES)),), free_lane=True),
    "32x128b.warpx4": Copy(32, 16, tuple(_by_warp((warp,)) for warp in range(4))),
    **{
        f"64x128b.warpx2::{name}": Copy(64, 16, tuple(_by_warp(warps) for warps in copies))
        for name, copies in _WARP_PAIRS.items()
    },
}


def copy(
    form: Copy,
    packing: str | None,
    taddr: int,
    descriptor: int,
    smem: SharedMemory,
    tmem: TensorMemory,
) -> None:
    """One CTA's copy. packing: "b6x16_p32" or "b4x16_p64" unpacks elements to a byte each.

    Raises `EmulatorFault` mma_bad_descriptor, smem_* and tmem_*.
    """
    lane, column = taddr >> 16, taddr & 0xFFFF
    if lane >= (WARP_LANES if form.free_lane else 1):
        raise EmulatorFault(
            "tmem_lane_access",
            f"{_WHAT} to {TmemAddress.decode(taddr)}: the lane must be"
            f" {'below 32' if form.free_lane else '0'}",
            address=taddr,
        )
    tmem.check_columns(column, form.columns, f"{_WHAT} writing Tensor Memory")
    chunks = operand_chunks(descriptor, form.rows, False, 1, form.row_bytes)
    kept = 16 if packing is None else _DATA_BYTES[packing]
    raw = raw_chunks(smem, chunks, f"{_WHAT} reading its source", kept).view(np.uint8)
    words = np.ascontiguousarray(unpacked(raw, packing)).view(np.uint32)
    cells = tmem.data[column : column + form.columns]
    masks = np.zeros(LANES // WARP_LANES, np.uint32)
    for lanes in form.lanes:
        places = np.array(lanes) + lane
        cells[:, places] = words.T
        np.bitwise_or.at(masks, places // WARP_LANES, np.uint32(1) << (places % WARP_LANES))
    tmem.mark_written(column, form.columns, masks)


def unpacked(raw: NDArray[np.uint8], packing: str | None) -> NDArray[np.uint8]:
    """Rows of bytes as they go to Tensor Memory: a 4-bit element in bits 5:2 of its byte, one of 6
    bits in bits 6:1 (see `formats`)."""
    if packing == "b4x16_p64":
        return nibbles(data_bytes(raw, 8)) << np.uint8(2)
    if packing == "b6x16_p32":
        return six_bits(raw) << np.uint8(1)
    return raw
