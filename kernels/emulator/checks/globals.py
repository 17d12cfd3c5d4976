"""Races in global memory: between the warps of a cluster, and between the clusters of a launch.

Within a cluster the clocks of `RaceDetector` decide. Clusters run one after the other here, but on
a GPU nothing orders them except flags: a release of one that another acquired. So an access also
carries its cluster and the number of the cluster's next release; another cluster's access comes
behind it if it acquired that release or a later one.

Strong accesses (atomics, .relaxed, .acquire, .release, .volatile) do not race with each other, and
they carry order: every one under ``silicon``; by the PTX text (section 8.9) a release or, behind a
fence, a relaxed write, seen by an acquire or, before a fence, a relaxed read.

Cells are 4 bytes; what covers one in part only is not tracked, other threads may own the rest. Of
several reads of a cell the last is remembered. Copies by TMA are noted by their box and spelled out
only when somebody writes to the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..findings import EmulatorFault
from .clocks import ASYNC_GLOBAL, GENERIC, LOOSE, TMEM_VIEW, Agent, Bundle, join

if TYPE_CHECKING:
    from ..memory import GlobalMemory
    from ..state import Warp

CELL_BYTES = 4
WEAK, STRONG, COPY = 1, 2, 3  # how a cell was accessed; 0: not yet
TMA_WRITE = "TMA write"
Cells = NDArray[np.int64]


@dataclass(slots=True)
class _Last:
    """Last accesses of one kind: by cell, as arrays."""

    how: NDArray[np.uint8]
    cluster: NDArray[np.int32]
    release: NDArray[np.int32]  # the cluster's first release that can cover it
    agent: NDArray[np.int32]
    clock: NDArray[np.int32]
    pc: NDArray[np.int32]

    @classmethod
    def of(cls, cells: int) -> _Last:
        return cls(np.zeros(cells, np.uint8), *(np.zeros(cells, np.int32) for _ in range(5)))


@dataclass(slots=True)
class _Tensor:
    """What is known of an allocation; ``boxes``: copies that nobody had to look at yet."""

    base: int
    cells: int
    writes: _Last | None = None
    reads: _Last | None = None
    boxes: dict[Any, tuple[Callable[[], Cells], tuple[int, ...]]] = field(default_factory=dict)


@dataclass(slots=True)
class _Flag:
    """What a strong write published: clocks within one cluster, and releases by cluster."""

    cluster: int
    bundle: Bundle
    releases: dict[int, int]


class GlobalRaces:
    """The launch's accesses. `begin` a cluster with its `RaceDetector`, then report accesses."""

    def __init__(self, memory: GlobalMemory) -> None:
        self._memory = memory
        self._tensors: dict[int, _Tensor] = {}
        self._flags: dict[int, _Flag] = {}
        self._cluster = 0
        self._releases = 0
        self._foreign: dict[int, Agent] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._writers: dict[Any, Agent] = {}
        self.race: Any = None

    def begin(self, race: Any) -> None:
        self.race = race
        self._cluster += 1
        self._releases = 0
        self._foreign, self._writers = {}, {}

    # -- accesses by threads -----------------------------------------------------------------------

    def access(
        self, warp: Warp, addrs: NDArray[np.int64], nbytes: int, write: bool, order: str = ""
    ) -> None:
        """A load or store by lanes; ``order``: ".release", ".volatile", ..."""
        agent = self.race._warps[warp]
        how = STRONG if order else WEAK
        if order and not write:
            self._acquire(warp, addrs, order)
        for tensor, cells in self._cells(addrs, nbytes):
            self._check(tensor, cells, agent, GENERIC, how, write, warp)
        if order and write:
            self._release(warp, addrs, order)

    def atomic(self, warp: Warp, addrs: NDArray[np.int64], nbytes: int, order: str) -> None:
        """atom or red: relaxed where ``order`` does not say more."""
        agent = self.race._warps[warp]
        self._acquire(warp, addrs, order)
        for tensor, cells in self._cells(addrs, nbytes):
            self._check(tensor, cells, agent, GENERIC, STRONG, True, warp)
        self._release(warp, addrs, order)

    # -- copies ------------------------------------------------------------------------------------

    def copy_in(
        self, warp: Warp, engine: Agent, start: int | None, key: Any, box: Callable[[], Cells]
    ) -> None:
        """A copy reads global memory: ``box`` gives the byte addresses of its 4-byte cells,
        ``start`` is the first one's (None: the copy is all outside the tensor)."""
        if (tensor := self._known(start)) is None:
            return
        mark = (COPY, self._cluster, self._releases + 1, engine.index, engine.clock, warp.pc)
        if tensor.writes is None:
            tensor.boxes[key] = (box, mark)
            return
        cells = box() - tensor.base >> 2
        self._check(tensor, cells, engine, ASYNC_GLOBAL, COPY, False, warp)

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
        how = STRONG if reduces else COPY
        self._check(tensor, box() - tensor.base >> 2, writer, ASYNC_GLOBAL, how, True, warp)
        return writer.clock

    def written(self, warp: Warp, clock: int) -> None:
        """The warp waited until its copies up to ``clock`` had written."""
        if (writer := self._writers.get(warp)) is not None:
            agent = self.race._warps[warp]
            bundle = self.race.agents.fit(agent)
            for row in (GENERIC, ASYNC_GLOBAL):
                bundle[row, writer.index] = max(int(bundle[row, writer.index]), clock)

    # -- flags -------------------------------------------------------------------------------------

    def _release(self, warp: Warp, addrs: NDArray[np.int64], order: str) -> None:
        race = self.race
        lanes = warp.cta.machine.lanes
        releases = "release" in order or "acq_rel" in order or not race.strict
        current = race._release(warp, lanes)
        bundle = current if releases else race._fenced.get(warp, race.agents.zero())
        loose = race.agents.padded(bundle)
        np.maximum(loose[LOOSE], current[GENERIC], out=loose[LOOSE])
        self._releases += 1
        known = {
            cluster: int(bundle[GENERIC, agent.index])
            for cluster, agent in self._foreign.items()
            if agent.index < bundle.shape[1] and bundle[GENERIC, agent.index]
        }
        for address in {int(a) for a in addrs}:
            flag = self._flags.get(address)
            if flag is None or flag.cluster != self._cluster:
                before = dict(flag.releases) if flag is not None else {}
                flag = self._flags[address] = _Flag(self._cluster, race.agents.zero(), before)
            flag.bundle = join(flag.bundle, loose)
            for cluster, number in known.items():
                flag.releases[cluster] = max(number, flag.releases.get(cluster, 0))
            if releases or race._fenced.get(warp) is not None:
                flag.releases[self._cluster] = self._releases

    def _acquire(self, warp: Warp, addrs: NDArray[np.int64], order: str) -> None:
        race = self.race
        row = GENERIC if "acq" in order or not race.strict else LOOSE
        agent = race._warps[warp]
        for address in {int(a) for a in addrs}:
            flag = self._flags.get(address)
            if flag is None:
                continue
            if flag.cluster == self._cluster:
                bundle = flag.bundle.copy()
                bundle[TMEM_VIEW] = 0
                race._acquire(warp, bundle if row == GENERIC else race._loose(bundle))
            for cluster, number in flag.releases.items():
                if cluster != self._cluster:
                    index = self._import(cluster).index
                    own = race.agents.fit(agent)
                    own[row, index] = max(int(own[row, index]), number)

    def _import(self, cluster: int) -> Agent:
        """The agent that stands for another cluster's releases in this one's clocks."""
        agent = self._foreign.get(cluster)
        if agent is None:
            agent = self._foreign[cluster] = self.race.agents.add("cluster", None)
            agent.bundle[:, agent.index] = 0
            agent.clock = 0
        return agent

    # -- the check ---------------------------------------------------------------------------------

    def _known(self, address: int | None) -> _Tensor | None:
        """None also for what is in no tensor, which the copy itself reports."""
        if address is None:
            return None
        try:
            return self._tensor(address)
        except EmulatorFault:
            return None

    def _tensor(self, address: int) -> _Tensor:
        allocation = self._memory.find(address, 1)
        tensor = self._tensors.get(allocation.base)
        if tensor is None:
            start = -(-allocation.base // CELL_BYTES) * CELL_BYTES
            cells = max(allocation.end - start, 0) // CELL_BYTES + 1
            tensor = self._tensors[allocation.base] = _Tensor(start, cells)
        return tensor

    def _cells(self, addrs: NDArray[np.int64], nbytes: int):  # type: ignore[no-untyped-def]
        """(tensor, cells covered in full) of the lanes' accesses; nothing for what is out of
        bounds, which the access itself reports."""
        if nbytes < CELL_BYTES or not addrs.size:
            return
        addrs = addrs.astype(np.int64, copy=False)
        try:
            low, high = int(addrs.min()), int(addrs.max())
            tensor = self._tensor(low)
            same = self._tensor(high) is tensor
        except EmulatorFault:
            return
        if not same:
            for address in addrs:
                yield from self._cells(np.array([address]), nbytes)
            return
        cells = (addrs - tensor.base) >> 2
        if nbytes > CELL_BYTES:
            cells = (cells[:, None] + np.arange(nbytes // CELL_BYTES)).reshape(-1)
        yield tensor, cells

    def _check(
        self, tensor: _Tensor, cells: Cells, agent: Agent, row: int, how: int, write: bool,
        warp: Warp,
    ) -> None:  # fmt: skip
        """Checks an access, then records it."""
        bundle = self.race.agents.fit(agent)
        if write and tensor.boxes:
            tensor.reads = tensor.reads or _Last.of(tensor.cells)
            for box, mark in tensor.boxes.values():
                _mark(tensor.reads, box() - tensor.base >> 2, mark)
            tensor.boxes.clear()
        if tensor.writes is not None:
            self._against(tensor.writes, tensor, cells, agent, bundle, row, how, write, True)
        if write and tensor.reads is not None:
            self._against(tensor.reads, tensor, cells, agent, bundle, row, how, write, False)
        name = f"{warp.name} of CTA {warp.cta.block}"
        self._names[self._cluster, agent.index] = name
        last = tensor.writes if write else tensor.reads
        if last is None:
            last = _Last.of(tensor.cells)
            if write:
                tensor.writes = last
            else:
                tensor.reads = last
        mark = (how, self._cluster, self._releases + 1, agent.index, agent.clock, warp.pc)
        _mark(last, cells, mark)

    def _against(
        self, last: _Last, tensor: _Tensor, cells: Cells, agent: Agent, bundle: Bundle, row: int,
        how: int, write: bool, wrote: bool,
    ) -> None:  # fmt: skip
        before = last.how[cells]
        due = before != 0
        if how == STRONG:
            due &= before != STRONG
        if not due.any():
            return
        cells, before = cells[due], before[due]
        # Nobody puts a proxy fence between ordinary reads and copies over them; between two copies
        # there is none to put.
        plain = bundle[GENERIC]
        strict_row = bundle[row] if wrote or self.race.strict else plain
        late = np.zeros(cells.size, bool)
        clusters = last.cluster[cells]
        own = clusters == self._cluster
        for view, chosen in ((strict_row, before != COPY), (plain, before == COPY)):
            here = own & chosen
            if here.any():
                late[here] = last.clock[cells[here]] > view[last.agent[cells[here]]]
            for cluster in np.unique(clusters[~own & chosen]):
                there = ~own & chosen & (clusters == cluster)
                known = self._foreign.get(int(cluster))
                number = int(view[known.index]) if known is not None else 0
                late[there] = last.release[cells[there]] > number
        if late.any():
            cell = int(cells[int(late.argmax())])
            self._fault(last, tensor, cell, agent, bundle, row, write, wrote)

    def _fault(
        self, last: _Last, tensor: _Tensor, cell: int, agent: Agent, bundle: Bundle, row: int,
        write: bool, wrote: bool,
    ) -> None:  # fmt: skip
        cluster, other = int(last.cluster[cell]), int(last.agent[cell])
        inside = cluster == self._cluster
        known = bundle[GENERIC], bundle[LOOSE]
        need = int(last.clock[cell] if inside else last.release[cell])
        index = other if inside else getattr(self._foreign.get(cluster), "index", -1)
        seen = [index >= 0 and int(view[index]) >= need for view in known]
        if row == ASYNC_GLOBAL and seen[0]:
            code, why = "missing_proxy_fence", "fence.proxy.async is missing between them"
        elif seen[1]:
            code = "sync_scope_too_narrow"
            why = "what synchronises them is relaxed, without a fence"
        elif int(last.how[cell]) == COPY and inside and wrote:
            code = "tma_store_not_waited"
            why = "cp.async.bulk.wait_group (not .read), or a synchronisation behind it, is missing"
        else:
            code, why = "global_race", "no synchronisation orders them"
            if not inside:
                why += " (they are in different clusters: only a release and an acquire would)"
        ins = self.race.program.segments[int(last.pc[cell])].first
        source = self.race.program.module.source_of(ins)
        at = f" at {source}" if source else ""
        who = self._names.get((cluster, other), "another thread")
        copy = "a copy of " if int(last.how[cell]) == COPY else ""
        address = tensor.base + cell * CELL_BYTES
        what = self._memory.find(address, 1).name or "global memory"
        before = f"{'write' if wrote else 'read'} by {copy}{who}{at} (ptx:{ins.line})"
        raise EmulatorFault(
            code,
            f"{'write' if write else 'read'} of {what}, byte {address - tensor.base}, is not"
            f" ordered after the {before}: {why}",
            space="global",
            address=address,
            other={
                "access": "write" if wrote else "read",
                "agent": f"{copy}{who}",
                "source": source,
                "ptx_line": ins.line,
                "instruction": ins.text,
            },
            access="write" if write else "read",
            agent=self.race._name(agent),
        )


def _mark(last: _Last, cells: Cells, mark: tuple[int, ...]) -> None:
    arrays: tuple[NDArray[Any], ...] = (
        last.how,
        last.cluster,
        last.release,
        last.agent,
        last.clock,
        last.pc,
    )
    for array, value in zip(arrays, mark, strict=True):
        array[cells] = value


def box_of(address: int, nbytes: int) -> Callable[[], Cells]:
    """The cells of a linear copy, by address."""
    return lambda: np.arange(address, address + nbytes - CELL_BYTES + 1, CELL_BYTES)
