"""Arguments of a host function, made ready for the DSL: what it takes, and the memory they name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from kernels.emulator.running import function_name
from kernels.emulator.tensors import (
    DL_CPU,
    CudaView,
    Geometry,
    geometry,
    merge_allocations,
    present_as_cuda,
)


def receiver(fn: Any) -> tuple[Any, ...]:
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
        tensors keep their marks; one that `from_dlpack` made of a CPU tensor is a tensor in global
        memory from now on. Raises ValueError for a tensor that is not in CPU memory.
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
        if tensor.memspace.name == "generic":  # from_dlpack of a CPU tensor, marked as it may be
            present_as_cuda(tensor._dlpack_data)
        place = Geometry(
            tensor.data_ptr, tensor.element_type.width, tuple(tensor.shape), tuple(tensor.stride)
        )
        return cls(tensor, tensor.__cache_key__, place)

    @classmethod
    def _of_dlpack(cls, tensor: Any, name: str) -> TensorArgument:
        from cutlass.cute.runtime import from_dlpack

        try:
            device_type, _ = tensor.__dlpack_device__()
            if getattr(tensor, "requires_grad", False):
                tensor = tensor.detach()
            place = geometry(tensor) if int(device_type) == DL_CPU else None
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(
                f"{name}: {_described(tensor)} has no memory that a kernel could be given: {error}"
            ) from error
        if place is None:
            raise ValueError(
                f"{name}: a tensor on {getattr(tensor, 'device', f'DLPack device {device_type}')}; "
                "the emulator works on CPU tensors: pass .cpu()"
            )
        aligned = place.base % _PREFERRED_ALIGN_BYTES == 0
        value = from_dlpack(
            CudaView(tensor), assumed_align=_PREFERRED_ALIGN_BYTES if aligned else None
        )
        if place.shape:
            value = value.mark_layout_dynamic(place.leading_dim())
        return cls(value, value.__cache_key__, place)


def _described(tensor: Any) -> str:
    """For example "a torch.float32 tensor on meta"."""
    kind, device = getattr(tensor, "dtype", type(tensor).__name__), getattr(tensor, "device", "cpu")
    return f"a {kind} tensor on {device}"


class HostArguments:
    """Arguments of a host function, made ready for the DSL.

    memory: tensors that kernels reach by pointers alone. `values` go to the DSL in order; `key` is
    equal for two calls that one compile serves (element types, ranks, static strides, alignments,
    compile-time values; never a pointer or a size); `tensors` are the names and places of those
    with data, `allocations` the global memory they take; `fakes` are the arguments that have none.
    """

    def __init__(self, fn: Any, args: Sequence[Any], memory: Sequence[Any] = ()) -> None:
        signature = host_signature(fn)
        args = _with_stream(signature, tuple(args))
        try:
            signature.bind(*args)
        except TypeError as error:
            raise TypeError(f"{function_name(fn)}: {error}") from None
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
        self._reach(memory)
        self.allocations = merge_allocations(place.allocation(name) for name, place in self.tensors)

    def _reach(self, memory: Any) -> None:
        """The memory of tensors that kernels reach by pointers alone."""
        if not isinstance(memory, (list, tuple)):
            raise TypeError(f"memory: a {type(memory).__name__}; pass a list of CPU tensors")
        for index, item in enumerate(memory):
            tensor = TensorArgument.of(item, f"memory[{index}]")
            if tensor is None or tensor.place is None:
                raise TypeError(f"memory[{index}]: {item!r} is not a tensor with data")
            self.tensors.append((f"memory[{index}]", tensor.place))

    def _convert(self, arg: Any, parameter: inspect.Parameter) -> tuple[Any, Any]:
        """What the DSL is given for an argument, and its part of the key."""
        from cutlass.base_dsl.runtime.jit_arg_adapters import is_arg_annotation_constexpr
        from cutlass.base_dsl.typing import NumericMeta
        from cutlass.cute.typing import Tensor as CuteTensor

        if _is_stream(parameter):
            return cuda_stream(arg), "stream"
        if is_arg_annotation_constexpr(parameter.annotation, parameter.name, 1, None):
            return arg, ("constexpr", _hashable(arg))
        if arg is None and parameter.annotation is CuteTensor:
            raise TypeError(f"{parameter.name}: None for a cute.Tensor; pass a CPU tensor")
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


def cuda_stream(arg: Any) -> Any:
    """A CUstream for the DSL: the default stream for None, 0 and the DSL's fake streams."""
    import cuda.bindings.driver as driver

    if arg is None or type(arg).__name__ == "_FakeStream":
        return driver.CUstream(0)
    return driver.CUstream(arg) if isinstance(arg, int) else arg
