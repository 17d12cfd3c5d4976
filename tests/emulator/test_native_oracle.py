"""Every opcode that compiles to native code, against the oracle: special values and random bits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from kernels.emulator.native import find

from . import oracle
from .oracle import Spec, width
from .ptx_harness import execute
from .samples import fresh_seed, rows, special

LANES = 256
_DTYPES = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_FAMILIES = sorted({op.split(".")[0] for op in oracle.SPECS if find(op)})


def _line(spec: Spec, dst: list[str], src: list[str]) -> str:
    names = {f"d{i}": d for i, d in enumerate(dst)} | {f"s{i}": s for i, s in enumerate(src)}
    template = spec.template or f"{spec.op} {', '.join(f'{{{n}}}' for n in names)};"
    return template.format(**names)


def _batches(specs: list[Spec], size: int) -> Iterator[list[Spec]]:
    """Specs with the same sources, a few at a time: one kernel each."""
    specs = sorted(specs, key=lambda s: (s.src, s.values))
    for _, group in groupby(specs, key=lambda s: (s.src, s.values)):
        members = list(group)
        for i in range(0, len(members), size):
            yield members[i : i + size]


def _run(
    specs: Sequence[Spec],
    table: list[tuple[int, ...]],
    literals: dict[int, list[str]] | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Executes all specs on one table of sources; output names are d<spec>_<operand>. ``literals``:
    source -> the text that stands there for each spec."""
    kinds = specs[0].src
    inputs = {
        f"s{k}": np.array([row[k] for row in table], _DTYPES[width(kind)])
        for k, kind in enumerate(kinds)
    }
    body, outputs = [], {}
    for i, spec in enumerate(specs):
        dst = [f"%d{i}_{k}" for k in range(len(spec.dst))]
        src = [
            literals[k][i] if literals and k in literals else f"%s{k}" for k in range(len(kinds))
        ]
        outputs |= {d[1:]: _DTYPES[width(kind)] for d, kind in zip(dst, spec.dst, strict=True)}
        body.append(_line(spec, dst, src))
    return execute("\n".join(body), inputs, outputs)


def _mismatches(spec: Spec, table: list[tuple[int, ...]], got: list[list[int]]) -> list[str]:
    out = []
    for row, values in zip(table, zip(*got, strict=True), strict=True):
        expected = spec.fn(*row)
        wanted = expected if isinstance(expected, tuple) else (expected,)
        for want, value in zip(wanted, values, strict=True):
            if want == value if isinstance(want, int) else want.accepts(value):
                continue
            shown = f"{want:#x}" if isinstance(want, int) else want
            sources = ", ".join(f"{v:#x}" for v in row)
            out.append(
                f"{_line(spec, ['d', 'q'], list('abcd'))} ({sources}): {value:#x}, not {shown}"
            )
    return out


def _check(specs: list[Spec], seed: int, lanes: int = LANES) -> list[str]:
    rng = random.Random(seed)
    table = rows(specs[0].src, lanes, rng, specs[0].values)
    got = _run(specs, table)
    bad = []
    for i, spec in enumerate(specs):
        columns = [got[f"d{i}_{k}"].tolist() for k in range(len(spec.dst))]
        bad += _mismatches(spec, table, columns)[:3]
    return bad


@pytest.mark.parametrize("family", _FAMILIES)
def test_against_oracle(family: str) -> None:
    seed = fresh_seed()
    specs = [s for s in oracle.all_specs() if s.op.split(".")[0] == family and find(s.op)]
    bad: list[str] = []
    for batch in _batches(specs, 24):
        bad += _check(batch, seed, LANES if len(specs) < 300 else LANES // 2)
    assert not bad, f"FA4_TEST_SEED={seed}: {len(bad)} wrong:\n" + "\n".join(bad[:20])


def _literal(value: int, kind: str) -> str:
    """The value as PTX writes an immediate of that type."""
    if kind in ("f32", "f64"):
        return f"0{'f' if kind == 'f32' else 'd'}{value:0{width(kind) // 4}X}"
    if kind.startswith("s"):
        return str(oracle.signed(value, width(kind)))
    return f"{value:#x}" if value & 1 else str(value)


@pytest.mark.parametrize("family", _FAMILIES)
def test_immediates_against_oracle(family: str) -> None:
    """Each source in turn replaced by a constant: it must mean the same as in a register. At most
    100 forms a family (setp has 700), drawn anew each time."""
    seed = fresh_seed()
    rng = random.Random(seed)
    specs = [s for s in oracle.all_specs() if s.op.split(".")[0] == family and find(s.op) and s.imm]
    bad: list[str] = []
    for batch in _batches(rng.sample(specs, min(len(specs), 100)), 24):
        kinds, fixed = batch[0].src, dict(batch[0].values)
        for k in batch[0].imm:
            chosen = [rng.choice(list(fixed.get(k, special(kinds[k])))) for _ in batch]
            table = rows(kinds, 32, rng, batch[0].values)
            got = _run(batch, table, {k: [_literal(v, kinds[k]) for v in chosen]})
            for i, spec in enumerate(batch):
                there = [(*row[:k], chosen[i], *row[k + 1 :]) for row in table]
                columns = [got[f"d{i}_{j}"].tolist() for j in range(len(spec.dst))]
                bad += _mismatches(spec, there, columns)[:3]
    assert not bad, f"FA4_TEST_SEED={seed}: {len(bad)} wrong:\n" + "\n".join(bad[:20])
