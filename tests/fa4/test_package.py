"""`import fa4`: its time, what it loads, what it exports; and the versions that were tested."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fa4
from fa4.dependencies import TESTED, outside_range, require

IMPORT = """
import json, sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import fa4
seconds = time.perf_counter() - start
added = sorted({name.split(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"seconds": seconds, "added": added}))
"""


def test_import_is_quick_and_light(root: Path) -> None:
    best = None
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", IMPORT], cwd=root, capture_output=True, text=True, check=True
        )
        measured = json.loads(done.stdout)
        best = min(best or measured["seconds"], measured["seconds"])
    assert best < 0.2
    assert not {"cutlass", "cuda", "llvmlite", "roofline", "safetensors"} & set(measured["added"])


def test_exports() -> None:
    assert all(hasattr(fa4, name) for name in fa4.__all__)
    from kernels.emulator.findings import EmulationError

    assert fa4.EmulationError is EmulationError
    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        _ = fa4.flash  # type: ignore[attr-defined]


def test_tested_versions_are_those_of_pyproject(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    ranges = {name: f"{name}>={first},<{end}" for name, (first, end) in TESTED.items()}
    declared = {entry.split(">=")[0].split("[")[0]: entry for entry in project["dependencies"]}
    assert {n: entry.replace("[cu13]", "") for n, entry in declared.items()} == ranges


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("4.8.1", True),
        ("4.8.2.dev0", True),
        ("4.8.10+cu13", True),
        ("4.9.0", False),
        ("4.8.0", False),
        ("4.10", False),
        ("5", False),
        ("unknown", False),
    ],
)
def test_versions_compare_by_number(version: str, fits: bool) -> None:
    assert (outside_range("nvidia-cutlass-dsl", version) == "") == fits


def test_this_environment_is_a_tested_one() -> None:
    require(*TESTED)
