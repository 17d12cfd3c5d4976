"""The report: for people, and as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kernels.emulator.findings import EmulationError, Finding
from kernels.emulator.gpus import gpu_model
from kernels.emulator.host_runtime import Launch
from kernels.emulator.report import LaunchReport, Report, blocked_table, json_ready, shorten

LAUNCH = Launch("kernel_" + "x" * 100 + "_0", (4, 2, 1), (512, 1, 1), (2, 1, 1), smem_bytes=65536)
FAULT = Finding(
    "smem_unwritten_read",
    "16 bytes at 0x480",
    role="mma",
    cta=(1, 0, 0),
    warp=12,
    ptx_line=77,
    source="mma.py:31",
    details={"addresses": np.arange(2), "value": float("nan"), "raw": b"\x01\xff"},
)
BLOCKED = [
    {
        "warp": 12,
        "role": "mma",
        "source": "mma.py:40",
        "ptx_line": 1812,
        "waits_on": "mbarrier",
        "barrier": 0x430,
        "phase": 1,
        "pending_arrivals": 1,
        "pending_bytes": 8192,
        "last_arrivers": ["load", "load"],
    },
    {"warp": 14, "role": "load", "source": "load.py:9", "waits_on": "bar.sync 2"},
]


def report(*findings: Finding, **kw) -> Report:
    first = LaunchReport(LAUNCH, (), 3_000_000, 8, 0.5)
    second = LaunchReport(LAUNCH, findings, 1_000_000, 8, 0.5)
    return Report("forward", gpu_model("b200"), (first, second), seed=3, **kw)


def test_totals_are_sums_over_launches():
    totals = report()
    assert totals.ok and totals.thread_instructions == 4_000_000 and totals.seconds == 1.0
    assert totals.thread_instructions_per_second == 4e6
    assert Report("f", gpu_model("b200")).thread_instructions_per_second is None
    totals.raise_if_findings()


def test_the_text_says_what_ran_how_fast_and_that_nothing_is_wrong():
    text = str(report(compile_seconds=2.0))
    assert "forward emulated on b200 (sm_100a): seed 3, round_robin, eager, silicon" in text
    assert "grid 4x2x1  block 512x1x1  cluster 2x1x1  smem 64.0 KiB" in text
    assert "3,000,000 thread-instructions in 0.50 s (6.0 M/s)" in text
    assert "compile 2.00 s; 4,000,000 thread-instructions in 1.00 s (4.0 M/s)" in text
    assert text.endswith("no findings")
    assert max(map(len, text.splitlines())) < 160
    assert "compile reused" in str(report())
    assert "nothing was launched" in str(Report("f", gpu_model("b200")))


def test_findings_are_grouped_by_code_and_long_lists_are_cut():
    others = [Finding("tmem_not_freed", f"columns {n}") for n in range(9)]
    text = str(report(FAULT, *others, FAULT))
    assert "11 findings" in text and "smem_unwritten_read (2)" in text
    assert "16 bytes at 0x480  [mma, mma.py:31, ptx:77, cta (1, 0, 0)]" in text
    assert "columns 4" in text and "columns 5" not in text and "... and 4 more" in text


def test_a_launch_that_did_not_run_is_said_so_and_is_not_ok():
    skipped = Report("f", gpu_model("b200"), (LaunchReport(LAUNCH, ran=False),))
    assert not skipped.ok and "not run" in str(skipped)


def test_a_deadlock_is_printed_whole_as_a_table():
    deadlock = Finding("deadlock", "2 warps wait for ever", details={"blocked": BLOCKED})
    lines = str(report(deadlock)).splitlines()
    [head] = [n for n, line in enumerate(lines) if "arrivals missing" in line]
    columns = [lines[head].index(name) for name in ("warp", "role", "at", "waits on", "barrier")]
    mma, load = lines[head + 1], lines[head + 2]
    assert [mma[column:].split("  ")[0].strip() for column in columns] == [
        "12", "mma", "mma.py:40", "mbarrier", "0x430",
    ]  # fmt: skip
    assert [load[column:].split("  ")[0].strip() for column in columns] == [
        "14", "load", "load.py:9", "bar.sync 2", "-",
    ]  # fmt: skip
    assert mma.endswith("load, load") and "8192" in mma


@pytest.mark.parametrize("rows", [None, [], [{"warp": None, "role": ""}]])
def test_no_table_without_rows(rows):
    assert blocked_table(rows) == []


def test_the_dictionary_is_json_without_nan_and_has_everything():
    data = report(FAULT, Finding("deadlock", "stuck", details={"blocked": BLOCKED})).to_dict()
    back = json.loads(json.dumps(data, allow_nan=False))
    assert back["ok"] is False and back["gpu"] == "b200" and back["seed"] == 3
    assert [finding["code"] for finding in back["findings"]] == ["smem_unwritten_read", "deadlock"]
    assert back["findings"][0]["details"] == {"addresses": [0, 1], "value": None, "raw": "01ff"}
    assert back["findings"][0]["cta"] == [1, 0, 0]
    assert back["findings"][1]["details"]["blocked"][0]["pending_bytes"] == 8192
    assert [launch["thread_instructions"] for launch in back["launches"]] == [3000000, 1000000]
    assert back["launches"][0]["cluster"] == [2, 1, 1]


def test_raising_carries_the_report_and_its_text():
    bad = report(FAULT)
    with pytest.raises(EmulationError, match="forward on b200: 1 finding ") as caught:
        bad.raise_if_findings()
    assert caught.value.report is bad and "16 bytes at 0x480" in str(caught.value)


def test_json_ready_knows_numpy_sets_and_infinities():
    value = {1: np.float32("inf"), "s": {3, 1}, "t": (np.int64(4), True), "o": pytest}
    ready = json_ready(value)
    assert ready["1"] is None and ready["s"] == [1, 3] and ready["t"] == [4, True]
    assert isinstance(ready["o"], str)


def test_long_names_keep_head_and_tail():
    assert shorten("short", 20) == "short"
    cut = shorten("kernel_" + "y" * 50 + "_17", 20)
    assert len(cut) == 20 and cut.startswith("kernel_") and cut.endswith("_17")
