"""CPU tensors standing where CUDA tensors would: what the DSL sees, and what memory they name."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .findings import EmulatorFault, UnsupportedPTX
from .tensormap import TENSOR_MAP_BYTES, TensorMap


@dataclass(frozen=True)
class Allocation:
    """A range of host memory that kernels may touch: base address, bytes, argument name."""

    base: int
    nbytes: int
    name: str

    @property
    def end(self) -> int:
        return self.base + self.nbytes


def merge_allocations(allocations: Iterable[Allocation]) -> tuple[Allocation, ...]:
    """Join ranges that overlap (views of one buffer), names joined by "|"; sorted by address."""
    merged: list[Allocation] = []
    for item in sorted(allocations, key=lambda a: (a.base, a.end)):
        if item.nbytes == 0:
            continue
        if merged and item.base < merged[-1].end:
            last = merged.pop()
            names = dict.fromkeys([*last.name.split("|"), item.name])
            end = max(last.end, item.end)
            merged.append(Allocation(last.base, end - last.base, "|".join(names)))
        else:
            merged.append(item)
    return tuple(merged)


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h (the first member of DLManagedTensor)."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DL_CPU, DL_CUDA = 1, 2  # DLDeviceType

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class CudaView:
    """A DLPack producer that presents a CPU tensor's memory as CUDA device 0's.

    The DSL then types its pointers as global memory, and the PTX is the one a CUDA tensor gives.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return DL_CUDA, 0

    def __dlpack__(self, stream: int | None = None) -> Any:
        return present_as_cuda(self._tensor.__dlpack__())


def present_as_cuda(capsule: Any) -> Any:
    """The DLPack capsule, its memory said to be CUDA device 0's from now on."""
    tensor = _dltensor(capsule)
    tensor.device_type, tensor.device_id = DL_CUDA, 0
    return capsule


def _dltensor(capsule: Any) -> _DLTensor:
    return _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))


@dataclass(frozen=True)
class Geometry:
    """Address, element bits, sizes and strides (in elements) of a tensor."""

    base: int
    bits: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def allocation(self, name: str) -> Allocation:
        """The range from the lowest element to the end of the highest one."""
        if 0 in self.shape:
            return Allocation(self.base, 0, name)
        reach = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        low = sum(step for step in reach if step < 0)
        high = sum(step for step in reach if step > 0)
        nbytes = -(-(high - low + 1) * self.bits // 8)
        return Allocation(self.base + low * self.bits // 8, nbytes, name)

    def leading_dim(self) -> int | None:
        """The stride-1 dimension: the last if it is one, else one with more than one element."""
        ones = [dim for dim, stride in enumerate(self.strides) if stride == 1]
        if not ones:
            return None
        if ones[-1] == len(self.strides) - 1:
            return ones[-1]
        return next((dim for dim in reversed(ones) if self.shape[dim] > 1), ones[-1])


def check_tensor_maps(parameters: Iterable[bytes], tensors: Sequence[tuple[str, Geometry]]) -> None:
    """Raise ValueError for an argument that a tensor map cannot describe.

    A map keeps its strides as multiples of 16 bytes (cuTensorMapEncodeTiled); the DSL's inline
    encoder drops what is left, and the kernel would copy wrong bytes without a complaint.
    parameters: of the launched kernel. tensors: names and geometries of the host's arguments.
    """
    for raw in parameters:
        if len(raw) != TENSOR_MAP_BYTES:
            continue
        try:
            tensor_map = TensorMap.decode(raw)
        except (EmulatorFault, UnsupportedPTX):
            continue  # not a map, or one whose use is a finding of its own
        for name, place in tensors:
            same_element = tensor_map.element_bits == place.bits
            if place.base & ~15 == tensor_map.address and same_element:
                _check_describable(name, place, tensor_map)


def _check_describable(name: str, place: Geometry, tensor_map: TensorMap) -> None:
    """Raise ValueError unless the map at the tensor's address can be a map of the tensor."""
    if place.base % 16:
        raise ValueError(
            f"{name}: its data begins at {place.base:#x}, and the kernel makes a tensor map of it,"
            " which needs a multiple of 16 bytes; copy the tensor, or slice it elsewhere"
        )
    moving = [(d, s) for d, s in enumerate(place.strides) if place.shape[d] > 1]
    for dim, stride in moving:
        nbytes = stride * place.bits // 8
        if nbytes % 16 and stride != 1 and nbytes & ~15 in tensor_map.strides_bytes:
            raise ValueError(
                f"{name}: dimension {dim} has a stride of {nbytes} bytes, and the"
                " kernel makes a tensor map of it, whose strides are multiples of 16"
                " bytes; pad the rows, or copy the tensor to one with padded rows"
            )
    strides = [stride for _, stride in moving]
    outer = zip(tensor_map.strides_bytes, tensor_map.dims[1:], strict=True)
    asked = [nbytes for nbytes, size in outer if size > 1]
    lost = 0 in asked and 0 not in strides  # a contiguous dimension where the map has an outer one
    if strides and (1 not in strides or lost):
        raise ValueError(
            f"{name}: strides {place.strides} of shape {place.shape}, and the kernel makes a tensor"
            " map of it whose innermost dimension is another than the contiguous one; call"
            " .contiguous() on the tensor"
        )


def geometry(tensor: Any) -> Geometry:
    capsule = tensor.__dlpack__()
    dl = _dltensor(capsule)
    shape = tuple(dl.shape[dim] for dim in range(dl.ndim))
    if dl.strides:
        strides = tuple(dl.strides[dim] for dim in range(dl.ndim))
    else:  # compact, row-major
        strides, step = (), 1
        for size in reversed(shape):
            strides, step = (step, *strides), step * size
    base = (dl.data or 0) + dl.byte_offset
    return Geometry(base, dl.type_bits * dl.type_lanes, shape, strides)
