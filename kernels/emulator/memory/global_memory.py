"""Global memory: the host allocations that stand for device memory, and nothing beside them.

Kernel parameters hold real host addresses, so loads and stores act on the caller's own buffers.
An address outside every registered allocation is a finding, never a crash of the emulator.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from .shared import ELEMENT_DTYPES


@dataclass(frozen=True, eq=False)
class Allocation:
    """One registered range of host memory.

    base: address of the first byte; data: uint8[nbytes] view of it; owner keeps the memory alive.
    """

    base: int
    nbytes: int
    name: str
    writable: bool
    data: NDArray[np.uint8]
    owner: Any = None
    _views: dict[int, NDArray[Any]] = field(default_factory=dict, repr=False)

    @property
    def end(self) -> int:
        return self.base + self.nbytes

    def elements(self, nbytes: int) -> tuple[NDArray[Any], int]:
        """The range as naturally aligned elements of ``nbytes``, and the first one's address."""
        skip = -self.base % nbytes
        view = self._views.get(nbytes)
        if view is None:
            usable = max(self.nbytes - skip, 0) // nbytes * nbytes
            view = self.data[skip : skip + usable].view(ELEMENT_DTYPES[nbytes])
            self._views[nbytes] = view
        return view, self.base + skip

    def __str__(self) -> str:
        return f"{self.name or 'unnamed'} [{self.base:#x}, {self.end:#x})"


class GlobalMemory:
    """The set of allocations a launch may touch; all accesses are checked against it."""

    def __init__(self) -> None:
        self._allocations: list[Allocation] = []
        self._bases: list[int] = []
        self._recent: Allocation | None = None
        # Of the race detector: what the launch before may still be doing, and what this one did.
        self.before: object | None = None
        self.footprint: object | None = None

    # --- allocations --------------------------------------------------------------------------

    def add(
        self, base: int, nbytes: int, name: str = "", writable: bool = True, owner: Any = None
    ) -> Allocation:
        """Register ``nbytes`` of host memory at ``base``.

        owner: any object to keep alive as long as the allocation. Ranges that overlap (views of one
        tensor) become one allocation, writable if one of them is, named by the widest.
        """
        if nbytes <= 0 or base <= 0:
            raise ValueError(
                f"allocation {name!r}: {nbytes} bytes at {base:#x}, both must be positive"
            )
        end, widest = base + nbytes, nbytes
        owners = [owner]
        for other in [a for a in self._allocations if a.base < end and base < a.end]:
            if other.nbytes >= widest:
                name, widest = other.name, other.nbytes
            base, end = min(base, other.base), max(end, other.end)
            writable = writable or other.writable
            owners.append(other.owner)
            at = self._bases.index(other.base)
            del self._allocations[at], self._bases[at]
        memory = (ctypes.c_uint8 * (end - base)).from_address(base)
        data = np.ctypeslib.as_array(memory)
        new = Allocation(base, end - base, name, writable, data, tuple(owners))
        at = bisect_right(self._bases, base)
        self._allocations.insert(at, new)
        self._bases.insert(at, base)
        self._recent = None
        return new

    def add_array(
        self, array: NDArray[Any], name: str = "", writable: bool | None = None
    ) -> Allocation:
        """Register the memory of a numpy array and keep the array alive.

        Views are registered from their first to their last byte. writable defaults to the array's.
        """
        low, high = np.lib.array_utils.byte_bounds(array)
        if writable is None:
            writable = bool(array.flags.writeable)
        return self.add(low, high - low, name, writable, owner=array)

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """Registered allocations by rising address."""
        return tuple(self._allocations)

    def find(self, addr: int, nbytes: int, what: str = "access", write: bool = False) -> Allocation:
        """The allocation that holds all of [addr, addr + nbytes).

        Raises global_out_of_bounds or, with ``write``, global_read_only.
        """
        found = self._recent
        if found is None or addr < found.base or addr + nbytes > found.end:
            at = bisect_right(self._bases, addr) - 1
            found = self._allocations[at] if at >= 0 else None
            if found is None or addr + nbytes > found.end:
                raise self._out_of_bounds(addr, nbytes, what)
            self._recent = found
        if write and not found.writable:
            raise EmulatorFault(
                "global_read_only",
                f"{what} of {nbytes} byte(s) at {addr:#x} in {found}, which is registered"
                " read-only",
                address=addr,
                bytes=nbytes,
                allocation=found.name,
            )
        return found

    # --- accesses -----------------------------------------------------------------------------

    def load(self, addrs: NDArray[Any], nbytes: int) -> NDArray[np.uint8]:
        """Bytes at each lane's address.

        addrs: int64[n] or uint64[n]; nbytes: 1, 2, 4, 8, 16 or 32. Returns uint8[n, nbytes].
        Raises `EmulatorFault` global_misaligned or global_out_of_bounds.
        """
        groups = self._split(addrs, nbytes, "load", write=False)
        if len(groups) == 1:
            _, elements, index = groups[0]
            return elements.take(index).view(np.uint8).reshape(-1, nbytes)
        out = np.empty((len(addrs), nbytes), np.uint8)
        for lanes, elements, index in groups:
            out[lanes] = elements.take(index).view(np.uint8).reshape(-1, nbytes)
        return out

    def store(self, addrs: NDArray[Any], values: NDArray[np.uint8]) -> None:
        """Write uint8[n, nbytes] at each lane's address; colliding lanes: the higher lane wins.

        Raises `EmulatorFault` global_misaligned, global_out_of_bounds or global_read_only.
        """
        nbytes = values.shape[1]
        for lanes, elements, index in self._split(addrs, nbytes, "store", write=True):
            chosen = np.ascontiguousarray(values[lanes])
            elements[index] = chosen.view(elements.dtype).reshape(-1)

    def read_bytes(self, addr: int, nbytes: int, what: str = "read") -> NDArray[np.uint8]:
        """A read-only view of ``nbytes`` bytes at ``addr``."""
        allocation = self.find(addr, nbytes, what)
        start = addr - allocation.base
        view = allocation.data[start : start + nbytes]
        view.flags.writeable = False
        return view

    def write_bytes(self, addr: int, values: NDArray[np.uint8], what: str = "write") -> None:
        """Write uint8[n] at ``addr``."""
        allocation = self.find(addr, values.size, what, write=True)
        start = addr - allocation.base
        allocation.data[start : start + values.size] = values

    # --- details ------------------------------------------------------------------------------

    def _split(
        self, addrs: NDArray[Any], nbytes: int, what: str, write: bool
    ) -> list[tuple[Any, NDArray[Any], NDArray[np.int64]]]:
        """Group lanes by allocation: (lane selection, elements, index of each lane's element)."""
        if nbytes not in ELEMENT_DTYPES:
            raise ValueError(
                f"global {what} of {nbytes} bytes: must be one of {list(ELEMENT_DTYPES)}"
            )
        if len(addrs) == 0:
            return []
        addrs = np.asarray(addrs).view(np.int64)
        if nbytes > 1 and int(np.bitwise_or.reduce(addrs)) & (nbytes - 1):
            raise self._misaligned(addrs, nbytes, what)
        low, high = int(np.minimum.reduce(addrs)), int(np.maximum.reduce(addrs))
        allocation = self._recent
        if allocation is None or low < allocation.base or high + nbytes > allocation.end:
            at = bisect_right(self._bases, low) - 1
            allocation = self._allocations[at] if at >= 0 else None
        shift = nbytes.bit_length() - 1
        if allocation is not None and allocation.base <= low and high + nbytes <= allocation.end:
            self.find(low, nbytes, what, write)
            elements, first = allocation.elements(nbytes)
            return [(slice(None), elements, (addrs - first) >> shift)]
        lanes_of: dict[Allocation, list[int]] = {}
        for lane, addr in enumerate(addrs.tolist()):
            lanes_of.setdefault(self.find(addr, nbytes, what, write), []).append(lane)
        groups = []
        for allocation, lanes in lanes_of.items():
            elements, first = allocation.elements(nbytes)
            groups.append((lanes, elements, (addrs[lanes] - first) >> shift))
        return groups

    def _misaligned(self, addrs: NDArray[np.int64], nbytes: int, what: str) -> EmulatorFault:
        lane = int(((addrs & (nbytes - 1)) != 0).argmax())
        return EmulatorFault(
            "global_misaligned",
            f"{what} of {nbytes} bytes at global address {int(addrs[lane]):#x}, which is not a"
            " multiple"
            f" of {nbytes} (active lane {lane})",
            address=int(addrs[lane]),
            bytes=nbytes,
            lane=lane,
        )

    def _out_of_bounds(self, addr: int, nbytes: int, what: str) -> EmulatorFault:
        message = f"{what} of {nbytes} byte(s) at global address {addr:#x}"
        details: dict[str, Any] = {"address": addr, "bytes": nbytes}
        if not self._allocations:
            return EmulatorFault(
                "global_out_of_bounds", message + ": nothing is registered", **details
            )

        def gap(a: Allocation) -> int:
            return max(a.base - addr, addr + nbytes - a.end)

        nearest = min(self._allocations, key=gap)
        distance = gap(nearest)
        side = "before" if addr < nearest.base else "past the end of"
        details.update(allocation=nearest.name, distance_bytes=distance)
        return EmulatorFault(
            "global_out_of_bounds",
            f"{message} reaches {distance} byte(s) {side} the nearest allocation, {nearest}",
            **details,
        )
