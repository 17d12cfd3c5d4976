"""Readers of loads, stores and atomics: bytes, banks and sectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..isa.table import LANES, SHARED_GENERIC_BASE, Binding
from ..memory.local import LOCAL_GENERIC_BASE
from ..records import Event, OpClass
from ..schedule import CTA_WINDOW_MASK
from .table import Reader, Row, by_value, plain, reads

if TYPE_CHECKING:
    from ..state import Warp

plain(r"(atom|red)\.(?!async).*\.shared\b.*", OpClass.SMEM)
plain(r"(atom|red)\.(?!async).*", OpClass.GLOBAL)

_ACCESS = r"(ld|st)(?:\.(?!shared|global|local|param|v2|v4|v8|b8|b16|b32|b64|b128|async)[\w:]+)*"
_TYPE = r"(?:\.[\w:]+)*?(?:\.v([248]))?\.[busf](8|16|32|64|128)"


def wavefronts(addresses: NDArray[np.int64], nbytes: int) -> int:
    """Passes over the 32 four-byte banks that a warp's access takes: lanes go in groups of 128
    bytes, and the words of a group that share a bank, unless equal, go one after another."""
    per_pass = max(1, 128 // max(nbytes, 4))
    total = 0
    for first in range(0, len(addresses), per_pass):
        group = addresses[first : first + per_pass]
        words = np.unique((group[:, None] + np.arange(0, max(nbytes, 1), 4)) // 4)
        total += int(np.bincount(words % 32).max())
    return total


def sectors(addresses: NDArray[np.int64], nbytes: int) -> int:
    """32-byte sectors that a warp's access touches."""
    return int(np.unique(np.concatenate([addresses // 32, (addresses + nbytes - 1) // 32])).size)


@reads(r"(ld|st)matrix\..*\.x([124])(?:\.trans)?(?:\.shared.*)?\.b\w+", OpClass.SMEM)
def _matrix(b: Binding) -> Reader:
    """Eight rows of 16 bytes a matrix; the matrices of a warp pass the banks one after another."""
    load, matrices = b.match[1] == "ld", int(b.match[2])
    kind = Event.SMEM_LOAD if load else Event.SMEM_STORE
    address = b.addresses(b.ins.operands[1 if load else 0])

    def read(w: Warp, mask: int) -> Row:
        rows = address(w)[: 8 * matrices] & CTA_WINDOW_MASK
        return (kind, 128 * matrices, wavefronts(rows, 16), 0, 0)

    return read


@reads(rf"{_ACCESS}\.shared(?:::cta|::cluster)?{_TYPE}", OpClass.SMEM)
def _shared(b: Binding) -> Reader:
    load = b.match[1] == "ld"
    nbytes = int(b.match[2] or 1) * int(b.match[3]) // 8
    address = b.addresses(b.ins.operands[1 if load else 0])
    kind = Event.SMEM_LOAD if load else Event.SMEM_STORE

    def read(w: Warp, mask: int) -> Row:
        at = address(w)[LANES[mask]] & CTA_WINDOW_MASK
        return (kind, nbytes * len(at), wavefronts(at, nbytes), 0, 0)

    return read


@reads(rf"{_ACCESS}\.local{_TYPE}", OpClass.GLOBAL)
def _local(b: Binding) -> Reader:
    """A thread's own memory lies interleaved by lane, so that a warp's access is contiguous."""
    nbytes = int(b.match[2] or 1) * int(b.match[3]) // 8
    kind = Event.LOCAL_LOAD if b.match[1] == "ld" else Event.LOCAL_STORE
    return lambda w, mask: (kind, nbytes * mask.bit_count(), 0, 0, 0)


@reads(rf"{_ACCESS}(?:\.global)?{_TYPE}", OpClass.GLOBAL)
def _global(b: Binding) -> Reader:
    """Generic addresses go where their window says, by the first lane's."""
    load = b.match[1] == "ld"
    nbytes = int(b.match[2] or 1) * int(b.match[3]) // 8
    address = b.addresses(b.ins.operands[1 if load else 0])
    spaces = (
        (Event.GLOBAL_LOAD, Event.LOCAL_LOAD, Event.SMEM_LOAD)
        if load
        else (Event.GLOBAL_STORE, Event.LOCAL_STORE, Event.SMEM_STORE)
    )

    def read(w: Warp, mask: int) -> Row:
        at = address(w)[LANES[mask]]
        total = nbytes * len(at)
        if at[0] < LOCAL_GENERIC_BASE:
            return (spaces[0], total, sectors(at, nbytes), 0, 0)
        if at[0] < SHARED_GENERIC_BASE:
            return (spaces[1], total, 0, 0, 0)
        return (spaces[2], total, wavefronts(at & CTA_WINDOW_MASK, nbytes), 0, 0)

    return read


# -- cp.async -------------------------------------------------------------------------------------


@reads(r"cp\.async\.c[ag]\.shared.*", OpClass.GLOBAL)
def _cp_async(b: Binding) -> Reader:
    source, nbytes = b.addresses(b.ins.operands[1]), int(b.ins.operands[2].value)  # type: ignore[union-attr]

    def read(w: Warp, mask: int) -> Row:
        at = source(w)[LANES[mask]]
        return (Event.CP_ASYNC, nbytes * len(at), sectors(at, nbytes), 0, 0)

    return read


@reads(r"cp\.async\.commit_group", OpClass.GLOBAL)
def _cp_async_commit(b: Binding) -> Reader:
    return lambda w, mask: (Event.CP_ASYNC_COMMIT, 0, 0, 0, 0)


@reads(r"cp\.async\.wait_(group|all)", OpClass.GLOBAL)
def _cp_async_wait(b: Binding) -> Reader:
    everything = b.match[1] == "all"
    allowed = 0 if everything else int(b.ins.operands[0].value)  # type: ignore[union-attr]
    return lambda w, mask: (Event.CP_ASYNC_WAIT, allowed, int(everything), 0, 0)


@reads(r"cp\.async\.mbarrier\.arrive(\.noinc)?.*", OpClass.BARRIER)
def _cp_async_arrive(b: Binding) -> Reader:
    address, adds = b.addresses(b.ins.operands[0]), int(b.match[1] is None)
    return lambda w, mask: [
        (Event.CP_ASYNC_ARRIVE, at, lanes, adds, 0) for at, lanes in by_value(mask, address(w))
    ]
