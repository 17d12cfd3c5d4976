"""tcgen05.cp and the forms of tcgen05.mma as PTX: bulk copies bring operands to shared memory, one
thread copies to Tensor Memory, multiplies and commits, and all read the result.
"""

from __future__ import annotations

import numpy as np
import pytest

from kernels.emulator.engines.tmem_copy import COPIES
from kernels.emulator.findings import UnsupportedPTX
from tests.emulator.cluster_harness import WAYS, clean, code_of, every_way, launch, module
from tests.emulator.test_mma_forms import (
    META,
    PAIRS,
    decode,
    metadata_cells,
    packed_row,
    plain_idesc,
    random_codes,
    scale_codes,
    scaled_idesc,
    scales,
    sparse_a,
)
from tests.emulator.test_tensorcore import BASE, smem_desc

COLUMNS = 64  # that every thread reads back
BARRIERS = 98304  # offset in shared memory


def body(core: str, nbytes: int, ctas: int = 1) -> str:
    """``core``: what thread 0 of the (even) CTA issues, %tm being Tensor Memory's address; each
    CTA copies its own ``nbytes`` of ``data`` to shared memory, its first address being BASE."""
    group, one = f"cta_group::{ctas}", "%one" if ctas == 1 else "%lead"
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    registers = ", ".join(f"%d{i}" for i in range(COLUMNS))
    target = ".multicast::cluster.b64 [%bar+8], %mask" if ctas == 2 else ".b64 [%bar+8]"
    return f"""
.reg .b32 %t, %rank, %base, %bar, %x<4>, %d<{COLUMNS}>, %tm, %w;
.reg .b64 %in, %o, %wide, %dd<4>; .reg .b16 %mask;
.reg .pred %one, %lead, %done, %p, %no, %yes;
mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; mov.u32 %base, smem;
add.u32 %bar, %base, {BARRIERS};
setp.eq.u32 %one, %t, 0; setp.eq.u32 %lead, %rank, 0; and.pred %lead, %lead, %one;
setp.ne.u32 %no, %t, %t; setp.eq.u32 %yes, %t, %t;
ld.param.b64 %in, [data]; ld.param.b64 %o, [out];
@%one mbarrier.init.shared::cta.b64 [%bar], 1;
@%one mbarrier.init.shared::cta.b64 [%bar+8], 1;
@%one fence.mbarrier_init.release.cluster;
setp.lt.u32 %p, %t, 32;
@!%p bra READY;
tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%bar+16], 512;
tcgen05.relinquish_alloc_permit.{group}.sync.aligned;
READY:
tcgen05.fence::before_thread_sync; {meet} tcgen05.fence::after_thread_sync;
ld.shared.b32 %tm, [%bar+16];
shr.u32 %w, %t, 5; shl.b32 %w, %w, 21; add.u32 %w, %w, %tm;
// every lane's cells: 65536 * lane + column
{"".join(f"mad.lo.u32 %d{i}, %t, 65536, {i};" for i in range(COLUMNS))}
tcgen05.st.sync.aligned.32x32b.x64.b32 [%w], {{{registers}}};
tcgen05.wait::st.sync.aligned;
mul.wide.u32 %wide, %rank, {nbytes}; add.u64 %in, %in, %wide;
@%one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {nbytes};
@%one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%base], [%in], {nbytes}, [%bar];
LOADED: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
@!%done bra LOADED;
tcgen05.fence::before_thread_sync; {meet} tcgen05.fence::after_thread_sync;
mov.b16 %mask, 3;
@!{one} bra ISSUED;
{core}
tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster{target};
ISSUED:
DONE: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar+8], 0; //wait
@!%done bra DONE; //wait
tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x64.b32 {{{registers}}}, [%w];
tcgen05.wait::ld.sync.aligned;
mad.lo.u32 %x0, %rank, 128, %t; mul.wide.u32 %wide, %x0, {4 * COLUMNS}; add.u64 %o, %o, %wide;
{"".join(f"st.global.b32 [%o+{4 * i}], %d{i};" for i in range(COLUMNS))}
LATE: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar+8], 0;
@!%done bra LATE;
tcgen05.fence::before_thread_sync; {meet} tcgen05.fence::after_thread_sync;
setp.ge.u32 %p, %t, 32;
@%p bra END;
tcgen05.dealloc.{group}.sync.aligned.b32 %tm, 512;
END:
"""  # noqa: E501


def run(core: str, data: np.ndarray, ctas: int = 1, drop: str = "", **way) -> tuple:
    """The launch, and what each CTA's lanes read: uint32[ctas, 128, COLUMNS]."""
    out = np.zeros((ctas, 128, COLUMNS), np.uint32)
    lines = body(core, data.nbytes // ctas, ctas).splitlines()
    text = "\n".join(line for line in lines if not drop or drop not in line)
    ran = launch(
        module("data out", text, shared=100 * 1024), [data, out], threads=128,
        grid=ctas, cluster=ctas, **way,
    )  # fmt: skip
    return ran, out


def untouched(ctas: int = 1) -> np.ndarray:
    cells = 65536 * np.arange(128)[:, None] + np.arange(COLUMNS)
    return np.tile(cells.astype(np.uint32), (ctas, 1, 1))


def moved(name: str, value: str) -> str:
    return f"mov.b64 %{name}, {value};"


# -- tcgen05.cp -----------------------------------------------------------------------------------


def lanes_of(shape: str, row: int) -> list[int]:
    """Where a row goes, PTX ISA 9.1 section 9.7.16.9.2."""
    if shape.startswith("128x"):
        return [row]
    if shape == "4x256b":
        return [32 * row + 7]
    if shape == "32x128b.warpx4":
        return [row + 32 * warp for warp in range(4)]
    warps = ((0, 2), (1, 3)) if shape.endswith("02_13") else ((0, 1), (2, 3))
    return [32 * warp + row % 32 for warp in warps[row // 32]]


@pytest.mark.parametrize("packing", ["", ".b8x16.b4x16_p64", ".b8x16.b6x16_p32"])
@pytest.mark.parametrize("shape", list(COPIES))
@pytest.mark.parametrize("ctas", [1, 2])
def test_copies(shape: str, packing: str, ctas: int) -> None:
    rng = np.random.default_rng([len(shape), len(packing), ctas])
    data = rng.integers(0, 256, (ctas, 16384), np.uint8)
    leading, stride, start = 4864, 256, 512
    rows, size = int(shape.split("x")[0]), 32 if "256b" in shape else 16
    lane = 7 if shape == "4x256b" else 0
    desc = smem_desc(BASE + start, leading, stride, 1)
    core = f"""add.u32 %x0, %tm, {lane << 16 | 5}; {moved("dd0", f"{desc}")}
    tcgen05.cp.cta_group::{ctas}.{shape}{packing} [%x0], %dd0;"""
    ran, out = run(core, data, ctas)
    clean(ran)
    want = untouched(ctas)
    for cta in range(ctas):
        for row in range(rows):
            at = start + 16 * (row % 8) + stride * (row // 8)
            chunks = [data[cta, at + leading * j :][:16].tobytes() for j in range(size // 16)]
            if packing:
                bits, up = (4, 2) if "b4x16" in packing else (6, 1)
                numbers = [int.from_bytes(chunk, "little") for chunk in chunks]
                codes = [n >> bits * k & (1 << bits) - 1 for n in numbers for k in range(16)]
                chunks = [bytes(code << up for code in codes)]
            for place in lanes_of(shape, row):
                words = np.frombuffer(b"".join(chunks), np.uint32)
                want[cta, place, 5 : 5 + len(words)] = words
    assert np.array_equal(out, want)


def test_a_swizzled_source() -> None:
    data = np.random.default_rng(0).integers(0, 256, (1, 16384), np.uint8)
    desc = smem_desc(BASE + 64, 16, 1024, 8)  # 32 bytes of each 128-byte row, from its middle
    ran, out = run(
        f"{moved('dd0', f'{desc}')} tcgen05.cp.cta_group::1.128x256b [%tm], %dd0;", data
    )  # fmt: skip
    clean(ran)
    rows = data.reshape(128, 8, 16)
    for row in range(128):
        chunks = rows[row, [4 ^ row % 8, 5 ^ row % 8]]
        assert np.array_equal(out[0, row, :8], chunks.reshape(-1).view(np.uint32))


def test_what_copies_refuse() -> None:
    data = np.zeros((1, 1024), np.uint8)
    for shape, address, drop in (
        ("32x128b.warpx4", 16 << 16, "tmem_lane_access"),
        ("4x256b", 32 << 16, "tmem_lane_access"),
        ("128x128b", 510, "tmem_out_of_bounds"),
        ("128x256b", 0, "smem_unwritten_read"),
        ("32x128b.warpx4", 0x80, "smem_out_of_bounds"),
    ):
        desc = smem_desc(BASE if address != 0x80 else 0x3FF80, 128, 256, 1)
        core = f"""add.u32 %x0, %tm, {address}; {moved("dd0", f"{desc}")}
        tcgen05.cp.cta_group::1.{shape} [%x0], %dd0;"""
        assert code_of(run(core, data)[0]) == drop


# -- MMAs, with what they need copied in the same pipeline ----------------------------------------


def scaled_problem(ctas: int) -> tuple[str, np.ndarray, np.ndarray]:
    """mxf4nvf4, blocks of 16, factors of ue4m3: the core, the data of each CTA, and D."""
    rng = np.random.default_rng(ctas)
    m, n = 128 * ctas, COLUMNS
    of_a, of_b = random_codes(rng, "e2m1x2", (m, 64)), random_codes(rng, "e2m1x2", (n, 64))
    s_a, s_b = scale_codes(rng, "ue4m3", (m, 4)), scale_codes(rng, "ue4m3", (128, 4))
    data = []
    for k in range(ctas):
        share = n // ctas
        parts = []
        for codes in (of_a[128 * k : 128 * (k + 1)], of_b[share * k : share * (k + 1)]):
            rows = np.array([np.frombuffer(packed_row(row, "e2m1x2"), np.uint8) for row in codes])
            parts.append(rows.reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3).reshape(-1))
        for factors in (s_a[128 * k : 128 * (k + 1)], s_b):
            # 32 rows of 16 bytes: four factors of rows r, r + 32, r + 64 and r + 96
            rows = factors.astype(np.uint8).reshape(4, 32, 4).transpose(1, 0, 2)
            parts.append(np.ascontiguousarray(rows).reshape(-1))
        data.append(np.concatenate(parts))
    b_at = BASE + 128 * 32
    sa_at = b_at + n // ctas * 32
    idesc = scaled_idesc(m, n, "e2m1x2", "e2m1x2", "ue4m3", 0, 0, False)
    core = f"""
    {moved("dd0", str(smem_desc(BASE, 128, 256, 1)))} {moved("dd1", str(smem_desc(b_at, 128, 256, 1)))}
    {moved("dd2", str(smem_desc(sa_at, 128, 128, 1)))}
    {moved("dd3", str(smem_desc(sa_at + 512, 128, 128, 1)))}
    add.u32 %x0, %tm, 256; add.u32 %x1, %tm, 260; mov.b32 %x2, {idesc};
    tcgen05.cp.cta_group::{ctas}.32x128b.warpx4 [%x0], %dd2;
    tcgen05.cp.cta_group::{ctas}.32x128b.warpx4 [%x1], %dd3;
    tcgen05.mma.cta_group::{ctas}.kind::mxf4nvf4.block_scale.block16.collector::a::discard [%tm], %dd0, %dd1, %x2, [%x0], [%x1], %no;
    tcgen05.mma.cta_group::{ctas}.kind::mxf4nvf4.block_scale.scale_vec::4X [%tm], %dd0, %dd1, %x2, [%x0], [%x1], %yes;
    """  # noqa: E501
    left = decode(of_a, "e2m1x2") * np.repeat(scales(s_a, "ue4m3"), 16, axis=1)
    right = decode(of_b, "e2m1x2") * np.repeat(scales(s_b[:n], "ue4m3"), 16, axis=1)
    return core, np.array(data), 2 * left @ right.T


@every_way
@pytest.mark.parametrize("ctas", [1, 2])
def test_scale_factors_are_copied_ahead_of_the_mma(ctas: int, way: dict) -> None:
    core, data, want = scaled_problem(ctas)
    for profile in ("silicon", "isa"):
        ran, out = run(core, data, ctas, profile=profile, seed=1, **way)
        clean(ran)
        assert np.array_equal(out.view(np.float32).reshape(-1, COLUMNS), want.astype(np.float32))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_commit_covers_copies(way: dict) -> None:
    """Without the wait for it, reading what a copy writes is a finding."""
    desc = smem_desc(BASE, 128, 256, 1)
    core = f"{moved('dd0', f'{desc}')} tcgen05.cp.cta_group::1.128x256b [%tm], %dd0;"
    data = np.zeros((1, 4096), np.uint8)
    clean(run(core, data, **way)[0])
    for profile in ("silicon", "isa"):
        ran, _ = run(core, data, drop="//wait", profile=profile, **way)
        assert code_of(ran) in ("tmem_access_before_commit", "tcgen05_ld_not_waited")


def k_major(codes: np.ndarray, dtype: str) -> np.ndarray:
    rows = np.array([np.frombuffer(packed_row(row, dtype), np.uint8) for row in codes])
    return rows.reshape(len(rows) // 8, 8, -1, 16).transpose(0, 2, 1, 3).reshape(-1)


def test_integers_and_lanes_that_are_disabled() -> None:
    rng = np.random.default_rng(3)
    of_a, of_b = random_codes(rng, "s8", (128, 32)), random_codes(rng, "u8", (64, 32))
    data = np.concatenate((k_major(of_a, "s8"), k_major(of_b, "u8")))[None]
    core = f"""
    {moved("dd0", str(smem_desc(BASE, 128, 256, 1)))}
    {moved("dd1", str(smem_desc(BASE + 4096, 128, 256, 1)))}
    mov.b32 %x2, {plain_idesc(128, 64, "s8", "u8", 2)}; mov.b32 %x3, 0xf0;
    tcgen05.mma.cta_group::1.kind::i8 [%tm], %dd0, %dd1, %x2, {{%x3, %x3, 0, 0}}, %no;
    tcgen05.mma.cta_group::1.kind::i8.collector::a::fill [%tm], %dd0, %dd1, %x2, %yes;
    """
    ran, out = run(core, data)
    clean(ran)
    product = (decode(of_a, "s8") @ decode(of_b, "u8").T).astype(np.int64)
    off = np.array([lane < 64 and lane % 32 in (4, 5, 6, 7) for lane in range(128)])
    start = untouched()[0].astype(np.int64)
    assert np.array_equal(out[0].view(np.int32), product + np.where(off[:, None], start, product))


def test_a_sparse_mma_with_metadata_that_were_copied() -> None:
    rng = np.random.default_rng(4)
    stored, of_b = random_codes(rng, "f16", (128, 16)), random_codes(rng, "f16", (64, 32))
    whole, indices = sparse_a(rng, stored, "f16")
    assert len(PAIRS) == 7
    cells = np.zeros((128, 4), np.uint32)
    cells[:, 0] = metadata_cells(indices, "f16")[0]
    meta = cells.view(np.uint8).reshape(-1)
    data = np.concatenate((k_major(stored, "f16"), k_major(of_b, "f16"), meta))[None]
    core = f"""
    {moved("dd0", str(smem_desc(BASE, 128, 256, 1)))}
    {moved("dd1", str(smem_desc(BASE + 4096, 128, 512, 1)))}
    {moved("dd2", str(smem_desc(BASE + 8192, 128, 128, 1)))}
    mov.b32 %x2, {plain_idesc(128, 64, "f16", "f16", 1, sparse=1)}; add.u32 %x0, %tm, {META};
    tcgen05.cp.cta_group::1.128x128b [%x0], %dd2;
    tcgen05.mma.sp.cta_group::1.kind::f16 [%tm], %dd0, %dd1, [%x0], %x2, %no;
    tcgen05.mma.sp.cta_group::1.kind::f16.collector::a::use [%tm], %dd0, %dd1, [%x0], %x2, %yes, 1;
    """
    ran, out = run(core, data)
    clean(ran)
    assert np.array_equal(out[0].view(np.float32), 1.5 * (whole @ of_b.T))


def test_weight_stationary() -> None:
    rng = np.random.default_rng(5)
    of_a, of_b = random_codes(rng, "f16", (32, 16)), random_codes(rng, "f16", (256, 16))
    data = np.concatenate((k_major(of_a, "f16"), k_major(of_b, "f16")))[None]
    core = f"""
    {moved("dd0", str(smem_desc(BASE, 128, 256, 1)))}
    {moved("dd1", str(smem_desc(BASE + 1024, 128, 256, 1)))}
    mov.b32 %x2, {plain_idesc(32, 256, "f16", "f16")};
    tcgen05.mma.ws.cta_group::1.kind::f16.collector::b2::fill [%tm], %dd0, %dd1, %x2, %no;
    tcgen05.mma.ws.cta_group::1.kind::f16.collector::b2::lastuse [%tm], %dd0, %dd1, %x2, %yes, %dd2;
    """
    with pytest.raises(UnsupportedPTX, match="zero-column"):
        run(core.replace("mov.b32 %x2", f"{moved('dd2', str(1 << 39))} mov.b32 %x2"), data)
    core = core.replace("mov.b32 %x2", f"{moved('dd2', '0')} mov.b32 %x2")
    ran, out = run(core, data)
    clean(ran)
    want = 2 * (of_a @ of_b.T).reshape(32, 4, 64).transpose(1, 0, 2).reshape(128, 64)
    assert np.array_equal(out[0].view(np.float32), want)
