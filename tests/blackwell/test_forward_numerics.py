# SPDX-License-Identifier: Apache-2.0
"""The forward kernel's numbers, instruction by instruction on the modelled SM, against float64."""

import math

import pytest
import torch

from kernels.common.plan import KernelPlan
from tests.blackwell.attention import attention, check_numbers, random_problem, run_forward

# A compile takes seconds and a run takes less, so few plans carry many tests.
DENSE, CAUSAL = KernelPlan.forward(), KernelPlan.forward(causal=True)
# head_dim 64: one plan for each way to compute exp2, with dtypes, masks and thresholds in turn
MUFU = KernelPlan.forward(head_dim=64, exp2_emulated_share=0.0)
MIXED = KernelPlan.forward(
    head_dim=64, dtype="float16", exp2_emulated_share=0.5, rescale_threshold=0.0
)
POLYNOMIAL = KernelPlan.forward(head_dim=64, causal=True, exp2_emulated_share=1.0)
LAGGING = KernelPlan.forward(head_dim=64, dtype="float16", rescale_threshold=15.0)
# every other head_dim, over the GPUs
HEAD_DIMS = [
    KernelPlan.forward(head_dim=16, dtype="float16", causal=True),
    KernelPlan.forward(head_dim=32, gpu="gb200", exp2_emulated_share=0.25),
    KernelPlan.forward(head_dim=48, causal=True),
    KernelPlan.forward(head_dim=80, dtype="float16", exp2_emulated_share=1.0),
    KernelPlan.forward(head_dim=96, gpu="gb300", dtype="float16", causal=True),
    KernelPlan.forward(head_dim=112, gpu="b300", causal=True, exp2_emulated_share=0.75),
]


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
    plan = CAUSAL
    out, lse, _ = check_numbers(plan, *random_problem(plan, 1, seqlen_q, seqlen_k, 1, 1, seed=1))
    blind = max(seqlen_q - seqlen_k, 0)
    assert (out[:, :blind] == 0).all() and (lse[..., :blind] == -math.inf).all()


@pytest.mark.parametrize("shape", [(1, 40, 140, 1, 1), (2, 200, 260, 2, 1)], ids=str)
@pytest.mark.parametrize("plan", HEAD_DIMS, ids=lambda plan: f"{plan.head_dim}-{plan.gpu}")
def test_every_head_dim_dtype_and_gpu(plan, shape):
    check_numbers(plan, *random_problem(plan, *shape, seed=plan.head_dim))


@pytest.mark.parametrize("plan", [MUFU, MIXED, POLYNOMIAL, LAGGING], ids=lambda plan: plan.name)
def test_every_way_to_compute_exp2(plan):
    check_numbers(plan, *random_problem(plan, 1, 200, 390, 2, 2, seed=2))


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
def test_tile_order_moves_tiles_and_no_bit(causal):
    """The first CTA takes the first queries of a head, or its last ones; the result is the same."""
    orders = {
        order: KernelPlan.forward(head_dim=64, causal=causal, tile_order=order)
        for order in ("head_major", "longest_first")
    }
    problem = random_problem(orders["head_major"], 2, 300, 200, 3, 3, seed=3)
    whole = [run_forward(plan, *problem)[:2] for plan in orders.values()]
    assert all(torch.equal(a, b) for a, b in zip(*whole, strict=True))
    for order, plan in orders.items():
        out = torch.full_like(problem[0], math.nan)
        run_forward(plan, *problem, out=out, ctas=[0])
        written = out.isfinite().all(-1)[0, :, 0]
        last = order == "longest_first"
        assert written[256:].all() == last and written[:256].all() == (not last), order


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


@pytest.mark.parametrize("plan", [MUFU, MIXED, LAGGING], ids=lambda p: f"{p.rescale_threshold:g}")
@pytest.mark.parametrize("step", [1.5, 7.0, 30.0])
def test_rescaling_whatever_the_threshold(plan, step):
    """Maxima that creep, stay just below and jump far above the threshold."""
    check_numbers(plan, *rising_problem(plan, step))


def test_a_threshold_saves_rescales():
    """Maxima that creep: with tau = 0 every block rescales O, with tau = 8 few do."""
    problem = rising_problem(MUFU, 1.5)
    halves = tuple(tensor.half() for tensor in problem)
    lagging, exact = run_forward(MUFU, *problem), run_forward(MIXED, *halves)
    executed = [report.thread_instructions for _, _, report in (lagging, exact)]
    torch.testing.assert_close(lagging[1], exact[1], rtol=0, atol=0.05)
    assert executed[0] < 0.9 * executed[1]


def test_large_and_small_scale():
    problem = random_problem(POLYNOMIAL, 1, 140, 140, 1, 1, seed=5)
    check_numbers(POLYNOMIAL, *problem, scale=2.0)
    check_numbers(POLYNOMIAL, *problem, scale=1e-3)


def test_a_key_found_is_returned_bit_for_bit():
    """Each query matches one key of its own head by far: its output is that value, exactly."""
    plan = DENSE
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
    plan = MUFU
    generator = torch.Generator().manual_seed(7)
    q = torch.zeros(1, 200, 1, 64).bfloat16()
    k = torch.randn(1, 256, 1, 64, generator=generator).bfloat16()
    v = torch.randint(-8, 9, k.shape, generator=generator).bfloat16()
    out, lse, _ = run_forward(plan, q, k, v)
    assert torch.equal(out, v.float().mean(1, keepdim=True).bfloat16().expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(256)), rtol=1e-6, atol=0)


NAN_COLUMNS = [0, 1, 2, 31, 96, 127, 128, 199]


@pytest.mark.parametrize("column", NAN_COLUMNS)
@pytest.mark.parametrize("plan", [CAUSAL, POLYNOMIAL], ids=["mostly MUFU", "polynomial"])
def test_one_nan_key_makes_every_row_that_sees_it_nan(plan, column):
    """Whichever column, pipe and block it falls on; rows that do not see it are untouched."""
    q, k, v = random_problem(plan, 1, 200, 200, 1, 1, seed=8)
    scale = plan.head_dim**-0.5
    k[0, column, 0, 17] = math.nan
    out, lse, _ = run_forward(plan, q, k, v)
    assert out[0, column:].isnan().all() and lse[..., column:].isnan().all()
    exact, exact_lse = attention(q.double(), k.double(), v.double(), scale, causal=True)
    torch.testing.assert_close(out[0, :column].double(), exact[0, :column], rtol=0.02, atol=0.02)
    torch.testing.assert_close(
        lse[..., :column].double(), exact_lse[..., :column], rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("plan", [MUFU, HEAD_DIMS[3]], ids=["MUFU", "polynomial"])
def test_infinite_keys_end_as_in_pytorch(plan, value):
    """Scores of +inf make a row NaN, scores of -inf drop the key."""
    q, k, v = random_problem(plan, 1, 60, 150, 1, 1, seed=9)
    scale = plan.head_dim**-0.5
    k[0, 3, 0, 5] = k[0, 140, 0, 5] = value
    out, lse, _ = run_forward(plan, q, k, v)
    exact, exact_lse = attention(q.double(), k.double(), v.double(), scale, causal=False)
    positive = (q[0, :, 0, 5] * value) > 0
    assert (exact_lse[0, 0, positive] == math.inf).all()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-3)
    assert 10 < positive.sum() < 50
    assert out[0, positive].isnan().all() and out[0, ~positive].isfinite().all()
    torch.testing.assert_close(out.double(), exact, rtol=0.02, atol=0.02, equal_nan=True)


def test_nearly_equal_weights_in_float16():
    """Plain is exact there but for its last rounding, and so must we be: a polynomial of degree 3
    shows (RMS up to 1.02 times plain's), one of degree 4 does no more than MUFU's exp2 (1.0005)."""
    plan = KernelPlan.forward(dtype="float16", exp2_emulated_share=0.3)
    for seqlen_k in (16, 64, 256):
        q, k, v = random_problem(plan, 1, 140, seqlen_k, 2, 1, seed=11)
        q, k, scale = q * 1e-3, k * 1e-3, plan.head_dim**-0.5
        out, _, _ = run_forward(plan, q, k, v)
        exact, _ = attention(q.double(), k.double(), v.double(), scale, causal=False)
        plain, _ = attention(q, k, v, scale, causal=False)
        ours, theirs = ((x.double() - exact).square().mean().sqrt() for x in (out, plain))
        assert ours <= 1.001 * theirs


def test_a_row_of_minus_infinities_is_nan_but_a_row_without_keys_is_zero():
    """softmax of visible -inf scores is 0 / 0 in PyTorch; no key at all is 0 by convention."""
    q, k, v = (torch.ones(1, n, 1, 64).bfloat16() for n in (5, 3, 3))
    out, lse, _ = run_forward(POLYNOMIAL, q, k * -math.inf, v)
    assert (out[0, :2] == 0).all() and out[0, 2:].isnan().all()
    assert (lse == -math.inf).all()


def test_nan_queries_and_values_stay_in_their_row_and_column():
    q, k, v = random_problem(MUFU, 1, 140, 140, 1, 1, seed=10)
    q[0, 9, 0, 3] = math.nan
    v[0, 77, 0, 40] = math.nan
    out, _, _ = run_forward(MUFU, q, k, v)
    expected = torch.zeros(140, 64, dtype=torch.bool)
    expected[9] = True
    expected[:, 40] = True
    assert torch.equal(out[0, :, 0].isnan(), expected)


def test_strides_are_taken_as_they_are():
    """Q, K, V as slices of one packed tensor, O as (batch, heads, seqlen, head_dim) in memory."""
    plan = POLYNOMIAL
    generator = torch.Generator().manual_seed(11)
    packed = torch.randn(2, 150, 3, 2, 64, generator=generator).bfloat16()
    q, k, v = packed.unbind(2)
    storage = torch.full((2, 2, 150, 64), math.nan).bfloat16()
    before = packed.clone()
    check_numbers(plan, q, k, v, out=storage.transpose(1, 2))
    assert torch.equal(packed, before)


def test_nothing_is_written_beyond_the_outputs():
    """Guard rows around O stay as they were, though tiles reach beyond them."""
    plan = HEAD_DIMS[2]
    q, k, v = random_problem(plan, 1, 70, 70, 1, 1, seed=12)
    storage = torch.full((1, 70 + 60, 1, 64), 7.0).bfloat16()
    check_numbers(plan, q, k, v, out=storage[:, 30:100, :, 8:56])
    guard = storage.clone()
    guard[:, 30:100, :, 8:56] = 7.0
    assert (guard == 7.0).all()


ORDERS = [
    (schedule, visibility, profile)
    for schedule in ("round_robin", "run_until_blocked", "random", "adversarial")
    for visibility in ("eager", "late")
    for profile in ("silicon", "isa")
]


@pytest.mark.parametrize(("schedule", "visibility", "profile"), ORDERS, ids="-".join)
def test_every_legal_order_gives_the_same_bits(schedule, visibility, profile):
    """Whatever runs first and however late asynchronous effects come; PTX's rules to the letter."""
    problem = random_problem(CAUSAL, 1, 300, 600, 2, 1, seed=13)
    expected = run_forward(CAUSAL, *problem)
    order = {"schedule": schedule, "visibility": visibility, "profile": profile}
    out, lse, _ = run_forward(CAUSAL, *problem, **order, seed=5)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
