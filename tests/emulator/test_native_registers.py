"""Registers that nobody wrote, places of those that live across blocks, and their poison."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.emulator.registers import POISON, ROW_BYTES, RegisterFile, WarpRegisters

from .ptx_harness import execute, run

RNG = np.random.default_rng()


def unwritten(body: str, **inputs: np.ndarray) -> list[str]:
    """Registers named by findings, which must all be of the one kind."""
    findings = run(body, inputs, {"d": np.uint32}).findings
    assert all(f.code == "register_unwritten_read" for f in findings), findings
    return [str(f.details["register"]) for f in findings]


DECLARE = ".reg .b32 %x; .reg .b64 %q; .reg .b16 %h; .reg .pred %p, %t, %u; .reg .b32 %n;"


@pytest.mark.parametrize(
    "line",
    [
        "add.s32 %d, %x, 1;", "xor.b32 %d, %x, %x;", "cvt.u32.u64 %d, %q;", "cvt.u32.u16 %d, %h;",
        "mov.b32 %d, 0; st.global.b32 [%at_d], %x;", "ld.global.b32 %d, [%q];",
        "shfl.sync.idx.b32 %d, %x, 0, 31, -1;", "and.pred %p, %t, %p; selp.b32 %d, 1, 0, %p;",
        "add.rn.f32 %d, 0f00000000, %x;",
    ],
)  # fmt: skip
def test_never_written(line: str) -> None:
    names = unwritten(f"{DECLARE} setp.eq.u32 %t, %thread_, 0; {line}")
    assert names and names[0].split("@")[0] in ("%x", "%q", "%h", "%p")


def test_finding_says_where_and_which_lanes() -> None:
    body = f"""{DECLARE} setp.lt.u32 %p, %thread_, 4; @%p bra OVER; mov.b32 %x, 1; OVER:
      add.s32 %d, %x, 1;"""
    result = run(body, {}, {"d": np.uint32})
    (finding,) = result.findings
    assert "0x0000000f" in finding.message
    assert result.text.splitlines()[finding.ptx_line - 1].strip().startswith("add.s32 %d, %x")


@pytest.mark.parametrize(
    "body",
    [
        # written on the one path that is taken
        "setp.eq.b32 %p, 0, 0; @!%p bra OVER; mov.b32 %x, 1; OVER: add.s32 %d, %x, 1;",
        # both sides of a guard
        "setp.lt.u32 %p, %thread_, 4; @%p mov.b32 %x, 1; @!%p mov.b32 %x, 2; add.s32 %d, %x, 1;",
        # written and read under the same guard, in one block and over a branch
        "setp.lt.u32 %p, %thread_, 4; mov.b32 %d, 0; @%p mov.b32 %x, 1; @%p add.s32 %d, %x, 1;",
        "setp.lt.u32 %p, %thread_, 4; mov.b32 %d, 0; @%p mov.b32 %x, 1; bra.uni ON;"
        " ON: @%p add.s32 %d, %x, 1;",
        # moved or selected away before anybody looks
        "mov.b32 %n, %x; mov.b32 %d, 1;",
        "setp.eq.b32 %p, 0, 0; mov.b32 %n, 5; selp.b32 %d, %n, %x, %p;",
        # a loop that writes before it reads, in each round
        "mov.b32 %n, 3; L: mov.b32 %x, %n; add.s32 %d, %x, 1; sub.s32 %n, %n, 1;"
        " setp.ne.b32 %p, %n, 0; @%p bra L;",
        # a loop-carried value set by the first round
        "mov.b32 %n, 0; mov.b32 %d, 0; L: setp.eq.b32 %p, %n, 0; @!%p bra USE; mov.b32 %x, 7;"
        " USE: add.s32 %d, %d, %x; add.s32 %n, %n, 1; setp.lt.u32 %p, %n, 4; @%p bra L;",
        # lanes that never wrote it have returned
        "setp.lt.u32 %p, %thread_, 4; @%p ret; mov.b32 %x, 1; bra.uni ON; ON: add.s32 %d, %x, 1;",
        # written by the machine: a load under a guard, then read under it
        "setp.lt.u32 %p, %thread_, 4; mov.b32 %d, 0; @%p ld.global.b32 %x, [%at_d];"
        " @%p add.s32 %d, %x, 1;",
    ],
)  # fmt: skip
def test_no_false_alarm(body: str) -> None:
    assert unwritten(f"{DECLARE}\n{body}") == []


def test_written_in_one_round_only_by_some_lanes() -> None:
    """The loop leaves x unwritten where it runs no round at all."""
    n = np.arange(32, dtype=np.uint32) % 3
    body = f"""{DECLARE} mov.b32 %n, %i; L: setp.eq.u32 %p, %n, 0; @%p bra OUT; mov.b32 %x, %n;
      sub.s32 %n, %n, 1; bra L; OUT: add.s32 %d, %x, 1;"""
    assert unwritten(body, i=n + 1) == []
    assert [name.split("@")[0] for name in unwritten(body, i=n)] == ["%x"]


def test_every_kind_lives_across_branches_and_machine_instructions() -> None:
    """Forty values of each kind stay in their places over divergence, memory and barriers."""
    a = RNG.integers(0, 1 << 63, 64, dtype=np.uint64)
    declare = ".reg .b16 %h<40>; .reg .b32 %w<40>; .reg .b64 %q<40>; .reg .pred %p<40>, %t;"
    make = "".join(
        f"add.s64 %q{i}, %a, {i * 77}; cvt.u32.u64 %w{i}, %q{i}; cvt.u16.u32 %h{i}, %w{i};"
        f"setp.gt.u32 %p{i}, %w{i}, {(i * 123456789) % 2**31};"
        for i in range(40)
    )
    between = """.reg .b32 %at, %room; mov.b32 %room, room; mad.lo.s32 %at, %thread_, 4, %room;
      setp.lt.u32 %t, %thread_, 17;
      @%t bra LOW; st.shared.b32 [%at], 1; bra ON; LOW: st.shared.b32 [%at], 2; ON: bar.sync 0;"""
    fold = "mov.b64 %d, 0; .reg .b64 %x; .reg .b32 %y;" + "".join(
        f"xor.b64 %d, %d, %q{i}; cvt.u64.u32 %x, %w{i}; add.s64 %d, %d, %x;"
        f"cvt.u64.u16 %x, %h{i}; mad.lo.s64 %d, %d, 3, %x; selp.b64 %x, 1, 2, %p{i};"
        f"add.s64 %d, %d, %x;"
        for i in range(40)
    )
    got = execute(
        declare + make + between + fold,
        {"a": a},
        {"d": np.uint64},
        shared=".shared .align 4 .b8 room[256];",
    )["d"]
    for lane in range(64):
        d = 0
        for i in range(40):
            q = (int(a[lane]) + i * 77) % 2**64
            w = q % 2**32
            d = ((d ^ q) + w) % 2**64
            d = (d * 3 + w % 2**16 + (1 if w > (i * 123456789) % 2**31 else 2)) % 2**64
        assert int(got[lane]) == d


# -- the register file ----------------------------------------------------------------------------

KINDS = {"a": "b32", "b": "b64", "c": "b16", "p": "pred", "v0": "b32", "v1": "b32", "q": "pred"}


def test_places_do_not_overlap() -> None:
    layout = RegisterFile(KINDS, KINDS, [["v0", "v1"]])
    taken: set[int] = set()
    for name, kind in KINDS.items():
        size = {"b16": ROW_BYTES, "b32": ROW_BYTES, "b64": 2 * ROW_BYTES, "pred": 4}[kind]
        place = set(range(layout.offset(name), layout.offset(name) + size))
        assert not place & taken and max(place) < layout.nbytes
        taken |= place
    assert layout.row("v1") == layout.row("v0") + 1
    assert "a" in layout and "nobody" not in layout
    assert all(layout.offset(n) % 64 == 0 for n, k in KINDS.items() if k != "pred")


def test_groups_that_cannot_be_consecutive_are_left() -> None:
    """A register already placed, or not a .b32: the vector is then gathered."""
    layout = RegisterFile(KINDS, KINDS, [["v0", "v1"], ["v1", "a"], ["b", "c"]])
    assert layout.row("v1") == layout.row("v0") + 1
    assert layout.nbytes == 6 * ROW_BYTES + 2 * 4


def test_warp_registers_start_poisoned() -> None:
    registers = WarpRegisters(RegisterFile(KINDS, KINDS, []))
    assert registers.address % 64 == 0
    assert (registers.r32 == POISON).all() and not registers.preds.any()
    assert np.isnan(registers.r32.view(np.float32)).all()
    registers.r32[0, 31] = 0xFFFFFFFE
    assert registers.i32[0, 31] == -2 and registers.r16[0, 62] == 0xFFFE
