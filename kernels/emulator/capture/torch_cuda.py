"""A CUDA device for torch on a machine without one: its tensors live in CPU memory.

`torch_cuda` lets code that says `device="cuda"`, `.cuda()` or `torch.cuda.synchronize()` run as it
stands. A tensor belongs to the device when its storage does: storages that were asked for on the
device, copied to it, or computed from tensors on it. Such tensors say so (`t.device`, `t.is_cuda`),
copies between the two sides are copies, and DLPack presents them as the device's memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

from kernels.emulator.gpus import GpuModel
from kernels.emulator.tensors import (
    DL_CUDA,
    Allocation,
    CudaView,
    Geometry,
    geometry,
    present_as_cuda,
)

# cudaMalloc: "suitably aligned for any kind of variable", and in practice to 256 bytes, on which
# kernels that ask for 128-byte alignment rely.
_ALIGNMENT_BYTES = 256


class DeviceMemory:
    """Storages of the device, and what of them was shown to host code that launches kernels."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}  # StorageImpl address -> StorageWeakRef
        self._shown: dict[tuple[str, Geometry], Any] = {}  # -> StorageWeakRef
        self._buffers: dict[int, Any] = {}  # address -> array, of cudaMalloc

    def owns(self, tensor: Any) -> bool:
        """Whether the tensor is on the device."""
        if tensor.layout is not _torch().strided:
            return False
        reference = self._storages.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()

    def take(self, tensor: Any) -> Any:
        """The tensor, on the device: as it is, or moved to where the device would put it."""
        from torch.multiprocessing.reductions import StorageWeakRef

        if tensor.layout is not _torch().strided or tensor.device.type != "cpu":
            return tensor
        if not self.owns(tensor) and tensor.untyped_storage().data_ptr() % _ALIGNMENT_BYTES:
            tensor = _aligned(tensor)
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def show(self, tensor: Any) -> None:
        """Kernels may touch the tensor's extent from now on, as long as its storage lives."""
        name = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        reference = self._storages.get(tensor.untyped_storage()._cdata)
        if reference is not None:
            self._shown[name, geometry(tensor.detach())] = reference

    def presented(self, value: Any) -> Any:
        """A tensor on the device as DLPack's consumers see the device's; all else as it is."""
        if not isinstance(value, _torch().Tensor) or not self.owns(value):
            return value
        self.show(value)
        return CudaView(value.detach())

    def allocate(self, nbytes: int) -> int:
        """Address of new memory, as cudaMalloc gives it; nothing has been written there."""
        buffer = _aligned_bytes(max(nbytes, 1))
        self._buffers[buffer.ctypes.data] = buffer
        return int(buffer.ctypes.data)

    def free(self, address: int) -> bool:
        """Whether there was such memory; it is gone now."""
        return self._buffers.pop(address, None) is not None

    def tensors(self) -> list[tuple[str, Geometry]]:
        """Names and geometries of what is shown and still lives."""
        self._shown = {key: ref for key, ref in self._shown.items() if not ref.expired()}
        self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
        buffers = [
            (f"cudaMalloc({buffer.size})", Geometry(address, 8, (buffer.size,), (1,)))
            for address, buffer in self._buffers.items()
        ]
        return [*self._shown, *buffers]

    def allocations(self) -> list[Allocation]:
        return [place.allocation(name) for name, place in self.tensors()]


def _torch() -> Any:
    import torch

    return torch


def _aligned_bytes(nbytes: int) -> Any:
    """New memory, aligned as cudaMalloc's: uint8[nbytes]."""
    import numpy as np

    room = np.empty(nbytes + _ALIGNMENT_BYTES, np.uint8)
    skip = -room.ctypes.data % _ALIGNMENT_BYTES
    return room[skip : skip + nbytes]


def _aligned(tensor: Any) -> Any:
    """A copy in memory aligned as cudaMalloc's; a tensor that autograd computed stays where it is,
    for its history is its own."""
    torch = _torch()
    source = tensor.untyped_storage()
    if tensor.grad_fn is not None or type(tensor) is not torch.Tensor:
        return tensor
    storage = torch.from_numpy(_aligned_bytes(source.nbytes())).untyped_storage()
    storage.copy_(source)
    moved = torch.empty(0, dtype=tensor.dtype)
    moved.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return moved.requires_grad_(tensor.requires_grad)


def _is_cuda(device: Any) -> bool:
    torch = _torch()
    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def _mode(memory: DeviceMemory) -> Any:
    """The torch function mode that keeps `memory`: sees every torch call of this thread."""
    torch = _torch()
    from torch.overrides import TorchFunctionMode

    tensor = torch.Tensor

    def is_cpu(device: Any) -> bool:
        return device == "cpu" or (isinstance(device, torch.device) and device.type == "cpu")

    def dlpack(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not memory.owns(self):
            return tensor.__dlpack__(self, *args, **kwargs)
        memory.show(self)
        return present_as_cuda(tensor.__dlpack__(self.detach()))

    def data_ptr(self: Any) -> int:
        memory.show(self)
        return int(tensor.data_ptr(self))

    def copied(self: Any, to_cuda: bool, result: Any) -> Any:
        """`result` of a call that moves; a copy where the sides differ and torch made none."""
        same = result.untyped_storage()._cdata == self.untyped_storage()._cdata
        if same and memory.owns(self) != to_cuda:
            result = result.clone()
        return memory.take(result) if to_cuda else result

    answers: dict[Any, Callable[..., Any]] = {
        tensor.device.__get__: lambda self, *_: (
            torch.device("cuda", 0) if memory.owns(self) else tensor.device.__get__(self)
        ),
        tensor.is_cuda.__get__: lambda self, *_: memory.owns(self),
        tensor.is_cpu.__get__: lambda self, *_: not memory.owns(self),
        tensor.get_device: lambda self: 0 if memory.owns(self) else -1,
        tensor.data_ptr: data_ptr,
        tensor.__dlpack__: dlpack,
        tensor.__dlpack_device__: lambda self: (
            (DL_CUDA, 0) if memory.owns(self) else tensor.__dlpack_device__(self)
        ),
        tensor.cuda: lambda self, *_, **__: copied(self, True, self),
        tensor.cpu: lambda self, *_, **__: copied(self, False, self),
        tensor.pin_memory: lambda self, *_, **__: self,
        tensor.record_stream: lambda self, *_: None,
        torch.device: torch.device,  # that names a device, and uses none
    }
    moves = (tensor.to, tensor.type_as)

    class Device(TorchFunctionMode):  # type: ignore[misc,unused-ignore]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if func in answers:
                return answers[func](*args, **kwargs)
            named = [*args, kwargs.get("device")]
            to_cuda = any(_is_cuda(item) for item in named)
            to_cpu = any(is_cpu(item) for item in named)
            args = tuple("cpu" if _is_cuda(item) else item for item in args)
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if kwargs.get("pin_memory"):
                del kwargs["pin_memory"]
            result = func(*args, **kwargs)
            if func in moves and (to_cuda or to_cpu):
                return copied(args[0], to_cuda, result)
            given = _tensors(args) + _tensors(tuple(kwargs.values()))
            if to_cuda or (not to_cpu and any(memory.owns(item) for item in given)):
                return _map(result, memory.take)
            return result

    return Device()


def _tensors(value: Any, depth: int = 2) -> list[Any]:
    """Tensors in a value, tuples and lists inside it included."""
    if isinstance(value, _torch().Tensor):
        return [value]
    if depth and isinstance(value, (tuple, list)):
        return [found for item in value for found in _tensors(item, depth - 1)]
    return []


def _map(value: Any, move: Callable[[Any], Any]) -> Any:
    """A result with each of its tensors moved; only sequences that hold a moved one are new."""
    if isinstance(value, _torch().Tensor):
        return move(value)
    if not isinstance(value, (tuple, list)):
        return value
    items = [_map(item, move) for item in value]
    same = all(a is b for a, b in zip(items, value, strict=True))
    # A NamedTuple is made from its fields; others, torch.return_types too, from one iterable.
    return value if same else getattr(type(value), "_make", type(value))(items)


# --- torch.cuda ---------------------------------------------------------------------------------


class _Stream:
    """Every stream: work runs when it is issued, so that all orders hold."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event:
    """An event; the time between two is NaN, for the emulator knows no time."""

    cuda_event = 1  # a handle, and not none

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return float("nan")


class _Properties:
    """As much of torch.cuda.get_device_properties as a model knows."""

    def __init__(self, gpu: GpuModel) -> None:
        self.name = gpu.name
        self.major, self.minor = gpu.compute_capability
        self.multi_processor_count = gpu.sm_count
        self.shared_memory_per_block_optin = gpu.smem_per_cta_bytes
        self.shared_memory_per_multiprocessor = gpu.smem_per_sm_bytes
        self.max_threads_per_block = gpu.max_threads_per_cta
        self.warp_size = 32


def _cuda_functions(gpu: GpuModel) -> Mapping[str, Any]:
    """What `torch.cuda` offers while the modelled device is there."""
    stream = _Stream()
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda *_: nullcontext(),
        "get_device_capability": lambda *_: gpu.compute_capability,
        "get_device_name": lambda *_: gpu.name,
        "get_device_properties": lambda *_: _Properties(gpu),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
    }
    silent = "init _lazy_init set_device synchronize empty_cache manual_seed manual_seed_all"
    # Each a function of its own: torch._dynamo tells functions of torch apart by what they are.
    return answers | {name: _nothing() for name in silent.split()}


def _nothing() -> Callable[..., None]:
    return lambda *_, **__: None


# Modes that are on. torch turns a mode off while it runs a call that the mode saw; Python code that
# such a call runs, of operators and of gradients, sees the device all the same.
_modes: list[Any] = []


def _seen(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run with the device's mode on, if there is a device."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from torch.overrides import _get_current_function_mode_stack

        if not _modes or _modes[-1] in _get_current_function_mode_stack():
            return function(*args, **kwargs)
        with _modes[-1]:
            return function(*args, **kwargs)

    # torch reads an operator's types, which may be text that names the operator's own globals.
    run.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    return run


def _custom_op(real: Callable[..., Any]) -> Callable[..., Any]:
    """torch's custom_op, for which operators of CUDA tensors are those of CPU tensors."""

    def custom_op(name: str, fn: Any = None, /, *, device_types: Any = None, **kwargs: Any) -> Any:
        kinds = [device_types] if isinstance(device_types, str) else device_types
        if kinds is not None and "cuda" in kinds:
            device_types = tuple(dict.fromkeys([*kinds, "cpu"]))
        define = partial(real, name, device_types=device_types, **kwargs)
        return (lambda fn: define(_seen(fn))) if fn is None else define(_seen(fn))

    return custom_op


@contextmanager
def torch_cuda(gpu: GpuModel) -> Iterator[DeviceMemory]:
    """While the block runs, torch has the modelled CUDA device; in this thread for its tensors."""
    torch = _torch()
    from torch import library
    from torch.autograd.function import BackwardCFunction

    memory = DeviceMemory()
    mode = _mode(memory)
    changes = [(torch.cuda, name, value) for name, value in _cuda_functions(gpu).items()]
    changes.append((library, "custom_op", _custom_op(library.custom_op)))
    backward = _seen(BackwardCFunction.apply)

    def apply(node: Any, *gradients: Any) -> Any:
        # Autograd makes gradients in C++, unseen; those of a function written in Python are taken
        # for the device's.
        return backward(node, *(_map(item, memory.take) for item in gradients))

    changes.append((BackwardCFunction, "apply", apply))
    with ExitStack() as restore:
        for owner, name, value in changes:
            restore.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        _modes.append(mode)
        restore.callback(_modes.pop)
        restore.enter_context(mode)
        yield memory
