# SPDX-License-Identifier: Apache-2.0
"""The fixture for other people's tests: a clean kernel passes, a finding fails the test."""

import math
import textwrap

import pytest
import torch

from kernels.blackwell.gemm import Gemm

pytest_plugins = ["kernels.emulator.pytest_plugin", "pytester"]


@pytest.fixture
def operands():
    a, b = torch.ones(128, 64).bfloat16(), torch.full((128, 64), 2.0).bfloat16()
    return a, b, torch.full((128, 128), math.nan)


def test_a_clean_kernel_passes_every_way(emulated, operands):
    report = emulated(Gemm(), *operands)
    assert report.ok and (operands[2] == 128).all()
    reports = emulated.every_way(Gemm(), *operands)
    assert len(reports) == 12 and emulated.reports == [report, *reports]
    assert {r.visibility for r in reports} == {"eager", "late"}


def test_a_finding_fails_the_test(emulated, operands):
    with pytest.raises(pytest.fail.Exception, match="instruction_limit"):
        emulated(Gemm(), *operands, max_instructions=1000)
    report = emulated(Gemm(), *operands, max_instructions=1000, expect="instruction_limit")
    assert not report.ok
    with pytest.raises(pytest.fail.Exception, match="no finding 'deadlock'"):
        emulated(Gemm(), *operands, expect="deadlock")


def test_in_a_test_file_of_somebody_else(pytester, root):
    pytester.makeconftest('pytest_plugins = ["kernels.emulator.pytest_plugin"]')
    pytester.syspathinsert(root)
    pytester.makepyfile(
        textwrap.dedent(
            """
            import torch
            from kernels.blackwell.gemm import Gemm

            a, c = torch.ones(128, 64).bfloat16(), torch.zeros(128, 128)

            def test_good(emulated):
                emulated(Gemm(), a, a, c)

            def test_bad(emulated):
                emulated(Gemm(), a, a, c, max_instructions=1000)
            """
        )
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*instruction_limit*"])
