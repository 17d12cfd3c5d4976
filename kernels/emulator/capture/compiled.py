"""A host function compiled for the modelled GPU, and run for what it launches."""

from __future__ import annotations

import ctypes
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kernels.emulator.capture.arguments import HostArguments, receiver
from kernels.emulator.capture.device import host_sees
from kernels.emulator.gpus import GpuModel, gpu_model
from kernels.emulator.host_runtime import (
    CaptureError,
    HostRuntime,
    Launch,
    entry_parameter_bytes,
)
from kernels.emulator.running import function_name
from kernels.emulator.tensors import check_tensor_maps

# What a compiled host function calls of the CUDA runtime and of the DSL's own.
_RUNTIME_SYMBOLS = ("_cu", "cuda_dialect", "CuteDSLRT")


class HostProgram:
    """The host half of a compiled function, its calls of the CUDA runtime bound to the emulator.

    compiled: what the DSL made of the function, with its PTX kept and no engine of its own.
    ptx: text of the module that holds every kernel of the function (with `.loc` line information).
    entries: bytes of each parameter of each kernel. engine: the LLVM engine that runs the host code
    (`symbol` finds a function of it). libraries: shared objects that it calls besides.
    """

    def __init__(self, compiled: Any, gpu: GpuModel, libraries: Sequence[str] = ()) -> None:
        self.ptx: str = compiled.__ptx__
        self.entries = entry_parameter_bytes(self.ptx)
        self.gpu = gpu
        self._lock = threading.Lock()
        self._runtime = HostRuntime(gpu, self.entries)
        self.engine, self._callbacks = self._build_engine(compiled.ir_module, libraries)
        self._load_library()
        self._host = self.engine.lookup(compiled.function_name)

    def _build_engine(self, module: Any, libraries: Sequence[str]) -> tuple[Any, list[Any]]:
        from cutlass._mlir.execution_engine import ExecutionEngine

        undefined = []
        for op in module.body.operations:
            if op.operation.name == "llvm.func" and not op.operation.regions[0].blocks:
                symbol = str(op.attributes["sym_name"]).strip('"')
                if symbol.startswith(_RUNTIME_SYMBOLS):
                    undefined.append(symbol)
        engine = ExecutionEngine(
            module, opt_level=1, shared_libs=libraries, enable_object_dump=False
        )
        return engine, self._runtime.bind(engine, undefined)

    def symbol(self, name: str) -> int:
        """Address of a function of the host code, in its packed form: void (void** of arguments and
        result). CaptureError where there is none."""
        address = self.engine.raw_lookup(name)
        if not address:
            raise CaptureError(f"the compiled host module has no {name}")
        return int(address)

    def _load_library(self) -> None:
        """Run the module's own initialisation, which asks for its kernels by name."""
        library = (ctypes.c_void_p * 1)()
        pointer, status = ctypes.c_void_p(ctypes.addressof(library)), ctypes.c_int(0)
        packed = (ctypes.c_void_p * 2)(ctypes.addressof(pointer), ctypes.addressof(status))
        for name in ("cuda_init", "cuda_load"):
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.symbol(name))(packed)
            self._check(status.value, name)

    def _check(self, status: int, what: str) -> None:
        error, self._runtime.error = self._runtime.error, None
        if error is not None:
            raise error
        if status != 0:
            raise CaptureError(f"{what} returned CUDA error {status}")

    def run(self, pointers: Sequence[Any]) -> list[Launch]:
        """Run the host function and return what it launched, in order; no kernel runs yet.

        pointers: addresses of its arguments' values, as the DSL's `generate_execution_args` makes
        them. Raises what `HostRuntime` raises, and CaptureError for a CUDA error.
        """
        status = ctypes.c_int(0)
        packed = (ctypes.c_void_p * (len(pointers) + 1))()
        for index, pointer in enumerate(pointers):
            packed[index] = pointer.value if isinstance(pointer, ctypes.c_void_p) else pointer
        packed[len(pointers)] = ctypes.addressof(status)

        def host() -> None:
            self._host(packed)
            self._check(status.value, "the host function")

        return self.launches_of(host)

    def launches_of(self, host: Callable[[], Any]) -> list[Launch]:
        """What the host code launches while `host` runs it."""
        with self._lock:
            self._runtime.launches = []
            try:
                host()
            except Exception:
                self._check(0, "the host function")  # the reason, where the runtime knows it
                raise
            self._check(0, "the host function")
            return self._runtime.launches


class CompiledKernel:
    """A host function compiled with its kernels, ready to be run for what it launches.

    ptx, entries: as of `HostProgram`. gpu: the `GpuModel` it was compiled for. key:
    `HostArguments.key` of the arguments it serves. seconds: what compiling took.
    """

    def __init__(self, fn: Any, key: Any, gpu: GpuModel, compiled: Any, seconds: float) -> None:
        self.fn = fn
        self.key = key
        self.gpu = gpu
        self.seconds = seconds
        self._arguments = compiled.execution_args
        self._program = HostProgram(compiled, gpu)

    @property
    def ptx(self) -> str:
        return self._program.ptx

    @property
    def entries(self) -> dict[str, tuple[int, ...]]:
        return self._program.entries

    def launch(self, *args: Any) -> list[Launch]:
        """Run the host function on these arguments and return what it launched, in order.

        args: as for `compile`; sizes and data may differ, types, ranks and layouts may not.
        Raises UnsupportedLaunch for runtime calls or attributes that are not modelled, ValueError
        for a tensor whose strides a tensor map cannot hold.
        """
        return self.launch_bound(HostArguments(self.fn, args))

    def launch_bound(self, arguments: HostArguments) -> list[Launch]:
        """`launch` for arguments that are already converted."""
        if arguments.fakes:
            raise TypeError(
                f"{', '.join(arguments.fakes)}: a fake tensor has no data; pass a CPU tensor"
            )
        if arguments.key != self.key:
            raise TypeError(
                f"compiled for arguments {self.key}, called with {arguments.key}: element types, "
                "ranks, stride-1 dimensions, alignments and compile-time values must be the same"
            )
        values = self._arguments.get_rectified_args_from_original_args(
            (*receiver(self.fn), *arguments.values), {}
        )
        pointers, keep_alive = self._arguments.generate_execution_args(tuple(values), {})
        launches = self._program.run(pointers)
        del keep_alive
        for launch in launches:
            check_tensor_maps(launch.params, arguments.tensors)
        return [replace(launch, allocations=arguments.allocations) for launch in launches]


def compile_bound(fn: Any, arguments: HostArguments, gpu: GpuModel) -> CompiledKernel:
    """`compile` for arguments that are already converted."""
    import cutlass.cute as cute

    start = time.perf_counter()
    with host_sees(gpu), tempfile.TemporaryDirectory(prefix="emulator-") as folder:
        # Everything the compile needs is said here; no environment variable is read or set.
        compiled = cute.compile(
            fn,
            *arguments.values,
            options=f"--gpu-arch {gpu.arch} --keep-ptx --generate-line-info "
            f"--dump-dir={shlex.quote(folder)}",
            no_jit_engine=True,  # its engine would be bound to the real CUDA runtime
        )
        if not compiled.__ptx__ or "\n" not in compiled.__ptx__:
            raise CaptureError(f"{function_name(fn)} launches no kernel: it compiled to no PTX")
        return CompiledKernel(fn, arguments.key, gpu, compiled, time.perf_counter() - start)


def compile(fn: Any, *args: Any, gpu: str | GpuModel = "b200") -> CompiledKernel:
    """Compile a `@cute.jit` function for `gpu` so that its launches can be caught.

    fn: a function, bound method, or object whose `__call__` is `@cute.jit`.
    args: what `fn` takes. CPU tensors (torch, numpy, anything with DLPack) stand where CUDA tensors
    would; their shapes and strides stay dynamic but for the stride-1 dimension, so that one compile
    serves other sizes. A `stream` may be None or left out. Tensors that the caller made with
    `from_dlpack` are passed on as they are, and so are scalars.

    Raises TypeError for a wrong `fn` or arguments, ValueError for an unknown `gpu`, and the DSL's
    own errors for kernels that do not compile.
    """
    return compile_bound(fn, HostArguments(fn, args), gpu_model(gpu))


def ptx_of(fn: Any, *args: Any, gpu: str | GpuModel = "b200") -> str:
    """PTX text that `fn(*args)` compiles to for `gpu`, with line information."""
    return compile(fn, *args, gpu=gpu).ptx
