# SPDX-License-Identifier: Apache-2.0
"""A try_wait that the code does not repeat: it may fail, and with late visibility it does."""

import pytest

from .harness import A_AT, WAYS, Litmus, bulk_load, expect, init, store, wait

PEEK = "mbarrier.try_wait.parity.shared::cta.b64 %p1, [smem], 0;"
LOAD = f"{expect(0, 16)}\n{bulk_load(A_AT, 16, 0)}"
READ = f"ld.shared.b32 %r2, [smem+{A_AT}];\n{store('%r2')}"

# A producer's peek ahead of the wait, as pipelines of CUTLASS have it (consumer_try_wait).
PEEKED = Litmus(
    "a peek is no wait", "tma_load_not_waited",
    {0: f"{LOAD}\n{PEEK}\n{wait(0, 0, '//right')}\n{READ}"}, setup=init(0),
    expect={0: 0x3C003C00},
)  # fmt: skip
USED = Litmus(
    "what a peek says may be believed", "",
    {0: f"{LOAD}\n{PEEK}\n@%p1 bra OVER;\n{wait(0, 0)}\nOVER:\n{READ}"}, setup=init(0),
    expect={0: 0x3C003C00},
)  # fmt: skip


@pytest.mark.parametrize("case", [PEEKED, USED], ids=lambda case: case.name)
@pytest.mark.parametrize("profile", ["silicon", "isa"])
def test_right(case, profile):
    for way in WAYS:
        ran, out = case.run(True, profile=profile, **way)
        assert ran.findings == [] and case.is_right(out), way


@pytest.mark.parametrize("way", [w for w in WAYS if w["visibility"] == "late"], ids=str)
def test_a_missing_wait_behind_a_peek_is_seen_with_late_visibility(way):
    ran, _ = PEEKED.run(False, **way)
    assert [finding.code for finding in ran.findings] == ["tma_load_not_waited"]
