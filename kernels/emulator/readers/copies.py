"""Readers of the copy engine: TMA tiles, linear bulk copies and reductions, their groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..isa.table import LANES, SHARED_GENERIC_BASE, Binding
from ..ptx.ast import Imm, Mem
from ..records import Event, OpClass, Source
from ..schedule import CTA_RANK_SHIFT, CTA_WINDOW_MASK
from .table import Reader, Row, reads

if TYPE_CHECKING:
    from ..state import Warp

Place = Callable[["Warp", int], int]


def _copies_in(b: Binding, size: Place, source: Source, mask_operand: int) -> Reader:
    """Rows of a copy to shared memory: one for each CTA that a multicast reaches, the first of
    which has read the source for all."""
    to, bar = b.address(b.ins.operands[0]), b.address(b.ins.operands[mask_operand - 1])
    multicast = ".multicast::cluster" in b.ins.op
    pair = ".cta_group::2" in b.ins.op
    ctas = b.scalar(b.ins.operands[mask_operand]) if multicast else None

    def read(w: Warp, mask: int) -> list[Row]:
        rows: list[Row] = []
        for lane in map(int, LANES[mask]):
            barrier, target, nbytes = bar(w, lane), to(w, lane), size(w, lane)
            if ctas is None:
                rows.append((Event.COPY_IN, barrier, nbytes, target, source))
                continue
            origin = source
            reached = ctas(w, lane)
            for rank in [r for r in range(16) if reached >> r & 1]:
                # With cta_group::2 the barrier is in the pair's CTA that the address names.
                told = rank & ~1 | barrier >> CTA_RANK_SHIFT & 1 if pair else rank
                at = told << CTA_RANK_SHIFT | barrier & CTA_WINDOW_MASK
                place = rank << CTA_RANK_SHIFT | target & CTA_WINDOW_MASK
                rows.append((Event.COPY_IN, at, nbytes, place, origin))
                origin = Source.MULTICAST
        return rows

    return read


def _tiles(b: Binding) -> int:
    """Tiles of the map that one copy moves: rows, of a gather or scatter."""
    return 4 if ".tile::gather4" in b.ins.op or ".tile::scatter4" in b.ins.op else 1


@reads(r"cp\.async\.bulk\.tensor\.\dd(?:\.[\w:]+)*?\.shared::\w+\.global\b.*", OpClass.COPY)
def _tile_in(b: Binding) -> Reader:
    tensor = b.ins.operands[1]
    assert isinstance(tensor, Mem)
    base, tiles = b.address(Mem(tensor.base, tensor.offset)), _tiles(b)

    def size(w: Warp, lane: int) -> int:
        return tiles * w.cta.machine.tensor_map(base(w, lane)).tile_bytes

    return _copies_in(b, size, Source.GLOBAL, 3)


@reads(r"cp\.async\.bulk\.shared::\w+\.global\b.*", OpClass.COPY)
def _linear_in(b: Binding) -> Reader:
    return _copies_in(b, b.scalar(b.ins.operands[2]), Source.GLOBAL, 4)


@reads(r"cp(?:\.reduce)?\.async\.bulk\.shared::cluster\.shared::cta\b.*", OpClass.COPY)
def _to_peer(b: Binding) -> Reader:
    return _copies_in(b, b.scalar(b.ins.operands[2]), Source.PEER, 4)


@reads(r"(?:st|red)\.async\b(?:\.\w+)*?(\.shared::cluster)?\.mbarrier::.*", OpClass.COPY)
def _store_async(b: Binding) -> Reader:
    """Lanes that tell the same barrier count as one copy."""
    vector = next((int(m[1:]) for m in b.ins.mods if m in ("v2", "v4")), 1)
    nbytes = vector * int(b.ins.mods[-1][1:]) // 8
    to, bar = b.addresses(b.ins.operands[0]), b.addresses(b.ins.operands[2])
    base = 0 if b.match[1] else SHARED_GENERIC_BASE

    def read(w: Warp, mask: int) -> list[Row]:
        lanes = LANES[mask]
        targets, barriers = to(w)[lanes] - base, bar(w)[lanes] - base
        rows: list[Row] = []
        for barrier in np.unique(barriers).tolist():
            chosen = targets[barriers == barrier]
            size = nbytes * len(chosen)
            rows.append((Event.COPY_IN, barrier, size, int(chosen[0]), Source.PEER))
        return rows

    return read


# -- out of shared memory -------------------------------------------------------------------------


@reads(r"cp(?:\.reduce)?\.async\.bulk\.tensor\.\dd\.global\.shared::cta\b.*", OpClass.COPY)
def _tile_out(b: Binding) -> Reader:
    tensor, source = b.ins.operands[:2]
    assert isinstance(tensor, Mem)
    base, start = b.address(Mem(tensor.base, tensor.offset)), b.address(source)
    tiles = _tiles(b)

    def size(w: Warp, lane: int) -> int:
        return tiles * w.cta.machine.tensor_map(base(w, lane)).tile_bytes

    return _copies_out(size, start, base)


@reads(r"cp(?:\.reduce)?\.async\.bulk\.global\.shared::cta\b.*", OpClass.COPY)
def _linear_out(b: Binding) -> Reader:
    target, source, size = b.ins.operands[:3]
    return _copies_out(b.scalar(size), b.address(source), b.address(target))


def _copies_out(size: Place, start: Place, target: Place) -> Reader:
    """Lanes that copy from the same place to the same are one copy: whole warps issue stores, as
    CUTLASS's epilogues do, and the hardware's instruction takes uniform registers."""

    def read(w: Warp, mask: int) -> list[Row]:
        lanes: dict[tuple[int, int, int], int] = {}
        for lane in map(int, LANES[mask]):
            key = size(w, lane), start(w, lane), target(w, lane)
            lanes[key] = lanes.get(key, 0) + 1
        return [
            (Event.COPY_OUT, nbytes, smem, count, 0) for (nbytes, smem, _), count in lanes.items()
        ]

    return read


@reads(r"cp\.async\.bulk\.commit_group", OpClass.COPY)
def _commit(b: Binding) -> Reader:
    return lambda w, mask: (Event.COPY_COMMIT, 0, 0, 0, 0)


@reads(r"cp\.async\.bulk\.wait_group(\.read)?", OpClass.COPY)
def _wait(b: Binding) -> Reader:
    count = b.ins.operands[0]
    allowed = count.value if isinstance(count, Imm) else 0
    return lambda w, mask: (Event.COPY_WAIT, allowed, int(bool(b.match[1])), 0, 0)
