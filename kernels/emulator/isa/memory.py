"""ld and st on shared, global and local memory (PTX ISA 9.1 sections 9.7.9.8 to 9.7.9.11)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..checks.flags import SCOPES
from ..findings import EmulatorFault
from ..memory.local import LOCAL_GENERIC_BASE
from ..memory.shared import ELEMENT_DTYPES
from ..ptx.ast import Imm, Reg, Vec
from ..schedule import CTA_RANK_SHIFT, CTA_WINDOW_MASK
from .table import FULL, LANES, SHARED_GENERIC_BASE, Binding, Handler, machine

if TYPE_CHECKING:
    from ..state import Cta, Warp

_HINTS = (
    r"(?:\.(?:volatile|relaxed\.(?:cta|cluster|gpu|sys)|weak|nc|ca|cg|cs|lu|cv|wb|wt|"
    r"L1::\w+|L2::\w+))*"
)
_STRONG = ("acquire", "release", "relaxed", "volatile")
_ACQUIRE = r"(?:\.(?:acquire|release)\.(?:cta|cluster|gpu|sys))?"


def _shape(b: Binding) -> tuple[int, int, str]:
    """(elements, bytes each, type letter)."""
    count = int((b.match["vec"] or "v1")[1:])
    return count, int(b.match["bits"]) // 8, b.match["kind"]


def _pattern(op: str, more: str = "") -> str:
    return (
        rf"{op}{_ACQUIRE}{_HINTS}"
        rf"(?:\.(?P<space>shared|shared::cta|shared::cluster|global|local{more}))?{_HINTS}"
        r"(?:\.(?P<vec>v2|v4|v8))?\.(?P<kind>[busf])(?P<bits>8|16|32|64|128)"
    )


def load_shared(
    w: Warp,
    addrs: NDArray[np.int64],
    nbytes: int,
    among: NDArray[np.bool_] | None = None,
    order: str = "",
) -> NDArray[np.uint8]:
    """Bytes at each lane's shared address, in the CTA's own window or in a peer's. ``among``: which
    of the executing lanes these are, where it is not all; ``order``: of a strong access."""
    out = np.empty((addrs.size, nbytes), np.uint8)
    for cta, lanes, own in by_cta(w, addrs):
        _check_race(w, cta, own, nbytes, chosen=_within(among, lanes), order=order)
        if lanes is None:
            return cta.smem.load(own, nbytes)
        out[lanes] = cta.smem.load(own, nbytes)
    return out


def _check_race(
    w: Warp,
    cta: Cta,
    own: NDArray[np.int64],
    nbytes: int,
    data: NDArray[np.uint8] | None = None,
    chosen: NDArray[np.bool_] | None = None,
    order: str = "",
) -> None:
    """``data``: of a store; ``chosen``: of the executing lanes, where it is not the lowest ones;
    ``order``: of a strong access."""
    if (race := w.cta.machine.race) is not None:
        write = data is not None
        try:
            if order:
                race.smem_strong(w, cta, own, nbytes, write, order, chosen)
            else:
                race.smem(w, cta, own, nbytes, write, data, chosen)
        except IndexError:  # out of bounds: the access itself says so in full
            pass


def _within(
    among: NDArray[np.bool_] | None, lanes: NDArray[np.bool_] | None
) -> NDArray[np.bool_] | None:
    """Of the executing lanes, those that ``lanes`` (None: all) chooses of ``among`` (None: all)."""
    if among is None or lanes is None:
        return lanes if among is None else among
    out = among.copy()
    out[among] = lanes
    return out


def store_shared(
    w: Warp,
    addrs: NDArray[np.int64],
    data: NDArray[np.uint8],
    among: NDArray[np.bool_] | None = None,
    order: str = "",
) -> None:
    for cta, lanes, own in by_cta(w, addrs):
        given = data if lanes is None else data[lanes]
        check = partial(
            _check_race, w, cta, own, given.shape[1], given, _within(among, lanes), order
        )
        _check_store(w, check, partial(cta.smem.load, own, given.shape[1]), given)
        cta.smem.store(own, given)


def _check_store(
    w: Warp,
    check: Callable[[], None],
    load: Callable[[], NDArray[np.uint8]],
    data: NDArray[np.uint8],
) -> None:
    """Checks a store for races. On silicon one that puts back the very bytes that another has put
    there does no harm (compute-sanitizer's racecheck rates it INFO), and kernels rely on it."""
    try:
        check()
    except EmulatorFault as race:
        try:
            same = np.array_equal(load(), data)
        except EmulatorFault as fault:  # unwritten, or no address at all, which comes first
            if fault.code.endswith("_unwritten_read"):
                raise race from None
            raise
        other = race.details.get("other", {})
        twice = race.code in ("smem_race", "global_race") and other.get("access") == "write"
        if not (same and twice and w.cta.machine.options.profile == "silicon"):
            raise
        check()  # against reads: of writes this one is the last now


def is_shared(addrs: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which generic addresses lie in the shared window."""
    return addrs >= SHARED_GENERIC_BASE


def load_local(w: Warp, addrs: NDArray[np.int64], nbytes: int) -> NDArray[np.uint8]:
    """Bytes of each executing lane's own local memory."""
    return w.local.load(LANES[w.cta.machine.lanes], addrs, nbytes)


def store_local(w: Warp, addrs: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
    w.local.store(LANES[w.cta.machine.lanes], addrs, data)


def _windows(addrs: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which generic addresses lie in the shared, and which in the local window."""
    shared = is_shared(addrs)
    return shared, (addrs >= LOCAL_GENERIC_BASE) & ~shared


def load_generic(w: Warp, addrs: NDArray[np.int64], nbytes: int) -> NDArray[np.uint8]:
    """Bytes at each lane's generic address, in shared, local or global memory."""
    if not (addrs >= LOCAL_GENERIC_BASE).any():
        return w.cta.gmem.load(addrs, nbytes)
    shared, local = _windows(addrs)
    if shared.all():
        return load_shared(w, addrs - SHARED_GENERIC_BASE, nbytes)
    out = np.empty((addrs.size, nbytes), np.uint8)
    if shared.any():
        out[shared] = load_shared(w, addrs[shared] - SHARED_GENERIC_BASE, nbytes, shared)
    if local.any():
        lanes = LANES[w.cta.machine.lanes][local]
        out[local] = w.local.load(lanes, addrs[local] - LOCAL_GENERIC_BASE, nbytes)
    rest = ~(shared | local)
    if rest.any():
        out[rest] = w.cta.gmem.load(addrs[rest], nbytes)
    return out


def store_generic(w: Warp, addrs: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
    shared, local = _windows(addrs)
    rest = ~(shared | local)
    if rest.any():
        w.cta.gmem.store(addrs[rest], data[rest])
    if shared.any():
        store_shared(w, addrs[shared] - SHARED_GENERIC_BASE, data[shared], shared)
    if local.any():
        lanes = LANES[w.cta.machine.lanes][local]
        w.local.store(lanes, addrs[local] - LOCAL_GENERIC_BASE, data[local])


def load_global(w: Warp, addrs: NDArray[np.int64], nbytes: int) -> NDArray[np.uint8]:
    return w.cta.gmem.load(addrs, nbytes)


def store_global(w: Warp, addrs: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
    w.cta.gmem.store(addrs, data)


def accessors(space: str):  # type: ignore[no-untyped-def]
    """(load, store) of a state space: ``global``, ``const``, ``param``, ``shared...``, ``local``
    or, if empty, generic."""
    if space.startswith("shared"):
        return load_shared, store_shared
    if space == "local":
        return load_local, store_local
    if space in ("global", "const", "param"):
        return load_global, store_global
    return load_generic, store_generic


def by_cta(
    w: Warp, addrs: NDArray[np.int64]
) -> Iterator[tuple[Cta, NDArray[np.bool_] | None, NDArray[np.int64]]]:
    """Splits shared addresses by owner: (CTA, lanes or None for all, addresses)."""
    if len(w.cta.machine.ctas) == 1:
        yield w.cta, None, addrs
        return
    ranks = addrs >> CTA_RANK_SHIFT
    for rank in np.unique(ranks):
        lanes = ranks == rank
        cta, _ = w.cta.locate(int(rank) << CTA_RANK_SHIFT)
        own = addrs & CTA_WINDOW_MASK
        yield (cta, None, own) if lanes.all() else (cta, lanes, own[lanes])


def order_of(b: Binding) -> str:
    """How strong the access is, and how far it reaches: ".release.gpu"; nothing for a weak one."""
    if not any(m in _STRONG for m in b.ins.mods):
        return ""
    return "".join(f".{m}" for m in b.ins.mods if m in _STRONG or m in SCOPES)


def note_global(b: Binding, write: bool):  # type: ignore[no-untyped-def]
    """f(warp, addresses, bytes, data of a store) that tells the race detector of accesses to global
    memory; None for another state space."""
    space = b.match["space"] or ""
    if space not in ("global", ""):
        return None
    order = order_of(b)

    def note(
        w: Warp, addrs: NDArray[np.int64], nbytes: int, data: NDArray[np.uint8] | None = None
    ) -> None:
        chosen = None
        if not space and (addrs >= LOCAL_GENERIC_BASE).any():
            chosen = addrs < LOCAL_GENERIC_BASE
            addrs = addrs[chosen]
            data = None if data is None else data[chosen]
        if (races := w.cta.machine.globals) is None:
            return
        check = partial(races.access, w, addrs, nbytes, write, order, data, chosen)
        if data is None or order:
            check()
        else:
            _check_store(w, check, partial(w.cta.gmem.load, addrs, nbytes), data)

    return note


@machine(_pattern("ld", "|const|param"))
def load(b: Binding) -> Handler:
    count, nbytes, kind = _shape(b)
    target, source = b.ins.operands[:2]
    items = target.items if isinstance(target, Vec) else (target,)
    if len(items) != count:
        raise b.unsupported(f"{len(items)} destinations for a vector of {count}")
    address = b.addresses(source)
    fetch, _ = accessors(b.match["space"] or "")
    if fetch is load_shared and (order := order_of(b)):
        fetch = partial(load_shared, order=order)
    writers = [element_writer(b, item, nbytes, kind) for item in items]
    total = count * nbytes

    note = note_global(b, write=False)

    def run(w: Warp, mask: int) -> None:
        addrs = address(w)
        if mask != FULL:
            addrs = addrs[LANES[mask]]
        if note is not None and w.cta.machine.globals is not None:
            note(w, addrs, total)
        data = fetch(w, addrs, total)
        for k, write in enumerate(writers):
            write(w, mask, data[:, k * nbytes : (k + 1) * nbytes])

    return run


def element_writer(b: Binding, op: object, nbytes: int, kind: str):  # type: ignore[no-untyped-def]
    """Writes one vector element; narrower values are extended to the register."""
    if not isinstance(op, Reg):
        raise b.unsupported(f"destination {op} is not a register")
    width = int(op.kind[1:]) // 8
    if width < nbytes:
        raise b.unsupported(f"a .{op.kind} register cannot hold {nbytes} bytes")
    row = b.row(op, op.kind)
    if width == 16:
        return lambda w, mask, data: _put_rows(w, mask, row, data)
    narrow = np.dtype(f"{'i' if kind == 's' else 'u'}{nbytes}")

    def write(w: Warp, mask: int, data: np.ndarray) -> None:
        values = np.ascontiguousarray(data).view(narrow).reshape(-1)
        lanes = slice(None) if mask == FULL else LANES[mask]
        if width == 2:
            w.r16[row, :32][lanes] = values.astype(np.uint16)
        elif width == 4:
            w.r32[row, lanes] = values if nbytes == 4 else values.astype(np.uint32)
        else:
            wide = values.astype(np.uint64)
            w.r32[row, lanes] = wide.astype(np.uint32)
            w.r32[row + 1, lanes] = (wide >> np.uint64(32)).astype(np.uint32)

    return write


def _put_rows(w: Warp, mask: int, row: int, data: np.ndarray) -> None:
    words = np.ascontiguousarray(data).view(np.uint32)
    w.r32[row : row + words.shape[1], LANES[mask]] = words.T


@machine(_pattern("st"))
def store(b: Binding) -> Handler:
    count, nbytes, _ = _shape(b)
    target, source = b.ins.operands[:2]
    items = source.items if isinstance(source, Vec) else (source,)
    if len(items) != count:
        raise b.unsupported(f"{len(items)} sources for a vector of {count}")
    address = b.addresses(target)
    _, put = accessors(b.match["space"] or "")
    if put is store_shared and (order := order_of(b)):
        put = partial(store_shared, order=order)
    readers = [element_reader(b, item, nbytes) for item in items]
    plain = nbytes == 4 and all(isinstance(i, Reg) and i.kind == "b32" for i in items)
    rows = b.vector_rows(source) if plain else None

    note, private = note_global(b, write=True), b.match["space"] == "local"

    def run(w: Warp, mask: int) -> None:
        addrs = address(w)
        lanes = None if mask == FULL else LANES[mask]
        if rows is not None:
            values = w.r32[rows].T
        else:
            values = np.stack([read(w) for read in readers], axis=1)
        if lanes is not None:
            addrs, values = addrs[lanes], values[lanes]
        data = np.ascontiguousarray(values).view(np.uint8)
        if note is not None and w.cta.machine.globals is not None:
            note(w, addrs, data.shape[1], data)
        put(w, addrs, data)
        if not private:
            w.cta.machine.events += 1

    return run


def element_reader(b: Binding, op: object, nbytes: int):  # type: ignore[no-untyped-def]
    if isinstance(op, Reg) and op.kind == "b128":
        row = b.row(op, "b128")
        return lambda w: np.ascontiguousarray(w.r32[row : row + 4].T).view(ELEMENT_DTYPES[16])[:, 0]
    if nbytes == 16:
        raise b.unsupported(f"source {op} is not a .b128 register")
    dtype = np.dtype(f"u{nbytes}")
    if isinstance(op, Imm):
        constant = np.full(32, op.value & (1 << 8 * nbytes) - 1, dtype)
        return lambda w: constant
    if not isinstance(op, Reg):
        raise b.unsupported(f"source {op} is not a register")
    row = b.row(op, op.kind)
    if op.kind == "b16":
        return lambda w: w.r16[row, :32].astype(dtype)
    if op.kind == "b32":
        return lambda w: w.r32[row].astype(dtype)
    wide = b.lanes64(op)
    return lambda w: wide(w).astype(dtype)
