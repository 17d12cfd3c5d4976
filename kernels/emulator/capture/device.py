"""The GPU that a kernel's host code sees while it is compiled and run: the modelled one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from kernels.emulator.gpus import GpuModel, gpu_model

# The DSL keeps its compile state in one object per process; two compiles must not overlap.
_DSL_LOCK = threading.RLock()

# The GPU that host code of this thread sees instead of the machine's own, if any.
_SEEN: ContextVar[GpuModel | None] = ContextVar("seen_gpu", default=None)

# Answers of cutlass.utils.HardwareInfo for a modelled GPU. Real parts may fit fewer clusters of
# more than two CTAs, because their SMs come in groups of which some are fused off.
_HARDWARE_INFO: dict[str, Callable[..., Any]] = {
    "__init__": lambda gpu, device_id=0: None,
    "get_device_multiprocessor_count": lambda gpu: gpu.sm_count,
    "get_max_active_clusters": lambda gpu, cluster_size, stream=None: gpu.sm_count // cluster_size,
}


def dsls() -> list[Any]:
    """The DSL's objects, one for each of its dialects: what compiles, and the settings it has."""
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.cutlass_dsl.cutlass import CuteExperimentalDSL

    return [CuTeDSL._get_dsl(), CuteExperimentalDSL._get_dsl()]


@contextmanager
def host_sees(gpu: str | GpuModel) -> Iterator[GpuModel]:
    """Host code of a kernel sees the modelled `gpu` while the block runs, in this thread.

    The DSL's target architecture, which kernel classes ask for when they are made, and what
    `cutlass.utils.HardwareInfo` tells of the device are the model's. `emulate` and `compile` run
    under it; a kernel object that asks earlier needs it around its construction.
    """
    from cutlass.utils import HardwareInfo

    model = gpu_model(gpu)
    token = _SEEN.set(model)
    with _DSL_LOCK, ExitStack() as restore:
        restore.callback(_SEEN.reset, token)
        for dsl in dsls():
            settings = dsl.envar
            restore.callback(setattr, settings, "_arch", settings._arch)
            settings.arch = model.arch
        for name, answer in _HARDWARE_INFO.items():
            real = getattr(HardwareInfo, name)
            restore.callback(setattr, HardwareInfo, name, real)
            setattr(HardwareInfo, name, _stand_in(real, answer))
        yield model


def _stand_in(real: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """A method that answers for the GPU that this thread sees; other threads get the real one."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        gpu = _SEEN.get()
        return real(self, *args, **kwargs) if gpu is None else answer(gpu, *args, **kwargs)

    return method
