"""Kernel times with the clock and the power that they were measured at, on one NVIDIA GPU.

A GPU that multiplies matrices for long meets its power limit and lowers its clock, so a time alone
says little. Every time here comes with the mean SM clock over exactly that time: a one-thread CTA
on every SM notes the SM's cycle counter and the GPU's nanosecond counter before and after.

Needs torch, cuda-python and nvidia-ml-py.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.roofline.hardware.launcher import Launcher

# One CTA an SM (the launch asks for most of the SM's shared memory), which notes where and when it
# ran; and a CTA that keeps the clocks up without drawing power.
_PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry stamp(.param .u64 out) {
  .reg .b64 %rd<6>;
  .reg .b32 %r<3>;
  ld.param.u64 %rd0, [out];
  mov.u32 %r0, %ctaid.x;
  mul.wide.u32 %rd1, %r0, 24;
  add.u64 %rd0, %rd0, %rd1;
  mov.u32 %r1, %smid;
  cvt.u64.u32 %rd2, %r1;
  mov.u64 %rd3, %clock64;
  mov.u64 %rd4, %globaltimer;
  st.global.u64 [%rd0], %rd2;
  st.global.u64 [%rd0+8], %rd3;
  st.global.u64 [%rd0+16], %rd4;
  ret;
}
.visible .entry spin(.param .u64 nanoseconds) {
  .reg .b64 %rd<4>;
  .reg .pred %p;
  ld.param.u64 %rd0, [nanoseconds];
  mov.u64 %rd1, %globaltimer;
again:
  nanosleep.u32 200;
  mov.u64 %rd2, %globaltimer;
  sub.u64 %rd2, %rd2, %rd1;
  setp.lt.u64 %p, %rd2, %rd0;
  @%p bra again;
  ret;
}
.visible .entry empty() {
  ret;
}
"""
_STAMP_SMEM = 200 * 1024


@dataclass(frozen=True)
class Timing:
    """microseconds of one launch; spread: (90th - 10th percentile) / median of the samples;
    clock_mhz: mean SM clock while they ran (median over the SMs)."""

    microseconds: float
    spread: float
    clock_mhz: float


@dataclass(frozen=True)
class Power:
    """Mean over a sustained run. watts: from the energy counter; watts_instant: mean of the
    instantaneous readings; nvml_mhz: mean of NVML's SM clock; limits: NVML's reasons for lowering
    clocks that were seen, joined by '+' (``none``)."""

    watts: float
    watts_instant: float
    nvml_mhz: float
    celsius: float
    limits: str


class Probe:
    """Stamps, spins and empty kernels on torch's current stream."""

    def __init__(self) -> None:
        import torch

        self._torch, self._gpu = torch, Launcher()
        module = self._gpu.load(_PTX)
        self._stamp = self._gpu.function(module, "stamp", smem=_STAMP_SMEM)
        self._spin = self._gpu.function(module, "spin")
        self._empty = self._gpu.function(module, "empty")
        self.sms = self._gpu.sms

    def stamp(self) -> Any:
        """Launches a stamp; the int64 tensor [SMs, 3] of SM, cycles, nanoseconds that it fills."""
        out = self._torch.zeros((self.sms, 3), dtype=self._torch.int64, device="cuda")
        self._gpu.launch(self._stamp, self.sms, 1, _STAMP_SMEM, out.data_ptr())
        return out

    def spin(self, milliseconds: float) -> None:
        self._gpu.launch(self._spin, 1, 1, 0, int(milliseconds * 1e6))

    def empty(self) -> None:
        self._gpu.launch(self._empty, 1, 1, 0)


def clock_mhz(before: Any, after: Any) -> float:
    """Mean SM clock between two stamps: the median over SMs that both of them saw."""
    start = {int(sm): (int(cycles), int(ns)) for sm, cycles, ns in before.cpu()}
    rates: list[float] = []
    for sm, cycles, ns in after.cpu().tolist():
        if sm in start and ns > start[sm][1]:
            rates.append((cycles - start[sm][0]) * 1e3 / (ns - start[sm][1]))
    return statistics.median(rates)


def _spread(samples: list[float]) -> float:
    if len(samples) < 2:
        return 0.0
    ordered = sorted(samples)
    tenth = round((len(ordered) - 1) * 0.1)
    return (ordered[-1 - tenth] - ordered[tenth]) / statistics.median(ordered)


def graph_of(launch: Callable[[], None], nodes: int) -> Any:
    """A CUDA graph of ``nodes`` launches one after another; ``launch`` has run before."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            launch()
    return graph


def _timed_replays(graph: Any, replays: int, nodes: int) -> Callable[[], list[float]]:
    """Enqueues replays; the returned function gives microseconds a launch of each, once done."""
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    return lambda: [a.elapsed_time(b) * 1e3 / nodes for a, b in pairwise(events)]


def burst(probe: Probe, graph: Any, nodes: int, *, repeats: int = 5, rest: float = 0.12) -> Timing:
    """Times of a card that idled: rest, clocks up without load, one warm replay, one timed replay.

    The median over ``repeats``. The timed replay starts within milliseconds of the card's idling,
    before the power limit has lowered the clock, unless one launch is longer than that.
    """
    import torch

    times, clocks = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        time.sleep(rest)
        probe.spin(3)
        graph.replay()
        before = probe.stamp()
        result = _timed_replays(graph, 1, nodes)
        after = probe.stamp()
        torch.cuda.synchronize()
        times += result()
        clocks.append(clock_mhz(before, after))
    return Timing(statistics.median(times), _spread(times), statistics.median(clocks))


def sustained(
    probe: Probe,
    graph: Any,
    nodes: int,
    microseconds: float,
    *,
    settle: float = 0.4,
    seconds: float = 0.6,
) -> tuple[Timing, Power]:
    """The mean time on a card that has been busy with the same launches for ``settle`` seconds.

    Mean, as the clock is: the power limit moves both up and down within milliseconds.
    ``microseconds``: about what a launch takes, to know how many fill the time.
    """
    import torch

    replay_seconds = microseconds * nodes * 1e-6
    torch.cuda.synchronize()
    with PowerLog() as log:
        for _ in range(max(1, round(settle / replay_seconds))):
            graph.replay()
        before = probe.stamp()
        result = _timed_replays(graph, max(2, round(seconds / replay_seconds)), nodes)
        after = probe.stamp()
        torch.cuda.synchronize()
        end = time.perf_counter()
    times = result()
    measured = sum(times) * nodes * 1e-6
    timing = Timing(statistics.mean(times), _spread(times), clock_mhz(before, after))
    return timing, log.between(end - measured, end)


@dataclass
class PowerLog:
    """A thread that samples NVML every few milliseconds while the ``with`` block runs."""

    interval: float = 0.004
    samples: list[tuple[float, int, float, int, int, int]] = field(default_factory=list)

    def __enter__(self) -> PowerLog:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._device = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        nvml, device = self._nvml, self._device
        while not self._stop.is_set():
            instant = nvml.nvmlDeviceGetFieldValues(device, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
            self.samples.append(
                (
                    time.perf_counter(),
                    nvml.nvmlDeviceGetTotalEnergyConsumption(device),
                    instant.value.uiVal / 1e3,
                    nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
                    nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device),
                    nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
                )
            )
            time.sleep(self.interval)

    def between(self, start: float, end: float) -> Power:
        """Means over host times ``start`` to ``end`` (time.perf_counter)."""
        inside = [sample for sample in self.samples if start <= sample[0] <= end]
        if not inside:
            raise RuntimeError("NVML gave no sample while the GPU was busy")
        reasons = 0
        for sample in inside:
            reasons |= sample[4]
        return Power(
            watts=energy_slope([(sample[0], sample[1]) for sample in inside]),
            watts_instant=statistics.mean(sample[2] for sample in inside),
            nvml_mhz=statistics.mean(sample[3] for sample in inside),
            celsius=statistics.mean(sample[5] for sample in inside),
            limits=throttle_names(reasons),
        )


def energy_slope(samples: list[tuple[float, int]]) -> float:
    """Watts from (seconds, millijoules) of a counter that moves in steps; nan without two steps.

    Only the samples at which the counter has just moved know when it did.
    """
    steps = [b for a, b in pairwise(samples) if b[1] != a[1]]
    if len(steps) < 2:
        return float("nan")
    (t0, e0), (t1, e1) = steps[0], steps[-1]
    return (e1 - e0) / 1e3 / (t1 - t0)


#: nvmlClocksEventReasons of nvml.h that lower clocks under load.
THROTTLE_REASONS = {
    0x0004: "power_cap",
    0x0008: "hw_slowdown",
    0x0020: "sw_thermal",
    0x0040: "hw_thermal",
    0x0080: "hw_power_brake",
}


def throttle_names(reasons: int) -> str:
    return "+".join(name for bit, name in THROTTLE_REASONS.items() if reasons & bit) or "none"
