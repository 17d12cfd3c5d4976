"""Tensor Memory: allocation rules, the register maps of tcgen05.ld and .st, unwritten cells."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.emulator.findings import EmulatorFault, UnsupportedPTX
from kernels.emulator.memory.tensor import TensorMemory

SHAPES = ["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"]
REGISTERS = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}
NUMS = [1, 2, 4, 8, 16, 32, 64, 128]
FORMS = [(s, n) for s in SHAPES for n in NUMS if REGISTERS[s] * n <= 128]


def code_of(call, *args, **kwargs) -> str:
    with pytest.raises(EmulatorFault) as caught:
        call(*args, **kwargs)
    return caught.value.code


def filled(seed: int = 0) -> tuple[TensorMemory, np.ndarray]:
    """A Tensor Memory, all allocated and written, and its cells as [lane, column]."""
    tmem = TensorMemory()
    tmem.alloc(512)
    rng = np.random.default_rng(seed)
    cells = rng.integers(0, 1 << 32, (128, 512), np.uint32)
    for warp in range(4):
        for column in range(0, 512, 128):
            part = cells[32 * warp : 32 * warp + 32, column : column + 128]
            tmem.st("32x32b", 128, (32 * warp) << 16 | column, warp, part.T)
    assert np.array_equal(tmem.data.T, cells)
    return tmem, cells


def layout(shape: tuple, stride: tuple, index: int) -> int:
    """A CuTe layout's value: `index` split by `shape` from the left, times `stride`."""
    total = 0
    for extent, step in zip(shape, stride, strict=True):
        total += index % extent * step
        index //= extent
    return total


def cute_cell(shape: str, num: int, thread: int, reg: int) -> tuple[int, int]:
    """(lane, column) of a register by CUTLASS's SM100_TMEM_LOAD_* traits.

    The traits map (thread, bit of its registers) to a bit of the 16 or 32 lanes by `bits` box:
    copied from cute/atom/copy_traits_sm100.hpp, whose num=1 and num=2 entries fix the pattern.
    """
    bits = {"32x32b": 32, "16x64b": 64, "16x128b": 128, "16x256b": 256, "16x32bx2": 64}[shape] * num
    thr_shape, thr_stride, val_shape, val_stride = {
        "32x32b": ((32,), (bits,), (32 * num,), (1,)),
        "16x64b": ((2, 2, 8), (8 * bits, 32, bits), (32, num), (1, 64)),
        "16x128b": ((4, 8), (32, bits), (32, 2, num), (1, 8 * bits, 128)),
        "16x256b": ((4, 8), (64, bits), (64, 2, num), (1, 8 * bits, 256)),
        "16x32bx2": ((16, 2), (bits, 32 * num), (32 * num,), (1,)),
    }[shape]
    bit = layout(thr_shape, thr_stride, thread) + layout(val_shape, val_stride, 32 * reg)
    return bit // bits, bit % bits // 32


@pytest.mark.parametrize("shape,num", FORMS)
def test_ld_moves_the_cells_of_cutlass_traits(shape: str, num: int) -> None:
    tmem, cells = filled(num)
    split = num if shape == "16x32bx2" else None
    for warp, lane0, column0 in ((0, 0, 0), (3, 96, 512 - 2 * num if num < 128 else 384)):
        if shape != "32x32b" and warp == 3:
            lane0 += 16
        width = 1 + max(cute_cell(shape, num, t, REGISTERS[shape] * num - 1)[1] for t in range(32))
        column0 = min(column0, 512 - width)
        got = tmem.ld(shape, num, lane0 << 16 | column0, warp, half_split_off=split)
        assert got.shape == (REGISTERS[shape] * num, 32) and got.dtype == np.uint32
        for thread in range(32):
            for reg in range(got.shape[0]):
                lane, column = cute_cell(shape, num, thread, reg)
                assert got[reg, thread] == cells[lane0 + lane, column0 + column]


@pytest.mark.parametrize("shape,num", FORMS)
def test_st_is_the_inverse_of_ld(shape: str, num: int) -> None:
    split = num if shape == "16x32bx2" else None
    regs = np.random.default_rng(num).integers(0, 1 << 32, (REGISTERS[shape] * num, 32), np.uint32)
    tmem = TensorMemory()
    tmem.alloc(512)
    taddr = 64 << 16 | 32
    tmem.st(shape, num, taddr, 2, regs, half_split_off=split)
    assert np.array_equal(tmem.ld(shape, num, taddr, 2, half_split_off=split), regs)
    written = np.array([[w >> b & 1 for b in range(32)] for w in tmem.valid[2].tolist()])
    assert written.sum() == regs.size  # every register went to a cell of its own, no other is valid
    assert not tmem.valid[[0, 1, 3]].any()


def test_the_second_half_of_16x32bx2_lies_at_its_offset() -> None:
    tmem, cells = filled()
    got = tmem.ld("16x32bx2", 4, 16 << 16 | 8, 0, half_split_off=200)
    assert np.array_equal(got[:, :16], cells[16:32, 8:12].T)
    assert np.array_equal(got[:, 16:], cells[16:32, 208:212].T)
    fresh = TensorMemory()
    fresh.alloc(512)
    fresh.st("16x32bx2", 2, 0, 0, np.ones((2, 32), np.uint32), half_split_off=100)
    assert list(np.flatnonzero(fresh.valid[0])) == [0, 1, 100, 101]
    assert code_of(fresh.ld, "16x32bx2", 2, 0, 0, half_split_off=99) == "tmem_unwritten_read"


@pytest.mark.parametrize("shape,num", [("32x32b", 8), ("16x64b", 4), ("16x256b", 2)])
def test_pack_takes_the_low_halves_of_adjacent_columns(shape: str, num: int) -> None:
    tmem, cells = filled()
    got = tmem.ld(shape, num, 32 << 16 | 64, 1, pack16=True)
    for thread in range(32):
        for reg in range(got.shape[0]):
            lane, column = cute_cell(shape, num, thread, reg)
            low, high = cells[32 + lane, 64 + 2 * column : 66 + 2 * column] & 0xFFFF
            assert got[reg, thread] == int(high) << 16 | int(low)
    fresh = TensorMemory()
    fresh.alloc(256)
    fresh.st(shape, num, 32 << 16 | 64, 1, got, unpack16=True)
    assert np.array_equal(fresh.ld(shape, num, 32 << 16 | 64, 1, pack16=True), got)


def test_a_load_is_a_copy() -> None:
    tmem, cells = filled()
    got = tmem.ld("32x32b", 4, 0, 0)
    tmem.st("32x32b", 4, 0, 0, np.zeros((4, 32), np.uint32))
    assert np.array_equal(got, cells[:32, :4].T)


@pytest.mark.parametrize("form", [("32x64b", 1), ("32x32b", 3), ("16x256b", 64), ("32x32b", 0)])
def test_unknown_forms_are_refused(form: tuple[str, int]) -> None:
    tmem, _ = filled()
    with pytest.raises(UnsupportedPTX):
        tmem.ld(*form, 0, 0, pack16=True)
    with pytest.raises(UnsupportedPTX):
        tmem.ld("16x32bx2", 2, 0, 0)
    with pytest.raises(UnsupportedPTX):
        tmem.ld("16x64b", 2, 0, 0, half_split_off=2)


@pytest.mark.parametrize("warp", range(4))
def test_a_warp_reaches_only_its_lanes(warp: int) -> None:
    tmem, _ = filled()
    for lane in (0, 16, 32, 48, 64, 80, 96, 112, 8, 33, 128):
        for shape, nlanes in (("32x32b", 32), ("16x64b", 16)):
            allowed = lane in ((32 * warp,) if nlanes == 32 else (32 * warp, 32 * warp + 16))
            if allowed:
                tmem.ld(shape, 1, lane << 16, warp)
            else:
                assert code_of(tmem.ld, shape, 1, lane << 16, warp) == "tmem_lane_access"
                regs = np.zeros((1, 32), np.uint32)
                assert code_of(tmem.st, shape, 1, lane << 16, warp, regs) == "tmem_lane_access"


def test_unwritten_cells() -> None:
    tmem = TensorMemory()
    tmem.alloc(64)
    tmem.st("32x32b", 16, 32 << 16, 1, np.zeros((16, 32), np.uint32))
    tmem.ld("32x32b", 16, 32 << 16, 1)
    with pytest.raises(EmulatorFault) as caught:
        tmem.ld("32x32b", 32, 32 << 16, 1)
    assert caught.value.code == "tmem_unwritten_read"
    details = caught.value.details
    assert (details["lane"], details["column"], details["cells"]) == (32, 16, 16 * 32)
    assert code_of(tmem.ld, "32x32b", 1, 0, 0) == "tmem_unwritten_read"
    tmem.st("16x64b", 1, 64 << 16 | 8, 2, np.zeros((1, 32), np.uint32))
    assert code_of(tmem.ld, "32x32b", 1, 64 << 16 | 8, 2) == "tmem_unwritten_read"
    assert code_of(tmem.ld, "16x64b", 1, 80 << 16 | 8, 2) == "tmem_unwritten_read"


def test_what_a_freed_column_held_is_gone() -> None:
    tmem, _ = filled()
    tmem.dealloc(0, 512)
    assert code_of(tmem.ld, "32x32b", 1, 0, 0) == "tmem_use_after_dealloc"
    assert tmem.alloc(512) == 0
    assert code_of(tmem.ld, "32x32b", 1, 0, 0) == "tmem_unwritten_read"


def test_access_outside_an_allocation() -> None:
    tmem = TensorMemory()
    regs = np.zeros((64, 32), np.uint32)
    assert code_of(tmem.st, "32x32b", 64, 0, 0, regs) == "tmem_use_before_alloc"
    assert tmem.alloc(64) == 0
    tmem.st("32x32b", 64, 0, 0, regs)
    assert code_of(tmem.st, "32x32b", 64, 1, 0, regs) == "tmem_use_before_alloc"
    assert code_of(tmem.ld, "32x32b", 64, 449, 0) == "tmem_out_of_bounds"
    assert code_of(tmem.ld, "32x32b", 1, 0xFFFF, 0) == "tmem_out_of_bounds"


def test_alloc_takes_powers_of_two_that_do_not_grow() -> None:
    for bad in (0, 1, 16, 31, 33, 48, 96, 511, 1024, -32):
        assert code_of(TensorMemory().alloc, bad) == "tmem_alloc_bad_size"
    tmem = TensorMemory()
    assert [tmem.alloc(n) for n in (256, 128, 64, 32)] == [0, 256, 384, 448]
    assert code_of(tmem.alloc, 64) == "tmem_alloc_bad_size"
    assert tmem.alloc(32) == 480
    assert tmem.alloc(32) is None  # full: the warp blocks
    tmem.dealloc(448, 32)
    assert tmem.alloc(32) == 448


def test_dealloc_names_what_alloc_made() -> None:
    tmem = TensorMemory()
    tmem.alloc(128)
    assert code_of(tmem.dealloc, 0, 64) == "tmem_dealloc_mismatch"
    assert code_of(tmem.dealloc, 32, 128) == "tmem_dealloc_mismatch"
    assert code_of(tmem.dealloc, 32 << 16, 128) == "tmem_dealloc_mismatch"
    assert code_of(tmem.check_freed) == "tmem_not_freed"
    tmem.dealloc(0, 128)
    tmem.check_freed()
    assert code_of(tmem.dealloc, 0, 128) == "tmem_double_dealloc"


def test_no_allocation_after_relinquish() -> None:
    tmem = TensorMemory()
    tmem.alloc(64)
    tmem.relinquish()
    assert code_of(tmem.alloc, 64) == "tmem_alloc_after_relinquish"
    tmem.dealloc(0, 64)
    tmem.check_freed()
