"""Record what a real GPU gives for the oracle's opcodes, for test_native_hardware.py.

    python -m tests.emulator.hardware.record_native make BUNDLE    where the project is
    python record_native.py run BUNDLE ANSWERS                     on a Hopper GPU
    python -m tests.emulator.hardware.record_native keep ANSWERS .../native_sm90.json

``make`` writes kernels of a few opcodes each and their operands (fixed seed), ``run`` has the
driver compile and execute them and needs nothing else, ``keep`` writes a hash of each opcode's
operands and results, and for the approximations the largest error in ulp. An opcode that the driver
refuses in a kernel of its own is recorded as refused (an empty hash).
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import re
import sys
from typing import Any

SEED, LANES, BATCH = 20261130, 512, 16
HEADER = ".version 9.0\n.target sm_90\n.address_size 64\n"


# sm_90 has these, and no GPU has been asked about them yet; who records again deletes the pattern.
WAITING = re.compile(
    r"cvt\..*satfinite.*\.b?f16(x2)?\.f32|cvt\.\w+(\.relu)?(\.satfinite)?\.tf32\.f32|"
    r"cvt\.rn\.bf16\.[us]8"
)


# --- where the project is ------------------------------------------------------------------------


def batches() -> list[dict[str, Any]]:
    """Kernels: ``specs`` (templates), ``table`` (rows of operands), ``inputs``, ``outputs``."""
    import random

    import numpy as np

    from tests.emulator import oracle
    from tests.emulator.samples import rows
    from tests.emulator.test_native_oracle import _DTYPES, _batches, find, width

    specs = [
        s
        for s in oracle.all_specs()
        if find(s.op) and not came_with_sm_100(s) and not WAITING.fullmatch(s.op)
    ]
    out = []
    for group in _batches(specs, BATCH):
        table = rows(group[0].src, LANES, random.Random(SEED), group[0].values)
        inputs = {
            f"s{k}": np.array([row[k] for row in table], _DTYPES[width(kind)])
            for k, kind in enumerate(group[0].src)
        }
        out.append({"specs": group, "table": table, "inputs": inputs})
    return out


def came_with_sm_100(spec: Any) -> bool:
    """Packed float32, three-input minima, float32 with 16-bit operands, bfloat16 to 8 bits, types
    of 6 and 4 bits, scale factors and fixed point, stochastic rounding, finite tf32."""
    return (
        "f32x2" in spec.src
        or (spec.op[:4] in ("min.", "max.") and spec.src == ("f32",) * 3)
        or re.fullmatch(r"(add|sub|fma)\..*f32\.b?f16", spec.op) is not None
        or re.fullmatch(r"cvt\..*e[45]m[32]x2\.bf16x2", spec.op) is not None
        or re.fullmatch(r"cvt\..*(e2m3|e3m2|e2m1|ue8m0|s2f6)x2.*", spec.op) is not None
        or re.fullmatch(r"cvt\.(rs|r[nz]\.satfinite(\.relu)?\.tf32).*", spec.op) is not None
    )


def name_of(spec: Any) -> str:
    """One spec's name among those of its opcode."""
    return f"{spec.op}|{spec.template}|{' '.join(spec.dst)}|{' '.join(spec.src)}"


def kernel(specs: list[Any], inputs: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """PTX text, and the bytes per thread of each output (d<spec>_<operand>)."""
    import numpy as np

    from tests.emulator.ptx_harness import HEADER as EMULATED
    from tests.emulator.ptx_harness import entry_text
    from tests.emulator.test_native_oracle import _DTYPES, _line, width

    outputs, body = {}, []
    for i, spec in enumerate(specs):
        dst = [f"%d{i}_{k}" for k in range(len(spec.dst))]
        outputs |= {d[1:]: _DTYPES[width(kind)] for d, kind in zip(dst, spec.dst, strict=True)}
        body.append(_line(spec, dst, [f"%s{k}" for k in range(len(spec.src))]))
    text = entry_text("\n".join(body), {n: a.dtype for n, a in inputs.items()}, outputs)
    sizes = {n: np.dtype(d).itemsize for n, d in outputs.items()}
    return text.replace(EMULATED, HEADER).replace("ld.param.b64", "ld.param.u64"), sizes


def make(path: str) -> None:
    work = []
    for batch in batches():
        inputs = {n: base64.b64encode(a.tobytes()).decode() for n, a in batch["inputs"].items()}
        whole = kernel(batch["specs"], batch["inputs"])
        alone = [kernel([s], batch["inputs"]) for s in batch["specs"]]
        names = [name_of(s) for s in batch["specs"]]
        work.append({"names": names, "inputs": inputs, "whole": whole, "alone": alone})
    with open(path, "w") as file:
        json.dump(work, file)


def rounded_freely(op: str) -> bool:
    """The approximations, whose last bits are the silicon's own."""
    return ".approx" in op or ".full" in op


class Digests:
    """One hash an opcode, over the operands and results of all its forms in order."""

    def __init__(self) -> None:
        self.hashes: dict[str, Any] = {}

    def add(self, op: str, inputs: dict[str, Any], outputs: list[bytes] | None) -> None:
        h = self.hashes.setdefault(op, hashlib.sha256())
        if h is None or outputs is None:
            self.hashes[op] = None
            return
        for data in [inputs[name].tobytes() for name in sorted(inputs)] + outputs:
            h.update(data)

    def to_dict(self) -> dict[str, str]:
        return {op: h.hexdigest()[:16] if h else "" for op, h in sorted(self.hashes.items())}


def largest_error(spec: Any, table: list[tuple[int, ...]], results: bytes) -> float:
    """In units of the last place of the true value, over results that are finite numbers."""
    import numpy as np

    from tests.emulator import oracle_float as fp
    from tests.emulator.test_native_oracle import _DTYPES, width

    kind = spec.dst[0]
    fmt = {"f16": fp.F16, "bf16": fp.BF16, "f32": fp.F32, "f64": fp.F64}[kind.removesuffix("x2")]
    worst = 0.0
    for row, got in zip(table, np.frombuffer(results, _DTYPES[width(kind)]), strict=True):
        expected, bits = spec.fn(*row), int(got)
        pairs = [(expected, bits)]
        if kind.endswith("x2"):
            halves = (expected.low, expected.high) if isinstance(expected, fp.NearPair) else ()
            pairs = list(zip(halves, (bits & 0xFFFF, bits >> 16), strict=False))
        worst = max([worst, *(_error(near, value, fmt) for near, value in pairs)])
    return worst


def _error(near: Any, got: int, fmt: Any) -> float:
    """Of one result, in units of the true value's last place; 0 where there is no such number."""
    from mpmath import mp

    from tests.emulator import oracle_float as fp

    a = fp.decode(got, fmt)
    if isinstance(near, int):  # rounded exactly, or a special value
        if fp.decode(near, fmt).kind != "finite":
            return 0.0
        near = fp.Near(fp.real(near, fmt), fmt=fmt)
    if a.kind != "finite" or (near.ftz and a.zero):
        return 0.0
    with mp.workprec(200):
        return float(abs(fp.real(got, fmt) - near.true) / near.unit)


def keep(answers: str, path: str) -> None:
    with open(answers) as file:
        got = json.load(file)
    exact, errors = Digests(), {}
    for batch in batches():
        for spec in batch["specs"]:
            data = got["results"][name_of(spec)]
            outputs = None if data is None else [base64.b64decode(d) for d in data]
            if not rounded_freely(spec.op):
                exact.add(spec.op, batch["inputs"], outputs)
            elif outputs is not None:
                worst = largest_error(spec, batch["table"], outputs[0])
                errors[spec.op] = float(f"{worst:.3g}")
    kept = {"gpu": got["gpu"], "driver": got["driver"], "seed": SEED, "lanes": LANES}
    with open(path, "w") as file:
        json.dump({**kept, "ulp": errors, "exact": exact.to_dict()}, file, indent=0)
        file.write("\n")


# --- where the GPU is ----------------------------------------------------------------------------


class Gpu:
    """The CUDA driver API, as far as loading and launching text needs it."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(64)
        self.call("cuDeviceGetName", name, 64, device)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.name, self.driver = name.value.decode(), version.value

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.cuda, name)(*args)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def run(self, text: str, inputs: dict[str, bytes], sizes: dict[str, int]) -> list[bytes]:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), text.encode() + b"\0")
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
        buffers = {n: (len(d), d) for n, d in inputs.items()}
        buffers |= {n: (LANES * size, b"") for n, size in sizes.items()}
        pointers = []
        for nbytes, data in buffers.values():
            pointer = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
            if data:
                self.call("cuMemcpyHtoD_v2", pointer, data, ctypes.c_size_t(nbytes))
            pointers.append(pointer)
        args = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(p) for p in pointers))
        self.call("cuLaunchKernel", function, 1, 1, 1, LANES, 1, 1, 0, None, args, None)
        self.call("cuCtxSynchronize")
        out = []
        for (name, (nbytes, _)), pointer in zip(buffers.items(), pointers, strict=True):
            if name in sizes:
                data = ctypes.create_string_buffer(nbytes)
                self.call("cuMemcpyDtoH_v2", data, pointer, ctypes.c_size_t(nbytes))
                out.append(data.raw)
            self.call("cuMemFree_v2", pointer)
        self.call("cuModuleUnload", module)
        return out


def run(bundle: str, path: str) -> None:
    gpu = Gpu()
    with open(bundle) as file:
        work = json.load(file)
    results: dict[str, Any] = {}
    for batch in work:
        inputs = {n: base64.b64decode(d) for n, d in batch["inputs"].items()}
        text, sizes = batch["whole"]
        try:
            per_output = dict(zip(sizes, gpu.run(text, inputs, sizes), strict=True))
            for i, name in enumerate(batch["names"]):
                mine = [d for n, d in per_output.items() if n.startswith(f"d{i}_")]
                results[name] = [base64.b64encode(d).decode() for d in mine]
        except RuntimeError:
            for name, (text, sizes) in zip(batch["names"], batch["alone"], strict=True):
                try:
                    data = gpu.run(text, inputs, sizes)
                    results[name] = [base64.b64encode(d).decode() for d in data]
                except RuntimeError as error:
                    print(f"refused: {name}: {error}")
                    results[name] = None
    with open(path, "w") as file:
        json.dump({"gpu": gpu.name, "driver": gpu.driver, "results": results}, file)


if __name__ == "__main__":
    {"make": make, "run": run, "keep": keep}[sys.argv[1]](*sys.argv[2:])
