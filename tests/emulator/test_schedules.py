# SPDX-License-Identifier: Apache-2.0
"""Our kernels under many schedules: no finding, and the same bits every time."""

import itertools

import pytest

from kernels.emulator.mutate import PROFILES, MutationRun, parse_run
from kernels.emulator.schedule import VISIBILITIES
from tests.emulator import mutation_targets

# 100: each combination of profile and visibility, under both policies with a seed.
SCHEDULES = [
    f"{policy}:{seed}/{visibility}/{profile}"
    for seed, policy, visibility, profile in itertools.product(
        range(13), ("random", "adversarial"), VISIBILITIES, PROFILES
    )
][:100]


def check(target, names):
    run = MutationRun(getattr(mutation_targets, target)(), ("round_robin/eager/silicon",))
    (right,) = run._right.values()
    for name in names:
        findings, _ = run._run(run.programs, parse_run(name))
        assert findings == [], f"{name}: {findings[0]}"
        assert run.memory.contents() == right, f"{name}: other bits"
        run.memory.restore()


@pytest.mark.parametrize("target", ["gemm", "forward_dense", "forward_causal"])
def test_a_few_schedules(target):
    check(target, SCHEDULES[:8])


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["gemm", "forward_dense", "forward_causal"])
def test_a_hundred_schedules(target):
    assert len(set(SCHEDULES)) == 100
    check(target, SCHEDULES)
