"""Runs compiled CuTe DSL kernels, PTX instruction by instruction, on a modelled SM of any CPU.

    from kernels.emulator import emulate
    report = emulate(host_function, *cpu_tensors, gpu="b200")

Importing the package loads neither the DSL nor torch; `emulate` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kernels.emulator.findings import EmulationError, EmulatorFault, Finding, UnsupportedPTX

if TYPE_CHECKING:
    from kernels.emulator.api import clear_cache, emulate, stand_in
    from kernels.emulator.capture import host_sees
    from kernels.emulator.gpus import GpuModel, gpu_model
    from kernels.emulator.host_runtime import CaptureError, Launch, UnsupportedLaunch
    from kernels.emulator.report import LaunchReport, Report

_LAZY = {
    "emulate": "api",
    "clear_cache": "api",
    "stand_in": "api",
    "host_sees": "capture",
    "GpuModel": "gpus",
    "gpu_model": "gpus",
    "CaptureError": "host_runtime",
    "Launch": "host_runtime",
    "UnsupportedLaunch": "host_runtime",
    "LaunchReport": "report",
    "Report": "report",
}

__all__ = [
    "CaptureError",
    "EmulationError",
    "EmulatorFault",
    "Finding",
    "GpuModel",
    "Launch",
    "LaunchReport",
    "Report",
    "UnsupportedLaunch",
    "UnsupportedPTX",
    "clear_cache",
    "emulate",
    "gpu_model",
    "host_sees",
    "stand_in",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
