"""The table of native opcodes: all that it accepts is PTX, and all of that is tested."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from kernels.emulator.findings import UnsupportedPTX
from kernels.emulator.native import find, table

from . import oracle
from .ptx_harness import run

# Tested in test_native_moves.py: what they do depends on their operands, not on their values alone.
MOVES = re.compile(
    r"cvta(\.to)?\.(param|global|const|local)\.u64|ld\.param(\.v[24])?\.([bus](8|16|32|64)|f(32|64))"
)


def language(pattern: str) -> list[str]:
    """Every string that a pattern without loops matches in full."""
    parser: Any = re._parser  # type: ignore[attr-defined]  # the standard library's own parser
    return ["".join(parts) for parts in _sequence(parser.parse(pattern))]


def _sequence(items: Any) -> Iterator[tuple[str, ...]]:
    return product(*(list(_node(str(op), arg)) for op, arg in items))


def _node(op: str, arg: Any) -> Iterator[str]:
    if op == "LITERAL":
        yield chr(arg)
    elif op == "BRANCH":
        for branch in arg[1]:
            yield from map("".join, _sequence(branch))
    elif op == "SUBPATTERN":
        yield from map("".join, _sequence(arg[-1]))
    elif op == "IN":
        for kind, value in arg:
            low, high = (value, value) if str(kind) == "LITERAL" else value
            yield from map(chr, range(low, high + 1))
    elif op == "MAX_REPEAT" and arg[:2] == (0, 1):
        yield ""
        yield from map("".join, _sequence(arg[2]))
    else:
        raise ValueError(f"{op} {arg} in an opcode pattern: list its strings in language()")


def test_language() -> None:
    assert language(r"a(?:\.(b|c))?[de]") == ["ad", "ae", "a.bd", "a.be", "a.cd", "a.ce"]


def _accepted() -> list[str]:
    return [op for pattern, _ in table._PATTERNS for op in language(pattern.pattern)]


def test_no_opcode_twice() -> None:
    """Two patterns for one opcode: the second emitter would be dead."""
    ops = _accepted()
    assert len(ops) > 900
    assert sorted(ops) == sorted(set(ops))


def test_every_accepted_opcode_is_tested() -> None:
    """An opcode outside the oracle is either not PTX, and must be refused, or not tested."""
    strays = [op for op in _accepted() if op not in oracle.SPECS and not MOVES.fullmatch(op)]
    assert not strays


# What the oracle knows and the emulator does not compile; a change here is a change of what
# LIMITATIONS.md says.
NOT_COMPILED = re.compile(
    r"(mul|fma)\.(rz|rm|rp)\.f64|(div|rcp|sqrt)\.(rz|rm|rp)(\.ftz)?\.f32|"
    r"cvt\.(rz|rm|rp)\.f32\.[us]64"
)


def test_refused_opcodes() -> None:
    refused = {op for op in oracle.SPECS if find(op) is None}
    assert refused == {op for op in oracle.SPECS if NOT_COMPILED.fullmatch(op)}


@pytest.mark.parametrize(
    "op",
    [
        "add.s33", "add.rz.f16", "add.cc.u16", "add.sat.u32", "sub.rn.rz.f32", "fma.f32",
        "fma.f32x2", "mul.wide.u64", "mul.lo.f32", "shl.s32", "shl.b8", "setp.lo.s32",
        "setp.lt.b32", "setp.eq.f16x4", "selp.pred", "selp.f16", "mov.f16", "mov.b8",
        "ex2.approx.ftz.f16", "ex2.approx.bf16x2", "add.sat.bf16", "fma.rn.sat.relu.f16",
        "cvt.rn.e4m3x2.f32", "rsqrt.rn.f32", "min.NaN.s32", "max.xorsign.f32", "cvt.f32.s32",
        "cvt.rn.s32.f32", "cvt.sat.u32.u16", "cvt.rs.bf16x2.f32", "lop3.or.b32",
        "prmt.b32.f4e", "bfe.b32", "popc.b16", "tanh.approx.ftz.f32", "cvta.shared.u64",
        "add.rn.f32 ", "add.rn.f32.", "add.rn.f32x", "xadd.rn.f32", "ADD.S32",
    ],
)  # fmt: skip
def test_fails_closed(op: str) -> None:
    assert find(op) is None


def test_unknown_opcode_names_the_line() -> None:
    with pytest.raises(UnsupportedPTX, match=r"ptx:\d+.*'frob\.b32 %d, %d'.*not modelled"):
        run("mov.b32 %d, 1;\nfrob.b32 %d, %d;", {}, {"d": "u4"})


@pytest.mark.parametrize(
    "line",
    [
        "add.s32 %d, %q, 1;",  # .b64 source
        "add.s64 %d, %q, 1;",  # .b32 destination
        "mov.b32 %d, %q;",
        "mov.b64 %q, %d;",
        "cvt.u32.u64 %q, %d;",  # a .b32 cannot hold 64 bits
        "selp.b32 %d, 1, 2, %d;",
        "lop3.b32 %d, %d, %d, %d, %d;",
        "max.abs.f32 %d, %d, %d;",
        "min.xorsign.abs.f32 %d, %d, %d, %d;",
        "min.relu.u32 %d, %d, %d;",
        "mov.b32 {%h, %h, %h}, %d;",
        "mov.b64 %q, {%d, %d, %d};",
        "add.s32 %d, %d;",
        "add.s32 %d, %d, %d, %d;",
        "mov.u32 %d, %nosuch;",
        "add.s32 1, %d, %d;",
    ],
)
def test_wrong_operands_are_refused(line: str) -> None:
    body = f".reg .b64 %q; .reg .b16 %h; mov.b32 %d, 1; mov.b64 %q, 2;\n{line}"
    with pytest.raises((UnsupportedPTX, ValueError), match=r"ptx:\d+"):
        run(body, {}, {"d": "u4"})
