"""TMA loads and stores against what an NVIDIA H200 did (hardware/record_tma.py recorded it)."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from kernels.emulator.engines.tma import load_tile, store_tile
from kernels.emulator.findings import EmulatorFault
from kernels.emulator.memory import GlobalMemory, SharedMemory
from tests.emulator.hardware import record_tma
from tests.emulator.test_tensormap import DRIVER, TF32_TYPES, of_case

BASE = 1024
SOURCE_BYTES = 1 << 16
SMEM_BYTES = record_tma.SMEM_DUMP_BYTES


class Machine:
    """The memories as the recording kernel has them before its transfer."""

    def __init__(self, kind: str) -> None:
        raw = np.empty(SOURCE_BYTES + 256, np.uint8)
        start = -raw.ctypes.data % 256
        self.source = raw[start : start + SOURCE_BYTES]
        self.source[:] = np.frombuffer(record_tma.pattern(SOURCE_BYTES, 1), np.uint8)
        self.gmem = GlobalMemory()
        self.gmem.add_array(self.source, "source")
        self.smem = SharedMemory(SMEM_BYTES)
        if kind == "load":
            image = np.full(SMEM_BYTES, record_tma.SMEM_FILL, np.uint8)
        else:
            words = np.arange(SMEM_BYTES // 4, dtype=np.uint64) * record_tma.SMEM_WORD_FACTOR
            image = words.astype(np.uint32).view(np.uint8)
        self.smem.write_bytes(BASE, image)

    def run(self, kind: str, case: dict[str, Any]) -> str:
        """Do the transfer; the SHA-256 of the memory it writes."""
        tmap = of_case(case, self.source.ctypes.data)
        move = load_tile if kind == "load" else store_tile
        move(tmap, case["coords"], self.gmem, self.smem, BASE + case["smem"])
        written = self.smem.data if kind == "load" else self.source
        return hashlib.sha256(written.tobytes()).hexdigest()


CASES = [
    (kind, case)
    for kind in ("load", "store")
    for case in DRIVER[kind]
    if not (kind == "load" and case["dtype"] in TF32_TYPES)  # refused: rounds on the way
]


@pytest.mark.parametrize("kind,case", CASES)
def test_transfer(kind: str, case: dict[str, Any]) -> None:
    machine = Machine(kind)
    if "fault" in case:
        with pytest.raises(EmulatorFault) as caught:
            machine.run(kind, case)
        assert caught.value.code in ("tma_misaligned", "tma_bad_coordinates")
    else:
        assert case["smem_base"] == BASE and case["completed"] == 1
        assert machine.run(kind, case) == case["sha256"]


def test_the_recording_covers_what_it_should() -> None:
    assert len(CASES) > 350
    assert {c["swizzle"] for _, c in CASES} == {0, 1, 2, 3}
    assert {len(c["dims"]) for _, c in CASES} == {1, 2, 3, 4, 5}
    assert sum("fault" in c for _, c in CASES) == 7
    assert len({c["sha256"] for _, c in CASES if "sha256" in c}) > 250
