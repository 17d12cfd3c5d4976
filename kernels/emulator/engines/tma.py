"""The Tensor Memory Accelerator: cp.async.bulk and cp.async.bulk.tensor in tiled mode.

PTX ISA 9.1 sections 5.5 and 9.7.9.25. Each call moves a whole tile at once; when it is issued, when
its effects are seen and which mbarrier or group it completes is the machine's affair. What the text
leaves open follows an NVIDIA H200 (tests/emulator/hardware/record_tma.py):

- with a swizzle a tile's rows lie the swizzle's span apart in shared memory, also where they are
  shorter, and the gaps keep what they held; without one they are packed;
- a map of tf32 rounds float32 to nearest, ties to even, on load, and its NaNs are 0x7fffe000;
- the swizzle XORs bits of the absolute shared address, whatever the tile's own start;
- a tile whose innermost coordinate is not a multiple of 16 bytes is an illegal instruction, and so
  is a store with a negative coordinate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault, UnsupportedPTX
from ..memory.global_memory import GlobalMemory
from ..memory.shared import SharedMemory
from ..tensormap import TensorMap
from .reduction import DTYPES, reduction

SMEM_ALIGNMENT_BYTES = 128  # of a tile
BULK_ALIGNMENT_BYTES = 16  # of cp.async.bulk: both addresses and the size
_CHUNK_BYTES = 16
_LINE_BYTES = 128
_SWIZZLE_PERIOD_BYTES = 1024
_PADDING = 0xFF  # a NaN of every 8-bit float

# PTX ISA 9.1 sections 9.7.9.25.4.2 and 9.7.9.27.1.3: types of each reduction.
_REDUCTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "global": {
        "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16"),
        "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
        "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
        "inc": ("u32",),
        "dec": ("u32",),
        "and": ("b32", "b64"),
        "or": ("b32", "b64"),
        "xor": ("b32", "b64"),
    },
    "shared": {
        "add": ("u32", "s32", "u64"),
        "min": ("u32", "s32"),
        "max": ("u32", "s32"),
        "inc": ("u32",),
        "dec": ("u32",),
        "and": ("b32",),
        "or": ("b32",),
        "xor": ("b32",),
    },
}
_REDUCED_AS = {
    "uint32": "u32",
    "int32": "s32",
    "uint64": "u64",
    "int64": "s64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float32_ftz": "f32",
}

# What an H200 fills with outside the tensor, as little-endian bytes of one element.
_NAN_FILL = {
    "float16": b"\xf7\x7f",
    "bfloat16": b"\xf7\x7f",
    "float32": b"\xf7\x7f\xf7\x7f",
    "float32_ftz": b"\xf7\x7f\xf7\x7f",
    "float64": b"\xf7\x7f\xf7\x7f\xf7\x7f\xf7\x7f",
}


def load_tile(
    tmap: TensorMap,
    coords: Sequence[int],
    gmem: GlobalMemory,
    smem: SharedMemory,
    smem_addr: int,
) -> int:
    """cp.async.bulk.tensor global to shared: one tile; returns the bytes it completes.

    coords: of the tile's first element, innermost first; they may be negative or past the end. What
    lies outside the tensor is filled and counts in full. Raises `EmulatorFault`: tma_misaligned,
    tma_bad_coordinates, global_out_of_bounds, smem_out_of_bounds, mbarrier_ordinary_access.
    """
    if tmap.element_bits < 8:
        return _load_narrow(tmap, coords, gmem, smem, smem_addr)
    place = _place(tmap, coords, smem, smem_addr, "TMA load")
    if tmap.tf32_rounding and (tmap.nan_fill or tmap.dtype != "float32"):
        raise UnsupportedPTX("TMA load that rounds to tf32, with NaN fill or flushed subnormals")
    staging = place.staging(_fill_bytes(tmap))
    if place.count:
        source = _global_view(tmap, place, gmem, "TMA load", write=False)
        staging[place.inside] = _as_tf32(source) if tmap.tf32_rounding else source
    _write_swizzled(tmap, staging.reshape(-1), smem, smem_addr)
    return tmap.tx_bytes


def _as_tf32(source: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """float32 bytes rounded to tf32 as an H200 does: to nearest, ties to even, every NaN the same,
    13 low bits zero."""
    bits = np.ascontiguousarray(source).view(np.uint32)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    odd = bits >> np.uint32(13) & np.uint32(1)
    rounded = (bits + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)
    return np.where(is_nan, np.uint32(0x7FFFE000), rounded).view(np.uint8).reshape(source.shape)


def _narrow(tmap: TensorMap, coords: Sequence[int], what: str) -> tuple[TensorMap, tuple[int, ...]]:
    """A map of elements below a byte that are not padded, and coordinates, as those of bytes."""
    if tmap.smem_element_bits != tmap.element_bits:
        raise UnsupportedPTX(f"{what} through a tensor map of {tmap.dtype} elements")
    first = coords[0] * tmap.element_bits
    if first % (8 * BULK_ALIGNMENT_BYTES):
        _inner_misaligned(what, coords, first)
    return tmap.in_bytes, (first // 8, *coords[1:])


def _load_narrow(
    tmap: TensorMap,
    coords: Sequence[int],
    gmem: GlobalMemory,
    smem: SharedMemory,
    smem_addr: int,
) -> int:
    """`load_tile` of elements below a byte: packed ones as bytes; of padded ones each 16 get the
    first 8 or 12 of 16 bytes in shared memory, and the rest is left undefined (section 5.5.1.1)."""
    if tmap.smem_element_bits == tmap.element_bits:
        return load_tile(*_narrow(tmap, coords, "TMA load"), gmem, smem, smem_addr)
    packed = tmap.in_bytes
    first = coords[0] * tmap.element_bits
    if first % (8 * BULK_ALIGNMENT_BYTES):
        _inner_misaligned("TMA load", coords, first)
    _check_smem(tmap, smem, smem_addr, "TMA load")
    place = _placed(packed, (first // 8, *coords[1:]))
    data = place.staging(None)
    if place.count:
        data[place.inside] = _global_view(packed, place, gmem, "TMA load", write=False)
    kept = 2 * tmap.element_bits
    spread = np.full((data.size // kept, _CHUNK_BYTES), _PADDING, np.uint8)
    spread[:, :kept] = data.reshape(-1, kept)
    rows = replace(tmap, dtype="uint8", dims=(tmap.box[0], *tmap.dims[1:]))
    _write_swizzled(rows, spread.reshape(-1), smem, smem_addr)
    index = (smem_addr >> 4) + _chunks_of(rows, smem_addr)
    smem.forget_chunk_ends(index, kept)
    return tmap.tx_bytes


def store_tile(
    tmap: TensorMap,
    coords: Sequence[int],
    gmem: GlobalMemory,
    smem: SharedMemory,
    smem_addr: int,
) -> int:
    """cp.async.bulk.tensor shared to global: one tile, clipped to the tensor; returns its bytes.

    Raises `EmulatorFault` as `load_tile`, and smem_unwritten_read, global_read_only and
    tma_bad_coordinates for a negative coordinate.
    """
    if tmap.element_bits < 8:
        tmap, coords = _narrow(tmap, coords, "TMA store")
    place = _place(tmap, coords, smem, smem_addr, "TMA store")
    if min(coords) < 0:
        _negative("TMA store", coords)
    if place.count:
        tile = _read_swizzled(tmap, place, smem, smem_addr)
        _global_view(tmap, place, gmem, "TMA store", write=True)[...] = tile[place.inside]
    return tmap.tile_bytes


def reduce_tile(
    tmap: TensorMap,
    coords: Sequence[int],
    gmem: GlobalMemory,
    smem: SharedMemory,
    smem_addr: int,
    op: str,
) -> int:
    """cp.reduce.async.bulk.tensor shared to global: `store_tile`, each element reduced into what
    is there. Raises `UnsupportedPTX` for an operation that the map's element type lacks."""
    if tmap.element_bits < 8:
        raise UnsupportedPTX(f"TMA reduction of {tmap.dtype} elements")
    place = _place(tmap, coords, smem, smem_addr, "TMA reduction")
    if min(coords) < 0:
        _negative("TMA reduction", coords)
    kind = _REDUCED_AS.get(tmap.dtype, "")
    if op in ("and", "or", "xor") and kind[:1] in "us":
        kind = f"b{kind[1:]}"
    _check_reduction(op, kind, "global")
    if place.count:
        tile = _read_swizzled(tmap, place, smem, smem_addr)
        _reduce_into(
            _global_view(tmap, place, gmem, "TMA reduction", write=True),
            tile[place.inside],
            op,
            kind,
        )
    return tmap.tile_bytes


def bulk_reduce(
    smem: SharedMemory,
    smem_addr: int,
    to: GlobalMemory | SharedMemory,
    to_addr: int,
    nbytes: int,
    op: str,
    kind: str,
) -> int:
    """cp.reduce.async.bulk out of shared memory, to global memory or another CTA's."""
    _check_bulk(to_addr, smem_addr, nbytes)
    space = "global" if isinstance(to, GlobalMemory) else "shared"
    _check_reduction(op, kind, space)
    what = "bulk reduction"
    new = smem.read_bytes(smem_addr, nbytes, what).copy()
    old = to.read_bytes(to_addr, nbytes, what).copy()
    _reduce_into(old, new, op, kind)
    to.write_bytes(to_addr, old, what)
    return nbytes


def _reduce_into(view: NDArray[np.uint8], tile: NDArray[np.uint8], op: str, kind: str) -> None:
    dtype = DTYPES[kind]
    old = np.ascontiguousarray(view).view(dtype)
    new = np.ascontiguousarray(tile).view(dtype)
    out = reduction(op, kind, ftz=kind == "f32")(old, new)
    view[...] = np.ascontiguousarray(out, dtype).view(np.uint8).reshape(view.shape)


def _check_reduction(op: str, kind: str, space: str) -> None:
    if kind not in _REDUCTIONS[space].get(op, ()):
        raise UnsupportedPTX(f"bulk reduction .{op} of {kind or 'this type'} in {space} memory")


def _negative(what: str, coords: Sequence[int]) -> NoReturn:
    raise EmulatorFault(
        "tma_bad_coordinates",
        f"{what} at coordinates {tuple(coords)}: a negative one is an illegal instruction"
        " on hardware (NVIDIA H200)",
        coordinates=list(coords),
    )


def bulk_copy(
    source: SharedMemory, source_addr: int, smem: SharedMemory, smem_addr: int, nbytes: int
) -> int:
    """cp.async.bulk from one CTA's shared memory to another's; returns the bytes it completes."""
    _check_bulk(source_addr, smem_addr, nbytes)
    data = source.read_bytes(source_addr, nbytes, "bulk copy from shared memory").copy()
    smem.write_bytes(smem_addr, data, "bulk copy to shared memory")
    return nbytes


def bulk_load(
    gmem: GlobalMemory, gmem_addr: int, smem: SharedMemory, smem_addr: int, nbytes: int
) -> int:
    """cp.async.bulk global to shared; returns the bytes it completes."""
    _check_bulk(gmem_addr, smem_addr, nbytes)
    data = gmem.read_bytes(gmem_addr, nbytes, "bulk copy to shared memory")
    smem.write_bytes(smem_addr, data, "bulk copy to shared memory")
    return nbytes


def bulk_store(
    smem: SharedMemory, smem_addr: int, gmem: GlobalMemory, gmem_addr: int, nbytes: int
) -> int:
    """cp.async.bulk shared to global; returns its bytes."""
    _check_bulk(gmem_addr, smem_addr, nbytes)
    data = smem.read_bytes(smem_addr, nbytes, "bulk copy from shared memory")
    gmem.write_bytes(gmem_addr, data, "bulk copy from shared memory")
    return nbytes


# --- geometry ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
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
def _placed(tmap: TensorMap, coords: tuple[int, ...]) -> _Place:
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
    return _Place(
        shape=tuple(shape[::-1]),
        inside=tuple(inside[::-1]),
        inside_shape=tuple(counts[::-1]),
        strides=tuple(strides[::-1]),
        offset=offset,
        count=int(np.prod(counts, dtype=np.int64)),
    )


def _place(
    tmap: TensorMap, coords: Sequence[int], smem: SharedMemory, smem_addr: int, what: str
) -> _Place:
    """Where the tile lies, its alignment and its shared memory range checked."""
    if len(coords) != tmap.rank:
        raise EmulatorFault(
            "tma_bad_coordinates",
            f"{what} with {len(coords)} coordinates through a tensor map of rank {tmap.rank}",
            coordinates=list(coords),
        )
    if coords[0] * tmap.element_bytes % 16:
        _inner_misaligned(what, coords, 8 * coords[0] * tmap.element_bytes)
    _check_smem(tmap, smem, smem_addr, what)
    return _placed(tmap, tuple(coords))


def _inner_misaligned(what: str, coords: Sequence[int], bits: int) -> NoReturn:
    raise EmulatorFault(
        "tma_misaligned",
        f"{what} at coordinates {tuple(coords)}: the innermost one is at byte"
        f" {bits / 8:g}, which is no multiple of 16 (PTX ISA 9.1 5.5.3.1)",
        coordinates=list(coords),
    )


def _check_smem(tmap: TensorMap, smem: SharedMemory, smem_addr: int, what: str) -> None:
    if smem_addr % SMEM_ALIGNMENT_BYTES:
        raise EmulatorFault(
            "tma_misaligned",
            f"{what}: shared address {smem_addr:#x} is not a multiple of {SMEM_ALIGNMENT_BYTES}",
            address=smem_addr,
        )
    smem.check_range(smem_addr, tmap.tile_bytes, what)


def _global_part(tmap: TensorMap, coords: tuple[int, ...]) -> tuple[TensorMap, tuple[int, ...]]:
    """A map and coordinates for what is read or written in global memory."""
    if tmap.element_bits < 8:
        return tmap.in_bytes, (coords[0] * tmap.element_bits // 8, *coords[1:])
    return tmap, coords


def tile_start(tmap: TensorMap, coords: tuple[int, ...]) -> int | None:
    """Address of the tile's first byte inside the tensor, None if all of it lies outside. (The
    map's own address need not be in memory: maps of ragged tensors start far in front of it.)"""
    place = _placed(*_global_part(tmap, coords))
    return tmap.address + place.offset if place.count else None


def tile_cells(tmap: TensorMap, coords: tuple[int, ...]) -> NDArray[np.int64]:
    """Addresses of the 4-byte cells that a tile covers in global memory."""
    place = _placed(*_global_part(tmap, coords))
    if not place.count:
        return np.zeros(0, np.int64)
    cells = np.arange(0, place.inside_shape[-1] - 3, 4, dtype=np.int64)
    for count, stride in zip(place.inside_shape[-2::-1], place.strides[-2::-1], strict=True):
        cells = (np.arange(count, dtype=np.int64)[:, None] * stride + cells).reshape(-1)
    return cells + (tmap.address + place.offset)


def _global_view(
    tmap: TensorMap, place: _Place, gmem: GlobalMemory, what: str, write: bool
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


def _fill_bytes(tmap: TensorMap) -> bytes | None:
    return _NAN_FILL[tmap.dtype] if tmap.nan_fill else None


def _check_bulk(gmem_addr: int, smem_addr: int, nbytes: int) -> None:
    for name, value in (("global", gmem_addr), ("shared", smem_addr), ("size", nbytes)):
        if value % BULK_ALIGNMENT_BYTES:
            raise EmulatorFault(
                "tma_misaligned",
                f"cp.async.bulk: {name} {value:#x} is not a multiple of {BULK_ALIGNMENT_BYTES}",
                address=value,
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
    pitch = swizzle_bytes or row_chunks * _CHUNK_BYTES
    addrs = (phase + pitch * row + _CHUNK_BYTES * chunk).reshape(-1)
    atoms = swizzle_bytes // atom_bytes
    if atoms > 1:
        addrs ^= (addrs >> 7 & atoms - 1) * atom_bytes
    index = addrs - phase >> 4
    index.flags.writeable = False
    return index


def _chunks_of(tmap: TensorMap, smem_addr: int) -> NDArray[np.int64]:
    row_chunks = tmap.box[0] * tmap.element_bytes // _CHUNK_BYTES
    return swizzled_chunks(
        tmap.tile_bytes // (row_chunks * _CHUNK_BYTES),
        row_chunks,
        smem_addr % _SWIZZLE_PERIOD_BYTES,
        tmap.swizzle_bytes,
        tmap.swizzle_atom_bytes,
    )


def _write_swizzled(
    tmap: TensorMap, data: NDArray[np.uint8], smem: SharedMemory, smem_addr: int
) -> None:
    if not tmap.swizzle_bytes:
        smem.write_bytes(smem_addr, data, "TMA load")
        return
    full_rows = tmap.box[0] * tmap.element_bytes == tmap.swizzle_bytes
    if not full_rows or data.size % _LINE_BYTES:
        smem.write_chunks((smem_addr >> 4) + _chunks_of(tmap, smem_addr), data, "TMA load")
        return
    # Whole lines: the swizzle permutes chunks inside the tile's own range.
    end = smem_addr + data.size
    smem.check_no_mbarrier(smem_addr, end, "TMA load")
    chunks = smem.views[_CHUNK_BYTES]
    chunks[smem_addr >> 4 : end >> 4][_chunks_of(tmap, smem_addr)] = data.view(chunks.dtype)
    smem.window_valid[smem_addr:end] = 1


def _read_swizzled(
    tmap: TensorMap, place: _Place, smem: SharedMemory, smem_addr: int
) -> NDArray[np.uint8]:
    """The tile in its own order; of bytes that are clipped away none need be written."""
    index = (smem_addr >> 4) + _chunks_of(tmap, smem_addr)
    what = "TMA store"
    end = (int(index.max()) << 4) + _CHUNK_BYTES
    smem.check_range(smem_addr, end - smem_addr, what)
    if not smem.all_written(smem_addr, end):
        addrs = ((index << 4)[:, None] + np.arange(_CHUNK_BYTES)).reshape(place.shape)
        needed = addrs[place.inside].reshape(-1)
        missing = needed[smem.window_valid[needed] == 0]
        if missing.size:
            smem.fault_unwritten(np.sort(missing), what)
    return smem.views[_CHUNK_BYTES].take(index).view(np.uint8).reshape(place.shape)
