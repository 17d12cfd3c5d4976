"""Shared memory of one CTA: bytes, which of them were ever written, and where mbarriers live.

Addresses are shared-window addresses (what ``cvta.to.shared`` yields, what ``.shared`` operands
hold). On sm_90 and sm_100 the system reserves the first 1 KiB of the window (PTX ISA 9.1 section
10.29, ``%reserved_smem_offset_begin``): the CTA's own bytes start at 1024 and 0 is never legal.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault

SYSTEM_RESERVED_BYTES = 1024
MBARRIER_BYTES = 8  # PTX ISA 9.1 section 9.7.13.15.1: .b64, aligned to 8 bytes

# Unwritten bytes hold 0xff: a NaN as f16, bf16, f32 and f64, if a caller looks past the checks.
POISON_BYTE = 0xFF

# One element of each access width; the widths from 16 bytes on only ever have their bits copied.
ELEMENT_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype(np.complex128),
    32: np.dtype("V32"),
}
# What `valid` holds for an element that was written, read with the element's own dtype.
_ALL_WRITTEN = {n: np.frombuffer(b"\x01" * n, dtype)[0] for n, dtype in ELEMENT_DTYPES.items()}


class SharedMemory:
    """Shared memory of one CTA.

    nbytes: size of the CTA's window part, static and dynamic together.
    base: shared-window address of the first byte.

    ``data`` and ``valid`` are uint8[nbytes]; ``valid`` is 1 where a byte was written since the CTA
    started (or since it stopped being an mbarrier) and 0 elsewhere. Bytes of a live mbarrier are
    never valid, so that an ordinary load of them leaves the fast path; `load` tells the two apart.
    unwritten: what a thread's load of bytes that nothing has written is, a "finding", or the
    "poison" that memory starts with.
    """

    def __init__(
        self, nbytes: int, base: int = SYSTEM_RESERVED_BYTES, unwritten: str = "finding"
    ) -> None:
        if nbytes < 0:
            raise ValueError(f"shared memory of {nbytes} bytes: the size cannot be negative")
        if base % 128:
            raise ValueError(f"shared memory base {base:#x} is not a multiple of 128")
        self._unwritten_faults = unwritten == "finding"
        self.base = base
        self.nbytes = nbytes
        self.end = base + nbytes
        # Arrays over the whole window, so that an address is an index; an alignment that lets every
        # element size be a plain view.
        self.window = _aligned_bytes(self.end, POISON_BYTE)
        self.window_valid = _aligned_bytes(self.end, 0)
        self._protected = _aligned_bytes(self.end, 0)  # 1: reserved, or a live mbarrier's
        self._protected[:base] = 1
        self.data = self.window[base:]
        self.valid = self.window_valid[base:]
        self.views = _element_views(self.window)
        self._valid_views = _element_views(self.window_valid)
        self._protected_views = _element_views(self._protected)
        self._valid_flags = self.window_valid.view(np.bool_)
        # Of `window` and `window_valid`, for native code.
        self.window_address = self.window.ctypes.data
        self.flags_address = self.window_valid.ctypes.data
        self._mbarriers: set[int] = set()
        self._mbarrier_low, self._mbarrier_high = self.end, 0  # addresses in [low, high)

    # --- ordinary (generic proxy) accesses of a warp ------------------------------------------

    def load(self, addrs: NDArray[np.int64], nbytes: int) -> NDArray[np.uint8]:
        """Bytes at each lane's address.

        addrs: int64[n] shared-window addresses; nbytes: 1, 2, 4, 8, 16 or 32, the access width.
        Returns uint8[n, nbytes]. Raises `EmulatorFault` smem_out_of_bounds, smem_misaligned,
        smem_unwritten_read or mbarrier_ordinary_access.
        """
        index = self._elements(addrs, nbytes)
        try:
            written = self._valid_views[nbytes].take(index)
        except IndexError:
            raise self._bad_address(addrs, nbytes) from None
        if b"\x00" in written.tobytes():
            self._check_readable(addrs, nbytes)
        return self.views[nbytes].take(index).view(np.uint8).reshape(-1, nbytes)

    def store(self, addrs: NDArray[np.int64], values: NDArray[np.uint8]) -> None:
        """Write each lane's bytes; where two lanes name one address the higher lane wins.

        addrs: int64[n]; values: uint8[n, nbytes], nbytes as in `load`. PTX leaves the winner of
        colliding lanes open. Raises smem_out_of_bounds, smem_misaligned, mbarrier_ordinary_access.
        """
        nbytes = values.shape[1]
        index = self._elements(addrs, nbytes)
        try:
            protected = self._protected_views[nbytes].take(index)
        except IndexError:
            raise self._bad_address(addrs, nbytes) from None
        if b"\x01" in protected.tobytes():
            self._fault_protected(addrs, nbytes)
        elements = self.views[nbytes]
        elements[index] = np.ascontiguousarray(values).view(elements.dtype).reshape(-1)
        self._valid_views[nbytes][index] = _ALL_WRITTEN[nbytes]

    # --- engines (async proxy) ----------------------------------------------------------------

    def read_bytes(self, addr: int, nbytes: int, what: str = "read") -> NDArray[np.uint8]:
        """A read-only view of ``nbytes`` bytes at ``addr``; ``what`` names the reader."""
        end = self.check_range(addr, nbytes, what)
        self.check_written(addr, end, what)
        view = self.window[addr:end]
        view.flags.writeable = False
        return view

    def write_bytes(self, addr: int, values: NDArray[np.uint8], what: str = "write") -> None:
        """Write uint8[n] at ``addr``; ``what`` names the writer in a fault."""
        end = self.check_range(addr, values.size, what)
        self.check_no_mbarrier(addr, end, what)
        self.window[addr:end] = values
        self.window_valid[addr:end] = 1

    def write_chunks(
        self, index: NDArray[np.int64], values: NDArray[np.uint8], what: str = "write"
    ) -> None:
        """Write uint8[16 * n] to the 16-byte chunks at the addresses ``16 * index``, int64[n]."""
        low, high = int(index.min()) << 4, (int(index.max()) << 4) + 16
        self.check_range(low, high - low, what)
        self.check_no_mbarrier(low, high, what)
        self.views[16][index] = values.view(ELEMENT_DTYPES[16])
        self._valid_views[16][index] = _ALL_WRITTEN[16]

    def forget_chunk_ends(self, index: NDArray[np.int64], kept: int) -> None:
        """Of 16-byte chunks (address / 16) all but the first ``kept`` bytes count as unwritten."""
        self._valid_views[16].view(np.uint8).reshape(-1, 16)[index.reshape(-1), kept:] = 0

    def check_range(self, addr: int, nbytes: int, what: str) -> int:
        """``addr + nbytes``; raises smem_out_of_bounds unless all of it is the CTA's own."""
        end = addr + nbytes
        if addr < self.base or end > self.end:
            raise self._out_of_bounds(int(addr), nbytes, what)
        return end

    def check_written(self, addr: int, end: int, what: str) -> None:
        """Raise unless every byte of [addr, end) was written and is no live mbarrier's."""
        written = self._valid_flags[addr:end]
        if not written.all():
            self.fault_unwritten(addr + np.flatnonzero(~written), what)

    def all_written(self, addr: int, end: int) -> bool:
        """Whether every byte of [addr, end) was written and is no live mbarrier's."""
        return bool(self._valid_flags[addr:end].all())

    def check_no_mbarrier(self, addr: int, end: int, what: str) -> None:
        """Raise mbarrier_ordinary_access if [addr, end) touches a live mbarrier."""
        if end <= self._mbarrier_low or addr >= self._mbarrier_high:
            return
        protected = self._protected[addr:end]
        if protected.any():
            raise self._mbarrier_access(int(addr) + int(protected.argmax()), what)

    def fault_unwritten(self, addrs: NDArray[np.int64], what: str) -> NoReturn:
        """Raise for unreadable bytes: a live mbarrier's, or those that nothing has written."""
        protected = self._protected[addrs]
        if protected.any():
            raise self._mbarrier_access(int(addrs[int(protected.argmax())]), what)
        first, count = int(addrs.min()), int(np.unique(addrs).size)
        raise EmulatorFault(
            "smem_unwritten_read",
            f"{what} of shared memory that nothing has written: {count} byte(s), the first at"
            f" {first:#x} (offset {first - self.base}). Write it, or wait for the copy that does",
            address=first,
            bytes=count,
            reader=what,
        )

    # --- mbarriers ------------------------------------------------------------------------------

    def mark_mbarrier(self, addr: int) -> None:
        """Give the 8 bytes at ``addr`` to an mbarrier: only mbarrier operations may touch them."""
        end = self.check_range(addr, MBARRIER_BYTES, "mbarrier.init")
        self._mbarriers.add(addr)
        self._protected[addr:end] = 1
        self.window_valid[addr:end] = 0
        self._mbarrier_low = min(self._mbarrier_low, addr)
        self._mbarrier_high = max(self._mbarrier_high, end)

    def unmark_mbarrier(self, addr: int) -> None:
        """Return an invalidated mbarrier's 8 bytes to ordinary use; they hold nothing."""
        self._mbarriers.discard(addr)
        self._protected[addr : addr + MBARRIER_BYTES] = 0
        self.window[addr : addr + MBARRIER_BYTES] = POISON_BYTE
        self._mbarrier_low = min(self._mbarriers, default=self.end)
        self._mbarrier_high = max(self._mbarriers, default=-MBARRIER_BYTES) + MBARRIER_BYTES

    # --- checks ---------------------------------------------------------------------------------

    def _elements(self, addrs: NDArray[np.int64], nbytes: int) -> NDArray[np.int64]:
        """Index of each access among the elements of ``nbytes``; past the end is not checked."""
        bits = int(np.bitwise_or.reduce(addrs))
        if bits & (nbytes - 1) or bits < 0:
            raise self._bad_address(addrs, nbytes)
        return addrs >> (nbytes.bit_length() - 1)

    def _bad_address(self, addrs: NDArray[np.int64], nbytes: int) -> EmulatorFault:
        outside = (addrs < self.base) | (addrs > self.end - nbytes)
        if outside.any():
            lane = int(outside.argmax())
            return self._out_of_bounds(int(addrs[lane]), nbytes, "access", lane=lane)
        lane = int((addrs % nbytes != 0).argmax())
        return EmulatorFault(
            "smem_misaligned",
            f"access of {nbytes} bytes at shared address {int(addrs[lane]):#x}, which is not a"
            f" multiple of {nbytes} (active lane {lane})",
            address=int(addrs[lane]),
            bytes=nbytes,
            lane=lane,
        )

    def _check_readable(self, addrs: NDArray[np.int64], nbytes: int) -> None:
        """Of a load that touches bytes which are not valid: raise, unless poison may be read."""
        if int(addrs.min()) < self.base:
            raise self._bad_address(addrs, nbytes)
        touched = addrs[:, None] + np.arange(nbytes)
        missing = touched[self.window_valid[touched] == 0]
        if self._unwritten_faults or self._protected[missing].any():
            self.fault_unwritten(missing, f"load of {nbytes} B")

    def _fault_protected(self, addrs: NDArray[np.int64], nbytes: int) -> NoReturn:
        if int(addrs.min()) < self.base:
            raise self._bad_address(addrs, nbytes)
        touched = (addrs[:, None] + np.arange(nbytes)).reshape(-1)
        first = int(touched[int(self._protected[touched].argmax())])
        raise self._mbarrier_access(first, f"store of {nbytes} B")

    def _out_of_bounds(self, addr: int, nbytes: int, what: str, **details: int) -> EmulatorFault:
        return EmulatorFault(
            "smem_out_of_bounds",
            f"{what} of {nbytes} byte(s) at shared address {addr:#x} outside the CTA's shared"
            f" memory [{self.base:#x}, {self.end:#x}) of {self.nbytes} bytes",
            address=addr,
            bytes=nbytes,
            base=self.base,
            size=self.nbytes,
            **details,
        )

    def _mbarrier_access(self, addr: int, what: str) -> EmulatorFault:
        barrier = addr - addr % MBARRIER_BYTES
        return EmulatorFault(
            "mbarrier_ordinary_access",
            f"{what} at shared address {addr:#x} touches the live mbarrier at {barrier:#x}: only"
            " mbarrier operations may, until mbarrier.inval (PTX ISA 9.1 section 9.7.13.15)",
            address=addr,
            barrier=barrier,
        )


def _element_views(array: NDArray[np.uint8]) -> dict[int, NDArray[Any]]:
    """The elements of each size that lie wholly inside ``array``."""
    return {n: array[: array.size // n * n].view(dtype) for n, dtype in ELEMENT_DTYPES.items()}


def _aligned_bytes(nbytes: int, fill: int, alignment: int = 64) -> NDArray[np.uint8]:
    """uint8[nbytes] whose first byte lies on an ``alignment`` boundary of the host's memory."""
    raw = np.full(nbytes + alignment, fill, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]
