"""Local memory: bytes of each thread's own, and which of them the thread has written.

A local address is the same number in every thread, from `LOCAL_BASE` on; among generic addresses
the local window lies at `LOCAL_GENERIC_BASE`, above every host address and below shared memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault

LOCAL_BASE = 256  # so that a null pointer is not a variable's address
LOCAL_GENERIC_BASE = 1 << 55
_LANES = 32


class LocalMemory:
    """Local memory of a warp's 32 threads, ``nbytes`` each, from address `LOCAL_BASE` on.

    ``data`` and ``valid`` are uint8[32, nbytes]; ``valid`` is 1 where the thread wrote a byte.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.data = np.full((_LANES, nbytes), 0xFF, np.uint8)
        self.valid = np.zeros((_LANES, nbytes), np.uint8)

    def load(
        self, lanes: NDArray[np.int64], addrs: NDArray[np.int64], nbytes: int
    ) -> NDArray[np.uint8]:
        """Bytes at each thread's address: int64[n] lanes and addresses -> uint8[n, nbytes].

        Raises `EmulatorFault` local_out_of_bounds, local_misaligned or local_unwritten_read.
        """
        rows, columns = self._index(lanes, addrs, nbytes, "load")
        unwritten = np.flatnonzero(~self.valid[rows, columns].all(axis=1))
        if unwritten.size:
            first = unwritten[0]
            raise EmulatorFault(
                "local_unwritten_read",
                f"load of {nbytes} byte(s) at local address {int(addrs[first]):#x}, which lane"
                f" {int(lanes[first])} has not written in full",
                address=int(addrs[first]),
                bytes=nbytes,
                lane=int(lanes[first]),
            )
        return self.data[rows, columns]

    def store(
        self, lanes: NDArray[np.int64], addrs: NDArray[np.int64], values: NDArray[np.uint8]
    ) -> None:
        """Writes uint8[n, nbytes]. Raises local_out_of_bounds or local_misaligned."""
        rows, columns = self._index(lanes, addrs, values.shape[1], "store")
        self.data[rows, columns] = values
        self.valid[rows, columns] = 1

    def _index(
        self, lanes: NDArray[np.int64], addrs: NDArray[np.int64], nbytes: int, what: str
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        at = addrs - LOCAL_BASE
        outside = np.flatnonzero((at < 0) | (at + nbytes > self.nbytes))
        if outside.size:
            first = outside[0]
            raise EmulatorFault(
                "local_out_of_bounds",
                f"{what} of {nbytes} byte(s) by lane {int(lanes[first])} at local address"
                f" {int(addrs[first]):#x}; a thread's local variables are"
                f" [{LOCAL_BASE:#x}, {LOCAL_BASE + self.nbytes:#x})",
                address=int(addrs[first]),
                bytes=nbytes,
                lane=int(lanes[first]),
            )
        odd = np.flatnonzero(addrs & (nbytes - 1))
        if odd.size:
            first = odd[0]
            raise EmulatorFault(
                "local_misaligned",
                f"{what} of {nbytes} bytes by lane {int(lanes[first])} at local address"
                f" {int(addrs[first]):#x}, which is not a multiple of {nbytes}",
                address=int(addrs[first]),
                bytes=nbytes,
                lane=int(lanes[first]),
            )
        return lanes[:, None], at[:, None] + np.arange(nbytes)
