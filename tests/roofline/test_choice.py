"""What the kernel leaves open: decided by the table of replays, and where there is none without."""

from __future__ import annotations

import csv
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.common.plan import GPU_ARCHS
from roofline import RooflineError, decisions, evidence, find_gpu
from roofline.choice import choose, chosen_fields
from roofline.costs import calibration
from roofline.evidence import Row, rows, rows_for
from roofline.problem import Problem
from tests.roofline import chain_fit, forward_table

TABLE = Path(evidence.__file__).with_name("gpu_data") / "forward_kernel.csv"
CASES = [
    (gpu, dtype, head_dim, causal)
    for gpu, dtype in (("b200", "bf16"), ("b200", "fp16"), ("b300", "bf16"))
    for head_dim in (64, 128)
    for causal in (False, True)
]
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def table(arch: str, dtype: str, head_dim: int, causal: bool) -> list[dict[str, Any]]:
    """The rows of the file, read without the code under test."""
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    key = (arch, dtype, str(head_dim), "causal" if causal else "dense")
    return [
        line
        for line in csv.DictReader(lines)
        if (line["arch"], line["dtype"], line["head_dim"], line["mask"]) == key
    ]


@pytest.mark.parametrize(("gpu", "dtype", "head_dim", "causal"), CASES)
def test_share_is_the_smallest_that_ties_with_the_fastest(
    gpu: str, dtype: str, head_dim: int, causal: bool
) -> None:
    """Of 64 key blocks, among those that do not spill, with as many stages as fit."""
    most = {64: "10", 128: "3"}[head_dim]
    found = {
        float(line["exp2_share"]): int(line["item_cycles"]) + 64 * int(line["key_block_cycles"])
        for line in table(GPU_ARCHS[gpu], DTYPES[dtype], head_dim, causal)
        if line["kv_stages"] == most and line["stack_bytes"] == "0"
    }
    assert len(found) > 1, "the table has rows for every plan"
    best = min(share for share, c in found.items() if c <= 1.01 * min(found.values()))
    choice = choose(gpu, head_dim, dtype=dtype, causal=causal)
    assert choice.plan_fields["exp2_emulated_share"] == best
    assert (
        f"takes {rows_of(choice.reasons['exp2_emulated_share'])} cycles"
        in choice.reasons["exp2_emulated_share"]
    )


def rows_of(reason: str) -> str:
    """The first number of cycles that a reason names."""
    return reason.split("a key block takes ")[1].split(" ")[0]


def test_emulation_pays_on_b200_and_not_on_b300() -> None:
    """The MUFU of a B300 is twice as fast."""
    for head_dim in (64, 128):
        for causal in (False, True):
            shares = {
                gpu: choose(gpu, head_dim, causal=causal).plan_fields["exp2_emulated_share"]
                for gpu in ("b200", "gb200", "b300", "gb300")
            }
            assert shares["b200"] == shares["gb200"] >= 0.125
            assert shares["b300"] == shares["gb300"] == 0


def test_float16_without_rows_emulates_nothing() -> None:
    """Its polynomial is longer than bfloat16's, which does not pay on a B300 already."""
    assert not table("sm_103a", "float16", 128, False)
    found = choose("b300", 128, dtype="fp16")
    assert found.plan_fields["exp2_emulated_share"] == 0.0
    assert found.reasons["exp2_emulated_share"].startswith("no exponential by polynomial")


def test_a_share_that_spills_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = find_gpu("b200")
    before = decide("b200", 128)
    spilled = tuple(
        dataclasses.replace(row, stack_bytes=16)
        if row.exp2_share == before.fields["exp2_emulated_share"]
        else row
        for row in rows_for(gpu, "bfloat16", 128, False)
    )
    monkeypatch.setattr(decisions, "rows_for", lambda *_: spilled)
    after = decide("b200", 128)
    assert after.fields["exp2_emulated_share"] != before.fields["exp2_emulated_share"]
    share = before.fields["exp2_emulated_share"]
    assert f"{share:.1%} would spill" in after.reasons["exp2_emulated_share"]


def decide(gpu: str, head_dim: int, causal: bool = False, **changed: float) -> Any:
    from fractions import Fraction

    from roofline.formats import find_format

    found = find_gpu(gpu).override(**changed)
    return decisions.decide(found, find_format("bf16"), head_dim, causal, Fraction(5, 16))


def test_another_sm_has_no_rows() -> None:
    """What was replayed on a B200 says nothing about one with twice the MUFU."""
    assert decide("b200", 128).row is not None
    assert decide("b200", 128, sms=20, clock=1.0, hbm=90).row is not None
    changed = decide("b200", 128, mufu_ex2=32)
    assert changed.row is None
    assert changed.fields["exp2_emulated_share"] == 5 / 16
    assert "nothing was replayed" in changed.reasons["exp2_emulated_share"]


def by_hand(lengths: list[float], slots: int) -> float:
    """When the last is done, each item going to the slot that is free first."""
    ends = [0.0] * slots
    for length in lengths:
        at = ends.index(min(ends))
        ends[at] += length
    return max(ends)


@pytest.mark.parametrize("gpu", ["b200", "gb300"])
def test_tile_order(gpu: str) -> None:
    dense, causal = (choose(gpu, 128, causal=mask) for mask in (False, True))
    assert dense.plan_fields["tile_order"] == "head_major"
    assert "longest tiles first is no faster" in dense.reasons["tile_order"]
    assert causal.plan_fields["tile_order"] == "longest_first"
    row = decide(gpu, 128, causal=True).row
    start = row.item_cycles / row.key_block_cycles
    one_head = [start + 2 * (i + 1) for i in range(32)]  # 8192 keys, 256 rows a tile
    slots = int(find_gpu(gpu)["sms"].value)
    longest = [n for n in reversed(one_head) for _ in range(64)]
    gain = by_hand(one_head * 64, slots) / by_hand(longest, slots) - 1
    assert gain > 0.01
    assert f"{gain:.1%} later" in causal.reasons["tile_order"]


def test_stages_are_compared() -> None:
    reason = choose("b200", 128).reasons["kv_stages"]
    assert reason.startswith("3 K and V tiles, as many as shared memory holds")
    rows_128 = table("sm_100a", "bfloat16", 128, False)
    two, three = (
        next(r for r in rows_128 if (r["kv_stages"], r["exp2_share"]) == (stages, "0.375"))
        for stages in ("2", "3")
    )
    cycles = [int(r["item_cycles"]) + 64 * int(r["key_block_cycles"]) for r in (two, three)]
    assert f"2 take {cycles[0] / cycles[1] - 1:+.1%}" in reason


def test_every_gpu_has_an_answer() -> None:
    for gpu, arch in GPU_ARCHS.items():
        found = choose(gpu, 128)
        page = found.to_dict()
        assert page["kernel"] == (arch != "sm_90a") == (found.plan is not None)
        assert bool(page["no_kernel"]) == (arch == "sm_90a") == (not page["reasons"])
        assert page["preferred"]["place"] == 1
        assert found.ranking.winner is found.preferred


def test_what_has_no_answer_is_refused() -> None:
    with pytest.raises(RooflineError, match="gpu 'b100' is unknown"):
        choose("b100", 128)
    with pytest.raises(RooflineError, match="dtype 'int8' is unknown"):
        choose("b200", 128, dtype="int8")
    with pytest.raises(RooflineError, match="no tile fits b200"):
        choose("b200", 4096)
    assert choose("b200", 192, 128).no_kernel[0].startswith("head_dim 192 with head_dim_v 128")
    assert choose("b200", 128, dtype="fp8").no_kernel == (
        "dtype 'fp8': use one of bfloat16, float16",
    )
    assert chosen_fields("b200", 4096, dtype="bfloat16", causal=False) == {}
    assert chosen_fields("b200", 64.0, dtype="bfloat16", causal=False) == {}  # type: ignore[arg-type]


def test_a_problem_of_ones_own_changes_the_time_and_not_the_plan() -> None:
    small = choose("b200", 128, problem=Problem(1, 512, 512, 4, 4))
    whole = choose("b200", 128)
    assert small.plan_fields == whole.plan_fields
    assert small.ranking.winner.seconds < 0.1 * whole.ranking.winner.seconds


# -- the tables ------------------------------------------------------------------------------------


def test_the_table_has_every_plan_once() -> None:
    keys = [(r.arch, r.dtype, r.head_dim, r.mask, r.kv_stages, r.exp2_share) for r in rows()]
    plans = [
        (
            p.arch,
            p.dtype,
            p.head_dim,
            "causal" if p.causal else "dense",
            p.kv_stages,
            p.exp2_emulated_share,
        )
        for p in forward_table.plans()
    ]
    assert keys == plans


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 7])
def test_a_row_made_anew_is_the_tables(index: int) -> None:
    """Compiled, emulated and replayed again; cycles to a per cent, whatever the emulator's seed."""
    plan = list(forward_table.plans())[index]
    known, made = rows()[index], forward_table.row(plan)
    cycles = ("key_block_cycles", "item_cycles")
    for name in evidence.FIELDS:
        expected = getattr(known, name)
        close = pytest.approx(expected, rel=0.01) if name in cycles else expected
        assert getattr(made, name) == close, name


@pytest.mark.parametrize("arch", chain_fit.ARCHS)
def test_the_chain_is_fitted_to_the_table(arch: str) -> None:
    found = chain_fit.replays(arch)
    best = chain_fit.fit(found)
    assert calibration(found[0].candidate.tile) == best
    errors = [abs(one.predicted(best) / one.cycles - 1) for one in found]
    assert sum(errors) / len(errors) < 0.05 and max(errors) < 0.12


def test_a_row_is_read_as_it_is_written() -> None:
    assert rows()[0] == Row(**rows()[0].to_dict())  # type: ignore[arg-type]


def test_commands_take_less_than_half_a_second() -> None:
    """CPU time of the whole process, Python's own start included."""
    import resource

    for command in (["tiles", "--causal"], ["budget"], ["tiles", "--gpu", "h200"]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "roofline", *command], check=True, capture_output=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert spent < 0.5, f"roofline {' '.join(command)}: {spent:.2f} s"
