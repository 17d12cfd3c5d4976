"""`make test-hw`: it says why it skips, and a recording that differs is named."""

from __future__ import annotations

import ctypes
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.emulator.hardware import check, goldens


def test_without_a_gpu_it_skips_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    monkeypatch.setattr(check, "prepare", lambda folder: pytest.fail("nothing is to be prepared"))
    assert check.main([]) == 0
    said = capsys.readouterr().out
    assert said == "test-hw: skipped, nothing was compared: this machine has no NVIDIA driver.\n"


class _Driver:
    """A driver that knows one GPU of the given compute capability."""

    def __init__(self, major: int, minor: int) -> None:
        self.capability = {75: major, 76: minor}

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = b"Some GPU"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = self.capability[attribute]
        return 0


@pytest.mark.parametrize(
    ("capability", "name", "why"),
    [
        ((9, 0), "Some GPU", ""),
        ((8, 0), "", "Some GPU is of compute capability 8.0, not of 9.0"),
        ((10, 0), "", "Some GPU is of compute capability 10.0, not of 9.0"),
    ],
)
def test_recordings_are_of_hopper(
    capability: tuple[int, int], name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda path: _Driver(*capability))
    assert check.gpu_or_why() == (name, why)


def test_differences_are_named() -> None:
    old = {"gpu": "A", "launches": {"x": "1", "y": "2"}, "rows": [{"a": 1}, {"a": 2}]}
    new = {"gpu": "B", "launches": {"x": "1", "y": "3", "z": "4"}, "rows": [{"a": 1}, {"a": 5}]}
    assert check.differences(new, old) == ["/launches/y", "/rows/1/a"]
    assert check.differences(old, old) == []


def test_committed_recordings_are_complete() -> None:
    for name in goldens.NAMES:
        recorded = json.loads((goldens.COMMITTED / name).read_text())
        assert "H200" in recorded["gpu"]
        assert len(check.flat(recorded)) > 90


def test_fresh_recordings_take_the_place_of_the_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `compare` has the tests read them."""
    shutil.copy(goldens.COMMITTED / "approx_sm90.json", tmp_path)
    text = (tmp_path / "approx_sm90.json").read_text()
    (tmp_path / "approx_sm90.json").write_text(text.replace('"driver": ', '"driver": 9'))
    monkeypatch.setenv("FA4_HARDWARE_RECORD", str(tmp_path))
    fresh = goldens.load("approx_sm90.json")["driver"]
    monkeypatch.delenv("FA4_HARDWARE_RECORD")
    assert str(fresh) == f"9{goldens.load('approx_sm90.json')['driver']}"


@pytest.mark.parametrize("name", check.TESTS)
def test_the_tests_that_it_runs_exist(name: str) -> None:
    assert (Path(__file__).parent / name).is_file()
