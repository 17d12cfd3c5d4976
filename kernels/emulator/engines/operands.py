"""Where a matrix operand's 16-byte chunks lie in shared memory, and what they hold.

The layouts are the canonical ones of PTX ISA 9.1 section 9.7.16.3.3, in units of a chunk (T = 8
16-bit elements, 4 of 32 bits or 16 of 8 bits; K is always 32 bytes). With W the chunks of a
swizzled row, k0 = k % 8 and k1 = k / 8,

    K-major, no swizzle   row r, chunk j of K:   16 (r % 8)   + SBO (r / 8) + LBO j
    K-major, swizzled                            16 W (r % 8) + SBO (r / 8) + 16 j
    MN-major, no swizzle  chunk c of MN, k:      SBO c + 16 k0 + LBO k1
    MN-major, swizzled                           16 (c % W) + LBO (c / W) + 16 W k0 + SBO k1

A swizzle then XORs address bits 4.. with bits 7.. of the whole address (Swizzle<log2 W, 4, 3>), as
TMA does when it writes the tile. That is why a start address may be advanced inside a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..findings import UnsupportedPTX
from ..memory.shared import SharedMemory
from .descriptors import SmemDescriptor

CHUNK_BYTES = 16
K_BYTES = 32  # of one MMA
SIXTEEN = np.uint32(16)
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
_BITS: dict[int, np.dtype[Any]] = {n: np.dtype(f"u{n}") for n in (1, 2, 4)}


@dataclass(frozen=True)
class OperandChunks:
    """Chunks of one operand: ``index`` is each one's address / 16, [low, high) their byte range.

    index: int64[rows, 2] for a K-major operand, int64[K, rows / T] for an MN-major one.
    """

    index: NDArray[np.int64]
    low: int
    high: int


def swizzled(addrs: NDArray[np.int64], chunks: int) -> NDArray[np.int64]:
    """Apply the swizzle of rows of ``chunks`` 16-byte chunks (1, 2, 4 or 8) to byte addresses."""
    return addrs ^ ((addrs >> 7 & chunks - 1) << 4)


@lru_cache(maxsize=4096)
def operand_chunks(
    descriptor: int, rows: int, mn_major: bool, element_bytes: int = 2
) -> OperandChunks:
    """Chunks of a (rows, K) operand; rows is M for A and N for B."""
    desc = SmemDescriptor.decode(descriptor)
    width = desc.swizzle_chunks
    leading, stride = desc.leading_bytes, desc.stride_bytes
    if mn_major:
        if element_bytes == 4:
            raise UnsupportedPTX("MN-major operands of 32-bit elements: 32-byte swizzle atoms")
        k = np.arange(K_BYTES // element_bytes)[:, None]
        chunk = np.arange(rows * element_bytes // CHUNK_BYTES)[None, :]
        if width == 1:
            offset = stride * chunk + CHUNK_BYTES * (k % 8) + leading * (k // 8)
        else:
            offset = CHUNK_BYTES * (chunk % width) + leading * (chunk // width)
            offset = offset + CHUNK_BYTES * width * (k % 8) + stride * (k // 8)
    else:
        row = np.arange(rows)[:, None]
        chunk = np.arange(K_BYTES // CHUNK_BYTES)[None, :]
        along_k = leading if width == 1 else CHUNK_BYTES
        offset = CHUNK_BYTES * width * (row % 8) + stride * (row // 8) + along_k * chunk
    addrs = swizzled(desc.start + offset.astype(np.int64), width)
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
    smem: SharedMemory, descriptor: int, rows: int, mn_major: bool, dtype: str, name: str
) -> NDArray[np.float64]:
    """The operand as float64[K, rows], its K by its M or N; exact.

    Raises smem_out_of_bounds, smem_unwritten_read and mbarrier_ordinary_access, naming ``name``.
    """
    chunks = operand_chunks(descriptor, rows, mn_major, ELEMENT_BYTES[dtype])
    return chunk_values(smem, chunks, mn_major, dtype, f"tcgen05.mma reading operand {name}")


def chunk_values(
    smem: SharedMemory, chunks: OperandChunks, mn_major: bool, dtype: str, what: str
) -> NDArray[np.float64]:
    """What the chunks hold, as `smem_operand`; ``what`` names the reader."""
    smem.check_range(chunks.low, chunks.high - chunks.low, what)
    if not smem.all_written(chunks.low, chunks.high):
        _check_chunks(smem, chunks, what)
    bits = smem.views[CHUNK_BYTES].take(chunks.index).view(_BITS[ELEMENT_BYTES[dtype]])
    values = widen(bits, dtype)
    return values if mn_major else values.T


def tmem_operand(words: NDArray[np.uint32], dtype: str) -> NDArray[np.float64]:
    """A from its 8 columns: uint32[8, lanes] to float64[K, lanes].

    A column's word holds successive k from its low bits up.
    """
    nbytes = ELEMENT_BYTES[dtype]
    packed = 4 // nbytes
    parts = np.empty((words.shape[0], packed, words.shape[1]), _BITS[nbytes])
    for k in range(packed):
        parts[:, k] = words >> np.uint32(8 * nbytes * k)
    return widen(parts.reshape(packed * words.shape[0], words.shape[1]), dtype)


def widen(bits: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Bit patterns of an operand type as float64, exactly. Of tf32's 32 bits the lowest 13 are
    ignored."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << SIXTEEN).view(np.float32).astype(np.float64)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    if dtype == "tf32":
        return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return np.asarray(_float8(dtype)[bits], np.float64)


@lru_cache(maxsize=4)
def _float8(dtype: str) -> NDArray[np.float64]:
    """The 256 values of an 8-bit float: e4m3 has no infinities, its NaNs are 0x7f and 0xff."""
    mantissa = {"e4m3": 3, "e5m2": 2}[dtype]
    bias = (1 << 6 - mantissa) - 1
    code = np.arange(256)
    exponent, fraction = code >> mantissa & (1 << 7 - mantissa) - 1, code & (1 << mantissa) - 1
    normal = exponent > 0
    scale = 2.0 ** (np.maximum(exponent, 1) - bias - mantissa)
    values = (fraction + normal * (1 << mantissa)) * scale
    if dtype == "e4m3":
        values[code & 0x7F == 0x7F] = np.nan
    else:
        top = exponent == 31
        values[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    return np.asarray(np.where(code >> 7, -values, values), np.float64)


def _check_chunks(smem: SharedMemory, chunks: OperandChunks, what: str) -> None:
    """The range has gaps: look at the operand's own bytes."""
    addrs = (chunks.index.reshape(-1, 1) * CHUNK_BYTES + np.arange(CHUNK_BYTES)).reshape(-1)
    missing = addrs[smem.window_valid[addrs] == 0]
    if missing.size:
        smem.fault_unwritten(np.sort(missing), what)
