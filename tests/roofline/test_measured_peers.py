"""The peers' times on an H200 (hardware/h200_peers.csv): complete, split by rule, and possible."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.roofline.hardware.gpu_clock import clock_mhz, energy_slope, throttle_names
from tests.roofline.hardware.measure_peers import Point, Row, points, split

PATH = Path(__file__).with_name("hardware") / "h200_peers.csv"
TARGETS = ("flash_attn_4", "quack_gemm")


def rows() -> list[dict[str, str]]:
    with PATH.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


MEASURED = list(zip(points(), rows(), strict=True))


@pytest.mark.parametrize(("point", "row"), MEASURED, ids=[str(point) for point, _ in MEASURED])
def test_row(point: Point, row: dict[str, str]) -> None:
    assert list(row) == [field.name for field in fields(Row)]
    assert row["set"] == split(points())[point]
    assert (row["kernel"], row["data"], row["version"] != "") == (point.kernel, point.data, True)
    shape = tuple(int(row[name]) for name in ("head_dim", "causal", "seqlen", "m", "n", "k"))
    assert shape == (point.head_dim, point.causal, point.seqlen, point.m, point.n, point.k)
    assert row["config"].endswith(str(point.gemm or ""))
    for kind in ("burst", "sustained"):
        microseconds, mhz = float(row[f"{kind}_us"]), float(row[f"{kind}_mhz"])
        assert 345 <= mhz <= 1981, "outside the clocks of an H200"
        # 132 SMs do at most 4096 FLOP a cycle each, at the clock that was measured with the time
        assert point.flops <= microseconds * mhz * 132 * 4096, kind
    assert 0 <= float(row["burst_spread"]) < 0.1
    assert 100 < float(row["power_w"]) < 750
    if point.kernel in TARGETS:
        assert row["grid"] and row["block"] and int(row["registers"]) and int(row["smem"])


def test_no_point_twice() -> None:
    every = points()
    assert len(set(every)) == len(every)


def test_split_is_even_and_by_series() -> None:
    sets = split(points())
    for kernel in TARGETS:
        count = Counter(chosen for point, chosen in sets.items() if point.kernel == kernel)
        assert count["calibration"] == count["check"]
    series: dict[tuple[object, ...], list[str]] = {}
    for point, chosen in sets.items():
        series.setdefault(point.series, []).append(chosen)
    for (kernel, *_), members in series.items():
        if kernel in TARGETS:
            assert all(a != b for a, b in zip(members, members[1:], strict=False))
        else:
            assert set(members) == {"calibration"}


def test_energy_counter_in_steps() -> None:
    """500 W read every 4 ms off a counter that moves every 20 ms."""
    samples = [(0.004 * k + 0.003, 500 * 20 * ((4 * k + 3) // 20)) for k in range(100)]
    assert energy_slope(samples) == pytest.approx(500, rel=0.02)
    assert str(energy_slope(samples[:4])) == "nan"


def test_clock_between_stamps() -> None:
    """Stamps list SMs in any order, counters start anywhere; an SM seen once tells nothing."""
    before = torch.tensor([[3, 10_000, 500], [1, 70_000, 520], [2, 5, 540], [7, 1, 1]])
    after = torch.tensor(
        [[2, 5 + 1_750_000, 1_000_540], [9, 8, 8], [3, 10_000 + 1_740_000, 1_000_500]]
        + [[1, 70_000 + 1_760_000, 1_000_520]]
    )
    assert clock_mhz(before, after) == pytest.approx(1750)


def test_throttle_names() -> None:
    assert throttle_names(0x4 | 0x40 | 0x1) == "power_cap+hw_thermal"
    assert throttle_names(0x1) == "none"
