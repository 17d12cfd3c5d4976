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
from roofline.cycles.blocks import Block, Blocks, Op
from roofline.cycles.hardware import NO_PIPE, PIPES, SUB_PARTITIONS, Hardware
from roofline.cycles.state import Mbarrier, Run, Sm, Span, TensorWork, WarpState, visits_of
from roofline.errors import RooflineError

RANK_SHIFT = 24
_SHORTEST_SPAN = 16.0  # cycles
_COPY_CHUNK = 4096  # bytes that a copy writes to SMEM at a time


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
        self.cluster_waiters: list[tuple[int, WarpState]] = []
        self.cluster_phase = 0
        self.mma_cycles: dict[tuple[int, int, int, MmaForm], tuple[float, float, float]] = {}
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.stalls: defaultdict[str, defaultdict[str, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        self.pipe_busy = [0.0] * len(PIPES)
        self.end = 0.0
        self.handlers = {
            Event.NONE: self._none,
            Event.MBARRIER_INIT: self._init,
            Event.MBARRIER_ARRIVE: self._arrive,
            Event.MBARRIER_EXPECT: self._expect,
            Event.MBARRIER_WAIT: self._wait,
            Event.NAMED_BARRIER: self._named,
            Event.CLUSTER_BARRIER: self._cluster,
            Event.SMEM_LOAD: self._smem,
            Event.SMEM_STORE: self._smem,
            Event.GLOBAL_LOAD: self._global,
            Event.GLOBAL_STORE: self._global,
            Event.TMEM_LOAD: self._tmem_load,
            Event.TMEM_STORE: self._tmem_store,
            Event.TMEM_WAIT: self._tmem_wait,
            Event.MMA: self._mma,
            Event.COMMIT: self._commit,
            Event.COPY_IN: self._copy_in,
            Event.COPY_OUT: self._copy_out,
            Event.COPY_COMMIT: self._copy_commit,
            Event.COPY_WAIT: self._copy_wait,
            Event.REGISTERS: self._registers,
            Event.TMEM_ALLOC: self._none,
        }

    # -- the loop ----------------------------------------------------------------------------------

    def simulate(self) -> Run:
        """Runs all warps to their end."""
        for warp in self.warps:
            self._push(0.0, warp)
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

    def _push(self, at: float, item: Any) -> None:
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
                self._push(start, w)
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
            goes_on = self.handlers[kind & ~MORE](w, op, start, event)  # type: ignore[index]
            if not kind & MORE:
                return bool(goes_on)

    def _later(self, w: WarpState, op: Op, at: float) -> None:
        """The instruction's results come at a time of their own."""
        for register in op.writes:
            w.ready[register] = at
        self.end = max(self.end, at)

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

    # -- plain events ------------------------------------------------------------------------------

    def _none(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        if self.code.op[op.index] == OpClass.FENCE:
            name = self.code.op_names[self.code.op_name[op.index]]
            if name.startswith("fence.proxy"):
                self._hold(w, start + self.hw.constants["proxy_fence_latency"], "fence")
        return True

    def _hold(self, w: WarpState, until: float, cause: str) -> None:
        """The warp issues nothing before ``until``."""
        if until > w.after:
            self.stalls[w.role][cause] += until - w.after
            w.after = until

    def _registers(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        self._hold(w, start + self.hw.constants["registers_latency"], "setmaxnreg")
        return True

    def _smem(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        sm, wavefronts = self.sms[w.rank], event[2] * 128 / self.hw.smem_port
        begin = max(start, sm.port_free)
        sm.port_free = begin + wavefronts
        sm.port_debt += wavefronts
        self.busy["SMEM port"] += wavefronts
        self._later(w, op, begin + wavefronts + op.latency - 1)
        return True

    def _global(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        sm, cycles = self.sms[w.rank], event[2] * 32 / self.hw.l2
        if event[0] & ~MORE == Event.GLOBAL_STORE:
            sm.copy_out_free = max(start, sm.copy_out_free) + cycles
            return True
        sm.copy_in_free = max(start, sm.copy_in_free) + cycles
        self._later(w, op, sm.copy_in_free + self.hw.constants["global_latency"])
        return True

    # -- barriers ----------------------------------------------------------------------------------

    def _init(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        self.mbarriers[event[1]] = Mbarrier(event[2])
        return True

    def _barrier(self, address: int) -> Mbarrier:
        barrier = self.mbarriers.get(address)
        if barrier is None:
            raise RooflineError(f"records: barrier {address:#x} is used before it is initialised")
        return barrier

    def _arrive(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        address, arrivals, nbytes = event[1:4]
        latency = self.hw.constants["mbarrier_arrive_latency"]
        self._signal(start + latency, address, arrivals, nbytes)
        return True

    def _expect(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        latency = self.hw.constants["mbarrier_arrive_latency"]
        self._signal(start + latency, event[1], 0, event[2])
        return True

    def _signal(self, at: float, address: int, arrivals: int, nbytes: int) -> None:
        """Arrivals, and bytes expected (positive) or come (negative), at a time to come."""

        def happens(now: float) -> None:
            barrier = self._barrier(address)
            barrier.pending -= arrivals
            barrier.tx += nbytes
            self.end = max(self.end, now)
            if barrier.pending == 0 and barrier.tx == 0:
                barrier.phase += 1
                barrier.pending = barrier.expected
                waiters, barrier.waiters = barrier.waiters, []
                for phase, w in waiters:
                    if phase < barrier.phase:
                        self._resume(w, now + self.hw.constants["mbarrier_wake_latency"])
                    else:
                        barrier.waiters.append((phase, w))

        self._push(at, happens)

    def _wait(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        barrier = self._barrier(event[1])
        if event[2] < barrier.phase:
            self._later(w, op, start + self.hw.constants["mbarrier_try_latency"])
            return True
        self._park(w, op, start)
        barrier.waiters.append((event[2], w))
        return False

    def _park(self, w: WarpState, op: Op, start: float) -> None:
        source = self.code.sources[self.code.source[op.index]].rpartition("/")[2]
        w.cause = f"wait at {source}" if source else "wait"
        if self.timeline and w.block is not None:
            self._span(w, w.block, start)
            w.entered = start

    def _resume(self, w: WarpState, at: float) -> None:
        """A parked warp goes on. Its registers are older than the wait."""
        if at > w.after:
            self.stalls[w.role][w.cause] += at - w.after
            w.after = at
        if self.timeline:
            track = f"{w.role} (warp {w.record.warp})"
            self.run.spans.append(Span(track, w.cause, w.entered, w.after))
            w.entered = w.after
        self._push(w.after, w)

    def _named(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        key, threads, waits = (w.rank, event[1]), event[2], event[3]
        state = self.named.setdefault(key, [0, []])
        state[0] += 32
        if state[0] < threads:
            if waits:
                self._park(w, op, start)
                state[1].append(w)
                return False
            return True
        del self.named[key]
        at = start + self.hw.constants["named_barrier_latency"]
        for other in state[1]:
            self._resume(other, at)
        if waits:
            self._hold(w, at, "barrier")
        return True

    def _cluster(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        """barrier.cluster: all warps arrive; waits are of the phase last arrived at."""
        if not event[1]:
            self.cluster_arrived += 1
            w.stores = float(self.cluster_phase)  # the phase this warp's wait is for
            if self.cluster_arrived == len(self.warps):
                self.cluster_arrived = 0
                self.cluster_phase += 1
                at = start + self.hw.constants["cluster_barrier_latency"]
                waiters, self.cluster_waiters = self.cluster_waiters, []
                for _, other in waiters:
                    self._resume(other, at)
            return True
        if w.stores < self.cluster_phase:
            self._hold(w, start + self.hw.constants["cluster_barrier_latency"], "barrier")
            return True
        self._park(w, op, start)
        self.cluster_waiters.append((0, w))
        return False

    # -- Tensor Memory and the tensor core ---------------------------------------------------------

    def _tmem_access(self, w: WarpState, start: float, nbytes: int, rate: float) -> float:
        """When the data have passed the sub-partition's port."""
        at = w.slot * len(PIPES) + PIPES.index("TMEM")
        cycles = nbytes / rate
        self.pipe_free[at] = start + cycles
        self.pipe_busy[PIPES.index("TMEM")] += cycles - 1
        return start + cycles

    def _tmem_load(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        through = self._tmem_access(w, start, event[1], self.hw.tmem_read)
        at = through + self.hw.constants["tmem_load_latency"]
        self._later(w, op, at)
        w.tmem_loads = max(w.tmem_loads, at)
        return True

    def _tmem_store(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        through = self._tmem_access(w, start, event[1], self.hw.tmem_write)
        w.stores = max(w.stores, through + self.hw.constants["tmem_store_latency"])
        return True

    def _tmem_wait(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        until = w.stores if event[1] else w.tmem_loads
        self._hold(w, until, "TMEM store" if event[1] else "TMEM load")
        if not event[1]:
            self._later(w, op, max(until, start))
        return True

    def _mma(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        sm = self.sms[w.rank]
        m, n, k = event[1], event[2], event[3] & 0xFFFF
        form = MmaForm.decode(event[3] >> 16)
        key = (m, n, k, form)
        if key not in self.mma_cycles:
            self.mma_cycles[key] = self.hw.mma(*key)
        name = f"{m}x{n}x{k} {'TS' if form.a_in_tmem else 'SS'}"
        at = max(start, sm.tensor_issue)
        sm.tensor_issue = at + self.hw.constants["mma_issue_latency"]
        self.run.tensor_flops += 2.0 * m * n * k
        self._to_tensor_core(sm, TensorWork(at, name, *self.mma_cycles[key], sms=form.ctas))
        return True

    def _commit(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        self._to_tensor_core(self.sms[w.rank], TensorWork(start, "", barrier=event[1]))
        return True

    def _to_tensor_core(self, sm: Sm, work: TensorWork) -> None:
        sm.queue.append(work)
        if len(sm.queue) == 1:
            self._push(max(work.issued, sm.tensor_free), lambda now: self._tensor_core(sm, now))

    def _tensor_core(self, sm: Sm, now: float) -> None:
        """Begins the oldest MMA, or tells the barrier of a commit when those before it will end."""
        work = sm.queue.popleft()
        if work.barrier is not None:
            # The measured completion of an MMA runs to the end of the wait that sees it.
            tail = max(0.0, sm.tensor_tail - self.hw.constants["mbarrier_wake_latency"])
            self._signal(max(now, sm.tensor_done + tail), work.barrier, 1, 0)
        else:
            # What others moved through the SMEM port since the last MMA fits first into its
            # idle time, then beside this MMA's operands.
            debt = max(0.0, sm.port_debt - (now - sm.tensor_free))
            cycles = max(work.arithmetic, work.smem + debt)
            sm.port_debt = 0.0
            sm.tensor_free = now + cycles
            sm.tensor_done = now + cycles - max(0.0, work.smem - work.arithmetic)
            sm.tensor_tail = work.tail
            self.busy["tensor core"] += work.arithmetic * work.sms
            self.busy["SMEM port"] += work.smem * work.sms
            if self.timeline:
                self.run.spans.append(Span("tensor core", work.name, now, sm.tensor_free))
        if sm.queue:
            begin = max(sm.queue[0].issued, sm.tensor_free)
            if sm.queue[0].barrier is not None:
                begin = max(sm.queue[0].issued, now)
            self._push(begin, lambda later: self._tensor_core(sm, later))

    # -- copies ------------------------------------------------------------------------------------

    def _copy_in(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        address, nbytes, target = event[1], event[2], event[3]
        rank = target >> RANK_SHIFT
        sm = self.sms[rank if rank < len(self.sms) else w.rank]
        begin = max(start, sm.copy_in_free)
        cycles = max(nbytes / self.hw.l2, self.hw.constants["tma_issue_interval"])
        sm.copy_in_free = begin + cycles
        arrival = begin + cycles + self.hw.constants["tma_latency"]
        self.busy["L2"] += nbytes / self.hw.l2
        writes = nbytes / self.hw.smem_port
        self.busy["SMEM port"] += writes

        def written(now: float, part: float = 0.0) -> None:
            sm.port_debt += part

        chunks = max(1, nbytes // _COPY_CHUNK)
        for chunk in range(chunks):
            at = arrival - cycles * (chunks - 1 - chunk) / chunks
            self._push(at, lambda now, part=writes / chunks: written(now, part))
        self._signal(arrival, address, 0, -nbytes)
        if self.timeline:
            self.run.spans.append(Span("copies in", f"{nbytes} B", begin, arrival))
        return True

    def _copy_out(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        sm, nbytes = self.sms[w.rank], event[1]
        begin = max(start, sm.copy_out_free)
        cycles = nbytes / self.hw.l2
        sm.copy_out_free = begin + cycles
        self.busy["L2"] += cycles
        self.busy["SMEM port"] += nbytes / self.hw.smem_port
        sm.port_debt += nbytes / self.hw.smem_port
        w.copy_open.append(begin + cycles + self.hw.constants["smem_latency"])
        if self.timeline:
            self.run.spans.append(Span("copies out", f"{nbytes} B", begin, begin + cycles))
        return True

    def _copy_commit(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        w.copy_groups.append(max(w.copy_open, default=start))
        w.copy_open = []
        return True

    def _copy_wait(self, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
        """Writes count as done with the reads."""
        done = len(w.copy_groups) - event[1]
        if done > 0:
            until = max(w.copy_groups[:done])
            del w.copy_groups[:done]
            self._hold(w, until, "copies out")
        return True


_DEPENDENCY = tuple(f"{op.name} result" for op in OpClass)


def simulate(
    warps: Sequence[WarpRecord], blocks: Blocks, hw: Hardware, timeline: bool = False
) -> Run:
    """Replays one cluster's warps; see `Run`."""
    return Simulation(warps, blocks, hw, timeline).simulate()
