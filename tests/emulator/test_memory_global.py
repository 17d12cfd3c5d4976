"""Global memory: only what was registered can be touched, and loads see the caller's bytes."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.emulator.findings import EmulatorFault
from kernels.emulator.memory.global_memory import GlobalMemory


def aligned(nbytes: int, offset: int = 0) -> np.ndarray:
    """Random bytes whose first one lies ``offset`` past a 256-byte boundary."""
    raw = np.random.default_rng(nbytes).integers(0, 256, nbytes + 512, np.uint8)
    start = -raw.ctypes.data % 256 + offset
    return raw[start : start + nbytes]


def code_of(call, *args, **kwargs) -> str:
    with pytest.raises(EmulatorFault) as caught:
        call(*args, **kwargs)
    return caught.value.code


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("offset", [0, 2, 24])
def test_load_and_store_act_on_the_callers_buffer(nbytes: int, offset: int) -> None:
    buffer = aligned(4096, offset)
    base = buffer.ctypes.data
    memory = GlobalMemory()
    memory.add_array(buffer, "x")
    rng = np.random.default_rng(nbytes)
    first = -base % nbytes
    at = first + rng.permutation((4096 - first) // nbytes)[:32] * nbytes
    got = memory.load(base + at, nbytes)
    assert np.array_equal(got, np.stack([buffer[o : o + nbytes] for o in at]))
    image = buffer.copy()
    values = rng.integers(0, 256, (32, nbytes), np.uint8)
    memory.store((base + at).astype(np.uint64), values)
    for o, value in zip(at, values, strict=True):
        image[o : o + nbytes] = value
    assert np.array_equal(buffer, image)


def test_lanes_in_different_allocations() -> None:
    a, b = aligned(1024), aligned(1040)
    memory = GlobalMemory()
    memory.add_array(a, "a")
    memory.add_array(b, "b")
    addrs = np.array([a.ctypes.data, b.ctypes.data + 16, a.ctypes.data + 8, b.ctypes.data])
    want = np.stack([a[0:8], b[16:24], a[8:16], b[0:8]])
    assert np.array_equal(memory.load(addrs, 8), want)
    memory.store(addrs, want[::-1].copy())
    assert np.array_equal(memory.load(addrs, 8), want[::-1])


def test_out_of_bounds_names_the_nearest_allocation_and_the_distance() -> None:
    buffer = aligned(4096)
    base = buffer.ctypes.data
    memory = GlobalMemory()
    memory.add(base + 1024, 1024, "k", owner=buffer)
    for addr, distance, side in ((base + 1024 - 48, 48, "before"), (base + 2048 + 28, 32, "past")):
        with pytest.raises(EmulatorFault) as caught:
            memory.load(np.array([base + 1024, addr]), 4)
        assert caught.value.code == "global_out_of_bounds"
        assert caught.value.details["allocation"] == "k"
        assert caught.value.details["distance_bytes"] == distance
        assert side in caught.value.message
    assert code_of(memory.store, np.array([8]), np.zeros((1, 8), np.uint8)) == (
        "global_out_of_bounds"
    )
    assert code_of(GlobalMemory().load, np.array([base]), 4) == "global_out_of_bounds"


def test_an_access_that_straddles_the_end_is_out_of_bounds() -> None:
    buffer = aligned(64)
    memory = GlobalMemory()
    memory.add(buffer.ctypes.data, 60, owner=buffer)
    last = np.array([buffer.ctypes.data + 56])
    assert code_of(memory.load, last, 8) == "global_out_of_bounds"
    lanes = buffer.ctypes.data + 8 * np.arange(8)  # seven lie inside, the last one in part
    assert code_of(memory.load, lanes, 8) == "global_out_of_bounds"
    assert code_of(memory.store, lanes, np.zeros((8, 8), np.uint8)) == "global_out_of_bounds"
    assert np.array_equal(memory.load(last, 4)[0], buffer[56:60])


def test_misaligned_lane_is_named() -> None:
    buffer = aligned(1024)
    memory = GlobalMemory()
    memory.add_array(buffer)
    addrs = buffer.ctypes.data + 16 * np.arange(32)
    addrs[5] += 8
    with pytest.raises(EmulatorFault) as caught:
        memory.load(addrs, 16)
    assert caught.value.code == "global_misaligned" and caught.value.details["lane"] == 5


def test_read_only_memory_can_be_read() -> None:
    buffer = aligned(1024)
    memory = GlobalMemory()
    memory.add_array(buffer, "weights", writable=False)
    addrs = np.array([buffer.ctypes.data])
    assert np.array_equal(memory.load(addrs, 16)[0], buffer[:16])
    assert code_of(memory.store, addrs, np.zeros((1, 16), np.uint8)) == "global_read_only"
    assert code_of(memory.write_bytes, int(addrs[0]), np.zeros(4, np.uint8)) == "global_read_only"


def test_overlapping_views_become_one_allocation() -> None:
    buffer = aligned(4096)
    memory = GlobalMemory()
    memory.add_array(buffer[:2048], "low", writable=False)
    memory.add_array(buffer[1024:3000], "middle", writable=True)
    memory.add_array(buffer[2100:2200], "inside", writable=False)
    (only,) = memory.allocations
    assert (only.base, only.nbytes) == (buffer.ctypes.data, 3000)
    assert only.name == "low" and only.writable
    memory.store(np.array([only.base]), np.full((1, 4), 7, np.uint8))
    assert (buffer[:4] == 7).all()


def test_strided_views_are_registered_whole() -> None:
    table = np.arange(64, dtype=np.uint32).reshape(8, 8)
    memory = GlobalMemory()
    allocation = memory.add_array(table[::-1, 2:4], "view")
    assert allocation.base == table.ctypes.data + 8
    assert allocation.nbytes == 7 * 32 + 8


def test_the_owner_is_kept_alive() -> None:
    memory = GlobalMemory()
    base = memory.add_array(np.full(1 << 20, 3, np.uint8), "temporary").base
    np.full(1 << 20, 5, np.uint8)  # would reuse the freed block
    assert (memory.read_bytes(base, 1 << 20) == 3).all()
