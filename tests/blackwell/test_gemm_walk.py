# SPDX-License-Identifier: Apache-2.0
"""docs/first_kernel.md does what it says: its commands, in order, with the output it shows."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest

WALK = "docs/first_kernel.md"
# What brought this test here, and what runs beside it.
SKIPPED = re.compile(r"make install|\. \.venv/bin/activate|python -m pytest -q (\S+)")

_BLOCK = re.compile(r"^```(\w+)(?: exits=(\d+))?\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """A block of commands, the status its last one ends with, and the output shown after it."""

    commands: tuple[str, ...]
    status: int
    output: str | None


def steps(text):
    """The walk's bash blocks, each with the text block that follows it, if one does."""
    found = []
    for language, status, body in _BLOCK.findall(text):
        if language == "bash":
            commands = tuple(c for c in body.splitlines() if not SKIPPED.fullmatch(c))
            found.append(Step(commands, int(status or 0), None))
        else:
            assert language == "text" and found[-1].output is None, f"{language}:\n{body}"
            found[-1] = Step(found[-1].commands, found[-1].status, body)
    return found


def comparable(text, folder):
    """Without what differs from run to run, CPU to CPU or place to place; spaces are one space."""
    text = text.replace(f"{folder}/", "")
    text = re.sub(r"\d+\.\d+ s\b", "N s", text)
    text = re.sub(r"\(\d+\.\d+ M/s\)", "(N M/s)", text)
    text = re.sub(r"\bptx:\d+|[\d,]+ (?=thread-instr)", "N ", text)
    text = re.sub(r"\(torch in float32: [\d.e-]+\)", "(torch in float32: N)", text)
    return [line.split() for line in text.strip().splitlines()]


@pytest.mark.slow
def test_every_step_of_the_walk(root, tmp_path):
    for folder in ("kernels", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(root / "pyproject.toml", tmp_path)
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(tmp_path)}
    text = (root / WALK).read_text()
    assert [(root / path).exists() for path in SKIPPED.findall(text) if path] == [True]
    walk = steps(text)
    assert sum(step.output is not None for step in walk) >= 3
    for step in walk:
        for number, command in enumerate(step.commands, 1):
            done = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True
            )
            last = number == len(step.commands)
            said = f"{command}\n{done.stdout}\n{done.stderr}"
            assert done.returncode == (step.status if last else 0), said
        if step.output is not None:
            shown, printed = (comparable(t, tmp_path) for t in (step.output, done.stdout))
            assert printed == shown, said
    assert not (tmp_path / "my_gemm.py").exists()
