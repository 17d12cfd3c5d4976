"""TMA of four rows: tile::gather4 and tile::scatter4 (PTX ISA 9.1 section 5.5.3.4)."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.emulator.tensormap import TensorMap
from tests.emulator.cluster_harness import clean, code_of, every_way, launch, module

ROWS = (9, -1, 2, 30)  # the second and the last lie outside the 16 rows
START = 4096  # of the tile in shared memory


def the_map(data: np.ndarray, dtype: str = "uint8", swizzle: int = 0, width: int = 64) -> TensorMap:
    bits = {"uint8": 8, "float16": 16, "4x16": 4}[dtype]
    size = data.shape[1] * 8 // bits
    return TensorMap(
        data.ctypes.data, dtype, (size, len(data)), (data.shape[1],), (width, 1), (1, 1), swizzle,
        nan_fill=dtype == "float16",
    )  # fmt: skip


HEAD = """
.reg .b32 %t, %base, %bar, %at, %tile, %x<8>; .reg .b64 %m, %o, %d, %w; .reg .pred %one, %done;
mov.u32 %t, %tid.x; mov.u32 %base, smem; setp.eq.u32 %one, %t, 0;
add.u32 %bar, %base, 1024; add.u32 %tile, %base, 3072;
@%one mbarrier.init.shared::cta.b64 [%bar], 1;
@%one fence.mbarrier_init.release.cluster;
bar.warp.sync -1;
cvta.param.u64 %m, map_data; ld.param.b64 %o, [out];
"""


def gather_body(coords: tuple[int, ...], nbytes: int, expect: int) -> str:
    moves = " ".join(f"mov.b32 %x{k}, {c & 0xFFFFFFFF};" for k, c in enumerate(coords))
    names = ", ".join(f"%x{k}" for k in range(len(coords)))
    return f"""{HEAD}
{moves}
@%one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {expect};
@%one cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes
  [%tile], [%m, {{{names}}}], [%bar];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
@!%done bra WAIT;
{
        "".join(
            f"mad.lo.u32 %at, %t, 4, {128 * k}; add.u32 %at, %at, %tile; ld.shared.b32 %x0, [%at];"
            f"mad.lo.u32 %at, %t, 4, {128 * k}; cvt.u64.u32 %w, %at; add.u64 %w, %w, %o;"
            "st.global.b32 [%w], %x0;"
            for k in range(nbytes // 128)
        )
    }
"""


def tile_of(data: np.ndarray, column: int, width: int, fill: int) -> np.ndarray:
    """Four rows of bytes from a byte column."""
    out = np.full((4, width), fill, np.uint8)
    for k, row in enumerate(ROWS):
        for x in range(width):
            if 0 <= row < len(data) and 0 <= column + x < data.shape[1]:
                out[k, x] = data[row, column + x]
    return out


def swizzled(tile: np.ndarray, swizzle: int) -> np.ndarray:
    """The tile's bytes in order of address: 16-byte chunk j of 128-byte line i at place j ^ i."""
    flat = tile.reshape(-1, 16)
    out = flat.copy()
    for k in range(len(flat)):
        line = (START + 16 * k) // 128
        out[k ^ line % (swizzle // 16 or 1)] = flat[k]
    return out.reshape(-1)


CASES = [("uint8", 0, 64, 32), ("uint8", 64, 64, -16), ("uint8", 128, 128, 0),
         ("4x16", 64, 128, 32), ("float16", 32, 16, 56)]  # fmt: skip


@every_way
@pytest.mark.parametrize("dtype,swizzle,width,column", CASES)
def test_gather(dtype: str, swizzle: int, width: int, column: int, way: dict) -> None:
    data = np.random.default_rng(swizzle).integers(0, 255, (16, 128), np.uint8)
    tmap = the_map(data, dtype, swizzle, width)
    bits = {"uint8": 8, "float16": 16, "4x16": 4}[dtype]
    row_bytes = width * bits // 8
    want = tile_of(data, column * bits // 8, row_bytes, 0)
    if dtype == "float16":
        outside = tile_of(np.zeros_like(data), column * 2, row_bytes, 1) == 1
        want[outside] = np.tile(np.frombuffer(b"\xf7\x7f", np.uint8), row_bytes * 2)[
            : outside.sum()
        ]
    out = np.zeros(4 * row_bytes, np.uint8)
    body = gather_body((column, *ROWS), 4 * row_bytes, 4 * row_bytes)
    ran = launch(module("out map_data", body, shared=8192), [out, tmap], memory=[data], **way)
    clean(ran)
    assert np.array_equal(out, swizzled(want, swizzle))


def test_what_a_gather_refuses() -> None:
    data = np.zeros((16, 128), np.uint8)
    good = the_map(data)

    def code(tmap: TensorMap, coords: tuple[int, ...], expect: int = 256) -> str:
        out = np.zeros(256, np.uint8)
        text = module("out map_data", gather_body(coords, 256, expect), shared=8192)
        return code_of(launch(text, [out, tmap], memory=[data], max_instructions=20000))

    assert code(good, (0, 1, 2, 3, 4)) == "ok"
    assert code(good, (0, 1, 2, 3, 4), 272) == "deadlock"
    assert code(good, (0, 1, 2, 3)) == "tma_bad_coordinates"
    assert code(good, (8, 1, 2, 3, 4)) == "tma_misaligned"
    two = TensorMap(data.ctypes.data, "uint8", (128, 16), (128,), (64, 2), (1, 1))
    assert code(two, (0, 1, 2, 3, 4)) == "tma_bad_tensor_map"


SCATTER = (
    HEAD
    + """
ld.param.b64 %d, [data];
shl.b32 %at, %t, 4; cvt.u64.u32 %w, %at; add.u64 %d, %d, %w; add.u32 %at, %at, %tile;
<writers> ld.global.v4.b32 {%x0, %x1, %x2, %x3}, [%d];
<writers> st.shared.v4.b32 [%at], {%x0, %x1, %x2, %x3};
fence.proxy.async.shared::cta; bar.warp.sync -1;
mov.b32 %x0, <column>; mov.b32 %x1, 9; mov.b32 %x2, 3; mov.b32 %x3, <row>; mov.b32 %x4, 30;
@%one cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group
  [%m, {%x0, %x1, %x2, %x3, %x4}], [%tile];
@%one cp.async.bulk.commit_group;
@%one cp.async.bulk.wait_group 0;
"""
)


def scatter(swizzle: int, row: int = 12, column: int = 80, writers: str = "", **way) -> tuple:
    data = np.random.default_rng(swizzle).integers(0, 256, 512, np.uint8)
    out = np.zeros((16, 128), np.uint8)
    tmap = the_map(out, "uint8", swizzle, 64 if swizzle != 128 else 128)
    body = SCATTER.replace("<row>", str(row)).replace("<column>", str(column))
    body = body.replace("<writers>", writers)
    text = module("data out map_data", body, shared=8192)
    return launch(text, [data, out, tmap], **way), data, out


@every_way
@pytest.mark.parametrize("swizzle", [0, 64, 128])
def test_scatter(swizzle: int, way: dict) -> None:
    width = 128 if swizzle == 128 else 64
    ran, data, out = scatter(swizzle, **way)
    clean(ran)
    chunks = data[: 4 * width].reshape(-1, 16)
    order = [k ^ (START + 16 * k) // 128 % (swizzle // 16 or 1) for k in range(len(chunks))]
    tile = chunks[order].reshape(4, width)
    want = np.zeros((16, 128), np.uint8)
    for k, row in enumerate((9, 3, 12)):  # the fourth lies outside, as columns from 128 on do
        want[row, 80:] = tile[k, :48]
    assert np.array_equal(out, want)


def test_what_a_scatter_refuses() -> None:
    assert code_of(scatter(0, row=-1)[0]) == "tma_bad_coordinates"
    half = "setp.lt.u32 %done, %t, 8; @%done"
    assert code_of(scatter(0, writers=half)[0]) == "smem_unwritten_read"
    assert code_of(scatter(0, column=84)[0]) == "tma_misaligned"
