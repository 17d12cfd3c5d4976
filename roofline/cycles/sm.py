"""One cluster of CTAs on its SMs, instruction by instruction.

A warp issues its blocks in order: an instruction waits for its operands, for its pipe and for an
issue slot of its sub-partition, of which the warp that has waited longest gets the next. MMAs run
one after another, each for the longer of its arithmetic and its share of the SMEM port; copies
queue for the SM's bandwidth; barriers count arrivals as they come in. Which way a warp went, and
which phase it waited for, is in the records; when it got there is what the model says.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any

from kernels.emulator.records import MORE, Event, MmaForm, OpClass, WarpRecord
from roofline.cycles import barriers, blackwell, copies, memory, warpgroups  # noqa: F401 (handlers)
from roofline.cycles.blocks import Block, Blocks, Op
from roofline.cycles.handlers import HANDLERS, handles
from roofline.cycles.hardware import NO_PIPE, PIPES, SUB_PARTITIONS, Hardware
from roofline.cycles.state import Mbarrier, Run, Sm, Span, WarpGroup, WarpState, visits_of
from roofline.errors import RooflineError

_SHORTEST_SPAN = 16.0  # cycles


class Simulation:
    """Replays the warps of one cluster."""

    def __init__(
        self, warps: Sequence[WarpRecord], blocks: Blocks, hw: Hardware, timeline: bool = False
    ) -> None:
        code = blocks.code
        ranks = {cta: rank for rank, cta in enumerate(dict.fromkeys(w.cta for w in warps))}
        self.code, self.hw, self.timeline = code, hw, timeline
        self.warps = [
            WarpState(w, ranks[w.cta], visits_of(w, code, blocks), code.registers) for w in warps
        ]
        self.sms = [Sm() for _ in ranks]
        self.run = Run()
        self.heap: list[tuple[float, int, Any]] = []
        self.serial = count()
        slots = len(ranks) * SUB_PARTITIONS
        self.issue_free = [0.0] * slots
        self.pipe_free = [0.0] * (slots * len(PIPES))
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[tuple[int, int], list[Any]] = {}
        self.cluster_arrived = 0
        self.cluster_waiters: list[WarpState] = []
        self.warpgroups: dict[tuple[int, int], WarpGroup] = {}
        self.cluster_phase = 0
        self.mma_cycles: dict[tuple[int, int, int, MmaForm], tuple[float, float, float]] = {}
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.stalls: defaultdict[str, defaultdict[str, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        self.pipe_busy = [0.0] * len(PIPES)
        self.end = 0.0

    # -- the loop ----------------------------------------------------------------------------------

    def simulate(self) -> Run:
        """Runs all warps to their end."""
        for warp in self.warps:
            self.push(0.0, warp)
        heap = self.heap
        while heap:
            now, _, item = heapq.heappop(heap)
            if type(item) is WarpState:
                self._issue(item, now)
            else:
                item(now)
        self.end = max([self.end, *(sm.tensor_free for sm in self.sms)])
        stuck = [w for w in self.warps if w.next_visit < len(w.visits) or w.block is not None]
        if stuck:
            names = ", ".join(sorted({w.role for w in stuck}))
            raise RooflineError(f"records: {names} wait for a barrier that nobody completes")
        return self._finish()

    def push(self, at: float, item: Any) -> None:
        heapq.heappush(self.heap, (at, next(self.serial), item))

    def _issue(self, w: WarpState, now: float) -> None:
        """Issues a warp's instructions until somebody else's turn comes first."""
        heap, issue_free, pipe_free = self.heap, self.issue_free, self.pipe_free
        slot, pipes, step = w.slot, w.slot * len(PIPES), self.hw.issue
        ready, who = w.ready, w.who
        block = w.block
        while True:
            if block is None or w.op == len(block.ops):
                block = self._next_block(w)
                if block is None:
                    return
                if not block.ops:
                    continue
            op: Op = block.ops[w.op]
            if w.wanted < 0.0:
                wanted = w.after
                for register in op.reads:
                    if ready[register] > wanted:
                        wanted = ready[register]
                        w.cause = _DEPENDENCY[who[register]]
                w.wanted = wanted
            pipe = op.pipe
            start = w.wanted if w.wanted > now else now
            if issue_free[slot] > start:
                start = issue_free[slot]
            busy = pipe != NO_PIPE and pipe_free[pipes + pipe] > start
            if busy:
                start = pipe_free[pipes + pipe]
            if start > now and heap and heap[0][0] <= start:
                self.push(start, w)
                return
            now = start
            issue_free[slot] = start + step
            if pipe != NO_PIPE:
                pipe_free[pipes + pipe] = start + op.interval
                self.pipe_busy[pipe] += op.interval
            if start > w.after:
                self._account(w, start, pipe)
            done = start + op.latency
            klass = int(self.code.op[op.index])
            for register in op.writes:
                ready[register] = done
                who[register] = klass
            w.after = start + step
            w.wanted = -1.0
            w.op += 1
            self.run.instructions += 1
            if op.machine and not self._machine(w, op, start):
                return
            now = w.after if w.after > now else now
            if done > self.end:
                self.end = done

    def _account(self, w: WarpState, start: float, pipe: int) -> None:
        """Who is to blame for the cycles since the warp could have issued."""
        stalls = self.stalls[w.role]
        if w.wanted > w.after:
            stalls[w.cause] += w.wanted - w.after
        rest = start - max(w.wanted, w.after)
        if rest > 0:
            stalls[f"{PIPES[pipe]} busy" if pipe != NO_PIPE else "issue slot"] += rest

    def _next_block(self, w: WarpState) -> Block | None:
        block = w.block
        if block is not None:
            for register, sources in block.copies:
                at, klass = 0.0, int(OpClass.MOVE)
                for source in sources:
                    if w.ready[source] > at:
                        at, klass = w.ready[source], w.who[source]
                w.ready[register], w.who[register] = at, klass
            if self.timeline:
                self._span(w, block, w.after)
        w.op = 0
        if w.next_visit == len(w.visits):
            w.block = None
            self.end = max(self.end, w.after)
            return None
        w.block = w.visits[w.next_visit]
        w.next_visit += 1
        w.entered = w.after
        return w.block

    def _span(self, w: WarpState, block: Block, until: float) -> None:
        """Puts what a warp has done of a block on the timeline, unless it is too short to see."""
        if block.ops and until - w.entered > _SHORTEST_SPAN:
            source = self.code.sources[self.code.source[block.ops[0].index]].rpartition("/")[2]
            track = f"{w.role} (warp {w.record.warp})"
            self.run.spans.append(Span(track, source or "code", w.entered, until))

    def _machine(self, w: WarpState, op: Op, start: float) -> bool:
        """The events of an instruction; False if the warp now waits for somebody."""
        while True:
            event = w.events[w.next_event]
            w.next_event += 1
            kind = event[0]
            goes_on = HANDLERS[kind & ~MORE](self, w, op, start, event)
            if not kind & MORE:
                return bool(goes_on)

    def _finish(self) -> Run:
        run, sms = self.run, len(self.sms)
        run.cycles = self.end
        for pipe, busy in zip(PIPES, self.pipe_busy, strict=True):
            if pipe != "none":
                run.busy[pipe] = busy / (SUB_PARTITIONS * sms)
        run.busy["issue"] = run.instructions * self.hw.issue / (SUB_PARTITIONS * sms)
        run.busy |= {unit: busy / sms for unit, busy in self.busy.items()}
        run.stalls = {role: dict(causes) for role, causes in self.stalls.items()}
        for w in self.warps:
            run.role_warps[w.role] = run.role_warps.get(w.role, 0) + 1
        return run

    # -- what handlers use ------------------------------------------------------------------------

    def later(self, w: WarpState, op: Op, at: float) -> None:
        """The instruction's results come at a time of their own."""
        for register in op.writes:
            w.ready[register] = at
        self.end = max(self.end, at)

    def hold(self, w: WarpState, until: float, cause: str) -> None:
        """The warp issues nothing before ``until``."""
        if until > w.after:
            self.stalls[w.role][cause] += until - w.after
            w.after = until

    def park(self, w: WarpState, op: Op, start: float) -> None:
        """The warp waits for somebody, who will `resume` it."""
        source = self.code.sources[self.code.source[op.index]].rpartition("/")[2]
        w.cause = f"wait at {source}" if source else "wait"
        if self.timeline and w.block is not None:
            self._span(w, w.block, start)
            w.entered = start

    def resume(self, w: WarpState, at: float) -> None:
        """A parked warp goes on. Its registers are older than the wait."""
        if at > w.after:
            self.stalls[w.role][w.cause] += at - w.after
            w.after = at
        if self.timeline:
            track = f"{w.role} (warp {w.record.warp})"
            self.run.spans.append(Span(track, w.cause, w.entered, w.after))
            w.entered = w.after
        self.push(w.after, w)


@handles(Event.NONE, Event.TMEM_ALLOC)
def _none(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    if sim.code.op[op.index] == OpClass.FENCE:
        name = sim.code.op_names[sim.code.op_name[op.index]]
        if name.startswith("fence.proxy"):
            sim.hold(w, start + sim.hw.constants["proxy_fence_latency"], "fence")
    return True


@handles(Event.REGISTERS)
def _registers(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    sim.hold(w, start + sim.hw.constants["registers_latency"], "setmaxnreg")
    return True


_DEPENDENCY = tuple(f"{op.name} result" for op in OpClass)


def simulate(
    warps: Sequence[WarpRecord], blocks: Blocks, hw: Hardware, timeline: bool = False
) -> Run:
    """Replays one cluster's warps; see `Run`."""
    return Simulation(warps, blocks, hw, timeline).simulate()
