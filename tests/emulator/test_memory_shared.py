"""Shared memory: what a warp and an engine may read and write, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.emulator.findings import EmulatorFault
from kernels.emulator.memory.shared import SharedMemory

BASE = 1024


def written(nbytes: int = 4096, seed: int = 0) -> tuple[SharedMemory, np.ndarray]:
    """A shared memory full of random bytes, and those bytes."""
    shared = SharedMemory(nbytes)
    image = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    shared.write_bytes(BASE, image)
    return shared, image


def code_of(call, *args, **kwargs) -> str:
    with pytest.raises(EmulatorFault) as caught:
        call(*args, **kwargs)
    return caught.value.code


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16, 32])
def test_load_returns_each_lanes_bytes(nbytes: int) -> None:
    shared, image = written()
    offsets = np.random.default_rng(nbytes).integers(0, 4096 // nbytes, 32) * nbytes
    got = shared.load(BASE + offsets, nbytes)
    want = np.stack([image[o : o + nbytes] for o in offsets])
    assert got.dtype == np.uint8 and got.shape == (32, nbytes)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16, 32])
def test_store_writes_each_lanes_bytes_and_nothing_else(nbytes: int) -> None:
    shared, image = written()
    rng = np.random.default_rng(nbytes)
    offsets = rng.permutation(4096 // nbytes)[:32] * nbytes
    values = rng.integers(0, 256, (32, nbytes), np.uint8)
    shared.store(BASE + offsets, values)
    for offset, value in zip(offsets, values, strict=True):
        image[offset : offset + nbytes] = value
    assert np.array_equal(shared.data, image)


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16, 32])
def test_store_makes_exactly_its_bytes_readable(nbytes: int) -> None:
    shared = SharedMemory(4096)
    shared.store(np.array([BASE + 64]), np.zeros((1, nbytes), np.uint8))
    assert shared.valid.sum() == nbytes and shared.valid[64 : 64 + nbytes].all()
    shared.load(np.array([BASE + 64]), nbytes)
    assert code_of(shared.load, np.array([BASE + 64 + nbytes]), 1) == "smem_unwritten_read"
    assert code_of(shared.load, np.array([BASE + 63]), 1) == "smem_unwritten_read"


def test_the_higher_lane_wins_a_collision() -> None:
    shared = SharedMemory(64)
    shared.store(np.full(3, BASE), np.array([[1], [2], [3]], np.uint8))
    assert shared.load(np.array([BASE]), 1)[0, 0] == 3


def test_an_unwritten_byte_in_the_middle_of_one_lane_is_found() -> None:
    shared = SharedMemory(4096)
    image = np.zeros(4096, np.uint8)
    shared.write_bytes(BASE, image[:1000])
    shared.write_bytes(BASE + 1001, image[1001:])
    with pytest.raises(EmulatorFault) as caught:
        shared.load(BASE + 16 * np.arange(60, 70), 16)
    assert caught.value.code == "smem_unwritten_read"
    assert caught.value.details["address"] == BASE + 1000
    assert caught.value.details["bytes"] == 1
    with pytest.raises(EmulatorFault) as caught:
        shared.read_bytes(BASE, 4096, "TMA store")
    assert caught.value.details["address"] == BASE + 1000
    assert "TMA store" in caught.value.message


@pytest.mark.parametrize("nbytes", [2, 4, 8, 16, 32])
def test_misaligned_lane_is_named(nbytes: int) -> None:
    shared, _ = written()
    addrs = BASE + nbytes * np.arange(32)
    addrs[7] += nbytes // 2
    values = np.zeros((32, nbytes), np.uint8)
    for call in (lambda: shared.load(addrs, nbytes), lambda: shared.store(addrs, values)):
        with pytest.raises(EmulatorFault) as caught:
            call()
        assert caught.value.code == "smem_misaligned"
        assert caught.value.details["lane"] == 7


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("where", ["null", "reserved", "end", "far", "huge", "negative"])
def test_out_of_bounds(nbytes: int, where: str) -> None:
    shared, _ = written(4096)
    bad = {
        "null": 0,
        "reserved": BASE - nbytes,
        "end": BASE + 4096,
        "far": 1 << 24,
        "huge": (1 << 32) - nbytes,
        "negative": -nbytes,
    }[where]
    addrs = np.array([BASE, bad, BASE])
    assert code_of(shared.load, addrs, nbytes) == "smem_out_of_bounds"
    values = np.zeros((3, nbytes), np.uint8)
    assert code_of(shared.store, addrs, values) == "smem_out_of_bounds"
    assert code_of(shared.read_bytes, bad, nbytes) == "smem_out_of_bounds"
    shared.load(np.array([BASE + 4096 - nbytes]), nbytes)  # the last element is fine


def test_a_size_that_is_no_multiple_of_anything() -> None:
    shared = SharedMemory(77)
    shared.write_bytes(BASE, np.arange(77, dtype=np.uint8))
    assert shared.load(np.array([BASE + 76]), 1)[0, 0] == 76
    assert code_of(shared.load, np.array([BASE + 76]), 4) == "smem_out_of_bounds"
    assert code_of(shared.load, np.array([BASE + 77]), 1) == "smem_out_of_bounds"


def test_no_active_lane_is_no_access() -> None:
    shared = SharedMemory(64)
    nobody = np.zeros(0, np.int64)
    assert shared.load(nobody, 4).shape == (0, 4)
    shared.store(nobody, np.zeros((0, 4), np.uint8))
    assert not shared.valid.any()


def test_a_read_view_cannot_be_written() -> None:
    shared, _ = written(64)
    with pytest.raises(ValueError):
        shared.read_bytes(BASE, 16)[0] = 1


def test_ordinary_access_to_a_live_mbarrier() -> None:
    shared, _ = written(4096)
    shared.mark_mbarrier(BASE + 64)
    addr = np.array([BASE + 64])
    for nbytes in (1, 2, 4, 8, 16, 32):
        assert code_of(shared.load, addr, nbytes) == "mbarrier_ordinary_access"
        values = np.zeros((1, nbytes), np.uint8)
        assert code_of(shared.store, addr, values) == "mbarrier_ordinary_access"
    assert code_of(shared.store, addr + 7, np.zeros((1, 1), np.uint8)) == "mbarrier_ordinary_access"
    assert code_of(shared.read_bytes, BASE, 4096) == "mbarrier_ordinary_access"
    wide = np.zeros(128, np.uint8)
    assert code_of(shared.write_bytes, BASE, wide) == "mbarrier_ordinary_access"
    shared.store(addr + 8, np.zeros((1, 8), np.uint8))
    shared.store(addr - 8, np.zeros((1, 8), np.uint8))
    shared.write_bytes(BASE, wide[:64])
    shared.unmark_mbarrier(BASE + 64)
    assert code_of(shared.load, addr, 8) == "smem_unwritten_read"
    shared.write_bytes(BASE, wide)
    assert shared.load(addr, 8).sum() == 0
