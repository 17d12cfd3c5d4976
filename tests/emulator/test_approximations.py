"""Approximate functions: how far an H200 is from the true value rounded once, over all significands
of a binade and over every exponent (hardware/record_approx.py), and that the emulator gives just
that value: so the recorded distance is the emulator's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulator.hardware import goldens
from tests.emulator.hardware import record_approx as record
from tests.emulator.ptx_harness import execute

RECORDED: dict[str, Any] = goldens.load("approx_sm90.json")
UNITS = ("-2", "-1", "0", "1", "2", "beyond")
# Units of the last place that silicon is off at most, and the share of a binade where it is none.
# tanh.approx and lg2.approx near 1 are documented in absolute or relative error instead.
CLOSE = {
    "ex2.approx.ftz": (2, 0.61),
    "rcp.approx.ftz": (1, 0.87),
    "rsqrt.approx.ftz": (2, 0.78),
    "sqrt.approx.ftz": (1, 0.83),
}


@pytest.mark.parametrize("op", record.FUNCTIONS)
def test_every_input_was_recorded(op: str) -> None:
    for name, inputs in (("binade", record.binade()), ("exponents", record.exponents(op))):
        assert sum(RECORDED[op][name]["ulp"][u] for u in UNITS) == inputs.size


@pytest.mark.parametrize("op", CLOSE)
def test_silicon_is_close(op: str) -> None:
    most, share = CLOSE[op]
    assert all(RECORDED[op][name]["ulp"]["most"] <= most for name in ("binade", "exponents"))
    assert RECORDED[op]["binade"]["ulp"]["0"] / (1 << 23) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("op", record.FUNCTIONS)
def test_the_emulator_rounds_once(op: str) -> None:
    """Every exponent, and a part of the binade that is drawn anew each time."""
    drawn = np.random.default_rng().integers(0, 1 << 23, 1 << 14)
    x = np.concatenate([record.exponents(op), record.binade()[drawn]])
    x = x[: x.size // 512 * 512]
    got = execute(f"{op}.f32 %d, %x;", {"x": x}, {"d": np.float32})["d"]
    wrong = got.view(np.uint32) != record.rounded_once(op, x).view(np.uint32)
    assert not wrong.any(), list(zip(x[wrong][:5], got[wrong][:5], strict=True))


def test_distances_are_counted() -> None:
    true = np.array([1, 1, 1, 1, -1, 0], np.float32)
    got = np.array([1, 1, 1, 1, -1, -0.0], np.float32)
    got[1:4] = (true[1:4].view(np.int32) + np.array([1, -2, 9], np.int32)).view(np.float32)
    found = record.distance(got, true)
    assert found == {"-2": 1, "-1": 0, "0": 3, "1": 1, "2": 0, "beyond": 1, "most": 9}
