"""Operands and products of the tensor core through native code (`native.matmul`).

Operands of 16-bit types are gathered and widened in one call; those of other types come as arrays.
Either way they end up as float64 in buffers that serve again and again: an operand is good until
the next one of the same name is loaded.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..memory.shared import SharedMemory
from ..memory.tensor import LANES, TensorMemory
from ..native.matmul import ACCUMULATE, NEGATE, TILE_ROWS, MmaPlan, functions
from .formats import ELEMENT_BYTES
from .operands import K_BYTES, OperandChunks, check_chunks, chunk_values

_DEPTH = K_BYTES // 2  # of 16-bit types in Tensor Memory
_LARGEST = 128 * 256  # elements of an operand: K by N
_CHUNK = 8  # 16-bit elements
_FLOAT64, _CELL = 8, 4  # bytes


class Packed(NamedTuple):
    """An operand in float64: its address, its depth, and how far apart (in elements) its neighbours
    along K and along M or N are. A's rows are always side by side."""

    address: int
    depth: int
    along_k: int
    along_rows: int

    def rows_from(self, first: int) -> Packed:
        """The operand without its first rows."""
        return self._replace(address=self.address + _FLOAT64 * first * self.along_rows)


@lru_cache(maxsize=8)
def _buffer(name: str) -> tuple[NDArray[np.float64], int]:
    """The buffer of the operand ``name``, and its address, which is a multiple of 64."""
    raw = np.empty(_LARGEST + _FLOAT64, np.float64)
    array = raw[-raw.ctypes.data % 64 // _FLOAT64 :]
    return array, array.ctypes.data


def packed(values: NDArray[np.float64], name: str) -> Packed:
    """Values by k, float64[K, rows], copied into the buffer ``name``."""
    array, address = _buffer(name)
    depth, rows = values.shape
    array[: values.size].reshape(depth, rows)[...] = values
    return Packed(address, depth, rows, 1)


def smem_packed(
    smem: SharedMemory,
    chunks: OperandChunks,
    mn_major: bool,
    dtype: str,
    name: str,
    what: str,
) -> Packed:
    """An operand out of shared memory; ``name`` starts with "A" or "B". Raises as
    `operands.chunk_values`; ``what`` names the reader."""
    if ELEMENT_BYTES[dtype] != 2:
        with np.errstate(all="ignore"):  # NaN and infinity are values here
            return packed(chunk_values(smem, chunks, mn_major, dtype, what), name)
    smem.check_range(chunks.low, chunks.high - chunks.low, what)
    _, address = _buffer(name)
    native, (lines, across) = functions().functions, chunks.index.shape
    places = (smem.window_address, smem.flags_address, chunks.address, address)
    if name[0] == "A" and not mn_major:
        written = native[f"gather_turned_{dtype}"](*places, lines, across)
        out = Packed(address, _CHUNK * across, lines, 1)
    else:
        written = native[f"gather_{dtype}"](*places, lines * across)
        other = _CHUNK * across
        out = Packed(address, lines, other, 1) if mn_major else Packed(address, other, 1, other)
    if not written:
        check_chunks(smem, chunks, what)
    return out


def tmem_packed(
    tmem: TensorMemory, column: int, rows: int, lane: int, dtype: str, name: str
) -> Packed:
    """A of a 16-bit type out of 8 columns of Tensor Memory. rows: 128, or 64 of them, 16 in each
    warp's lanes from ``lane`` on."""
    _, address = _buffer(name)
    source = tmem.address + _CELL * (column * LANES + lane)
    words = functions().functions[f"words_{dtype}"]
    words(source, address, rows // TILE_ROWS, block_distance(rows))
    return Packed(address, _DEPTH, rows, 1)


def block_distance(rows: int) -> int:
    """Lanes from one 16 rows of a matrix to the next: layout F leaves every other 16 lanes out."""
    return TILE_ROWS if rows == LANES else 2 * TILE_ROWS


def multiply_into(
    tmem: TensorMemory,
    at: tuple[int, int, int],
    operands: tuple[Packed, Packed],
    shape: tuple[int, int],
    *,
    accumulate: bool,
    negate: bool,
) -> None:
    """D = +-(A B) (+ D) in float32 cells. at: D's first column and lane, and the lanes from one 16
    rows to the next; shape: (M, N)."""
    (a, b), (column, lane, distance) = operands, at
    functions().functions["product_float32"](
        a.address,
        b.address,
        tmem.address + _CELL * (column * LANES + lane),
        shape[0] // TILE_ROWS,
        shape[1],
        a.depth,
        a.along_k,
        b.along_k,
        b.along_rows,
        LANES,
        distance,
        NEGATE * negate | ACCUMULATE * accumulate,
    )


def product(operands: tuple[Packed, Packed], out: NDArray[np.float64]) -> NDArray[np.float64]:
    """D^T = (A B)^T into ``out``, float64[N, M], whose rows may lie apart."""
    a, b = operands
    n, m = out.shape
    functions().functions["product_float64"](
        a.address,
        b.address,
        out.ctypes.data,
        m // TILE_ROWS,
        n,
        a.depth,
        a.along_k,
        b.along_k,
        b.along_rows,
        out.strides[0] // _FLOAT64,
        TILE_ROWS,
        0,
    )
    return out


def mma_plan(
    a: OperandChunks | int,
    b: OperandChunks,
    shape: tuple[int, int],
    mn_major: tuple[bool, bool],
    column: int,
    lane: int,
) -> MmaPlan:
    """The plan of an MMA of 16-bit types. a: its chunks, or its column of Tensor Memory; shape:
    (M, N); mn_major: A, B; column, lane: where D starts, and A in Tensor Memory."""
    m, n = shape
    blocks = m // TILE_ROWS
    if isinstance(a, int):
        source, count, other = a * LANES + lane, blocks, block_distance(m)
    else:
        lines, across = a.index.shape
        source, count, other = a.address, lines * across if mn_major[0] else lines, across
    b_k, b_n = (n, 1) if mn_major[1] else (1, _DEPTH)
    return MmaPlan(
        a=source,
        b=b.address,
        a_buffer=_buffer("A")[1],
        b_buffer=_buffer("B")[1],
        a_count=count,
        a_other=other,
        b_count=b.index.size,
        d=column * LANES + lane,
        row_blocks=blocks,
        columns=n,
        depth=_DEPTH,
        a_k=m,
        b_k=b_k,
        b_n=b_n,
        d_block=block_distance(m),
        flags=0,
    )
