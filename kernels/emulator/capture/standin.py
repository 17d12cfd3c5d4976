"""A modelled GPU in the place of a real one, for code that compiles and launches for itself.

`emulate` runs one host function. `stand_in` is for everything else: scripts that call
`cute.compile` and the function it returns, `@cute.jit` functions called as they are, TVM-FFI
functions, and libraries that do all of this behind a torch interface. While its block runs, every
function that the DSL compiles in this process runs its kernels on the modelled GPU when it is
called, and torch has a CUDA device (`torch_cuda`).
"""

from __future__ import annotations

import copy
import ctypes
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from kernels.emulator.capture.compiled import HostProgram
from kernels.emulator.capture.cuda_driver import cuda_driver
from kernels.emulator.capture.device import dsls, host_sees
from kernels.emulator.capture.torch_cuda import DeviceMemory, torch_cuda
from kernels.emulator.findings import EmulationError
from kernels.emulator.gpus import GpuModel
from kernels.emulator.host_runtime import Launch, UnsupportedLaunch
from kernels.emulator.report import Report
from kernels.emulator.tensors import check_tensor_maps, merge_allocations

Runner = Callable[[str, str, list[Launch]], Report]


@dataclass
class StandIn:
    """What ran on the modelled GPU. reports: one for each call that launched kernels, in order."""

    gpu: GpuModel
    reports: list[Report] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every launch so far ran to its end without a finding."""
        return all(report.ok for report in self.reports)


@dataclass(frozen=True)
class _Session:
    """A stand-in that is on. run: emulates the launches of a function, and judges."""

    gpu: GpuModel
    memory: DeviceMemory
    run: Runner


# Compiled functions outlive a stand-in, in the caches of packages; they run in the one that is on.
_sessions: list[_Session] = []


class _Emulated:
    """Stands for what the DSL compiled: a call runs the kernels on the model."""

    def __init__(self, compiled: Any, gpu: GpuModel) -> None:
        self._compiled = compiled
        self._gpu = gpu
        # A TVM-FFI function has made its program while it was made itself.
        ffi_program = getattr(compiled, "emulated_program", None)
        self._is_ffi = ffi_program is not None
        self._program: HostProgram = ffi_program or HostProgram(compiled, gpu)
        compiled.engine = self._program.engine  # where auxiliary functions are looked up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    @property
    def _session(self) -> _Session:
        if not _sessions:
            raise RuntimeError(
                "this function was compiled inside of kernels.emulator.stand_in: it runs there only"
            )
        if _sessions[-1].gpu.arch != self._gpu.arch:
            raise RuntimeError(
                f"this function was compiled for {self._gpu.name} ({self._gpu.arch}), and the "
                f"stand-in is {_sessions[-1].gpu.name} ({_sessions[-1].gpu.arch}): packages that "
                "remember their GPU want a process for each"
            )
        return _sessions[-1]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        memory = self._session.memory
        if self._is_ffi:
            views = [_on_device(memory, arg) for arg in args]
            named = {name: _on_device(memory, arg) for name, arg in kwargs.items()}
            self._emulate(self._program.launches_of(lambda: self._compiled(*views, **named)))
            return
        pointers, keep_alive = self._compiled.execution_args.generate_execution_args(args, kwargs)
        self.run_compiled_program(pointers)
        del keep_alive

    def run_compiled_program(self, pointers: Any) -> None:
        self._emulate(self._program.run(pointers))

    def to(self, device: Any = None) -> _Emulated:
        return self

    def _emulate(self, launches: list[Launch]) -> None:
        session = self._session
        tensors = session.memory.tensors()
        for launch in launches:
            check_tensor_maps(launch.params, tensors)
        allocations = merge_allocations(place.allocation(name) for name, place in tensors)
        launches = [replace(launch, allocations=allocations) for launch in launches]
        name = str(self._compiled.execution_args.function_name)
        session.run(name, self._program.ptx, launches)


def _on_device(memory: DeviceMemory, arg: Any) -> Any:
    """An argument as the FFI takes it, sequences and dataclasses item by item."""
    if isinstance(arg, (list, tuple)):
        # A NamedTuple is made from its fields, other sequences from one iterable.
        make = getattr(type(arg), "_make", type(arg))
        return make([_on_device(memory, item) for item in arg])
    if is_dataclass(arg) and not isinstance(arg, type):
        converted = copy.copy(arg)
        for item in fields(arg):
            value = _on_device(memory, getattr(arg, item.name))
            object.__setattr__(converted, item.name, value)  # also where it is frozen
        return converted
    return memory.presented(arg)


# TVMFFISafeCallType (tvm/ffi/c_api.h): int (void* handle, const TVMFFIAny*, int32_t, TVMFFIAny*).
# The DSL's engine finds functions by their packed form only, void (void** of arguments and result).
_SAFE_CALL = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p
)


def _ffi_entry(self: Any, gpu: GpuModel) -> Any:
    """The TVM-FFI entry point of a function with kernels, bound to the model."""
    tvm_ffi = import_module("tvm_ffi")
    libraries = [import_module("tvm_ffi.libinfo").find_libtvm_ffi()]
    self.emulated_program = program = HostProgram(self, gpu, libraries)
    packed = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        program.symbol(f"__tvm_ffi_{self.function_name}")
    )

    @_SAFE_CALL
    def entry(handle: int, args: int, count: int, result: int) -> int:
        values = (
            ctypes.c_void_p(handle),
            ctypes.c_void_p(args),
            ctypes.c_int32(count),
            ctypes.c_void_p(result),
            ctypes.c_int32(-1),
        )
        packed((ctypes.c_void_p * len(values))(*map(ctypes.addressof, values)))
        return values[-1].value

    address = ctypes.cast(entry, ctypes.c_void_p).value
    return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=(program, entry))


@contextmanager
def _ffi_functions(memory: DeviceMemory, gpu: GpuModel) -> Iterator[None]:
    """What the DSL compiles for TVM-FFI is bound to the model; tensors on the device are shown."""
    if find_spec("tvm_ffi") is None:
        yield
        return
    from cutlass.cutlass_dsl.tvm_ffi_provider import TVMFFIJitCompiledFunctionBase as compiled

    tvm_ffi = import_module("tvm_ffi")
    real, real_entry = tvm_ffi.from_dlpack, compiled._create_tvm_ffi_function

    def entry(self: Any) -> Any:
        return _ffi_entry(self, gpu) if self.has_gpu_module else real_entry(self)

    def from_dlpack(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # The package reads torch tensors without asking torch, and would see the CPU's memory.
        return real(memory.presented(tensor), *args, **kwargs)

    with ExitStack() as restore:
        for owner, name, value in (
            (compiled, "_create_tvm_ffi_function", entry),
            (tvm_ffi, "from_dlpack", from_dlpack),
        ):
            restore.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextmanager
def _compiles_for(session: _Session) -> Iterator[None]:
    """The DSL keeps PTX and lines of what it compiles, and what it returns is an `_Emulated`."""

    def stand_in_for(dsl: Any) -> Callable[..., Any]:
        real = dsl.compile_and_cache

        def compile_and_cache(*args: Any, **kwargs: Any) -> Any:
            # A device function, which nobody calls from the host; or one of the host alone.
            if "no_jit_engine" in kwargs or dsl.num_kernels == 0:
                return real(*args, **kwargs)
            positional = list(args)
            positional[6] = True  # no_jit_engine: its engine would be the real CUDA runtime's
            return _Emulated(real(*positional, **kwargs), session.gpu)

        return compile_and_cache

    import cutlass.cute as cute

    with ExitStack() as restore:
        # `cute.compile` keeps its options from call to call, and settings leave their mark on them.
        experimental = sys.modules.get("cutlass.cute.experimental")
        for entry in filter(None, (cute.compile, getattr(experimental, "compile", None))):
            restore.callback(setattr, entry, "_compile_options", entry._compile_options)
            entry._compile_options = copy.deepcopy(entry._compile_options)
        folder = restore.enter_context(tempfile.TemporaryDirectory(prefix="emulator-"))
        for dsl in dsls():
            settings = dsl.envar
            kept = {"keep_ptx": True, "lineinfo": True, "dump_dir": folder, "no_cache": True}
            for name, value in kept.items():
                restore.callback(setattr, settings, name, getattr(settings, name))
                setattr(settings, name, value)
            dsl.compile_and_cache = stand_in_for(dsl)
            restore.callback(delattr, dsl, "compile_and_cache")
        restore.enter_context(_ffi_functions(session.memory, session.gpu))
        yield


def _call_once(function: Callable[..., Any], **options: Any) -> float:
    """In the place of cute.testing.benchmark: one call, no time."""
    workspaces = options.get("workspace_generator")
    arguments = workspaces() if workspaces else options.get("kernel_arguments")
    args, kwargs = (arguments.args, arguments.kwargs) if arguments is not None else ((), {})
    function(*args, **kwargs)
    return float("nan")


def _no_module(path: Any, **_: Any) -> Any:
    """In the place of cute.runtime.load_module; packages that keep objects on disk compile anew."""
    raise UnsupportedLaunch(
        f"{path}: a compiled object holds SASS, which the emulator does not run; turn off the "
        "cache that it comes from"
    )


@contextmanager
def standing_in(
    gpu: GpuModel, run: Callable[[str, str, list[Launch]], Report], keep_going: bool
) -> Iterator[StandIn]:
    """The context behind `kernels.emulator.stand_in`; run: emulates a function's launches."""
    import cutlass.cute as cute
    from cutlass.cute import testing

    session = StandIn(gpu)

    def judge(name: str, ptx: str, launches: list[Launch]) -> Report:
        report = run(name, ptx, launches)
        session.reports.append(report)
        if not report.ok and not keep_going:
            raise EmulationError(f"{name}: the kernel has findings\n{report}", report)
        return report

    with host_sees(gpu), ExitStack() as restore:
        memory = restore.enter_context(torch_cuda(gpu))
        restore.enter_context(cuda_driver(gpu, memory))
        _sessions.append(_Session(gpu, memory, judge))
        restore.callback(_sessions.pop)
        restore.enter_context(_compiles_for(_sessions[-1]))
        restore.callback(setattr, testing, "benchmark", testing.benchmark)
        testing.benchmark = _call_once
        restore.callback(setattr, cute.runtime, "load_module", cute.runtime.load_module)
        cute.runtime.load_module = _no_module
        yield session
