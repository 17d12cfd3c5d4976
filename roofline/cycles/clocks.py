"""The clock at which a kernel runs: a GPU at its power limit slows down as its tensor cores work.

    clock = base - slope * (share of the time in which the tensor core works)

at most what a GPU has for MMAs at all, for two cases: *burst*, a launch on a card that idled, and
*sustained*, launches without end. A burst's clock falls to the sustained one with the time constant
`burst_time`, so that a launch of many milliseconds has the mean of its own duration. The numbers
come from cuBLAS products mostly (cycle_model_sm_90.toml), none from attention. GPUs without them
run at the clock of their entry.
"""

from __future__ import annotations

import math

from roofline.cycles.hardware import latencies
from roofline.errors import RooflineError
from roofline.gpus import Gpu

CASES = ("burst", "sustained")


def clock_ghz(gpu: Gpu, case: str, tensor_share: float, cycles: float = 0.0) -> float:
    """GHz of the SMs. case: one of `CASES`, or a number of GHz. tensor_share: 0 to 1, of a launch
    of so many cycles."""
    if case not in CASES:
        try:
            value = float(case)
        except ValueError:
            value = 0.0
        if not 0.1 <= value <= 10:
            raise RooflineError(f"clock {case!r}: must be {', '.join(CASES)} or GHz")
        return value
    constants = latencies(gpu.arch_number)
    if "burst_time" not in constants:
        return float(gpu["clock"].value)

    def line(name: str) -> float:
        base, slope = (float(constants[f"{name}_clock_{x}"].value) for x in ("base", "slope"))
        most = gpu["clock_max"] if tensor_share == 0 else constants["burst_clock_most"]
        return min(float(most.value), base - slope * tensor_share)

    clock = line(case)
    duration = cycles / (clock * 1e6) / float(constants["burst_time"].value)
    if case == "burst" and duration > 0:
        rest = line("sustained")
        clock = rest + (clock - rest) * -math.expm1(-duration) / duration
    return clock
