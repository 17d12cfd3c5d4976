"""TMA tiles against a slow reading of PTX ISA 9.1 section 5.5, element by element."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kernels.emulator.engines import mma
from kernels.emulator.engines.tma import bulk_load, bulk_store, load_tile, store_tile
from kernels.emulator.findings import EmulatorFault, UnsupportedPTX
from kernels.emulator.memory import GlobalMemory, SharedMemory, TensorMemory
from kernels.emulator.tensormap import TensorMap
from tests.emulator.test_tensorcore import instr, smem_desc

BASE, SMEM_BYTES = 1024, 64 * 1024
FILL = 0xA5

# Section 5.5.7: (span, atom) -> for each 128-byte line in turn, which chunk lies at place j.
ISA_LINES = {
    (0, 16): ["01234567"],
    (32, 16): ["01234567", "10325476"],
    (64, 16): ["01234567", "10325476", "23016745", "32107654"],
    (128, 16): [
        "01234567", "10325476", "23016745", "32107654",
        "45670123", "54761032", "67452301", "76543210",
    ],
    (128, 32): ["01234567", "23016745", "45670123", "67452301"],
    (128, 64): ["01234567", "45670123"],
}  # fmt: skip


class World:
    """A tensor in global memory, random bytes around it, and shared memory full of a known byte."""

    def __init__(self, nbytes: int = 1 << 18, seed: int = 0, smem_written: bool = True) -> None:
        raw = np.random.default_rng(seed).integers(0, 256, nbytes + 256, np.uint8)
        start = -raw.ctypes.data % 256
        self.bytes = raw[start : start + nbytes]
        self.address = self.bytes.ctypes.data
        self.gmem = GlobalMemory()
        self.gmem.add_array(self.bytes, "tensor")
        self.smem = SharedMemory(SMEM_BYTES)
        if smem_written:
            self.smem.write_bytes(BASE, np.full(SMEM_BYTES, FILL, np.uint8))

    def map(self, dims: tuple[int, ...], box: tuple[int, ...], **fields) -> TensorMap:
        """A tensor map over this world's bytes; rows padded by 32 bytes, like a strided view."""
        size = np.dtype(fields.get("dtype", "uint16").replace("bfloat16", "uint16")).itemsize
        strides, total = [], -(-dims[0] * size // 16) * 16 + 32
        for extent in dims[1:]:
            strides.append(total)
            total *= extent
        made = TensorMap(
            address=self.address + 64,
            dims=dims,
            strides_bytes=tuple(strides),
            box=box,
            **{"dtype": "uint16", "element_strides": (1,) * len(dims), **fields},
        )
        made.check()
        return made


def elements(tmap: TensorMap, coords: tuple[int, ...], smem_addr: int):
    """(offset in the tensor or None outside, shared address) of each element of a tile."""
    size, span = tmap.element_bytes, tmap.swizzle_bytes
    pitch = span or tmap.tile[0] * size
    lines = ISA_LINES[span, tmap.swizzle_atom_bytes]
    for number, index in enumerate(product(*(range(n) for n in tmap.tile[::-1]))):
        index = index[::-1]
        at = [c + i * e for c, i, e in zip(coords, index, tmap.element_strides, strict=True)]
        inside = all(0 <= a < n for a, n in zip(at, tmap.dims, strict=True))
        offset = sum(a * s for a, s in zip(at, tmap.all_strides_bytes, strict=True))
        row = number // tmap.tile[0]
        address = smem_addr + row * pitch + index[0] * size
        line, place = address // 128, address // 16 % 8
        chunk = int(lines[line % len(lines)][place])
        yield (offset if inside else None), line * 128 + chunk * 16 + address % 16


def expected_load(world: World, tmap: TensorMap, coords, smem_addr: int, fill: int = 0):
    image = world.smem.data.copy()
    size = tmap.element_bytes
    source = world.bytes[64:]
    for offset, address in elements(tmap, coords, smem_addr):
        if offset is None:
            image[address - BASE : address - BASE + size] = list(fill.to_bytes(size, "little"))
        else:
            image[address - BASE : address - BASE + size] = source[offset : offset + size]
    return image


RANKS = [
    ((1000,), (64,)),
    ((72, 40), (32, 24)),
    ((72, 40), (64, 16)),
    ((24, 10, 6), (16, 8, 4)),
    ((40, 6, 5, 3), (16, 4, 3, 2)),
    ((24, 5, 4, 3, 2), (8, 3, 2, 2, 2)),
]


@pytest.mark.parametrize("dims,box", RANKS)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_load_of_random_tiles(dims, box, swizzle: int) -> None:
    if swizzle:
        box = (min(box[0], swizzle // 2), *box[1:])
    rng = np.random.default_rng([len(dims), swizzle, box[0]])
    for _ in range(6):
        world = World(seed=int(rng.integers(1 << 30)))
        tmap = world.map(dims, box, swizzle_bytes=swizzle)
        coords = [int(rng.integers(-b, n + 2)) for b, n in zip(box, dims, strict=True)]
        coords[0] = coords[0] // 8 * 8
        smem_addr = BASE + 128 * int(rng.integers(0, 20))
        want = expected_load(world, tmap, coords, smem_addr)
        assert load_tile(tmap, coords, world.gmem, world.smem, smem_addr) == tmap.tile_bytes
        assert np.array_equal(world.smem.data, want), coords


@pytest.mark.parametrize("dims,box", RANKS)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_store_of_random_tiles(dims, box, swizzle: int) -> None:
    if swizzle:
        box = (min(box[0], swizzle // 2), *box[1:])
    rng = np.random.default_rng([len(dims), swizzle, box[0], 1])
    for _ in range(6):
        world = World(seed=int(rng.integers(1 << 30)))
        world.smem.write_bytes(BASE, rng.integers(0, 256, SMEM_BYTES, np.uint8))
        tmap = world.map(dims, box, swizzle_bytes=swizzle)
        coords = [int(rng.integers(0, n + 2)) for n in dims]
        coords[0] = coords[0] // 8 * 8
        smem_addr = BASE + 128 * int(rng.integers(0, 20))
        want = world.bytes.copy()
        for offset, address in elements(tmap, coords, smem_addr):
            if offset is not None:
                at = address - BASE
                want[64 + offset : 66 + offset] = world.smem.data[at : at + 2]
        assert store_tile(tmap, coords, world.gmem, world.smem, smem_addr) == tmap.tile_bytes
        assert np.array_equal(world.bytes, want), coords


@pytest.mark.parametrize("atom", [32, 64])
def test_wider_swizzle_atoms(atom: int) -> None:
    world = World()
    tmap = world.map((256, 64), (64, 40), swizzle_bytes=128, swizzle_atom_bytes=atom)
    want = expected_load(world, tmap, (8, 3), BASE + 256)
    load_tile(tmap, (8, 3), world.gmem, world.smem, BASE + 256)
    assert np.array_equal(world.smem.data, want)


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int64", "float64", "bfloat16"])
def test_element_sizes(dtype: str) -> None:
    world = World()
    tmap = world.map((48, 20), (32, 12), dtype=dtype)
    want = expected_load(world, tmap, (16, 13), BASE)
    load_tile(tmap, (16, 13), world.gmem, world.smem, BASE)
    assert np.array_equal(world.smem.data, want)


@pytest.mark.parametrize("steps", [(1, 2), (1, 3), (1, 8)])
def test_element_strides(steps: tuple[int, int]) -> None:
    for coords in ((0, 0), (8, -5), (16, 33)):
        world = World()
        tmap = world.map((72, 40), (32, 17), element_strides=steps)
        want = expected_load(world, tmap, coords, BASE)
        assert load_tile(tmap, coords, world.gmem, world.smem, BASE) == 64 * -(-17 // steps[1])
        assert np.array_equal(world.smem.data, want)


@pytest.mark.parametrize(
    "dtype,nan",
    [
        ("bfloat16", 0x7FF7),
        ("float16", 0x7FF7),
        ("float32", 0x7FF77FF7),
        ("float64", 0x7FF77FF77FF77FF7),
    ],
)
def test_nan_fill(dtype: str, nan: int) -> None:
    world = World()
    tmap = world.map((48, 20), (32, 12), dtype=dtype, nan_fill=True)
    want = expected_load(world, tmap, (32, 13), BASE, fill=nan)
    load_tile(tmap, (32, 13), world.gmem, world.smem, BASE)
    assert np.array_equal(world.smem.data, want)
    outside = load_tile(tmap, (48, 0), world.gmem, world.smem, BASE)
    whole = world.smem.data[:outside]
    assert (
        whole.reshape(-1, tmap.element_bytes) == list(nan.to_bytes(tmap.element_bytes, "little"))
    ).all()


def test_a_load_makes_its_bytes_readable_and_no_others() -> None:
    for box, swizzle in (((64, 16), 128), ((24, 7), 128), ((24, 7), 0)):
        world = World(smem_written=False)
        tmap = world.map((256, 64), box, swizzle_bytes=swizzle)
        load_tile(tmap, (0, 60), world.gmem, world.smem, BASE + 128)
        touched = np.zeros(SMEM_BYTES, bool)
        for _, address in elements(tmap, (0, 60), BASE + 128):
            touched[address - BASE : address - BASE + 2] = True
        assert np.array_equal(world.smem.valid.astype(bool), touched)


def code_of(call, *args) -> str:
    with pytest.raises(EmulatorFault) as caught:
        call(*args)
    return caught.value.code


@pytest.mark.parametrize("move", [load_tile, store_tile])
def test_faults_of_both_directions(move) -> None:
    world = World()
    tmap = world.map((256, 64), (64, 16), swizzle_bytes=128)
    memories = (world.gmem, world.smem)
    assert code_of(move, tmap, (4, 0), *memories, BASE) == "tma_misaligned"
    assert code_of(move, tmap, (0, 0), *memories, BASE + 16) == "tma_misaligned"
    assert code_of(move, tmap, (0, 0), *memories, BASE + 64) == "tma_misaligned"
    assert code_of(move, tmap, (0,), *memories, BASE) == "tma_bad_coordinates"
    assert code_of(move, tmap, (0, 0, 0), *memories, BASE) == "tma_bad_coordinates"
    assert code_of(move, tmap, (0, 0), *memories, 0) == "smem_out_of_bounds"
    last = BASE + SMEM_BYTES - 1024
    assert code_of(move, tmap, (0, 0), *memories, last) == "smem_out_of_bounds"
    stray = replace(tmap, address=tmap.address + (1 << 40))
    assert code_of(move, stray, (0, 0), *memories, BASE) == "global_out_of_bounds"
    long = replace(tmap, dims=(256, 4096))
    assert code_of(move, long, (0, 4000), *memories, BASE) == "global_out_of_bounds"
    world.smem.mark_mbarrier(BASE + 1024)
    assert code_of(move, tmap, (0, 0), *memories, BASE) == "mbarrier_ordinary_access"
    short = world.map((256, 64), (24, 16), swizzle_bytes=128)
    assert code_of(move, short, (0, 0), *memories, BASE) == "mbarrier_ordinary_access"


def test_faults_of_a_store() -> None:
    world = World(smem_written=False)
    tmap = world.map((256, 64), (64, 16), swizzle_bytes=128)
    memories = (world.gmem, world.smem)
    assert code_of(store_tile, tmap, (0, 0), *memories, BASE) == "smem_unwritten_read"
    assert code_of(store_tile, tmap, (-8, 0), *memories, BASE) == "tma_bad_coordinates"
    assert code_of(store_tile, tmap, (0, -1), *memories, BASE) == "tma_bad_coordinates"
    # Rows past the tensor's end are clipped: nobody needs to have written them.
    world.smem.write_bytes(BASE, np.zeros(128 * 4, np.uint8))
    store_tile(tmap, (0, 60), *memories, BASE)
    assert code_of(store_tile, tmap, (0, 59), *memories, BASE) == "smem_unwritten_read"
    frozen = GlobalMemory()
    frozen.add_array(world.bytes, "weights", writable=False)
    assert code_of(store_tile, tmap, (0, 60), frozen, world.smem, BASE) == "global_read_only"
    load_tile(tmap, (0, 60), frozen, world.smem, BASE)


def test_rounding_loads_with_nan_fill_are_refused() -> None:
    world = World()
    tmap = world.map((64, 16), (32, 8), dtype="float32", tf32_rounding=True, nan_fill=True)
    with pytest.raises(UnsupportedPTX):
        load_tile(tmap, (0, 0), world.gmem, world.smem, BASE)


def test_bulk_copies() -> None:
    world = World(smem_written=False)
    source, target = world.address + 4096, world.address + 8192
    assert bulk_load(world.gmem, source, world.smem, BASE + 48, 1040) == 1040
    assert np.array_equal(world.smem.data[48 : 48 + 1040], world.bytes[4096 : 4096 + 1040])
    assert world.smem.valid.sum() == 1040
    assert bulk_store(world.smem, BASE + 48, world.gmem, target, 1040) == 1040
    assert np.array_equal(world.bytes[8192 : 8192 + 1040], world.bytes[4096 : 4096 + 1040])
    for at, to, size in ((source + 8, BASE, 16), (source, BASE + 8, 16), (source, BASE, 24)):
        assert code_of(bulk_load, world.gmem, at, world.smem, to, size) == "tma_misaligned"
        assert code_of(bulk_store, world.smem, to, world.gmem, at, size) == "tma_misaligned"
    assert code_of(bulk_store, world.smem, BASE, world.gmem, target, 1040) == "smem_unwritten_read"
    end = world.address + world.bytes.size
    assert code_of(bulk_load, world.gmem, end - 16, world.smem, BASE, 32) == "global_out_of_bounds"


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("b_mn_major", [False, True])
def test_tiles_that_tma_loads_multiply(swizzle: int, b_mn_major: bool) -> None:
    """What attention does: Q @ K^T, both K-major, and P @ V with V as it lies in memory."""
    rng = np.random.default_rng([swizzle, b_mn_major])
    m, n, k = 128, 96, 128
    a = rng.integers(-8, 9, (200, k)).astype(np.float64)
    b = rng.integers(-8, 9, (k, 200) if b_mn_major else (200, k)).astype(np.float64)
    world = World()
    tiles = []
    smem_addr = BASE
    span_elements, width = swizzle // 2, swizzle // 16
    for matrix, rows, columns, at in (
        (a, m, k, (0, 40)),
        (b, k, n, (32, 0)) if b_mn_major else (b, n, k, (0, 16)),
    ):
        bits = np.ascontiguousarray(bfloat16_bits(matrix))
        world.gmem.add_array(bits, "operand")
        tmap = TensorMap(
            address=bits.ctypes.data,
            dtype="bfloat16",
            dims=bits.shape[::-1],
            strides_bytes=(bits.strides[0],),
            box=(span_elements, rows),
            element_strides=(1, 1),
            swizzle_bytes=swizzle,
        )
        tiles.append((smem_addr, rows))
        for first in range(0, columns, span_elements):  # one box for each swizzled row's width
            world_at = (at[0] + first, at[1])
            smem_addr += load_tile(tmap, world_at, world.gmem, world.smem, smem_addr)
        smem_addr = -(-smem_addr // 1024) * 1024
    tmem = TensorMemory()
    tmem.alloc(128)
    stride = 8 * swizzle
    for step in range(k // 16):
        block, inner = divmod(step * 16, span_elements)
        start, rows = tiles[0]
        a_desc = smem_desc(start + block * rows * swizzle + 2 * inner, 16, stride, width)
        start, rows = tiles[1]
        if b_mn_major:  # LBO: to the next swizzled row's width of N; SBO: to the next 8 of K
            b_desc = smem_desc(start + 16 * step * swizzle, rows * swizzle, stride, width)
        else:
            b_desc = smem_desc(start + block * rows * swizzle + 2 * inner, 16, stride, width)
        mma(
            instr(m, n, b_mn=b_mn_major), a_desc, b_desc, 0, world.smem, tmem,
            accumulate=step > 0, a_in_tmem=False,
        )  # fmt: skip
    wanted_b = b[:k, 32 : 32 + n] if b_mn_major else b[16 : 16 + n].T
    want = a[40 : 40 + m] @ wanted_b
    assert np.array_equal(tmem.data[:n].view(np.float32).T, want)
