"""The CUDA runtime as far as launching needs it, and the launch that it records.

A compiled host function of the CuTe DSL calls the CUDA runtime through symbols such as
`_cudaLaunchKernelEx`. `HostRuntime` gives each of them a Python body. What is not modelled raises.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.emulator.findings import EmulatorFault
from kernels.emulator.gpus import GpuModel
from kernels.emulator.tensormap import TensorMap
from kernels.emulator.tensors import Allocation

Dim3 = tuple[int, int, int]


class CaptureError(RuntimeError):
    """The host function failed, or compiled to something that launches cannot be caught from."""


class UnsupportedLaunch(NotImplementedError):
    """The host function asks the CUDA runtime for something that the emulator does not model."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the host code asked for it; parameters are copies.

    kernel: the PTX entry's name. grid, block, cluster: (x, y, z), cluster in CTAs.
    preferred_cluster: what the device may use in the place of `cluster`, when there is room; else
    None. smem_bytes: dynamic shared memory. stream: the host's handle (0: default stream).
    params: raw bytes of each kernel parameter, in order, each as long as the entry declares.
    allocations: the global memory that the host function's arguments name.
    """

    kernel: str
    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    preferred_cluster: Dim3 | None = field(default=None, kw_only=True)
    smem_bytes: int = 0
    stream: int = 0
    params: tuple[bytes, ...] = field(default=(), repr=False)
    cooperative: bool = False
    programmatic_stream_serialization: bool = False
    allocations: tuple[Allocation, ...] = field(default=(), repr=False)


# --- PTX entries --------------------------------------------------------------------------------

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)", re.DOTALL)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.[busf](?P<bits>\d+)\s+"
    r"(?:\.ptr\s+(?:\.(?:const|global|local|shared)\s+)?(?:\.align\s+\d+\s+)?)?"
    r"[\w$]+\s*(?:\[(?P<count>\d+)\])?"
)


def entry_parameter_bytes(ptx: str) -> dict[str, tuple[int, ...]]:
    """Size in bytes of every parameter of every `.entry` of a PTX module, by entry name."""
    entries: dict[str, tuple[int, ...]] = {}
    for name, declarations in _ENTRY.findall(ptx):
        sizes = []
        for declaration in filter(None, (part.strip() for part in declarations.split(","))):
            match = _PARAM.fullmatch(declaration)
            if match is None:
                raise CaptureError(f"entry {name}: cannot read the parameter {declaration!r}")
            sizes.append(int(match["bits"]) // 8 * int(match["count"] or 1))
        entries[name] = tuple(sizes)
    return entries


# --- The CUDA runtime, as far as a launch needs it ----------------------------------------------

_CUDA_ERROR_UNKNOWN = 999  # cudaErrorUnknown, driver_types.h
_ERROR_NAME = ctypes.create_string_buffer(b"cudaErrorUnknown")


class _LaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t, driver_types.h."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class _LaunchAttribute(ctypes.Structure):
    """cudaLaunchAttribute, driver_types.h: an id and a 64-byte union."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("words", ctypes.c_int * 16),
    ]


# cudaLaunchAttributeID, driver_types.h. The ids in _HINTS change how fast or when a launch runs,
# never what it computes.
_ATTRIBUTE_IGNORE = 0
_ATTRIBUTE_COOPERATIVE = 2
_ATTRIBUTE_CLUSTER_DIMENSION = 4
_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION = 11
_HINTS = {
    1: "accessPolicyWindow",
    3: "synchronizationPolicy",
    5: "clusterSchedulingPolicyPreference",
    7: "programmaticEvent",
    8: "priority",
    9: "memSyncDomainMap",
    10: "memSyncDomain",
    12: "launchCompletionEvent",
    14: "preferredSharedMemoryCarveout",
}


def decode_attributes(attributes: Sequence[tuple[int, Sequence[int]]]) -> dict[str, Any]:
    """Turn (cudaLaunchAttributeID, union as 32-bit words) pairs into `Launch` fields.

    Raises UnsupportedLaunch for an id that is not modelled.
    """
    fields: dict[str, Any] = {}
    for number, words in attributes:
        if number == _ATTRIBUTE_IGNORE or number in _HINTS:
            continue
        if number == _ATTRIBUTE_COOPERATIVE:
            fields["cooperative"] = bool(words[0])
        elif number == _ATTRIBUTE_CLUSTER_DIMENSION:
            fields["cluster"] = (words[0], words[1], words[2])
        elif number == _ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
            fields["programmatic_stream_serialization"] = bool(words[0])
        elif number == _ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
            fields["preferred_cluster"] = (words[0], words[1], words[2])
        else:
            raise UnsupportedLaunch(
                f"launch attribute {number} (cudaLaunchAttributeID) is not modelled; modelled are "
                "2 cooperative, 4 clusterDimension, 6 programmaticStreamSerialization, 11 "
                "preferredClusterDimension, and those that change no result"
            )
    return fields


# cudaDeviceAttr, driver_types.h: what host code may ask about the device.
def device_attributes(gpu: GpuModel) -> dict[int, int]:
    return {
        1: gpu.max_threads_per_cta,  # cudaDevAttrMaxThreadsPerBlock
        8: 48 * 1024,  # cudaDevAttrMaxSharedMemoryPerBlock, without opt-in
        10: 32,  # cudaDevAttrWarpSize
        16: gpu.sm_count,  # cudaDevAttrMultiProcessorCount
        75: gpu.compute_capability[0],  # cudaDevAttrComputeCapabilityMajor
        76: gpu.compute_capability[1],  # cudaDevAttrComputeCapabilityMinor
        81: gpu.smem_per_sm_bytes,  # cudaDevAttrMaxSharedMemoryPerMultiprocessor
        97: gpu.smem_per_cta_bytes,  # cudaDevAttrMaxSharedMemoryPerBlockOptin
    }


# CUtensorMapDataType and CUtensorMapSwizzle, cuda.h, in the words of `TensorMap`: (element type,
# rounded to tf32), and (bytes, bytes of an atom).
_MAP_TYPES = (
    *((name, False) for name in ("uint8", "uint16", "uint32", "int32", "uint64", "int64")),
    *((name, False) for name in ("float16", "float32", "float64", "bfloat16", "float32_ftz")),
    ("float32", True),
    ("float32_ftz", True),
    *((name, False) for name in ("4x16", "4x16_p64", "6x16_p32")),
)
_MAP_SWIZZLES = {0: (0, 16), 1: (32, 16), 2: (64, 16), 3: (128, 16), 4: (128, 32), 6: (128, 64)}
_MAP_L2_PROMOTION = (0, 64, 128, 256)


def encode_tensor_map(
    dtype: int,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
    modes: tuple[int, int, int, int],
) -> bytes:
    """What cuTensorMapEncodeTiled makes of its arguments; `modes` are interleave, swizzle, L2
    promotion and out-of-bounds fill, in the driver's codes, `strides` in bytes, from dimension 1.

    Raises ValueError for what the driver refuses, UnsupportedLaunch for what is not modelled.
    """
    interleave, swizzle, promotion, fill = modes
    if not 0 <= dtype < len(_MAP_TYPES) or not 0 <= promotion < 4 or not 0 <= fill < 2:
        raise ValueError(f"cuTensorMapEncodeTiled: data type {dtype}, modes {modes}: no such code")
    if interleave != 0 or swizzle not in _MAP_SWIZZLES:
        raise UnsupportedLaunch(
            f"cuTensorMapEncodeTiled: interleave {interleave}, swizzle {swizzle} is not modelled"
        )
    name, tf32 = _MAP_TYPES[dtype]
    width, atom = _MAP_SWIZZLES[swizzle]
    tensor_map = TensorMap(
        address,
        name,
        tuple(dims),
        tuple(strides),
        tuple(box),
        tuple(element_strides),
        swizzle_bytes=width,
        swizzle_atom_bytes=atom,
        nan_fill=bool(fill),
        tf32_rounding=tf32,
        l2_promotion_bytes=_MAP_L2_PROMOTION[promotion],
    )
    if any(not 1 <= n <= 1 << 32 for n in dims) or any(not 1 <= n <= 256 for n in box):
        raise ValueError(f"cuTensorMapEncodeTiled: sizes {dims} in boxes of {box}")
    try:
        tensor_map.check()
    except EmulatorFault as fault:
        raise ValueError(f"cuTensorMapEncodeTiled: {fault.message}") from None
    return tensor_map.encode()


_PTR = ctypes.c_void_p
_I32 = ctypes.c_int
_I64 = ctypes.c_int64


class HostRuntime:
    """Stand-in for the CUDA runtime functions that one compiled host function calls.

    Every method is called from C. An exception cannot cross a C frame: it is kept in `error`, the
    call returns an error code, and the host function returns early with it.
    """

    SIGNATURES: dict[str, tuple[Any, ...]] = {
        "_cudaLibraryLoadData": (_PTR, _PTR, _PTR, _PTR, _I32, _PTR, _PTR, _I32),
        "_cudaLibraryGetKernel": (_PTR, _PTR, _PTR),
        "_cudaGetDevice": (_PTR,),
        "_cudaDeviceGetAttribute": (_PTR, _I32, _I32),
        "_cuKernelGetAttribute": (_PTR, _I32, _PTR, _I32),
        "_cudaFuncSetAttribute": (_PTR, _I32, _I32),
        "_cudaKernelSetAttributeForDevice": (_PTR, _I32, _I32, _I32),
        "_cudaLaunchKernelEx": (_PTR, _PTR, _PTR),
        "_cudaLaunchKernel": (_PTR, *(_I32,) * 6, _PTR, _I64, _PTR),
        "_cudaStreamSynchronize": (_PTR,),
        "_cudaDeviceSynchronize": (),
        "_cudaGetLastError": (),
        "_cuTensorMapEncodeTiled": (_PTR, _I32, _I32, *(_PTR,) * 5, *(_I32,) * 4),
        "_cudaSetDevice": (_I32,),
        "cuda_dialect_assert_success": (_I32,),
        "cuda_dialect_print_on_error": (_I32,),
        "cuda_dialect_init_library_once": (_PTR, _PTR, _PTR, _PTR),
    }
    # Called from C where Python may not be (an engine's destructors), or with another result type.
    NATIVE: dict[str, Any] = {
        "cuda_dialect_unload_library_once": ctypes.pythonapi.Py_IsInitialized,
        # The error that stands behind it is in `error`, and is raised in its place.
        "CuteDSLRT_TVMFFISetRaisedCudaError": ctypes.pythonapi.Py_IsInitialized,
        "cuda_dialect_get_error_name": ctypes.CFUNCTYPE(_PTR, _I32)(
            lambda _code: ctypes.addressof(_ERROR_NAME)
        ),
    }

    def __init__(self, gpu: GpuModel, parameter_bytes: dict[str, tuple[int, ...]]) -> None:
        self._attributes = device_attributes(gpu)
        self._parameter_bytes = parameter_bytes
        self._kernels: list[str] = []
        self.launches: list[Launch] = []
        self.error: BaseException | None = None

    def bind(self, engine: Any, undefined: Sequence[str]) -> list[Any]:
        """Give every undefined runtime symbol a body; returns the callbacks, to be kept alive."""
        callbacks = []
        for symbol in undefined:
            if symbol in self.NATIVE:
                native = ctypes.cast(self.NATIVE[symbol], ctypes.c_void_p)
                engine.raw_register_runtime(symbol, native)
                continue
            types = self.SIGNATURES.get(symbol, ())
            body = getattr(self, symbol.lstrip("_"), None) if symbol in self.SIGNATURES else None
            callback = ctypes.CFUNCTYPE(_I32, *types)(self._guarded(symbol, body))
            engine.raw_register_runtime(symbol, ctypes.cast(callback, ctypes.c_void_p))
            callbacks.append(callback)
        return callbacks

    def _guarded(self, symbol: str, body: Callable[..., None] | None) -> Callable[..., int]:
        def call(*args: Any) -> int:
            try:
                if body is None:
                    raise UnsupportedLaunch(
                        f"the host function calls {symbol.lstrip('_')}, which is not modelled; "
                        "modelled are kernel launches, not allocation, copies, graphs or events"
                    )
                body(*args)
            except BaseException as error:
                if self.error is None:
                    self.error = error
                return _CUDA_ERROR_UNKNOWN
            return 0

        return call

    def cudaLibraryLoadData(self, library: int, *_: Any) -> None:
        _PTR.from_address(library).value = 1  # any handle but null

    def cudaLibraryGetKernel(self, handle: int, _library: int, name: int) -> None:
        kernel = ctypes.string_at(name).decode()
        if kernel not in self._parameter_bytes:
            raise CaptureError(f"the host function asks for {kernel}, which is not in the PTX")
        self._kernels.append(kernel)
        _PTR.from_address(handle).value = len(self._kernels)  # handle n is the n-th name asked for

    def cuda_dialect_init_library_once(self, state: int, *_: Any) -> None:
        _I64.from_address(state).value = 1  # the kernels were asked for when the module was loaded

    def cuda_dialect_assert_success(self, status: int) -> None:
        if status != 0 and self.error is None:  # else the error that it tells of is kept already
            raise CaptureError(f"the host function found CUDA error {status}")

    cuda_dialect_print_on_error = cuda_dialect_assert_success

    def cudaSetDevice(self, device: int) -> None:
        if device != 0:
            raise UnsupportedLaunch(f"device {device}: the emulator has one device, 0")

    def cudaGetDevice(self, device: int) -> None:
        _I32.from_address(device).value = 0

    def cudaDeviceGetAttribute(self, value: int, attribute: int, _device: int) -> None:
        if attribute not in self._attributes:
            raise UnsupportedLaunch(
                f"device attribute {attribute} (cudaDeviceAttr) is not modelled"
            )
        _I32.from_address(value).value = self._attributes[attribute]

    def cuKernelGetAttribute(self, value: int, attribute: int, _kernel: int, _device: int) -> None:
        # Host code subtracts static shared memory (CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, 1) from
        # the dynamic memory it lets the kernel have; the limit is checked again at the launch.
        if attribute != 1:
            raise UnsupportedLaunch(f"kernel attribute {attribute} (CUfunction_attribute)")
        _I32.from_address(value).value = 0

    def cudaFuncSetAttribute(self, _kernel: int, attribute: int, _value: int) -> None:
        # cudaFuncAttribute: 8 max dynamic shared memory, 9 carveout, 14 non-portable cluster size.
        if attribute not in (8, 9, 14):
            raise UnsupportedLaunch(f"function attribute {attribute} (cudaFuncAttribute)")

    def cudaKernelSetAttributeForDevice(
        self, kernel: int, attribute: int, value: int, _device: int
    ) -> None:
        self.cudaFuncSetAttribute(kernel, attribute, value)

    def cudaStreamSynchronize(self, _stream: int) -> None:
        raise UnsupportedLaunch(
            "the host function waits for the GPU; the emulator runs the launches after the host "
            "function has returned"
        )

    def cudaDeviceSynchronize(self) -> None:
        self.cudaStreamSynchronize(0)

    def cuTensorMapEncodeTiled(
        self,
        out: int,
        dtype: int,
        rank: int,
        address: int | None,
        dims: int,
        strides: int,
        box: int,
        element_strides: int,
        *modes: int,
    ) -> None:
        if not 1 <= rank <= 5:
            raise ValueError(f"cuTensorMapEncodeTiled: rank {rank} is not one of 1 to 5")

        def array(kind: Any, at: int, count: int) -> list[int]:
            return list((kind * count).from_address(at)) if count else []

        interleave, swizzle, promotion, fill = modes
        raw = encode_tensor_map(
            dtype,
            address or 0,
            array(ctypes.c_uint64, dims, rank),
            array(ctypes.c_uint64, strides, rank - 1),
            array(ctypes.c_uint32, box, rank),
            array(ctypes.c_uint32, element_strides, rank),
            (interleave, swizzle, promotion, fill),
        )
        ctypes.memmove(out, raw, len(raw))

    def cudaGetLastError(self) -> None:
        return

    def cudaLaunchKernelEx(self, config: int, kernel: int, params: int) -> None:
        cfg = _LaunchConfig.from_address(config)
        raw = (_LaunchAttribute * cfg.num_attributes).from_address(cfg.attributes or 0)
        self._record(
            kernel,
            tuple(cfg.grid),
            tuple(cfg.block),
            params,
            cfg.smem_bytes,
            cfg.stream,
            decode_attributes([(item.id, list(item.words)) for item in raw]),
        )

    def cudaLaunchKernel(
        self,
        kernel: int,
        gx: int,
        gy: int,
        gz: int,
        bx: int,
        by: int,
        bz: int,
        params: int,
        smem_bytes: int,
        stream: int | None,
    ) -> None:
        self._record(kernel, (gx, gy, gz), (bx, by, bz), params, smem_bytes, stream, {})

    def _record(
        self,
        kernel: int,
        grid: Dim3,
        block: Dim3,
        params: int,
        smem_bytes: int,
        stream: int | None,
        attributes: dict[str, Any],
    ) -> None:
        if not 1 <= kernel <= len(self._kernels):
            raise CaptureError(f"launch of an unknown kernel handle {kernel}")
        name = self._kernels[kernel - 1]
        sizes = self._parameter_bytes[name]
        pointers = (_PTR * len(sizes)).from_address(params) if sizes else ()
        values = tuple(
            ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)
        )
        launch = Launch(
            name,
            grid,
            block,
            smem_bytes=int(smem_bytes),
            stream=int(stream or 0),
            params=values,
            **attributes,
        )
        self.launches.append(launch)
