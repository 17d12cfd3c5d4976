"""tcgen05.alloc, dealloc and relinquish_alloc_permit (PTX ISA 9.1 section 9.7.16.7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..findings import EmulatorFault
from .pair import check_group, group_of, pair_peer
from .table import Binding, Handler, Wait, first_lane, machine

if TYPE_CHECKING:
    from ..state import Cta, Warp


@dataclass(slots=True, eq=False)
class PairCall:
    """One CTA's half of a collective alloc or dealloc. ``column``: what both were given."""

    warp: Warp
    columns: int
    address: int = 0
    column: int | None = None
    met: bool = False


@machine(r"tcgen05\.alloc\.cta_group::([12])\.sync\.aligned\.shared(?:::cta)?\.b32", converged=True)
def alloc(b: Binding) -> Handler:
    """Writes the address of the new columns to shared memory; blocks while there is no room. With
    ``cta_group::2`` both CTAs allocate the same columns, when both have asked."""
    to, count = b.address(b.ins.operands[0]), b.scalar(b.ins.operands[1])
    group = int(b.match[1])

    def run(w: Warp, mask: int) -> Wait | None:
        lane, cta = first_lane(mask), w.cta
        columns = count(w, lane)
        if group == 2 and "alloc" not in cta.pair_calls:
            cta.tmem.check_alloc(columns)
            pair_peer(cta)
        check_group(cta, group)
        column = _alloc_pair(w, columns) if group == 2 else cta.tmem.alloc(columns)
        if column is None:
            detail = (("barrier", "Tensor Memory"), ("waits_for", f"{columns} columns"))
            return Wait(("tmem",), f"tcgen05.alloc of {columns} columns", detail=detail)
        cta.tmem_owners[column] = (w, w.pc)
        own, start = cta.locate(to(w, lane))
        at = np.array([start], np.int64)
        if own is not cta:
            raise EmulatorFault(
                "cluster_address", "tcgen05.alloc writes to its own CTA's shared memory only"
            )
        if (race := cta.machine.race) is not None:
            race.tmem_allocated(cta, column, columns)
            race.smem_written(w, cta, start, 4)
        cta.smem.store(at, np.array([[column]], np.uint32).view(np.uint8))
        cta.machine.events += 1
        return None

    return run


def _alloc_pair(w: Warp, columns: int) -> int | None:
    """The pair's new first column, or None while the peer has not asked or there is no room."""
    cta = w.cta
    peer = cta.machine.ctas[cta.rank ^ 1]
    mine = cta.pair_calls.setdefault("alloc", PairCall(w, columns))
    other = peer.pair_calls.get("alloc")
    if mine.warp is not w:
        return None  # another warp of this CTA is at it: first come, first served
    if mine.column is None and other is not None and other.column is None:
        _same_columns("tcgen05.alloc", mine, other)
        room = cta.tmem.room(columns)
        common = [column for column in peer.tmem.room(columns) if column in room]
        mine.column = cta.tmem.take(columns, common)
        other.column = peer.tmem.take(columns, common)
        cta.machine.wake(("tmem",), peer)
    if mine.column is not None:
        del cta.pair_calls["alloc"]
        cta.machine.wake(("tmem",), cta)
    return mine.column


def _same_columns(what: str, mine: PairCall, other: PairCall) -> None:
    if mine.columns != other.columns or mine.address != other.address:
        raise EmulatorFault(
            "tmem_pair_mismatch",
            f"{what}.cta_group::2 of {mine.columns} columns at {mine.address:#x} by"
            f" {mine.warp.name}, but the peer CTA's {other.warp.name} has {other.columns} at"
            f" {other.address:#x}",
        )


@machine(r"tcgen05\.dealloc\.cta_group::([12])\.sync\.aligned\.b32", converged=True)
def dealloc(b: Binding) -> Handler:
    """With ``cta_group::2`` the call may block until the peer CTA's; the model always does, so that
    a kernel that counts on the contrary is found out (table 48)."""
    where, count = b.scalar(b.ins.operands[0]), b.scalar(b.ins.operands[1])
    group = int(b.match[1])

    def run(w: Warp, mask: int) -> Wait | None:
        lane, cta = first_lane(mask), w.cta
        at, columns = where(w, lane), count(w, lane)
        if group == 2 and not _meet_to_free(w, at, columns):
            return Wait(("tmem pair",), "tcgen05.dealloc by the peer CTA")
        if group == 1:
            group_of(w, group)
        _free(w, cta, at, columns)
        return None

    return run


def _meet_to_free(w: Warp, at: int, columns: int) -> bool:
    cta = w.cta
    mine = cta.pair_calls.get("dealloc")
    if mine is None:
        group_of(w, 2)
        mine = cta.pair_calls["dealloc"] = PairCall(w, columns, at)
        peer = pair_peer(cta)
        other = peer.pair_calls.get("dealloc")
        if other is not None and not other.met:
            _same_columns("tcgen05.dealloc", mine, other)
            mine.met = other.met = True
            cta.machine.wake(("tmem pair",), peer)
    if mine.met and mine.warp is w:
        del cta.pair_calls["dealloc"]
        cta.machine.wake(("tmem pair",), cta)
        return True
    return False


def _free(w: Warp, cta: Cta, at: int, columns: int) -> None:
    machine = cta.machine
    cta.tmem.dealloc(at, columns)
    if machine.race is not None:
        machine.race.tmem_freed(w, cta, at & 0xFFFF, columns)
    machine.wake(("tmem",), cta)
    if cta.cta_group == 2:
        machine.wake(("tmem",), machine.ctas[cta.rank ^ 1])


@machine(r"tcgen05\.relinquish_alloc_permit\.cta_group::([12])\.sync\.aligned", converged=True)
def relinquish(b: Binding) -> Handler:
    group = int(b.match[1])

    def run(w: Warp, mask: int) -> None:
        group_of(w, group)
        w.cta.tmem.relinquish()

    return run
