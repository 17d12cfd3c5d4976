"""The CUDA driver and runtime as far as host code of a kernel asks them about device and streams.

`cuda.bindings` needs the NVIDIA driver, which a machine without a GPU does not have. While
`cuda_driver` is on, the functions below answer for the modelled GPU; memory that the driver would
allocate, modules and launches stay with the real one, which says that it is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kernels.emulator.gpus import GpuModel
from kernels.emulator.host_runtime import device_attributes

_CUDA_VERSION = 13000


def _driver(driver: Any, gpu: GpuModel) -> dict[str, Callable[..., tuple[Any, ...]]]:
    """Functions of cuda.bindings.driver: (CUresult, value...), as the real ones answer."""
    done = driver.CUresult.CUDA_SUCCESS
    known = device_attributes(gpu)

    def attribute(which: Any, _device: Any) -> tuple[Any, ...]:
        if int(which) not in known:
            return driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, 0
        return done, known[int(which)]

    answers: dict[str, Callable[..., tuple[Any, ...]]] = {
        "cuDriverGetVersion": lambda: (done, _CUDA_VERSION),
        "cuDeviceGetCount": lambda: (done, 1),
        "cuDeviceGet": lambda _ordinal: (done, driver.CUdevice(0)),
        "cuDeviceGetName": lambda _size, _device: (done, gpu.name.encode()),
        "cuDeviceGetAttribute": attribute,
        "cuCtxGetCurrent": lambda: (done, driver.CUcontext(0)),
        "cuCtxGetDevice": lambda: (done, driver.CUdevice(0)),
        "cuCtxCreate": lambda *_: (done, driver.CUcontext(0)),
        "cuDevicePrimaryCtxRetain": lambda _device: (done, driver.CUcontext(0)),
        "cuStreamCreate": lambda *_: (done, driver.CUstream(0)),
        "cuEventCreate": lambda *_: (done, driver.CUevent(0)),
        "cuEventElapsedTime": lambda *_: (done, float("nan")),
    }
    silent = (
        "cuInit cuCtxSetCurrent cuCtxSynchronize cuCtxDestroy cuDevicePrimaryCtxRelease "
        "cuStreamSynchronize cuStreamDestroy cuStreamWaitEvent "
        "cuEventRecord cuEventSynchronize cuEventDestroy"
    )
    return answers | dict.fromkeys(silent.split(), lambda *_: (done,))


def _runtime(runtime: Any, gpu: GpuModel) -> dict[str, Callable[..., tuple[Any, ...]]]:
    """The same of cuda.bindings.runtime: (cudaError_t, value...)."""
    done = runtime.cudaError_t.cudaSuccess
    answers: dict[str, Callable[..., tuple[Any, ...]]] = {
        "cudaGetDeviceCount": lambda: (done, 1),
        "cudaGetDevice": lambda: (done, 0),
        "cudaStreamCreate": lambda: (done, runtime.cudaStream_t(0)),
        "cudaEventCreate": lambda: (done, runtime.cudaEvent_t(0)),
        "cudaEventElapsedTime": lambda *_: (done, float("nan")),
    }
    silent = (
        "cudaSetDevice cudaDeviceSynchronize cudaStreamSynchronize cudaStreamDestroy "
        "cudaEventRecord cudaEventSynchronize cudaEventDestroy cudaLibraryUnload"
    )
    return answers | dict.fromkeys(silent.split(), lambda *_: (done,))


@contextmanager
def cuda_driver(gpu: GpuModel) -> Iterator[None]:
    """While the block runs, `cuda.bindings` tells of the modelled GPU, in the whole process."""
    import cuda.bindings.driver as driver
    import cuda.bindings.runtime as runtime

    with ExitStack() as restore:
        for module, functions in (
            (driver, _driver(driver, gpu)),
            (runtime, _runtime(runtime, gpu)),
        ):
            for name, function in functions.items():
                restore.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, function)
        yield
