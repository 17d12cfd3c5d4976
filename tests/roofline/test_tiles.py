"""Tiles: what fits, in bytes, columns and registers; which wins, and whether the reasons hold."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kernels.common.plan import KernelPlan
from roofline import RooflineError, find_gpu
from roofline.candidates import Candidate, candidates
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


@pytest.mark.parametrize("gpu", ["b200", "b300"])
def test_flash_attention_4_forward_tile_wins(gpu: str) -> None:
    winner = ranking(gpu, 128).winner
    assert (winner.tile.tile_m, winner.tile.tile_n, winner.tile.ctas) == (256, 128, 1)
    assert winner.candidate.q_stages == 2
    assert winner.plan is not None


@pytest.mark.parametrize("gpu", ["gb200", "gb300"])
def test_last_wave_decides_on_152_sms(gpu: str) -> None:
    """2048 items of 256 rows are 13.5 rounds of 152 SMs, 4096 of 128 rows are 26.9: less idle."""
    found = ranking(gpu, 128)
    built = find(found, "256x128")
    assert found.winner.tile.tile_m == 128
    assert built.seconds < 1.05 * found.winner.seconds
    assert "more idle SMs" in found.reason(built)


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
    assert built is not None
    assert built.plan == plan
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


def test_iteration_terms_by_hand() -> None:
    """256x128, head_dim 128 on B200 with 5/16 emulated: the terms from their definitions."""
    p = find(ranking("b200", 128), "256x128")
    assert p.exp2_share == Fraction(5, 16)
    scores = 128 * 128
    fma = scores * (2 + 7.45 * 5 / 16) / 120 + 128 * 128 / 10 / 120
    softmax = scores / 2 / 64 + max(11 / 16 * scores / 16, fma, scores / 2 / 62)
    assert p.iteration["mma"] == 2048
    assert p.iteration["smem"] == 1536
    assert p.iteration["exp"] == pytest.approx(2 * 11 / 16 * scores / 16)
    assert p.iteration["chain"] == pytest.approx(softmax + 1024 + 136)
    assert p.bound == "mma"


def test_a_second_score_tile_hides_the_mmas() -> None:
    found = ranking("b200", 128)
    one, two = (find(found, "128x128", q=1, s=s) for s in (1, 2))
    # Emulating more shortens the exposed chain, so that the two differ in share as well.
    assert one.exp2_share > two.exp2_share
    assert one.iteration["chain"] > 1.5 * two.iteration["chain"]
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
    assert "more cycles a score, it waits for the MMAs" in found.reason(narrow)
    # A few heads of a short sequence: 256-row tiles leave most SMs idle.
    small = Problem(1, 1024, 1024, 20, 20)
    short = rank(find_gpu("b200"), small, 128)
    assert short.winner.tile.tile_m < 256
    wide = find(short, "256x128")
    assert "more idle SMs" in short.reason(wide)
    # With a slow L2 the tile that loads least wins, and the others say why not.
    slow = find_gpu("b200").override(l2_bandwidth=2)
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
