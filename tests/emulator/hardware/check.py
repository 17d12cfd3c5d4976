"""The same tests on a real GPU and on the emulator: `make test-hw`.

    python -m tests.emulator.hardware.check            all of it, on a machine with a Hopper GPU
    python -m tests.emulator.hardware.check prepare FOLDER      its parts, where the GPU's machine
    python -m tests.emulator.hardware.check run FOLDER          has no more than Python and numpy:
    python -m tests.emulator.hardware.check compare FOLDER      only ``run`` needs the GPU

``prepare`` has the emulator execute what is recorded, ``run`` has the GPU execute it, ``compare``
holds the GPU's answers against the committed recordings, and then runs the tests that read those
with the fresh ones in their place: so the emulator is held against this very GPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = (
    "test_isa_hardware.py", "test_native_hardware.py", "test_tma_hardware.py", "test_tensormap.py",
    "test_approximations.py", "test_cuda.py", "test_isa_matrix.py", "test_isa_atomics.py",
    "test_isa_cp_async.py", "test_isa_cluster.py", "test_isa_bulk.py", "test_wgmma.py",
    "test_mma_kinds.py",
)  # fmt: skip
HOPPER = (9, 0)


def gpu_or_why() -> tuple[str, str]:
    """(name of the Hopper GPU here, "") or ("", why there is none)."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "", "this machine has no NVIDIA driver"
    device, name, major = ctypes.c_int(), ctypes.create_string_buffer(64), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return "", "the NVIDIA driver sees no GPU"
    cuda.cuDeviceGetName(name, 64, device)
    minor = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    if (major.value, minor.value) != HOPPER:
        capability = f"{major.value}.{minor.value}"
        return "", f"{name.value.decode()} is of compute capability {capability}, not of 9.0"
    return name.value.decode(), ""


def prepare(folder: Path) -> None:
    from . import record_isa, record_native

    record_isa.make(str(folder / "isa.bundle"))
    record_native.make(str(folder / "native.bundle"))


def run(folder: Path) -> None:
    """Imports nothing of the project: the files beside this one suffice."""
    sys.path.insert(0, str(Path(__file__).parent))
    import record_approx
    import record_isa
    import record_native
    import record_tma

    record_isa.run(str(folder / "isa.bundle"), str(folder / "isa.answers"))
    record_native.run(str(folder / "native.bundle"), str(folder / "native.answers"))
    record_tma.record(str(folder / "tma_sm90.json"))
    record_approx.record(str(folder / "approx_sm90.json"))


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Every leaf of a recording, by its path; who recorded it is no part of what was."""
    if isinstance(value, dict):
        pairs = [(f"{name}/{k}", v) for k, v in value.items() if k not in ("gpu", "driver")]
    elif isinstance(value, list):
        pairs = [(f"{name}/{k}", v) for k, v in enumerate(value)]
    else:
        return {name: value}
    return {path: leaf for key, item in pairs for path, leaf in flat(item, key).items()}


def differences(fresh: Any, committed: Any) -> list[str]:
    """What both recordings have and disagree on."""
    ours, theirs = flat(fresh), flat(committed)
    return sorted(path for path in ours.keys() & theirs.keys() if ours[path] != theirs[path])


def compare(folder: Path) -> int:
    from . import goldens, record_isa, record_native

    record_isa.keep(str(folder / "isa.answers"), str(folder / "isa_sm90.json"))
    record_native.keep(str(folder / "native.answers"), str(folder / "native_sm90.json"))
    wrong = 0
    for name in goldens.NAMES:
        fresh = json.loads((folder / name).read_text())
        committed = json.loads((goldens.COMMITTED / name).read_text())
        found = differences(fresh, committed)
        count = len(flat(fresh).keys() & flat(committed).keys())
        print(f"{name}: {count - len(found)} of {count} facts as {committed['gpu']} gave them")
        print("".join(f"    differs: {path}\n" for path in found[:20]), end="")
        wrong += len(found)
    tests = [f"tests/emulator/{name}" for name in TESTS]
    environment = {**os.environ, "FA4_HARDWARE_RECORD": str(folder)}
    tested = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], env=environment)
    return 1 if wrong or tested.returncode else 0


def main(argv: list[str]) -> int:
    part = argv[0] if argv else ""
    if part in ("", "run"):
        gpu, why = gpu_or_why()
        if not gpu:
            print(f"test-hw: skipped, nothing was compared: {why}.")
            return 0
        print(f"test-hw: on {gpu}")
    if part:
        folder = Path(argv[1])
        folder.mkdir(parents=True, exist_ok=True)
        return {"prepare": prepare, "run": run, "compare": compare}[part](folder) or 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        run(folder)
        return compare(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
