"""Tiles: what fits, in bytes, columns and registers; which wins, and whether the reasons hold."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest

from kernels.common.plan import KernelPlan
from roofline import RooflineError, find_gpu
from roofline.candidates import Candidate, candidates
from roofline.costs import calibration
from roofline.problem import Problem
from roofline.tiles import TIE, Priced, Ranking, only_tile, rank


def benchmark(head_dim: int, causal: bool = False, seqlen: int = 8192) -> Problem:
    """The published benchmark: 32k tokens, hidden size 2048."""
    heads = 2048 // head_dim
    return Problem(32768 // seqlen, seqlen, seqlen, heads, heads, causal)


def ranking(gpu: str, head_dim: int, **options) -> Ranking:  # type: ignore[no-untyped-def]
    causal = options.pop("causal", False)
    return rank(find_gpu(gpu), benchmark(head_dim, causal), head_dim, **options)


def find(found: Ranking, tile: str, ctas: int = 1, q: int = 2, s: int = 1) -> Priced:
    m, n = map(int, tile.split("x"))
    return next(
        p
        for p in found.priced
        if (p.tile.tile_m, p.tile.tile_n, p.tile.ctas) == (m, n, ctas)
        and (p.candidate.q_stages, p.candidate.s_stages) == (q, s)
    )


# Dao-AILab/flash-attention, flash_attn/cute/flash_fwd_sm100.py: 256x128, and pairs of CTAs for
# dense masks; (gpu, head_dim, causal).
@pytest.mark.parametrize(
    ("gpu", "head_dim", "causal", "most"),
    [
        ("b200", 128, False, TIE),
        ("b200", 128, True, TIE),
        ("gb200", 128, False, TIE),
        ("b300", 128, False, 1.1),
        ("b300", 128, True, 1.1),
        ("gb300", 128, True, 1.1),
        ("b200", 64, False, 1.3),
        ("b300", 64, True, 1.2),
    ],
)
def test_flash_attention_4_forward_tile(
    gpu: str, head_dim: int, causal: bool, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """How far FlashAttention-4's tile is behind the winner, at most: the one with a kernel."""
    found = ranking(gpu, head_dim, causal=causal)
    known = found.best_built
    assert known is not None
    assert (known.tile.tile_m, known.tile.tile_n, known.tile.ctas) == (256, 128, 1)
    behind = known.seconds / found.winner.seconds
    with capsys.disabled():
        winner = found.winner
        print(f"\n{gpu} d{head_dim} {'causal' if causal else 'dense'}: {winner.tile}, "
              f"256x128 {behind - 1:+.1%}")  # fmt: skip
    assert 1 / TIE <= behind <= most
    if most == TIE and not causal:
        assert found.winner is known and known.candidate.q_stages == 2


def test_last_wave_is_counted() -> None:
    """2048 items of 256 rows are 13.8 rounds of 148 SMs and 13.5 of 152, so 14 both times."""
    for gpu, sms in (("b200", 148), ("gb200", 152)):
        built = ranking(gpu, 128).best_built
        assert built is not None
        assert built.occupancy == pytest.approx(2048 / (14 * sms), rel=1e-3)
    small = Problem(1, 1024, 1024, 38, 38)  # 152 items of 256 rows
    built = rank(find_gpu("b200"), small, 128).best_built
    assert built is not None and built.occupancy == pytest.approx(152 / (2 * 148), rel=1e-3)


def test_flash_attention_4_backward_tile_wins() -> None:
    found = ranking("b200", 128, direction="backward")
    winner = found.winner.tile
    assert (winner.tile_m, winner.tile_n, winner.ctas) == (128, 128, 2)
    one = find(found, "128x128", q=1)
    assert one.iteration_cycles == 3328
    assert "SMEM reads" in found.reason(one)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gpu", ["b200", "b300"])
def test_built_tile_is_the_plan(gpu: str, causal: bool, head_dim: int) -> None:
    """The general arithmetic agrees with the plan of the one shape that a kernel has."""
    plan = KernelPlan.forward(gpu=gpu, head_dim=head_dim, causal=causal)
    general = next(
        c
        for c in candidates(find_gpu(gpu), head_dim, head_dim, direction="forward", dtype="bf16")
        if (c.tile.tile_m, c.tile.tile_n, c.tile.ctas) == (plan.tile_q, plan.tile_n, 1)
        and (c.q_stages, c.s_stages) == (2, 1)
    )
    assert general.kv_stages == plan.kv_stages
    needed = plan.q_stages * (plan.tile_n + plan.head_dim_padded)
    assert general.tmem_columns == needed <= plan.tmem_cols
    assert 0 <= general.smem_bytes - plan.smem_bytes < 3 * 1024
    built = ranking(gpu, head_dim, causal=causal).best_built
    assert built is not None and built.plan is not None
    share = built.plan.exp2_emulated_share
    assert built.plan == dataclasses.replace(plan, exp2_emulated_share=share)
    assert built.exp2_share == share
    assert built.candidate.smem_bytes == plan.smem_bytes


def test_only_what_the_plan_takes_is_built() -> None:
    for gpu, options in (
        ("h100", {}),
        ("b200", {"direction": "backward"}),
        ("b200", {"dtype": "fp8"}),
    ):
        assert ranking(gpu, 128, **options).best_built is None
    assert ranking("b200", 192, head_dim_v=128).best_built is None
    assert [p.plan is not None for p in ranking("b200", 128).priced].count(True) == 1


def needs(c: Candidate) -> tuple[Fraction, int]:
    """(bytes at the very least, TMEM columns) counted anew."""
    t = c.tile
    e = t.format.element_bytes
    slot = t.tile_n * max(t.head_dim, t.head_dim_v) * e / t.ctas
    q, o = t.tile_m * t.head_dim * e, t.tile_m * t.head_dim_v * 2
    columns = c.q_stages * (c.s_stages * t.tile_n + -(-t.head_dim_v // 16) * 16)
    return max(q, o) + c.kv_stages * slot, columns


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_legal_means_it_fits(dims: tuple[int, int]) -> None:
    found = list(candidates(find_gpu("b200"), *dims, direction="forward", dtype="bf16"))
    assert len({(c.tile.tile_m, c.tile.tile_n, c.tile.ctas, c.q_stages, c.s_stages) for c in found})
    for c in found:
        least, columns = needs(c)
        assert c.tmem_columns == columns
        assert c.smem_bytes >= least
        assert c.kv_stages >= 2
        fits = c.smem_bytes <= 232448 and columns <= 512 and c.registers <= c.registers_there
        assert c.legal == fits
        if c.legal and c.kv_stages < 32:
            one_more = Fraction(c.smem_bytes) + c.tile.tile_n * max(dims) * 2 // c.tile.ctas
            assert one_more > 232448 or c.kv_stages == 2


# Dao-AILab/flash-attention, the forward tiles of FlashAttention-3 (hopper/tile_size.h).
HOPPER = [
    (64, 192, 128),
    (96, 192, 144),
    (128, 128, 128),
    (128, 128, 176),
    (192, 128, 112),
    (256, 128, 80),
]


@pytest.mark.parametrize(("head_dim", "m", "n"), HOPPER)
def test_flash_attention_3_tiles_fit_hopper(head_dim: int, m: int, n: int) -> None:
    found = candidates(find_gpu("h100"), head_dim, head_dim, direction="forward", dtype="bf16")
    legal = {(c.tile.tile_m, c.tile.tile_n) for c in found if c.legal}
    assert (m, n) in legal


# (head_dim, rows, keys, causal): forward tiles of FlashAttention-3 (hopper/tile_size.h) and of
# flash-attn-4 on Hopper (flash_attn/cute/interface.py).
HOPPER_CHOICES = [
    (64, 192, 128, False),
    (96, 192, 144, False),
    (128, 128, 176, False),
    (128, 128, 128, False),
    (128, 128, 128, True),
    (192, 128, 112, False),
    (256, 128, 80, False),
    (256, 128, 80, True),
]


@pytest.mark.parametrize(("head_dim", "m", "n", "causal"), HOPPER_CHOICES)
def test_known_hopper_tiles_are_near_the_winner(
    head_dim: int, m: int, n: int, causal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what sets tiles of as many rows apart is latency, which more keys outweigh."""
    found = ranking("h200", head_dim, causal=causal)
    known = next(p for p in found.priced if (p.tile.tile_m, p.tile.tile_n) == (m, n))
    behind = known.seconds / found.winner.seconds
    with capsys.disabled():
        best = found.winner.tile
        print(f"\nh200 d{head_dim} {'causal' if causal else 'dense'}: {best.tile_m}x{best.tile_n}, "
              f"{m}x{n} {behind - 1:+.1%}")  # fmt: skip
    assert behind < 1.1
    narrow = next(p for p in found.priced if (p.tile.tile_m, p.tile.tile_n) == (m, 32))
    assert narrow.seconds > 1.05 * known.seconds
    assert "chain" in narrow.bound and "chain" in found.reason(narrow)


def test_iteration_terms_by_hand() -> None:
    """256x128, head_dim 128 on B200: the terms from their definitions."""
    p = find(ranking("b200", 128), "256x128")
    f = float(p.exp2_share)
    assert 0 < f <= 0.5
    known = calibration(p.tile)
    scores = 128 * 128
    fma = scores * (2 + 7.45 * f) / 120 + 128 * 128 / 10 / 120
    softmax = scores / 2 / 64 + max((1 - f) * scores / 16, fma, scores / 2 / 62)
    assert p.iteration["mma"] == 2048
    assert p.iteration["smem"] == 1536
    exp_fma = scores * (2 + 7.45 * f) / 120
    assert p.iteration["exp"] == pytest.approx(2 * max((1 - f) * scores / 16, exp_fma))
    chain = softmax * (1 + known.crowding) + known.exposure * 1024 + 136 + known.latency
    assert p.iteration["chain"] == pytest.approx(chain)
    assert p.bound == "chain"
    power = known.interference
    together = sum(term**power for term in p.iteration.values()) ** (1 / power)
    assert p.iteration_cycles == pytest.approx(together)
    assert p.iteration_cycles > chain


def test_a_second_score_tile_hides_the_mmas() -> None:
    found = ranking("b200", 128)
    one, two = (find(found, "128x128", q=1, s=s) for s in (1, 2))
    hidden = calibration(one.tile).exposure * 1024 + 136
    shares = float(one.exp2_share), float(two.exp2_share)
    assert shares[0] == shares[1]
    assert one.iteration["chain"] - two.iteration["chain"] == pytest.approx(hidden)
    assert two.seconds < one.seconds
    assert "chain" in found.reason(one)


def test_order_and_ties() -> None:
    for found in (ranking("b200", 128), ranking("b300", 64, causal=True), ranking("h100", 128)):
        fastest = min(p.seconds for p in found.priced)
        seconds = [p.seconds for p in found.priced]
        tied = [s for s in seconds if s <= fastest * TIE]
        assert seconds[: len(tied)] == tied
        assert seconds[len(tied) :] == sorted(seconds[len(tied) :])
        assert all(found.reason(p) for p in found.priced)
        assert all(c.excesses for c in found.refused)


def test_reasons_name_the_cause() -> None:
    found = ranking("b200", 128)
    narrow = find(found, "128x64", q=1, s=2)
    assert "more cycles a score, it waits for the chain of a query tile" in found.reason(narrow)
    # A few heads of a short sequence: 256-row tiles leave most SMs idle.
    small = Problem(1, 1024, 1024, 10, 10)
    short = rank(find_gpu("b200"), small, 128)
    assert short.winner.tile.tile_m < 256
    wide = find(short, "256x128")
    assert "more idle SMs" in short.reason(wide)
    # With a slow L2 the tile that loads least wins, and the others say why not.
    slow = find_gpu("b200").override(l2_bandwidth=0.5)
    starved = rank(slow, benchmark(128), 128)
    rows = max(p.tile.tile_m * p.tile.ctas for p in starved.priced)
    assert starved.winner.tile.tile_m * starved.winner.tile.ctas == rows
    assert "waits for L2 or HBM" in starved.reason(find(starved, "128x128", q=1, s=2))


def test_time_scales_with_the_clock() -> None:
    base = find_gpu("b200")
    double = base.override(clock=3.7)
    a, b = (rank(g, benchmark(128), 128).winner for g in (base, double))
    assert b.sm_seconds == pytest.approx(a.sm_seconds / 2)


def test_predictions_stay_below_the_budget() -> None:
    """Starts, ends and tails only add: no tile beats its own ceiling."""
    for gpu in ("h100", "b200", "b300"):
        for p in ranking(gpu, 128).priced:
            assert p.seconds >= p.limits.problem.flops(p.tile) / (
                p.limits.budget.peak_tflops * 1e12
            )
            assert p.occupancy <= 1 + 1e-9


def test_one_tile() -> None:
    found = only_tile(ranking("b200", 128), 128, 64)
    assert found.places[0] == 1
    assert {(p.tile.tile_m, p.tile.tile_n) for p in found.priced[1:]} == {(128, 64)}


def test_tiles_that_do_not_fit_say_by_how_much() -> None:
    with pytest.raises(RooflineError) as error:
        only_tile(ranking("b200", 128), 384, 256)
    assert "TMEM: 1152 columns needed, 512 there, 640 too many" in str(error.value)
    assert "registers: 192 a softmax thread needed, 128 there, 64 too many" in str(error.value)
    with pytest.raises(RooflineError, match="not considered; rows are of"):
        only_tile(ranking("b200", 128), 80, 128)
    with pytest.raises(RooflineError, match="no tile fits b200; the smallest: SMEM: "):
        rank(find_gpu("b200"), benchmark(128), 2048)
