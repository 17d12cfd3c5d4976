"""Tensor Memory of one CTA: 128 lanes by 512 columns of 32-bit cells (PTX ISA 9.1, 9.7.16.1).

The model gives a CTA the SM's whole Tensor Memory. An allocation that does not fit is reported as
blocked, as it would be on hardware until another allocation is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault, UnsupportedPTX

LANES = 128
COLUMNS = 512
WARP_LANES = 32
ALLOC_UNIT_COLUMNS = 32
POISON_CELL = 0xFFFFFFFF  # a NaN as f32, and two NaNs as f16 or bf16
ALL_LANES = np.uint32(0xFFFFFFFF)  # of one warp
EVERY_LANE = np.full(LANES // WARP_LANES, ALL_LANES, np.uint32)  # of the four
EVERY_LANE.flags.writeable = False


@dataclass(frozen=True)
class TmemAddress:
    """A Tensor Memory address: lane in bits 31:16, column in bits 15:0."""

    lane: int
    column: int

    @classmethod
    def decode(cls, taddr: int) -> TmemAddress:
        return cls((taddr >> 16) & 0xFFFF, taddr & 0xFFFF)

    def __str__(self) -> str:
        return f"{self.lane << 16 | self.column:#010x} (lane {self.lane}, column {self.column})"


class TensorMemory:
    """Cells, which of them were written, and the allocations that cover them.

    data: uint32[512, 128], column-major: the 128 lanes of one column lie side by side.
    valid: uint32[4, 512]; bit b of ``valid[w, c]`` says that lane ``32 * w + b`` of column c was
    written since the column was allocated.
    """

    def __init__(self) -> None:
        self.data = np.full((COLUMNS, LANES), POISON_CELL, np.uint32)
        self.valid = np.zeros((LANES // WARP_LANES, COLUMNS), np.uint32)
        self._cells = self.data.reshape(-1)
        self.address = self.data.ctypes.data  # for native code
        self._allocations: dict[int, int] = {}  # first column -> number of columns
        self._freed: set[tuple[int, int]] = set()
        self._allocated_units = 0  # bit u: columns 32u..32u+31 are allocated now
        self._ever_units = 0  # bit u: they have been allocated at some time
        self._last_alloc_columns: int | None = None
        self._relinquished = False

    # --- allocation (PTX ISA 9.1 section 9.7.16.7) --------------------------------------------

    def alloc(self, ncols: int) -> int | None:
        """First column of ``ncols`` new ones, or None where the warp blocks for want of space.

        Raises tmem_alloc_bad_size (not a power of two in [32, 512], or more than the CTA's last
        allocation) and tmem_alloc_after_relinquish.
        """
        self.check_alloc(ncols)
        return self.take(ncols, self.room(ncols))

    def check_alloc(self, ncols: int) -> None:
        """Raise unless the CTA may ask for ``ncols`` columns; see `alloc`."""
        if self._relinquished:
            raise EmulatorFault(
                "tmem_alloc_after_relinquish",
                f"tcgen05.alloc of {ncols} columns after tcgen05.relinquish_alloc_permit: the CTA"
                " has"
                " given up the right to allocate",
                columns=ncols,
            )
        if not ALLOC_UNIT_COLUMNS <= ncols <= COLUMNS or ncols & (ncols - 1):
            raise EmulatorFault(
                "tmem_alloc_bad_size",
                f"tcgen05.alloc of {ncols} columns: the number must be a power of two from 32 to"
                " 512",
                columns=ncols,
            )
        if self._last_alloc_columns is not None and ncols > self._last_alloc_columns:
            raise EmulatorFault(
                "tmem_alloc_bad_size",
                f"tcgen05.alloc of {ncols} columns after one of {self._last_alloc_columns}:"
                " within a CTA"
                " the number of columns must not increase from one allocation to the next",
                columns=ncols,
                previous=self._last_alloc_columns,
            )

    def room(self, ncols: int) -> list[int]:
        """First columns where ``ncols`` columns are free, lowest first."""
        units = ncols // ALLOC_UNIT_COLUMNS
        mask = (1 << units) - 1
        return [
            first * ALLOC_UNIT_COLUMNS
            for first in range(COLUMNS // ALLOC_UNIT_COLUMNS - units + 1)
            if not self._allocated_units & mask << first
        ]

    def take(self, ncols: int, columns: Sequence[int]) -> int | None:
        """Allocate at the first of ``columns``; None where there is none."""
        if not columns:
            return None
        column = columns[0]
        mask = (1 << ncols // ALLOC_UNIT_COLUMNS) - 1 << column // ALLOC_UNIT_COLUMNS
        self._allocated_units |= mask
        self._ever_units |= mask
        self._allocations[column] = ncols
        self._last_alloc_columns = ncols
        self.valid[:, column : column + ncols] = 0
        self.data[column : column + ncols] = POISON_CELL
        return column

    def dealloc(self, taddr: int, ncols: int) -> None:
        """Free an allocation by the address and size it was made with.

        Raises tmem_double_dealloc, or tmem_dealloc_mismatch for anything that no allocation made.
        """
        address = TmemAddress.decode(taddr)
        column = address.column
        if address.lane == 0 and self._allocations.get(column) == ncols:
            del self._allocations[column]
            self._freed.add((column, ncols))
            units = ncols // ALLOC_UNIT_COLUMNS
            self._allocated_units &= ~((1 << units) - 1 << column // ALLOC_UNIT_COLUMNS)
            return
        twice = address.lane == 0 and (column, ncols) in self._freed
        raise EmulatorFault(
            "tmem_double_dealloc" if twice else "tmem_dealloc_mismatch",
            f"tcgen05.dealloc of {ncols} columns at {address}"
            + (", which were freed before" if twice else " names no allocation")
            + f"; {self._describe_allocations()}",
            address=taddr,
            columns=ncols,
        )

    def relinquish(self) -> None:
        """The CTA gives up its right to allocate."""
        self._relinquished = True

    @property
    def allocations(self) -> dict[int, int]:
        """Live allocations: first column -> number of columns."""
        return dict(self._allocations)

    def check_freed(self) -> None:
        """At CTA exit: raise tmem_not_freed unless every allocation was freed."""
        if self._allocations:
            raise EmulatorFault(
                "tmem_not_freed",
                f"the CTA exits with Tensor Memory allocated: {self._describe_allocations()}."
                " All of it must be freed with tcgen05.dealloc",
                allocations=[list(item) for item in sorted(self._allocations.items())],
            )

    # --- tcgen05.ld and tcgen05.st (PTX ISA 9.1 section 9.7.16.8) -----------------------------

    def ld(
        self,
        shape: str,
        num: int,
        taddr: int,
        warp_in_group: int,
        pack16: bool = False,
        half_split_off: int | None = None,
    ) -> NDArray[np.uint32]:
        """Load a warp's registers.

        shape: "32x32b", "16x64b", "16x128b", "16x256b" or "16x32bx2"; num: its repetitions;
        warp_in_group: warp id modulo 4; pack16: ``.pack::16b``; half_split_off: columns from the
        first to the second half, of 16x32bx2 only.
        Returns uint32[registers, 32]. Raises tmem_* faults: lifetime, bounds, lanes, unwritten.
        """
        if shape == "32x32b" and not pack16:
            column = self._check_warp_access(taddr, num, warp_in_group, WARP_LANES, "tcgen05.ld")
            written = self.valid[warp_in_group, column : column + num]
            if written.tobytes() != b"\xff" * (4 * num):
                self._fault_unwritten(warp_in_group, column, num, ALL_LANES, "tcgen05.ld")
            first = WARP_LANES * warp_in_group
            return self.data[column : column + num, first : first + WARP_LANES].copy()
        path = datapath(shape, num, pack16, half_split_off)
        column = self._check_warp_access(
            taddr, path.columns, warp_in_group, path.lanes, "tcgen05.ld"
        )
        lanes = _lane_bits(taddr >> 16, path.lanes)
        for begin, end in path.column_ranges:
            written = self.valid[warp_in_group, column + begin : column + end]
            if not ((written & lanes) == lanes).all():
                self._fault_unwritten(
                    warp_in_group, column + begin, end - begin, lanes, "tcgen05.ld"
                )
        base = column * LANES + (taddr >> 16)
        low = self._cells.take(path.cells + base)
        if not pack16:
            return low
        high = self._cells.take(path.cells + (base + LANES))
        return (low & np.uint32(0xFFFF)) | (high << np.uint32(16))

    def st(
        self,
        shape: str,
        num: int,
        taddr: int,
        warp_in_group: int,
        regs: NDArray[np.uint32],
        unpack16: bool = False,
        half_split_off: int | None = None,
    ) -> None:
        """Store a warp's registers, uint32[registers, 32]; the other arguments as in `ld`.

        With ``.unpack::16b`` each 16-bit half goes to the low half of a cell of its own. The ISA
        leaves the cell's upper half open; the model writes zeros.
        """
        if shape == "32x32b" and not unpack16:
            column = self._check_warp_access(taddr, num, warp_in_group, WARP_LANES, "tcgen05.st")
            first = WARP_LANES * warp_in_group
            self.data[column : column + num, first : first + WARP_LANES] = regs
            self.valid[warp_in_group, column : column + num] = ALL_LANES
            return
        path = datapath(shape, num, unpack16, half_split_off)
        column = self._check_warp_access(
            taddr, path.columns, warp_in_group, path.lanes, "tcgen05.st"
        )
        base = column * LANES + (taddr >> 16)
        if unpack16:
            self._cells[path.cells + base] = regs & np.uint32(0xFFFF)
            self._cells[path.cells + (base + LANES)] = regs >> np.uint32(16)
        else:
            self._cells[path.cells + base] = regs
        lanes = _lane_bits(taddr >> 16, path.lanes)
        for begin, end in path.column_ranges:
            self.valid[warp_in_group, column + begin : column + end] |= lanes

    # --- checks, also for the tensor core -----------------------------------------------------

    def check_columns(self, column: int, ncols: int, what: str) -> None:
        """Raise unless columns [column, column + ncols) exist and are allocated now."""
        if column < 0 or column + ncols > COLUMNS:
            raise EmulatorFault(
                "tmem_out_of_bounds",
                f"{what} of columns {column}..{column + ncols - 1}: Tensor Memory has {COLUMNS}",
                column=column,
                columns=ncols,
            )
        first = column // ALLOC_UNIT_COLUMNS
        last = (column + ncols - 1) // ALLOC_UNIT_COLUMNS
        mask = (1 << last - first + 1) - 1 << first
        if self._allocated_units & mask == mask:
            return
        missing = mask & ~self._allocated_units
        freed = bool(missing & self._ever_units)
        unit = (missing & -missing).bit_length() - 1
        raise EmulatorFault(
            "tmem_use_after_dealloc" if freed else "tmem_use_before_alloc",
            f"{what} of columns {column}..{column + ncols - 1}: column"
            f" {unit * ALLOC_UNIT_COLUMNS} and on"
            f" {'were freed' if freed else 'were not allocated'}; {self._describe_allocations()}",
            column=column,
            columns=ncols,
        )

    def check_written(self, column: int, ncols: int, lanes: NDArray[np.uint32], what: str) -> None:
        """Raise tmem_unwritten_read unless ``lanes`` of each column were written.

        lanes: uint32[4], one bit a lane, for the four warps' parts in turn.
        """
        written = self.valid[:, column : column + ncols]
        if written.tobytes() == b"\xff" * (4 * written.size):  # every lane: the common case
            return
        if not ((written & lanes[:, None]) == lanes[:, None]).all():
            for warp in range(LANES // WARP_LANES):
                self._fault_unwritten(warp, column, ncols, lanes[warp], what)

    def mark_written(self, column: int, ncols: int, lanes: NDArray[np.uint32]) -> None:
        """Note that ``lanes`` (uint32[4]) of the columns hold a result."""
        if lanes is EVERY_LANE:
            self.valid[:, column : column + ncols] = ALL_LANES
        else:
            self.valid[:, column : column + ncols] |= lanes[:, None]

    def _check_warp_access(self, taddr: int, ncols: int, warp: int, nlanes: int, what: str) -> int:
        lane, column = (taddr >> 16) & 0xFFFF, taddr & 0xFFFF
        if not (0 <= lane - WARP_LANES * warp <= WARP_LANES - nlanes) or lane % 16:
            raise EmulatorFault(
                "tmem_lane_access",
                f"{what} of {nlanes} lanes at {TmemAddress.decode(taddr)} by warp {warp} of its"
                f" warpgroup, which reaches lanes {WARP_LANES * warp}..{WARP_LANES * warp + 31}"
                " only",
                address=taddr,
                warp_in_group=warp,
            )
        self.check_columns(column, ncols, what)
        return column

    def _fault_unwritten(
        self, warp: int, column: int, ncols: int, lanes: np.uint32, what: str
    ) -> None:
        missing = lanes & ~self.valid[warp, column : column + ncols]
        columns = np.flatnonzero(missing)
        if columns.size == 0:
            return
        bits = int(missing[columns[0]])
        lane = WARP_LANES * warp + (bits & -bits).bit_length() - 1
        cells = sum(int(m).bit_count() for m in missing)
        raise EmulatorFault(
            "tmem_unwritten_read",
            f"{what} of {cells} Tensor Memory cell(s) that nothing has written since the"
            " allocation,"
            f" the first at lane {lane}, column {column + int(columns[0])}",
            lane=lane,
            column=column + int(columns[0]),
            cells=cells,
            reader=what,
        )

    def _describe_allocations(self) -> str:
        if not self._allocations:
            return "nothing is allocated"
        spans = (f"{c}..{c + n - 1}" for c, n in sorted(self._allocations.items()))
        return "allocated columns: " + ", ".join(spans)


# --- which cell each register of each thread moves --------------------------------------------


@dataclass(frozen=True)
class Datapath:
    """Cells of one tcgen05.ld or .st form, relative to its address.

    cells: int64[registers, 32], ``column * 128 + lane``; with 16-bit packing the low half's cell,
    the high half's lies one column on. columns: how far right the access reaches. lanes: 16 or 32.
    column_ranges: the columns touched, as [begin, end) pairs.
    """

    cells: NDArray[np.int64]
    columns: int
    lanes: int
    column_ranges: tuple[tuple[int, int], ...]


_REGISTERS_PER_REPEAT = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}


@lru_cache(maxsize=256)
def datapath(
    shape: str, num: int, packed16: bool = False, half_split_off: int | None = None
) -> Datapath:
    """The register to cell map of a tcgen05.ld or .st shape.

    The maps are those of CUTLASS's SM100 TMEM copy traits (cute/atom/copy_traits_sm100.hpp), which
    put the figures of PTX ISA 9.1 section 9.7.16.2.3 into layouts. Raises `UnsupportedPTX` for a
    form that the ISA does not have.
    """
    per_repeat = _REGISTERS_PER_REPEAT.get(shape)
    registers = num * (per_repeat or 0)
    if not registers or registers > 128 or num & (num - 1) or num < 1:
        raise UnsupportedPTX(
            f"tcgen05.ld/.st shape .{shape}.x{num} is not one of PTX ISA 9.1 table 49"
        )
    if (shape == "16x32bx2") != (half_split_off is not None):
        raise UnsupportedPTX(f"tcgen05.ld/.st .{shape} with immHalfSplitoff {half_split_off}")
    thread = np.arange(32)[None, :]
    reg = np.arange(registers)[:, None]
    half = np.zeros((1, 32), np.int64)
    if shape == "32x32b":
        lane, column = thread + 0 * reg, reg + 0 * thread
    elif shape == "16x64b":
        lane = 8 * (thread % 2) + thread // 4 + 0 * reg
        column = thread // 2 % 2 + 2 * reg
    elif shape == "16x128b":
        lane = thread // 4 + 8 * (reg % 2)
        column = thread % 4 + 4 * (reg // 2)
    elif shape == "16x256b":
        lane = thread // 4 + 8 * (reg // 2 % 2)
        column = 2 * (thread % 4) + reg % 2 + 8 * (reg // 4)
    else:  # 16x32bx2: threads 16..31 take the second half, half_split_off columns to the right
        lane, column = thread % 16 + 0 * reg, reg + 0 * thread
        half = thread // 16 * (half_split_off or 0)
    scale = 2 if packed16 else 1
    column = scale * column
    width = int(column.max()) + scale
    ranges: tuple[tuple[int, int], ...] = ((0, width),)
    if half_split_off is not None:
        ranges = ((0, width), (half_split_off, half_split_off + width))
    return Datapath(
        cells=((column + half) * LANES + lane).astype(np.int64),
        columns=max(end for _, end in ranges),
        lanes=WARP_LANES if shape == "32x32b" else 16,
        column_ranges=ranges,
    )


def _lane_bits(lane: int, nlanes: int) -> np.uint32:
    return np.uint32((((1 << nlanes) - 1) << lane % WARP_LANES) & 0xFFFFFFFF)
