"""Lanes that part and meet: guards, branches, loops, early returns, and warp-wide instructions."""

from __future__ import annotations

import random

import numpy as np
import pytest

from .ptx_harness import SENTINEL, execute, run
from .random_programs import H, Left, P, Q, R, interpret, statements, to_ptx
from .samples import fresh_seed

RNG = np.random.default_rng()
LANE = np.arange(32, dtype=np.uint32)
UNSTORED = int.from_bytes(bytes([SENTINEL] * 4), "little")


def masks(n: int = 64) -> np.ndarray:
    """Predicates, with the all-true and all-false warps among them."""
    p = RNG.random(n) < 0.5
    p[32:64] = RNG.random() < 0.5
    return p


# -- guards ---------------------------------------------------------------------------------------


def test_guarded_writes_of_every_kind() -> None:
    p = masks()
    body = """mov.b16 %h, 1; mov.b32 %d, 1; mov.b64 %q, 1; setp.eq.b32 %z, 0, 0; mov.b64 %w, 7;
      @%p mov.b16 %h, 2; @!%p mov.b32 %d, 2; @%p mov.b64 %q, 2; @!%p setp.ne.b32 %z, 0, 0;
      @%p mov.b64 %w, {%d, %d};"""
    got = execute(body, {"p": p}, {"h": "u2", "d": "u4", "q": "u8", "z": bool, "w": "u8"})
    np.testing.assert_array_equal(got["h"], np.where(p, 2, 1))
    np.testing.assert_array_equal(got["d"], np.where(p, 1, 2))
    np.testing.assert_array_equal(got["q"], np.where(p, 2, 1))
    np.testing.assert_array_equal(got["z"], p)
    np.testing.assert_array_equal(got["w"], np.where(p, 1 << 32 | 1, 7))


def test_guard_that_the_instruction_overwrites() -> None:
    p, a = masks(), RNG.integers(0, 9, 64).astype(np.uint32)
    body = "mov.pred %r, %p; @%r setp.gt.u32 %r, %a, 4; @!%r add.s32 %a, %a, 100; mov.b32 %d, %a;"
    got = execute(body, {"p": p, "a": a}, {"d": "u4", "r": bool})
    np.testing.assert_array_equal(got["r"], p & (a > 4))
    np.testing.assert_array_equal(got["d"], np.where(p & (a > 4), a, a + 100))


def test_guarded_memory() -> None:
    """A guarded load leaves the other lanes' register alone; a store stores only its lanes."""
    p = masks()
    at = """.reg .b32 %at, %room; mov.b32 %at, %tid.x; shl.b32 %at, %at, 2;
      mov.b32 %room, room; add.s32 %at, %at, %room;"""
    body = f"""{at} st.shared.b32 [%at], 5; @%p st.shared.b32 [%at], 6; ld.shared.b32 %d, [%at];
      mov.b32 %e, 9; @!%p ld.shared.b32 %e, [%at];"""
    got = execute(body, {"p": p}, {"d": "u4", "e": "u4"}, shared=".shared .align 4 .b8 room[256];")
    np.testing.assert_array_equal(got["d"], np.where(p, 6, 5))
    np.testing.assert_array_equal(got["e"], np.where(p, 9, 5))


# -- branches -------------------------------------------------------------------------------------


def test_if_else_and_join() -> None:
    p, a = masks(), RNG.integers(0, 1 << 32, 64, dtype=np.uint32)
    body = """@%p bra THEN; mul.lo.s32 %d, %a, 3; bra.uni JOIN; THEN: add.s32 %d, %a, 7;
      JOIN: add.s32 %d, %d, %a;"""
    got = execute(body, {"p": p, "a": a}, {"d": "u4"})["d"]
    np.testing.assert_array_equal(got, np.where(p, 2 * a + np.uint32(7), 4 * a))


def test_loop_with_trip_counts_of_its_own() -> None:
    n = RNG.integers(0, 41, 128).astype(np.uint32)
    n[:32] = 0
    body = """.reg .b32 %i; .reg .pred %more; mov.b32 %d, 0; mov.b32 %i, 0;
      LOOP: setp.ge.u32 %more, %i, %n; @%more bra DONE; add.s32 %i, %i, 1;
      mad.lo.s32 %d, %i, %i, %d;      bra LOOP; DONE: add.s32 %d, %d, 1;"""
    got = execute(body, {"n": n}, {"d": "u4"})["d"]
    wide = n.astype(np.int64)
    np.testing.assert_array_equal(got, wide * (wide + 1) * (2 * wide + 1) // 6 + 1)


def test_executed_lanes_are_counted() -> None:
    """A thread-instruction is one PTX instruction by one lane: three outside, one in the branch."""
    body = ".reg .pred %q; setp.lt.u32 %q, %thread_, 5; @!%q bra OVER; mov.b32 %d, 1; OVER: ret;"
    count = {}
    for lanes in (5, 0):
        text = body.replace(", 5;", f", {lanes};")
        count[lanes] = run(text, {}, {"d": np.uint32}).thread_instructions
    assert count[5] - count[0] == 5


def test_early_return() -> None:
    """Lanes that return store nothing; the others go on, and sync without them."""
    n = RNG.integers(0, 4, 64).astype(np.uint32)
    n[0] = n[33] = 2  # somebody stays
    body = """.reg .pred %p, %q; setp.eq.u32 %p, %n, 0; @%p ret; setp.eq.u32 %q, %n, 1; @!%q bra ON;
      ret; ON: bar.warp.sync -1; setp.eq.b32 %q, 0, 0; vote.sync.ballot.b32 %d, %q, -1;"""
    got = execute(body, {"n": n}, {"d": np.uint32})["d"].reshape(2, 32)
    for row, stay in zip(got, (n > 1).reshape(2, 32), strict=True):
        ballot = int((stay * (1 << LANE.astype(np.int64))).sum())
        np.testing.assert_array_equal(row, np.where(stay, ballot, UNSTORED))


@pytest.mark.parametrize("number", range(12))
def test_random_programs(number: int) -> None:
    seed = fresh_seed() + number
    rng = random.Random(seed)
    program = statements(rng, depth=3, count=14)
    kinds = {**dict.fromkeys(R, 32), **dict.fromkeys(Q, 64), **dict.fromkeys(H, 16)}
    dtypes = {16: np.uint16, 32: np.uint32, 64: np.uint64}
    inputs = {
        f"i{name}": np.array(
            [rng.choice([rng.getrandbits(w), rng.getrandbits(3)]) for _ in range(64)]
        )
        .astype(object)
        .astype(dtypes[w])
        for name, w in kinds.items()
    } | {f"i{name}": RNG.random(64) < 0.5 for name in P}
    moves = [f".reg .b{w} %{n}; mov.b{w} %{n}, %i{n};" for n, w in kinds.items()]
    moves += [f".reg .pred %{n}; mov.pred %{n}, %i{n};" for n in P]
    moves += [".reg .b32 %mine; mov.b32 %mine, %tid.x; shl.b32 %mine, %mine, 3;"]
    moves += [".reg .b32 %room; mov.b32 %room, room; add.s32 %mine, %mine, %room;"]
    body = "\n".join([*moves, to_ptx(program)])
    body += "".join(f"mov.b{w} %o{n}, %{n};" for n, w in kinds.items())
    body += "".join(f"mov.pred %o{n}, %{n};" for n in P)
    outputs = {f"o{n}": dtypes[w] for n, w in kinds.items()} | {f"o{n}": np.bool_ for n in P}
    shared = ".shared .align 8 .b8 room[512];"
    result = run(body, inputs, outputs, shared=shared)
    where = f"FA4_TEST_SEED={seed - number}, program {number}\n{to_ptx(program)}"
    assert not result.findings, f"{where}\n{result.findings[0]}"
    for thread in range(64):
        state = {n[1:]: int(v[thread]) for n, v in inputs.items()}
        try:
            interpret(program, state)
        except Left:
            assert bytes(result["or0"][thread : thread + 1]) == bytes([SENTINEL] * 4), where
            continue
        got = {n[1:]: int(result[n][thread]) for n in outputs}
        assert got == state, f"thread {thread}, {where}"


# -- warp-wide instructions under masks -----------------------------------------------------------


def test_shuffles_within_each_half_of_a_divided_warp() -> None:
    """Both sides of a branch shuffle at once, each under its own member mask."""
    a = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
    body = """.reg .pred %p, %v; setp.lt.u32 %p, %thread_, 16; @%p bra LOW;
      shfl.sync.down.b32 %d|%v, %a, 2, 31, 0xFFFF0000; bra JOIN;
      LOW: shfl.sync.bfly.b32 %d|%v, %a, 5, 31, 0x0000FFFF;
      JOIN: selp.b32 %e, 1, 0, %v;"""
    got = execute(body, {"a": a}, {"d": "u4", "e": "u4"})
    source = np.where(LANE < 16, LANE ^ 5, np.where(LANE < 30, LANE + 2, LANE))
    np.testing.assert_array_equal(got["d"], a[source])
    np.testing.assert_array_equal(got["e"], LANE < 30)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 8])
def test_shuffles_of_segments(mode: str, width: int) -> None:
    """Lane by lane from the pseudocode of PTX ISA 9.1 section 9.7.9.6."""
    a = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
    by = RNG.integers(0, 12, 32).astype(np.uint32)
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    body = f".reg .pred %v; shfl.sync.{mode}.b32 %d|%v, %a, %by, {c:#x}, -1; selp.b32 %e, 1, 0, %v;"
    got = execute(body, {"a": a, "by": by}, {"d": "u4", "e": "u4"})
    for lane in range(32):
        b, bound, segment = int(by[lane]), c & 31, c >> 8 & 31
        top = (lane & segment) | (bound & ~segment)
        j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b}.get(
            mode, (lane & segment) | (b & ~segment)
        )
        valid = j >= top if mode == "up" else j <= top
        assert int(got["e"][lane]) == valid
        assert int(got["d"][lane]) == int(a[j if valid else lane])


def test_votes_elect_and_redux_in_a_branch() -> None:
    p, a = RNG.random(32) < 0.5, RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
    p[31] = True
    side = RNG.random(32) < 0.5
    side[3] = True
    members = int((side * (1 << LANE.astype(np.int64))).sum())
    body = f"""mov.b32 %d, 0; mov.b32 %e, 0; mov.b32 %f, 0; mov.b32 %g, 0; mov.b32 %h, 0;
      .reg .pred %x; @!%side bra OVER; activemask.b32 %d; vote.sync.ballot.b32 %e, %p, {members:#x};
      elect.sync %f|%x, {members:#x}; selp.b32 %g, 1, 0, %x;
      redux.sync.max.u32 %h, %a, {members:#x};
      OVER: mov.b32 %d, %d;"""
    got = execute(body, {"p": p, "side": side, "a": a}, dict.fromkeys("defgh", np.uint32))
    votes = int((side * p * (1 << LANE.astype(np.int64))).sum())
    first = int(np.flatnonzero(side)[0])
    expected = {"d": members, "e": votes, "f": first, "h": int(a[side].max())}
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], np.where(side, value, 0), err_msg=name)
    np.testing.assert_array_equal(got["g"], LANE == first)


@pytest.mark.parametrize("mode", ["all", "any", "uni"])
@pytest.mark.parametrize("ones", [0, 1, 31, 32])
def test_vote_predicates(mode: str, ones: int) -> None:
    p = RNG.permutation(np.arange(32) < ones)
    got = execute(f"vote.sync.{mode}.pred %d, %p, -1;", {"p": p}, {"d": bool})["d"]
    expected = {"all": ones == 32, "any": ones > 0, "uni": ones in (0, 32)}[mode]
    assert set(got.tolist()) == {int(expected)}


def test_warp_barrier_brings_lanes_together() -> None:
    """Stores before bar.warp.sync are seen behind it by lanes that came another way."""
    body = """.reg .pred %p; .reg .b32 %at, %room; mov.b32 %at, %tid.x; shl.b32 %at, %at, 2;
      mov.b32 %room, room; add.s32 %at, %at, %room; setp.lt.u32 %p, %thread_, 16; @%p bra LOW;
      st.shared.b32 [%at], %thread_; bra SYNC; LOW: st.shared.b32 [%at], 77;
      SYNC: bar.warp.sync -1; xor.b32 %at, %at, 124; ld.shared.b32 %d, [%at];"""
    shared = ".shared .align 128 .b8 room[128];"
    got = execute(body, {}, {"d": np.uint32}, shared=shared)["d"]
    np.testing.assert_array_equal(got, np.where(31 - LANE < 16, 77, 31 - LANE))


@pytest.mark.parametrize(
    "line",
    [
        "vote.sync.ballot.b32 %d, %p, 0x7FFFFFFF;",
        "shfl.sync.idx.b32 %d, %thread_, 0, 31, 0xFFFE;",
        "elect.sync %d|%q, 1;",
        "bar.warp.sync 0xFF;",
    ],
)
def test_member_mask_without_an_executing_lane(line: str) -> None:
    p = np.ones(32, bool)
    (finding,) = run(f".reg .pred %q; mov.b32 %d, 0; {line}", {"p": p}, {"d": "u4"}).findings
    assert finding.code == "warp_sync_mask"
    assert line.split()[0] in str(finding.details["instruction"])


def test_member_that_never_comes_is_a_livelock() -> None:
    body = """.reg .pred %p; setp.eq.u32 %p, %thread_, 4; SPIN: @%p bra SPIN; bar.warp.sync -1;
      mov.b32 %d, 0;"""
    result = run(body, {}, {"d": np.uint32}, max_instructions=200_000)
    assert [f.code for f in result.findings] == ["livelock"]


def test_a_shuffle_from_a_lane_that_has_returned_is_a_finding() -> None:
    """Also where the block is native: every live lane is there, the lane it reads is not."""
    body = ".reg .pred %q; setp.ge.u32 %q, %thread_, 16; @%q bra OUT; " + (
        "shfl.sync.idx.b32 %d, %a, {lane}, 31, -1; bra KEEP; OUT: ret; KEEP:"
    )
    values = np.arange(32, dtype=np.uint32) + 7
    fine = run(body.replace("{lane}", "3"), {"a": values}, {"d": np.uint32})
    assert fine.findings == [] and (fine["d"][:16] == 10).all()
    (finding,) = run(body.replace("{lane}", "20"), {"a": values}, {"d": np.uint32}).findings
    assert finding.code == "shfl_inactive_lane"
