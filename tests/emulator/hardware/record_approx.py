"""Record how far silicon's approximations are from the true value rounded once, exhaustively.

    python record_approx.py approx_sm90.json                       on a Hopper GPU, with numpy

For each function: how often (silicon - true value) is how many units of the last place, over all
2^23 significands of one binade, and over every exponent with 512 significands, both signs where the
function takes them; for ex2 and the roots also over all significands of other binades, where their
bits differ. And a hash of silicon's results, so that the emulator and another GPU can be held
against this one bit for bit.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEAD = ".version 8.6\n.target sm_90\n.address_size 64\n"
KERNEL = """.visible .entry k(.param .u64 in, .param .u64 out)
{{ .reg .b64 %a, %b; .reg .b32 %i, %n, %c; .reg .f32 %x;
ld.param.u64 %a, [in]; ld.param.u64 %b, [out];
mov.u32 %i, %tid.x; mov.u32 %n, %ntid.x; mov.u32 %c, %ctaid.x; mad.lo.u32 %i, %c, %n, %i;
mad.wide.u32 %a, %i, 4, %a; mad.wide.u32 %b, %i, 4, %b;
ld.global.f32 %x, [%a]; {op}.f32 %x, %x; st.global.f32 [%b], %x; ret; }}
"""
Function = Callable[[NDArray[np.float64]], NDArray[np.float64]]
FUNCTIONS: dict[str, Function] = {
    "ex2.approx.ftz": np.exp2,
    "lg2.approx.ftz": np.log2,
    "rcp.approx.ftz": lambda x: 1 / x,
    "rsqrt.approx.ftz": lambda x: 1 / np.sqrt(x),
    "sqrt.approx.ftz": np.sqrt,
    "tanh.approx": np.tanh,
}
_MIN_NORMAL = np.float32(2.0**-126)


def binade() -> NDArray[np.float32]:
    """All numbers from 1 to 2 without 2."""
    return (np.uint32(0x3F800000) | np.arange(1 << 23, dtype=np.uint32)).view(np.float32)


def exponents(op: str) -> NDArray[np.float32]:
    """512 significands, the same for each, at every exponent of normal numbers and both signs."""
    fractions = np.random.default_rng(20261130).integers(0, 1 << 23, 512, np.uint32)
    bits = (np.arange(1, 255, dtype=np.uint32)[:, None] << 23 | fractions).reshape(-1)
    if op.split(".")[0] in ("ex2", "rcp", "tanh"):
        bits = np.concatenate([bits, bits | np.uint32(1 << 31)])
    return bits.view(np.float32)


def inputs(op: str) -> dict[str, NDArray[np.float32]]:
    """What ``op`` is recorded for, by name."""
    out = {"binade": binade(), "exponents": exponents(op)}
    if op.startswith("ex2"):
        eighth = binade() / np.float32(8)  # more bits of a fraction than the unit takes
        return {**out, "negative": -binade(), "eighth": eighth, "negative eighth": -eighth}
    if "sqrt" in op:
        return {**out, "odd": binade() * np.float32(2)}  # of odd exponent
    return out


def rounded_once(op: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The true value as float32, subnormals flushed where the opcode says so."""
    with np.errstate(all="ignore"):
        true = FUNCTIONS[op](x.astype(np.float64)).astype(np.float32)
    if ".ftz" in op:
        true = np.where(np.abs(true) < _MIN_NORMAL, np.copysign(np.float32(0), true), true)
    return true


def distance(got: NDArray[np.float32], true: NDArray[np.float32]) -> dict[str, int]:
    """How often silicon is -2 to 2 units of the last place above the true value, how often it is
    farther ("beyond"), and the most ("most")."""
    ordered = [x.view(np.int32).astype(np.int64) for x in (got, true)]
    ordered = [np.where(x < 0, np.int64(-(1 << 31)) - x, x) for x in ordered]
    off = ordered[0] - ordered[1]
    near = {str(units): int(np.count_nonzero(off == units)) for units in range(-2, 3)}
    beyond = int(np.count_nonzero(np.abs(off) > 2))
    return {**near, "beyond": beyond, "most": int(np.abs(off).max())}


# --- where the GPU is ----------------------------------------------------------------------------


class Gpu:
    """The CUDA driver API, as far as one kernel over an array needs it."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name, version = ctypes.create_string_buffer(64), ctypes.c_int()
        self.call("cuDeviceGetName", name, 64, device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.name, self.driver = name.value.decode(), version.value

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.cuda, name)(*args)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def apply(self, op: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """The function of every element; their number is a multiple of 256."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        text = HEAD + KERNEL.format(op=op)
        self.call("cuModuleLoadData", ctypes.byref(module), text.encode() + b"\0")
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
        size, pointers = ctypes.c_size_t(x.nbytes), [ctypes.c_uint64(), ctypes.c_uint64()]
        for pointer in pointers:
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), size)
        self.call("cuMemcpyHtoD_v2", pointers[0], x.ctypes.data_as(ctypes.c_void_p), size)
        args = (ctypes.c_void_p * 2)(*(ctypes.addressof(p) for p in pointers))
        self.call("cuLaunchKernel", function, x.size // 256, 1, 1, 256, 1, 1, 0, None, args, None)
        out = np.empty_like(x)
        self.call("cuMemcpyDtoH_v2", out.ctypes.data_as(ctypes.c_void_p), pointers[1], size)
        for pointer in pointers:
            self.call("cuMemFree_v2", pointer)
        self.call("cuModuleUnload", module)
        return out


def measured(got: NDArray[np.float32], op: str, x: NDArray[np.float32]) -> dict[str, Any]:
    return {
        "ulp": distance(got, rounded_once(op, x)),
        "sha256": hashlib.sha256(got.tobytes()).hexdigest()[:16],
    }


def record(path: str) -> None:
    gpu = Gpu()
    out: dict[str, Any] = {"gpu": gpu.name, "driver": gpu.driver}
    for op in FUNCTIONS:
        out[op] = {name: measured(gpu.apply(op, x), op, x) for name, x in inputs(op).items()}
    with open(path, "w") as file:
        json.dump(out, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    record(sys.argv[1])
