"""Shared memory of one CTA: bytes, which of them were ever written, and where mbarriers live.

Addresses are shared-window addresses (what ``cvta.to.shared`` yields, what ``.shared`` operands
hold). On sm_90 and sm_100 the system reserves the first 1 KiB of the window (PTX ISA 9.1 section
10.29, ``%reserved_smem_offset_begin``): the CTA's own bytes start at 1024 and 0 is never legal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault

SYSTEM_RESERVED_BYTES = 1024
MBARRIER_BYTES = 8  # PTX ISA 9.1 section 9.7.13.15.1: .b64, aligned to 8 bytes

# Unwritten bytes hold 0xff: a NaN as f16, bf16, f32 and f64, if a caller looks past the checks.
POISON_BYTE = 0xFF

_ACCESS_DTYPES: dict[int, type] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
    16: np.complex128,  # any 16-byte element: take and put copy its bits unchanged
}
# What `valid` holds for an element that was written, read with the element's own dtype.
_ALL_WRITTEN = {size: int.from_bytes(b"\x01" * size, "little") for size in (1, 2, 4, 8)}


class SharedMemory:
    """Shared memory of one CTA.

    nbytes: size of the CTA's window part, static and dynamic together.
    base: shared-window address of the first byte.

    ``data`` and ``valid`` are uint8[nbytes]; ``valid`` is 1 where a byte was written since the CTA
    started (or since it stopped being an mbarrier) and 0 elsewhere. Bytes of a live mbarrier are
    never valid, so that an ordinary load of them leaves the fast path; `load` tells the two apart.
    """

    def __init__(self, nbytes: int, base: int = SYSTEM_RESERVED_BYTES) -> None:
        if nbytes < 0:
            raise ValueError(f"shared memory of {nbytes} bytes: the size cannot be negative")
        if base % 128:
            raise ValueError(f"shared memory base {base:#x} is not a multiple of 128")
        self.base = base
        self.nbytes = nbytes
        # Whole 16-byte elements, and an alignment that lets every element size be a plain view.
        capacity = -(-max(nbytes, 1) // 128) * 128
        self._data = _aligned_bytes(capacity, POISON_BYTE)
        self._valid = _aligned_bytes(capacity, 0)
        self.data = self._data[:nbytes]
        self.valid = self._valid[:nbytes]
        self._data_views = _element_views(self._data)
        self._valid_views = _element_views(self._valid)
        self._valid_flags = self._valid.view(np.bool_)
        self._mbarriers: set[int] = set()
        self._mbarrier_bytes = np.zeros(capacity, np.bool_)
        self._mbarrier_low, self._mbarrier_high = capacity, 0  # offsets: [low, high) holds them all

    # --- ordinary (generic proxy) accesses of a warp ------------------------------------------

    def load(self, addrs: NDArray[np.int64], nbytes: int) -> NDArray[np.uint8]:
        """Bytes at each lane's address.

        addrs: int64[n] shared-window addresses; nbytes: 1, 2, 4, 8, 16 or 32, the access width.
        Returns uint8[n, nbytes]. Raises `EmulatorFault` smem_out_of_bounds, smem_misaligned,
        smem_unwritten_read or mbarrier_ordinary_access.
        """
        if nbytes == 32:
            return np.concatenate(
                [self._load_halves(addrs, 0), self._load_halves(addrs, 16)], axis=1
            )
        index = self._elements(addrs, nbytes)
        written = self._valid_views[nbytes].take(index)
        if nbytes == 16:
            all_written = written.view(np.bool_).all()
        else:
            all_written = (written == _ALL_WRITTEN[nbytes]).all()
        if not all_written:
            self._fault_unreadable(np.asarray(addrs, np.int64), nbytes)
        return self._data_views[nbytes].take(index).view(np.uint8).reshape(-1, nbytes)

    def store(self, addrs: NDArray[np.int64], values: NDArray[np.uint8]) -> None:
        """Write each lane's bytes; where two lanes name one address the higher lane wins.

        addrs: int64[n]; values: uint8[n, nbytes], nbytes as in `load`. PTX leaves the winner of
        colliding lanes open. Raises smem_out_of_bounds, smem_misaligned, mbarrier_ordinary_access.
        """
        nbytes = values.shape[1]
        if nbytes == 32:
            self._check_32(addrs)
            self.store(np.asarray(addrs) + 16, np.ascontiguousarray(values[:, 16:]))
            self.store(addrs, np.ascontiguousarray(values[:, :16]))
            return
        index = self._elements(addrs, nbytes)
        if self._mbarriers:
            self._check_not_mbarrier(index * nbytes, nbytes)
        element = _ACCESS_DTYPES[nbytes]
        self._data_views[nbytes][index] = np.ascontiguousarray(values).view(element).reshape(-1)
        valid = self._valid_views[nbytes]
        if nbytes == 16:
            valid.view(np.uint64).reshape(-1, 2)[index] = _ALL_WRITTEN[8]
        else:
            valid[index] = _ALL_WRITTEN[nbytes]

    # --- engines (async proxy) ----------------------------------------------------------------

    def read_bytes(self, addr: int, nbytes: int, what: str = "read") -> NDArray[np.uint8]:
        """A read-only view of ``nbytes`` bytes at ``addr``; ``what`` names the reader."""
        start = self.check_range(addr, nbytes, what)
        self.check_written(start, start + nbytes, what)
        view = self._data[start : start + nbytes]
        view.flags.writeable = False
        return view

    def write_bytes(self, addr: int, values: NDArray[np.uint8], what: str = "write") -> None:
        """Write uint8[n] at ``addr``; ``what`` names the writer in a fault."""
        start = self.check_range(addr, values.size, what)
        end = start + values.size
        self.check_no_mbarrier(start, end, what)
        self._data[start:end] = values
        self._valid[start:end] = 1

    def check_range(self, addr: int, nbytes: int, what: str) -> int:
        """Offset of ``addr``; raises smem_out_of_bounds unless all ``nbytes`` lie in the window."""
        start = int(addr) - self.base
        if start < 0 or start + nbytes > self.nbytes:
            raise self._out_of_bounds(int(addr), nbytes, what)
        return start

    def check_written(self, start: int, end: int, what: str) -> None:
        """Raise unless every byte of the offsets [start, end) was written and is no mbarrier."""
        if self._valid_flags[start:end].all():
            return
        self.fault_unwritten(start + np.flatnonzero(~self._valid_flags[start:end]), what)

    def check_no_mbarrier(self, start: int, end: int, what: str) -> None:
        """Raise mbarrier_ordinary_access if the offsets [start, end) touch a live mbarrier."""
        if end <= self._mbarrier_low or start >= self._mbarrier_high:
            return
        if self._mbarrier_bytes[start:end].any():
            first = start + int(self._mbarrier_bytes[start:end].argmax())
            raise self._mbarrier_access(first, what)

    def fault_unwritten(self, offsets: NDArray[np.integer], what: str) -> None:
        """Raise for unreadable bytes at ``offsets``: a live mbarrier's, or never written ones."""
        barrier = self._mbarrier_bytes[offsets]
        if barrier.any():
            raise self._mbarrier_access(int(offsets[int(barrier.argmax())]), what)
        first = int(offsets.min()) + self.base
        count = int(np.unique(offsets).size)
        raise EmulatorFault(
            "smem_unwritten_read",
            f"{what} of shared memory that nothing has written: {count} byte(s), the first at"
            f" {first:#x} (offset {first - self.base}). Write it, or wait for the copy that does",
            address=first,
            bytes=count,
            reader=what,
        )

    # --- mbarriers ----------------------------------------------------------------------------

    def mark_mbarrier(self, addr: int) -> None:
        """Give the 8 bytes at ``addr`` to an mbarrier: only mbarrier operations may touch them."""
        start = self.check_range(addr, MBARRIER_BYTES, "mbarrier.init")
        self._mbarriers.add(start)
        self._mbarrier_bytes[start : start + MBARRIER_BYTES] = True
        self._valid[start : start + MBARRIER_BYTES] = 0
        self._mbarrier_low = min(self._mbarrier_low, start)
        self._mbarrier_high = max(self._mbarrier_high, start + MBARRIER_BYTES)

    def unmark_mbarrier(self, addr: int) -> None:
        """Return an invalidated mbarrier's 8 bytes to ordinary use; they hold nothing."""
        start = int(addr) - self.base
        self._mbarriers.discard(start)
        self._mbarrier_bytes[start : start + MBARRIER_BYTES] = False
        self._data[start : start + MBARRIER_BYTES] = POISON_BYTE
        self._mbarrier_low = min(self._mbarriers, default=self._data.size)
        self._mbarrier_high = max(self._mbarriers, default=-MBARRIER_BYTES) + MBARRIER_BYTES

    # --- checks -------------------------------------------------------------------------------

    def _elements(self, addrs: NDArray[np.int64], nbytes: int) -> NDArray[np.int64]:
        """Index of each access in the view of ``nbytes`` elements; bounds and alignment checked."""
        shift = nbytes.bit_length() - 1
        offsets = np.asarray(addrs, np.int64) - self.base
        if offsets.size == 0:
            return offsets
        # Rotated right by `shift`, a misaligned or negative offset becomes huge: one maximum finds
        # both, and the ones past the end.
        index = offsets >> shift
        rotated = (index | (offsets << (64 - shift))) if shift else offsets
        if int(rotated.view(np.uint64).max()) > (self.nbytes - nbytes) >> shift:
            self._fault_address(np.asarray(addrs, np.int64), nbytes)
        return index

    def _load_halves(self, addrs: NDArray[np.int64], at: int) -> NDArray[np.uint8]:
        self._check_32(addrs)
        return self.load(np.asarray(addrs) + at, 16)

    def _check_32(self, addrs: NDArray[np.int64]) -> None:
        if (np.asarray(addrs) & 31).any():
            self._fault_address(np.asarray(addrs, np.int64), 32)

    def _check_not_mbarrier(self, offsets: NDArray[np.int64], nbytes: int) -> None:
        if offsets.size == 0 or int(offsets.min()) >= self._mbarrier_high:
            return
        touched = np.zeros(offsets.size, np.bool_)
        for byte in range(nbytes):
            touched |= self._mbarrier_bytes[offsets + byte]
        if touched.any():
            raise self._mbarrier_access(int(offsets[int(touched.argmax())]), f"store of {nbytes} B")

    def _fault_address(self, addrs: NDArray[np.int64], nbytes: int) -> None:
        offsets = addrs - self.base
        outside = (offsets < 0) | (offsets > self.nbytes - nbytes)
        if outside.any():
            lane = int(outside.argmax())
            raise self._out_of_bounds(int(addrs[lane]), nbytes, "access", lane=lane)
        lane = int((addrs % nbytes != 0).argmax())
        raise EmulatorFault(
            "smem_misaligned",
            f"access of {nbytes} bytes at shared address {int(addrs[lane]):#x}, which is not a"
            " multiple"
            f" of {nbytes} (active lane {lane})",
            address=int(addrs[lane]),
            bytes=nbytes,
            lane=lane,
        )

    def _fault_unreadable(self, addrs: NDArray[np.int64], nbytes: int) -> None:
        touched = (addrs - self.base)[:, None] + np.arange(nbytes)
        self.fault_unwritten(touched[self._valid[touched] == 0], f"load of {nbytes} B")

    def _out_of_bounds(self, addr: int, nbytes: int, what: str, **details: int) -> EmulatorFault:
        end = self.base + self.nbytes
        return EmulatorFault(
            "smem_out_of_bounds",
            f"{what} of {nbytes} byte(s) at shared address {addr:#x} outside the CTA's shared"
            " memory"
            f" [{self.base:#x}, {end:#x}) of {self.nbytes} bytes",
            address=addr,
            bytes=nbytes,
            base=self.base,
            size=self.nbytes,
            **details,
        )

    def _mbarrier_access(self, offset: int, what: str) -> EmulatorFault:
        barrier = offset + self.base
        for start in self._mbarriers:
            if start <= offset + MBARRIER_BYTES - 1 and offset < start + MBARRIER_BYTES:
                barrier = start + self.base
        return EmulatorFault(
            "mbarrier_ordinary_access",
            f"{what} at shared address {offset + self.base:#x} touches the live mbarrier at"
            f" {barrier:#x}: only mbarrier operations may, until mbarrier.inval"
            " (PTX ISA 9.1 section 9.7.13.15)",
            address=offset + self.base,
            barrier=barrier,
        )


def _element_views(array: NDArray[np.uint8]) -> dict[int, NDArray[Any]]:
    return {size: array.view(dtype) for size, dtype in _ACCESS_DTYPES.items()}


def _aligned_bytes(nbytes: int, fill: int, alignment: int = 64) -> NDArray[np.uint8]:
    """uint8[nbytes] whose first byte lies on an ``alignment`` boundary of the host's memory."""
    raw = np.full(nbytes + alignment, fill, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]
