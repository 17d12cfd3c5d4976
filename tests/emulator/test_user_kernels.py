"""Kernels as users write them, against torch: bit for bit where the arithmetic is fixed.

`user_kernels` holds them. All run with the race detector, and on a Hopper GPU's code where noted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass.cute as cute

from kernels.emulator import emulate
from tests.emulator import user_kernels as k

Tensor = torch.Tensor
HALF = [torch.float16, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    generator = torch.Generator().manual_seed(low + high)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def run(fn: Any, *args: Any, **options: Any) -> None:
    report = emulate(fn, *args, **options)
    assert report.ok, str(report)


def worst(got: Tensor, wanted: Tensor) -> float:
    """Largest error relative to the value, or to 1 where that is less."""
    error = (got.double() - wanted.double()).abs()
    return float((error / wanted.double().abs().clamp(min=1.0)).max())


EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


# -- elementwise ---------------------------------------------------------------------------------


def poly(x: Any, y: Any) -> Any:
    return x * y + x - y


def _poly_rounded(x: Tensor, y: Tensor) -> Tensor:
    """A double holds each product and sum exactly."""
    product = (x.double() * y.double()).to(x.dtype)
    total = (product.double() + x.double()).to(x.dtype)
    return (total.double() - y.double()).to(x.dtype)


@pytest.mark.parametrize("gpu", ["b200", "h100"])
@pytest.mark.parametrize("dtype", HALF)
def test_half_arithmetic_rounds_as_the_gpu_does(dtype: torch.dtype, gpu: str) -> None:
    """Each operation rounds once; subnormals and infinities included."""
    x, y = draw(1000, dtype=dtype), draw(1000, dtype=dtype, seed=1)
    tiny = torch.finfo(dtype).tiny
    x[:4] = torch.tensor([tiny, tiny / 4, torch.finfo(dtype).max, -0.0], dtype=dtype)
    y[:4] = torch.tensor([0.25, 0.5, 4.0, 1.0], dtype=dtype)
    out = torch.zeros_like(x)
    run(k.elementwise, x, y, out, poly, gpu=gpu)
    assert torch.equal(out, _poly_rounded(x, y))


@pytest.mark.parametrize("dtype", HALF)
def test_half_vectors(dtype: torch.dtype) -> None:
    x, y = draw(2048, dtype=dtype), draw(2048, dtype=dtype, seed=1)
    out = torch.zeros_like(x)
    run(k.vectorised, x, y, out, poly)
    assert torch.equal(out, _poly_rounded(x, y))


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Tensor]]] = {
    "exp": (lambda x, y: cute.math.exp(x), torch.exp),
    "log": (lambda x, y: cute.math.log(x * x + 1.0), lambda x: torch.log(x * x + 1)),
    "tanh": (lambda x, y: cute.math.tanh(x), torch.tanh),
    "erf": (lambda x, y: cute.math.erf(x), torch.erf),
    "sin": (lambda x, y: cute.math.sin(x), torch.sin),
    "cos": (lambda x, y: cute.math.cos(x * 40000.0), lambda x: torch.cos(x * 40000)),
    "tan": (lambda x, y: cute.math.tan(x), torch.tan),
    "atan2": (lambda x, y: cute.math.atan2(x, y), lambda x: torch.atan2(x, x.flip(0))),
    "pow": (lambda x, y: cute.math.pow(x * x, y), lambda x: (x * x).pow(x.flip(0))),
    "sqrt": (lambda x, y: cute.math.sqrt(x * x + y * y), lambda x: x.hypot(x.flip(0))),
    "floor": (lambda x, y: cute.math.floor(x * 7.0), lambda x: torch.floor(x * 7)),
    "round": (lambda x, y: cute.math.roundeven(x * 7.0), lambda x: torch.round(x * 7)),
    "divide": (lambda x, y: x / (y * y + 0.5), lambda x: x / (x.flip(0) ** 2 + 0.5)),
    "gelu": (
        lambda x, y: x * (cute.math.erf(x * 0.7071067811865476) + 1.0) * 0.5,
        torch.nn.functional.gelu,
    ),
    "silu": (lambda x, y: x / (cute.math.exp(-x) + 1.0), torch.nn.functional.silu),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_float32(name: str) -> None:
    """Range reduction of sin and cos uses local memory for large arguments."""
    ours, theirs = FUNCTIONS[name]
    x = draw(300) * 3
    out = torch.zeros_like(x)
    run(k.elementwise, x, x.flip(0).contiguous(), out, ours)
    # cos of large arguments: x * 40000 is rounded, so compare with that of the rounded product.
    wanted = theirs(x.double()) if name != "cos" else torch.cos((x * 40000).double())
    assert worst(out, wanted) < 8e-6 if name == "pow" else worst(out, wanted) < 1e-6


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_float64(name: str) -> None:
    """sin, cos and pow call device functions."""
    ours, theirs = FUNCTIONS[name]
    x = draw(300, dtype=torch.float64) * 3
    out = torch.zeros_like(x)
    run(k.elementwise, x, x.flip(0).contiguous(), out, ours)
    wanted = theirs(x) if name != "cos" else torch.cos(x * 40000)
    assert worst(out, wanted) < 1e-13


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["exp", "tanh", "erf", "sin", "floor", "round", "divide", "gelu"])
def test_functions_of_half(name: str, dtype: torch.dtype) -> None:
    ours, theirs = FUNCTIONS[name]
    x = draw(300, dtype=dtype)
    out = torch.zeros_like(x)
    run(k.elementwise, x, x.flip(0).contiguous(), out, ours)
    # Each of a few operations rounds.
    assert worst(out, theirs(x.double())) < 8 * EPS[dtype]


def select(x: Any, y: Any) -> Any:
    return cute.math.max(cute.math.min(x, y), cute.math.abs(x) - y)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
def test_minima_and_maxima(dtype: torch.dtype) -> None:
    x, y = draw(500, dtype=dtype), draw(500, dtype=dtype, seed=1)
    out = torch.zeros_like(x)
    run(k.elementwise, x, y, out, select)
    assert torch.equal(out, torch.maximum(torch.minimum(x, y), x.abs() - y))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers(dtype: torch.dtype) -> None:
    x = integers(-(2**62) if dtype == torch.int64 else -100, 2**62, 400, dtype=dtype)
    y = integers(1, 11, 400, dtype=dtype)
    out = torch.zeros(400, dtype=torch.int64)
    run(k.elementwise, x, y, out, lambda x, y: (x ^ y) // y + (x % y) * 3 - (x >> 1))
    # // rounds down, as Python's; % has the dividend's sign, as C's.
    wide = x.long()
    wanted = torch.div(wide ^ y.long(), y.long(), rounding_mode="floor")
    wanted = wanted + wide.fmod(y.long()) * 3 - (wide >> 1)
    if dtype in (torch.int8, torch.uint8, torch.int16):
        wanted = wanted.to(dtype).long()
    assert torch.equal(out.to(dtype), wanted.to(dtype))


CONVERSIONS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16,
               torch.int32, torch.int64]  # fmt: skip


@pytest.mark.parametrize("source", CONVERSIONS)
@pytest.mark.parametrize("target", CONVERSIONS)
def test_conversions(source: torch.dtype, target: torch.dtype) -> None:
    if source == target:
        return
    x = (draw(256, dtype=torch.float64) * 700).to(source)
    out = torch.zeros(256, dtype=target)
    run(k.elementwise, x, x, out, lambda x, y: x)
    assert torch.equal(out, x.to(target))


@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("source", [torch.float16, torch.float32])
def test_eight_bit_floats(source: torch.dtype, target: torch.dtype) -> None:
    """There and back, all codes; what is too large becomes the largest number (torch: NaN, inf)."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(4).view(target)
    values = torch.zeros(1024, dtype=source)
    run(k.vectorised, codes, codes, values, lambda x, y: x)
    finite = codes.float().isfinite()
    assert torch.equal(values[finite], codes.to(source)[finite])
    assert torch.equal(values.isnan(), codes.float().isnan())
    limit = torch.finfo(target).max
    x = (draw(1024, dtype=torch.float64) * 200 * torch.logspace(-6, 3, 1024)).to(source)
    back = torch.zeros(1024, dtype=target)
    run(k.vectorised, x, x, back, lambda x, y: x)
    wanted = x.float().clamp(-limit, limit).to(target)
    assert torch.equal(back.view(torch.uint8), wanted.view(torch.uint8))


# -- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, w = draw(5, 700, dtype=dtype), draw(700, dtype=dtype, seed=1)
    out = torch.zeros_like(x)
    run(k.rms_norm, x, w, out, 1e-6)
    wanted = torch.nn.functional.rms_norm(x.double(), (700,), w.double(), 1e-6)
    assert worst(out, wanted) < 1.01 * EPS[dtype] + 3e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_norm(dtype: torch.dtype) -> None:
    x, w, b = draw(4, 500, dtype=dtype), draw(500, dtype=dtype), draw(500, dtype=dtype, seed=2)
    out = torch.zeros_like(x)
    run(k.layer_norm, x, w, b, out, 1e-5)
    wanted = torch.nn.functional.layer_norm(x.double(), (500,), w.double(), b.double(), 1e-5)
    assert worst(out, wanted) < 1.01 * EPS[dtype] + 3e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_softmax(dtype: torch.dtype) -> None:
    x = draw(7, 133, dtype=dtype) * 4
    out = torch.zeros_like(x)
    run(k.softmax, x, out)
    assert worst(out, x.double().softmax(1)) < 1.01 * EPS[dtype] + 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_argmax(dtype: torch.dtype) -> None:
    x = integers(0, 40, 20, 100, dtype=dtype)  # ties
    out = torch.zeros(20, dtype=torch.int64)
    run(k.argmax, x, out)
    first = torch.tensor([row.index(max(row)) for row in x.tolist()])
    assert torch.equal(out, first)


def test_top_k() -> None:
    x = draw(40, 60, dtype=torch.float16)
    values, indices = torch.zeros(40, 5, dtype=torch.float16), torch.zeros(40, 5, dtype=torch.int32)
    run(k.top_k, x, values, indices, 5)
    assert torch.equal(values, x.topk(5).values)
    assert torch.equal(x.gather(1, indices.long()), values)


# -- across threads ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
def test_transpose(dtype: torch.dtype) -> None:
    x = (draw(70, 45) * 100).to(dtype)
    out = torch.zeros(45, 70, dtype=dtype)
    run(k.transpose, x, out)
    assert torch.equal(out, x.T)


def test_scan() -> None:
    x = integers(-1000, 1000, k.THREADS, dtype=torch.int16)
    out = torch.zeros(k.THREADS, dtype=torch.int32)
    run(k.scan, x, out)
    assert torch.equal(out, x.cumsum(0).int())


def test_histogram() -> None:
    x = integers(0, 50, 1300, dtype=torch.uint8)
    out = torch.zeros(50, dtype=torch.int32)
    run(k.histogram, x, out, 50)
    assert torch.equal(out, torch.bincount(x.int(), minlength=50).int())


def test_bitonic_sort() -> None:
    x = integers(-(2**31), 2**31 - 1, k.THREADS)
    out = torch.zeros_like(x)
    run(k.bitonic_sort, x, out)
    assert torch.equal(out.view(-1, 32), x.view(-1, 32).sort(1).values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matmul(dtype: torch.dtype) -> None:
    a, b = draw(32, 48, dtype=dtype), draw(48, 64, dtype=dtype, seed=1)
    c = torch.zeros(32, 64)
    run(k.matmul, a, b, c)
    assert worst(c, a.double() @ b.double()) < 1e-5


# -- tables, indices, bits -------------------------------------------------------------------------


def test_gather() -> None:
    table, index = draw(30, 77, dtype=torch.bfloat16), integers(-30, 30, 12, dtype=torch.int64)
    out = torch.zeros(12, 77, dtype=torch.bfloat16)
    run(k.gather, table, index, out)
    assert torch.equal(out, table[index])


def test_scatter_add() -> None:
    x, index = integers(-99, 99, 100).float(), integers(0, 9, 100, dtype=torch.int64)
    out = torch.zeros(9)
    run(k.scatter_add, x, index, out)
    assert torch.equal(out, torch.zeros(9).index_add(0, index, x))


def test_lower_bound() -> None:
    table, x = integers(0, 500, 100).sort().values, integers(-5, 505, 96)
    out = torch.zeros(96, dtype=torch.int32)
    run(k.lower_bound, table, x, out)
    assert torch.equal(out, torch.searchsorted(table, x).int())


def _philox(counter: int, key: int) -> int:
    left, right = counter, 0
    for _ in range(10):
        product = 0xD256D193 * left
        left, right = product >> 32 ^ key ^ right, product & 0xFFFFFFFF
        key = key + 0x9E3779B9 & 0xFFFFFFFF
    return left


def test_dropout() -> None:
    x = draw(300, dtype=torch.float16)
    out = torch.zeros_like(x)
    run(k.dropout, x, out, 0.25, 0xDEADBEEF)
    uniform = torch.tensor([(_philox(i, 0xDEADBEEF) >> 8) / 2**24 for i in range(300)])
    wanted = torch.where(uniform >= 0.25, x.float() / 0.75, 0.0).half()
    assert torch.equal(out, wanted)
    assert 40 < int((uniform < 0.25).sum()) < 110


def test_quantise() -> None:
    x = draw(6, 200, dtype=torch.bfloat16)
    out, scale = torch.zeros(6, 200, dtype=torch.int8), torch.zeros(6)
    run(k.quantise, x, out, scale)
    most = x.float().abs().amax(1)
    assert torch.equal(scale, most / 127)
    assert torch.equal(
        out, (x.float() * (torch.tensor(127.0) / most)[:, None]).round().to(torch.int8)
    )


def test_rope() -> None:
    x = draw(9, 64, dtype=torch.float16)
    out = torch.zeros_like(x)
    run(k.rope, x, out, 10000.0)
    angle = torch.arange(9.0).double()[:, None] * 10000.0 ** -(torch.arange(32.0).double() / 32)
    u, v = x.double().chunk(2, 1)
    s, c = angle.sin(), angle.cos()
    assert worst(out, torch.cat([u * c - v * s, v * c + u * s], 1)) < 1.01 * EPS[x.dtype] + 1e-5


def test_printf(capfd: pytest.CaptureFixture[str]) -> None:
    run(k.say, torch.tensor([1.5, -2.0]))
    big = 1 << 40
    assert capfd.readouterr().out.splitlines() == [
        f"[block 0,0,0 thread 0] x[0] = 1.500000, {big} of 2",
        f"[block 0,0,0 thread 1] x[1] = -2.000000, {big + 1} of 2",
    ]


@pytest.mark.parametrize("visibility", ["eager", "late"])
def test_staged_copy(visibility: str) -> None:
    x = draw(4 * k.THREADS)
    out = torch.zeros_like(x)
    run(k.staged_reverse, x, out, visibility=visibility)
    assert torch.equal(out, x.flip(0))
