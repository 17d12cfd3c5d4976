"""Whole problems: visible pairs, visited tiles, bytes and schedules against direct counting."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from roofline import RooflineError, budget
from roofline.problem import Problem, bounds, makespan


def mask(seqlen: int, seqlen_k: int, causal: bool) -> np.ndarray:
    """True where query row sees key column, bottom-right aligned."""
    seen = np.ones((seqlen, seqlen_k), bool)
    return np.tril(seen, seqlen_k - seqlen) if causal else seen


def random_problems(count: int) -> list[Problem]:
    rng = random.Random(4)
    problems = []
    for _ in range(count):
        kv_heads = rng.randint(1, 3)
        problems.append(
            Problem(
                batch=rng.randint(1, 3),
                seqlen=rng.randint(1, 900),
                seqlen_k=rng.randint(1, 900),
                heads=kv_heads * rng.randint(1, 4),
                kv_heads=kv_heads,
                causal=rng.random() < 0.7,
            )
        )
    return problems


# The first key is seen by the last row of a query tile, and by the first row of the next one.
BOUNDARIES = [Problem(1, 256 + shift, 256, 1, 1, True) for shift in (63, 64, 127, 128, 129)]


@pytest.mark.parametrize("problem", random_problems(25) + BOUNDARIES, ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("ctas", [1, 2])
def test_visible_pairs_and_visited_tiles(problem: Problem, direction: str, ctas: int) -> None:
    seen = mask(problem.seqlen, problem.seqlen_k, problem.causal)
    assert problem.visible_share == Fraction(int(seen.sum()), seen.size)
    if not seen.any():
        return
    b = budget("b200", 128, 64, 64, direction=direction, ctas=ctas)
    rows = 128 * (ctas if direction == "forward" else 1)
    keys = 64 * (ctas if direction == "backward" else 1)
    lengths: Counter[int] = Counter()
    blocks = [
        [bool(seen[r : r + rows, k : k + keys].any()) for k in range(0, problem.seqlen_k, keys)]
        for r in range(0, problem.seqlen, rows)
    ]
    for line in blocks if direction == "forward" else zip(*blocks, strict=True):
        if any(line):
            lengths[sum(line)] += problem.batch * problem.heads
    found = bounds(problem, b)
    assert found.work == lengths
    assert found.tiles == ctas * sum(n * c for n, c in lengths.items())


def test_flops_are_the_published_count() -> None:
    """4 s^2 d h forward, 2.5 times that backward, half of it when causal."""
    s, d, h = 4096, 128, 16
    for causal in (False, True):
        problem = Problem(8, s, s, h, h, causal)
        forward = problem.flops(budget("b200", 256, 128, d).tile)
        backward = problem.flops(budget("b200", 128, 128, d, direction="backward").tile)
        assert backward == Fraction(5, 2) * forward
        dense = 8 * 4 * s * s * d * h
        assert float(forward) == pytest.approx(dense / 2 if causal else dense, rel=1.0 / s)


def test_forward_bytes_by_hand() -> None:
    """2 sequences, 4 query heads on 2 key heads, 512 queries, 256 keys, head_dim 64/32, bf16."""
    problem = Problem(2, 512, 256, 4, 2)
    found = bounds(problem, budget("b200", 256, 128, 64, 32))
    q, o, lse = 2 * 512 * 4 * 64 * 2, 2 * 512 * 4 * 32 * 2, 2 * 512 * 4 * 4
    k, v = 2 * 256 * 2 * 64 * 2, 2 * 256 * 2 * 32 * 2
    assert found.hbm_bytes == q + k + v + o + lse
    # 2 query tiles x 4 heads x 2 sequences, each loads all 256 keys of K and V.
    assert found.l2_bytes == q + o + lse + 16 * 256 * (64 + 32) * 2
    assert found.materialised_bytes == q + k + v + o + 4 * (2 * 4 * 512 * 256 * 2)
    assert found.materialised_peak_bytes == 2 * (2 * 4 * 512 * 256 * 2)


def test_two_ctas_halve_the_l2_traffic_of_k_and_v() -> None:
    problem = Problem(1, 4096, 4096, 1, 1)
    one, two = (bounds(problem, budget("b200", 256, 128, 128, ctas=c)) for c in (1, 2))
    own = 4096 * (128 * 2 + 128 * 2 + 4)
    assert two.l2_bytes - own == (one.l2_bytes - own) / 2
    assert two.hbm_bytes == one.hbm_bytes


def test_backward_bytes_by_hand() -> None:
    """One head, 256 queries and keys of 128 in bf16: the fp32 dQ accumulator moves four times."""
    found = bounds(Problem(1, 256, 256, 1, 1), budget("b200", 128, 128, 128, direction="backward"))
    tensor, acc, row = 256 * 128 * 2, 256 * 128 * 4, 256 * 4
    prologue = 2 * tensor + row + acc  # O, dO in; delta out; accumulator zeroed
    main = 4 * tensor + 2 * row + acc + 2 * tensor  # Q dO K V, LSE delta; dQ added; dK dV out
    epilogue = acc + tensor
    assert found.hbm_bytes == prologue + main + epilogue
    per_tile = 128 * (2 * 128 * 2 + 8 + 128 * 4)
    assert found.l2_bytes == prologue + epilogue + 4 * tensor + 4 * per_tile


def schedule(items: list[int], slots: int) -> int:
    ends = [0] * slots
    for length in sorted(items, reverse=True):
        first = ends.index(min(ends))
        ends[first] += length
    return max(ends)


def test_makespan_is_longest_first() -> None:
    rng = random.Random(11)
    for _ in range(50):
        items = [rng.randint(1, 30) for _ in range(rng.randint(1, 80))]
        slots = rng.randint(1, 12)
        assert makespan(Counter(items), slots) == schedule(items, slots)


def test_large_makespans_are_bounded() -> None:
    """Beyond what is simulated the bound is within a longest item of the schedule."""
    rng = random.Random(12)
    items = [rng.randint(1, 30) for _ in range(6000)]
    exact = schedule(items, 148)
    assert exact - 30 <= makespan(Counter(items), 148) <= exact


def test_waves_and_tails() -> None:
    """149 equal items on 148 SMs take two rounds; the second is almost empty."""
    b = budget("b200", 256, 128, 128)
    full = bounds(Problem(1, 256, 1024, 148, 148), b)
    tail = bounds(Problem(1, 256, 1024, 149, 149), b)
    assert full.sm_cycles == 8 * 2048
    assert full.occupancy == 1
    assert tail.sm_cycles == 2 * full.sm_cycles
    assert tail.occupancy == pytest.approx(149 / 296)


def test_short_problems_are_bound_by_hbm() -> None:
    """One query a sequence (decoding): the keys are read once and little is computed."""
    found = bounds(Problem(256, 1, 32768, 8, 8), budget("b200", 128, 128, 128))
    assert found.bound == "hbm" or found.hbm_seconds > 0.5 * found.sm_seconds
    long = bounds(Problem(1, 32768, 32768, 16, 16), budget("b200", 256, 128, 128))
    assert long.bound == "sm"
    assert long.tflops <= long.budget.ceiling_tflops


def test_visible_share_scales_the_work() -> None:
    b = budget("b200", 256, 128, 128)
    dense = bounds(Problem(1, 8192, 8192, 4, 4), b)
    quarter = bounds(Problem(1, 8192, 8192, 4, 4, visible=Fraction(1, 4)), b)
    assert quarter.tiles * 4 == dense.tiles
    assert quarter.problem.flops(b.tile) * 4 == dense.problem.flops(b.tile)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": 0}, "batch 0: must be a positive integer"),
        ({"seqlen": 0}, "seqlen 0"),
        ({"seqlen_k": -1}, "seqlen_k -1"),
        ({"heads": 3, "kv_heads": 2}, "heads 3: must be a multiple of kv_heads, 2"),
        ({"visible": Fraction(0)}, "visible 0.0: must be above 0"),
        ({"visible": Fraction(3, 2)}, "visible 1.5"),
        ({"visible": Fraction(1, 2), "causal": True}, "exclude each other"),
        ({"seqlen": 1 << 40}, "at most"),
        ({"heads": True}, "heads True"),
    ],
)
def test_bad_problems(values: dict, message: str) -> None:  # type: ignore[type-arg]
    good = {"batch": 1, "seqlen": 8, "seqlen_k": 8, "heads": 1, "kv_heads": 1}
    with pytest.raises(RooflineError) as error:
        Problem(**(good | values))
    assert message in str(error.value)
