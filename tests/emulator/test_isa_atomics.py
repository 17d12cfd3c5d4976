"""atom and red against one-at-a-time Python, with lanes that collide."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest

from kernels.emulator.ptx import PTXSyntaxError
from tests.emulator.cluster_harness import clean, code_of, every_way, launch, module

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> bits - 1 else x


INTEGER: dict[str, Callable[[int, int, int, bool], int]] = {
    "add": lambda old, b, bits, s: old + b & (1 << bits) - 1,
    "and": lambda old, b, bits, s: old & b,
    "or": lambda old, b, bits, s: old | b,
    "xor": lambda old, b, bits, s: old ^ b,
    "exch": lambda old, b, bits, s: b,
    "inc": lambda old, b, bits, s: 0 if old >= b else old + 1,
    "dec": lambda old, b, bits, s: b if old == 0 or old > b else old - 1,
    "min": lambda old, b, bits, s: min(old, b, key=lambda v: signed(v, bits) if s else v),
    "max": lambda old, b, bits, s: max(old, b, key=lambda v: signed(v, bits) if s else v),
}
FORMS = [
    ("add", "u32"), ("add", "s32"), ("add", "u64"), ("and", "b32"), ("or", "b64"), ("xor", "b32"),
    ("exch", "b32"), ("exch", "b64"), ("inc", "u32"), ("dec", "u32"), ("min", "s32"),
    ("min", "u32"), ("max", "s64"), ("max", "u64"),
]  # fmt: skip


def body(space: str, op: str, kind: str, order: str, cells: int, returns: bool) -> str:
    width = int(kind[1:])
    reg, nb = f"b{width}", width // 8
    shared = space.startswith("shared")
    text = f"""
.reg .b32 %t, %i, %base, %x<2>; .reg .{reg} %v, %old; .reg .b64 %a, %m, %o, %k, %w, %at;
mov.u32 %t, %tid.x; ld.param.b64 %a, [values]; ld.param.b64 %m, [memory];
ld.param.b64 %o, [old]; ld.param.b64 %k, [index]; mov.u32 %base, smem;
mul.wide.u32 %w, %t, {nb}; add.u64 %a, %a, %w; add.u64 %o, %o, %w; ld.global.{reg} %v, [%a];
mul.wide.u32 %w, %t, 4; add.u64 %k, %k, %w; ld.global.b32 %i, [%k];
mul.wide.u32 %w, %t, {nb}; add.u64 %at, %m, %w;
"""
    if shared:
        text += f"""
cvt.u64.u32 %w, %base; cvta.shared.u64 %w, %w;
mul.lo.u32 %x0, %t, {nb}; add.u32 %x0, %x0, %base;
ld.global.{reg} %old, [%at]; st.shared.{reg} [%x0], %old; bar.sync 0;
mul.lo.u32 %x1, %i, {nb}; add.u32 %x1, %x1, %base;
"""
        place = "%x1"
    else:
        text += f"mul.wide.u32 %w, %i, {nb}; add.u64 %w, %w, %m;\n"
        place = "%w"
    name = f".{space}" if space != "generic" else ""
    if returns:
        text += f"atom{order}{name}.{op}.{kind} %old, [{place}], %v;\nst.global.{reg} [%o], %old;\n"
    else:
        text += f"red{order}{name}.{op}.{kind} [{place}], %v;\n"
    if shared:
        text += f"bar.sync 0; ld.shared.{reg} %old, [%x0]; st.global.{reg} [%at], %old;\n"
    return text


@pytest.mark.parametrize("space", ["global", "shared", "generic", "shared::cluster"])
@pytest.mark.parametrize(
    "op,kind,returns",
    [
        (*form, returns)
        for form in FORMS
        for returns in (True, False)
        if returns or form[0] != "exch"
    ],
)
def test_integers(op: str, kind: str, space: str, returns: bool) -> None:
    rng = np.random.default_rng([len(op), len(kind), len(space)])
    bits = int(kind[1:])
    dtype = np.uint32 if bits == 32 else np.uint64
    values = rng.integers(0, 1 << bits, 32, dtype) >> dtype(rng.integers(0, 8))
    memory = rng.integers(0, 1 << bits, 32, dtype)
    memory[:4] = 0
    index = rng.integers(0, 6, 32).astype(np.uint32)  # many lanes to few cells
    old, want, expected_old = np.zeros(32, dtype), memory.copy(), np.zeros(32, dtype)
    order = (".relaxed.gpu", ".acq_rel.cta", "")[len(op) % 3] if returns else ".release.gpu"
    text = module("values memory old index", body(space, op, kind, order, 64, returns), shared=512)
    clean(launch(text, [values, memory, old, index], threads=32))
    for lane in range(32):
        at = int(index[lane])
        expected_old[lane] = want[at]
        want[at] = INTEGER[op](int(want[at]), int(values[lane]), bits, kind[0] == "s")
    assert np.array_equal(memory, want)
    if returns:
        assert np.array_equal(old, expected_old)


def test_cas_takes_turns() -> None:
    """Every lane compares with 0: the first lane of each cell wins, the others see its value."""
    values = np.arange(100, 132, dtype=np.uint32)
    index, memory = (np.arange(32, dtype=np.uint32) * 7) % 5, np.zeros(8, np.uint32)
    memory[3] = 77
    old = np.full(32, 9, np.uint32)
    text = """
.reg .b32 %t, %i, %v, %old; .reg .b64 %a, %m, %o, %k, %w;
mov.u32 %t, %tid.x; ld.param.b64 %a, [values]; ld.param.b64 %m, [memory];
ld.param.b64 %o, [old]; ld.param.b64 %k, [index];
mul.wide.u32 %w, %t, 4; add.u64 %a, %a, %w; add.u64 %o, %o, %w; add.u64 %k, %k, %w;
ld.global.b32 %v, [%a]; ld.global.b32 %i, [%k]; mul.wide.u32 %w, %i, 4; add.u64 %m, %m, %w;
atom.acquire.gpu.global.cas.b32 %old, [%m], 0, %v;
st.global.b32 [%o], %old;
"""
    clean(launch(module("values memory old index", text), [values, memory, old, index]))
    want = np.zeros(8, np.uint32)
    want[3] = 77
    for lane in range(32):
        assert old[lane] == want[index[lane]]
        if want[index[lane]] == 0:
            want[index[lane]] = values[lane]
    assert np.array_equal(memory, want)


def float_text(op: str, width: int, vec: str = "") -> str:
    n = int(vec[2:] or 1) if vec else 1
    regs = ", ".join(f"%v{k}" for k in range(n))
    regs = f"{{{regs}}}" if vec else "%v0"
    total = n * width // 8
    loads = " ".join(f"ld.global.b{width} %v{k}, [%a+{k * width // 8}];" for k in range(n))
    return f"""
.reg .b32 %t, %i; .reg .b{width} %v<4>; .reg .b64 %a, %m, %k, %w;
mov.u32 %t, %tid.x; ld.param.b64 %a, [values]; ld.param.b64 %m, [memory];
ld.param.b64 %k, [index];
mul.wide.u32 %w, %t, {total}; add.u64 %a, %a, %w; {loads}
mul.wide.u32 %w, %t, 4; add.u64 %k, %k, %w; ld.global.b32 %i, [%k];
mul.wide.u32 %w, %i, {total}; add.u64 %m, %m, %w;
red.relaxed.gpu.global.{op} [%m], {regs};
"""


def test_float_sums_round_once_and_flush() -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal(32).astype(np.float32)
    values[:3] = [1e-40, -1e-40, np.float32(2.0**-126)]
    index, memory = rng.integers(0, 4, 32).astype(np.uint32), np.zeros(6, np.float32)
    index[:3] = 5
    text = module("values memory index", float_text("add.f32", 32))
    clean(launch(text, [values, memory, index]))
    want = np.zeros(6, np.float32)
    for lane in range(3, 32):
        want[index[lane]] = np.float32(want[index[lane]]) + values[lane]
    want[5] += np.float32(2.0**-126)  # subnormal operands count as zeros in global memory
    assert np.array_equal(memory.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("vec", ["", ".v2", ".v4"])
def test_packed_halves(kind: str, vec: str) -> None:
    rng = np.random.default_rng(len(kind) + len(vec))
    n = int(vec[2:] or 1) if vec else 1
    integers = rng.integers(-8, 9, (32, 2 * n)).astype(np.float32)
    index = rng.integers(0, 3, 32).astype(np.uint32)

    def bits(values: np.ndarray) -> np.ndarray:
        if kind == "f16x2":
            return values.astype(np.float16).view(np.uint16)
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)

    memory = np.zeros((4, 2 * n), np.uint16)
    text = module("values memory index", float_text(f"add.noftz{vec}.{kind}", 32, vec))
    clean(launch(text, [bits(integers), memory, index]))
    want = np.zeros((4, 2 * n), np.float32)
    for lane in range(32):
        want[index[lane]] += integers[lane]  # small integers: exact in both types
    assert np.array_equal(memory, bits(want))


COUNT = """
.reg .b32 %t, %base, %x; .reg .b64 %o, %w;
mov.u32 %base, smem; mov.u32 %t, %tid.x; ld.param.b64 %o, [out];
.reg .pred %first; setp.eq.u32 %first, %t, 0;
mov.b32 %x, 0; @%first st.shared.b32 [%base], %x; bar.sync 0;
red.shared.add.u32 [%base], 1;
{barrier}
ld.shared.b32 %x, [%base]; mul.wide.u32 %w, %t, 4; add.u64 %o, %o, %w; st.global.b32 [%o], %x;
"""


@every_way
def test_warps_may_add_together_but_must_meet_before_they_read(way: dict) -> None:
    out = np.zeros(128, np.uint32)
    text = module("out", COUNT.format(barrier="bar.sync 0;"), shared=64)
    clean(launch(text, [out], threads=128, **way))
    assert (out == 128).all()
    ran = launch(module("out", COUNT.format(barrier=""), shared=64), [out], threads=128, **way)
    assert code_of(ran) == "smem_race"


@pytest.mark.parametrize("words", list(permutations(("acq_rel", "gpu", "global"))))
def test_modifiers_in_any_order(words: tuple[str, ...]) -> None:
    """ptxas takes semantics, scope and state space in any order, before the operation or behind."""
    for split in range(4):
        before, behind = ("".join(f".{w}" for w in part) for part in (words[:split], words[split:]))
        for op, result in (("atom", "%x0, "), ("red", "")):
            text = f"""
.reg .b32 %x0; .reg .b64 %m;
ld.param.b64 %m, [memory];
{op}{before}.add{behind}.u32 {result}[%m], 3;
"""
            memory = np.zeros(1, np.uint32)
            clean(launch(module("memory", text), [memory]))
            assert memory[0] == 96


def test_a_modifier_stands_once() -> None:
    text = ".reg .b64 %m; ld.param.b64 %m, [memory]; red.gpu.add.cta.u32 [%m], 3;"
    with pytest.raises(PTXSyntaxError, match="more than one scope"):
        launch(module("memory", text), [np.zeros(1, np.uint32)])
