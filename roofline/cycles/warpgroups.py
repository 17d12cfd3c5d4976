"""The tensor core of Hopper (wgmma) and warps' own MMAs (mma.sync), in the model.

The four warps of a warpgroup issue an MMA together. Each warpgroup's MMAs run in order, and the
one that has the tensor core keeps it while it has another MMA waiting. A warp issues on while at
most `wgmma_queue` of its MMAs have not begun.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.emulator.records import Event, MmaForm
from roofline.cycles.blackwell import begin_mma
from roofline.cycles.handlers import handles
from roofline.cycles.hardware import SUB_PARTITIONS
from roofline.cycles.state import TensorWork, WarpGroup

if TYPE_CHECKING:
    from roofline.cycles.blocks import Op
    from roofline.cycles.sm import Simulation
    from roofline.cycles.state import Sm, WarpState

WARPS = 4  # of a warpgroup


def _group(sim: Simulation, w: WarpState) -> WarpGroup:
    key = w.rank, w.record.warp // WARPS
    group = sim.warpgroups.get(key)
    if group is None:
        group = sim.warpgroups[key] = WarpGroup(w.rank)
        sim.sms[w.rank].warpgroups.append(group)
    return group


@handles(Event.WGMMA)
def _wgmma(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    group = _group(sim, w)
    number = w.wgmma_issued
    w.wgmma_issued += 1
    if number == len(group.issued):
        group.issued.append((0, 0.0))
    warps, at = group.issued[number]
    group.issued[number] = (warps + 1, max(at, start))
    if warps + 1 == WARPS:
        _begin_when_free(sim, group, event, max(at, start))
    if number - len(group.begun) >= sim.hw.constants["wgmma_queue"]:
        sim.park(w, op, start)
        w.cause = "tensor core busy"
        group.blocked.append((number, w))
        return False
    return True


def _begin_when_free(sim: Simulation, group: WarpGroup, event: list[int], at: float) -> None:
    m, n, k = event[1], event[2], event[3] & 0xFFFF
    form = MmaForm.decode(event[3] >> 16)
    key = (m, n, k, form)
    if key not in sim.mma_cycles:
        sim.mma_cycles[key] = sim.hw.wgmma(*key)
    arithmetic, smem, tail = sim.mma_cycles[key]
    name = f"{m}x{n}x{k} {'RS' if form.a_in_tmem else 'SS'}"
    sim.run.tensor_flops += 2.0 * m * n * k
    sim.run.operand_bytes += smem * sim.hw.smem_port
    group.queue.append(TensorWork(at, name, arithmetic, smem, tail))
    sm = sim.sms[group.rank]
    if not sm.serving:
        sm.serving = True
        sim.push(max(at, sm.tensor_free), lambda now: _serve(sim, sm, now))


def _serve(sim: Simulation, sm: Sm, now: float) -> None:
    """Begins the next MMA, and comes back when the tensor core is free: the next of the warpgroup
    that has it, else the one that has waited longest."""
    waiting = [group for group in sm.warpgroups if group.queue]
    if not waiting:
        sm.serving = False
        return
    group = min(waiting, key=lambda g: g.queue[0].issued)
    last = sm.served
    if last is not None and last.queue and last.queue[0].issued <= now:
        group = last
    work = group.queue[0]
    if work.issued > now:
        sim.push(work.issued, lambda later: _serve(sim, sm, later))
        return
    group.queue.popleft()
    sm.served = group
    begin_mma(sim, sm, work, now)
    done = max(sm.tensor_done + work.tail, now)
    group.begun.append(done)
    blocked, group.blocked = group.blocked, []
    for number, w in blocked:
        if number - len(group.begun) >= sim.hw.constants["wgmma_queue"]:
            group.blocked.append((number, w))
        else:
            sim.resume(w, now)
    waiters, group.waiters = group.waiters, []
    for needed, w in waiters:
        if needed <= len(group.begun):
            sim.resume(w, done)
        else:
            group.waiters.append((needed, w))
    sim.push(sm.tensor_free, lambda later: _serve(sim, sm, later))


@handles(Event.WGMMA_COMMIT)
def _commit(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    w.wgmma_groups.append(w.wgmma_issued)
    return True


@handles(Event.WGMMA_WAIT)
def _wait(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    done = len(w.wgmma_groups) - event[1]
    if done <= 0:
        return True
    needed = w.wgmma_groups[done - 1]
    del w.wgmma_groups[:done]
    group = _group(sim, w)
    if needed <= len(group.begun):
        sim.hold(w, group.begun[needed - 1] if needed else start, _cause(sim, op))
        return True
    sim.park(w, op, start)
    group.waiters.append((needed, w))
    return False


def _cause(sim: Simulation, op: Op) -> str:
    source = sim.code.sources[sim.code.source[op.index]].rpartition("/")[2]
    return f"wait at {source}" if source else "wait"


@handles(Event.WARP_MMA)
def _warp_mma(sim: Simulation, w: WarpState, op: Op, start: float, event: list[int]) -> bool:
    """mma.sync takes the sub-partition's quarter of the tensor core; its result comes in order."""
    m, n, k = event[1], event[2], event[3] & 0xFFFF
    cycles, latency = sim.hw.warp_mma(m, n, k, MmaForm.decode(event[3] >> 16))
    sub = sim.sms[w.rank].sub_tensor_free
    lane = w.slot % SUB_PARTITIONS
    begin = max(start, sub[lane])
    sub[lane] = begin + cycles
    sim.busy["tensor core"] += cycles / SUB_PARTITIONS
    sim.run.tensor_flops += 2.0 * m * n * k
    sim.later(w, op, begin + max(cycles, latency))
    sim.hold(w, begin, "tensor core busy")
    return True
