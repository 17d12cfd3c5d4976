"""Where a matrix operand's 16-byte chunks lie in shared memory, and what they hold.

The layouts are the canonical ones of PTX ISA 9.1 section 9.7.16.3.3, in units of a chunk (T = 8
16-bit elements, 4 of 32 bits, 16 of 8 bits; `formats` has the others). K is 32 bytes for most
MMAs, 48 with K = 96 and 64 for the B of a sparse one. With W the chunks of a swizzled row,
k0 = k % 8 and k1 = k / 8,

    K-major, no swizzle   row r, chunk j of K:   16 (r % 8)   + SBO (r / 8) + LBO j
    K-major, swizzled                            16 W (r % 8) + SBO (r / 8) + 16 j
    MN-major, no swizzle  chunk c of MN, k:      SBO c + 16 k0 + LBO k1
    MN-major, swizzled                           16 (c % W) + LBO (c / W) + 16 W k0 + SBO k1

A swizzle then XORs address bits 4.. with bits 7.. of the whole address (Swizzle<log2 W, 4, 3>), as
TMA does when it writes the tile. That is why a start address may be advanced inside a row. With
32-byte atoms (128-byte rows, MN-major operands of 32 bits) k0 = k % 4, k1 = k / 4, and bits 5 and 6
are XORed with bits 7 and 8. With K = 96 a K-major row of 48 bytes may run over its 128-byte row; an
absolute leading dimension address says where it goes on (section 9.7.16.3.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from ..memory.shared import SharedMemory
from . import formats
from .descriptors import SmemDescriptor
from .formats import CHUNK_BYTES, ELEMENT_BYTES

K_BYTES = 32  # of most MMAs
# Bytes of a chunk that hold data, where not all do.
_DATA_BYTES = {"e2m1": 8, "e2m3": 12, "e3m2": 12}


@dataclass(frozen=True)
class OperandChunks:
    """Chunks of one operand: ``index`` is each one's address / 16, [low, high) their byte range.

    index: int64[rows, 2] for a K-major operand, int64[K, rows / T] for an MN-major one.
    """

    index: NDArray[np.int64]
    low: int
    high: int

    @cached_property
    def address(self) -> int:
        """Of ``index``, for native code; ``index`` is C-contiguous."""
        return self.index.ctypes.data


def swizzled(
    addrs: NDArray[np.int64], chunks: int, atom_bytes: int = CHUNK_BYTES
) -> NDArray[np.int64]:
    """Apply the swizzle of rows of ``chunks`` 16-byte chunks (1, 2, 4 or 8) to byte addresses."""
    per_atom = atom_bytes // CHUNK_BYTES
    return addrs ^ (addrs >> 7 & chunks // per_atom - 1) * atom_bytes


@lru_cache(maxsize=4096)
def operand_chunks(
    descriptor: int, rows: int, mn_major: bool, element_bytes: int = 2, k_bytes: int = K_BYTES
) -> OperandChunks:
    """Chunks of a (rows, K) operand; rows is M for A and N for B, K is ``k_bytes`` of elements.

    Raises `EmulatorFault` mma_bad_descriptor where type, major-ness and swizzle do not go together
    (PTX ISA 9.1 table 54).
    """
    desc = SmemDescriptor.decode(descriptor)
    width = desc.swizzle_chunks
    wide_atoms = desc.atom_bytes != CHUNK_BYTES
    if wide_atoms != (mn_major and element_bytes == 4):
        raise EmulatorFault(
            "mma_bad_descriptor",
            f"shared memory descriptor {descriptor:#018x}: {8 * element_bytes}-bit elements,"
            f" {'MN' if mn_major else 'K'}-major, with a {16 * width}-byte swizzle of"
            f" {desc.atom_bytes}-byte atoms; MN-major 32-bit elements, and they alone, take the"
            " 128-byte swizzle of 32-byte atoms",
            descriptor=f"{descriptor:#018x}",
        )
    if desc.absolute and mn_major:
        raise EmulatorFault(
            "mma_bad_descriptor",
            f"shared memory descriptor {descriptor:#018x}: an absolute leading dimension address"
            " (bit 52) goes with K-major operands",
            descriptor=f"{descriptor:#018x}",
        )
    leading, stride = desc.leading_bytes, desc.stride_bytes
    if mn_major:
        k = np.arange(k_bytes // element_bytes)[:, None]
        chunk = np.arange(rows * element_bytes // CHUNK_BYTES)[None, :]
        if width == 1:
            offset = stride * chunk + CHUNK_BYTES * (k % 8) + leading * (k // 8)
        else:
            depth = 4 if wide_atoms else 8
            offset = CHUNK_BYTES * (chunk % width) + leading * (chunk // width)
            offset = offset + CHUNK_BYTES * width * (k % depth) + stride * (k // depth)
    else:
        row = np.arange(rows)[:, None]
        chunk = np.arange(k_bytes // CHUNK_BYTES)[None, :]
        along_k = leading if width == 1 else CHUNK_BYTES
        offset = CHUNK_BYTES * width * (row % 8) + stride * (row // 8) + along_k * chunk
        if desc.absolute:
            beyond = (desc.start >> 4 & width - 1) + chunk >= width
            elsewhere = leading - desc.start // (CHUNK_BYTES * width) * (CHUNK_BYTES * width)
            offset = np.where(beyond, offset + elsewhere - CHUNK_BYTES * width, offset)
    addrs = swizzled(desc.start + offset.astype(np.int64), width, desc.atom_bytes)
    index = np.ascontiguousarray(addrs >> 4)
    index.flags.writeable = False
    return OperandChunks(index, int(addrs.min()), int(addrs.max()) + CHUNK_BYTES)


def part_of(chunks: OperandChunks, mn_major: bool, first: int, rows: int) -> OperandChunks:
    """The chunks of some rows (a multiple of 8 of them) of an operand of 16-bit elements."""
    if mn_major:
        low = first // 8
        index = np.ascontiguousarray(chunks.index[:, low : low + rows // 8])
    else:
        index = np.ascontiguousarray(chunks.index[first : first + rows])
    index.flags.writeable = False
    low, high = int(index.min()) * CHUNK_BYTES, int(index.max()) * CHUNK_BYTES + CHUNK_BYTES
    return OperandChunks(index, low, high)


def smem_operand(
    smem: SharedMemory,
    descriptor: int,
    rows: int,
    mn_major: bool,
    dtype: str,
    name: str,
    k_bytes: int = K_BYTES,
) -> NDArray[np.float64]:
    """The operand as float64[K, rows], its K by its M or N; exact.

    Raises smem_out_of_bounds, smem_unwritten_read and mbarrier_ordinary_access, naming ``name``.
    """
    chunks = operand_chunks(descriptor, rows, mn_major, ELEMENT_BYTES[dtype], k_bytes)
    return chunk_values(smem, chunks, mn_major, dtype, f"tcgen05.mma reading operand {name}")


def chunk_values(
    smem: SharedMemory, chunks: OperandChunks, mn_major: bool, dtype: str, what: str
) -> NDArray[np.float64]:
    """What the chunks hold, as `smem_operand`; ``what`` names the reader."""
    raw = raw_chunks(smem, chunks, what, _DATA_BYTES.get(dtype, CHUNK_BYTES))
    values = formats.chunk_values(raw, dtype)
    return values if mn_major else values.T


def raw_chunks(
    smem: SharedMemory, chunks: OperandChunks, what: str, data_bytes: int = CHUNK_BYTES
) -> NDArray[np.void]:
    """The chunks' bytes, of which the first ``data_bytes`` of each must have been written."""
    smem.check_range(chunks.low, chunks.high - chunks.low, what)
    if not smem.all_written(chunks.low, chunks.high):
        check_chunks(smem, chunks, what, data_bytes)
    return smem.views[CHUNK_BYTES].take(chunks.index)


def tmem_operand(words: NDArray[np.uint32], dtype: str) -> NDArray[np.float64]:
    """A from its columns: uint32[columns, lanes] to float64[K, lanes].

    A column's word holds successive k from its low bits up.
    """
    nbytes = ELEMENT_BYTES[dtype]
    packed = 4 // nbytes
    parts = np.empty((words.shape[0], packed, words.shape[1]), formats.UNSIGNED[nbytes])
    for k in range(packed):
        parts[:, k] = words >> np.uint32(8 * nbytes * k)
    elements = parts.reshape(packed * words.shape[0], words.shape[1])
    return formats.byte_values(elements, dtype) if nbytes == 1 else formats.widen(elements, dtype)


def check_chunks(
    smem: SharedMemory, chunks: OperandChunks, what: str, data_bytes: int = CHUNK_BYTES
) -> None:
    """Raise smem_unwritten_read unless the operand's own bytes were written (of each chunk the
    first ``data_bytes``), whatever lies between them."""
    addrs = (chunks.index.reshape(-1, 1) * CHUNK_BYTES + np.arange(data_bytes)).reshape(-1)
    missing = addrs[smem.window_valid[addrs] == 0]
    if missing.size:
        smem.fault_unwritten(np.sort(missing), what)
