"""Matrix products: order and traffic of tiles by brute force, persistent costs, bad input."""

from __future__ import annotations

import numpy as np
import pytest

from roofline.cycles.clocks import clock_ghz
from roofline.cycles.gemm import GemmWorkload
from roofline.cycles.hardware import latencies
from roofline.cycles.predict import Replayed, item_cost
from roofline.cycles.state import Run
from roofline.errors import RooflineError
from roofline.gemm import Gemm, Tiling, gemm_bounds, parse_gemm
from roofline.gpus import find_gpu
from tests.roofline.measured import measured


def work(*, persistent: bool = True) -> GemmWorkload:
    return GemmWorkload("hand", None, "h200", "bfloat16", 256, 192, 64, 2, persistent)


def test_every_tile_has_its_turn_once_in_bands() -> None:
    gemm = Gemm(2000, 5000, 64)
    order = list(Tiling(256, 192, 66, 4).order(gemm))
    assert sorted(order) == [(m, n) for m in range(8) for n in range(27)]
    assert order[:5] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]  # bands of four rows


def test_what_fits_into_l2_is_read_once() -> None:
    gemm = Gemm(2048, 1024, 512)
    found = gemm_bounds(find_gpu("h200"), gemm, Tiling(256, 128, 10), 2, "mma_bf16")
    assert found.hbm_bytes == 2 * (2048 * 512 + 1024 * 512 + 2048 * 1024)
    assert found.l2_bytes == found.hbm_bytes


def test_what_does_not_fit_is_read_again_in_each_round() -> None:
    """Counted tile by tile: in a round a panel is read once, the next round reads it again."""
    gemm = Gemm(4096, 4096, 65536)
    tiling = Tiling(256, 256, 24)
    order = list(tiling.order(gemm))
    panels = 0
    for first in range(0, len(order), 24):
        wave = order[first : first + 24]
        panels += len({m for m, _ in wave}) + len({n for _, n in wave})
    found = gemm_bounds(find_gpu("h200"), gemm, tiling, 2, "mma_bf16")
    assert found.hbm_bytes == panels * 256 * 65536 * 2 + 4096 * 4096 * 2
    assert found.l2_bytes == 256 * (256 + 256) * 65536 * 2 + 4096 * 4096 * 2


def test_items_and_stand_ins_cover_the_product() -> None:
    gemm = Gemm(1000, 1000, 10000)
    assert work().items(gemm) == [157] * (4 * 6)
    assert work().stand_ins(gemm) == (
        Gemm(512, 192, 1024),
        Gemm(1024, 192, 1024),
        Gemm(1024, 192, 1536),
    )
    assert work(persistent=False).stand_ins(Gemm(9, 9, 640)) == (
        Gemm(256, 192, 320),
        Gemm(256, 192, 640),
    )


def test_a_persistent_items_cost_is_solved_from_three_replays() -> None:
    start, per_item, per_block = 3000.0, 500.0, 768.0
    replayed = [
        Replayed(blocks, items, Run(cycles=start + per_item * items + per_block * blocks))
        for blocks, items in ((32, 2), (64, 4), (96, 4))
    ]
    cost = item_cost(work(), replayed)
    assert cost.start == pytest.approx(start)
    assert cost.cycles(16) == pytest.approx(per_item + 16 * per_block)
    assert cost.cycles(1000) == pytest.approx(per_item + 1000 * per_block)


@pytest.mark.parametrize("text", ["4096", "4096x4096", "4096x4096x-1", "axbxc", "0x1x1"])
def test_bad_products_are_named(text: str) -> None:
    with pytest.raises(RooflineError, match=r"^(gemm|m) "):
        parse_gemm(text)


def test_the_clocks_are_those_of_cublas() -> None:
    """Least squares over the rows that the constants name: clock against tensor cores' share."""
    rows = [r for r in measured() if r["kernel"] == "cublas" and r["data"] == "randn"]
    assert len(rows) == 8
    cycles = np.array([float(r["burst_us"]) * float(r["burst_mhz"]) for r in rows])
    work = np.array([2.0 * int(r["m"]) * int(r["n"]) * int(r["k"]) for r in rows])
    share = work / (132 * 4096) / cycles
    burst = np.array([float(r["burst_mhz"]) for r in rows]) / 1e3
    sustained = cycles / np.array([float(r["sustained_us"]) for r in rows]) / 1e3
    constants = latencies(90)
    for case, clock in (("burst", burst), ("sustained", sustained)):
        slope, base = np.polyfit(share, clock, 1)
        assert constants[f"{case}_clock_base"].value == pytest.approx(base, abs=0.005)
        assert constants[f"{case}_clock_slope"].value == pytest.approx(-slope, abs=0.005)


def test_a_clock_is_a_case_or_a_number() -> None:
    h200, b200 = find_gpu("h200"), find_gpu("b200")
    assert clock_ghz(h200, "burst", 0.0) == float(h200["clock_max"].value)
    assert clock_ghz(h200, "sustained", 0.9) < clock_ghz(h200, "burst", 0.9) < 1.7
    short, long, endless = (clock_ghz(h200, "burst", 0.9, c) for c in (1e3, 1.6e7, 1e12))
    assert short == pytest.approx(clock_ghz(h200, "burst", 0.9), rel=1e-4)
    assert endless == pytest.approx(clock_ghz(h200, "sustained", 0.9), rel=1e-4)
    assert endless < long < short
    assert clock_ghz(b200, "sustained", 0.9) == float(b200["clock"].value)
    assert clock_ghz(b200, "1.5", 0.9) == 1.5
    with pytest.raises(RooflineError, match="clock 'fast'"):
        clock_ghz(h200, "fast", 0.5)
