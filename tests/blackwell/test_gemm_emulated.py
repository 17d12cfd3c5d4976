# SPDX-License-Identifier: Apache-2.0
"""The GEMM's numbers on the modelled SM: against float64, bit for bit where sums are exact."""

import pytest
import torch

from kernels.blackwell.gemm import ROLES, Gemm, check_operands
from kernels.emulator import emulate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CANARY = 123.0  # exact in every dtype


def run(gemm, a, b, c, gpu="b200"):
    check_operands(a, b, c)
    report = emulate(gemm, a, b, c, gpu=gpu, roles=ROLES)
    report.raise_if_findings()
    return report


def guarded(rows, cols, dtype, pad_cols=16):
    """A canary-filled buffer and the (rows, cols) view inside it: rows above, below and beside."""
    buffer = torch.full((rows + 4, cols + pad_cols), CANARY, dtype=dtype)
    return buffer, buffer[2 : rows + 2, :cols]


def assert_only_view_written(buffer, view):
    outside = torch.ones(buffer.shape, dtype=torch.bool)
    outside[2 : view.shape[0] + 2, : view.shape[1]] = False
    assert (buffer[outside] == CANARY).all()


@pytest.mark.parametrize(
    ("m", "n", "k", "in_dtype", "out_dtype", "gemm"),
    [
        (128, 128, 64, BF16, FP32, Gemm()),  # one tile, one stage of the ring
        (128, 128, 256, FP16, FP16, Gemm()),  # the ring exactly full
        (128, 256, 576, BF16, BF16, Gemm()),  # twice round the ring, two CTAs
        (200, 136, 328, BF16, FP32, Gemm()),  # every edge ragged
        (1, 8, 8, FP16, FP32, Gemm()),  # smaller than one row, column and step of a tile
        (77, 4, 72, BF16, FP32, Gemm()),  # C rows of 16 bytes
        (130, 264, 104, FP16, BF16, Gemm(tile_n=256, stages=2)),
        (129, 40, 160, BF16, FP16, Gemm(tile_n=32, tile_k=128, stages=1)),
        (64, 96, 264, FP16, FP32, Gemm(tile_n=64, tile_k=32, stages=3)),
    ],
)
def test_integers_are_exact_and_nothing_else_is_written(m, n, k, in_dtype, out_dtype, gemm):
    """Products and sums of small integers are exact in float32 in whatever order they are added."""
    random = torch.Generator().manual_seed(m * n + k)
    a = torch.randint(-8, 9, (m, k), generator=random).to(in_dtype)
    b = torch.randint(-8, 9, (n, k), generator=random).to(in_dtype)
    buffer, c = guarded(m, n, out_dtype)
    run(gemm, a, b, c)
    expected = (a.double() @ b.double().T).to(FP32).to(out_dtype)
    torch.testing.assert_close(c, expected, rtol=0, atol=0)
    assert_only_view_written(buffer, c)


@pytest.mark.parametrize("in_dtype", [BF16, FP16])
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32])
def test_random_data_within_the_rounding_of_its_dtypes(in_dtype, out_dtype):
    m, n, k = 140, 152, 296
    random = torch.Generator().manual_seed(7)
    # Asymmetric: a positive mean and rows of growing size, so that no error hides in zero sums.
    a = (torch.randn(m, k, generator=random) + 0.25).mul(torch.linspace(0.1, 2, m)[:, None])
    b = torch.randn(n, k, generator=random) - torch.linspace(0, 1, k)
    a, b = a.to(in_dtype), b.to(in_dtype)
    c = torch.empty(m, n, dtype=out_dtype)
    run(Gemm(), a, b, c)
    exact = a.double() @ b.double().T
    # float32 sums of k terms: k * 2^-24 of the sum of magnitudes bounds any order of addition
    # (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2).
    bound = k * 2.0**-24 * (a.double().abs() @ b.double().abs().T)
    bound += {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}[out_dtype] * exact.abs()
    assert ((c.double() - exact).abs() <= bound).all()


def test_operands_may_be_views_with_padded_rows():
    random = torch.Generator().manual_seed(3)
    a = torch.randint(-8, 9, (300, 256), generator=random).to(BF16)[50:190, 16:152]
    b = torch.randint(-8, 9, (90, 200), generator=random).to(BF16)[:72, 64:]
    buffer, c = guarded(140, 72, FP32, pad_cols=4)
    run(Gemm(), a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=0, atol=0)
    assert_only_view_written(buffer, c)


def test_nan_and_infinity_stay_in_their_row_and_column():
    random = torch.Generator().manual_seed(5)
    a = torch.randint(-8, 9, (136, 80), generator=random).to(FP16)
    b = torch.randint(1, 9, (24, 80), generator=random).to(FP16)
    a[130, 79], a[7, 3], b[20, 0] = torch.nan, torch.inf, -torch.inf
    a[:, 0] = a[:, 0].abs() + 1  # no 0 * inf beside the planted NaN
    c = torch.empty(136, 24, dtype=FP32)
    run(Gemm(), a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("gpu", ["b200", "gb300"])
def test_each_architecture_runs_its_own_ptx(gpu):
    random = torch.Generator().manual_seed(13)
    a = torch.randint(-8, 9, (72, 80), generator=random).to(BF16)
    b = torch.randint(-8, 9, (24, 80), generator=random).to(BF16)
    c = torch.empty(72, 24)
    report = run(Gemm(), a, b, c, gpu)
    assert report.gpu.arch == {"b200": "sm_100a", "gb300": "sm_103a"}[gpu]
    assert torch.equal(c, a.float() @ b.float().T)


def test_one_compile_serves_other_shapes_and_runs_repeat_bit_for_bit():
    random = torch.Generator().manual_seed(11)
    outputs, compiles = [], []
    for m, n, k in ((140, 8, 72), (20, 136, 200), (140, 8, 72)):
        random.manual_seed(m)
        a = torch.randn(m, k, generator=random).to(BF16)
        b = torch.randn(n, k, generator=random).to(BF16)
        c = torch.empty(m, n)
        compiles.append(run(Gemm(tile_n=64), a, b, c).compile_seconds)
        outputs.append(c)
    assert compiles[1:] == [0.0, 0.0]
    assert torch.equal(outputs[0], outputs[2])


def test_instructions_are_those_of_every_role():
    """Twice the K tiles cost load and multiply twice the loop, and the epilogue nothing."""
    counts = []
    for k_tiles in (1, 2, 3):
        a, b = (torch.ones(128, 64 * k_tiles, dtype=BF16) for _ in range(2))
        counts.append(run(Gemm(), a, b, torch.empty(128, 128)).thread_instructions)
    step = counts[1] - counts[0]
    assert counts[2] - counts[1] == step
    assert 0 < step < counts[0]


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (((16, 64), (8, 72), (16, 8)), "must be"),
        (((16, 64), (8, 64), (8, 16)), "must be"),
        (((16, 64), (0, 64), (16, 0)), "none of them 0"),
        (((16, 60), (8, 60), (16, 8)), "A has strides"),
        (((16, 64), (6, 64), (16, 6)), "C has strides"),
    ],
)
def test_operands_that_tma_cannot_take_are_named(shapes, said):
    a, b, c = (torch.zeros(shape, dtype=BF16) for shape in shapes)
    with pytest.raises(ValueError, match=said):
        check_operands(a, b, c)


def test_columns_that_are_not_contiguous_are_named():
    a, b, c = torch.zeros(64, 16, dtype=BF16).T, torch.zeros(8, 64, dtype=BF16), torch.zeros(16, 8)
    with pytest.raises(ValueError, match="A has strides"):
        check_operands(a, b, c)
