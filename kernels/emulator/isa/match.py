"""match.sync, and redux.sync of float32 (PTX ISA 9.1 sections 9.7.13.10 and 9.7.13.12)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..ptx.ast import RegPair
from .collective import by_mask, gather, member_mask
from .table import FULL, LANES, Binding, Handler, Wait, machine

if TYPE_CHECKING:
    from ..state import Warp

_NAN = np.uint32(0x7FFFFFFF)


@machine(r"match\.(any|all)\.sync\.b(32|64)")
def match(b: Binding) -> Handler:
    """any: each lane learns which lanes hold its value. all: every lane learns all executing lanes
    (and ``p``, if asked for, is true) where they hold one value, else 0."""
    d, source, member = b.ins.operands
    values = b.lanes32(source) if b.match[2] == "32" else b.lanes64(source)
    every = b.match[1] == "all"
    if isinstance(d, RegPair) and not every:
        raise b.unsupported("match.any has no predicate")
    put = b.put32(d.first if isinstance(d, RegPair) else d)
    put_p = b.put_predicate(d.second) if isinstance(d, RegPair) else None
    members = member_mask(b, member)

    def run(w: Warp, mask: int) -> Wait | None:
        if (wait := gather(w, mask, members(w, mask), b)) is not None:
            return wait
        lanes = LANES[mask]
        own = values(w)[lanes]
        if every:
            same = bool((own == own[0]).all())
            put(w, mask, mask if same else 0)
            if put_p is not None:
                put_p(w, mask, FULL if same else 0)
            return None
        out = np.zeros(32, np.uint32)
        bits = (np.uint64(1) << lanes.astype(np.uint64)).astype(np.uint32)
        out[lanes] = np.where(own[:, None] == own[None, :], bits[None, :], 0).sum(axis=1)
        put(w, mask, out)
        return None

    return by_mask(b, member, run)


@machine(r"redux\.sync\.(min|max)(\.abs)?(\.NaN)?\.f32")
def redux_f32(b: Binding) -> Handler:
    """-0 is below +0. A NaN loses, or with .NaN wins; a result that is NaN is the canonical one."""
    d, source, member = b.ins.operands
    put, values, members = b.put32(d), b.lanes32(source), member_mask(b, member)
    least, absolute, keep_nan = b.match[1] == "min", bool(b.match[2]), bool(b.match[3])

    def run(w: Warp, mask: int) -> Wait | None:
        if (wait := gather(w, mask, members(w, mask), b)) is not None:
            return wait
        bits = values(w)[LANES[mask]]
        bits = bits & np.uint32(0x7FFFFFFF) if absolute else bits
        nan = np.isnan(bits.view(np.float32))
        if nan.all() or (keep_nan and nan.any()):
            put(w, mask, np.full(32, _NAN))
            return None
        bits = bits[~nan]
        # As integers, with the sign's order turned, floats sort as numbers.
        keys = np.where(bits >> 31 == 1, -(bits & 0x7FFFFFFF).astype(np.int64) - 1, bits)
        at = keys.argmin() if least else keys.argmax()
        put(w, mask, np.full(32, bits[at]))
        return None

    return by_mask(b, member, run)
