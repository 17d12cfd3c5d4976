"""flash-attn-4's forward, compiled from its own package, runs on the modelled SM.

Under the ``silicon`` profile no finding may come up: its kernels are in wide use on hardware, so a
finding would have to be a true defect of theirs, or is one of ours.
"""

from __future__ import annotations

import pytest
import torch

from tests.peers.attention import Problem, Varlen, check, run

pytestmark = pytest.mark.slow

SMALL = Problem(True, 64, 300, 333, heads=4, kv_heads=2)
PAIR = Problem(False, 128, 500, 300, two_ctas=True)

BLACKWELL = [
    SMALL,
    Problem(True, 128, 300, 451),
    Problem(False, 128, 200, 333, heads=3, kv_heads=3),
    Problem(False, 64, 100, 260, batch=2, heads=1, kv_heads=1, dtype=torch.float16),
    PAIR,
]

HOPPER = [
    Problem(True, 128, 200, 300, heads=2, kv_heads=1),
    Problem(False, 64, 260, 300),
]


@pytest.mark.parametrize("problem", BLACKWELL, ids=str)
def test_blackwell(problem: Problem) -> None:
    report = check(problem)
    (launch,) = report.launches
    assert launch.launch.cluster == ((2, 1, 1) if problem.two_ctas else (1, 1, 1))
    assert launch.launch.block == (512, 1, 1)


def test_blackwell_ultra() -> None:
    """sm_103a takes its row maxima with tcgen05.ld.red."""
    check(SMALL, "b300")


@pytest.mark.parametrize("launch_control", [False, True])
def test_sequences_of_different_lengths(launch_control: bool) -> None:
    """Some rows see no key, one sequence has no query, one no key."""
    lengths = ((100, 0, 328, 212, 60), (33, 17, 256, 334, 0))
    Varlen(True, 64, *lengths, heads=2, kv_heads=1, launch_control=launch_control).check()


@pytest.mark.parametrize(
    ("problem", "gpu"), [(SMALL, "b200"), (PAIR, "b200"), (HOPPER[0], "h100")], ids=str
)
@pytest.mark.parametrize(
    "order",
    [
        {"schedule": "round_robin", "visibility": "late"},
        {"schedule": "run_until_blocked", "visibility": "eager"},
        {"schedule": "random", "visibility": "late", "seed": 1},
        {"schedule": "random", "visibility": "eager", "seed": 2},
        {"schedule": "adversarial", "visibility": "late"},
    ],
    ids=lambda order: "-".join(map(str, order.values())),
)
def test_no_schedule_finds_anything(problem: Problem, gpu: str, order: dict[str, object]) -> None:
    check(problem, gpu, **order)


@pytest.mark.parametrize("problem", [SMALL, PAIR], ids=str)
def test_what_the_ptx_text_asks_for(problem: Problem) -> None:
    """By the letter of the PTX ISA (9.7.16.6.4) a tcgen05.ld behind an mbarrier wait needs
    tcgen05.fence::after_thread_sync, which flash-attn-4 leaves out."""
    report, _, _ = run(problem, profile="isa")
    (finding,) = [finding for launch in report.launches for finding in launch.findings]
    assert finding.code == "missing_tcgen05_fence"
    assert "flash_fwd_sm100.py" in str(finding)


@pytest.mark.parametrize("profile", ["silicon", "isa"])
@pytest.mark.parametrize("problem", HOPPER, ids=str)
def test_hopper(problem: Problem, profile: str) -> None:
    """The Hopper kernels keep to the letter of the PTX ISA, too."""
    check(problem, "h100", profile=profile)


def test_hopper_sequences_of_different_lengths() -> None:
    Varlen(True, 128, (100, 0, 172), (33, 17, 300)).check("h100")
