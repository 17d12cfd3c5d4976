"""Scale factors of block-scaled MMAs in Tensor Memory (PTX ISA 9.1 section 9.7.16.10.7).

The factors of row r of A (or column r of B) lie in lane r % 32, column r / 32, one a byte, those of
successive blocks of K in successive bytes. Four bytes make a word; what does not fit (K = 96) goes
on in the words 4 columns to the right, 8 with more than 128 rows, where the next copy of 128 rows
by 4 factors puts them. Each of the four warps' 32 lanes holds a copy. With M = 128 on two CTAs
lanes 0-63 hold the factors of B's first N / 2 columns, lanes 64-127 the others' (CUTLASS's
tmem_sf_frg, cute/atom/mma_traits_sm100_frag.hpp).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from ..memory.tensor import LANES, WARP_LANES, TensorMemory, TmemAddress
from .formats import scale_values

_WARPS = LANES // WARP_LANES
_WORD_BYTES = 4
_ATOM_ROWS = 128  # whose factors a tcgen05.cp.32x128b brings
_LANE_BITS = 0x3FFF  # of an address: CUTLASS puts the byte in bits 31:30, which the lane never has


@dataclass(frozen=True)
class ScaleFactors:
    """Where one operand's factors are. taddr: Tensor Memory address; first_byte: of the first
    block in a word; rows: of A, or columns of B; blocks: of K; name: "A" or "B"."""

    taddr: int
    first_byte: int
    rows: int
    blocks: int
    name: str

    @property
    def words(self) -> int:
        """Words that the factors of a row span."""
        return -(-(self.first_byte + self.blocks) // _WORD_BYTES)

    def columns(self) -> list[tuple[int, int]]:
        """(first column, number of columns) of each word's cells."""
        column = self.taddr & 0xFFFF
        apart = _WORD_BYTES * -(-self.rows // _ATOM_ROWS)
        return [(column + apart * k, -(-self.rows // WARP_LANES)) for k in range(self.words)]

    def _used(self, word: int) -> np.uint32:
        """Mask of the bytes of a word that hold factors."""
        ends = (self.first_byte, self.first_byte + self.blocks)
        low, high = (min(max(end - _WORD_BYTES * word, 0), _WORD_BYTES) for end in ends)
        return np.uint32((1 << 8 * high) - (1 << 8 * low))

    def read(self, tmem: TensorMemory, warps: tuple[int, ...], dtype: str) -> NDArray[np.float64]:
        """float64[blocks, rows], from the copies of ``warps``.

        Raises tmem_lane_access, tmem_unwritten_read and so on, and mma_scale_not_duplicated where
        the copies differ.
        """
        what = f"tcgen05.mma reading the scale factors of {self.name}"
        if self.taddr >> 16 & _LANE_BITS:
            raise EmulatorFault(
                "tmem_lane_access",
                f"{what} at {TmemAddress.decode(self.taddr & 0x3FFFFFFF)}: the lane must be 0",
                address=self.taddr,
                operand=f"scale {self.name}",
            )
        words = np.stack(
            [self._words(tmem, warps, k, what) for k in range(self.words)]
        )  # uint32[words, rows]
        codes = words.view(np.uint8).reshape(self.words, self.rows, _WORD_BYTES)
        factors = codes.transpose(0, 2, 1).reshape(self.words * _WORD_BYTES, self.rows)
        return scale_values(factors[self.first_byte : self.first_byte + self.blocks], dtype)

    def _words(
        self, tmem: TensorMemory, warps: tuple[int, ...], word: int, what: str
    ) -> NDArray[np.uint32]:
        """One word of each row, checked; bytes that are not used are zero."""
        column, count = self.columns()[word]
        tmem.check_columns(column, count, what)
        left = self.rows
        for k in range(count):
            lanes = np.zeros(_WARPS, np.uint32)
            lanes[list(warps)] = (1 << min(left, WARP_LANES)) - 1
            tmem.check_written(column + k, 1, lanes, what)
            left -= WARP_LANES
        copies = tmem.data[column : column + count].reshape(count, _WARPS, WARP_LANES)
        copies = copies.transpose(1, 0, 2).reshape(_WARPS, -1)[
            list(warps), : self.rows
        ] & self._used(word)
        differ = (copies != copies[0]).any(0)
        if differ.any():
            row = int(np.flatnonzero(differ)[0])
            raise EmulatorFault(
                "mma_scale_not_duplicated",
                f"{what}: the factors of row {row} (lane {row % WARP_LANES} of each warp's lanes,"
                f" column {column + row // WARP_LANES}) are not the same for warps"
                f" {', '.join(map(str, warps))}; every 32 lanes must hold a copy, as"
                " tcgen05.cp.32x128b.warpx4 makes",
                column=column + row // WARP_LANES,
                lane=row % WARP_LANES,
            )
        return np.ascontiguousarray(copies[0])
