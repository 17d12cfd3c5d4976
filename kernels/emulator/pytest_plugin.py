"""A pytest fixture that runs kernels on the emulator and fails the test on any finding.

    # conftest.py
    pytest_plugins = ["kernels.emulator.pytest_plugin"]

    # test_mine.py
    def test_my_kernel(emulated):
        report = emulated(my_host_function, a, b, c)          # as kernels.emulator.emulate
        emulated.every_way(my_host_function, a, b, c)         # all schedules, late visibility too

A test whose kernel is wrong on purpose asks for the report: ``emulated(..., expect="deadlock")``.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .report import Report


class Emulated:
    """Calls `kernels.emulator.emulate`; ``reports`` holds what came of it, in order."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def __call__(self, fn: Any, *args: Any, expect: str | None = None, **options: Any) -> Report:
        """Runs ``fn(*args)`` on the emulator; returns the report.

        Fails the test on any finding, or with ``expect`` unless there is a finding of that code.
        """
        __tracebackhide__ = True
        from .api import emulate

        report = emulate(fn, *args, **options)
        self.reports.append(report)
        codes = [finding.code for finding in report.findings]
        if expect is None and not report.ok:
            pytest.fail(str(report), pytrace=False)
        if expect is not None and expect not in codes:
            pytest.fail(f"no finding {expect!r}\n{report}", pytrace=False)
        return report

    def every_way(self, fn: Any, *args: Any, seeds: int = 2, **options: Any) -> list[Report]:
        """Runs it under every schedule and visibility, the random ones with several seeds. The
        kernel must be one that may run again on its own results (tensors are written in place)."""
        __tracebackhide__ = True
        from .schedule import POLICIES, VISIBILITIES

        reports = []
        for schedule, visibility in itertools.product(POLICIES, VISIBILITIES):
            for seed in range(seeds if schedule in ("random", "adversarial") else 1):
                way: dict[str, Any] = {"schedule": schedule, "visibility": visibility, "seed": seed}
                reports.append(self(fn, *args, **way, **options))
        return reports


@pytest.fixture
def emulated() -> Emulated:
    """Runs kernels on the emulator; any finding fails the test."""
    return Emulated()
