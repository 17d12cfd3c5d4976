"""Tensor Memory and the tensor core of Blackwell (tcgen05), in the model.

MMAs of an SM run one after another, in the order of issue, each for the longer of its arithmetic
and its operands' way through the SMEM port.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.emulator.records import Event, MmaForm
from roofline.cycles.barriers import signal
from roofline.cycles.handlers import handles
from roofline.cycles.hardware import PIPES, TMEM
from roofline.cycles.state import Span, TensorWork

if TYPE_CHECKING:
    from roofline.cycles.blocks import Op
    from roofline.cycles.sm import Simulation
    from roofline.cycles.state import Sm, WarpState


def _tmem_access(sim: Simulation, w: WarpState, start: float, nbytes: int, rate: float) -> float:
    """When the data have passed the sub-partition's port."""
    cycles = nbytes / rate
    sim.pipe_free[w.slot * len(PIPES) + TMEM] = start + cycles
    sim.pipe_busy[TMEM] += cycles - 1
    return start + cycles


@handles(Event.TMEM_LOAD)
def _load(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    through = _tmem_access(sim, w, start, event[1], sim.hw.tmem_read)
    at = through + sim.hw.constants["tmem_load_latency"]
    sim.later(w, op, at)
    w.tmem_loads = max(w.tmem_loads, at)
    return True


@handles(Event.TMEM_STORE)
def _store(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    through = _tmem_access(sim, w, start, event[1], sim.hw.tmem_write)
    w.stores = max(w.stores, through + sim.hw.constants["tmem_store_latency"])
    return True


@handles(Event.TMEM_WAIT)
def _wait(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    until = w.stores if event[1] else w.tmem_loads
    sim.hold(w, until, "TMEM store" if event[1] else "TMEM load")
    if not event[1]:
        sim.later(w, op, max(until, start))
    return True


@handles(Event.MMA)
def _mma(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    sm = sim.sms[w.rank]
    m, n, k = event[1], event[2], event[3] & 0xFFFF
    form = MmaForm.decode(event[3] >> 16)
    key = (m, n, k, form)
    if key not in sim.mma_cycles:
        sim.mma_cycles[key] = sim.hw.mma(*key)
    name = f"{m}x{n}x{k} {'TS' if form.a_in_tmem else 'SS'}"
    at = max(start, sm.tensor_issue)
    sm.tensor_issue = at + sim.hw.constants["mma_issue_latency"]
    sim.run.tensor_flops += 2.0 * m * n * k
    arithmetic, smem, tail = sim.mma_cycles[key]
    sim.run.operand_bytes += smem * form.ctas * sim.hw.smem_port
    _enqueue(sim, sm, TensorWork(at, name, arithmetic, smem, tail, sms=form.ctas))
    return True


@handles(Event.TMEM_COPY)
def _tmem_copy(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    """tcgen05.cp takes its turn among the MMAs, and the SMEM port for its bytes."""
    smem = event[1] / sim.hw.smem_port
    _enqueue(sim, sim.sms[w.rank], TensorWork(start, "cp", 0.0, smem))
    return True


@handles(Event.COMMIT)
def _commit(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    _enqueue(sim, sim.sms[w.rank], TensorWork(start, "", barrier=event[1]))
    return True


def _enqueue(sim: Simulation, sm: Sm, work: TensorWork) -> None:
    sm.queue.append(work)
    if len(sm.queue) == 1:
        sim.push(max(work.issued, sm.tensor_free), lambda now: _serve(sim, sm, now))


def _serve(sim: Simulation, sm: Sm, now: float) -> None:
    """Begins the oldest MMA, or tells the barrier of a commit when those before it will end."""
    work = sm.queue.popleft()
    if work.barrier is not None:
        # The measured completion of an MMA runs to the end of the wait that sees it.
        tail = max(0.0, sm.tensor_tail - sim.hw.constants["mbarrier_wake_latency"])
        signal(sim, max(now, sm.tensor_done + tail), work.barrier, 1, 0)
    else:
        begin_mma(sim, sm, work, now)
    if sm.queue:
        begin = max(sm.queue[0].issued, sm.tensor_free)
        if sm.queue[0].barrier is not None:
            begin = max(sm.queue[0].issued, now)
        sim.push(begin, lambda later: _serve(sim, sm, later))


def begin_mma(sim: Simulation, sm: Sm, work: TensorWork, now: float) -> None:
    """Occupies the SM's tensor core with an MMA.

    What others moved through the SMEM port since the last MMA fits first into its idle time, then
    beside this MMA's operands.
    """
    debt = max(0.0, sm.port_debt - (now - sm.tensor_free))
    cycles = max(work.arithmetic, work.smem + debt)
    sm.port_debt = 0.0
    sm.tensor_free = now + cycles
    sm.tensor_done = now + cycles - max(0.0, work.smem - work.arithmetic)
    sm.tensor_tail = work.tail
    sim.busy["tensor core"] += work.arithmetic * work.sms
    sim.busy["SMEM port"] += work.smem * work.sms
    if sim.timeline:
        sim.run.spans.append(Span("tensor core", work.name, now, sm.tensor_free))
