"""Bulk copies and reductions by their instructions: linear, tiles, multicast, pair barriers."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.emulator.findings import UnsupportedPTX
from kernels.emulator.tensormap import TensorMap
from tests.emulator.cluster_harness import clean, code_of, every_way, launch, module

CTAS = 4
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
HEAD = """
.reg .b32 %t, %rank, %base, %bar, %at, %far, %x<8>; .reg .b64 %d, %o, %w, %m; .reg .b16 %mask;
.reg .pred %p, %first, %done;
mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; mov.u32 %base, smem;
setp.eq.u32 %first, %t, 0; add.u32 %bar, %base, 4096;
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
@%first fence.mbarrier_init.release.cluster;
"""
SPIN = """
SPIN: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
@!%done bra SPIN;
"""
# Each thread copies 32 bytes of the CTA's 1024 to its row of the output.
OUT = """
ld.param.b64 %o, [out]; mad.lo.u32 %x0, %rank, 32, %t; mul.wide.u32 %w, %x0, 32;
add.u64 %o, %o, %w;
shl.b32 %at, %t, 5; add.u32 %at, %at, %base;
ld.shared.v4.b32 {%x0, %x1, %x2, %x3}, [%at]; st.global.v4.b32 [%o], {%x0, %x1, %x2, %x3};
ld.shared.v4.b32 {%x0, %x1, %x2, %x3}, [%at+16]; st.global.v4.b32 [%o+16], {%x0, %x1, %x2, %x3};
"""


def fill(text: str, **parts: object) -> str:
    for name, part in parts.items():
        text = text.replace(f"<{name}>", str(part))
    return text


def random_bytes(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


LOAD = f"""{HEAD}
ld.param.b64 %d, [data]; mul.wide.u32 %w, %rank, 1024; add.u64 %d, %d, %w;
{MEET}
@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], <expect>;
<copy>
{SPIN}{OUT}{MEET}
"""
PLAIN = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


@every_way
def test_a_linear_copy_from_global_memory(way: dict) -> None:
    data = random_bytes(CTAS, 1024)

    def run(expect: int, copy: str):  # type: ignore[no-untyped-def]
        out = np.zeros_like(data)
        text = module("data out", fill(LOAD, expect=expect, copy=copy), shared=8192)
        return launch(text, [data, out], grid=CTAS, cluster=CTAS, **way), out

    ran, out = run(1024, f"@%first {PLAIN} [%base], [%d], 1024, [%bar];")
    clean(ran)
    assert np.array_equal(out, data)
    assert code_of(run(1040, f"@%first {PLAIN} [%base], [%d], 1024, [%bar];")[0]) == "deadlock"
    assert (
        code_of(run(1024, f"@%first {PLAIN} [%base], [%d], 1032, [%bar];")[0]) == "tma_misaligned"
    )


@every_way
def test_a_linear_copy_to_all(way: dict) -> None:
    """Each CTA brings a quarter and sends it to everybody."""
    data, out = random_bytes(1024), np.zeros((CTAS, 1024), np.uint8)
    copy = f"""
mul.lo.u32 %x0, %rank, 256; add.u32 %at, %base, %x0; mov.b16 %mask, 15;
ld.param.b64 %d, [data]; cvt.u64.u32 %w, %x0; add.u64 %d, %d, %w;
@%first {PLAIN}.multicast::cluster [%at], [%d], 256, [%bar], %mask;
"""
    text = module("data out", fill(LOAD, expect=1024, copy=copy), shared=8192)
    clean(launch(text, [data, out], grid=CTAS, cluster=CTAS, **way))
    assert (out == data).all()
    few = module("data out", fill(LOAD, expect=1024, copy=copy.replace("15", "7")), shared=8192)
    assert code_of(launch(few, [data, out], grid=CTAS, cluster=CTAS, **way)) == "deadlock"


PEER = f"""{HEAD}
ld.param.b64 %d, [data]; mul.wide.u32 %w, %rank, 1024; add.u64 %d, %d, %w;
mul.wide.u32 %w, %t, 32; add.u64 %d, %d, %w; shl.b32 %at, %t, 5; add.u32 %at, %at, %base;
ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%d];
st.shared.v4.b32 [%at+1024], {{%x0, %x1, %x2, %x3}};
ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%d+16];
st.shared.v4.b32 [%at+1040], {{%x0, %x1, %x2, %x3}};
fence.proxy.async.shared::cta;
{MEET}
add.u32 %x4, %rank, 1; and.b32 %x4, %x4, 3; add.u32 %x6, %base, 1024;
mapa.shared::cluster.u32 %far, %base, %x4; mapa.shared::cluster.u32 %x5, %bar, %x4;
@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 1024;
@%first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
  [%far], [%x6], 1024, [%x5];
{SPIN}{OUT}{MEET}
"""


@every_way
def test_a_copy_to_the_next_cta(way: dict) -> None:
    data = random_bytes(CTAS, 1024)

    def run(body: str):  # type: ignore[no-untyped-def]
        out = np.zeros_like(data)
        text = module("data out", body, shared=8192)
        return launch(text, [data, out], grid=CTAS, cluster=CTAS, **way), out

    ran, out = run(PEER)
    clean(ran)
    assert np.array_equal(out, np.roll(data, 1, axis=0))
    assert (
        code_of(run(PEER.replace("fence.proxy.async.shared::cta;", ""))[0]) == "missing_proxy_fence"
    )
    assert code_of(run(PEER.replace(SPIN, ""))[0]) in ("tma_load_not_waited", "smem_unwritten_read")
    wrong = run(PEER.replace("1024, [%x5]", "1024, [%bar]"))[0]
    assert code_of(wrong) == "tma_barrier_elsewhere"


REDUCE = """
.reg .b32 %t, %base, %at, %x<4>; .reg .b64 %d, %o, %w, %m; .reg .pred %p;
mov.u32 %t, %tid.x; mov.u32 %base, smem; setp.eq.u32 %p, %t, 0;
ld.param.b64 %d, [data]; ld.param.b64 %o, [out]; mul.wide.u32 %w, %t, 16; add.u64 %d, %d, %w;
shl.b32 %at, %t, 4; add.u32 %at, %at, %base;
ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%d]; st.shared.v4.b32 [%at], {{%x0, %x1, %x2, %x3}};
{fence}
bar.sync 0;
@%p {op};
@%p cp.async.bulk.commit_group;
@%p cp.async.bulk.wait_group 0;
"""
LINEAR = "cp.reduce.async.bulk.global.shared::cta.bulk_group.{op} [%o], [%base], 512"
FENCE = "fence.proxy.async.shared::cta;"


def reduced(op: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    if op in ("inc", "dec"):
        step = {"inc": lambda o, b: 0 if o >= b else o + 1,
                "dec": lambda o, b: b if o == 0 or o > b else o - 1}[op]  # fmt: skip
        pairs = zip(old.tolist(), new.tolist(), strict=True)
        return np.array([step(o, b) for o, b in pairs], old.dtype)
    table = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
             "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip
    return table[op](old, new)


@pytest.mark.parametrize(
    "op,kind",
    [("add", "u32"), ("add", "s32"), ("add", "u64"), ("min", "s32"), ("max", "u32"),
     ("max", "s64"), ("and", "b32"), ("or", "b64"), ("xor", "b32"), ("inc", "u32"),
     ("dec", "u32"), ("add", "f32"), ("add", "f64")],
)  # fmt: skip
def test_linear_reductions(op: str, kind: str) -> None:
    dtype = {"u": "u", "s": "i", "b": "u", "f": "f"}[kind[0]] + str(int(kind[1:]) // 8)
    rng, n = np.random.default_rng([len(op), len(kind)]), 512 // np.dtype(dtype).itemsize
    if kind[0] == "f":
        data, out = (rng.standard_normal(n).astype(dtype) for _ in range(2))
    else:
        info = np.iinfo(dtype)
        data, out = (rng.integers(info.min, info.max, n, dtype, True) for _ in range(2))
        data[::5] = out[::5]
    with np.errstate(over="ignore"):
        want = reduced(op, out, data)
    body = REDUCE.format(fence=FENCE, op=LINEAR.format(op=f"{op}.{kind}"))
    clean(launch(module("data out", body, shared=512), [data, out], visibility="late"))
    assert out.tobytes() == want.tobytes()


def halves(values: np.ndarray, kind: str) -> np.ndarray:
    """Bits of a 16-bit float type; rounds to nearest even."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def wide(bits: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_sums_round_once(kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    scale = 2.0 ** rng.integers(-8, 8, 256)
    data, out = (halves((rng.standard_normal(256) * scale), kind) for _ in range(2))
    exact = wide(data, kind) + wide(out, kind)
    body = REDUCE.format(fence=FENCE, op=LINEAR.format(op=f"add.noftz.{kind}"))
    clean(launch(module("data out", body, shared=512), [data, out]))
    got = wide(out, kind)
    around = np.stack([wide(out + np.uint16(d), kind) for d in (1, 65535)])
    assert (np.abs(got - exact) <= np.abs(around - exact)).all()  # no neighbour is nearer
    even = (np.abs(got - exact) == np.abs(around - exact)).any(axis=0)
    assert even.any() and (out[even] & 1 == 0).all()  # ties to even


def test_reductions_need_the_fence_and_the_wait() -> None:
    data, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    op = LINEAR.format(op="add.u32")
    ran = launch(module("data out", REDUCE.format(fence="", op=op), shared=512), [data, out])
    assert code_of(ran) == "missing_proxy_fence"
    body = REDUCE.format(fence=FENCE, op=op).replace("@%p cp.async.bulk.wait_group 0;", "")
    ran = launch(module("data out", body, shared=512), [data, out])
    assert code_of(ran) == "exit_with_work_in_flight"


TILE = (
    "cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group"
    " [%m, {{%x0, %x1}}], [%base]"
)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint32"])
@pytest.mark.parametrize("op", ["add", "max"])
def test_tile_reductions_are_clipped(dtype: str, op: str) -> None:
    """An 8-row tile at (-0, 4) of a tensor of 10 rows: two rows fall outside."""
    size = 4 if dtype in ("float32", "uint32") else 2
    columns = 64 // size
    rng = np.random.default_rng(size)
    small = rng.integers(0, 50, (18, columns))
    kind = {"float16": "f16", "bfloat16": "bf16"}.get(dtype)
    if kind is None:
        typed = small.astype(dtype)
    else:
        typed = halves(small.astype(np.float64), kind)
    data, out = typed[:8].copy(), typed[8:].copy()
    want = small[8:].copy()
    want[4:10] = reduced(op, want[4:10], small[:6])
    tmap = TensorMap(
        address=out.ctypes.data,
        dtype=dtype,
        dims=(columns, 10),
        strides_bytes=(64,),
        box=(columns, 8),
        element_strides=(1, 1),
        swizzle_bytes=0,
    )
    start = "mov.b32 %x0, 0; mov.b32 %x1, 4; cvta.param.u64 %m, map_out;\n@%p "
    body = REDUCE.format(fence=FENCE, op=TILE.format(op=op)).replace(
        "@%p cp.reduce", start + "cp.reduce"
    )
    text = module("data out map_out", body, shared=512)
    if (dtype, op) == ("float32", "max"):  # the ISA has no such reduction
        with pytest.raises(UnsupportedPTX):
            launch(text, [data, out, tmap], memory=[out])
        return
    clean(launch(text, [data, out, tmap], memory=[out]))
    got = out if kind is None else wide(out, kind)
    assert np.array_equal(got.astype(np.int64), want)


# -- tiles to several CTAs -----------------------------------------------------------------------

TILES = f"""{HEAD}
{MEET}
@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], <expect>;
mov.b32 %x0, 0; shl.b32 %x1, %rank, 2; mul.lo.u32 %x2, %rank, 256; add.u32 %at, %base, %x2;
mov.b16 %mask, <mask>; cvta.param.u64 %m, map_data;
<barrier>
@%first cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes<how>
  [%at], [%m, {{%x0, %x1}}], [%x3], %mask;
<wait>{OUT}{MEET}
"""
SAME = "mov.b32 %x3, %bar;"
EVEN = "and.b32 %x3, %bar, 0xfeffffff;"  # CUTLASS: the even CTA's barrier


def tile_map(data: np.ndarray) -> TensorMap:
    return TensorMap(data.ctypes.data, "uint8", (64, 16), (64,), (64, 4), (1, 1))


@every_way
def test_a_tile_for_every_cta(way: dict) -> None:
    """Four CTAs bring four rows each of 16 and give them to all."""
    data = random_bytes(16, 64)

    def run(**parts):  # type: ignore[no-untyped-def]
        parts = {"expect": 1024, "mask": 15, "barrier": SAME, "how": ".multicast::cluster",
                 "wait": SPIN, **parts}  # fmt: skip
        out = np.zeros((CTAS, 1024), np.uint8)
        text = module("data out map_data", fill(TILES, **parts), shared=8192)
        ran = launch(
            text, [data, out, tile_map(data)], memory=[data], grid=CTAS, cluster=CTAS, **way
        )
        return ran, out

    ran, out = run()
    clean(ran)
    assert (out == data.reshape(-1)).all()
    assert code_of(run(mask=13)[0]) == "deadlock"
    assert code_of(run(mask=16)[0]) == "cluster_bad_mask"
    assert code_of(run(wait="")[0]) in ("tma_load_not_waited", "smem_unwritten_read")
    other = "mov.b32 %x4, 2; mapa.shared::cluster.u32 %x3, %bar, %x4;"
    # Without multicast data and barrier belong to one CTA; with it the mask alone decides.
    assert code_of(run(barrier=other)[0]) == "ok"


@every_way
def test_a_pair_reports_to_its_even_cta(way: dict) -> None:
    """With cta_group::2 the bytes of both CTAs count on the even CTA's barrier."""
    data = random_bytes(16, 64)
    body = f"""{HEAD}
{MEET}
setp.eq.u32 %p, %rank, 0; and.pred %p, %p, %first;
@%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;
mov.b32 %x0, 0; shl.b32 %x1, %rank, 2; cvta.param.u64 %m, map_data;
{EVEN}
@%first cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes
  [%base], [%m, {{%x0, %x1}}], [%x3];
setp.ne.u32 %p, %rank, 0; @%p bra DONE;
{SPIN}
DONE:
{MEET}
ld.param.b64 %o, [out]; mad.lo.u32 %x0, %rank, 32, %t; mul.wide.u32 %w, %x0, 8;
add.u64 %o, %o, %w; shl.b32 %at, %t, 3; add.u32 %at, %at, %base;
ld.shared.v2.b32 {{%x0, %x1}}, [%at]; st.global.v2.b32 [%o], {{%x0, %x1}};
"""

    def run(text: str):  # type: ignore[no-untyped-def]
        out = np.zeros((2, 256), np.uint8)
        text = module("data out map_data", text, shared=8192)
        return launch(
            text, [data, out, tile_map(data)], memory=[data], grid=2, cluster=2, **way
        ), out

    ran, out = run(body)
    clean(ran)
    assert np.array_equal(out.reshape(-1), data[:8].reshape(-1))
    assert code_of(run(body.replace(".cta_group::2", ""))[0]) == "tma_barrier_elsewhere"
    assert (
        code_of(
            run(body.replace("bytes\n", "bytes.cta_group::2\n").replace("2d.cta_group::2", "2d"))[0]
        )
        == "ok"
    )
    assert code_of(run(body.replace(EVEN, SAME))[0]) in (
        "deadlock",
        "mbarrier_overflow",
        "mbarrier_tx_overflow",
    )


# float32 bits and what an H200's TMA makes of them through a map of tf32.
TF32 = np.array(
    [
        (0x3F801000, 0x3F800000), (0x3F803000, 0x3F804000), (0x3F800FFF, 0x3F800000),
        (0x3F801001, 0x3F802000), (0xBF801000, 0xBF800000), (0xBF803000, 0xBF804000),
        (0x3FFFFFFF, 0x40000000), (0x7F7FFFFF, 0x7F800000), (0xFF7FFFFF, 0xFF800000),
        (0x7F800000, 0x7F800000), (0x7F800001, 0x7FFFE000), (0x7FC00000, 0x7FFFE000),
        (0x7FFFFFFF, 0x7FFFE000), (0xFFC01234, 0x7FFFE000), (0x00000001, 0x00000000),
        (0x00001000, 0x00000000), (0x00003000, 0x00004000), (0x007FFFFF, 0x00800000),
        (0x80001000, 0x80000000), (0x7F801000, 0x7FFFE000), (0xFF800001, 0x7FFFE000),
        (0x7F7FF000, 0x7F800000), (0x7F7FEFFF, 0x7F7FE000), (0x64E6F5F0, 0x64E70000),
    ],
    np.uint32,
)  # fmt: skip


def test_a_map_of_tf32_rounds() -> None:
    from kernels.emulator.engines import load_tile
    from kernels.emulator.memory import GlobalMemory, SharedMemory

    source = np.ascontiguousarray(TF32[:, 0]).reshape(3, 8)
    gmem, smem = GlobalMemory(), SharedMemory(1024)
    gmem.add_array(source)
    tmap = TensorMap(
        source.ctypes.data, "float32", (8, 3), (32,), (8, 4), (1, 1), tf32_rounding=True
    )
    load_tile(tmap, (0, 0), gmem, smem, 1024)
    got = smem.read_bytes(1024, 128).view(np.uint32)
    assert np.array_equal(got[:24], TF32[:, 1])
    assert (got[24:] == 0).all()
