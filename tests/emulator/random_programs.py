"""Random structured programs: PTX with real branches, and what each thread should compute.

A program is a list of statements over registers of every kind. It is printed as PTX (ifs and loops
become guarded branches, whose lanes part and meet) and interpreted thread by thread in Python.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

State = dict[str, int]
Step = Callable[[State], None]

R = [f"r{i}" for i in range(4)]  # .b32
Q = [f"q{i}" for i in range(3)]  # .b64
H = [f"h{i}" for i in range(3)]  # .b16
P = [f"p{i}" for i in range(3)]  # predicates
M32, M64, M16 = (1 << 32) - 1, (1 << 64) - 1, (1 << 16) - 1


class Left(Exception):
    """The thread returned."""


@dataclass
class Statement:
    """``kind``: op, if, loop or leave. ``guard``: a predicate, negated with a leading !."""

    kind: str
    text: str = ""
    step: Step | None = None
    guard: str = ""
    body: list[Statement] = field(default_factory=list)
    other: list[Statement] = field(default_factory=list)


def holds(guard: str, state: State) -> bool:
    return not guard or bool(state[guard.lstrip("!")]) != guard.startswith("!")


def _assign(name: str, value: Callable[[State], int]) -> Step:
    def step(state: State) -> None:
        state[name] = value(state)

    return step


def _operation(rng: random.Random) -> Statement:
    r, s, u = (rng.choice(R) for _ in range(3))
    q, v, w = (rng.choice(Q) for _ in range(3))
    h, g = rng.choice(H), rng.choice(H)
    p, o = rng.choice(P), rng.choice(P)
    k = rng.randrange(1 << 16)
    table: list[tuple[str, Step]] = [
        (f"add.s32 %{r}, %{s}, {k};", _assign(r, lambda t: (t[s] + k) & M32)),
        (f"mul.lo.s32 %{r}, %{s}, %{u};", _assign(r, lambda t: t[s] * t[u] & M32)),
        (f"xor.b32 %{r}, %{s}, %{u};", _assign(r, lambda t: t[s] ^ t[u])),
        (f"shr.u32 %{r}, %{s}, 3;", _assign(r, lambda t: t[s] >> 3)),
        (f"mul.wide.u32 %{q}, %{s}, %{u};", _assign(q, lambda t: t[s] * t[u])),
        (f"sub.s64 %{q}, %{v}, %{w};", _assign(q, lambda t: (t[v] - t[w]) & M64)),
        (f"mov.b64 %{q}, %{v};", _assign(q, lambda t: t[v])),
        (f"cvt.u32.u64 %{r}, %{q};", _assign(r, lambda t: t[q] & M32)),
        (f"cvt.u16.u32 %{h}, %{r};", _assign(h, lambda t: t[r] & M16)),
        (f"add.u16 %{h}, %{h}, %{g};", _assign(h, lambda t: (t[h] + t[g]) & M16)),
        (f"mov.b32 %{r}, {{%{h}, %{g}}};", _assign(r, lambda t: t[g] << 16 | t[h])),
        (f"setp.lt.u32 %{p}, %{r}, %{s};", _assign(p, lambda t: int(t[r] < t[s]))),
        (f"setp.gt.u64 %{p}, %{q}, %{v};", _assign(p, lambda t: int(t[q] > t[v]))),
        (f"xor.pred %{p}, %{p}, %{o};", _assign(p, lambda t: t[p] ^ t[o])),
        (f"selp.b64 %{q}, %{v}, %{w}, %{p};", _assign(q, lambda t: t[v] if t[p] else t[w])),
        # Memory between native blocks: everything live must survive the machine's instruction.
        (f"st.shared.b32 [%mine], %{r}; ld.shared.b32 %{s}, [%mine];", _assign(s, lambda t: t[r])),
        (f"st.shared.b64 [%mine], %{q}; ld.shared.b64 %{v}, [%mine];", _assign(v, lambda t: t[q])),
    ]
    text, step = rng.choice(table)
    guarded = rng.random() < 0.3 and text.count(";") == 1
    guard = rng.choice(["", "!"]) + rng.choice(P) if guarded else ""
    return Statement("op", text, step, guard)


def statements(rng: random.Random, depth: int, count: int) -> list[Statement]:
    out = []
    for _ in range(count):
        draw = rng.random()
        if depth and draw < 0.16:
            other = statements(rng, depth - 1, rng.randint(1, 4)) if rng.random() < 0.6 else []
            body = statements(rng, depth - 1, rng.randint(1, 5))
            guard = rng.choice(["", "!"]) + rng.choice(P)
            out.append(Statement("if", guard=guard, body=body, other=other))
        elif depth and draw < 0.25:
            body = statements(rng, depth - 1, rng.randint(1, 4))
            out.append(Statement("loop", text=rng.choice(R), body=body))
        elif draw < 0.27:
            out.append(Statement("leave", guard=rng.choice(P)))
        else:
            out.append(_operation(rng))
    return out


def interpret(program: list[Statement], state: State) -> None:
    """Runs one thread. Raises `Left` where it returns."""
    for s in program:
        if s.kind == "op":
            if holds(s.guard, state):
                assert s.step is not None
                s.step(state)
        elif s.kind == "if":
            interpret(s.body if holds(s.guard, state) else s.other, state)
        elif s.kind == "loop":
            for _ in range(state[s.text] & 3):
                interpret(s.body, state)
        elif holds(s.guard, state):
            raise Left


class Printer:
    """Prints as PTX; every label and loop counter is new."""

    def __init__(self) -> None:
        self.n = 0
        self.lines: list[str] = []

    def _negated(self, guard: str) -> str:
        return f"@%{guard[1:]}" if guard.startswith("!") else f"@!%{guard}"

    def _guard(self, guard: str) -> str:
        return f"@!%{guard[1:]}" if guard.startswith("!") else f"@%{guard}" if guard else ""

    def block(self, program: list[Statement]) -> None:
        for s in program:
            self.n += 1
            n = self.n
            if s.kind == "op":
                self.lines.append(f"{self._guard(s.guard)} {s.text}")
            elif s.kind == "leave":
                self.lines.append(f"@%{s.guard} ret;")
            elif s.kind == "if":
                self.lines.append(f"{self._negated(s.guard)} bra ELSE{n};")
                self.block(s.body)
                if s.other:
                    self.lines.append(f"bra.uni JOIN{n};")
                self.lines.append(f"ELSE{n}:")
                self.block(s.other)
                self.lines.append(f"JOIN{n}:")
            else:
                self.lines.append(f"{{ .reg .b32 %c; .reg .pred %more; and.b32 %c, %{s.text}, 3;")
                self.lines.append(f"LOOP{n}: setp.eq.s32 %more, %c, 0; @%more bra DONE{n};")
                self.block(s.body)
                self.lines.append(f"sub.s32 %c, %c, 1; bra LOOP{n}; DONE{n}: }}")


def to_ptx(program: list[Statement]) -> str:
    printer = Printer()
    printer.block(program)
    return "\n".join(printer.lines)
