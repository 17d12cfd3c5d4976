"""TMA's tile::gather4 and tile::scatter4: four rows of a matrix, wherever they lie, and one tile of
shared memory (PTX ISA 9.1 section 5.5.3.4).

The map is of two dimensions with a box of one row. Coordinates are the column, then the four rows.
The tile is one of four rows to the layout in shared memory and to its swizzle; each row is clipped
and filled on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault, UnsupportedPTX
from ..memory.global_memory import GlobalMemory
from ..memory.shared import SharedMemory
from ..tensormap import TensorMap
from . import tma
from .tiles import (
    CHUNK_BYTES,
    check_smem,
    chunks_of,
    global_view,
    placed,
    tile_cells,
    write_swizzled,
)

ROWS = 4


@lru_cache(maxsize=1024)
def four_rows(tmap: TensorMap) -> TensorMap:
    """The map whose tile is what one instruction moves, for its layout in shared memory.

    Raises `EmulatorFault` tma_bad_tensor_map for a map that is not of rows of a matrix, and
    `UnsupportedPTX` for padded elements.
    """
    if tmap.rank != 2 or tmap.box[1] != 1:
        raise EmulatorFault(
            "tma_bad_tensor_map",
            f"tile::gather4 and tile::scatter4 through a tensor map of rank {tmap.rank} and box"
            f" {tmap.box}: they need two dimensions, and a box of one row",
        )
    if tmap.element_bits != tmap.smem_element_bits:
        raise UnsupportedPTX(f"tile::gather4 and tile::scatter4 of {tmap.dtype} elements")
    whole = tmap if tmap.element_bits >= 8 else tmap.in_bytes
    return replace(whole, box=(whole.box[0], ROWS), element_strides=(1, 1))


def rows_of(tmap: TensorMap, coords: Sequence[int]) -> list[tuple[int, int]]:
    """Coordinates of the four tiles of one row."""
    if len(coords) != 1 + ROWS:
        raise EmulatorFault(
            "tma_bad_coordinates",
            f"tile::gather4 and tile::scatter4 take a column and four rows, not {len(coords)}"
            " coordinates",
            coordinates=list(coords),
        )
    return [(coords[0], row) for row in coords[1:]]


def cells(tmap: TensorMap, coords: tuple[int, ...]) -> NDArray[np.int64]:
    """Addresses of the 4-byte cells in global memory, in order."""
    parts = [tile_cells(tmap, row) for row in rows_of(tmap, coords)]
    return np.unique(np.concatenate(parts))


def load(
    tmap: TensorMap,
    coords: Sequence[int],
    gmem: GlobalMemory,
    smem: SharedMemory,
    smem_addr: int,
) -> int:
    """Four rows into one tile; returns the bytes it completes. Faults as `tma.load_tile`."""
    whole = four_rows(tmap)
    check_smem(whole, smem, smem_addr, "TMA gather")
    rows = []
    for row in rows_of(tmap, coords):
        one, at = tma.as_bytes(tmap, row, "TMA gather")
        rows.append(tma.tile_data(one, placed(one, at), gmem))
    write_swizzled(whole, np.concatenate(rows), smem, smem_addr)
    return tmap.tx_bytes * ROWS


def store(
    tmap: TensorMap,
    coords: Sequence[int],
    gmem: GlobalMemory,
    smem: SharedMemory,
    smem_addr: int,
) -> int:
    """One tile into four rows; faults as `tma.store_tile`. Of equal rows the last remains."""
    whole = four_rows(tmap)
    check_smem(whole, smem, smem_addr, "TMA scatter")
    chunks = chunks_of(whole, smem_addr).reshape(ROWS, -1, 1)
    places = smem_addr + CHUNK_BYTES * chunks + np.arange(CHUNK_BYTES)
    for row, bytes_at in zip(rows_of(tmap, coords), places.reshape(ROWS, -1), strict=True):
        if min(row) < 0:
            raise EmulatorFault(
                "tma_bad_coordinates",
                f"TMA scatter to column {row[0]} of row {row[1]}: a negative coordinate",
                coordinates=list(coords),
            )
        one, at = tma.as_bytes(tmap, row, "TMA scatter")
        place = placed(one, at)
        if not place.count:
            continue
        needed = bytes_at[place.inside[-1]]
        missing = needed[smem.window_valid[needed] == 0]
        if missing.size:
            smem.fault_unwritten(np.sort(missing), "TMA scatter")
        view = global_view(one, place, gmem, "TMA scatter", write=True)
        view[...] = smem.window[needed].reshape(view.shape)
    return tmap.tile_bytes * ROWS
