# SPDX-License-Identifier: Apache-2.0
"""The forward kernel's numbers, instruction by instruction on the modelled SM, against float64."""

import math

import pytest
import torch

from kernels.common.plan import KernelPlan
from tests.blackwell.attention import attention, check_numbers, random_problem, run_forward

DENSE, CAUSAL = KernelPlan.forward(), KernelPlan.forward(causal=True)
DENSE_64, CAUSAL_64 = (KernelPlan.forward(head_dim=64, causal=causal) for causal in (False, True))

# (batch, seqlen_q, seqlen_k, heads, kv_heads)
SHAPES = [
    (1, 256, 128, 1, 1),  # one block: nothing is rescaled
    (1, 256, 512, 1, 1),  # the ring of K and V wraps around
    (2, 130, 200, 2, 1),  # ragged tails, MQA, batch
    (1, 1, 1, 1, 1),
    (1, 5, 300, 3, 1),  # few queries, many keys
    (1, 300, 7, 6, 2),  # many queries, few keys, GQA
    (1, 257, 129, 1, 1),  # one row and one key too many
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("plan", [DENSE, CAUSAL], ids=["dense", "causal"])
def test_shapes(plan, shape):
    check_numbers(plan, *random_problem(plan, *shape))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(384, 384), (300, 300), (130, 400), (700, 90)])
def test_causal_is_bottom_right(seqlen_q, seqlen_k):
    """With 700 queries and 90 keys the first tile, and most of the second, sees no key."""
    plan = CAUSAL_64
    out, lse, _ = check_numbers(plan, *random_problem(plan, 1, seqlen_q, seqlen_k, 1, 1, seed=1))
    blind = max(seqlen_q - seqlen_k, 0)
    assert (out[:, :blind] == 0).all() and (lse[..., :blind] == -math.inf).all()


@pytest.mark.parametrize("head_dim", range(16, 129, 16))
def test_every_head_dim(head_dim):
    plan = KernelPlan.forward(head_dim=head_dim, dtype="float16")
    check_numbers(plan, *random_problem(plan, 1, 40, 140, 1, 1, seed=head_dim))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_exp2_shares(share, dtype):
    plan = KernelPlan.forward(head_dim=64, dtype=dtype, causal=True, exp2_emulated_share=share)
    check_numbers(plan, *random_problem(plan, 1, 200, 260, 1, 1, seed=2))


@pytest.mark.parametrize("gpu", ["b300", "gb200"])
def test_other_gpus(gpu):
    plan = KernelPlan.forward(gpu=gpu, head_dim=64)
    check_numbers(plan, *random_problem(plan, 1, 140, 260, 2, 2, seed=3))


def rising_problem(plan, step):
    """Row maxima that rise by about ``step`` log2 units from each key block to the one left of it.

    The kernel goes from the right to the left, so every block moves every maximum.
    """
    q, k, v = random_problem(plan, 1, 150, 640, 1, 1, seed=4)
    scale = plan.head_dim**-0.5
    q[..., 0] = 1.0
    block = torch.arange(640) // 128
    k[0, :, 0, 0] = ((4 - block) * step / (scale * math.log2(math.e))).to(k.dtype)
    return q, k, v


@pytest.mark.parametrize("threshold", [0.0, 4.0, 8.0, 15.0])
@pytest.mark.parametrize("step", [1.5, 7.0, 30.0])
def test_rescaling_whatever_the_threshold(threshold, step):
    """Maxima that creep, stay just below and jump far above the threshold."""
    plan = KernelPlan.forward(head_dim=64, rescale_threshold=threshold)
    check_numbers(plan, *rising_problem(plan, step))


def test_threshold_keeps_a_lower_maximum():
    """The sum's reference may lag by tau: same output, and the same LSE."""
    problem = rising_problem(DENSE_64, 7.0)
    lagging = run_forward(DENSE_64, *problem)
    exact = run_forward(KernelPlan.forward(head_dim=64, rescale_threshold=0.0), *problem)
    torch.testing.assert_close(lagging[0], exact[0], rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lagging[1], exact[1], rtol=0, atol=1e-3)
    assert lagging[2].thread_instructions < exact[2].thread_instructions  # fewer rescales


def test_large_and_small_scale():
    problem = random_problem(CAUSAL_64, 1, 140, 140, 1, 1, seed=5)
    check_numbers(CAUSAL_64, *problem, scale=2.0)
    check_numbers(CAUSAL_64, *problem, scale=1e-3)


def test_a_key_found_is_returned_bit_for_bit():
    """Each query matches one key of its own head by far: its output is that value, exactly."""
    plan = KernelPlan.forward(head_dim=128)
    batch, seqlen_q, seqlen_k, heads, kv_heads = 2, 140, 270, 4, 2
    generator = torch.Generator().manual_seed(6)
    codes = torch.randint(0, 2, (batch, seqlen_k, kv_heads, 128), generator=generator) * 2.0 - 1
    pick = torch.randint(0, seqlen_k, (batch, seqlen_q, heads), generator=generator)
    head_of = torch.arange(heads) // (heads // kv_heads)
    batch_of = torch.arange(batch)[:, None, None]
    queries = codes[batch_of, pick, head_of]
    values = torch.randn(codes.shape, generator=generator).bfloat16()
    out, lse, _ = run_forward(plan, queries.bfloat16(), codes.bfloat16(), values, scale=8.0)
    assert torch.equal(out, values[batch_of, pick, head_of])
    torch.testing.assert_close(lse, torch.full_like(lse, 8.0 * 128), rtol=1e-6, atol=0)


def test_equal_weights_average_bit_for_bit():
    """Zero queries weigh 256 keys alike; sums of small integers are exact, and so is their mean."""
    plan = KernelPlan.forward(head_dim=64)
    generator = torch.Generator().manual_seed(7)
    q = torch.zeros(1, 200, 1, 64).bfloat16()
    k = torch.randn(1, 256, 1, 64, generator=generator).bfloat16()
    v = torch.randint(-8, 9, k.shape, generator=generator).bfloat16()
    out, lse, _ = run_forward(plan, q, k, v)
    assert torch.equal(out, v.float().mean(1, keepdim=True).bfloat16().expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(256)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("column", [0, 1, 2, 31, 96, 127, 128, 199])
def test_one_nan_key_makes_every_row_that_sees_it_nan(column, share):
    """Whichever column, pipe and block it falls on; rows that do not see it are untouched."""
    plan = KernelPlan.forward(head_dim=64, causal=True, exp2_emulated_share=share)
    q, k, v = random_problem(plan, 1, 200, 200, 1, 1, seed=8)
    k[0, column, 0, 17] = math.nan
    out, lse, _ = run_forward(plan, q, k, v)
    assert out[0, column:].isnan().all() and lse[..., column:].isnan().all()
    exact, exact_lse = attention(q.double(), k.double(), v.double(), 0.125, causal=True)
    torch.testing.assert_close(out[0, :column].double(), exact[0, :column], rtol=0.02, atol=0.02)
    torch.testing.assert_close(
        lse[..., :column].double(), exact_lse[..., :column], atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_infinite_keys_end_as_in_pytorch(value, share):
    """Scores of +inf make a row NaN, scores of -inf drop the key."""
    plan = KernelPlan.forward(head_dim=64, exp2_emulated_share=share)
    q, k, v = random_problem(plan, 1, 60, 150, 1, 1, seed=9)
    k[0, 3, 0, 5] = k[0, 140, 0, 5] = value
    out, _, _ = run_forward(plan, q, k, v)
    exact, _ = attention(q.double(), k.double(), v.double(), 0.125, causal=False)
    positive = (q[0, :, 0, 5] * value) > 0
    assert 10 < positive.sum() < 50
    assert torch.equal(exact.isnan(), out.isnan())
    assert out[0, positive].isnan().all() and out[0, ~positive].isfinite().all()
    torch.testing.assert_close(out.double(), exact, rtol=0.02, atol=0.02, equal_nan=True)


def test_nan_queries_and_values_stay_in_their_row_and_column():
    q, k, v = random_problem(DENSE_64, 1, 140, 140, 1, 1, seed=10)
    q[0, 9, 0, 3] = math.nan
    v[0, 77, 0, 40] = math.nan
    out, _, _ = run_forward(DENSE_64, q, k, v)
    expected = torch.zeros(140, 64, dtype=torch.bool)
    expected[9] = True
    expected[:, 40] = True
    assert torch.equal(out[0, :, 0].isnan(), expected)


def test_strides_are_taken_as_they_are():
    """Q, K, V as slices of one packed tensor, O as (batch, heads, seqlen, head_dim) in memory."""
    plan = KernelPlan.forward(head_dim=64, causal=True)
    generator = torch.Generator().manual_seed(11)
    packed = torch.randn(2, 150, 3, 2, 64, generator=generator).bfloat16()
    q, k, v = packed.unbind(2)
    storage = torch.full((2, 2, 150, 64), math.nan).bfloat16()
    before = packed.clone()
    check_numbers(plan, q, k, v, out=storage.transpose(1, 2))
    assert torch.equal(packed, before)


def test_nothing_is_written_beyond_the_outputs():
    """Guard rows around O stay as they were, though tiles reach beyond them."""
    plan = KernelPlan.forward(head_dim=48)
    q, k, v = random_problem(plan, 1, 70, 70, 1, 1, seed=12)
    storage = torch.full((1, 70 + 60, 1, 64), 7.0).bfloat16()
    check_numbers(plan, q, k, v, out=storage[:, 30:100, :, 8:56])
    guard = storage.clone()
    guard[:, 30:100, :, 8:56] = 7.0
    assert (guard == 7.0).all()


def test_runs_repeat_bit_for_bit():
    problem = random_problem(CAUSAL_64, 1, 300, 300, 2, 1, seed=13)
    first, again = (run_forward(CAUSAL_64, *problem, seed=seed) for seed in (0, 1))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
