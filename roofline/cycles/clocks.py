"""The clock at which a kernel runs: a GPU at its power limit slows down as its tensor cores work.

    clock = base - slope * (share of the time in which the tensor core works)

at most the GPU's highest clock, for two cases: *burst*, launches of a millisecond or two on a card
that idled, and *sustained*, launches without end. base and slope come from cuBLAS products
(cycle_model_sm_90.toml), not from the kernels that are predicted. GPUs without these numbers run at
the clock of their entry.
"""

from __future__ import annotations

from roofline.cycles.hardware import latencies
from roofline.errors import RooflineError
from roofline.gpus import Gpu

CASES = ("burst", "sustained")


def clock_ghz(gpu: Gpu, case: str, tensor_share: float) -> float:
    """GHz of the SMs. case: one of `CASES`, or a number of GHz. tensor_share: 0 to 1."""
    if case not in CASES:
        try:
            value = float(case)
        except ValueError:
            value = 0.0
        if not 0.1 <= value <= 10:
            raise RooflineError(f"clock {case!r}: must be {', '.join(CASES)} or GHz")
        return value
    constants = latencies(gpu.arch_number)
    if f"{case}_clock_base" not in constants:
        return float(gpu["clock"].value)
    base, slope = (float(constants[f"{case}_clock_{part}"].value) for part in ("base", "slope"))
    return min(float(gpu["clock_max"].value), base - slope * tensor_share)
