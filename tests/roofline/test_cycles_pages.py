"""What a prediction says of itself: gains and their spread, calibrations, records it refuses."""

from __future__ import annotations

from unittest.mock import ANY

import pytest

from kernels.emulator.records import OpClass
from roofline.cli import main
from roofline.cycles.hardware import calibrations, hardware, latencies
from roofline.cycles.pages import calibration_text
from roofline.cycles.predict import Gain, unit_gains
from roofline.cycles.probe import Probe
from roofline.gpus import find_gpu
from tests.roofline.measured import CALIBRATED
from tests.roofline.synthetic import Kernel


def test_the_page_says_which_kernels_decided_constants() -> None:
    """Every constant whose source is the kernels' own times, and none on Blackwell."""
    text = calibration_text(90)
    for name, quantity in latencies(90).items():
        fitted = "h200_peers.csv" in quantity.source and quantity.tag != "measured"
        assert (name in calibrations(90)) == (fitted or name.endswith(("_base", "_slope"))), name
        assert (name in text) == (name in calibrations(90))
    for rows in ("flash_attn_4, calibration rows", "quack_gemm, calibration rows"):
        assert rows in text
    assert {"copy_write_share", "wgmma_queue", "burst_time"} <= set(CALIBRATED)
    assert max(map(len, text.splitlines())) <= 125
    assert dict(calibrations(100)) == {}
    assert calibration_text(100) == "no measured time of a kernel went into it"


def test_records_of_another_architecture_are_refused(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    kernel = Kernel()
    kernel.block(("fma.rn.f32", OpClass.FMA, [0], [1]))
    path = tmp_path / "r.npz"
    kernel.records(kernel.warp(0, [0])).save(path)
    for gpu, status in (("b200", 0), ("h200", 2), ("b300", 2)):
        assert main(["simulate", "--gpu", gpu, "--records", str(path)]) == status
        err = capsys.readouterr().err
        assert ("records of a kernel for sm_100a (b200)" in err) == (status == 2)
        assert err.count("\n") == (status == 2)


def test_gains_below_their_spread_are_told_as_none() -> None:
    assert [str(Gain(*g)) for g in ((0.02, 0.01), (0.01, 0.012), (-0.02, 0.001), (0.0, 0.0))] == [
        "+2.0%", "~0", "~0", "~0",
    ]  # fmt: skip


def test_a_gain_is_that_of_the_unit_that_binds() -> None:
    """A chain of ex2 saves by latency, independent ones by the MUFU; nothing else does."""
    chain, wide = Kernel(), Kernel()
    chain.block(*[("ex2.approx.ftz.f32", OpClass.MUFU, [i], [i + 1]) for i in range(64)])
    wide.block(*[("ex2.approx.ftz.f32", OpClass.MUFU, [0], [i + 1]) for i in range(64)])
    for kernel, unit in ((chain, "latencies"), (wide, "MUFU")):
        records = kernel.records(kernel.warp(0, [0] * 8))
        gains = unit_gains([Probe(ANY, records, (1,), 1)], hardware(find_gpu("b200")))
        assert gains[unit].share == pytest.approx(1 - 1 / 1.1, abs=0.01)
        assert [name for name, gain in gains.items() if gain.known and gain.share > 0.01] == [unit]
