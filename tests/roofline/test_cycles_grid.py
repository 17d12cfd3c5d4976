"""Work items over SMs, and costs between and beyond what was replayed."""

from __future__ import annotations

import random

import pytest

from roofline.cycles.grid import ItemCost, fill, in_grid_order, item_cycles
from roofline.cycles.predict import Replayed, _alike, _per_block, item_cost
from roofline.cycles.probe import Workload
from roofline.cycles.state import Run
from roofline.problem import Problem

COST = ItemCost(((4, 1000.0), (8, 1800.0), (16, 3400.0)))


def work(**changes: object) -> Workload:
    base: dict[str, object] = {
        "name": "k", "make": None, "gpu": "b200", "dtype": "bfloat16", "head_dim": 128,
        "tile_rows": 256, "tile_keys": 128, "persistent": False, "longest_first": False,
    }  # fmt: skip
    return Workload(**{**base, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("blocks", "cycles"),
    [(4, 1000), (6, 1400), (8, 1800), (12, 2600), (16, 3400), (64, 13000), (2, 600)],
)
def test_costs_are_linear_between_and_beyond(blocks: int, cycles: float) -> None:
    assert COST.cycles(blocks) == pytest.approx(cycles)


def test_overhead_is_what_no_block_explains() -> None:
    assert (COST.slope, COST.overhead) == (200.0, 200.0)


def test_every_item_is_priced() -> None:
    assert item_cycles(COST, [16, 4, 16]) == [3400.0, 1000.0, 3400.0]


def test_items_of_a_causal_mask_are_counted_row_by_row() -> None:
    for seqlen, seqlen_k in ((1000, 1000), (512, 1500), (700, 300)):
        problem = Problem(1, seqlen, seqlen_k, 1, 1, True)
        found = work().iterations(problem)
        expected = []
        for first in range(0, seqlen, 256):
            keys = [
                min(max(row + 1 + seqlen_k - seqlen, 0), seqlen_k)
                for row in range(first, min(first + 256, seqlen))
            ]
            expected.append(-(-max(keys) // 128))
        assert found == expected


def test_equal_items_take_whole_waves() -> None:
    filled = fill([100.0] * 21, 10, gap=0.0, start=0.0, persistent=False)
    assert filled.cycles == 300.0
    assert filled.busy == pytest.approx(21 / 30)


def test_a_gap_is_paid_for_every_cta() -> None:
    assert fill([100.0] * 4, 2, gap=7.0, start=0.0, persistent=False).cycles == 214.0


def test_longest_first_is_what_a_greedy_schedule_does() -> None:
    """Against a plain simulation, and never better than the mean nor the longest item."""
    rng = random.Random(0)
    for _ in range(20):
        cycles = [float(rng.randrange(1, 1000)) for _ in range(rng.randrange(1, 60))]
        slots = rng.randrange(1, 12)
        free = [0.0] * slots
        for length in cycles:
            at = free.index(min(free))
            free[at] += length
        filled = fill(cycles, slots, gap=0.0, start=0.0, persistent=False)
        assert filled.cycles == pytest.approx(max(free))
        assert filled.cycles >= max(max(cycles), sum(cycles) / slots)


def test_causal_order_and_its_gain() -> None:
    problem = Problem(2, 2048, 2048, 3, 3, True)
    blocks = work().iterations(problem)
    longest = in_grid_order(blocks, problem, longest_first=True)
    assert longest == sorted(longest, reverse=True) and len(longest) == 8 * 6
    plain = in_grid_order(blocks, problem, longest_first=False)
    assert sorted(plain) == sorted(longest) and plain[:8] == blocks
    cost = ItemCost(((2, 500.0), (16, 4000.0)))
    ends = [
        fill(item_cycles(cost, order), 10, 0.0, 0.0, False).cycles for order in (longest, plain)
    ]
    assert ends[0] <= ends[1]


def test_a_persistent_cta_pays_its_start_once() -> None:
    filled = fill([100.0] * 4, 2, gap=50.0, start=30.0, persistent=True)
    assert filled.cycles == 230.0


def test_a_persistent_kernels_cost_is_solved_from_three_replays() -> None:
    def replayed(blocks: int, items: int) -> Replayed:
        return Replayed(blocks, items, Run(cycles=900.0 + 250.0 * items + 40.0 * blocks))

    cost = item_cost(work(persistent=True), [replayed(16, 1), replayed(32, 2), replayed(24, 1)])
    assert cost.start == pytest.approx(900.0)
    assert cost.cycles(100) == pytest.approx(250.0 + 40.0 * 100)


def test_a_steady_block_takes_no_less_than_its_busiest_unit() -> None:
    """Replays that were lucky at the end would promise 250 cycles where MMAs alone take 256."""
    points = tuple((n, 500.0 + 260.0 * n - (40.0 if n == 16 else 0.0)) for n in (8, 12, 16))
    assert ItemCost(points).slope == 255.0
    bounded = ItemCost(points, least=256.0)
    assert bounded.slope == 256.0
    assert bounded.cycles(1016) - bounded.cycles(1000) == pytest.approx(16 * 256.0)
    assert bounded.cycles(12) == points[1][1]  # as replayed


@pytest.mark.parametrize("seed", range(20))
def test_units_are_busy_between_nothing_and_always(seed: int) -> None:
    """Whatever cycles replays take, and however much of an item its mask cuts off."""
    rng = random.Random(seed)
    replays = []
    for n in range(1, 17):
        busy = {"tensor core": 100.0 * n, "ALU": 40.0 * n + rng.choice((0.0, 150.0))}
        stalls = {"softmax": {"wait": 30.0 * n + rng.uniform(-200, 200), "issue": 500.0}}
        run = Run(101.0 * n + rng.uniform(0, 300), busy, stalls, {"softmax": 4}, 10 * n)
        replays.append(Replayed(n, 1, run))
    cost = item_cost(work(), replays)
    steady = _per_block(_alike(replays), cost.slope)
    assert steady.cycles >= 100.0
    assert steady.busy["tensor core"] == pytest.approx(100.0)
    assert all(0.0 <= cycles <= steady.cycles for cycles in steady.busy.values())
    assert 10.0 < steady.busy["ALU"] < 70.0  # three standard errors of the mask's luck
    assert steady.stalls["softmax"]["issue"] == pytest.approx(0.0, abs=1e-9)  # once an item, however long
    waits = steady.stalls["softmax"].values()
    assert all(0.0 <= cycles <= steady.cycles for cycles in waits)
