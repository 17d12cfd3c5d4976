"""CUDA kernels of our own (cuda/*.cu, compiled by nvcc) with inputs and what they must compute.

A `Case` is one launch: random asymmetric inputs of a fixed seed, so that hardware can be asked the
same, and a reference in numpy or float64. Outputs start as the byte 0xCD everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.emulator.gpus import GPUS
from kernels.emulator.host_runtime import Launch
from kernels.emulator.machine import LaunchResult, run_launch
from kernels.emulator.memory import GlobalMemory
from tests.emulator import cluster_harness

FOLDER = Path(__file__).parent / "cuda"
SEED = 20261130
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """``arguments``: in the kernel's order, arrays or ints (a C int); ``expected``: outputs by
    name, from the inputs; ``close``: of outputs that are not exact, the largest relative error."""

    file: str
    entry: str
    arguments: Callable[[np.random.Generator], dict[str, Any]]
    expected: Callable[[dict[str, Any]], Arrays]
    block: int = 64
    grid: int = 1
    smem_bytes: int = 0
    close: dict[str, float] = field(default_factory=dict)
    gpus: tuple[str, ...] = ("h100", "b200")

    def __str__(self) -> str:
        return f"{self.file}-{self.entry}"

    @property
    def on_sm90(self) -> bool:
        return "h100" in self.gpus

    @property
    def ptx(self) -> str:
        return (FOLDER / f"{self.file}.ptx").read_text()

    def inputs(self) -> dict[str, Any]:
        return self.arguments(np.random.default_rng(SEED))


def unwritten(count: int, dtype: Any) -> NDArray[Any]:
    return np.full(count * np.dtype(dtype).itemsize, 0xCD, np.uint8).view(dtype)


def run(case: Case, gpu: str, **options: Any) -> tuple[dict[str, Any], LaunchResult]:
    """The arguments after the launch on the emulator, and the launch."""
    given = case.inputs()
    memory, params = GlobalMemory(), []
    for name, value in given.items():
        if isinstance(value, np.ndarray):
            memory.add_array(value, name)
            params.append(int(value.ctypes.data).to_bytes(8, "little"))
        else:
            params.append(int(value).to_bytes(4, "little", signed=True))
    shape = (case.grid, 1, 1), (case.block, 1, 1)
    launch = Launch(case.entry, *shape, smem_bytes=case.smem_bytes, params=tuple(params))
    return given, run_launch(case.ptx, launch, GPUS[gpu], memory, **options)


def given(case: Case, values: dict[str, Any]) -> dict[str, Any]:
    """The launch as data that name it (`cluster_harness.work`)."""
    arrays = [value for value in values.values() if isinstance(value, np.ndarray)]
    params = [
        value if isinstance(value, np.ndarray) else int(value).to_bytes(4, "little", signed=True)
        for value in values.values()
    ]
    shape = case.block, case.grid, 1, case.smem_bytes
    return {**cluster_harness.work(case.ptx, params, arrays, *shape), "entry": case.entry}


def item(case: Case) -> dict[str, Any]:
    """The launch for `record_isa`, with the emulator's results."""
    named = given(case, case.inputs())
    after, _ = run(case, "h100")
    arrays = [value for value in after.values() if isinstance(value, np.ndarray)]
    emulated = [value.tobytes().hex() for value in arrays]
    return {**named, "name": cluster_harness.digest(named), "emulated": emulated}


# -- references ------------------------------------------------------------------------------------


def _switched(a: dict[str, Any]) -> Arrays:
    x = a["x"].astype(np.float64)
    halved = x
    for k in range(5):
        halved = np.float32(halved * 0.5 + k).astype(np.float64)
    ways = [x + 3, x * x, -x, abs(x) - 1, halved, np.where(x > 0, 1, -1), np.minimum(x, 0.25) * 4]
    out = np.choose(np.clip(a["op"], 0, 8), [*ways, x * 4, np.full_like(x, 42)])
    return {"out": np.where((a["op"] < 0) | (a["op"] > 7), 42, out).astype(np.float32)}


def _called(a: dict[str, Any]) -> Arrays:
    n, mask = a["n"], (1 << 64) - 1
    sums, counts, hashes = [], [], []
    for i in range(len(a["sum"])):
        total, count, h = np.float32(0), 1, i
        for k in range(i % n + 1):
            x = a["x"][i * n + k]
            total = np.float32(np.float64(x) * count + np.float64(total))  # one fma
            count += 2 if x > 0.5 else 1
            h = h * 6364136223846793005 + count & mask if h & 1 else h >> 7 ^ count << 33 & mask
        sums.append(total)
        counts.append(count)
        hashes.append(h)
    return {
        "sum": np.array(sums, np.float32),
        "count": np.array(counts, np.int32),
        "hash": np.array(hashes, np.uint64),
    }


def _tabled(a: dict[str, Any]) -> Arrays:
    out = a["x"].copy()
    for shift in (0, 2):
        out = np.choose(a["op"] >> shift & 3, [out, out + out, ~out, out])
    return {"out": out}


def _reversed(a: dict[str, Any]) -> Arrays:
    weights = np.array([0.25, -1.5, 3.0, 0.125], np.float32)
    return {"out": (a["in"].reshape(3, 64, 4)[:, ::-1] * weights).reshape(-1)}


def _summed(a: dict[str, Any]) -> Arrays:
    tiles = a["x"].reshape(-1, 8)
    return {
        "block_sum": np.array([a["x"].sum()], np.int32),
        "tile_sum": np.repeat(tiles.sum(1, dtype=np.int32), 8),
        "tile_max": np.repeat(tiles.max(1), 8),
    }


def _counted(a: dict[str, Any]) -> Arrays:
    x, threads = a["x"], np.arange(len(a["x"])) % 96
    most = max(int(v) << 32 | int(t) for v, t in zip(x, threads, strict=True))
    return {
        "out": np.bincount(x & 7, minlength=8).astype(np.uint32),
        "most": np.array([most], np.uint64),
    }


def _f16(x: NDArray[Any]) -> NDArray[np.float16]:
    return np.asarray(x, np.float64).astype(np.float16)


def _halves(a: dict[str, Any]) -> Arrays:
    x, y = (a[name].reshape(-1, 2).astype(np.float64) for name in "ab")
    power = _f16(np.exp2(np.minimum(x, y))).astype(np.float64)
    rows = [x * y + np.maximum(x, y), x * np.float16(0.3), power - y]
    return {"out": _f16(np.stack(rows, 1)).reshape(-1)}


def bf16(x: NDArray[Any]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; x is finite. Rounds once (from float64)."""
    bits = np.asarray(x, np.float64).view(np.uint64)
    kept = bits + (np.uint64((1 << 44) - 1)) + (bits >> np.uint64(45) & np.uint64(1))
    top = (kept & ~np.uint64((1 << 45) - 1)).view(np.float64)
    return (top.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _brains(a: dict[str, Any]) -> Arrays:
    v = bf16(a["x"].astype(np.float64)).reshape(-1, 2)
    w = widened(v)
    rows = np.stack([v, bf16(w * w + np.maximum(w, 0.5))], 1)
    return {"out": rows.reshape(-1), "back": (w[:, 0] + w[:, 1]).astype(np.float32)}


def _eighth(x: NDArray[Any], mantissa: int, bias: int, most: float) -> NDArray[np.uint16]:
    """Bits of fp8, saturating, ties to even."""
    size = np.minimum(np.abs(x.astype(np.float64)), most)
    exponent = np.maximum(np.floor(np.log2(np.maximum(size, 2.0**-30))), 1 - bias)
    step = np.exp2(exponent - mantissa)
    code = np.rint(size / step).astype(np.int64)  # with the hidden bit
    code += ((exponent + bias - 1).astype(np.int64)) << mantissa
    top = 0x7E if mantissa == 3 else 0x7B
    return (np.minimum(code, top) | np.signbit(x).astype(np.int64) << 7).astype(np.uint16)


def _eighths(a: dict[str, Any]) -> Arrays:
    x = a["x"].reshape(-1, 2)
    e4, e5 = _eighth(x, 3, 7, 448.0), _eighth(x, 2, 15, 57344.0)
    magnitude = e4 & 0x7F
    exponent, fraction = magnitude >> 3, magnitude & 7
    value = np.where(exponent, (8 + fraction) * 2.0 ** (exponent - 10.0), fraction * 2.0**-9)
    pairs = {name: e[:, 0] | e[:, 1] << 8 for name, e in (("e4", e4), ("e5", e5))}
    return {**pairs, "back": _f16(np.where(e4 >> 7, -value, value)).reshape(-1)}


def _integers(a: dict[str, Any]) -> Arrays:
    rows = []
    for x, y in zip(map(int, a["a"]), map(int, a["b"]), strict=True):
        sx, sy = (v - (v >> 31 << 32) for v in (x, y))
        wide = x * y + (y << 32) & (1 << 64) - 1
        both = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        prmt = bytes(both[s] for s in (4, 1, 6, 2))
        shift = x & 63 & 31
        ffs = (x & -x).bit_length()
        lanes = [((x >> s) + (y >> s) & 0xFF) << s for s in (0, 8, 16, 24)]
        signed = [np.array([v], np.uint32).view(np.int8).astype(int) for v in (x, y)]
        rows.append([
            bin(x).count("1") + 100 * (32 - y.bit_length()) + 10000 * ffs,
            int.from_bytes(prmt, "little"),
            (y << 32 | x) << shift >> 32,
            int(f"{x:032b}"[::-1], 2) ^ x * y >> 32,
            (wide >> 32) - wide,
            x // y + x % y if y else sx >> 3,
            sum(lanes),
            max(min(sx, sy), -77) + int(signed[0] @ signed[1]) + 5,
        ])  # fmt: skip
    wrapped = [[v & 0xFFFFFFFF for v in row] for row in rows]
    return {"out": np.array(wrapped, np.uint32).reshape(-1)}


def _doubles(a: dict[str, Any]) -> Arrays:
    x = a["x"]
    exact = x.astype(np.longdouble)  # 64 bits of significand where the host is x86
    rows = [
        exact * exact + 1 / x, np.sqrt(np.abs(x)), np.rint(x * 100.0) + np.trunc(x),
    ]  # fmt: skip
    f = x.astype(np.float32).astype(np.float64)
    fast = [np.exp2(f * 0.125) / np.sqrt(np.abs(f) + 1), 1 / (1 + np.exp(-f))]
    return {
        "out": np.stack([np.asarray(r, np.float64) for r in rows], 1).reshape(-1),
        "fast": np.stack(fast, 1).astype(np.float32).reshape(-1),
    }


def _product(a: dict[str, Any]) -> Arrays:
    x, y = (widened(a[name]).reshape(-1, 64) for name in "ab")
    return {"out": (x @ y.T).astype(np.float32).reshape(-1)}


def _walked(a: dict[str, Any]) -> Arrays:
    def steps(n: int) -> int:
        count = 0
        while n > 1:
            n, count = (3 * n + 1 if n % 2 else n // 2), count + 1
        return count

    return {"out": np.array([1000 * steps(int(n)) + steps(int(n) + 1) for n in a["x"]], np.uint32)}


def _greatest(a: dict[str, Any]) -> Arrays:
    x = a["x"].reshape(-1, a["n"])
    out = np.stack([np.fmax.reduce(x, 1), np.full(len(x), np.inf, np.float32)], 1)
    least = np.concatenate([np.abs(x[:, 0::2]), x[:, 1::2]], 1).min(1)  # NaN goes through
    out[:, 1] = least
    return {"out": out.reshape(-1)}


def _packed(a: dict[str, Any]) -> Arrays:
    x, y = (a[name].reshape(-1, 2).astype(np.float64) for name in "ab")
    c = (x * y + np.array([0.5, -0.25])).astype(np.float32).astype(np.float64)
    return {"out": np.stack([c + x, c * y], 1).astype(np.float32).reshape(-1)}


# -- launches --------------------------------------------------------------------------------------


def _normal(rng: np.random.Generator, count: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (rng.normal(0.2, scale, count)).astype(np.float32)


def _with_nans(x: NDArray[np.float32]) -> NDArray[np.float32]:
    x[5::37] = np.nan
    return x


CASES = (
    Case(
        "control", "switched",
        lambda r: {"op": r.integers(-1, 10, 128, np.int32), "x": _normal(r, 128, 2.0),
                   "out": unwritten(128, np.float32)},
        _switched, grid=2,
    ),
    Case(
        "control", "called",
        lambda r: {"x": r.random(64 * 7, np.float32), "sum": unwritten(64, np.float32),
                   "count": unwritten(64, np.int32), "hash": unwritten(64, np.uint64), "n": 7},
        _called,
    ),
    Case(
        "control", "sorted",
        lambda r: {"in": r.integers(-99, 99, 96 * 12, np.int32),
                   "out": unwritten(96 * 12, np.int32)},
        lambda a: {"out": np.sort(a["in"].reshape(-1, 12), 1).reshape(-1)}, block=48, grid=2,
    ),
    Case(
        "control", "tabled",
        lambda r: {"op": r.integers(0, 16, 64, np.uint32),
                   "x": r.integers(0, 1 << 32, 64, np.uint32), "out": unwritten(64, np.uint32)},
        _tabled,
    ),
    Case(
        "memory", "reversed",
        lambda r: {"in": _normal(r, 768), "out": unwritten(768, np.float32)},
        _reversed, grid=3, smem_bytes=64 * 16,
    ),
    Case(
        "memory", "summed",
        lambda r: {"x": r.integers(-999, 9999, 256, np.int32), "block_sum": np.zeros(1, np.int32),
                   "tile_sum": unwritten(256, np.int32), "tile_max": unwritten(256, np.int32)},
        _summed, block=128, grid=2,
    ),
    Case(
        "memory", "counted",
        lambda r: {"x": r.integers(0, 256, 288, np.uint8), "out": np.zeros(8, np.uint32),
                   "most": np.zeros(1, np.uint64)},
        _counted, block=96, grid=3,
    ),
    Case(
        "numbers", "halves",
        lambda r: {"a": r.normal(0.3, 2, 128).astype(np.float16),
                   "b": r.normal(-0.2, 3, 128).astype(np.float16),
                   "out": unwritten(384, np.float16)},
        _halves, close={"out": 2.0**-9},
    ),
    Case(
        "numbers", "brains",
        lambda r: {"x": _normal(r, 128, 3.0), "out": unwritten(256, np.uint16),
                   "back": unwritten(64, np.float32)},
        _brains,
    ),
    Case(
        "numbers", "eighths",
        lambda r: {"x": (_normal(r, 128) * np.exp2(r.integers(-12, 18, 128))).astype(np.float32),
                   "e4": unwritten(64, np.uint16), "e5": unwritten(64, np.uint16),
                   "back": unwritten(128, np.float16)},
        _eighths,
    ),
    Case(
        "numbers", "integers",
        lambda r: {"a": r.integers(0, 1 << 32, 64, np.uint32),
                   "b": r.integers(0, 1 << 32, 64, np.uint32) >> r.integers(0, 32, 64, np.uint32),
                   "out": unwritten(512, np.uint32)},
        _integers,
    ),
    Case(
        "numbers", "doubles",
        lambda r: {"x": r.normal(0.5, 30, 64), "out": unwritten(192, np.float64),
                   "fast": unwritten(128, np.float32)},
        _doubles, close={"fast": 2.0**-20},
    ),
    Case(
        "tensor", "product",
        lambda r: {"a": bf16(r.normal(0.1, 1, 16 * 64)), "b": bf16(r.normal(-0.1, 1, 8 * 64)),
                   "out": unwritten(128, np.float32)},
        _product, block=32, close={"out": 1e-5},
    ),
    Case(
        "tensor", "walked",
        lambda r: {"x": r.integers(1, 300, 64, np.uint32), "out": unwritten(64, np.uint32)},
        _walked,
    ),
    Case(
        "tensor", "copied",
        lambda r: {"in": r.integers(-1 << 30, 1 << 30, 500, np.int32),
                   "out": unwritten(500, np.int32), "n": 500},
        lambda a: {"out": 2 * a["in"]},
    ),
    Case(
        "blackwell", "greatest",
        lambda r: {"x": _with_nans(_normal(r, 64 * 18)), "out": unwritten(128, np.float32),
                   "n": 18},
        _greatest, gpus=("b200",),
    ),
    Case(
        "blackwell", "packed",
        lambda r: {"a": _normal(r, 128), "b": _normal(r, 128, 5.0),
                   "out": unwritten(256, np.float32)},
        _packed, gpus=("b200",),
    ),
)  # fmt: skip
