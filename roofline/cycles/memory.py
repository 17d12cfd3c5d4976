"""Loads and stores of warps in the model: banks of shared memory, L2 beyond it, a thread's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.emulator.records import MORE, Event
from roofline.cycles.handlers import handles

if TYPE_CHECKING:
    from roofline.cycles.blocks import Op
    from roofline.cycles.sm import Simulation
    from roofline.cycles.state import WarpState


@handles(Event.SMEM_LOAD, Event.SMEM_STORE)
def _smem(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    latency = sim.hw.constants["smem_latency"]
    _through_port(sim, w, op, start, event[2] * 128 / sim.hw.smem_port, latency)
    return True


@handles(Event.LOCAL_LOAD, Event.LOCAL_STORE)
def _local(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    """Spills hit the L1, which shares shared memory's port."""
    latency = sim.hw.constants["smem_latency"]
    _through_port(sim, w, op, start, event[1] / sim.hw.smem_port, latency)
    return True


def _through_port(
    sim: Simulation, w: WarpState, op: Op, start: float, cycles: float, latency: float
) -> None:
    sm = sim.sms[w.rank]
    begin = max(start, sm.port_free)
    sm.port_free = begin + cycles
    sm.port_debt += cycles
    sim.busy["SMEM port"] += cycles
    sim.later(w, op, begin + cycles + latency - 1)


@handles(Event.GLOBAL_LOAD, Event.GLOBAL_STORE)
def _global(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    sm, nbytes = sim.sms[w.rank], event[2] * 32
    sim.run.l2_bytes += nbytes
    sim.busy["L2"] += nbytes / sim.hw.l2
    if event[0] & ~MORE == Event.GLOBAL_STORE:
        sm.copy_out_free = max(start, sm.copy_out_free) + nbytes / sim.hw.l2
        return True
    sm.copy_in_free = max(start, sm.copy_in_free) + nbytes / sim.hw.ingress
    sim.later(w, op, sm.copy_in_free + sim.hw.constants["global_latency"])
    return True
