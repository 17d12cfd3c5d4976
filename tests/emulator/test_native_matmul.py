"""The native inner loops of the tensor core against numpy and against exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.emulator.native.matmul import ACCUMULATE, NEGATE, functions

DTYPES = ("float16", "bfloat16")


def aligned(shape: tuple[int, ...], dtype: object) -> NDArray:
    """Zeros whose first byte lies on a multiple of 64."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def as_float64(bits: NDArray[np.uint16], dtype: str) -> NDArray[np.float64]:
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaNs become quiet
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def every_pattern(rng: np.random.Generator) -> NDArray[np.uint16]:
    """The 65536 patterns of 16 bits as 8192 chunks in random order: NaN, infinity, subnormal."""
    bits = aligned((8192, 8), np.uint16)
    bits[...] = rng.permutation(1 << 16).reshape(8192, 8)
    return bits


def call(name: str, *arguments: object) -> object:
    return functions().functions[name](
        *(a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathers_widen_every_pattern_in_the_order_asked_for(dtype: str) -> None:
    rng = np.random.default_rng(1)
    window = every_pattern(rng)
    flags = aligned((8192, 16), np.uint8)
    flags[...] = 1
    for across in (1, 2, 4):
        numbers = rng.permutation(8192).reshape(-1, across).astype(np.int64)
        want = as_float64(window[numbers].reshape(len(numbers), 8 * across), dtype)
        flat, turned = aligned(want.shape, np.float64), aligned(want.T.shape, np.float64)
        assert call(f"gather_{dtype}", window, flags, numbers, flat, numbers.size) == 1
        turn = (window, flags, numbers, turned, len(numbers), across)
        assert call(f"gather_turned_{dtype}", *turn) == 1
        np.testing.assert_array_equal(flat, want)
        np.testing.assert_array_equal(turned, want.T)
        assert (np.signbit(flat) == np.signbit(want))[~np.isnan(want)].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_unwritten_byte_is_seen_wherever_it_is_and_others_do_not_matter(dtype: str) -> None:
    rng = np.random.default_rng(2)
    window, out = aligned((64, 8), np.uint16), aligned((32, 16), np.float64)
    numbers = rng.permutation(64)[:32].astype(np.int64)
    flags = aligned((64, 16), np.uint8)
    flags[numbers] = 1  # of the operand's chunks, none of the rest
    calls = [(f"gather_{dtype}", (32,)), (f"gather_turned_{dtype}", (16, 2))]
    for chunk in [None, *numbers]:
        byte = int(rng.integers(16))
        if chunk is not None:
            flags[chunk, byte] = 0
        for name, counts in calls:
            found = call(name, window, flags, numbers, out, *counts)
            assert found == (chunk is None), (name, chunk, byte)
        if chunk is not None:
            flags[chunk, byte] = 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("blocks", "distance", "lane"), [(8, 16, 0), (4, 32, 0), (4, 32, 16)])
def test_words_of_tensor_memory(dtype: str, blocks: int, distance: int, lane: int) -> None:
    rng = np.random.default_rng(3)
    cells = rng.integers(0, 1 << 32, (8, 128), np.uint32)
    out = aligned((16, 16 * blocks), np.float64)
    call(f"words_{dtype}", cells.ctypes.data + 4 * lane, out, blocks, distance)
    lanes = lane + (distance * np.arange(blocks)[:, None] + np.arange(16)).reshape(-1)
    halves = np.stack([cells & 0xFFFF, cells >> 16], axis=1).reshape(16, 128)[:, lanes]
    np.testing.assert_array_equal(out, as_float64(halves.astype(np.uint16), dtype))


def fused(a: float, b: float, c: float) -> float:
    """a * b + c rounded once: Fraction's own division rounds to nearest even."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return exact.numerator / exact.denominator


@pytest.mark.parametrize("flags", [0, NEGATE, ACCUMULATE, NEGATE | ACCUMULATE])
def test_an_element_is_a_chain_of_fused_steps_over_ascending_k(flags: int) -> None:
    """Magnitudes from 2**-40 to 2**40, so that every step rounds and another order shows."""
    rng = np.random.default_rng(4)
    m, n, depth = 16, 8, 16
    a, b = aligned((depth, m), np.float64), aligned((n, depth), np.float64)
    for values in (a, b):
        values[...] = rng.standard_normal(values.shape) * 2.0 ** rng.integers(-40, 40, values.shape)
    d = aligned((n, m), np.float32)
    d[...] = rng.standard_normal(d.shape) * 2.0**30
    before, total = d.copy(), aligned((n, m), np.float64)
    call("product_float64", a, b, total, 1, n, depth, m, 1, depth, m, 16, 0)
    call("product_float32", a, b, d, 1, n, depth, m, 1, depth, m, 16, flags)
    reversed_differs = 0
    for row in range(m):
        for column in range(n):
            chain = backwards = 0.0
            for k in range(depth):
                chain = fused(a[k, row], b[column, k], chain)
                other = depth - 1 - k
                backwards = fused(a[other, row], b[column, other], backwards)
            assert total[column, row] == chain
            reversed_differs += backwards != chain
            value = -chain if flags & NEGATE else chain
            if flags & ACCUMULATE:
                value += float(before[column, row])
            assert d[column, row] == np.float32(value)
    assert reversed_differs > 10


@pytest.mark.parametrize("columns", [8, 24, 136, 256])
@pytest.mark.parametrize(("blocks", "distance"), [(1, 16), (8, 16), (4, 32)])
@pytest.mark.parametrize("depth", [1, 8, 16, 96])
@pytest.mark.parametrize("b_by_k", [True, False])
def test_products_of_integers_are_exact(
    columns: int, blocks: int, distance: int, depth: int, b_by_k: bool
) -> None:
    """Every size and stride; cells that are no part of D keep what they held."""
    rng = np.random.default_rng(5)
    lanes = blocks * distance
    a, b = aligned((depth, 16 * blocks + 32), np.float64), aligned((depth, columns), np.float64)
    a[...], b[...] = rng.integers(-99, 99, a.shape), rng.integers(-99, 99, b.shape)
    laid = b if b_by_k else aligned((columns, depth), np.float64)
    laid[...] = b if b_by_k else b.T
    steps = (columns, 1) if b_by_k else (1, depth)
    wide = rng.integers(-999, 999, (columns, lanes + 16)).astype(np.float64)
    single = wide.astype(np.float32)
    want = (b.T @ a[:, : 16 * blocks]).reshape(columns, blocks, 16)

    sizes = (blocks, columns, depth, a.shape[1], *steps, wide.shape[1], distance)
    result = wide.copy()
    call("product_float64", a, laid, result, *sizes, 0)
    expected = wide.copy()
    expected[:, :lanes].reshape(columns, blocks, distance)[:, :, :16] = want
    np.testing.assert_array_equal(result, expected)

    call("product_float32", a, laid, single, *sizes, ACCUMULATE)
    expected = wide.copy()
    expected[:, :lanes].reshape(columns, blocks, distance)[:, :, :16] += want
    np.testing.assert_array_equal(single, expected.astype(np.float32))


def test_zeros_keep_the_sign_that_a_sum_from_plus_zero_has() -> None:
    a, b = aligned((1, 16), np.float64), aligned((8, 1), np.float64)
    a[...], b[...] = -0.0, 1.0
    d = aligned((8, 16), np.float32)
    d[...] = -0.0
    call("product_float32", a, b, d, 1, 8, 1, 16, 1, 1, 16, 16, ACCUMULATE)
    assert not np.signbit(d).any()  # (+0 + -0 * 1) + -0
    call("product_float32", a, b, d, 1, 8, 1, 16, 1, 1, 16, 16, NEGATE)
    assert np.signbit(d).all()
