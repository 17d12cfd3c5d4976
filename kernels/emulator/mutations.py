"""Mutations of a decoded kernel: one synchronisation removed or weakened.

A mutant is the program with one segment replaced, which is what editing that line of the PTX would
give: the instructions concerned are all executed by the machine, so no block is compiled again.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .isa.table import FULL, Binding, Handler, bind, find_binder
from .program import Program, Segment
from .ptx.ast import Imm, Instr, Operand, Reg

Change = Callable[[int], int]

_ARRIVE = r"mbarrier\.arrive(?!_drop)(?!\.expect_tx)[\w.:]*"
_EXPECT = r"mbarrier\.(?:arrive\.)?expect_tx[\w.:]*"
_WAIT = r"mbarrier\.(?:try|test)_wait[\w.:]*"
_INIT = r"mbarrier\.init[\w.:]*"
_COMMIT = r"(?:tcgen05\.commit|cp\.async\.mbarrier\.arrive)[\w.:]*"
_GROUP_COMMIT = r"(?:cp\.async(?:\.bulk)?|wgmma)\.commit_group[\w.:]*"
_GROUP_WAIT = r"(?:cp\.async(?:\.bulk)?|wgmma)\.wait_(?:group|all)[\w.:]*"
_FENCE = r"(?:fence|membar|tcgen05\.fence|wgmma\.fence)[\w.:]*"
_TMEM_WAIT = r"tcgen05\.wait[\w.:]*"
_NAMED = r"(?:bar|barrier)(?:\.cta)?\.(?:sync|arrive|red)[\w.:]*"
_CLUSTER = r"barrier\.cluster\.(?:arrive|wait)[\w.:]*"
_WARP = r"bar\.warp\.sync"

MX_BYTES = 16  # an expect_tx is off by one smallest bulk copy


@dataclass(frozen=True)
class Mutation:
    """One change: ``kind`` names it, of instruction ``ptx`` at ``ptx_line`` of ``entry``.

    source: "file.py:line" of the instruction, where the PTX has line information.
    """

    entry: str
    segment: int
    kind: str
    ptx: str
    ptx_line: int
    source: str

    def __str__(self) -> str:
        """For example "remove: bar.sync 1, 128; @ blackwell/gemm.py:251 in kernel: barrier()"."""
        where = f" @ {source_context(self.source)}" if self.source else ""
        return f"{self.kind}: {self.ptx}{where}"


def source_context(source: str) -> str:
    """``path/file.py:line`` as "path/file.py:line in function: code", as far as it can be read."""
    path, _, number = source.rpartition(":")
    code = linecache.getline(path, int(number)).strip() if number.isdigit() else ""
    function = _function_at(path, int(number)) if code else ""
    short = "/".join(source.split("/")[-2:])
    return short + (f" in {function}" if function else "") + (f": {code}" if code else "")


@lru_cache(maxsize=64)
def _functions(path: str) -> list[tuple[int, int, str]]:
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return []
    defs = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    return [(n.lineno, n.end_lineno or n.lineno, n.name) for n in defs]


def _function_at(path: str, line: int) -> str:
    """The innermost function around a line."""
    around = [f for f in _functions(path) if f[0] <= line <= f[1]]
    return max(around)[2] if around else ""


def mutations(program: Program) -> list[Mutation]:
    """Every mutation of an entry, in program order."""
    found = []
    for segment in program.segments:
        for ins in segment.instrs:
            if segment.native and ins.op != "bar.warp.sync":
                continue
            source, text = program.module.source_of(ins), " ".join(ins.text.split())
            for kind in _kinds(ins):
                place = (program.entry.name, segment.index)
                found.append(Mutation(*place, kind, text, ins.line, source))
    return found


def _kinds(ins: Instr) -> Iterator[str]:
    op, operands = ins.op, ins.operands
    if re.fullmatch(_INIT, op):
        yield "count + 1"
        if not (isinstance(operands[1], Imm) and operands[1].value <= 1):
            yield "count - 1"
    elif re.fullmatch(_WAIT, op):
        yield "remove"
        yield "other parity" if ".parity" in op else "phase before"
    elif re.fullmatch(_EXPECT, op):
        yield from ("remove", f"bytes - {MX_BYTES}", f"bytes + {MX_BYTES}")
        if op.startswith("mbarrier.arrive"):
            yield "arrive only"
    elif re.fullmatch(f"{_ARRIVE}|{_COMMIT}", op):
        yield from ("remove", "twice")
    elif re.fullmatch(_GROUP_WAIT, op):
        yield "remove"
        if operands:
            yield "one group more"
    elif re.fullmatch(_NAMED, op):
        yield "remove"
        if len(operands) > 1 and ".red" not in op:
            yield from ("threads + 32", "threads - 32")
            if ".sync" in op:
                yield "arrive only"
    elif re.fullmatch("|".join((_GROUP_COMMIT, _FENCE, _TMEM_WAIT, _CLUSTER, _WARP)), op):
        yield "remove"


def mutate(program: Program, mutation: Mutation) -> Program:
    """The program with the mutation; the original is left as it is."""
    old = program.segments[mutation.segment]
    if old.native:  # bar.warp.sync: what it does is to order
        return _replaced(program, replace(old, syncs=False))
    run, converged = _handler(program, old, mutation.kind)
    return _replaced(program, replace(old, run=run, converged=converged))


def _replaced(program: Program, segment: Segment) -> Program:
    segments = list(program.segments)
    segments[segment.index] = segment
    return replace(program, segments=segments)


def watch(program: Program, indices: set[int], seen: Callable[[int, Any, int], None]) -> Program:
    """The program, telling ``seen(segment, warp, mask)`` before each execution of ``indices``."""
    for index in indices:
        old = program.segments[index]

        def run(*args: Any, at: int = index, handler: Callable[..., Any] = old.run) -> Any:
            # (warp, mask), or of a native block (registers, mask, parameters)
            seen(at, args[0], args[1])
            return handler(*args)

        program = _replaced(program, replace(old, run=run))
    return program


# -- handlers of mutants ---------------------------------------------------------------------------


def _handler(program: Program, segment: Segment, kind: str) -> tuple[Handler, bool]:
    ins, operands = segment.first, segment.first.operands
    if kind == "remove":
        return _nothing(program, segment), False
    if kind == "twice":
        return _twice(segment.run), segment.converged
    if kind == "arrive only":
        if ins.op.startswith("mbarrier"):
            return _bound(program, segment, _operand(operands, last=True), lambda n: 0)
        arrive = replace(ins, op=ins.op.replace(".sync", ".arrive", 1))
        return bind(program, segment.index, arrive)
    if kind == "one group more":
        count = operands[0]
        assert isinstance(count, Imm)
        return bind(program, segment.index, replace(ins, operands=(Imm(count.value + 1),)))
    change: Change = {
        "other parity": lambda n: n ^ 1,
        "phase before": lambda n: n - 1,
        "count + 1": lambda n: n + 1,
        "count - 1": lambda n: n - 1,
        "threads + 32": lambda n: n + 32,
        "threads - 32": lambda n: n - 32,
        f"bytes + {MX_BYTES}": lambda n: n + MX_BYTES,
        f"bytes - {MX_BYTES}": lambda n: n - MX_BYTES,
    }[kind]
    position = 2 if "parity" in kind or "phase" in kind else 1
    return _bound(program, segment, _operand(operands, position, last="bytes" in kind), change)


def _operand(operands: tuple[Operand, ...], position: int = 0, last: bool = False) -> Operand:
    return operands[-1] if last else operands[position]


def _rebound(program: Program, segment: Segment, ins: Instr) -> tuple[Handler, bool]:
    """The handler of ``ins`` in the place of the segment's instruction."""
    body = [ins if other is segment.first else other for other in program.entry.body]
    return bind(replace(program, entry=replace(program.entry, body=body)), segment.index, ins)


def _bound(
    program: Program, segment: Segment, operand: Operand, change: Change
) -> tuple[Handler, bool]:
    """The instruction's handler, with ``change`` applied to the value of one scalar operand."""
    ins = segment.first

    if isinstance(operand, Imm):
        new = tuple(Imm(change(operand.value)) if x is operand else x for x in ins.operands)
        return _rebound(program, segment, replace(ins, operands=new))
    used: list[str] = []
    reading: list[str] = []  # the reader that is being made

    class Changed(Binding):
        """Every way to read the operand gives its changed value; one that is not listed here, and
        would give the value as it was, is refused."""

        __slots__ = ()

        def row(self, op: Operand, *kinds: str) -> int:
            if op is operand and not reading:
                raise RuntimeError(f"{ins.op}: {operand} is read in a way that mutations miss")
            return Binding.row(self, op, *kinds)

        def scalar(self, op: Operand) -> Callable[[Any, int], int]:
            read = self._reader("scalar", op)
            return read if op is not operand else lambda w, lane: change(read(w, lane))

        def uniform(self, op: Operand) -> Callable[[Any], int | None]:
            read: Callable[[Any], int | None] = self._reader("uniform", op)
            if op is not operand:
                return read

            def changed(w: Any) -> int | None:
                value = read(w)
                return None if value is None else change(value) & FULL

            return changed

        def lanes32(self, op: Operand) -> Callable[[Any], NDArray[np.uint32]]:
            return self._lanes("lanes32", op)

        def lanes64(self, op: Operand) -> Callable[[Any], NDArray[np.uint64]]:
            return self._lanes("lanes64", op)

        def _lanes(self, name: str, op: Operand) -> Callable[[Any], Any]:
            read: Callable[[Any], Any] = self._reader(name, op)
            if op is not operand:
                return read

            def changed(w: Any) -> Any:
                values = read(w)
                return np.array([change(int(v)) & FULL for v in values], values.dtype)

            return changed

        def _reader(self, name: str, op: Operand) -> Any:
            if op is operand:
                used.append(name)
            reading.append(name)
            try:
                return getattr(Binding, name)(self, op)
            finally:
                reading.pop()

    binder, match, converged = find_binder(program, ins)
    handler = binder(Changed(program, ins, match, segment.index))
    if not used:
        raise RuntimeError(f"{ins.op}: its handler does not read {operand}: nothing was mutated")
    return handler, converged


def _twice(handler: Handler) -> Handler:
    def run(w: Any, mask: int) -> Any:
        handler(w, mask)
        return handler(w, mask)

    return run


def _nothing(program: Program, segment: Segment) -> Handler:
    """A wait that is not there has succeeded; everything else leaves no trace."""
    ins = segment.first
    if re.fullmatch(_WAIT, ins.op) and isinstance(ins.operands[0], Reg):
        put = Binding.put_predicate(
            Binding(program, ins, re.match("", ""), segment.index),  # type: ignore[arg-type]
            ins.operands[0],
        )
        return lambda w, mask: put(w, mask, FULL)
    return lambda w, mask: None
