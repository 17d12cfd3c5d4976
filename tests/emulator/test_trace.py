# SPDX-License-Identifier: Apache-2.0
"""The timeline of a run, and the report in a notebook."""

import json
import math

import pytest
import torch

from kernels.blackwell.gemm import ROLES, Gemm
from kernels.emulator import emulate


@pytest.fixture(scope="module")
def problem():
    a = torch.ones(128, 64 * 6).bfloat16()
    return a, a.clone(), torch.full((128, 128), math.nan)


def timeline(report, path):
    report.write_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e | {"track": names[e["pid"], e["tid"]]} for e in events if e["ph"] == "X"]
    return names, slices


def test_one_track_a_warp_and_engine(problem, tmp_path):
    report = emulate(Gemm(), *problem, roles=ROLES, trace=True)
    names, slices = timeline(report, tmp_path / "trace.json")
    assert report.ok
    assert set(names.values()) == {
        "warp 0 epilogue", "warp 1 epilogue", "warp 2 epilogue", "warp 3 epilogue",
        "warp 4 multiply", "warp 5 load", "TMA", "tensor core",
    }  # fmt: skip
    # 6 K tiles of 4 MMAs; 6 loads of A and of B, and C as four boxes of 32 columns.
    assert sum(s["track"] == "tensor core" for s in slices) == 24
    assert sum(s["track"] == "TMA" for s in slices) == 16


@pytest.mark.parametrize("schedule", ["round_robin", "run_until_blocked", "adversarial"])
def test_time_is_consistent(problem, tmp_path, schedule):
    """Slices of a track do not overlap, and a warp's time adds up to its instructions and waits."""
    report = emulate(Gemm(), *problem, roles=ROLES, trace=True, schedule=schedule)
    _, slices = timeline(report, tmp_path / "trace.json")
    for track in {s["track"] for s in slices}:
        ordered = sorted((s for s in slices if s["track"] == track), key=lambda s: s["ts"])
        for before, after in zip(ordered, ordered[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"], (track, before, after)
    # The epilogue's last wait ends after the last MMA was issued.
    last_mma = max(s["ts"] for s in slices if s["track"] == "tensor core")
    loads = [s for s in slices if "epilogue" in s["track"] and "tcgen05.ld" in s["name"]]
    assert loads and min(s["ts"] for s in loads) > last_mma
    assert all(s["args"]["source"].rpartition(":")[2].isdigit() for s in loads)


def test_a_run_that_is_not_traced_keeps_nothing(problem, tmp_path):
    report = emulate(Gemm(), *problem)
    assert report.launches[0].trace is None
    with pytest.raises(ValueError, match="trace=True"):
        report.write_trace(tmp_path / "trace.json")
    with pytest.raises(ValueError, match="traced"):
        emulate(Gemm(), *problem, trace=True, record=True)


def test_a_limit_says_where_everybody_stands(problem):
    report = emulate(Gemm(), *problem, roles=ROLES, max_instructions=20_000)
    (finding,) = report.findings
    assert finding.code == "instruction_limit"
    standing = finding.details["blocked"]
    assert {row["role"] for row in standing} == {"epilogue", "multiply", "load"}
    assert all(row["ptx_line"] > 0 and row["waits_on"] for row in standing)
    assert "waits on" in str(report)


def test_a_report_in_a_notebook(problem):
    good = emulate(Gemm(), *problem)._repr_html_()
    assert "no findings" in good and "<pre>" not in good
    bad = emulate(Gemm(), *problem, roles={0: "<epilogue>"}, max_instructions=20_000)._repr_html_()
    assert "1 finding" in bad and "instruction_limit" in bad and "<pre>" in bad
    assert "<epilogue>" not in bad and "&lt;epilogue&gt;" in bad
