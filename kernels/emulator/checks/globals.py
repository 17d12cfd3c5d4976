"""Races in global memory: between the warps of a cluster, and between the clusters of a launch.

Within a cluster the clocks of `RaceDetector` decide, and among the lanes of a warp their meetings
(`lanes`). Clusters run one after the other here, but on a GPU nothing orders them except `flags`.
Strong accesses (atomics, .relaxed, .acquire, .release, .volatile) do not race with each other, and
are what flags are made of.

Cells are 4 bytes, or as narrow as the accesses (`history`). Copies by TMA are noted by their box
and spelled out only when somebody writes to the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from .clocks import ASYNC_GLOBAL, FENCED, GENERIC, LOOSE, UNRELEASED, Agent, Bundle
from .flags import Flags
from .history import CELL_BYTES, COPY, STRONG, WEAK, Cells, Mark, Slot, Tensor
from .lanes import ATOMICS, MANY, ByLanes, collision, sorted_cells, who_of
from .previous_grid import Footprint, PreviousGrid
from .reports import LANES_RACE, lane_name, same_word_twice

if TYPE_CHECKING:
    from ..memory import GlobalMemory
    from ..state import Warp

TMA_WRITE = "TMA write"


class GlobalRaces:
    """The launch's accesses. `begin` a cluster with its `RaceDetector`, then report accesses."""

    def __init__(self, memory: GlobalMemory) -> None:
        self._memory = memory
        self._tensors: dict[int, Tensor] = {}
        self._flags = Flags()
        before = memory.before
        self._previous = PreviousGrid(before) if isinstance(before, Footprint) else None
        self._cluster = 0
        self._names: dict[tuple[int, int], str] = {}
        self._writers: dict[Any, Agent] = {}
        self.race: Any = None

    def begin(self, race: Any) -> None:
        self.race = race
        self._cluster += 1
        self._flags.begin(race)
        if self._previous is not None:
            self._previous.begin(race)
        self._writers = {}

    def grid_dependency_wait(self, warp: Warp) -> None:
        """griddepcontrol.wait: the launch before is complete."""
        if self._previous is not None:
            self._previous.waited(self.race, warp)

    def footprint(self) -> Footprint:
        """What the launch has touched, for one that follows before it has ended."""
        return Footprint(self.race.program, tuple(self._tensors.values()))

    # -- accesses by threads -----------------------------------------------------------------------

    def access(
        self,
        warp: Warp,
        addrs: NDArray[np.int64],
        nbytes: int,
        write: bool,
        order: str = "",
        data: NDArray[np.uint8] | None = None,
        chosen: NDArray[Any] | None = None,
    ) -> None:
        """A load or store by lanes; ``order``: ".release.gpu", ".volatile", ...; ``data``: what a
        store writes, a row a lane; ``chosen``: of the executing lanes (None: all)."""
        how = STRONG if order else WEAK
        keys = set(addrs.tolist()) if order else set()
        if order and not write:
            self._flags.acquire(warp, keys, order)
        for tensor, at, some in self._places(addrs):
            picked = _among(chosen, some)
            shared = self._by_threads(warp, tensor, at, nbytes, how, write, picked)
            if shared and data is not None:
                self._one_value(at, data if some is None else data[some])
        if order and write:
            self._flags.publish(warp, keys, order)

    def atomic(
        self,
        warp: Warp,
        addrs: NDArray[np.int64],
        nbytes: int,
        order: str,
        chosen: NDArray[Any] | None,
        returns: bool,
        used: bool,
    ) -> None:
        """atom or red: relaxed where ``order`` does not say more. What does not return what it read
        acquires nothing (section 8.11.1). ``used``: the thread looks at what it read, all changes
        by others that came before among it; on silicon those are then before what it does next to
        the word, as writes of one word have one order (coherence, section 8.10.1).

        The PTX text calls that a race all the same where the next access is an ordinary one."""
        keys = set(addrs.tolist())
        if returns:
            self._flags.acquire(warp, keys, order)
        for tensor, at, some in self._places(addrs):
            picked = _among(chosen, some)
            settles = used and not self.race.strict
            self._by_threads(warp, tensor, at, nbytes, STRONG, True, picked, settles)
        self._flags.publish(warp, keys, order)

    def _by_threads(
        self, warp: Warp, tensor: Tensor, addrs: Cells, nbytes: int, how: int, write: bool,
        chosen: NDArray[Any] | None, settles: bool = False,
    ) -> bool:  # fmt: skip
        """Checks and records; whether lanes share a cell."""
        race = self.race
        own = agent = race._warps[warp]
        if race.strict:
            agent = race._lane_agent(warp, agent)
        words = np.arange(0, nbytes, CELL_BYTES)
        self._after_previous(own, lambda: (addrs[:, None] + words).reshape(-1), write)
        cells, each = tensor.cells_of(addrs, nbytes)
        cells, who, shared = sorted_cells(cells, race._who(warp, each, chosen)[: cells.size])
        if shared and write and how == STRONG:
            who = np.where(who == MANY, np.int32(ATOMICS), who)
        by = race._by(warp, own, who)
        self._check(tensor, cells, agent, GENERIC, how, write, warp, by, settles)
        return bool(shared)

    @staticmethod
    def _one_value(addrs: Cells, data: NDArray[np.uint8]) -> None:
        if (lanes := collision(addrs, data)) is not None:
            where = f"global address {int(addrs[lanes[0]]):#x}"
            raise EmulatorFault("global_race", same_word_twice(where, lanes))

    # -- copies ------------------------------------------------------------------------------------

    def copy_in(
        self, warp: Warp, engine: Agent, start: int | None, key: Any, box: Callable[[], Cells]
    ) -> None:
        """A copy reads global memory: ``box`` gives the byte addresses of its 4-byte cells,
        ``start`` is the first one's (None: the copy is all outside the tensor)."""
        if (tensor := self._known(start)) is None:
            return
        self._after_previous(engine, box, False)
        if not tensor.written:
            self._name(engine, warp)
            mark = Mark(COPY, self._cluster, engine.index, engine.clock, warp.pc)
            tensor.copied(key, box, mark)
            return
        self._check(tensor, tensor.words(box()), engine, ASYNC_GLOBAL, COPY, False, warp)

    def copy_out(
        self, warp: Warp, engine: Agent, start: int | None, box: Callable[[], Cells], reduces: bool
    ) -> int:
        """A copy writes global memory, or reduces into it (as atomics do); returns its clock, for
        `written`."""
        if (tensor := self._known(start)) is None:
            return 0
        writer = self._writers.get(warp)
        if writer is None:
            writer = self._writers[warp] = self.race.agents.add(TMA_WRITE, warp)
            writer.clock = 0
        writer.clock += 1
        writer.bundle = self.race.agents.fit(engine).copy()
        writer.bundle[:, writer.index] = writer.clock
        self._after_previous(engine, box, True)
        how = STRONG if reduces else COPY
        self._check(tensor, tensor.words(box()), writer, ASYNC_GLOBAL, how, True, warp)
        return writer.clock

    def written(self, warp: Warp, clock: int) -> None:
        """The warp waited until its copies up to ``clock`` had written, which is for all to see."""
        if (writer := self._writers.get(warp)) is not None:
            agent = self.race._warps[warp]
            bundle = self.race.agents.fit(agent)
            for row in (GENERIC, ASYNC_GLOBAL, FENCED):
                bundle[row, writer.index] = max(int(bundle[row, writer.index]), clock)

    # -- the check ---------------------------------------------------------------------------------

    def _known(self, address: int | None) -> Tensor | None:
        """None also for what is in no tensor, which the copy itself reports."""
        if address is None:
            return None
        try:
            return self._tensor(address)
        except EmulatorFault:
            return None

    def _tensor(self, address: int) -> Tensor:
        allocation = self._memory.find(address, 1)
        tensor = self._tensors.get(allocation.base)
        if tensor is None:
            start = allocation.base // CELL_BYTES * CELL_BYTES
            cells = (allocation.end - start) // CELL_BYTES + 1
            tensor = self._tensors[allocation.base] = Tensor(start, cells)
        return tensor

    def _places(
        self, addrs: NDArray[np.int64]
    ) -> Iterator[tuple[Tensor, Cells, NDArray[np.int64] | None]]:
        """(tensor, addresses, which of the lanes: None for all); nothing for what is out of bounds,
        which the access itself reports."""
        if not addrs.size:
            return
        addrs = addrs.astype(np.int64, copy=False)
        low, high = self._known(int(addrs.min())), self._known(int(addrs.max()))
        if low is not None and low is high:
            yield low, addrs, None
            return
        by: dict[int, tuple[Tensor, list[int]]] = {}
        for k, address in enumerate(addrs.tolist()):
            if (tensor := self._known(address)) is not None:
                by.setdefault(id(tensor), (tensor, []))[1].append(k)
        for tensor, lanes in by.values():
            yield tensor, addrs[lanes], np.array(lanes)

    def _check(
        self, tensor: Tensor, cells: Cells, agent: Agent, row: int, how: int, write: bool,
        warp: Warp, by: ByLanes | None = None, settles: bool = False,
    ) -> None:  # fmt: skip
        """Checks an access, then records it; ``settles``: who is ordered behind this one is behind
        all earlier strong writes of the cells."""
        bundle = self.race.agents.fit(agent)
        if write and tensor.boxes:
            tensor.spell_out()
        against = [(slot, True) for slot in tensor.weak.slots]
        if how != STRONG:
            against += [(slot, True) for slot in tensor.strong.slots]
        if write:
            against += [(slot, False) for slot in tensor.reads.slots]
        access = _Access(agent, bundle, row, how, write, by)
        fault: EmulatorFault | None = None
        for slot, wrote in against:
            late = self._late(slot, cells, access, wrote)
            if late is not None:
                fault = self._fault(tensor, slot, cells, int(late.argmax()), access, wrote)
                break
        self._name(agent, warp)
        tags: NDArray[np.int32] | int = 0 if by is None else by.tags()
        mark = Mark(how, self._cluster, agent.index, agent.clock, warp.pc, tags)
        history = tensor.reads if not write else tensor.strong if how == STRONG else tensor.weak
        if settles:
            history.forget(cells)
        history.add(cells, mark, lambda slot, at: self._covered(slot, at, access))
        if fault is not None:
            raise fault

    def _after_previous(self, agent: Agent, words: Callable[[], Cells], write: bool) -> None:
        previous = self._previous
        if previous is not None and not previous.is_over(self.race.agents.fit(agent)):
            previous.check(words(), write, self.race._name(agent))

    def _name(self, agent: Agent, warp: Warp) -> None:
        self._names[self._cluster, agent.index] = f"{warp.name} of CTA {warp.cta.block}"

    def _late(
        self, slot: Slot, cells: Cells, access: _Access, wrote: bool
    ) -> NDArray[np.bool_] | None:
        """Which of the slot's accesses conflict with this one and are not ordered before it."""
        before = slot.how[cells]
        due = before != 0
        if access.how == STRONG:
            due &= before != STRONG
        if not due.any():
            return None
        # Nobody puts a proxy fence between ordinary reads and copies over them; between two copies
        # there is none to put.
        plain = access.bundle[GENERIC]
        view = access.bundle[access.row] if wrote or self.race.strict else plain
        if view is plain or not (copies := due & (before == COPY)).any():
            late = self._unordered(slot, cells, access, view) & due
        else:
            late = self._unordered(slot, cells, access, view) & due & ~copies
            late |= self._unordered(slot, cells, access, plain) & copies
        return late if late.any() else None

    def _unordered(
        self, slot: Slot, cells: Cells, access: _Access, view: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Which of the slot's accesses the view does not hold, or no meeting of lanes orders."""
        clusters, agents, clocks = slot.cluster[cells], slot.agent[cells], slot.clock[cells]
        here = clusters == self._cluster
        if here.all():
            late = clocks > view[agents]
        else:
            late = np.zeros(cells.size, np.bool_)
            late[here] = clocks[here] > view[agents[here]]
            for cluster in np.unique(clusters[~here]).tolist():
                there = clusters == cluster
                known = self._flags.seen(cluster, view)
                inside = agents[there] < known.size
                seen = np.where(inside, known[np.minimum(agents[there], known.size - 1)], 0)
                late[there] = clocks[there] > seen
        if access.by is not None and here.any():
            lanes = access.by.late(slot.tag[cells], False)
            if lanes is not None:
                own = np.zeros(cells.size, np.bool_)
                for index in access.by.agents:
                    own |= agents == index
                late |= lanes & own & here
        return late

    def _covered(self, slot: Slot, cells: Cells, access: _Access) -> NDArray[np.bool_]:
        """See `History.add`. A strong access conflicts with less than a weak one."""
        covered = ~self._unordered(slot, cells, access, access.bundle[GENERIC])
        if access.how == STRONG:
            covered &= slot.how[cells] == STRONG
        return covered

    def _fault(
        self, tensor: Tensor, slot: Slot, cells: Cells, k: int, access: _Access, wrote: bool
    ) -> EmulatorFault:
        cell, by = int(cells[k]), access.by
        cluster, other = int(slot.cluster[cell]), int(slot.agent[cell])
        code, why = self._classify(slot, cell, access, wrote)
        ins = self.race.program.segments[int(slot.pc[cell])].first
        source = self.race.program.module.source_of(ins)
        at = f" at {source}" if source else ""
        who, agent = self._names.get((cluster, other), "another thread"), access.agent
        here = self.race._name(agent)
        if why == LANES_RACE and by is not None:
            who += f", {lane_name(who_of(int(slot.tag[cell])))}"
            here += f", {lane_name(int(by.who[k]))}"
        copy = "a copy of " if int(slot.how[cell]) == COPY else ""
        address = tensor.base + cell * CELL_BYTES // tensor.parts
        allocation = self._memory.find(max(address, tensor.base), 1)
        what = allocation.name or "global memory"
        before = f"{'write' if wrote else 'read'} by {copy}{who}{at} (ptx:{ins.line})"
        return EmulatorFault(
            code,
            f"{'write' if access.write else 'read'} by {here} of {what}, byte"
            f" {address - allocation.base}, is not ordered after the {before}: {why}",
            space="global",
            address=address,
            other={
                "access": "write" if wrote else "read",
                "agent": f"{copy}{who}",
                "source": source,
                "ptx_line": ins.line,
                "instruction": ins.text,
            },
            access="write" if access.write else "read",
            agent=here,
        )

    def _classify(self, slot: Slot, cell: int, access: _Access, wrote: bool) -> tuple[str, str]:
        cluster, other = int(slot.cluster[cell]), int(slot.agent[cell])
        clock, inside = int(slot.clock[cell]), cluster == self._cluster

        def holds(view: NDArray[np.int32]) -> bool:
            known = view if inside else self._flags.seen(cluster, view)
            return bool(other < known.size and known[other] >= clock)

        ordered = holds(access.bundle[GENERIC])
        if access.by is not None and inside and ordered and other in access.by.agents:
            return "global_race", LANES_RACE
        if access.row == ASYNC_GLOBAL and ordered:
            return "missing_proxy_fence", "fence.proxy.async is missing between them"
        loose = np.maximum(access.bundle[LOOSE], access.bundle[UNRELEASED])
        nearly = self._flags.nearly(cluster, access.bundle[UNRELEASED])
        if holds(loose) or (not inside and other < nearly.size and nearly[other] >= clock):
            return (
                "sync_scope_too_narrow",
                "what synchronises them is relaxed, without a fence behind the first access and"
                " another before the second, or its scope does not reach both threads",
            )
        if int(slot.how[cell]) == COPY and inside and wrote:
            return (
                "tma_store_not_waited",
                "cp.async.bulk.wait_group (not .read), or a synchronisation behind it, is missing",
            )
        why = "no synchronisation orders them"
        if not inside:
            why += " (they are in different clusters: only a release and an acquire would)"
        return "global_race", why


@dataclass(frozen=True, slots=True)
class _Access:
    """An access that is being checked. ``row``: of the bundle, which governs it."""

    agent: Agent
    bundle: Bundle
    row: int
    how: int
    write: bool
    by: ByLanes | None


def _among(chosen: NDArray[Any] | None, some: NDArray[np.int64] | None) -> NDArray[Any] | None:
    """Of the executing lanes, ``some`` of those that ``chosen`` (a mask or indices) picks."""
    if chosen is None or some is None:
        return some if chosen is None else chosen
    picked: NDArray[np.int64] = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
    return picked[some]


def box_of(address: int, nbytes: int) -> Callable[[], Cells]:
    """The cells of a linear copy, by address."""
    return lambda: np.arange(address, address + nbytes - CELL_BYTES + 1, CELL_BYTES)
