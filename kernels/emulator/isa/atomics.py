"""atom, red, and the asynchronous stores and reductions to another CTA's shared memory.

PTX ISA 9.1 sections 9.7.13.5 to 9.7.13.7 and 9.7.9.12. Lanes that name one address take effect one
after the other, lowest lane first (the ISA leaves the order open).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..checks.flags import SCOPES
from ..engines.reduction import DTYPES, reduction
from ..findings import EmulatorFault
from ..program import operand_regs
from ..ptx.ast import Vec
from ..schedule import AsyncOp
from .memory import by_cta, element_reader, element_writer, is_shared
from .pair import check_alive
from .table import LANES, SHARED_GENERIC_BASE, Binding, Handler, machine

if TYPE_CHECKING:
    from ..state import Cta, Warp

_SEMANTICS = ("relaxed", "acquire", "release", "acq_rel")
_SPACES = ("global", "shared", "shared::cta", "shared::cluster")
# ptxas takes them in any order, and CuTe DSL gives the space first.
_ANY_ORDER = rf"(?:\.(?:{'|'.join((*_SEMANTICS, *SCOPES, *_SPACES))}))*"
_TYPE = r"(?P<type>[busf](?:8|16|32|64|128)|bf16|f16x2|bf16x2)"


def _modifiers(b: Binding) -> tuple[str, str]:
    """The state space (empty: generic), and how strong the access is: ".acquire.gpu"; nothing for a
    relaxed one of the default scope."""
    found = [
        [m for m in b.ins.mods[1:] if m in known] for known in (_SPACES, _SEMANTICS, tuple(SCOPES))
    ]
    if any(len(words) > 1 for words in found):
        raise b.unsupported("a modifier stands twice")
    space, semantics, scope = ("".join(words) for words in found)
    kept = [m for m in (semantics, scope) if m and m != "relaxed"]
    return space, "".join(f".{m}" for m in kept)


@machine(
    rf"(?P<kind>atom|red){_ANY_ORDER}\.(?P<op>and|or|xor|cas|exch|add|inc|dec|min|max){_ANY_ORDER}"
    rf"(?P<noftz>\.noftz)?(?:\.L2::cache_hint)?(?:\.(?P<vec>v2|v4|v8))?\.{_TYPE}"
)
def atomic(b: Binding) -> Handler:
    """Reads, combines and writes memory; atom returns what was there before."""
    op, kind, returns = b.match["op"], b.match["type"], b.match["kind"] == "atom"
    _check_form(b, op, kind, returns)
    operands = list(b.ins.operands)
    target = operands.pop(0) if returns else None
    address = b.addresses(operands[0])
    count = int((b.match["vec"] or "v1")[1:])
    nbytes = _width(kind)
    sources = [_readers(b, x, nbytes, count) for x in operands[1 : 3 if op == "cas" else 2]]
    writers = _writers(b, target, nbytes, count, kind) if target is not None else []
    space, order = _modifiers(b)
    used = target is not None and any(b.program.is_read(r.name) for r in operand_regs(target))
    apply = _update(op, kind, space)
    total = count * nbytes

    def run(w: Warp, mask: int) -> None:
        lanes = LANES[mask]
        addrs = address(w)[lanes]
        values = [_gather(readers, w)[lanes] for readers in sources]
        old = np.empty((lanes.size, total), np.uint8)
        for shared, own, chosen in _places(w, space, addrs):
            given = [v[chosen] for v in values]
            old[chosen] = _apply(w, shared, own, chosen, given, apply, total, order, returns, used)
        for k, write in enumerate(writers):
            write(w, mask, old[:, k * nbytes : (k + 1) * nbytes])

    return run


def _check_form(b: Binding, op: str, kind: str, returns: bool) -> None:
    bits = kind[0] == "b" and not kind.startswith("bf")
    halves = kind in ("f16", "bf16", "f16x2", "bf16x2")
    good = {
        "and": kind in ("b32", "b64"),
        "or": kind in ("b32", "b64"),
        "xor": kind in ("b32", "b64"),
        "cas": returns and bits and kind != "b8" and kind != "b128",
        "exch": returns and kind in ("b32", "b64"),
        "inc": kind == "u32",
        "dec": kind == "u32",
        "min": kind in ("u32", "s32", "u64", "s64") or (halves and b.match["vec"] is not None),
        "max": kind in ("u32", "s32", "u64", "s64") or (halves and b.match["vec"] is not None),
        "add": kind in ("u32", "s32", "u64", "f32", "f64") or halves,
    }[op]
    if not good or (b.match["noftz"] is not None) != (halves and op in ("add", "min", "max")):
        raise b.unsupported("no such combination of operation and type")
    if b.match["vec"] is not None and _modifiers(b)[0] not in ("", "global"):
        raise b.unsupported("vector atomics are for global memory")


def _width(kind: str) -> int:
    return {"f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4}.get(kind) or int(kind[1:]) // 8


def _readers(b: Binding, op: Any, nbytes: int, count: int) -> list[Any]:
    items = op.items if isinstance(op, Vec) else (op,)
    if len(items) != count:
        raise b.unsupported(f"{len(items)} sources for a vector of {count}")
    return [element_reader(b, item, nbytes) for item in items]


def _writers(b: Binding, op: Any, nbytes: int, count: int, kind: str) -> list[Any]:
    items = op.items if isinstance(op, Vec) else (op,)
    if len(items) != count:
        raise b.unsupported(f"{len(items)} destinations for a vector of {count}")
    return [element_writer(b, item, nbytes, kind[0]) for item in items]


def _gather(readers: list[Any], w: Warp) -> NDArray[np.uint8]:
    columns = np.stack([read(w) for read in readers], axis=1)
    return np.ascontiguousarray(columns).view(np.uint8).reshape(32, -1)


def _update(op: str, kind: str, space: str):  # type: ignore[no-untyped-def]
    """f(old bytes, operands' bytes) -> new bytes, of whole vectors: uint8[n, bytes]."""
    dtype = DTYPES[kind]
    if op == "cas":

        def swap(old: NDArray[np.uint8], operands: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
            same = (old == operands[0]).all(axis=1, keepdims=True)
            return np.where(same, operands[1], old)

        return swap
    # "atom.add.f32 on global memory flushes subnormals, on shared memory it does not".
    apply = reduction(op, kind, ftz=kind == "f32" and not space.startswith("shared"))

    def combine(old: NDArray[np.uint8], operands: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        new = apply(np.ascontiguousarray(old).view(dtype), operands[0].copy().view(dtype))
        return np.ascontiguousarray(new, dtype).view(np.uint8).reshape(old.shape)

    return combine


def _places(w: Warp, space: str, addrs: NDArray[np.int64]):  # type: ignore[no-untyped-def]
    """Splits lanes by memory: (the CTA whose shared memory it is, or None; addresses; lanes)."""
    everyone = np.arange(addrs.size)
    if space == "global":
        yield None, addrs, everyone
        return
    inside = np.ones(addrs.size, bool) if space else is_shared(addrs)
    if not inside.all():
        yield None, addrs[~inside], everyone[~inside]
    if inside.any():
        own = addrs[inside] - (0 if space else SHARED_GENERIC_BASE)
        mine = everyone[inside]
        for cta, chosen, at in by_cta(w, own):
            yield cta, at, mine if chosen is None else mine[chosen]


def _apply(
    w: Warp,
    shared: Cta | None,
    addrs: NDArray[np.int64],
    chosen: NDArray[np.int64],
    operands: list[NDArray[np.uint8]],
    apply: Any,
    nbytes: int,
    order: str,
    returns: bool,
    used: bool,
) -> NDArray[np.uint8]:
    """Performs the operation in one memory; returns the old bytes. ``chosen``: which of the
    executing lanes the addresses are of; ``returns``: it is an atom, whose result is ``used``."""
    memory = w.cta.gmem if shared is None else shared.smem
    if (race := w.cta.machine.race) is not None and shared is not None:
        race.smem_strong(w, shared, addrs, nbytes, True, order, chosen, reads=returns)
    if shared is None and w.cta.machine.globals is not None:
        w.cta.machine.globals.atomic(w, addrs, nbytes, order, chosen, returns, used)
    one_by_one = np.unique(addrs).size < addrs.size
    rows = [slice(k, k + 1) for k in range(addrs.size)] if one_by_one else [slice(None)]
    before = []
    for lanes in rows:
        old = memory.load(addrs[lanes], nbytes)
        new = apply(old, [x[lanes] for x in operands])
        memory.store(addrs[lanes], new)
        before.append(old)
        if (new != old).any():  # a lock that is still taken has changed nothing
            w.cta.machine.events += 1
    return np.concatenate(before)


# -- st.async, red.async --------------------------------------------------------------------------


@machine(
    r"(?:st\.async(?:\.weak)?|red\.async\.relaxed\.cluster)(?P<space>\.shared::cluster)?"
    r"\.mbarrier::complete_tx::bytes(?:\.(?P<op>inc|dec|min|max|and|or|xor|add))?"
    r"(?:\.(?P<vec>v2|v4))?\.(?P<type>[busf](?:32|64))"
)
def store_async(b: Binding) -> Handler:
    """A store, or a reduction, into a CTA's shared memory that tells an mbarrier there."""
    op, kind = b.match["op"], b.match["type"]
    if (op is not None) != b.ins.op.startswith("red"):
        raise b.unsupported("red.async has an operation, st.async has none")
    count, nbytes = int((b.match["vec"] or "v1")[1:]), int(kind[1:]) // 8
    target, source, barrier = b.ins.operands
    to, bar, readers = b.addresses(target), b.addresses(barrier), _readers(b, source, nbytes, count)
    base = 0 if b.match["space"] else SHARED_GENERIC_BASE
    apply = None if op is None else _update(op, kind, "shared")

    def run(w: Warp, mask: int) -> None:
        lanes = LANES[mask]
        values, barriers = _gather(readers, w)[lanes], bar(w)[lanes] - base
        addrs = to(w)[lanes] - base
        for at in np.unique(barriers):
            chosen = barriers == at
            notified, key = w.cta.locate(int(at))
            for there, some, own in by_cta(w, addrs[chosen]):
                data = values[chosen] if some is None else values[chosen][some]
                _issue(w, there, own, data, notified, key, apply)
        w.cta.machine.events += 1

    return run


def _issue(
    w: Warp,
    there: Cta,
    addrs: NDArray[np.int64],
    data: NDArray[np.uint8],
    notified: Cta,
    at: int,
    apply: Any,
) -> None:
    if notified is not there:
        raise EmulatorFault(
            "tma_barrier_elsewhere",
            f"a store into the shared memory of CTA {there.rank} with its mbarrier in CTA"
            f" {notified.rank}: it must be in the same CTA",
        )
    check_alive(there, "an asynchronous store to shared memory")
    race = w.cta.machine.race
    engine = race.store_async(w, there, addrs, data.shape[1]) if race is not None else None
    if race is not None:
        race.barrier_used(w, notified, at, "st.async")

    def effect() -> None:
        if apply is None:
            there.smem.store(addrs, data)
            return
        for k in range(addrs.size):
            one = addrs[k : k + 1]
            old = there.smem.load(one, data.shape[1])
            there.smem.store(one, apply(old, [data[k : k + 1]]))

    complete = partial(_complete, w, engine, notified, at, data.size)
    what = "st.async" if apply is None else "red.async"
    w.cta.machine.asyncs.issue(None, AsyncOp(what, w, w.pc, effect, complete))


def _complete(w: Warp, engine: Any, notified: Cta, at: int, nbytes: int) -> None:
    if engine is not None:
        w.cta.machine.race.engine_arrive(engine, notified, at)  # type: ignore[union-attr]
    notified.mbarriers.complete_tx(at, nbytes, who="st.async")
