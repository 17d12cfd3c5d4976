"""A whole problem: time, rate, what is busy, who waits, and what would help."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from statistics import fmean, stdev
from typing import Any

import numpy as np

from kernels.emulator.records import Records, RecordsError, WarpRecord
from roofline.cycles.blocks import Blocks
from roofline.cycles.clocks import clock_ghz
from roofline.cycles.gemm import GemmWorkload, gemm_workload
from roofline.cycles.grid import Filled, ItemCost, fill, item_cycles, settled
from roofline.cycles.hardware import UNITS, Hardware, calibrations, hardware
from roofline.cycles.probe import Probe, Workload, check_room, probes, stand_ins, workload
from roofline.cycles.sm import simulate
from roofline.cycles.state import Run, Span
from roofline.errors import RooflineError
from roofline.gemm import Gemm, GemmBounds
from roofline.gpus import Gpu, find_gpu
from roofline.problem import Problem

GAIN = 1.1  # gains are told for a unit this much faster
#: A replay is sensitive to who comes first at a pipe, so a gain is the mean of many, all latencies
#: shorter or longer by these factors.
GAIN_VARIANTS = (0.9, 0.93, 0.97, 1.0, 1.03, 1.07, 1.1)
#: So are cycles: warpgroups fall into step with one another or not. They are the mean of replays
#: with all latencies shorter or longer by these factors.
VARIANTS = (0.9, 0.95, 1.0, 1.05, 1.1)


@dataclass(frozen=True)
class Replayed:
    """Work items that were replayed: their key blocks, their number, and what came of them."""

    iterations: int
    items: int
    run: Run


@dataclass(frozen=True)
class Gain:
    """What a faster unit saves. share: of the time, mean of replays; spread: standard deviation."""

    share: float
    spread: float

    @property
    def known(self) -> bool:
        """Whether replays agree that it saves something. Less than nothing is luck: a faster unit
        costs no time but by who comes first elsewhere."""
        return self.share > self.spread and self.share >= 5e-4

    def __str__(self) -> str:
        return f"{self.share:+.1%}" if self.known else "~0"


@dataclass(frozen=True)
class Prediction:
    """What the cycle model says of a problem. Cycles are of the SM clock, times in seconds."""

    gpu: Gpu
    work: Any  # Workload, or GemmWorkload
    problem: Any  # Problem, or Gemm
    replayed: tuple[Replayed, ...]
    cost: ItemCost
    filled: Filled
    limits: Any  # Bounds, or GemmBounds
    gains: Mapping[str, Gain]  # unit -> what is saved if it were 10 % faster
    emulated_instructions: int
    wall_seconds: float
    clock_ghz: float
    tensor_share: float  # of the launch's cycles in which a tensor core works
    records: Records = field(repr=False)  # of the longest probe
    spans: Sequence[Span] = field(default=(), repr=False)

    @property
    def sm_seconds(self) -> float:
        """Time of the SMs, launch included."""
        clock = self.clock_ghz * 1e9
        launch = float(self.gpu["launch_latency"].value) * 1e-6
        return self.filled.cycles / clock + launch

    @property
    def seconds(self) -> float:
        limits = self.limits
        return max(self.sm_seconds, float(limits.hbm_seconds), float(limits.l2_seconds))

    @property
    def tflops(self) -> float:
        """TFLOP/s, counting visible pairs only."""
        return self.flops / self.seconds / 1e12

    @property
    def flops(self) -> float:
        """Floating-point operations of the problem."""
        if isinstance(self.limits, GemmBounds):
            return float(self.limits.flops)
        return float(self.limits.problem.flops(self.limits.budget.tile))

    @property
    def peak_tflops(self) -> float:
        """The tensor cores' dense peak at the clock assumed."""
        limits = self.limits
        peak = limits.peak_tflops if isinstance(limits, GemmBounds) else limits.budget.peak_tflops
        return float(peak * self.clock_ghz / float(self.gpu["clock"].value))

    @cached_property
    def steady(self) -> Run:
        """One key block in steady state, no shorter than its busiest unit."""
        return _per_block(_alike(self.replayed), self.cost.slope)

    @property
    def bound(self) -> str:
        """The unit that is busiest in steady state, or what is slower than the SMs."""
        if self.seconds > self.sm_seconds:
            return "HBM" if self.limits.hbm_seconds == self.seconds else "L2"
        busiest = max(self.steady.busy, key=lambda unit: self.steady.busy[unit])
        if self.steady.busy[busiest] < 0.95 * self.steady.cycles:
            return f"dependencies ({busiest} {self.utilisation(busiest):.0%} busy)"
        return busiest

    def utilisation(self, unit: str) -> float:
        """Share of the steady state's cycles in which the unit works."""
        return self.steady.busy.get(unit, 0.0) / self.steady.cycles

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: cycles, microseconds, shares."""
        steady = self.steady
        return {
            "gpu": self.gpu.name,
            "kernel": self.work.name,
            "dtype": self.work.dtype,
            **self.work.arguments(self.problem),
            "clock_ghz": round(self.clock_ghz, 4),
            "tensor_share": round(self.tensor_share, 4),
            "us": round(self.seconds * 1e6, 3),
            "tflops": round(self.tflops, 1),
            "peak_tflops": round(self.peak_tflops, 1),
            "bound": self.bound,
            "cycles": round(self.filled.cycles),
            "items": self.filled.items,
            "slots": self.filled.slots,
            "waves": round(self.filled.waves, 3),
            "slots_busy": round(self.filled.busy, 4),
            "item_overhead_cycles": round(self.cost.overhead, 1),
            "key_block_cycles": round(steady.cycles, 1),
            "sm_us": round(self.sm_seconds * 1e6, 3),
            "hbm_us": round(self.limits.hbm_seconds * 1e6, 3),
            "l2_us": round(self.limits.l2_seconds * 1e6, 3),
            "replayed": [
                {"key_blocks": r.iterations, "items": r.items, "cycles": round(r.run.cycles, 1)}
                for r in self.replayed
            ],
            "utilisation": {
                unit: round(busy / steady.cycles, 4) for unit, busy in steady.busy.items()
            },
            "gains": {
                unit: {"share": round(g.share, 4), "spread": round(g.spread, 4), "known": g.known}
                for unit, g in self.gains.items()
            },
            "stalls": {
                role: {cause: round(cycles, 1) for cause, cycles in causes.items()}
                for role, causes in steady.stalls.items()
            },
            "calibrated_on": dict(calibrations(self.gpu.arch_number)),
            "emulated_thread_instructions": self.emulated_instructions,
            "wall_seconds": round(self.wall_seconds, 2),
        }


def _alike(replayed: Sequence[Replayed]) -> list[Replayed]:
    """The settled replays that differ in their key blocks alone, shortest first."""
    counts = Counter(r.items for r in replayed)
    items = max(counts, key=lambda n: counts[n])
    return settled([r for r in replayed if r.items == items], lambda r: r.iterations)


def _slope(found: Sequence[Replayed], value: Callable[[Run], float]) -> float:
    """What one more key block adds to a count, by least squares; never less than nothing.

    Counts do not depend on who comes first at a pipe. Yet items of a causal problem differ in how
    much of them the mask cuts off, so that two neighbours do not tell what a key block takes.
    """
    blocks = np.array([r.iterations for r in found], float)
    counts = np.array([value(r.run) for r in found])
    if len(found) == 1:
        return float(counts[0] / max(blocks[0], 1.0))
    apart = blocks - blocks.mean()
    return max(0.0, float(apart @ counts / (apart @ apart)))


def _busy_a_block(found: Sequence[Replayed]) -> dict[str, float]:
    """Cycles of each unit for a key block, from what was counted."""

    def of(unit: str) -> float:
        return _slope(found, lambda run: run.busy.get(unit, 0.0))

    return {unit: of(unit) for unit in found[-1].run.busy}


def _per_block(found: Sequence[Replayed], cycles: float) -> Run:
    """A key block of ``cycles``: units' cycles, and waits of a warp of each role."""
    long = found[-1].run

    def waited(role: str, cause: str) -> float:
        total = _slope(found, lambda run: run.stalls.get(role, {}).get(cause, 0.0))
        return min(total / long.role_warps[role], cycles)

    return Run(
        cycles=cycles,
        busy=_busy_a_block(found),
        stalls={
            role: {cause: waited(role, cause) for cause in causes}
            for role, causes in long.stalls.items()
        },
        role_warps=long.role_warps,
        instructions=round(_slope(found, lambda run: run.instructions)),
    )


def replay(found: Sequence[Probe], hw: Hardware) -> list[Replayed]:
    """All recorded clusters of different lengths."""
    wanted: dict[tuple[int, int], tuple[Probe, Any]] = {}
    for probe in found:
        for iterations, warps in zip(probe.iterations, probe.records.clusters(), strict=True):
            wanted.setdefault((iterations, probe.items if len(found) > 2 else 1), (probe, warps))
    blocks: dict[tuple[int, float], Blocks] = {}
    variants = {factor: hw.faster("latencies", factor) for factor in VARIANTS}
    out = []
    for key in sorted(wanted):
        probe, warps = wanted[key]
        code = probe.records.code
        cycles = []
        for factor, variant in variants.items():
            place = id(code), factor
            if place not in blocks:
                blocks[place] = Blocks(code, variant, hw)
            run = simulate(warps, blocks[place], variant)
            cycles.append(run.cycles)
            if factor == 1.0:
                base = run
        base.cycles = sum(cycles) / len(cycles)
        out.append(Replayed(key[0], key[1], base))
    return out


def _longest(found: Sequence[Probe]) -> tuple[Records, tuple[WarpRecord, ...]]:
    """The recorded cluster with most steps."""
    clusters = [(p.records, warps) for p in found for warps in p.records.clusters()]
    return max(clusters, key=lambda item: sum(len(w.steps) for w in item[1]))


def unit_gains(found: Sequence[Probe], hw: Hardware) -> dict[str, Gain]:
    """Share of the longest item's cycles that each unit saves if it is `GAIN` times as fast.

    The code stays as compiled for ``hw``. Every replay with the unit faster is compared with one
    whose latencies are off by the same factor, so that what luck the two share cancels.
    """
    records, warps = _longest(found)

    def cycles(sm: Hardware) -> float:
        return simulate(warps, Blocks(records.code, sm, hw), sm).cycles

    off = [hw.faster("latencies", factor) for factor in GAIN_VARIANTS]
    base = [cycles(sm) for sm in off]
    gains = {}
    for unit in UNITS:
        pairs = zip(off, base, strict=True)
        saved = [1 - cycles(sm.faster(unit, GAIN)) / before for sm, before in pairs]
        gains[unit] = Gain(fmean(saved), stdev(saved))
    return gains


def item_cost(work: Workload | GemmWorkload, replayed: Sequence[Replayed]) -> ItemCost:
    """The cycles of an item by its key blocks, from what was replayed."""
    least = max(_busy_a_block(_alike(replayed)).values(), default=0.0)
    if not work.persistent:
        return ItemCost(tuple((r.iterations, r.run.cycles) for r in replayed), least=least)
    # cycles = start + per item * items + per block * key blocks
    rows = np.array([[1.0, r.items, r.iterations] for r in replayed])
    if len(rows) != 3 or abs(np.linalg.det(rows)) < 0.5:
        raise RooflineError(
            f"a persistent kernel needs a problem of more than one {work.iteration}"
        )
    cycles = np.array([r.run.cycles for r in replayed])
    start, per_item, per_block = map(float, np.linalg.solve(rows, cycles))
    n = min(r.iterations // r.items for r in replayed)
    points = tuple((k * n, per_item + per_block * k * n) for k in (1, 2))
    return ItemCost(points, start, least)


def predict(
    gpu: str | Gpu,
    problem: Problem | Gemm,
    head_dim: int = 0,
    *,
    kernel: str = "fa4",
    dtype: str = "bf16",
    gains: bool = True,
    timeline: bool = False,
    options: Mapping[str, Any] | None = None,
    clock: str = "burst",
) -> Prediction:
    """Emulates, replays and extends; see `Prediction`. RooflineError for what cannot be asked.

    head_dim: of an attention problem. options: for the kernel's workload function. gains, timeline:
    make these too. clock: burst, sustained or a number of GHz (see `roofline.cycles.clocks`).
    """
    began = time.perf_counter()
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    work: Any
    if isinstance(problem, Gemm):
        work = gemm_workload(kernel, gpu, dtype, options)
    else:
        if problem.visible is not None:
            raise RooflineError("visible: the kernels know dense and causal masks only")
        work = workload(kernel, gpu, dtype, head_dim, problem.causal, options)
    clock_ghz(gpu, clock, 0.0)  # refused before the work begins
    hw = hardware(gpu)
    limits = work.limits(gpu, problem)
    found, replayed = _evidence(gpu, work, stand_ins(work, problem))
    check_room(gpu, found)
    cost = item_cost(work, replayed)
    filled = _fill(gpu, work, problem, cost, found)
    share = _tensor_share(work.items(problem), replayed, filled)
    spans: Sequence[Span] = ()
    if timeline:
        records, warps = _longest(found)
        spans = simulate(warps, Blocks(records.code, hw), hw, timeline=True).spans
    return Prediction(
        gpu,
        work,
        problem,
        tuple(replayed),
        cost,
        filled,
        limits,
        unit_gains(found, hw) if gains else {},
        sum(_thread_instructions(p) for p in found),
        time.perf_counter() - began,
        clock_ghz(gpu, clock, share, filled.cycles),
        share,
        found[-1].records,
        spans,
    )


@dataclass(frozen=True)
class RecordsReplay:
    """A file of records, cluster by cluster."""

    gpu: Gpu
    records: Records
    runs: tuple[Run, ...]

    def to_dict(self) -> dict[str, Any]:
        ctas, size = self.records.ctas, self.records.cluster_ctas
        return {
            "gpu": self.gpu.name,
            "kernel": self.records.kernel,
            "grid": list(self.records.grid),
            "clusters": [
                {
                    "ctas": list(ctas[i * size : (i + 1) * size]),
                    "cycles": round(run.cycles, 1),
                    "warp_instructions": run.instructions,
                    "busy": {unit: round(cycles, 1) for unit, cycles in run.busy.items()},
                }
                for i, run in enumerate(self.runs)
            ],
        }


def replay_file(path: str, gpu: Gpu) -> RecordsReplay:
    """Replays what `Records.save` wrote. RooflineError for a file that holds no such records."""
    try:
        records = Records.load(path)
    except RecordsError as error:
        raise RooflineError(str(error)) from None
    except OSError as error:
        raise RooflineError(f"{path}: cannot be read: {error.strerror}") from None
    arch = find_gpu(records.gpu).arch
    if arch != gpu.arch:
        raise RooflineError(
            f"{path}: records of a kernel for {arch} ({records.gpu});"
            f" gpu {gpu.name!r} is {gpu.arch}"
        )
    hw = hardware(gpu)
    blocks = Blocks(records.code, hw)
    return RecordsReplay(
        gpu, records, tuple(simulate(warps, blocks, hw) for warps in records.clusters())
    )


@lru_cache(maxsize=8)
def _emulated(work: Workload | GemmWorkload, small: tuple[Any, ...]) -> list[Probe]:
    return probes(work, small)


@lru_cache(maxsize=32)
def _evidence(
    gpu: Gpu, work: Workload | GemmWorkload, small: tuple[Any, ...]
) -> tuple[list[Probe], list[Replayed]]:
    """Probes and their replays; problems that differ in length only have the same."""
    found = _emulated(work, small)
    return found, replay(found, hardware(gpu))


def _tensor_share(items: Sequence[int], replayed: Sequence[Replayed], filled: Filled) -> float:
    """Share of a launch's cycles in which a tensor core works, by the MMAs of a key block."""
    longest = max(replayed, key=lambda r: r.iterations)
    per_block = longest.run.busy.get("tensor core", 0.0) / longest.iterations
    return min(1.0, per_block * sum(items) / (filled.slots * filled.cycles))


def _thread_instructions(probe: Probe) -> int:
    return sum(probe.records.lane_counts().values())


def _fill(
    gpu: Gpu, work: Workload | GemmWorkload, problem: Any, cost: ItemCost, found: Sequence[Probe]
) -> Filled:
    blocks = work.items(problem)
    slots = int(gpu["sms"].value) // found[0].records.cluster_ctas
    gap = float(gpu["cta_launch"].value)
    return fill(item_cycles(cost, blocks), slots, gap, cost.start, work.persistent)
