"""Copies in the model: TMA and bulk copies both ways, cp.async, and the answers of launch control.

A copy takes its latency, and its bytes at what the SM can take in; what it writes to or reads from
shared memory passes the SMEM port, beside the operands of MMAs. The L2's own bandwidth bounds the
whole launch (`roofline.cycles.predict`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.emulator.records import Event, Source
from roofline.cycles.barriers import barrier_at, signal
from roofline.cycles.handlers import handles
from roofline.cycles.state import Span

if TYPE_CHECKING:
    from roofline.cycles.blocks import Op
    from roofline.cycles.sm import Simulation
    from roofline.cycles.state import Sm, WarpState

_RANK_SHIFT = 24
_CHUNK = 4096  # bytes that a copy writes to SMEM at a time


@handles(Event.COPY_IN)
def _copy_in(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    """A multicast arrives everywhere as the copy that reads for it, or later on a busier SM."""
    address, nbytes, target, source = event[1:5]
    rank = target >> _RANK_SHIFT
    sm = sim.sms[rank if rank < len(sim.sms) else w.rank]
    constants = sim.hw.constants
    if source == Source.PEER:
        own = sim.sms[w.rank]
        cycles = nbytes / sim.hw.peer
        begin = max(start, own.copy_out_free)
        own.copy_out_free = begin + cycles
        own.port_debt += nbytes / sim.hw.smem_port
        sim.busy["SMEM port"] += nbytes / sim.hw.smem_port
        latency = constants["peer_latency"]
    else:
        cycles = max(nbytes / sim.hw.ingress, constants["tma_issue_interval"])
        begin = max(start, sm.copy_in_free)
        sm.copy_in_free = begin + cycles
        latency = constants["tma_latency"]
        if start < sm.first_copy:  # nothing has come yet: from HBM, and the tensor map before it
            latency = constants["first_copy_latency"]
            sm.first_copy = min(sm.first_copy, begin + cycles + latency)
        if source == Source.GLOBAL:
            sim.busy["L2"] += nbytes / sim.hw.l2
            sim.run.l2_bytes += nbytes
    arrival = begin + cycles + latency
    _write_smem(sim, sm, nbytes, arrival, cycles)
    signal(sim, arrival, address, 0, -nbytes)
    if sim.timeline:
        sim.run.spans.append(Span("copies in", f"{nbytes} B", begin, arrival))
    return True


def _write_smem(sim: Simulation, sm: Sm, nbytes: int, arrival: float, cycles: float) -> None:
    """The last ``cycles`` before its arrival a copy writes, a chunk at a time."""
    writes = nbytes / sim.hw.smem_port * sim.hw.constants["copy_write_share"]
    sim.busy["SMEM port"] += writes
    chunks = max(1, nbytes // _CHUNK)
    part = writes / chunks

    def written(now: float) -> None:
        sm.port_debt += part

    for chunk in range(chunks):
        sim.push(arrival - cycles * (chunks - 1 - chunk) / chunks, written)


@handles(Event.LAUNCH_CONTROL)
def _launch_control(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    signal(sim, start + sim.hw.constants["launch_control_latency"], event[1], 0, -event[2])
    return True


@handles(Event.COPY_OUT)
def _copy_out(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    sm, nbytes = sim.sms[w.rank], event[1]
    begin = max(start, sm.copy_out_free)
    cycles = nbytes / sim.hw.constants["copy_out_bandwidth"]
    sm.copy_out_free = begin + cycles
    sim.busy["L2"] += nbytes / sim.hw.l2
    sim.run.l2_bytes += nbytes
    sim.busy["SMEM port"] += nbytes / sim.hw.smem_port
    sm.port_debt += nbytes / sim.hw.smem_port
    w.copy_open.append(begin + cycles + sim.hw.constants["smem_latency"])
    if sim.timeline:
        sim.run.spans.append(Span("copies out", f"{nbytes} B", begin, begin + cycles))
    return True


@handles(Event.COPY_COMMIT)
def _copy_commit(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    w.copy_groups.append(max(w.copy_open, default=start))
    w.copy_open = []
    return True


@handles(Event.COPY_WAIT)
def _copy_wait(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    """Writes count as done with the reads."""
    done = len(w.copy_groups) - event[1]
    if done > 0:
        until = max(w.copy_groups[:done])
        del w.copy_groups[:done]
        sim.hold(w, until, "copies out")
    return True


# -- cp.async -------------------------------------------------------------------------------------


@handles(Event.CP_ASYNC)
def _cp_async(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    """Threads' own copies take the way of loads, and write where TMA would."""
    sm, nbytes = sim.sms[w.rank], event[2] * 32
    cycles = nbytes / sim.hw.ingress
    sm.copy_in_free = max(start, sm.copy_in_free) + cycles
    sim.busy["L2"] += nbytes / sim.hw.l2
    sim.run.l2_bytes += nbytes
    arrival = sm.copy_in_free + sim.hw.constants["global_latency"]
    _write_smem(sim, sm, event[1], arrival, cycles)
    w.async_open = max(w.async_open, arrival)
    return True


@handles(Event.CP_ASYNC_COMMIT)
def _cp_commit(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    w.async_groups.append(max(w.async_open, start))
    w.async_open = 0.0
    return True


@handles(Event.CP_ASYNC_WAIT)
def _cp_wait(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    done = max(0, len(w.async_groups) - event[1])
    until = max(w.async_groups[:done], default=start)
    del w.async_groups[:done]
    if event[2]:
        until = max(until, w.async_open)
        w.async_open = 0.0
    sim.hold(w, until, "cp.async")
    return True


@handles(Event.CP_ASYNC_ARRIVE)
def _cp_arrive(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    """The barrier hears when all the warp's copies so far are there."""
    address, arrivals, adds = event[1:4]
    if adds:
        barrier_at(sim, address).pending += arrivals
    at = max([start, w.async_open, *w.async_groups])
    signal(sim, at + sim.hw.constants["mbarrier_arrive_latency"], address, arrivals, 0)
    return True
