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
from dataclasses import replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault, UnsupportedPTX
from ..memory.global_memory import GlobalMemory
from ..memory.shared import SharedMemory
from ..tensormap import TensorMap
from .reduction import DTYPES, reduction
from .tiles import (
    CHUNK_BYTES,
    Place,
    check_inner,
    check_smem,
    chunks_of,
    global_view,
    place_tile,
    placed,
    read_swizzled,
    write_swizzled,
)

BULK_ALIGNMENT_BYTES = 16  # of cp.async.bulk: both addresses and the size
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
    place = place_tile(tmap, coords, smem, smem_addr, "TMA load")
    write_swizzled(tmap, tile_data(tmap, place, gmem), smem, smem_addr)
    return tmap.tx_bytes


def tile_data(tmap: TensorMap, place: Place, gmem: GlobalMemory) -> NDArray[np.uint8]:
    """A tile's bytes in its own order, filled where it lies outside the tensor."""
    if tmap.tf32_rounding and (tmap.nan_fill or tmap.dtype != "float32"):
        raise UnsupportedPTX("TMA load that rounds to tf32, with NaN fill or flushed subnormals")
    staging = place.staging(_fill_bytes(tmap))
    if place.count:
        source = global_view(tmap, place, gmem, "TMA load", write=False)
        staging[place.inside] = _as_tf32(source) if tmap.tf32_rounding else source
    return staging.reshape(-1)


def _as_tf32(source: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """float32 bytes rounded to tf32 as an H200 does: to nearest, ties to even, every NaN the same,
    13 low bits zero."""
    bits = np.ascontiguousarray(source).view(np.uint32)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    odd = bits >> np.uint32(13) & np.uint32(1)
    rounded = (bits + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)
    return np.where(is_nan, np.uint32(0x7FFFE000), rounded).view(np.uint8).reshape(source.shape)


def as_bytes(
    tmap: TensorMap, coords: Sequence[int], what: str
) -> tuple[TensorMap, tuple[int, ...]]:
    """A map and coordinates, as those of bytes where elements are smaller and not padded.

    Raises tma_misaligned, and `UnsupportedPTX` for padded elements.
    """
    check_inner(tmap, coords, what)
    if tmap.element_bits >= 8:
        return tmap, tuple(coords)
    if tmap.smem_element_bits != tmap.element_bits:
        raise UnsupportedPTX(f"{what} through a tensor map of {tmap.dtype} elements")
    return tmap.in_bytes, (coords[0] * tmap.element_bits // 8, *coords[1:])


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
        return load_tile(*as_bytes(tmap, coords, "TMA load"), gmem, smem, smem_addr)
    check_inner(tmap, coords, "TMA load")
    check_smem(tmap, smem, smem_addr, "TMA load")
    place = placed(tmap.in_bytes, (coords[0] * tmap.element_bits // 8, *coords[1:]))
    data = tile_data(tmap.in_bytes, place, gmem)
    kept = 2 * tmap.element_bits
    spread = np.full((data.size // kept, CHUNK_BYTES), _PADDING, np.uint8)
    spread[:, :kept] = data.reshape(-1, kept)
    rows = replace(tmap, dtype="uint8", dims=(tmap.box[0], *tmap.dims[1:]))
    write_swizzled(rows, spread.reshape(-1), smem, smem_addr)
    index = (smem_addr >> 4) + chunks_of(rows, smem_addr)
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
        tmap, coords = as_bytes(tmap, coords, "TMA store")
    place = place_tile(tmap, coords, smem, smem_addr, "TMA store")
    if min(coords) < 0:
        _negative("TMA store", coords)
    if place.count:
        tile = read_swizzled(tmap, place, smem, smem_addr)
        global_view(tmap, place, gmem, "TMA store", write=True)[...] = tile[place.inside]
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
    place = place_tile(tmap, coords, smem, smem_addr, "TMA reduction")
    if min(coords) < 0:
        _negative("TMA reduction", coords)
    kind = _REDUCED_AS.get(tmap.dtype, "")
    if op in ("and", "or", "xor") and kind[:1] in "us":
        kind = f"b{kind[1:]}"
    _check_reduction(op, kind, "global")
    if place.count:
        tile = read_swizzled(tmap, place, smem, smem_addr)
        _reduce_into(
            global_view(tmap, place, gmem, "TMA reduction", write=True),
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
