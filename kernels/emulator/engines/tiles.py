"""Where a TMA tile lies in global memory, and its places in shared memory: PTX ISA 9.1 section 5.5.

With a swizzle a tile's rows lie the swizzle's span apart in shared memory, also where they are
shorter, and the gaps keep what they held; without one they are packed (NVIDIA H200,
tests/emulator/hardware/record_tma.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from ..memory.global_memory import GlobalMemory
from ..memory.shared import SharedMemory
from ..tensormap import TensorMap

SMEM_ALIGNMENT_BYTES = 128  # of a tile
CHUNK_BYTES = 16
_LINE_BYTES = 128
_SWIZZLE_PERIOD_BYTES = 1024


@dataclass(frozen=True)
class Place:
    """A tile at its coordinates; shapes start with the outermost dimension, bytes innermost.

    shape: the tile, its last axis in bytes; inside: the slices of it that lie in the tensor;
    inside_shape, strides: of that part in global memory; offset: its first byte from the tensor's
    address; count: its bytes, 0 where the whole tile lies outside.
    """

    shape: tuple[int, ...]
    inside: tuple[slice, ...]
    inside_shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    count: int

    def staging(self, fill: bytes | None) -> NDArray[np.uint8]:
        """A fresh tile, filled where it lies outside the tensor."""
        if fill is None:
            if self.inside_shape == self.shape:
                return np.empty(self.shape, np.uint8)
            return np.zeros(self.shape, np.uint8)
        row = np.frombuffer(fill * (self.shape[-1] // len(fill)), np.uint8)
        return np.broadcast_to(row, self.shape).copy()


@lru_cache(maxsize=8192)
def placed(tmap: TensorMap, coords: tuple[int, ...]) -> Place:
    shape, inside, counts, strides = [], [], [], []
    offset = 0
    axes = zip(coords, tmap.dims, tmap.tile, tmap.element_strides, strict=True)
    for axis, (first, size, extent, step) in enumerate(axes):
        low = min(max(-(first // step), 0), extent)  # first index at or past the tensor's start
        high = max(min(-((first - size) // step), extent), low)  # one past the last inside
        stride = tmap.all_strides_bytes[axis]
        offset += (first + low * step) * stride
        unit = tmap.element_bytes if axis == 0 else 1
        shape.append(extent * unit)
        inside.append(slice(low * unit, high * unit))
        counts.append((high - low) * unit)
        strides.append(step * stride if axis else 1)
    return Place(
        shape=tuple(shape[::-1]),
        inside=tuple(inside[::-1]),
        inside_shape=tuple(counts[::-1]),
        strides=tuple(strides[::-1]),
        offset=offset,
        count=int(np.prod(counts, dtype=np.int64)),
    )


def place_tile(
    tmap: TensorMap, coords: Sequence[int], smem: SharedMemory, smem_addr: int, what: str
) -> Place:
    """Where the tile lies, its alignment and its shared memory range checked."""
    if len(coords) != tmap.rank:
        raise EmulatorFault(
            "tma_bad_coordinates",
            f"{what} with {len(coords)} coordinates through a tensor map of rank {tmap.rank}",
            coordinates=list(coords),
        )
    check_inner(tmap, coords, what)
    check_smem(tmap, smem, smem_addr, what)
    return placed(tmap, tuple(coords))


def check_inner(tmap: TensorMap, coords: Sequence[int], what: str) -> None:
    """Raise tma_misaligned unless the innermost coordinate is at a multiple of 16 bytes."""
    bits = coords[0] * tmap.element_bits
    if bits % (8 * CHUNK_BYTES):
        inner_misaligned(what, coords, bits)


def inner_misaligned(what: str, coords: Sequence[int], bits: int) -> NoReturn:
    raise EmulatorFault(
        "tma_misaligned",
        f"{what} at coordinates {tuple(coords)}: the innermost one is at byte"
        f" {bits / 8:g}, which is no multiple of 16 (PTX ISA 9.1 5.5.3.1)",
        coordinates=list(coords),
    )


def check_smem(tmap: TensorMap, smem: SharedMemory, smem_addr: int, what: str) -> None:
    if smem_addr % SMEM_ALIGNMENT_BYTES:
        raise EmulatorFault(
            "tma_misaligned",
            f"{what}: shared address {smem_addr:#x} is not a multiple of {SMEM_ALIGNMENT_BYTES}",
            address=smem_addr,
        )
    smem.check_range(smem_addr, tmap.tile_bytes, what)


def global_part(tmap: TensorMap, coords: tuple[int, ...]) -> tuple[TensorMap, tuple[int, ...]]:
    """A map and coordinates for what is read or written in global memory."""
    if tmap.element_bits < 8:
        return tmap.in_bytes, (coords[0] * tmap.element_bits // 8, *coords[1:])
    return tmap, coords


def tile_start(tmap: TensorMap, coords: tuple[int, ...]) -> int | None:
    """Address of the tile's first byte inside the tensor, None if all of it lies outside. (The
    map's own address need not be in memory: maps of ragged tensors start far in front of it.)"""
    place = placed(*global_part(tmap, coords))
    return tmap.address + place.offset if place.count else None


def tile_cells(tmap: TensorMap, coords: tuple[int, ...]) -> NDArray[np.int64]:
    """Addresses of the 4-byte cells that a tile covers in global memory."""
    place = placed(*global_part(tmap, coords))
    if not place.count:
        return np.zeros(0, np.int64)
    cells = np.arange(0, place.inside_shape[-1] - 3, 4, dtype=np.int64)
    for count, stride in zip(place.inside_shape[-2::-1], place.strides[-2::-1], strict=True):
        cells = (np.arange(count, dtype=np.int64)[:, None] * stride + cells).reshape(-1)
    return cells + (tmap.address + place.offset)


def global_view(
    tmap: TensorMap, place: Place, gmem: GlobalMemory, what: str, write: bool
) -> NDArray[np.uint8]:
    """The tile's inside part in global memory, as bytes; all of it lies in one allocation."""
    first = tmap.address + place.offset
    spans = zip(place.inside_shape, place.strides, strict=True)
    extent = 1 + sum((count - 1) * stride for count, stride in spans)
    allocation = gmem.find(first, extent, what, write)
    return np.ndarray(
        place.inside_shape,
        np.uint8,
        buffer=allocation.data,
        offset=first - allocation.base,
        strides=place.strides,
    )


# --- swizzles ------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def swizzled_chunks(
    rows: int, row_chunks: int, phase: int, swizzle_bytes: int, atom_bytes: int
) -> NDArray[np.int64]:
    """Places of a tile's 16-byte chunks, relative to its first address / 16.

    rows, row_chunks: the tile's rows and the chunks of each; phase: the first address modulo 1024.
    Section 5.5.7: atoms change places within a row's ``swizzle_bytes`` by XOR of their number with
    that of the 128-byte line. Rows lie ``swizzle_bytes`` apart; without a swizzle they are packed.
    """
    chunk = np.arange(row_chunks, dtype=np.int64)[None, :]
    row = np.arange(rows, dtype=np.int64)[:, None]
    pitch = swizzle_bytes or row_chunks * CHUNK_BYTES
    addrs = (phase + pitch * row + CHUNK_BYTES * chunk).reshape(-1)
    atoms = swizzle_bytes // atom_bytes
    if atoms > 1:
        addrs ^= (addrs >> 7 & atoms - 1) * atom_bytes
    index = addrs - phase >> 4
    index.flags.writeable = False
    return index


def chunks_of(tmap: TensorMap, smem_addr: int) -> NDArray[np.int64]:
    row_chunks = tmap.box[0] * tmap.element_bytes // CHUNK_BYTES
    return swizzled_chunks(
        tmap.tile_bytes // (row_chunks * CHUNK_BYTES),
        row_chunks,
        smem_addr % _SWIZZLE_PERIOD_BYTES,
        tmap.swizzle_bytes,
        tmap.swizzle_atom_bytes,
    )


def write_swizzled(
    tmap: TensorMap, data: NDArray[np.uint8], smem: SharedMemory, smem_addr: int
) -> None:
    if not tmap.swizzle_bytes:
        smem.write_bytes(smem_addr, data, "TMA load")
        return
    full_rows = tmap.box[0] * tmap.element_bytes == tmap.swizzle_bytes
    if not full_rows or data.size % _LINE_BYTES:
        smem.write_chunks((smem_addr >> 4) + chunks_of(tmap, smem_addr), data, "TMA load")
        return
    # Whole lines: the swizzle permutes chunks inside the tile's own range.
    end = smem_addr + data.size
    smem.check_no_mbarrier(smem_addr, end, "TMA load")
    chunks = smem.views[CHUNK_BYTES]
    chunks[smem_addr >> 4 : end >> 4][chunks_of(tmap, smem_addr)] = data.view(chunks.dtype)
    smem.window_valid[smem_addr:end] = 1


def read_swizzled(
    tmap: TensorMap, place: Place, smem: SharedMemory, smem_addr: int
) -> NDArray[np.uint8]:
    """The tile in its own order; of bytes that are clipped away none need be written."""
    index = (smem_addr >> 4) + chunks_of(tmap, smem_addr)
    what = "TMA store"
    end = (int(index.max()) << 4) + CHUNK_BYTES
    smem.check_range(smem_addr, end - smem_addr, what)
    if not smem.all_written(smem_addr, end):
        addrs = ((index << 4)[:, None] + np.arange(CHUNK_BYTES)).reshape(place.shape)
        needed = addrs[place.inside].reshape(-1)
        missing = needed[smem.window_valid[needed] == 0]
        if missing.size:
            smem.fault_unwritten(np.sort(missing), what)
    return smem.views[CHUNK_BYTES].take(index).view(np.uint8).reshape(place.shape)
