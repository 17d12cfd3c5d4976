"""The CUDA driver and runtime as far as host code of a kernel asks them about device and streams.

`cuda.bindings` needs the NVIDIA driver, which a machine without a GPU does not have. While
`cuda_driver` is on, the functions below answer for the modelled GPU; modules and launches stay with
the real one, which says that it is not there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kernels.emulator.capture.torch_cuda import DeviceMemory
from kernels.emulator.gpus import GpuModel
from kernels.emulator.host_runtime import device_attributes

_CUDA_VERSION = 13000


Answers = dict[str, Callable[..., tuple[Any, ...]]]


def _memory(memory: DeviceMemory, done: Any, bad: Any, pointer: Callable[[int], Any]) -> Answers:
    """Memory that is allocated, freed, set and copied, by both the driver and the runtime."""

    def allocate(nbytes: int, _stream: Any = None) -> tuple[Any, ...]:
        return done, pointer(memory.allocate(int(nbytes)))

    def free(address: Any, _stream: Any = None) -> tuple[Any, ...]:
        return ((done if memory.free(int(address)) else bad),)

    def copy(target: Any, source: Any, nbytes: int, *_kind_or_stream: Any) -> tuple[Any, ...]:
        ctypes.memmove(int(target), int(source), int(nbytes))
        return (done,)

    def fill(address: Any, value: int, nbytes: int, *_stream: Any) -> tuple[Any, ...]:
        ctypes.memset(int(address), int(value), int(nbytes))
        return (done,)

    return {"allocate": allocate, "free": free, "copy": copy, "fill": fill}


def _driver(driver: Any, gpu: GpuModel, memory: DeviceMemory) -> Answers:
    """Functions of cuda.bindings.driver: (CUresult, value...), as the real ones answer."""
    done = driver.CUresult.CUDA_SUCCESS
    known = device_attributes(gpu)

    def attribute(which: Any, _device: Any) -> tuple[Any, ...]:
        if int(which) not in known:
            return driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, 0
        return done, known[int(which)]

    answers: Answers = {
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
    bad = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    of = _memory(memory, done, bad, driver.CUdeviceptr)
    for name in ("cuMemAlloc", "cuMemAllocAsync"):
        answers[name] = of["allocate"]
    for name in ("cuMemFree", "cuMemFreeAsync"):
        answers[name] = of["free"]
    for name in ("cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD"):
        answers[name] = answers[f"{name}Async"] = of["copy"]
    answers["cuMemsetD8"] = answers["cuMemsetD8Async"] = of["fill"]
    silent = (
        "cuInit cuCtxSetCurrent cuCtxSynchronize cuCtxDestroy cuDevicePrimaryCtxRelease "
        "cuStreamSynchronize cuStreamDestroy cuStreamWaitEvent "
        "cuEventRecord cuEventSynchronize cuEventDestroy"
    )
    return answers | dict.fromkeys(silent.split(), lambda *_: (done,))


def _runtime(runtime: Any, memory: DeviceMemory) -> Answers:
    """The same of cuda.bindings.runtime: (cudaError_t, value...)."""
    done = runtime.cudaError_t.cudaSuccess
    answers: Answers = {
        "cudaGetDeviceCount": lambda: (done, 1),
        "cudaGetDevice": lambda: (done, 0),
        "cudaStreamCreate": lambda: (done, runtime.cudaStream_t(0)),
        "cudaEventCreate": lambda: (done, runtime.cudaEvent_t(0)),
        "cudaEventElapsedTime": lambda *_: (done, float("nan")),
    }
    bad = runtime.cudaError_t.cudaErrorInvalidValue
    of = _memory(memory, done, bad, int)
    answers["cudaMalloc"], answers["cudaFree"] = of["allocate"], of["free"]
    answers["cudaMemcpy"] = answers["cudaMemcpyAsync"] = of["copy"]
    answers["cudaMemset"] = answers["cudaMemsetAsync"] = of["fill"]
    silent = (
        "cudaSetDevice cudaDeviceSynchronize cudaStreamSynchronize cudaStreamDestroy "
        "cudaEventRecord cudaEventSynchronize cudaEventDestroy cudaLibraryUnload"
    )
    return answers | dict.fromkeys(silent.split(), lambda *_: (done,))


@contextmanager
def cuda_driver(gpu: GpuModel, memory: DeviceMemory) -> Iterator[None]:
    """While the block runs, `cuda.bindings` tells of the modelled GPU, in the whole process."""
    import cuda.bindings.driver as driver
    import cuda.bindings.runtime as runtime

    with ExitStack() as restore:
        for module, functions in (
            (driver, _driver(driver, gpu, memory)),
            (runtime, _runtime(runtime, memory)),
        ):
            for name, function in functions.items():
                restore.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, function)
        yield
