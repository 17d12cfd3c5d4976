"""The Makefile installs torch first and once, and again only when what it depends on changes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# Stands in for Python: logs what it is asked to do, and as `-m venv DIR` puts itself into DIR.
INTERPRETER = """#!/bin/sh
[ "$1" = -c ] && exit "${VERSION_STATUS:-0}"
[ "$1" = -V ] && { echo Python 3.10.0; exit; }
echo "$@" >> "$LOG"
[ "$2" = venv ] && { mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/fa4"; }
exit 0
"""


class Checkout:
    """A folder with the Makefile, the pyproject and an interpreter that only logs."""

    def __init__(self, root: Path, path: Path) -> None:
        self.path = path
        shutil.copy(root / "Makefile", path)
        shutil.copy(root / "pyproject.toml", path)
        python = path / "interpreter"
        python.write_text(INTERPRETER)
        python.chmod(0o755)

    def make(self, *arguments: str, status: int = 0, **variables: str) -> list[str]:
        """What the interpreter was asked to do, a line each."""
        log = self.path / "log"
        log.write_text("")
        # what this make was asked for is not for the one under test
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ARGS", "JOBS")}
        env = dict(inherited, LOG=str(log), MAKEFLAGS="", MAKEOVERRIDES="", **variables)
        done = subprocess.run(
            ["make", "PYTHON=./interpreter", *arguments],
            cwd=self.path,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode == 0) == (status == 0), done.stderr
        self.stderr = done.stderr
        return log.read_text().splitlines()


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Checkout:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    return Checkout(root, tmp_path)


def test_demo_installs_torch_first_then_runs(checkout: Checkout) -> None:
    venv, torch, ours, demo = checkout.make("demo")
    assert venv == "-m venv .venv"
    assert torch.endswith("install --quiet torch==2.13.0")
    assert ours.endswith("install --quiet --editable .[test]")
    assert demo == "run --input fa4/demo/smollm2_layer14.safetensors --causal"


def test_second_make_installs_nothing(checkout: Checkout) -> None:
    checkout.make("install")
    assert checkout.make("install") == []
    pytest_run = "-m pytest -n auto --maxprocesses 8 --dist loadfile"
    assert checkout.make("test") == [pytest_run]
    assert checkout.make("test-fast", "PYTEST_ARGS=-x") == [f"{pytest_run} -m not slow -x"]


def test_another_torch_or_pyproject_installs_again(checkout: Checkout) -> None:
    checkout.make("install")
    words = "torch==2.13.0 --index-url somewhere"
    assert any(line.endswith(words) for line in checkout.make("install", f"TORCH={words}"))
    assert checkout.make("install", f"TORCH={words}") == []
    stamp = checkout.path / ".venv" / ".installed"
    later = stamp.stat().st_mtime + 10
    os.utime(checkout.path / "pyproject.toml", (later, later))
    assert len(checkout.make("install", f"TORCH={words}")) == 3


def test_old_python_is_refused_before_anything_is_made(checkout: Checkout) -> None:
    assert checkout.make("install", status=2, VERSION_STATUS="1") == []
    assert "fa4 needs Python 3.11 or newer, ./interpreter is Python 3.10.0" in checkout.stderr
