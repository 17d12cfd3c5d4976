"""Record what a real GPU makes of the launches that the tests of instructions do.

    python -m tests.emulator.hardware.record_isa make BUNDLE       where the project is
    python record_isa.py run BUNDLE ANSWERS                        on a Hopper GPU
    python -m tests.emulator.hardware.record_isa keep ANSWERS .../isa_sm90.json

``make`` runs the tests below once and keeps every launch without a finding that sm_90 can run, and
our CUDA kernels, with memory before and after; ``run`` has the driver compile and execute them and
needs nothing else; ``keep`` writes a hash of the memory after each, from then on
`cluster_harness.launch` compares, and the results themselves of launches that only measure a
distance. Launches that differ are listed by ``run``, their names kept as "open": only those may
that the ISA leaves open (old values of lanes whose atomics collide, approximations, tensor core
sums).
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import re
import sys
import zlib
from typing import Any

TESTS = (
    "test_isa_matrix.py", "test_isa_atomics.py", "test_isa_cp_async.py", "test_isa_cluster.py",
    "test_isa_bulk.py", "test_wgmma.py", "test_mma_kinds.py",
)  # fmt: skip
MEASURED = "// measured"  # in the text of launches whose results are kept, not compared
NOT_SM90 = ("tcgen05", "clusterlaunchcontrol", "cta_group")


def make(path: str) -> None:
    """The tests' clean launches. Late visibility and other schedules give the same launches."""
    import pytest

    from tests.emulator import cluster_harness, cuda_kernels

    cluster_harness.recording = []
    code = pytest.main(["-q", "-p", "no:cacheprovider", *(f"tests/emulator/{t}" for t in TESTS)])
    if code:
        raise SystemExit(f"the tests must pass first ({code})")
    cluster_harness.recording += [cuda_kernels.item(c) for c in cuda_kernels.CASES if c.on_sm90]
    unique = {item["name"]: item for item in cluster_harness.recording}
    kept = [i for i in unique.values() if not any(word in i["text"] for word in NOT_SM90)]
    with open(path, "w") as file:
        json.dump(kept, file)
    print(f"{len(kept)} launches")


def keep(answers: str, path: str) -> None:
    with open(answers) as file:
        got = json.load(file)
    with open(path, "w") as file:
        json.dump(
            {
                **{k: got[k] for k in ("gpu", "driver", "launches", "measured")},
                "open": sorted(item["name"] for item in got["differ"]),
            },
            file,
            indent=0,
            sort_keys=True,
        )
        file.write("\n")


# --- where the GPU is ----------------------------------------------------------------------------


class Gpu:
    """The CUDA driver API, as far as loading and launching text needs it."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        name, version = ctypes.create_string_buffer(64), ctypes.c_int()
        self.call("cuDeviceGetName", name, 64, self.device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.name, self.driver = name.value.decode(), version.value
        self.open()

    def open(self) -> None:
        self.context = ctypes.c_void_p()
        self.call("cuCtxCreate_v2", ctypes.byref(self.context), 0, self.device)

    def reopen(self) -> None:
        """After a fault the context is of no more use."""
        self.cuda.cuCtxDestroy_v2(self.context)
        self.open()

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.cuda, name)(*args)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def load(self, text: str, entry: str) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        log = ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), ctypes.c_void_p(8192))
        image = text.encode() + b"\0"
        code = self.cuda.cuModuleLoadDataEx(ctypes.byref(module), image, 2, options, values)
        if code:
            raise RuntimeError(f"load: CUDA error {code}: {log.value.decode()[:400]}")
        self.call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        return module, function

    def run(self, item: dict[str, Any]) -> list[bytes]:
        """Memory after the launch, array by array."""
        module, function = self.load(native_text(item), item.get("entry", "k"))
        buffers, pointers = [bytes.fromhex(a) for a in item["arrays"]], []
        for data in buffers:
            pointer = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(len(data)))
            self.call("cuMemcpyHtoD_v2", pointer, data, ctypes.c_size_t(len(data)))
            pointers.append(pointer)
        params = []
        for value in item["params"]:
            if value[0] == "array":
                params.append(pointers[value[1]])
            elif value[0] == "map":
                raw = bytearray(bytes.fromhex(value[2]))
                raw[:8] = pointers[value[1]].value.to_bytes(8, "little")
                params.append(aligned(bytes(raw)))
            else:
                params.append(aligned(bytes.fromhex(value[1])))
        args = (ctypes.c_void_p * len(params))(*(ctypes.addressof(p) for p in params))
        grid = item["grid"]
        self.call(
            "cuLaunchKernel", function, *grid, item["threads"], 1, 1, item["smem_bytes"], None,
            args if params else None, None,
        )  # fmt: skip
        self.call("cuCtxSynchronize")
        after = []
        for data, pointer in zip(buffers, pointers, strict=True):
            out = ctypes.create_string_buffer(len(data))
            self.call("cuMemcpyDtoH_v2", out, pointer, ctypes.c_size_t(len(data)))
            after.append(out.raw)
            self.call("cuMemFree_v2", pointer)
        self.call("cuModuleUnload", module)
        return after


def aligned(data: bytes) -> Any:
    """The bytes at an address that is a multiple of 64, as tensor maps want it."""
    raw = (ctypes.c_char * (len(data) + 64))()
    skew = -ctypes.addressof(raw) % 64
    made = (ctypes.c_char * len(data)).from_buffer(raw, skew)
    made[:] = data
    return made


def native_text(item: dict[str, Any]) -> str:
    """The module for sm_90a, its cluster's size part of the entry."""
    text = re.sub(r"\.version [\d.]+", ".version 8.6", item["text"], count=1)
    text = re.sub(r"\.target \w+", ".target sm_90a", text, count=1)
    if item["cluster"] > 1:
        head = f").explicitcluster .reqnctapercluster {item['cluster']}\n{{"
        text = text.replace(")\n{", head, 1)
    return text


def run(bundle: str, path: str) -> None:
    gpu = Gpu()
    with open(bundle) as file:
        work = json.load(file)
    launches, measured, differ = {}, {}, []
    for item in work:
        try:
            after = gpu.run(item)
        except RuntimeError as error:
            print(f"refused: {item['name']}: {error}", flush=True)
            gpu.reopen()
            continue
        if MEASURED in item["text"]:
            measured[item["name"]] = base64.b64encode(zlib.compress(after[-1])).decode()
        elif [a.hex() for a in after] != item["emulated"]:
            differ.append({"name": item["name"], "hardware": [a.hex() for a in after]})
            print(f"differs: {item['name']}", flush=True)
        else:
            launches[item["name"]] = hashlib.sha256(b"".join(after)).hexdigest()[:16]
    print(f"{len(launches)} of {len(work)} launches equal")
    with open(path, "w") as file:
        kept = {"gpu": gpu.name, "driver": gpu.driver, "launches": launches, "measured": measured}
        json.dump({**kept, "differ": differ}, file)


if __name__ == "__main__":
    {"make": make, "run": run, "keep": keep}[sys.argv[1]](*sys.argv[2:])
