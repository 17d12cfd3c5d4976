"""The published cycle counts, digit by digit, and the rows derived from the same formulas.

Sources: arXiv 2603.05451, Table 1 (forward) and Table 3 (backward); the forward's emulated shares
are those of Dao-AILab/flash-attention flash_attn/cute/flash_fwd_sm100.py.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from roofline import budget

FORWARD = [
    # tile_m, tile_n, MMA, SMEM, exp at head_dim 128 on B200
    (128, 128, 1024, 768, 1024),
    (256, 128, 2048, 1536, 2048),
]


@pytest.mark.parametrize(("m", "n", "mma", "smem", "exp"), FORWARD)
def test_paper_table_1_forward(m: int, n: int, mma: int, smem: int, exp: int) -> None:
    b = budget("b200", m, n, 128)
    assert (b.mma, b.smem, b.smem_exact, b.exp) == (mma, smem, smem, exp)
    assert b.bound == "mma+exp"


BACKWARD = [
    # ctas, MMA, SMEM, exp at 128x128, head_dim 128 on B200
    (1, 2560, 3328, 1024),
    (2, 2560, 2688, 1024),
]


@pytest.mark.parametrize(("ctas", "mma", "smem", "exp"), BACKWARD)
def test_paper_table_3_backward(ctas: int, mma: int, smem: int, exp: int) -> None:
    b = budget("b200", 128, 128, 128, direction="backward", ctas=ctas)
    assert (b.mma, b.smem, b.smem_exact, b.exp) == (mma, smem, smem, exp)
    assert b.bound == "smem"


def test_paper_table_3_lines() -> None:
    """The lines of Table 3, which the totals alone would not pin down."""
    one = budget("b200", 128, 128, 128, direction="backward")
    two = budget("b200", 128, 128, 128, direction="backward", ctas=2)
    for b, operands, written, peer, dq in ((one, 2048, 256, 0, 1024), (two, 1536, 256, 384, 512)):
        cycles = {term.name: term.cycles for term in b.smem_terms}
        assert sum(c for name, c in cycles.items() if name.startswith("operands")) == operands
        assert cycles["dS written"] == written
        assert cycles.get("dS to and from the peer", 0) == peer
        assert cycles["dQ written and read, fp32"] == dq
        assert {term.cycles for term in b.mma_terms} == {512}
    assert 1 - two.smem / one.smem == pytest.approx(0.192, abs=5e-4)  # "saves 19.2 %"
    assert one.smem / one.mma == pytest.approx(1.30)
    assert two.smem / two.mma == pytest.approx(1.05)


# gpu, dtype, tile, head_dim, head_dim_v, MMA, SMEM, SMEM with 2 CTAs, exp, bound
DERIVED = [
    ("b200", "bf16", (128, 128), 64, 64, 512, 512, 320, 1024, "exp"),
    ("b300", "bf16", (128, 128), 64, 64, 512, 512, 320, 512, "mma+smem+exp"),
    ("b200", "bf16", (128, 128), 96, 96, 768, 640, 416, 1024, "exp"),
    ("b300", "bf16", (128, 128), 96, 96, 768, 640, 416, 512, "mma"),
    ("b200", "bf16", (128, 128), 128, 128, 1024, 768, 512, 1024, "mma+exp"),
    ("b300", "bf16", (128, 128), 128, 128, 1024, 768, 512, 512, "mma"),
    ("b200", "bf16", (256, 128), 192, 128, 2560, 2048, 1408, 2048, "mma"),
    ("gb300", "bf16", (256, 128), 192, 128, 2560, 2048, 1408, 1024, "mma"),
    ("gb200", "bf16", (128, 128), 256, 256, 2048, 1536, 1024, 1024, "mma"),
    ("b200", "fp16", (128, 64), 192, 128, 640, 896, 640, 512, "smem"),
    ("h100", "bf16", (128, 128), 128, 128, 2048, 768, None, 1024, "mma"),
    ("h200", "fp16", (128, 128), 128, 128, 2048, 768, None, 1024, "mma"),
    ("b200", "fp8", (128, 128), 128, 128, 512, 384, 256, 1024, "exp"),
    ("b200", "mxfp8", (128, 128), 128, 128, 512, 384, 256, 1024, "exp"),
    ("b200", "nvfp4", (128, 128), 128, 128, 256, 192, 128, 1024, "exp"),
    ("b300", "nvfp4", (128, 128), 128, 128, 171, 192, 128, 512, "exp"),
]


@pytest.mark.parametrize("row", DERIVED, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}-{row[3]}")
def test_derived_rows(row: tuple) -> None:  # type: ignore[type-arg]
    gpu, dtype, (m, n), d, dv, mma, smem, smem_pair, exp, bound = row
    b = budget(gpu, m, n, d, dv, dtype=dtype)
    assert (b.mma, b.smem, b.exp, b.bound) == (mma, smem, exp, bound)
    if smem_pair is not None:
        pair = budget(gpu, m, n, d, dv, dtype=dtype, ctas=2)
        assert (pair.mma, pair.smem, pair.exp) == (mma, smem_pair, exp)


def test_narrow_tile_exact_count() -> None:
    """128x64, 192/128: the published form charges K a block of 128 keys; exactly it has 64."""
    b = budget("b200", 128, 64, 192, 128)
    assert (b.smem, b.smem_exact) == (896, 704)
    assert b.mma_share == pytest.approx(0.714, abs=1e-3)
    assert b.mma_share_exact == pytest.approx(0.909, abs=1e-3)


def test_head_dim_64_exact_count() -> None:
    """A value head of 64 is charged 128 rows of V by the published form."""
    b = budget("b200", 128, 128, 64)
    assert (b.smem, b.smem_exact) == (512, 384)
    assert b.mma_share == 0.5


def test_hopper_rereads_b() -> None:
    """Q once and K and V for each of the two wgmma, of 64 rows each."""
    b = budget("h100", 128, 128, 128)
    assert b.smem_exact == b.smem_port == (128 * 128 + 4 * 128 * 128) * 2 // 128
    assert budget("b200", 128, 128, 128).smem_port == 768


@pytest.mark.parametrize("m", [128, 256])
@pytest.mark.parametrize("n", [128, 256])
@pytest.mark.parametrize("d", [128, 256])
def test_ratios_of_whole_blocks(m: int, n: int, d: int) -> None:
    """With multiples of 128 and d = dv: SMEM/MMA is 3/4 and exp/MMA is 128/d, whatever the tile."""
    b = budget("b200", m, n, d)
    assert Fraction(b.smem, b.mma) == Fraction(3, 4)
    assert Fraction(b.exp, b.mma) == Fraction(128, d)
    assert b.smem_exact == b.smem if n == 128 else b.smem_exact < b.smem
    assert b.mma_exact == b.mma


SHARES = [(0.1875, 832), (0.125, 896), (0.0625, 960), (0.28125, 736), (0.25, 768)]


@pytest.mark.parametrize(("share", "cycles"), SHARES)
def test_emulated_shares_of_flash_attention_4(share: float, cycles: int) -> None:
    assert budget("b200", 128, 128, 128, exp2_emulated_share=share).exp == cycles


def test_balance_of_mufu_and_fma() -> None:
    exp = budget("b200", 128, 128, 64).exp_term
    assert float(exp.balance_share) == pytest.approx(0.368, abs=1e-3)
    assert round(float(exp.balance_cycles)) == 647
    at_balance = budget("b200", 128, 128, 64, exp2_emulated_share=exp.balance_share)
    assert at_balance.exp == 647
    assert at_balance.mma_share == pytest.approx(0.79, abs=2e-3)  # without emulation: 0.50
    assert at_balance.exp_term.mufu == at_balance.exp_term.fma


@pytest.mark.parametrize("gpu", ["h100", "b200", "b300"])
def test_balance_share_is_the_best_share(gpu: str) -> None:
    """Sweep the share: nowhere is the exp term shorter than at the balance."""
    best = budget(gpu, 128, 128, 128).exp_term.balance_cycles
    shares = [Fraction(i, 512) for i in range(513)]
    terms = [budget(gpu, 128, 128, 128, exp2_emulated_share=s).exp_term for s in shares]
    assert min(max(t.mufu, t.fma) for t in terms) >= best
    assert min(max(t.mufu, t.fma) for t in terms) < best * Fraction(101, 100)


def test_emulated_share_of_one_leaves_mufu_idle() -> None:
    b = budget("b200", 128, 128, 128, exp2_emulated_share=1)
    assert b.exp_term.mufu == 0
    assert b.exp == round(16384 * (2 + 7.45) / 120)


@pytest.mark.parametrize("gpu", ["b200", "gb200", "b300", "gb300"])
def test_pairs_never_cost_more_smem(gpu: str) -> None:
    for direction in ("forward", "backward"):
        for m, n, d in ((128, 128, 64), (128, 128, 128), (256, 128, 128), (128, 64, 192)):
            one = budget(gpu, m, n, d, direction=direction)
            two = budget(gpu, m, n, d, direction=direction, ctas=2)
            assert two.smem < one.smem
            assert two.mma == one.mma
            assert two.exp == one.exp
