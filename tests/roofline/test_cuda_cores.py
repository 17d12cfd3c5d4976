"""CUDA-core work of a 128x128 tile, head_dim 128, counted by hand from what each score needs."""

from __future__ import annotations

import pytest

from roofline import RooflineError, budget, find_gpu

SCORES = 128 * 128
PIPES = ("mufu", "fma", "alu", "cvt")

# gpu, pass, dtype: lane operations a score on MUFU, FMA, ALU and conversion; instructions a score.
# Forward: scale, sum (FMA), max (ALU, three inputs from sm_100 on, with the TMEM load on sm_103),
# exp2, half a conversion, and O rescaled in a tenth of the tiles (always on Hopper).
# Backward: scale, minus delta, times P (FMA), exp2, P and dS converted.
ROWS = [
    ("b200", "forward", "bf16", (1, 2.1, 0.5, 0.5), 1 + 2.1 / 2 + 0.5 + 0.5),
    ("b300", "forward", "bf16", (1, 2.1, 0, 0.5), 1 + 2.1 / 2 + 0 + 0.5),
    ("h100", "forward", "bf16", (1, 3, 1, 0.5), 1 + 3 + 1 + 0.5),
    ("b200", "forward", "tf32", (1, 2.1, 0.5, 0), 1 + 2.1 / 2 + 0.5),
    ("b200", "backward", "bf16", (1, 3, 0, 1), 1 + 3 / 2 + 1),
    ("h100", "backward", "fp16", (1, 3, 0, 1), 1 + 3 + 1),
]
RATES = {"b200": (16, 120, 64, 62), "b300": (32, 120, 64, 62), "h100": (16, 120, 64, 64)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:3]))
def test_work_of_a_score(row: tuple) -> None:  # type: ignore[type-arg]
    gpu, direction, dtype, lanes, instructions = row
    cores = budget(gpu, 128, 128, 128, direction=direction, dtype=dtype).cuda_cores
    for pipe, count, rate in zip(PIPES, lanes, RATES[gpu], strict=True):
        assert float(cores.pipes[pipe]) == pytest.approx(count * SCORES / rate), pipe
    assert float(cores.issue) == pytest.approx(instructions * SCORES / 32 / 4)


@pytest.mark.parametrize(("gpu", "instructions"), [("b200", 5), ("h100", 8)])
def test_emulated_exponentials_move_to_the_fma_pipe(gpu: str, instructions: int) -> None:
    """A quarter by polynomial: 7.45 lane-slots each, 5 packed or 8 plain warp instructions."""
    none = budget(gpu, 128, 128, 128).cuda_cores
    some = budget(gpu, 128, 128, 128, exp2_emulated_share=0.25).cuda_cores
    assert some.pipes["mufu"] == none.pipes["mufu"] * 3 / 4
    moved = SCORES / 4
    added = float(some.pipes["fma"] - none.pipes["fma"])
    assert added == pytest.approx(7.45 * moved / 120)
    issued = float(some.issue - none.issue)
    assert issued == pytest.approx((instructions - 1) * moved / 32 / 4)


def test_formats_convert_at_their_own_rates() -> None:
    """Half a conversion a score: 62 pairs a cycle to bf16, 32 to fp8, 57 to fp4."""
    for dtype, rate in (("bf16", 62), ("fp8", 32), ("mxfp8", 32), ("nvfp4", 57)):
        cores = budget("b300", 128, 128, 128, dtype=dtype).cuda_cores
        assert float(cores.pipes["cvt"]) == pytest.approx(SCORES / 2 / rate)


def test_issue_slots_are_named_when_they_bind() -> None:
    """fp4 on a GPU with fast exponentials: neither MMA, SMEM nor exp, but issue slots."""
    fast = find_gpu("b300").override(mufu_ex2=128)
    b = budget(fast, 128, 128, 64, dtype="nvfp4")
    assert float(b.cuda_cores.issue) > b.cycles
    assert any("issue slots" in note for note in b.notes)
    assert not any("issue slots" in note for note in budget("b200", 128, 128, 128).notes)


@pytest.mark.parametrize("share", [-0.1, 1.01, float("nan"), float("inf"), "half"])
def test_bad_shares(share: object) -> None:
    with pytest.raises(RooflineError, match="exp2 share"):
        budget("b200", 128, 128, 128, exp2_emulated_share=share)  # type: ignore[arg-type]
