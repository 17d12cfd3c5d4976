"""What ptxas refuses is refused here too, and nothing else: against its recorded verdicts.

`ptx_fuzz` recorded them with ptxas 13.4; ``make fuzz-ptx`` compares fresh mutants with the ptxas
that it finds.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from kernels.emulator import coverage
from kernels.emulator.gpus import GPUS
from kernels.emulator.host_runtime import Launch
from kernels.emulator.machine import run_launch
from kernels.emulator.memory import GlobalMemory
from kernels.emulator.ptx import PTXSyntaxError, parse
from kernels.emulator.ptx.declarations import split_top
from kernels.emulator.ptx.signatures import has_row
from kernels.emulator.ptx.targets import bad_settings, lacking, why_not_on
from tests.emulator import ptx_fuzz as fuzz

SEEDS = fuzz.read_seeds()


def test_every_modelled_opcode_has_a_row() -> None:
    """So that its operands are checked: an instruction new to the machine needs one."""
    table = Path(coverage.__file__).with_name("coverage.csv")
    with table.open() as file:
        opcodes = {row["opcode"] for row in csv.DictReader(file)}
    made_here = {op for op in opcodes if op.startswith(("clock.", "call.")) or op[:3] == "bra"}
    assert [op for op in sorted(opcodes - made_here) if not has_row(op)] == []


def test_valid_instructions_are_taken() -> None:
    said = {line: fuzz.verdict(line, fuzz.tried_at(marks)) for line, marks in SEEDS.items()}
    assert len(said) > 5000
    assert {line: ours for line, ours in said.items() if ours.startswith("refuses")} == {}


def test_mutants_are_judged_as_ptxas_does() -> None:
    wrong, refused, taken = [], 0, 0
    for target, mark, line in fuzz.read_verdicts():
        ours = fuzz.verdict(line, target)
        if kind := fuzz.difference(line, ours, mark != "+", mark == "="):
            wrong.append(f"{kind}: {target} {line}   # {ours}")
        refused += ours.startswith("refuses")
        taken += ours == "takes"
    assert wrong == []
    assert refused > 2500 and taken > 500, "the record has both kinds"


def test_every_target_takes_what_it_can() -> None:
    """The targets that ptxas takes each instruction for. (Special registers and the number of
    operands of a barrier's arrival, which count too, are of interest below sm_90 alone.)"""
    wrong = []
    for line, marks in SEEDS.items():
        op, _, rest = line.rstrip(";").partition(" ")
        if "%cluster" in line or "%nclusterid" in line or op.startswith("mbarrier.arrive."):
            continue
        for target, mark in zip(fuzz.TARGETS, marks, strict=True):
            if (lacking(op, target, len(split_top(rest))) is None) != (mark == "1"):
                wrong.append(f"{target} {line}")
    assert wrong == []


ENTRY = ".visible .entry k() { ret; }"


@pytest.mark.parametrize(
    ("version", "target", "bits", "line", "message"),
    [
        ("99.0", "sm_90a", 64, 1, "there is no PTX 99.0"),
        ("8.0", "sm_100a", 64, 2, "sm_100a came with PTX 8.6"),
        ("8.6", "sm_100f", 64, 2, "sm_100f came with PTX 8.8"),
        ("9.0", "sm_80a", 64, 2, "there is no sm_80a"),
        ("9.0", "sm_99", 64, 2, "no architecture that is known"),
        ("9.0", "compute_90", 64, 2, "no architecture that is known"),
        ("9.0", "sm_90", 32, 3, "32-bit addresses"),
    ],
)
def test_heads_that_ptxas_refuses(
    version: str, target: str, bits: int, line: int, message: str
) -> None:
    head = f".version {version}\n.target {target}\n.address_size {bits}\n"
    with pytest.raises(PTXSyntaxError, match=rf"^ptx:{line}: .*{message}"):
        parse(head + ENTRY)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_90a", "sm_100f", "sm_90, debug"])
def test_heads_that_ptxas_takes(target: str) -> None:
    assert parse(f".version 9.0\n.target {target}\n.address_size 64\n{ENTRY}").entries


def test_a_head_without_an_address_size_has_32_bits() -> None:
    with pytest.raises(PTXSyntaxError, match="32-bit addresses"):
        parse(f".version 9.0\n.target sm_90\n{ENTRY}")
    assert bad_settings("9.0", "sm_90", 64) is None


@pytest.mark.parametrize(
    ("code", "runs_on"),
    [
        ("sm_80", ["sm_90a", "sm_100a", "sm_103a"]),
        ("sm_90", ["sm_90a", "sm_100a", "sm_103a"]),
        ("sm_90a", ["sm_90a"]),
        ("sm_100", ["sm_100a", "sm_103a"]),
        ("sm_100f", ["sm_100a", "sm_103a"]),
        ("sm_100a", ["sm_100a"]),
        ("sm_103", ["sm_103a"]),
        ("sm_103f", ["sm_103a"]),
        ("sm_120", []),
    ],
)
def test_code_runs_on_the_gpus_it_was_made_for(code: str, runs_on: list[str]) -> None:
    gpus = ("sm_90a", "sm_100a", "sm_103a")
    assert [gpu for gpu in gpus if why_not_on(code, gpu) is None] == runs_on


def test_a_launch_on_the_wrong_gpu_is_refused() -> None:
    head = ".version 9.0\n.target sm_100a\n.address_size 64\n"
    launch = Launch("k", (1, 1, 1), (32, 1, 1), params=())
    with pytest.raises(PTXSyntaxError, match="^ptx:2: .* runs on sm_100 alone, and h100"):
        run_launch(head + ENTRY, launch, GPUS["h100"], GlobalMemory())
    older = head.replace("sm_100a", "sm_80") + ENTRY
    assert run_launch(older, launch, GPUS["h100"], GlobalMemory()).thread_instructions == 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bar.sync 0, 64, 3, 4;", "bar.sync takes 1 to 2 operands, not 4"),
        ("mov.u64 %b32_1, %b32_2;", "operand 1 of mov.u64 is of the wrong type"),
        ("st.global.b32 [%b64_1];", "st.global.b32 takes 2 operands, not 1"),
        ("ld.global.f32 %u32_1, [%b64_1];", "operand 1 of ld.global.f32"),
        ("add.f32 %f32_1, %f32_2, 1;", "operand 3 of add.f32"),
        ("ld.shared.b32 %b32_1, [glob];", "glob lies in .global"),
        ("ld.shared.b32 %b32_1, [nowhere];", "'nowhere' is not declared"),
        ("ld.global.b32 %b32_1, [%b32_2];", "needs a 64-bit address"),
        ("mov.b32 %b32_1, !%b32_2;", "only predicates are negated"),
        ("bfe.u32 %b32_1, %b32_2, 256, 8;", "bfe.u32 takes from 0 to 255, not 256"),
        ("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned needs .target sm_90a, not sm_100a"),
    ],
)
def test_the_rule_is_named(text: str, message: str) -> None:
    module, line = fuzz.module([text], "sm_100a")
    with pytest.raises(PTXSyntaxError, match=rf"^ptx:{line}: .*{message}"):
        parse(module)


def test_mutants_are_what_they_say() -> None:
    """The mutator reaches every part: opcodes, operands, registers, literals, vectors."""
    import itertools
    import random

    line = "st.global.v2.b32 [%b64_1], {%b32_1, %b32_2};"
    made = set(itertools.islice(fuzz.mutants(line, random.Random(3), ["sync"]), 2000))
    for part in ("{%b32_1};", "%f32_1", ".sync", "[%b64_1];", "st.global.b32", ".s16", "1.5"):
        assert any(part in mutant for mutant in made), part
    assert line not in made
