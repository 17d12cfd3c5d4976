"""Sparse A: metadata in Tensor Memory, and A with its zeros put back (PTX ISA 9.1 section
9.7.16.10.8).

Each chunk of A's row has a 4-bit index, chunks of growing k from the low bits up; half of the
chunk's elements are stored. The index holds two places, each of the 2 bits, low bits first:

    f16, f8f6f4, mxf8f6f4, i8   4 elements, places of the two that are stored
    mxf4, mxf4nvf4              8 elements, places of the two pairs that are stored
    tf32                        2 elements, 0b0100 if the first is stored, 0b1110 the second

The layouts with 128 rows a CTA are CUTLASS's (tmem_e_frg, cute/atom/mma_traits_sm100_frag.hpp): 8-
and 4-bit types have 64 bits of row r in lane r of two columns; the others' 32 bits lie in one
column, those of rows r and r + 8 (r % 16 < 8) side by side: the first four chunks of both in lane
r % 8 + 16 (r / 16), the last four in the lane 8 further on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault, UnsupportedPTX
from ..memory.tensor import EVERY_LANE, LANES, TensorMemory, TmemAddress

_NIBBLES = 8  # of a word
_HALF_WORD_KINDS = ("f16", "tf32")
_PAIR_KINDS = ("mxf4", "mxf4nvf4")
# The only meaningful values of an index.
_TF32_PLACES = {0b0100: 0, 0b1110: 1}
_PLACES = frozenset({0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b0110, 0b1110})
_WHAT = "tcgen05.mma.sp reading the sparsity metadata"


@dataclass(frozen=True)
class Metadata:
    """Where the metadata of 128 rows are. taddr: Tensor Memory address; kind: of the MMA."""

    taddr: int
    selector: int
    kind: str

    @property
    def columns(self) -> tuple[int, int]:
        """First column, and how many."""
        return self.taddr & 0xFFFF, 1 if self.kind in _HALF_WORD_KINDS else 2

    def indices(self, tmem: TensorMemory) -> NDArray[np.uint8]:
        """Index of every chunk, uint8[chunks, 128]. Raises tmem_lane_access, tmem_unwritten_read,
        mma_bad_metadata, and `UnsupportedPTX` for a sparsity selector other than 0."""
        if self.selector:
            raise UnsupportedPTX(f"tcgen05.mma.sp: sparsity selector {self.selector}")
        if self.taddr >> 16:
            raise EmulatorFault(
                "tmem_lane_access",
                f"{_WHAT} at {TmemAddress.decode(self.taddr)}: the lane must be 0",
                address=self.taddr,
                operand="metadata",
            )
        column, count = self.columns
        tmem.check_columns(column, count, _WHAT)
        tmem.check_written(column, count, EVERY_LANE, _WHAT)
        words = tmem.data[column : column + count]
        shifts = np.arange(0, 4 * _NIBBLES, 4, dtype=np.uint32)[None, :, None]
        nibbles = (words[:, None] >> shifts & np.uint32(15)).astype(np.uint8)
        if self.kind in _HALF_WORD_KINDS:
            row = np.arange(LANES)[None, :]
            chunk = np.arange(_NIBBLES)[:, None]
            lane = row % 8 + row // 16 * 16 + chunk // 4 * 8
            found = np.asarray(nibbles[0][chunk % 4 + row // 8 % 2 * 4, lane], np.uint8)
        else:
            found = nibbles.reshape(-1, LANES)
        self._check(found)
        return found

    def _check(self, found: NDArray[np.uint8]) -> None:
        good = list(_TF32_PLACES if self.kind == "tf32" else _PLACES)
        bad = ~np.isin(found, good)
        if bad.any():
            chunk, row = (int(x) for x in np.argwhere(bad)[0])
            raise EmulatorFault(
                "mma_bad_metadata",
                f"{_WHAT}: the index of row {row}, chunk {chunk} is"
                f" {int(found[chunk, row]):#06b}; .kind::{self.kind} knows"
                f" {', '.join(f'{x:#06b}' for x in sorted(good))}",
                row=row,
                chunk=chunk,
            )


def expanded(
    stored: NDArray[np.float64], indices: NDArray[np.uint8], kind: str
) -> NDArray[np.float64]:
    """A as float64[K, rows] from its stored half, float64[K / 2, rows]."""
    half, rows = stored.shape
    whole = np.zeros((2 * half, rows), np.float64)
    every = np.arange(rows)[None, :]
    chunks = np.arange(len(indices))[:, None]
    if kind == "tf32":
        whole[2 * chunks + (indices == 0b1110), every] = stored
        return whole
    width = 2 if kind in _PAIR_KINDS else 1  # elements that move together
    for which in range(2):
        place = (indices >> np.uint8(2 * which) & np.uint8(3)).astype(np.int64)
        for k in range(width):
            source = (2 * chunks + which) * width + k
            whole[(4 * chunks + place) * width + k, every] = stored[source[:, 0]]
    return whole
