"""What the documents say can be done, can be done; and files stay small enough to read.

Code blocks in Markdown: `sh` holds commands to run, `console` a command after `$ ` and the exact
output it gives, `python` a program. Cheap ones run here as written, dear ones are marked slow, and
of `make` only the targets are looked up, since make is what runs these tests. `bash` is a step of a
walk whose steps depend on each other; each walk has a test of its own.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "LIMITATIONS.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
WALKS = {ROOT / "docs/first_kernel.md": "tests/blackwell/test_gemm_walk.py"}
HARD_LIMIT_LINES = 800  # the soft limit is 500
HARD_LIMIT_FUNCTION_LINES = 120  # the soft limit is 60
OURS = ("fa4", "kernels", "roofline", "tests")

# Commands whose run takes seconds of emulation or more.
DEAR = re.compile(r"fa4 run|emulator|pytest|gemm|make_input")


@dataclass(frozen=True)
class Block:
    """A fenced code block: its language, first line number and text."""

    document: Path
    language: str
    line: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> list[Block]:
    """The fenced code blocks of a Markdown document."""
    found: list[Block] = []
    language, start, lines = None, 0, []
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if language is None and line.startswith("```"):
            language, start, lines = line[3:].strip(), number + 1, []
        elif language is not None and line.startswith("```"):
            found.append(Block(document, language, start, "\n".join(lines) + "\n"))
            language = None
        elif language is not None:
            lines.append(line)
    assert language is None, f"{document}: unclosed code block from line {start}"
    return found


BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]


def commands(block: Block) -> list[tuple[str, str | None]]:
    """(command, expected output or None) of an sh or console block; backslashes join lines."""
    text = block.text.replace("\\\n", "")
    if block.language == "sh":
        lines = [line.split(" #")[0].strip() for line in text.splitlines()]
        return [(line, None) for line in lines if line and not line.startswith("#")]
    parts = re.split(r"^\$ ", text, flags=re.M)
    assert not parts[0].strip(), f"{block.name}: output before the first command"
    return [(part.split("\n", 1)[0], part.split("\n", 1)[1]) for part in parts[1:]]


def is_step(language: str) -> bool:
    return language.split()[0] == "bash"


def is_make(command: str) -> bool:
    return command.split()[0] == "make"


def cases() -> list[pytest.param]:
    """Every command that is not make's, the dear ones marked slow."""
    found = []
    for block in BLOCKS:
        if block.language not in ("sh", "console"):
            continue
        for command, output in commands(block):
            if not is_make(command):
                marks = [pytest.mark.slow] if DEAR.search(command) else []
                case = pytest.param(command, output, marks=marks, id=f"{block.name} {command}")
                found.append(case)
    return found


def run(arguments: list[str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, PYTHONPATH=str(ROOT), COLUMNS="100")
    return subprocess.run(
        arguments, cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False
    )


def test_every_block_has_a_known_language() -> None:
    known = ("sh", "console", "python", "text")
    unknown = [block for block in BLOCKS if block.language not in known]
    assert [b.name for b in unknown if not (b.document in WALKS and is_step(b.language))] == []
    assert any(block.language == "python" for block in BLOCKS)


@pytest.mark.parametrize(("walk", "test"), WALKS.items(), ids=lambda path: Path(path).name)
def test_every_walk_has_its_test(walk: Path, test: str) -> None:
    assert str(walk.relative_to(ROOT)) in (ROOT / test).read_text()


@pytest.mark.parametrize(("command", "output"), cases())
def test_command_runs_as_written(command: str, output: str | None) -> None:
    program, *arguments = shlex.split(command)
    known = {
        "fa4": [sys.executable, "-m", "fa4"],
        "roofline": [sys.executable, "-m", "roofline"],
        "python": [sys.executable],
        ".venv/bin/python": [sys.executable],
    }
    assert program in known, f"{command}: this test does not know how to run {program}"
    done = run([*known[program], *arguments])
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), f"{command} prints nothing"
    if output is not None:
        assert done.stdout.rstrip() == output.rstrip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "python"], ids=lambda b: b.name
)
def test_python_block_runs_as_written(block: Block) -> None:
    done = run([sys.executable, "-c", block.text])
    assert done.returncode == 0, done.stderr


def without_measurements(line: str) -> str:
    """What depends on the machine or on details of the kernel is masked: times, counts, errors."""
    line = re.sub(r"\d+(?:,\d{3})+", "N", line)
    line = re.sub(r"\d+\.\d+ s \(\d+\.\d+ M/s\)", "N s (N M/s)", line.rstrip())
    return re.sub(r"\d\.\d+e[-+]\d+", "N", line)


@pytest.mark.slow
def test_readme_shows_what_the_demo_prints() -> None:
    """Every line that README shows, in order; `...` stands for lines left out."""
    (shown,) = (block for block in BLOCKS if block.language == "text" and "18 CTAs" in block.text)
    recipe = re.search(r"^demo:.*\n\t.*/fa4 (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert recipe is not None
    (demo,) = ROOT.glob("fa4/demo/*.safetensors")
    arguments = recipe[1].replace("$(DEMO_INPUT)", str(demo.relative_to(ROOT))).split()
    done = run([sys.executable, "-m", "fa4", *arguments, "--backend", "emulator"])
    assert done.returncode == 0, done.stderr
    printed = iter(map(without_measurements, done.stdout.splitlines()))
    for line in shown.text.splitlines():
        if line != "...":
            assert without_measurements(line) in printed, f"not printed, or not here: {line}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.M))
    named = set()
    for document in DOCUMENTS:
        text = document.read_text()
        lines = re.findall(r"(?:^|`)make ([^`\n]*)", text, flags=re.M)
        named |= {word for line in lines for word in re.sub(r"\S*='[^']*'", "", line).split()}
    assert {"demo", "test"} <= named
    assert named - targets == set()
    assert re.search(r"^make test$", (ROOT / ".ci/run").read_text(), flags=re.M)


def test_what_is_said_not_to_be_modelled_is_not() -> None:
    """An instruction that has been added since must leave the table in LIMITATIONS.md."""
    from kernels.emulator.isa import table
    from kernels.emulator.native import find

    section = (ROOT / "LIMITATIONS.md").read_text().split("## What the emulator does not model")[1]
    rows = re.findall(r"^\|.*\| (.*) \|$", section.split("\n## ")[0], flags=re.M)[2:]
    examples = [opcode for row in rows for opcode in re.findall(r"`([^`]+)`", row)]
    assert len(examples) >= len(rows) >= 3
    known = [pattern for pattern, _, _ in table._PATTERNS]
    modelled = {op for op in examples if find(op) or any(p.fullmatch(op) for p in known)}
    assert modelled == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", document.read_text())  # code may look like a link
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text)
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (document.parent / link).exists()] == []


def sources() -> list[Path]:
    return [path for part in OURS for path in sorted((ROOT / part).rglob("*.py"))]


def test_files_and_functions_are_short_enough_to_read() -> None:
    too_long = []
    for path in sources():
        text = path.read_text()
        if (lines := len(text.splitlines())) > HARD_LIMIT_LINES:
            too_long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > HARD_LIMIT_FUNCTION_LINES:
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    too_long.append(f"{place}: {node.name} has {length} lines")
    assert too_long == []


def test_nothing_points_into_somebodys_machine() -> None:
    """Absolute paths into a home or a work folder mean nothing to anyone else."""
    private = re.compile(r"(?<![\w./*])/(?:work/|root/|Users/|home/(?!me\b))\w")
    texts = [*sources(), *DOCUMENTS, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci/run"]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line)
    ]
    assert found == []
