"""quack-kernels' GEMM, compiled from its own package, runs on the modelled SM.

As for flash-attn-4, the ``silicon`` profile may not find anything in kernels in wide use.
"""

from __future__ import annotations

import pytest
import torch

from tests.peers.gemm import Problem, check, run

pytestmark = pytest.mark.slow

ONE = Problem((128, 128))
PAIR = Problem((256, 192), (2, 1), m=600, n=520, k=136)
CLUSTER = Problem((256, 128), (2, 2), m=600, n=304, k=264, launch_control=False)
BLACKWELL = [ONE, PAIR, CLUSTER, Problem((128, 64), dtype=torch.float16, out_dtype=torch.float32)]

HOPPER = [
    Problem((128, 192)),
    Problem((128, 256), (2, 1), m=300, n=520),
    Problem((64, 256), n=520, pingpong=True),
]


@pytest.mark.parametrize("problem", BLACKWELL, ids=str)
def test_blackwell(problem: Problem) -> None:
    """One CTA, CTA pairs, and 2 x 2 clusters with multicast; tiles by cluster launch control, or
    by a scheduler warp that stores into every CTA of the cluster."""
    report = check(problem)
    assert report.launches[0].launch.cluster == (*problem.cluster, 1)


@pytest.mark.parametrize(
    ("problem", "gpu"),
    [(ONE, "b200"), (PAIR, "b200"), (CLUSTER, "b200"), (HOPPER[1], "h100"), (HOPPER[2], "h100")],
    ids=str,
)
@pytest.mark.parametrize(
    "order",
    [
        {"schedule": "round_robin", "visibility": "late"},
        {"schedule": "run_until_blocked", "visibility": "eager"},
        {"schedule": "random", "visibility": "late", "seed": 1},
        {"schedule": "adversarial", "visibility": "late"},
    ],
    ids=lambda order: "-".join(map(str, order.values())),
)
def test_no_schedule_finds_anything(problem: Problem, gpu: str, order: dict[str, object]) -> None:
    check(problem, gpu, **order)


@pytest.mark.parametrize(
    ("problem", "gpu", "code"),
    [
        # A tcgen05.ld behind an mbarrier wait has no tcgen05.fence::after_thread_sync.
        (ONE, "b200", "missing_tcgen05_fence"),
        (PAIR, "b200", "missing_tcgen05_fence"),
        (CLUSTER, "b200", "missing_tcgen05_fence"),
        (HOPPER[0], "h100", None),
        # Lanes beyond the cluster's size form addresses in CTAs that do not exist, and use none.
        (HOPPER[1], "h100", None),
        (HOPPER[2], "h100", None),
    ],
    ids=str,
)
def test_what_the_ptx_text_asks_for(problem: Problem, gpu: str, code: str | None) -> None:
    report, _ = run(problem, gpu, profile="isa")
    codes = [finding.code for launch in report.launches for finding in launch.findings]
    assert codes == ([code] if code else [])


@pytest.mark.parametrize("problem", HOPPER, ids=str)
def test_hopper(problem: Problem) -> None:
    """One CTA, pairs with multicast, and two consumer warpgroups that take turns."""
    check(problem, "h100")
