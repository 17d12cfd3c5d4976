"""Tensor maps that a kernel changes, in shared or in global memory, and the fences for it."""

from __future__ import annotations

from dataclasses import replace as changed

import numpy as np
import pytest

from kernels.emulator.findings import EmulatorFault
from kernels.emulator.isa.tensor_map import replaced
from kernels.emulator.tensormap import TensorMap
from tests.emulator.cluster_harness import clean, code_of, every_way, launch, module

START = TensorMap(1 << 20, "uint8", (64, 8), (64,), (64, 4), (1, 1))
OTHER = TensorMap(
    3 << 40, "float16", (640, 30, 7, 5, 3), (1 << 36, 32, 1 << 38, 16), (32, 3, 2, 4, 5),
    (1, 2, 3, 1, 8), swizzle_bytes=64, nan_fill=True,
)  # fmt: skip
ATOMS = changed(START, swizzle_bytes=128, swizzle_atom_bytes=32, box=(128, 4))
TF32 = changed(START, dtype="float32", tf32_rounding=True)


def fields(to: TensorMap) -> list[tuple[str, int, int]]:
    """Everything that makes a map of any other: field, ordinal, value (PTX ISA 9.1 table 33)."""
    element = {"uint8": 0, "float16": 6, "float32": 11 if to.tf32_rounding else 7, "4x16": 13,
               "4x16_p64": 14, "6x16_p32": 15}[to.dtype]  # fmt: skip
    out = [("global_address", 0, to.address), ("rank", 0, to.rank - 1), ("elemtype", 0, element)]
    out += [("global_dim", k, n) for k, n in enumerate(to.dims)]
    out += [("box_dim", k, n) for k, n in enumerate(to.box)]
    out += [("element_stride", k, n) for k, n in enumerate(to.element_strides)]
    out += [("global_stride", k, n) for k, n in enumerate(to.strides_bytes)]
    out.append(("swizzle_mode", 0, (0, 32, 64, 128).index(to.swizzle_bytes)))
    out.append(("swizzle_atomicity", 0, {16: 0, 32: 1, 64: 3}[to.swizzle_atom_bytes]))
    return [*out, ("fill_mode", 0, int(to.nan_fill)), ("interleave_layout", 0, 0)]


NARROW = [
    changed(START, dtype=dtype, dims=(256, 8), box=(128, 4), strides_bytes=(192,))
    for dtype in ("4x16", "4x16_p64", "6x16_p32")
]


@pytest.mark.parametrize("to", [OTHER, ATOMS, TF32, *NARROW])
def test_every_field(to: TensorMap) -> None:
    edits = fields(to)
    np.random.default_rng(0).shuffle(edits)
    raw = START.encode(dsl=False)[:64]
    for field, ordinal, value in edits:
        raw = replaced(raw, field, int(ordinal), int(value))
    assert TensorMap.decode(raw) == changed(to, l2_promotion_bytes=START.l2_promotion_bytes)


@pytest.mark.parametrize(
    "field,ordinal,value",
    [("global_stride", 0, 24), ("global_stride", 1, 1 << 40), ("global_dim", 0, 0),
     ("box_dim", 1, 257), ("element_stride", 0, 9)],
)  # fmt: skip
def test_values_that_do_not_fit(field: str, ordinal: int, value: int) -> None:
    with pytest.raises(EmulatorFault, match=field) as caught:
        replaced(START.encode(), field, ordinal, value)
    assert caught.value.code == "tma_bad_tensor_map"


BODY = """
.reg .b32 %t, %base, %bar, %at, %x<4>; .reg .b64 %m, %s, %o, %d, %w; .reg .pred %one, %done, %lanes;
mov.u32 %t, %tid.x; mov.u32 %base, smem; setp.eq.u32 %one, %t, 0; setp.lt.u32 %lanes, %t, 4;
add.u32 %bar, %base, 1024;
@%one mbarrier.init.shared::cta.b64 [%bar], 1;
@%one fence.mbarrier_init.release.cluster;
ld.param.b64 %s, [space]; ld.param.b64 %d, [data]; ld.param.b64 %o, [out];
cvta.param.u64 %m, map_data;
// the map, 16 bytes a lane, as far as they mean something
shl.b32 %at, %t, 4; cvt.u64.u32 %w, %at; add.u64 %m, %m, %w; add.u32 %at, %at, %base;
@%lanes ld.v4.b32 {%x0, %x1, %x2, %x3}, [%m];
<edit>
bar.warp.sync -1;
mov.b32 %x0, 32; mov.b32 %x1, 1;
@%one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 256;
add.u32 %x2, %base, 2048;
<acquire>
@%one cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
  [%x2], [%s, {%x0, %x1}], [%bar];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
@!%done bra WAIT;
shl.b32 %at, %t, 3; cvt.u64.u32 %w, %at; add.u64 %o, %o, %w; add.u32 %at, %at, %x2;
ld.shared.v2.b32 {%x0, %x1}, [%at]; st.global.v2.b32 [%o], {%x0, %x1};
"""
SHARED = """
@%lanes st.shared.v4.b32 [%at], {%x0, %x1, %x2, %x3};
bar.warp.sync -1;
@%one tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%base], %d;
@%one tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%base], 1, 4;
bar.warp.sync -1;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%s], [%base], 128;
"""  # noqa: E501
GLOBAL = """
add.u64 %m, %s, %w;
@%lanes st.global.v4.b32 [%m], {%x0, %x1, %x2, %x3};
bar.warp.sync -1;
@%one tensormap.replace.tile.global_address.global.b1024.b64 [%s], %d;
@%one tensormap.replace.tile.global_dim.b1024.b32 [%s], 1, 4;
<release>
"""
RELEASE = "@%one fence.proxy.tensormap::generic.release.gpu;"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%s], 128;"


def run(edit: str, release: str = RELEASE, acquire: str = ACQUIRE, **way) -> tuple:
    data = np.random.default_rng(1).integers(0, 256, (8, 64), np.uint8)
    space, out = np.zeros(256, np.uint8), np.zeros((4, 64), np.uint8)
    aligned = space[-space.ctypes.data % 128 :][:128]
    text = BODY.replace("<edit>", edit.replace("<release>", release)).replace("<acquire>", acquire)
    ran = launch(
        module("space data out map_data", text, shared=4096),
        [aligned, data, out, changed(START, address=aligned.ctypes.data)], threads=32, **way,
    )  # fmt: skip
    want = np.zeros((4, 64), np.uint8)
    want[:3, :32] = data[1:4, 32:]  # row 4 and columns from 64 on lie outside
    return ran, out, want


@pytest.mark.parametrize("edit", [SHARED, GLOBAL], ids=["shared", "global"])
@every_way
def test_tma_through_a_map_that_was_changed(edit: str, way: dict) -> None:
    for profile in ("silicon", "isa"):
        ran, out, want = run(edit, profile=profile, **way)
        clean(ran)
        assert np.array_equal(out, want)
        for missing in ({"acquire": ""}, {"release": ""})[: 1 + (edit is GLOBAL)]:
            assert code_of(run(edit, profile=profile, **missing, **way)[0]) == (
                "missing_tensormap_fence"
            )


def test_what_a_map_needs() -> None:
    for bad, rule in (
        ("@%one tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%base+64], 1, 4;", None),
        (
            "@%one tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%base], %x0, 4;",
            "operand 2|imm",
        ),
        (
            "@%one tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%base], %x0;",
            "operand 2|imm",
        ),
        (
            "@%one tensormap.replace.tile.global_address.shared::cta.b1024.b32 [%base], %x0;",
            "b64|operand 2|ptx",
        ),
    ):
        if rule is None:
            assert code_of(run(SHARED + bad)[0]) == "tensormap_misaligned"
            continue
        with pytest.raises(Exception, match=rule):
            run(SHARED + bad)
