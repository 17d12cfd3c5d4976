"""Approximate functions against an H200's (hardware/record_approx.py): ex2, rcp and the roots bit
for bit, over all significands of a binade, of each binade where the bits differ, and over every
exponent. The others are the true value rounded once, so that the distance recorded is the
emulator's own."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.emulator.native import mufu
from kernels.emulator.native.ir import F32, Code
from kernels.emulator.native.jit import compile_functions
from tests.emulator.hardware import goldens
from tests.emulator.hardware import record_approx as record
from tests.emulator.ptx_harness import execute

RECORDED: dict[str, Any] = goldens.load("approx_sm90.json")
UNITS = ("-2", "-1", "0", "1", "2", "beyond")
# Units of the last place that silicon is off at most, and the share of a binade where it is none.
# tanh.approx and lg2.approx near 1 are documented in absolute or relative error instead.
CLOSE = {
    "ex2.approx.ftz": (2, 0.61),
    "rcp.approx.ftz": (1, 0.87),
    "rsqrt.approx.ftz": (2, 0.78),
    "sqrt.approx.ftz": (1, 0.83),
}
ROUNDED_ONCE = [op for op in record.FUNCTIONS if op not in CLOSE]


@pytest.mark.parametrize("op", record.FUNCTIONS)
def test_every_input_was_recorded(op: str) -> None:
    inputs = record.inputs(op)
    assert RECORDED[op].keys() == inputs.keys()
    for name, x in inputs.items():
        assert sum(RECORDED[op][name]["ulp"][u] for u in UNITS) == x.size


def _by_host_code(name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The function that a block calls, without the machine around it: a binade in a second."""
    code = Code()
    y = code.outlined(
        F32, f"{name}.approx.ftz", lambda b, v: mufu.approximation(b, name, True, v), (F32, "%v")
    )
    (helper,) = code.helpers.values()
    loop = f"""define void @apply(ptr %x, ptr %y, i64 %n) #0 {{
  br label %next
next:
  %i = phi i64 [ 0, %0 ], [ %j, %next ]
  %from = getelementptr {F32}, ptr %x, i64 %i
  %to = getelementptr {F32}, ptr %y, i64 %i
  %v = load {F32}, ptr %from, align 4
{code.lines[-1]}
  store {F32} {y}, ptr %to, align 4
  %j = add i64 %i, 1
  %more = icmp ult i64 %j, %n
  br i1 %more, label %next, label %done
done:
  ret void
}}"""
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    text = "\n".join([*sorted(helper.intrinsics), helper.text, loop])
    module = compile_functions(text, {"apply": prototype})
    out = np.empty_like(x)
    module.functions["apply"](x.ctypes.data, out.ctypes.data, x.size // 32)
    return out


@pytest.mark.parametrize("op", CLOSE)
def test_every_significand_has_the_silicons_bits(op: str) -> None:
    for name, x in record.inputs(op).items():
        got = _by_host_code(op.split(".")[0], x)
        assert hashlib.sha256(got.tobytes()).hexdigest()[:16] == RECORDED[op][name]["sha256"], name


@pytest.mark.parametrize("op", CLOSE)
def test_kernels_have_the_silicons_bits(op: str) -> None:
    x = record.exponents(op)
    got = execute(f"{op}.f32 %d, %x;", {"x": x}, {"d": np.float32})["d"]
    assert record.measured(got, op, x) == RECORDED[op]["exponents"]


# What an H200 gave for subnormal, small, large and special operands without .ftz.
UNSCALED = {
    "ex2": {0xC2FFFFFF: 0x0020000B, 0xC2F2D7E6: 0x02BF1E53, 0x00000001: 0x3F800000, 0xFF800000: 0},
    "rcp": {0x007FFFFF: 0x7E800001, 0x80000001: 0xFF800000, 0x7F7FFFFF: 0x00200000},
    "rsqrt": {0x00000001: 0x64B504F2, 0x80000001: 0x7FFFFFFF, 0x007FFFFF: 0x5F000000},
    "sqrt": {0x00000001: 0x1A3504F3, 0x80000001: 0x7FFFFFFF, 0x007FFFFF: 0x1FFFFFFF},
}


@pytest.mark.parametrize("name", UNSCALED)
def test_subnormals_are_scaled(name: str) -> None:
    x = np.array(list(UNSCALED[name]), np.uint32)
    got = execute(f"{name}.approx.f32 %d, %x;", {"x": x}, {"d": np.uint32})["d"]
    assert got.tolist() == list(UNSCALED[name].values())


def test_tables_are_read_when_a_kernel_needs_them() -> None:
    """Each in its own time: neither with the module, nor one with the other."""
    script = """
import numpy as np
from kernels.emulator.native import mufu
from tests.emulator.ptx_harness import execute
x = np.ones(32, np.float32)
read = [mufu.table.cache_info().currsize]
for op in ("add.f32 %d, %x, %x", "ex2.approx.ftz.f32 %d, %x", "ex2.approx.f32 %d, %x",
           "rcp.approx.ftz.f32 %d, %x"):
    execute(op + ";", {"x": x}, {"d": np.float32})
    read.append(mufu.table.cache_info().currsize)
print(read)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[0, 0, 1, 1, 2]"


@pytest.mark.parametrize("op", CLOSE)
def test_silicon_is_close(op: str) -> None:
    most, share = CLOSE[op]
    assert all(RECORDED[op][name]["ulp"]["most"] <= most for name in ("binade", "exponents"))
    assert RECORDED[op]["binade"]["ulp"]["0"] / (1 << 23) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("op", ROUNDED_ONCE)
def test_the_emulator_rounds_once(op: str) -> None:
    """Every exponent, and a part of the binade that is drawn anew each time."""
    drawn = np.random.default_rng().integers(0, 1 << 23, 1 << 14)
    x = np.concatenate([record.exponents(op), record.binade()[drawn]])
    x = x[: x.size // 512 * 512]
    got = execute(f"{op}.f32 %d, %x;", {"x": x}, {"d": np.float32})["d"]
    wrong = got.view(np.uint32) != record.rounded_once(op, x).view(np.uint32)
    assert not wrong.any(), list(zip(x[wrong][:5], got[wrong][:5], strict=True))


def test_distances_are_counted() -> None:
    true = np.array([1, 1, 1, 1, -1, 0], np.float32)
    got = np.array([1, 1, 1, 1, -1, -0.0], np.float32)
    got[1:4] = (true[1:4].view(np.int32) + np.array([1, -2, 9], np.int32)).view(np.float32)
    found = record.distance(got, true)
    assert found == {"-2": 1, "-1": 0, "0": 3, "1": 1, "2": 0, "beyond": 1, "most": 9}
