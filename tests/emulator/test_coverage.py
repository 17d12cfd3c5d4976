"""The coverage table: what is recorded is what ran, and docs/coverage.md says what is so today."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from kernels.emulator import coverage
from kernels.emulator.__main__ import main
from tests.emulator.ptx_harness import HEADER, execute, run

THREADS = 64


def kernel_opcodes(ptx: str) -> set[str]:
    """Opcodes of a module's text, read without the emulator's front end."""
    body = ptx[ptx.index(".entry") :]
    lines = (re.sub(r"^@!?%?\w+\s+", "", line.strip()) for line in body.splitlines())
    found = (re.match(r"([a-z][a-z0-9_]*(?:(?:\.|::)\w+)*)\s*(?:[^:\w]|$)", x) for x in lines)
    return {m[1] for m in found if m and not m[0].endswith(":")}


BRANCHES = """
.reg .pred %p, %never; .reg .b32 %r, %at;
setp.lt.u32 %p, %thread_, 64;
setp.gt.u32 %never, %thread_, 64;
@%p bra TAKEN;
mul.lo.u32 %r, %thread_, 3;
bar.sync 0;
TAKEN:
@%never bar.arrive 1, 64;
@%p bar.sync 1, 64;
xor.b32 %d, %a, 5;
"""


def test_only_what_ran_is_recorded() -> None:
    a = np.arange(THREADS, dtype=np.uint32)
    with coverage.recording() as ran:
        execute(BRANCHES, {"a": a}, {"d": np.uint32})
    assert {"setp.lt.u32", "bra", "xor.b32", "ld.global.b32", "bar.sync", "ret"} <= ran
    assert not {"mul.lo.u32", "bar.arrive"} & ran


def test_each_recording_starts_afresh_and_leaves_the_program_as_it_was() -> None:
    a = np.arange(THREADS, dtype=np.uint32)
    recorded = []
    for _ in range(2):
        with coverage.recording() as ran:
            for _ in range(3):  # the decoded program is the same object each time
                execute(BRANCHES, {"a": a}, {"d": np.uint32})
        recorded.append(set(ran))
        ran.clear()
        execute(BRANCHES, {"a": a}, {"d": np.uint32})
        assert ran == set()
    assert recorded[0] == recorded[1] != set()


def test_a_fault_ends_the_recording_too() -> None:
    with coverage.recording() as ran:
        assert run("trap;", {}, {"d": np.uint32}).findings[0].code == "trap"
    assert "trap" in ran and "st.global.b32" not in ran


def test_the_record_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "coverage.csv"
    tests = {"b.u32": {"t/y.py::two", "t/x.py::b", "t/x.py::a"}, "a.u32": {"t/x.py::a"}, "c": set()}
    coverage.write_record(tests, path)
    assert coverage.read_record(path) == {
        "a.u32": ("t/x.py::a",),
        "b.u32": ("t/x.py::a", "t/y.py::two"),  # one test of a file is enough
    }


def test_hardware_counts_opcode_by_opcode() -> None:
    record = {"brev.b32": ("tests/emulator/test_native_hardware.py::f",), "brev.b64": ("t.py::g",)}
    [row] = [row for row in coverage.rows(record) if row.opcodes]
    assert row.opcodes == ("brev.b32", "brev.b64")
    assert row.hardware() == "1 of 2"
    assert [row.hardware() for row in coverage.rows({}) if row.hardware() != "no"] == []


# --- The committed record -------------------------------------------------------------------------


def test_the_document_is_what_the_command_prints(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["coverage"]) == 0
    printed = capsys.readouterr().out
    assert (root / "docs" / "coverage.md").read_text() == printed, (
        "run: python -m kernels.emulator coverage > docs/coverage.md"
    )


def test_every_form_ran_in_a_test() -> None:
    idle = [str(row.form) for row in coverage.rows(coverage.read_record()) if not row.opcodes]
    assert idle == []


def test_recorded_tests_exist_and_recorded_opcodes_are_modelled(root: Path) -> None:
    record = coverage.read_record()
    assert [op for op in record if not coverage.is_modelled(op)] == []
    functions: dict[str, set[str]] = {}
    for test in {test for tests in record.values() for test in tests}:
        file, name = test.split("::", 1)
        if file not in functions:
            tree = ast.parse((root / file).read_text())
            functions[file] = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        assert name.split("::")[-1] in functions[file], f"{test} is gone: record again"


def test_our_kernels_are_in_the_record() -> None:
    """So a change of a kernel that needs another instruction asks for a new record."""
    pytest.importorskip("cutlass")
    import torch

    from kernels.blackwell.forward import AttentionForward
    from kernels.common.plan import KernelPlan
    from kernels.emulator import capture

    q = torch.zeros(1, 128, 1, 64, dtype=torch.bfloat16)
    lse = torch.zeros(1, 1, 128)
    plan = KernelPlan.forward(head_dim=64, causal=True)
    ptx = capture.ptx_of(AttentionForward(plan), q, q, q, q, lse, 1.0)
    recorded = {
        op
        for op, tests in coverage.read_record().items()
        if any(test.startswith("tests/blackwell/") for test in tests)
    }
    used = kernel_opcodes(ptx)
    assert len(used) > 80
    assert used - recorded == set()


# --- The command ----------------------------------------------------------------------------------

ENTRY = ".visible .entry k()\n{{\n.reg .b32 %r<4>;\n{}\nret;\n}}\n"


def test_ptx_that_is_modelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "k.ptx"
    file.write_text(HEADER + ENTRY.format("mov.b32 %r1, 3; add.s32 %r2, %r1, %r1;"))
    assert main(["coverage", "--ptx", str(file)]) == 0
    assert capsys.readouterr().out == f"0 opcodes of {file} are not modelled\n"


def test_ptx_that_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "k.ptx"
    unknown = "frob.s32 %r2, %r1;\nwobble.q7 %r2, %r1;"
    file.write_text(HEADER + ENTRY.format(f"mov.b32 %r1, 3;\n{unknown}"))
    assert main(["coverage", "--ptx", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "frob.s32",
        "    ptx:8: frob.s32 %r2, %r1",
        "wobble.q7",
        "    ptx:9: wobble.q7 %r2, %r1",
    ]


@pytest.mark.parametrize("text", [None, "hello", HEADER + ENTRY.format("mov.b32 %r9, 3;")])
def test_files_that_cannot_be_read(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "k.ptx"
    if text is not None:
        file.write_text(text)
    assert main(["coverage", "--ptx", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and str(file) in captured.err and captured.err.count("\n") == 1
