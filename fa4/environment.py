"""``fa4 env``: what a bug report should say. It never fails: what cannot be found out says why."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

from fa4.dependencies import TESTED, installed, outside_range

DISTRIBUTION = "fa4-cutedsl"


def environment() -> dict[str, Any]:
    """Versions, driver, GPUs and cache folder, JSON-ready."""
    return {
        "fa4": installed(DISTRIBUTION) or "not installed: run from a checkout",
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: _package(name) for name in TESTED},
        "torch_cuda": _try(_torch_cuda),
        "driver_cuda": _try(_driver_cuda),
        "gpus": _try(_gpus),
        "cache": _try(_cache),
    }


def as_text(facts: dict[str, Any]) -> str:
    """The facts as aligned lines."""
    rows: list[tuple[str, Any]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += list(value.items())
        else:
            rows.append((name, "; ".join(value) if isinstance(value, list) else value))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _package(name: str) -> str:
    version = installed(name)
    if version is None:
        return "not installed"
    fault = outside_range(name, version)
    return f"{version} ({fault})" if fault else version


def _torch_cuda() -> str:
    import torch

    return str(torch.version.cuda or "none: a CPU build")


def _driver_cuda() -> str:
    """The newest CUDA that the driver takes; libcuda.so.1 is the driver's own library."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "none: no NVIDIA driver"
    version = ctypes.c_int()
    status = driver.cuDriverGetVersion(ctypes.byref(version))
    if status:
        return f"cuDriverGetVersion returned {status}"
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return ["none: backend 'emulator' models one"]
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {gpu.total_memory >> 20} MiB)" for gpu in found
    ]


def _cache() -> str:
    """The emulator's folder of compiled blocks; kernels themselves are kept in memory."""
    from kernels.emulator.native.cache import cache_dir

    folder = cache_dir()
    return f"{folder or 'off'} (emulator; FA4_CACHE_DIR); compiled kernels in memory"


def _try(probe: Callable[[], Any]) -> Any:
    """What the probe finds, or its failure as text: a broken machine is what is being reported."""
    try:
        return probe()
    except Exception as error:
        return f"unknown: {type(error).__name__}: {error}"
