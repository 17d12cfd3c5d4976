"""The plans that fa4 makes: chosen by the roofline, free of spills, and right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fa4.plan import explain, make_plan
from kernels.blackwell.forward import compile_forward
from kernels.common.plan import FORWARD_ARCHS, GPU_ARCHS, KernelPlan, PlanError
from kernels.common.resources import kernel_resources
from roofline.choice import choose
from tests.blackwell.attention import check_numbers, random_problem

BLACKWELL = [gpu for gpu, arch in GPU_ARCHS.items() if arch in FORWARD_ARCHS]
# one of each: head_dim, mask, dtype, architecture
PLANS = [
    ("b200", "bfloat16", 64, True),
    ("gb200", "bfloat16", 128, False),
    ("b200", "float16", 64, False),
    ("b200", "float16", 128, True),
    ("gb300", "bfloat16", 64, False),
]


def _name(case: tuple[Any, ...]) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", PLANS, ids=_name)
def test_chosen_plans_do_not_spill_and_obey_the_numbers_rule(
    case: tuple[str, str, int, bool], tmp_path: Path
) -> None:
    plan = make_plan(*case, {})
    compiled = compile_forward(plan, f"--keep-ptx --keep-cubin --dump-dir={tmp_path}")
    (used,) = kernel_resources(compiled.__cubin__)
    assert (used.stack_bytes, used.local_bytes) == (0, 0)
    check_numbers(plan, *random_problem(plan, 1, 150, 300, 2, 1, seed=8))


@pytest.mark.parametrize("gpu", BLACKWELL)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_every_chosen_field_is_in_the_plan(gpu: str, causal: bool, head_dim: int) -> None:
    found = choose(gpu, head_dim, causal=causal)
    plan = make_plan(gpu, "bfloat16", head_dim, causal, {})
    assert plan == found.plan
    assert found.plan_fields.items() <= plan.to_dict().items()
    built = found.ranking.best_built
    assert built is not None
    assert (plan.tile_q, plan.tile_n, plan.ctas) == (
        built.tile.tile_m,
        built.tile.tile_n,
        built.tile.ctas,
    )


def test_asked_fields_win() -> None:
    asked = {"exp2_emulated_share": 0.0625, "kv_stages": 2, "tile_order": "head_major"}
    plan = make_plan("b200", "bfloat16", 128, True, asked)
    assert asked.items() <= plan.to_dict().items()
    chosen = make_plan("b200", "bfloat16", 128, True, {})
    assert not asked.items() <= chosen.to_dict().items()


def test_what_no_kernel_takes_is_refused_by_the_plans_rules() -> None:
    for head_dim in (200, 72, -1, 10_000):
        with pytest.raises(PlanError, match=f"head_dim {head_dim}"):
            make_plan("b200", "bfloat16", head_dim, False, {})
    with pytest.raises(PlanError, match="dtype 'float32'"):
        make_plan("b300", "float32", 64, False, {})
    with pytest.raises(PlanError, match="sm_90a"):
        make_plan("h200", "bfloat16", 64, False, {})
    with pytest.raises(PlanError, match="unknown plan field"):
        make_plan("b200", "bfloat16", 64, False, {"stages": 3})


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_hopper_says_what_it_would_take_and_what_runs(gpu: str) -> None:
    found = explain(gpu, "bfloat16", 128, False, {})
    assert found.plan is None and found.choice.plan_fields == {}
    winner = found.choice.preferred.tile
    text = str(found)
    assert text.startswith(f"No kernel for {gpu} (sm_90a): gpu '{gpu}' is sm_90a")
    assert "What runs there: the PyTorch reference" in text
    assert f"{winner.tile_m}x{winner.tile_n}" in text


def test_a_plan_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of attention asks for its plan, so the second answer is looked up."""
    first = make_plan("b200", "bfloat16", 112, False, {})
    monkeypatch.setattr("roofline.choice._choose", None)
    assert make_plan("b200", "bfloat16", 112, False, {}) == first
    assert isinstance(first, KernelPlan)
