"""tcgen05.ld.red: a load from Tensor Memory that also reduces over columns (sm_103a)."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.emulator.isa.tensor import reduced
from tests.emulator.ptx_harness import run

COLUMNS = 8
SPECIAL = [0x0, 0x80000000, 0x1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345]


def as_float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def expected(column: list[int], op: str, kind: str, absolute: bool, nan: bool) -> int:
    """The PTX ISA's min and max, one value after the other."""
    if kind != "f32":
        values = [x - (1 << 32) if kind == "s32" and x >> 31 else x for x in column]
        return (max(values) if op == "max" else min(values)) & 0xFFFFFFFF
    bits = [x & 0x7FFFFFFF for x in column] if absolute else column
    numbers = [x for x in bits if not math.isnan(as_float(x))]
    if not numbers or (nan and len(numbers) < len(bits)):
        return 0x7FFFFFFF
    keys = {x: (as_float(x), -(x >> 31)) for x in numbers}  # -0 below +0
    return (max if op == "max" else min)(numbers, key=lambda x: keys[x])


def columns(seed: int) -> NDArray[np.uint32]:
    """uint32[COLUMNS, 32]: random bits, a share of special values, a column of NaNs alone."""
    make = np.random.default_rng(seed)
    values = make.integers(0, 1 << 32, (COLUMNS, 32), np.uint64).astype(np.uint32)
    special = make.choice(np.array(SPECIAL, np.uint32), values.shape)
    values = np.where(make.random(values.shape) < 0.4, special, values)
    values[:, 5] = 0x7FC00001
    return values


FORMS = [
    (op, kind, absolute, nan)
    for op in ("min", "max")
    for kind in ("f32", "u32", "s32")
    for absolute in ((False, True) if kind == "f32" else (False,))
    for nan in ((False, True) if kind == "f32" else (False,))
]


@pytest.mark.parametrize(("op", "kind", "absolute", "nan"), FORMS)
def test_reduced(op: str, kind: str, absolute: bool, nan: bool) -> None:
    for seed in range(20):
        values = columns(seed)
        got = reduced(values, op=op, dtype=kind, absolute=absolute, nan=nan)
        want = [expected(list(map(int, c)), op, kind, absolute, nan) for c in values.T]
        assert got.tolist() == want, f"seed {seed}"


BODY = """
.reg .pred %first; .reg .b32 %at, %warp, %lanes;
shr.u32 %warp, %thread_, 5;
setp.eq.u32 %first, %warp, 0;
@!%first bra READY;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [tmem], 32;
READY:
bar.sync 0;
ld.shared.b32 %at, [tmem];
shl.b32 %lanes, %warp, 21;
add.s32 %at, %at, %lanes;
tcgen05.st.sync.aligned.32x32b.x8.b32 [%at + 4], {{{stored}}};
tcgen05.wait::st.sync.aligned;
{instruction} {{{loaded}}}, %best, [%at + 4];
tcgen05.wait::ld.sync.aligned;
bar.sync 0;
@!%first bra DONE;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %at, 32;
DONE:
"""


@pytest.mark.parametrize("form", ["max.f32", "min.abs.NaN.f32", "max.s32"])
def test_instruction(form: str) -> None:
    values = np.concatenate([columns(seed) for seed in range(4)], axis=1)  # 4 warps
    body = BODY.format(
        instruction=f"tcgen05.ld.red.sync.aligned.32x32b.x8.{form}",
        stored=", ".join(f"%in{i}" for i in range(COLUMNS)),
        loaded=", ".join(f"%out{i}" for i in range(COLUMNS)),
    )
    inputs = {f"in{i}": values[i] for i in range(COLUMNS)}
    outputs = {**{f"out{i}": np.uint32 for i in range(COLUMNS)}, "best": np.uint32}
    result = run(body, inputs, outputs, shared=".shared .align 4 .b32 tmem;", gpu="b300")
    assert result.findings == []
    for i in range(COLUMNS):
        np.testing.assert_array_equal(result[f"out{i}"], values[i])
    op, *modifiers, kind = form.split(".")
    want = [
        expected(list(map(int, c)), op, kind, "abs" in modifiers, "NaN" in modifiers)
        for c in values.T
    ]
    assert result["best"].tolist() == want
