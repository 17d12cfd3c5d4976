"""match.sync and the float32 redux.sync, each against a few lines of Python."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from kernels.emulator.ptx import PTXSyntaxError

from .oracle_float import min_max
from .ptx_harness import execute, run
from .samples import fresh_seed, special


def _draw(bits: int, seed: int) -> np.ndarray:
    """128 values, few of them different, high halves too."""
    rng = random.Random(seed)
    pool = [rng.getrandbits(bits) for _ in range(3)] + [rng.getrandbits(bits)] * 5
    pool.append(pool[0] ^ 1 << bits - 1)
    return np.array([rng.choice(pool) for _ in range(128)], f"u{bits // 8}")


def _same(values: np.ndarray, lanes: list[int]) -> list[int]:
    return [
        sum(1 << k for k in lanes if values[k] == values[i]) if i in lanes else 0xFFFFFFFF
        for i in range(32)
    ]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("member", [0xFFFFFFFF, 0x8F0F1236])
def test_match_any(bits: int, member: int) -> None:
    seed = fresh_seed()
    values = _draw(bits, seed)
    body = f"""mov.b32 %d, -1; .reg .b32 %l; .reg .pred %in; mov.u32 %l, %laneid;
        shr.u32 %l, {member:#x}, %l; and.b32 %l, %l, 1; setp.ne.b32 %in, %l, 0;
        @%in match.any.sync.b{bits} %d, %a, {member:#x};"""
    got = execute(body, {"a": values}, {"d": np.uint32}, block=128)["d"]
    lanes = [i for i in range(32) if member >> i & 1]
    wanted = [x for i in range(0, 128, 32) for x in _same(values[i : i + 32], lanes)]
    assert got.tolist() == wanted, f"FA4_TEST_SEED={seed}"


@pytest.mark.parametrize("bits", [32, 64])
def test_match_all(bits: int) -> None:
    values = np.full(128, (1 << bits) - 7, f"u{bits // 8}")
    values[32] ^= 1 << bits - 1
    values[95] = 0
    body = f"match.all.sync.b{bits} %d|%p, %a, -1;\nmatch.all.sync.b{bits} %e, %a, 0xffffffff;"
    got = execute(body, {"a": values}, {"d": np.uint32, "p": np.bool_, "e": np.uint32}, block=128)
    flags = np.repeat([1, 0, 0, 1], 32)
    assert got["p"].tolist() == flags.tolist()
    assert got["d"].tolist() == got["e"].tolist() == (flags * 0xFFFFFFFF).tolist()


def test_match_any_has_no_predicate() -> None:
    with pytest.raises(PTXSyntaxError, match="operand 1 of match.any.sync.b32"):
        run("match.any.sync.b32 %d|%p, %d, -1;", {}, {"d": np.uint32, "p": np.bool_})


def test_lanes_outside_the_member_mask_are_a_finding() -> None:
    (finding,) = run("mov.b32 %d, 0; match.any.sync.b32 %d, %d, 1;", {}, {"d": np.uint32}).findings
    assert finding.code == "warp_sync_mask"


def _reduce(which: str, absolute: bool, keep_nan: bool) -> Callable[[list[int]], int]:
    size = lambda x: x & 0x7FFFFFFF if absolute else x
    return lambda xs: min_max(which, keep_nan, tuple(map(size, xs)))


@pytest.mark.parametrize("which", ["min", "max"])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("keep_nan", [False, True])
def test_redux_f32(which: str, absolute: bool, keep_nan: bool) -> None:
    seed = fresh_seed()
    rng = random.Random(seed)
    rows = [[rng.choice(special("f32")) for _ in range(32)] for _ in range(4)]
    rows += [[0x80000000, 0] * 16, [0x7F800001, 0xFFC00000] * 16]
    rows += [[rng.getrandbits(31) | 1 << 31 for _ in range(32)] for _ in range(2)]
    op = f"redux.sync.{which}{'.abs' * absolute}{'.NaN' * keep_nan}.f32"
    values = np.array(rows, np.uint32).reshape(-1)
    got = execute(f"{op} %d, %a, -1;", {"a": values}, {"d": np.uint32}, block=128)["d"]
    f = _reduce(which, absolute, keep_nan)
    assert got.tolist() == [f(row) for row in rows for _ in range(32)], f"FA4_TEST_SEED={seed}"
