"""What was measured on an H200: files that parse, complete, and within what the chip can do."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.roofline.hardware import wgmma_beside
from tests.roofline.hardware.wgmma import LENGTHS, Form, descriptor, forms, module

HERE = Path(__file__).parent
INTERVALS = HERE.parents[1] / "roofline" / "gpu_data" / "h200_wgmma_intervals.csv"
UNITS = {"clk", "us", "GHz", "TB/s", "B/clk/SM", "op/clk/SM", "ex2/clk/SM"}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def quantities(name: str) -> dict[str, tuple[float, str]]:
    every = rows(HERE / "hardware" / f"h200_{name}.csv")
    found = {row["quantity"]: (float(row["value"]), row["unit"]) for row in every}
    assert len(found) == len(every), "a quantity twice"
    return found


@pytest.mark.parametrize("name", ["pipes", "memory", "launches"])
def test_quantities(name: str) -> None:
    for quantity, (value, unit) in quantities(name).items():
        assert unit in UNITS, quantity
        assert value > 0, quantity


def test_no_pipe_is_faster_than_it_can_be() -> None:
    """128 lanes issue a cycle; the SMEM port moves 128 bytes, give or take the timer's ends."""
    for quantity, (value, unit) in quantities("pipes").items():
        if unit == "op/clk/SM":
            assert value <= 128, quantity
        if unit == "B/clk/SM":
            assert 120 <= value <= 129, quantity


def test_memory_is_no_faster_than_its_pins() -> None:
    for quantity, (value, unit) in quantities("memory").items():
        if "HBM" in quantity and unit == "TB/s":
            assert value <= 4.8
        if "HBM" in quantity and unit == "B/clk/SM":
            assert value * 132 * 1.98e9 <= 4.8e12


@pytest.fixture(scope="module")
def measured() -> dict[tuple[Form, int], dict[str, str]]:
    every = rows(INTERVALS)
    found = {
        (Form(row["dtype"], int(row["n"]), row["a"], row["b"]), int(row["warpgroups"])): row
        for row in every
    }
    assert len(found) == len(every)
    return found


def test_every_form_was_measured(measured: dict[tuple[Form, int], dict[str, str]]) -> None:
    assert set(measured) == {(form, count) for form in forms() for count in form.warpgroups}
    for (form, count), row in measured.items():
        assert int(row["k"]) == form.k
        for what in ("latency", "issue"):
            values = [row[f"{what}_{length}"] for length in LENGTHS]
            assert all(values) if count == 1 else not any(values)


def test_intervals_respect_the_tensor_core(
    measured: dict[tuple[Form, int], dict[str, str]],
) -> None:
    """64 x n x k at 4096 bf16 FLOP (8192 e4m3) a cycle are n / 2 cycles."""
    for (form, count), row in measured.items():
        interval = float(row["interval"])
        assert interval >= 0.995 * form.n / 2, (form, count)
        if count == 1:
            assert int(row["latency_1"]) > interval


def test_beside_is_complete_and_possible() -> None:
    """MMAs of both warpgroups take n / 2 cycles each, one after another; nothing gets faster."""
    every = rows(HERE / "hardware" / "h200_wgmma_beside.csv")
    names = ("kind", "n", "a", "other", "warps", "cycles_0")
    keys = [tuple(row[name] for name in names) for row in every]
    assert len(set(keys)) == len(keys)
    works = [(kind, work) for kind in wgmma_beside.GROUPS for work in wgmma_beside.WORK]
    wanted = {
        (kind, str(form.n), form.a, work, str(warps))
        for form in wgmma_beside.FORMS
        for kind, work in [("turns", "wgmma"), *works]
        for warps in ((1,) if kind == "turns" else wgmma_beside.warps(form))
    }
    assert {key[:5] for key in keys} == wanted
    for row in every:
        cells = [float(row[f"cycles_{i}"]) for i in range(6) if row[f"cycles_{i}"]]
        n = int(row["n"])
        if row["kind"] == "turns":
            delay, issued, done, begun, other_issued, other_done = cells
            assert issued < done and begun < other_issued < other_done
            assert done >= 8 * n / 2 and max(done, other_done) >= 16 * n / 2
        else:
            alone, under, interval, slowed = cells
            assert under >= 0.99 * alone and slowed >= 0.99 * interval >= 0.99 * n / 2


def test_descriptor_fields() -> None:
    """PTX ISA 9.1, matrix descriptor of wgmma: offsets in units of 16 bytes, 128-byte swizzle."""
    made = descriptor(offset=8192, leading=2048, stride=1024)
    assert made & 0x3FFF == 512
    assert made >> 16 & 0x3FFF == 128
    assert made >> 32 & 0x3FFF == 64
    assert made >> 62 == 1


def test_module_names_every_form() -> None:
    ptx = module([Form("bf16", 64, "smem", "MN"), Form("e4m3", 32, "registers", "K")])
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16" in ptx
    assert ", %ad, %bd, %yes, 1, 1, 0, 1;" in ptx
    assert "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3" in ptx
    assert "}, {%a0, %a1, %a2, %a3}, %bd, %yes, 1, 1;" in ptx
