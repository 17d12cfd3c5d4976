"""Records which PTX opcodes each test executes: a pytest plugin.

    python -m pytest -p tests.coverage_recorder --record-coverage tests/emulator tests/blackwell
    python -m kernels.emulator coverage > docs/coverage.md

Tests of files that did not run keep what was recorded of them, so that parts can be recorded in
different environments. Tests that fail record nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from kernels.emulator import coverage

# Tests that hold an engine to hardware without going through PTX, and the opcodes that it executes.
ENGINE_TESTS = {
    "tests/emulator/test_tma_hardware.py::test_transfer": re.compile(
        r"cp\.async\.bulk\.tensor\.[1-5]d\.(shared::cluster\.global|shared::cta\.global)"
        r"(\.tile)?\.mbarrier::complete_tx::bytes(\.L2::cache_hint)?|"
        r"cp\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta(\.tile)?\.bulk_group"
        r"(\.L2::cache_hint)?"
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-coverage",
        action="store_true",
        help="record which PTX opcodes each test executes (kernels/emulator/coverage.csv)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-coverage"):
        config.pluginmanager.register(Recorder(), "coverage-recorder")


class Recorder:
    """Collects the opcodes of every test that passes; writes them when the session ends."""

    def __init__(self) -> None:
        self.ran: dict[str, set[str]] = {}  # test function -> opcodes

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with coverage.recording() as ran:
            yield
        self.ran.setdefault(item.nodeid.split("[")[0], set()).update(ran)

    def pytest_sessionfinish(self) -> None:
        files = {test.split("::")[0] for test in self.ran}
        tests: dict[str, set[str]] = {}
        if coverage.RECORD.exists():
            for op, known in coverage.read_record().items():
                tests[op] = {test for test in known if test.split("::")[0] not in files}
        for test, opcodes in self.ran.items():
            for op in opcodes:
                tests.setdefault(op, set()).add(test)
        for test, pattern in ENGINE_TESTS.items():
            if test in self.ran:
                for op in filter(pattern.fullmatch, tests):
                    tests[op].add(test)
        coverage.write_record({op: names for op, names in tests.items() if names})
