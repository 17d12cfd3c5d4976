"""Lanes of one warp that give different member masks: each set of lanes is by itself."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.ptx_harness import execute, run

LANE = np.arange(32, dtype=np.uint32)
X = (LANE * 2654435761 % 1009).astype(np.uint32)
# Tiles of 8 lanes, the last two joined: masks as cooperative groups make them.
MASKS = np.array([0xFF << 8 * min(i // 8, 2) if i < 16 else 0xFFFF0000 for i in range(32)],
                 np.uint32)  # fmt: skip
TILES = [slice(0, 8), slice(8, 16), slice(16, 32)]


def _by_tile(f):  # type: ignore[no-untyped-def]
    return np.concatenate([np.full(len(X[t]), f(X[t]), np.uint32) for t in TILES])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("redux.sync.add.u32 %d, %x, %m;", _by_tile(np.sum)),
        ("redux.sync.max.u32 %d, %x, %m;", _by_tile(np.max)),
        ("{ .reg .pred p; setp.gt.u32 p, %x, 500; vote.sync.ballot.b32 %d, p, %m; }",
         _by_tile(lambda x: 0)),
        ("{ .reg .pred p; elect.sync %d|p, %m; }", np.repeat([0, 8, 16], [8, 8, 16])),
        ("{ bar.warp.sync %m; mov.b32 %d, %x; }", X),
        ("shfl.sync.bfly.b32 %d, %x, 1, 31, %m;", X[LANE ^ 1]),
        ("shfl.sync.idx.b32 %d, %x, 2, 0x181f, %m;", X[LANE & 24 | 2]),
        ("match.any.sync.b32 %d, 5, %m;", MASKS),
    ],
    ids=lambda value: value.split(";")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_each_set_executes_alone(body: str, expected: np.ndarray) -> None:
    got = execute(body, {"x": X, "m": MASKS}, {"d": np.uint32})["d"]
    if "ballot" in body:
        votes = (X > 500).astype(np.uint64) << LANE.astype(np.uint64)
        expected = (np.uint32(votes.sum()) & MASKS).astype(np.uint32)
    np.testing.assert_array_equal(got, expected)


def test_a_lane_outside_its_own_mask_is_found() -> None:
    wrong = MASKS.copy()
    wrong[3] = 0xFF00
    result = run("redux.sync.add.u32 %d, %x, %m;", {"x": X, "m": wrong}, {"d": np.uint32})
    assert [f.code for f in result.findings] in (["warp_sync_mask"], ["deadlock"])


def test_a_lane_that_another_one_names_must_come() -> None:
    """Lane 0's mask names lane 31, which never executes the instruction."""
    masks = np.where(LANE < 16, np.uint32(0x8000FFFF), np.uint32(0x7FFF0000)).astype(np.uint32)
    body = """{ .reg .pred p; setp.ne.u32 p, %x, 0; @!p bra DONE;
      redux.sync.add.u32 %d, %x, %m; DONE: bar.warp.sync 0xffffffff; }"""
    result = run(body, {"x": (LANE != 31).astype(np.uint32), "m": masks}, {"d": np.uint32})
    assert [f.code for f in result.findings] == ["deadlock"]
