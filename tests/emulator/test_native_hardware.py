"""Native instructions against a real H200, bit for bit: hardware/record_native.py recorded it.

Opcodes whose results PTX fixes, and those it leaves open (NaN payloads, division by zero), must
give the silicon's bits for 512 operands each. Approximations (ex2, lg2, ...) only say how far the
silicon is from the true value; the emulator is within 0.51 ulp of it.
"""

from __future__ import annotations

from typing import Any

import pytest

from .hardware import goldens
from .hardware import record_native as record
from .test_native_oracle import _run

RECORDED: dict[str, Any] = goldens.load("native_sm90.json")


def test_the_operands_are_those_recorded() -> None:
    assert (RECORDED["seed"], RECORDED["lanes"]) == (record.SEED, record.LANES)
    ops = {spec.op for batch in record.batches() for spec in batch["specs"]}
    assert ops == set(RECORDED["exact"]) | set(RECORDED["ulp"]), "record again"


def test_the_driver_takes_every_opcode() -> None:
    """So the table's opcodes are PTX (those of sm_90)."""
    assert [op for op, digest in RECORDED["exact"].items() if not digest] == []


def test_results_are_the_silicons() -> None:
    digests = record.Digests()
    for batch in record.batches():
        specs = [s for s in batch["specs"] if not record.rounded_freely(s.op)]
        if not specs:
            continue
        got = _run(specs, batch["table"])
        for i, spec in enumerate(specs):
            data = [got[f"d{i}_{k}"].tobytes() for k in range(len(spec.dst))]
            digests.add(spec.op, batch["inputs"], data)
    ours = digests.to_dict()
    assert len(ours) > 800
    wrong = [op for op, digest in RECORDED["exact"].items() if ours[op] != digest]
    assert not wrong


@pytest.mark.parametrize(
    ("op", "ulp"),
    [
        ("ex2.approx.ftz.f32", 2), ("ex2.approx.f32", 2), ("rcp.approx.ftz.f32", 1),
        ("rcp.approx.f32", 1), ("div.full.f32", 2),
        ("ex2.approx.f16", 2), ("ex2.approx.ftz.bf16x2", 2), ("tanh.approx.f16x2", 2),
    ],
)  # fmt: skip
def test_silicon_keeps_its_bounds(op: str, ulp: float) -> None:
    """PTX ISA 9.1 sections 9.7.3.8, .13 and .21; test_approximations holds ours against it."""
    assert 0.5 < RECORDED["ulp"][op] <= ulp + 0.5
