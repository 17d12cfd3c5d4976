"""Catches what a `@cute.jit` host function launches, on a machine with no GPU and no CUDA driver.

The CuTe DSL compiles a host function to LLVM and leaves the CUDA runtime as undefined symbols
(`_cudaLaunchKernelEx`, `_cudaLibraryGetKernel`, ...). `compile` asks the DSL for its module
*without* the DSL's own JIT engine, builds a private engine from it and binds those symbols to
Python. An ordinary `cute.compile` or a real launch in the same process goes its own way: what
`host_sees` changes of the DSL, it puts back. The kernel's own host code then runs on the CPU, so
grid, cluster, shared memory and parameters (tensor maps included, which the DSL encodes inline)
are those that a GPU would be given.

This is the only module of the emulator that loads the DSL, and it does so inside functions.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from kernels.emulator.gpus import GpuModel, gpu_model
from kernels.emulator.host_runtime import (
    CaptureError,
    HostRuntime,
    Launch,
    entry_parameter_bytes,
)
from kernels.emulator.tensors import (
    DL_CPU,
    CudaView,
    Geometry,
    check_tensor_maps,
    geometry,
    merge_allocations,
)

# The DSL keeps its compile state in one object per process; two compiles must not overlap.
_DSL_LOCK = threading.RLock()


def _receiver(fn: Any) -> tuple[Any, ...]:
    """The `self` that the DSL sees first: of a bound method, or of a callable object."""
    if inspect.ismethod(fn):
        return (fn.__self__,)
    return () if inspect.isfunction(fn) else (fn,)


def host_signature(fn: Any) -> inspect.Signature:
    """Signature of a `@cute.jit` function, bound method or callable object, without `self`.

    Raises TypeError when `fn` is none of these.
    """
    plain = inspect.isfunction(fn) or inspect.ismethod(fn)
    call: Any = fn if plain or not callable(fn) else type(fn).__call__
    # The DSL's decorator wraps the user's function; anything else callable is not for us.
    if not hasattr(getattr(call, "__func__", call), "__wrapped__"):
        raise TypeError(
            f"{fn!r} is not a @cute.jit function, nor an object whose __call__ is one; "
            "pass the function itself, not what cute.compile made of it"
        )
    return inspect.signature(fn, eval_str=True)


def _is_stream(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return parameter.name == "stream" or name.split(".")[-1] in ("CUstream", "cudaStream_t")


# The DSL's usual promise for tensors of a GPU kernel: TMA and 128-bit copies need 16 bytes.
_PREFERRED_ALIGN_BYTES = 16


@dataclass(frozen=True)
class TensorArgument:
    """A tensor argument as the DSL takes it (`value`), its compile key and its place in memory.

    `place` is None for a fake tensor, which has none.
    """

    value: Any
    key: Any
    place: Geometry | None

    @classmethod
    def of(cls, arg: Any, name: str) -> TensorArgument | None:
        """Convert a tensor; None when `arg` is not one.

        torch, numpy and other DLPack tensors become CuTe tensors with a dynamic layout. CuTe
        tensors are taken as they are. Raises ValueError for a tensor that is not in CPU memory.
        """
        from cutlass.cute.typing import Tensor as CuteTensor

        if isinstance(arg, CuteTensor):
            return cls._of_cute(arg)
        if not hasattr(arg, "__dlpack__"):
            return None
        return cls._of_dlpack(arg, name)

    @classmethod
    def _of_cute(cls, tensor: Any) -> TensorArgument:
        if not hasattr(tensor, "data_ptr"):  # a fake tensor: good for compiling only
            return cls(tensor, tensor.__cache_key__, None)
        place = Geometry(
            tensor.data_ptr, tensor.element_type.width, tuple(tensor.shape), tuple(tensor.stride)
        )
        return cls(tensor, tensor.__cache_key__, place)

    @classmethod
    def _of_dlpack(cls, tensor: Any, name: str) -> TensorArgument:
        from cutlass.cute.runtime import from_dlpack

        device_type, _ = tensor.__dlpack_device__()
        if int(device_type) != DL_CPU:
            raise ValueError(
                f"{name}: a tensor on {getattr(tensor, 'device', f'DLPack device {device_type}')}; "
                "the emulator works on CPU tensors: pass .cpu()"
            )
        if getattr(tensor, "requires_grad", False):
            tensor = tensor.detach()
        place = geometry(tensor)
        aligned = place.base % _PREFERRED_ALIGN_BYTES == 0
        value = from_dlpack(
            CudaView(tensor), assumed_align=_PREFERRED_ALIGN_BYTES if aligned else None
        )
        if place.shape:
            value = value.mark_layout_dynamic(place.leading_dim())
        return cls(value, value.__cache_key__, place)


class HostArguments:
    """Arguments of a host function, made ready for the DSL.

    `values` go to the DSL in order; `key` is equal for two calls that one compile serves (element
    types, ranks, static strides, alignments, compile-time values; never a pointer or a size);
    `tensors` are the names and places of those with data, `allocations` the global memory they
    take; `fakes` are the arguments that have none.
    """

    def __init__(self, fn: Any, args: Sequence[Any]) -> None:
        signature = host_signature(fn)
        args = _with_stream(signature, tuple(args))
        signature.bind(*args)
        parameters = list(signature.parameters.values())
        self.values: list[Any] = []
        self.fakes: list[str] = []
        keys: list[Any] = []
        self.tensors: list[tuple[str, Geometry]] = []
        for index, arg in enumerate(args):
            parameter = parameters[min(index, len(parameters) - 1)]
            value, key = self._convert(arg, parameter)
            self.values.append(value)
            keys.append(key)
        self.key = tuple(keys)
        self.allocations = merge_allocations(place.allocation(name) for name, place in self.tensors)

    def _convert(self, arg: Any, parameter: inspect.Parameter) -> tuple[Any, Any]:
        """What the DSL is given for an argument, and its part of the key."""
        from cutlass.base_dsl.runtime.jit_arg_adapters import is_arg_annotation_constexpr
        from cutlass.base_dsl.typing import NumericMeta

        if _is_stream(parameter):
            return _stream(arg), "stream"
        if is_arg_annotation_constexpr(parameter.annotation, parameter.name, 1, None):
            return arg, ("constexpr", _hashable(arg))
        value, key = self._convert_value(arg, parameter.name)
        if key == ("scalar", type(arg)) and isinstance(parameter.annotation, NumericMeta):
            key = ("scalar", parameter.annotation)  # the DSL converts to what is declared
        return value, key

    def _convert_value(self, arg: Any, name: str) -> tuple[Any, Any]:
        from cutlass.base_dsl.typing import Numeric

        tensor = TensorArgument.of(arg, name)
        if tensor is not None:
            if tensor.place is None:
                self.fakes.append(name)
            else:
                self.tensors.append((name, tensor.place))
            return tensor.value, ("tensor", tensor.key)
        if isinstance(arg, (bool, int, float, Numeric)):
            return arg, ("scalar", type(arg))
        if isinstance(arg, (list, tuple)):
            return self._convert_sequence(arg, name)
        if is_dataclass(arg) and not isinstance(arg, type):
            return self._convert_dataclass(arg, name)
        cache_key = getattr(arg, "__cache_key__", None)
        return arg, ("object", type(arg), _hashable(arg) if cache_key is None else cache_key)

    def _convert_sequence(self, arg: Any, name: str) -> tuple[Any, Any]:
        """A list, tuple or NamedTuple of converted items."""
        constexpr = _constexpr_items(type(arg))
        values, keys = [], []
        for index, item in enumerate(arg):
            if index in constexpr:
                value, key = item, ("constexpr", _hashable(item))
            else:
                value, key = self._convert_value(item, f"{name}[{index}]")
            values.append(value)
            keys.append(key)
        # A NamedTuple is made from its fields, other sequences from one iterable.
        return getattr(type(arg), "_make", type(arg))(values), (type(arg), *keys)

    def _convert_dataclass(self, arg: Any, name: str) -> tuple[Any, Any]:
        """A copy whose tensors are converted; compile-time fields count by value in the key."""
        from cutlass.base_dsl.utils.tree_utils import is_constexpr_field

        converted, keys = copy.copy(arg), []
        for field in fields(arg):
            item = getattr(arg, field.name)
            if is_constexpr_field(field, arg):
                keys.append(("constexpr", _hashable(item)))
                continue
            value, key = self._convert_value(item, f"{name}.{field.name}")
            keys.append(key)
            if value is not item:
                object.__setattr__(converted, field.name, value)  # also where it is frozen
        return converted, (type(arg), *keys)


def _constexpr_items(kind: type) -> frozenset[int]:
    """Indices of a NamedTuple's compile-time fields; empty for other sequences."""
    from cutlass.base_dsl.runtime.jit_arg_adapters import is_arg_annotation_constexpr

    names = getattr(kind, "_fields", ())
    hints = get_type_hints(kind) if names else {}
    return frozenset(
        index
        for index, name in enumerate(names)
        if is_arg_annotation_constexpr(hints.get(name), name, 1, None)
    )


def _with_stream(signature: inspect.Signature, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with a default stream where the host function takes one and none is given.

    What stands between has its defaults; other arguments that are left out stay so.
    """
    left_out = list(signature.parameters.values())[len(args) :]
    for index, parameter in enumerate(left_out):
        if _is_stream(parameter):
            if parameter.default in (None, parameter.empty):
                return (*args, *(p.default for p in left_out[:index]), None)
            return args
        if parameter.default is parameter.empty:
            return args
    return args


class _Opaque:
    """Key of a value that cannot be hashed: equal only to itself, and keeps the value alive."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opaque) and self._value is other._value


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return _Opaque(value)
    return (type(value), value)


def _stream(arg: Any) -> Any:
    """A CUstream for the DSL: the default stream for None, 0 and the DSL's fake streams."""
    import cuda.bindings.driver as driver

    if arg is None or type(arg).__name__ == "_FakeStream":
        return driver.CUstream(0)
    return driver.CUstream(arg) if isinstance(arg, int) else arg


class CompiledKernel:
    """A host function compiled with its kernels, ready to be run for what it launches.

    ptx: text of the module that holds every kernel of the function (with `.loc` line information).
    entries: bytes of each parameter of each kernel. gpu: the `GpuModel` it was compiled for.
    key: `HostArguments.key` of the arguments it serves. seconds: what compiling took.
    """

    def __init__(self, fn: Any, key: Any, gpu: GpuModel, compiled: Any, seconds: float) -> None:
        self.fn = fn
        self.key = key
        self.gpu = gpu
        self.ptx: str = compiled.__ptx__
        self.entries = entry_parameter_bytes(self.ptx)
        self.seconds = seconds
        self._lock = threading.Lock()
        self._arguments = compiled.execution_args
        self._runtime = HostRuntime(gpu, self.entries)
        self._engine, self._callbacks = self._build_engine(compiled.ir_module)
        self._load_library()
        self._host = self._engine.lookup(compiled.function_name)

    def _build_engine(self, module: Any) -> tuple[Any, list[Any]]:
        from cutlass._mlir.execution_engine import ExecutionEngine

        undefined = []
        for op in module.body.operations:
            if op.operation.name == "llvm.func" and not op.operation.regions[0].blocks:
                symbol = str(op.attributes["sym_name"]).strip('"')
                if symbol.startswith(("_cu", "cuda_dialect")):
                    undefined.append(symbol)
        engine = ExecutionEngine(module, opt_level=1, enable_object_dump=False)
        return engine, self._runtime.bind(engine, undefined)

    def _load_library(self) -> None:
        """Run the module's own initialisation, which asks for its kernels by name."""
        library = (ctypes.c_void_p * 1)()
        pointer, status = ctypes.c_void_p(ctypes.addressof(library)), ctypes.c_int(0)
        packed = (ctypes.c_void_p * 2)(ctypes.addressof(pointer), ctypes.addressof(status))
        for name in ("cuda_init", "cuda_load"):
            address = self._engine.raw_lookup(name)
            if not address:
                raise CaptureError(f"the compiled host module has no {name}")
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(packed)
            self._check(status.value, name)

    def _check(self, status: int, what: str) -> None:
        error, self._runtime.error = self._runtime.error, None
        if error is not None:
            raise error
        if status != 0:
            raise CaptureError(f"{what} returned CUDA error {status}")

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
            (*_receiver(self.fn), *arguments.values), {}
        )
        pointers, keep_alive = self._arguments.generate_execution_args(tuple(values), {})
        status = ctypes.c_int(0)
        packed = (ctypes.c_void_p * (len(pointers) + 1))()
        for index, pointer in enumerate(pointers):
            packed[index] = pointer.value if isinstance(pointer, ctypes.c_void_p) else pointer
        packed[len(pointers)] = ctypes.addressof(status)
        with self._lock:
            self._runtime.launches = []
            self._host(packed)
            self._check(status.value, "the host function")
            launches = self._runtime.launches
        del keep_alive
        for launch in launches:
            check_tensor_maps(launch.params, arguments.tensors)
        return [replace(launch, allocations=arguments.allocations) for launch in launches]


# The GPU that host code of this thread sees instead of the machine's own, if any.
_SEEN: ContextVar[GpuModel | None] = ContextVar("seen_gpu", default=None)

# Answers of cutlass.utils.HardwareInfo for a modelled GPU. Real parts may fit fewer clusters of
# more than two CTAs, because their SMs come in groups of which some are fused off.
_HARDWARE_INFO: dict[str, Callable[..., Any]] = {
    "__init__": lambda gpu, device_id=0: None,
    "get_device_multiprocessor_count": lambda gpu: gpu.sm_count,
    "get_max_active_clusters": lambda gpu, cluster_size, stream=None: gpu.sm_count // cluster_size,
}


@contextmanager
def host_sees(gpu: str | GpuModel) -> Iterator[GpuModel]:
    """Host code of a kernel sees the modelled `gpu` while the block runs, in this thread.

    The DSL's target architecture, which kernel classes ask for when they are made, and what
    `cutlass.utils.HardwareInfo` tells of the device are the model's. `emulate` and `compile` run
    under it; a kernel object that asks earlier needs it around its construction.
    """
    from cutlass.base_dsl.dsl import BaseDSL
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.utils import HardwareInfo

    model = gpu_model(gpu)
    token = _SEEN.set(model)
    with _DSL_LOCK, ExitStack() as restore:
        restore.callback(_SEEN.reset, token)
        for dsl in (BaseDSL, CuTeDSL):
            settings = dsl._get_dsl().envar
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
            raise CaptureError(
                f"{getattr(fn, '__name__', fn)!r} compiled to no PTX: it launches no kernel "
                f"(files written: {[path.name for path in Path(folder).iterdir()]})"
            )
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
