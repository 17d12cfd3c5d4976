"""A run as a timeline, for Perfetto (ui.perfetto.dev) or chrome://tracing.

One track a warp and one an engine of each CTA. The emulator knows no cycles, so time is *logical*:
a warp's clock advances by one for each PTX instruction, and a wait lasts until the clock of who
ended it. What happens before what is right; how long it takes on hardware is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .isa.table import Binding, first_lane
from .machine import Machine

if TYPE_CHECKING:
    from .findings import Finding
    from .host_runtime import Dim3
    from .isa.table import Wait
    from .program import Program, Segment
    from .state import Cta, Fragment, Warp

# Opcode prefix -> the engine that does the work.
_ENGINES = {
    "tcgen05.mma": "tensor core",
    "tcgen05.cp": "tensor core",
    "wgmma.mma_async": "tensor core",
    "cp.async.bulk.commit": "",
    "cp.async.bulk.wait": "",
    "cp.async.bulk": "TMA",
    "cp.reduce.async.bulk": "TMA",
}
_ENGINE_TID = 1000  # of the first engine's track; warps have their index


@dataclass(slots=True)
class Slice:
    """Something that took time: ``track`` is a warp's index or an engine's name."""

    cta: tuple[int, int, int]
    track: int | str
    name: str
    start: int
    duration: int
    source: str = ""
    ptx_line: int = 0


@dataclass
class Trace:
    """Slices of one launch, and the names of its warps."""

    kernel: str
    slices: list[Slice] = field(default_factory=list)
    roles: dict[int, str] = field(default_factory=dict)


class TracingMachine(Machine):
    """A machine that keeps a timeline; `Machine` itself knows nothing of it."""

    def __init__(self, program: Program, *rest: Any) -> None:
        super().__init__(program, *rest)
        self.trace = Trace(self.launch.kernel)
        self._clock: dict[Warp, int] = {}
        self._now = 0
        self._events: dict[tuple[int, Any], int] = {}  # (CTA, event) -> when it last happened
        # Blocked fragment -> since when, for what, where, who.
        self._since: dict[int, tuple[int, str, Segment, Warp]] = {}
        self._engines: dict[tuple[int, str], int] = {}
        self._barrier_of = {
            s.index: Binding(program, s.first, None, s.index).address(s.first.operands[1])  # type: ignore[arg-type]
            for s in program.segments
            if not s.native and s.first.op.startswith(("mbarrier.try_wait", "mbarrier.test_wait"))
        }

    def run_cluster(self, blocks: list[Dim3]) -> Finding | None:
        finding = super().run_cluster(blocks)
        end = max(self._clock.values(), default=0) + 1
        for since, what, segment, warp in self._since.values():
            self._add(warp.cta, warp.index, f"waits for ever: {what}", since, end - since, segment)
        self._since.clear()
        return finding

    def _step(self, warp: Warp, fragment: Fragment) -> bool:
        start, executed = self._clock.get(warp, 0), self.executed
        self.trace.roles[warp.index] = warp.name
        self._now = start + 1
        goes_on = super()._step(warp, fragment)
        segment = self.program.segments[warp.pc]
        if self.executed != executed:
            what = segment.first.op if segment.count == 1 else f"{segment.count} instructions"
            self._clock[warp] = max(self._clock.get(warp, 0), start + segment.count)
            self._add(warp.cta, warp.index, what, start, segment.count, segment)
        return goes_on

    def _execute(self, warp: Warp, fragment: Fragment, segment: Segment, mask: int) -> bool:
        self.lanes = 0
        goes_on = super()._execute(warp, fragment, segment, mask)
        op = segment.first.op
        for prefix, engine in _ENGINES.items() if self.lanes else ():
            if op.startswith(prefix):
                if engine:
                    key = (id(warp.cta), engine)
                    at = max(self._engines.get(key, 0), self._now)
                    self._engines[key] = at + 1
                    self._add(warp.cta, engine, f"{op} of {warp.name}", at, 1, segment)
                break
        barrier = self._barrier_of.get(segment.index)
        if barrier is not None and fragment.wait is None and self.lanes:
            at = barrier(warp, first_lane(self.lanes)) - warp.cta.window
            seen = self._events.get((id(warp.cta), ("mbar", at)), 0)
            self._clock[warp] = max(self._clock.get(warp, 0), seen)
        return goes_on

    def _block(self, warp: Warp, fragment: Fragment, wait: Wait, active: int) -> None:
        super()._block(warp, fragment, wait, active)
        segment = self.program.segments[fragment.pc]
        since = self._clock.get(warp, 0) + (not wait.retry)  # one that is done was a step, too
        self._since[id(fragment)] = (since, wait.what, segment, warp)

    def wake(self, key: tuple[Any, ...], cta: Cta) -> None:
        op = self.asyncs.current
        now = self._clock.get(op.warp, 0) + 1 if op is not None else self._now
        self._events[id(cta), key] = now
        for warp, fragment in cta.waiting.get(key, ()):
            if (blocked := self._since.pop(id(fragment), None)) is not None:
                since, what, segment, _ = blocked
                if now > since:
                    self._add(cta, warp.index, f"wait: {what}", since, now - since, segment)
            self._clock[warp] = max(self._clock.get(warp, 0), now)
        super().wake(key, cta)

    def _add(
        self, cta: Cta, track: int | str, name: str, start: int, duration: int, segment: Segment
    ) -> None:
        source = self.program.module.source_of(segment.first)
        line = segment.first.line
        self.trace.slices.append(Slice(cta.block, track, name, start, duration, source, line))


def write_trace(path: str | Path, traces: Iterable[Trace]) -> None:
    """Writes traces as Chrome's trace event JSON, a process for each CTA of each launch."""
    events: list[dict[str, Any]] = []
    pid = 0
    for number, trace in enumerate(traces, 1):
        tracks: dict[tuple[tuple[int, int, int], int | str], tuple[int, int]] = {}
        pids: dict[tuple[int, int, int], int] = {}
        for each in trace.slices:
            if each.cta not in pids:
                pid += 1
                pids[each.cta] = pid
                name = f"launch {number}: {trace.kernel} CTA {each.cta}"
                events.append(_named("process_name", pid, 0, name))
            key = (each.cta, each.track)
            if key not in tracks:
                tid = each.track if isinstance(each.track, int) else _ENGINE_TID + len(tracks)
                tracks[key] = (pids[each.cta], tid)
                events.append(_named("thread_name", *tracks[key], _track_name(trace, each.track)))
            p, t = tracks[key]
            args = {"source": each.source, "ptx line": each.ptx_line}
            events.append(
                {"ph": "X", "pid": p, "tid": t, "name": each.name, "ts": each.start,
                 "dur": each.duration, "args": args}
            )  # fmt: skip
    document = {"traceEvents": events, "otherData": {"time": "PTX instructions, not cycles"}}
    Path(path).write_text(json.dumps(document))


def _track_name(trace: Trace, track: int | str) -> str:
    if isinstance(track, str):
        return track
    role = trace.roles.get(track, "")
    return f"warp {track}" if role in ("", f"warp {track}") else f"warp {track} {role}"


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
