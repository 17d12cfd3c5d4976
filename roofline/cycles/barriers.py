"""Barriers of all kinds, in the model: arrivals, expected bytes, phases, who waits and wakes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.emulator.records import Event
from roofline.cycles.handlers import handles
from roofline.cycles.state import Mbarrier
from roofline.errors import RooflineError

if TYPE_CHECKING:
    from roofline.cycles.blocks import Op
    from roofline.cycles.sm import Simulation
    from roofline.cycles.state import WarpState


@handles(Event.MBARRIER_INIT)
def _init(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    sim.mbarriers[event[1]] = Mbarrier(event[2])
    return True


def barrier_at(sim: Simulation, address: int) -> Mbarrier:
    """The mbarrier at an address. RooflineError if nobody has initialised it."""
    barrier = sim.mbarriers.get(address)
    if barrier is None:
        raise RooflineError(f"records: barrier {address:#x} is used before it is initialised")
    return barrier


@handles(Event.MBARRIER_ARRIVE)
def _arrive(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    address, arrivals, nbytes = event[1:4]
    signal(sim, start + sim.hw.constants["mbarrier_arrive_latency"], address, arrivals, nbytes)
    return True


@handles(Event.MBARRIER_EXPECT)
def _expect(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    signal(sim, start + sim.hw.constants["mbarrier_arrive_latency"], event[1], 0, event[2])
    return True


def signal(sim: Simulation, at: float, address: int, arrivals: int, nbytes: int) -> None:
    """Arrivals, and bytes expected (positive) or come (negative), at a time to come."""

    def happens(now: float) -> None:
        barrier = barrier_at(sim, address)
        barrier.pending -= arrivals
        barrier.tx += nbytes
        sim.end = max(sim.end, now)
        if barrier.pending == 0 and barrier.tx == 0:
            barrier.phase += 1
            barrier.pending = barrier.expected
            waiters, barrier.waiters = barrier.waiters, []
            for phase, w in waiters:
                if phase < barrier.phase:
                    sim.resume(w, now + sim.hw.constants["mbarrier_wake_latency"])
                else:
                    barrier.waiters.append((phase, w))

    sim.push(at, happens)


@handles(Event.MBARRIER_WAIT)
def _wait(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    barrier = barrier_at(sim, event[1])
    if event[2] < barrier.phase:
        sim.later(w, op, start + sim.hw.constants["mbarrier_try_latency"])
        return True
    sim.park(w, op, start)
    barrier.waiters.append((event[2], w))
    return False


@handles(Event.NAMED_BARRIER)
def _named(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    key, threads, waits = (w.rank, event[1]), event[2], event[3]
    state = sim.named.setdefault(key, [0, []])
    state[0] += 32
    if state[0] < threads:
        if waits:
            sim.park(w, op, start)
            state[1].append(w)
            return False
        return True
    del sim.named[key]
    at = start + sim.hw.constants["named_barrier_latency"]
    for other in state[1]:
        sim.resume(other, at)
    if waits:
        sim.hold(w, at, "barrier")
    return True


@handles(Event.CLUSTER_BARRIER)
def _cluster(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    """barrier.cluster: all warps arrive; waits are of the phase last arrived at."""
    latency = sim.hw.constants["cluster_barrier_latency"]
    if not event[1]:
        sim.cluster_arrived += 1
        w.cluster_phase = sim.cluster_phase
        if sim.cluster_arrived == len(sim.warps):
            sim.cluster_arrived = 0
            sim.cluster_phase += 1
            waiters, sim.cluster_waiters = sim.cluster_waiters, []
            for other in waiters:
                sim.resume(other, start + latency)
        return True
    if w.cluster_phase < sim.cluster_phase:
        sim.hold(w, start + latency, "barrier")
        return True
    sim.park(w, op, start)
    sim.cluster_waiters.append(w)
    return False
