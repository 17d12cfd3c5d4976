# SPDX-License-Identifier: Apache-2.0
"""exp2, masks and tile order, each alone in a small kernel on the modelled SM."""

import math

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Float32, Int32, Int64

from kernels import emulator
from kernels.common.exp2 import exp2_polynomial
from kernels.common.mask import mask_beyond, visible_keys
from kernels.common.tile_order import heads_in_l2, tile_of

THREADS = 128


def run(function, *arguments):
    report = emulator.emulate(function, *arguments)
    assert report.ok, str(report)


@cute.kernel
def exp2_kernel(x: cute.Tensor, out: cute.Tensor, degree: cutlass.Constexpr):
    index = (cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]) * 2
    out[index], out[index + 1] = exp2_polynomial(x[index], x[index + 1], degree)


@cute.jit
def exp2_host(x: cute.Tensor, out: cute.Tensor, degree: cutlass.Constexpr, stream):
    exp2_kernel(x, out, degree).launch(
        grid=(x.shape[0] // (2 * THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def exp2(values: torch.Tensor, degree: int = 3) -> torch.Tensor:
    padded = torch.zeros(math.ceil(len(values) / 256) * 256)
    padded[: len(values)] = values
    out = torch.full_like(padded, math.nan)
    run(exp2_host, padded, out, degree)
    return out[: len(values)]


@pytest.mark.parametrize(("degree", "published"), [(3, 8.77e-5), (4, 3.05e-6)])
def test_exp2_polynomial_is_as_exact_as_published(degree, published):
    """Largest relative error on [0, 1) (arXiv 2603.05451, table of polynomial degrees)."""
    x = torch.rand(1 << 17, generator=torch.Generator().manual_seed(0))
    error = (exp2(x, degree).double() / x.double().exp2() - 1).abs().max()
    assert 0.98 * published < error < 1.02 * published


def test_exp2_polynomial_over_all_exponents():
    x = torch.linspace(-126, 126, 1 << 15)
    error = (exp2(x).double() / x.double().exp2() - 1).abs().max()
    assert error < 8.8e-5
    powers = torch.arange(-126.0, 127.0)
    assert torch.equal(exp2(powers), powers.exp2())  # exact where the fraction is 0
    tiny = exp2(torch.tensor([-126.5, -127.0, -128.0, -1000.0, -math.inf]))
    assert (tiny >= 0).all() and (tiny <= 2.0**-126).all() and tiny[-1] == 0


@cute.kernel
def mask_kernel(limits: cute.Tensor, out: cute.Tensor):
    row = cute.arch.thread_idx()[0]
    scores = cute.make_rmem_tensor(128, Float32)
    for i in cutlass.range(128, unroll_full=True):
        scores[i] = Float32(i)
    mask_beyond(scores, limits[row])
    for i in cutlass.range(128, unroll_full=True):
        out[row, i] = scores[i]


@cute.jit
def mask_host(limits: cute.Tensor, out: cute.Tensor, stream):
    mask_kernel(limits, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


def test_mask_keeps_columns_below_the_limit():
    limits = torch.arange(-5, 123, dtype=torch.int32)
    limits[-7:] = torch.tensor([126, 127, 128, 129, 1 << 30, 2**31 - 1, -(1 << 30)])
    out = torch.zeros(128, 128)
    run(mask_host, limits, out)
    columns = torch.arange(128.0).expand(128, 128)
    expected = columns.masked_fill(columns >= limits[:, None].double(), -math.inf)
    assert torch.equal(out, expected)


@cute.kernel
def visible_kernel(out: cute.Tensor, seqlen_q: Int32, seqlen_k: Int32):
    row = cute.arch.thread_idx()[0]
    out[row, 0] = visible_keys(row, seqlen_q, seqlen_k, False)
    out[row, 1] = visible_keys(row, seqlen_q, seqlen_k, True)


@cute.jit
def visible_host(out: cute.Tensor, seqlen_q: Int32, seqlen_k: Int32, stream):
    visible_kernel(out, seqlen_q, seqlen_k).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(100, 100), (100, 37), (37, 100), (1, 5)])
def test_visible_keys_counts_what_the_mask_shows(seqlen_q, seqlen_k):
    out = torch.zeros(THREADS, 2, dtype=torch.int32)
    run(visible_host, out, seqlen_q, seqlen_k)
    visible = torch.ones(seqlen_q, seqlen_k).tril(seqlen_k - seqlen_q)
    assert torch.equal(out[:seqlen_q, 1].long(), visible.sum(1).long())
    assert (out[:, 0] == seqlen_k).all()
    assert (out[seqlen_q:, 1] == seqlen_k).all()  # rows of a tile beyond the last query


@cute.kernel
def order_kernel(out: cute.Tensor, m_tiles: Int32, heads: Int32, section: Int32):
    index = cute.arch.block_idx()[0]
    if cute.arch.thread_idx()[0] == 0:
        out[index, 0], out[index, 1] = tile_of(index, m_tiles, heads, section, False)
        out[index, 2], out[index, 3] = tile_of(index, m_tiles, heads, section, True)


@cute.jit
def order_host(out: cute.Tensor, m_tiles: Int32, heads: Int32, section: Int32, stream):
    order_kernel(out, m_tiles, heads, section).launch(
        grid=(m_tiles * heads, 1, 1), block=(32, 1, 1), stream=stream
    )


@pytest.mark.parametrize(
    ("m_tiles", "heads", "section"), [(1, 1, 1), (4, 6, 4), (3, 5, 5), (7, 3, 1)]
)
def test_tile_order(m_tiles, heads, section):
    out = torch.full((m_tiles * heads, 4), -1, dtype=torch.int32)
    run(order_host, out, m_tiles, heads, section)
    dense, lpt = (list(map(tuple, half.tolist())) for half in (out[:, :2], out[:, 2:]))
    assert dense == [(m, head) for head in range(heads) for m in range(m_tiles)]
    expected = [
        (m, head)
        for first in range(0, heads, section)
        for m in reversed(range(m_tiles))  # the longest rows of a causal mask come last
        for head in range(first, min(first + section, heads))
    ]
    assert lpt == expected


@cute.kernel
def heads_kernel(out: cute.Tensor, heads: Int32):
    out[0] = heads


@cute.jit
def heads_host(out: cute.Tensor, kv_bytes: Int64, heads: Int32, stream):
    section = heads_in_l2(kv_bytes, heads)
    heads_kernel(out, section).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)


@pytest.mark.parametrize(
    ("kv_bytes", "heads", "expected"),
    [(1 << 20, 16, 16), (1 << 20, 64, 50), (1 << 40, 8, 1), (0, 8, 8), (50 << 20, 3, 1)],
)
def test_heads_in_l2(kv_bytes, heads, expected):
    """As many heads as 50 MiB hold, at least one, at most all; sizes beyond 32 bits."""
    out = torch.zeros(1, dtype=torch.int32)
    run(heads_host, out, Int64(kv_bytes), heads)
    assert out.item() == expected


def test_coefficients_are_float32():
    """The published ones, with no rounding left to do."""
    from kernels.common.exp2 import POLYNOMIALS

    assert all(float(np.float32(c)) == c for row in POLYNOMIALS.values() for c in row)
