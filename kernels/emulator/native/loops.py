"""Functions with counted loops in LLVM IR, for host code that is no translation of PTX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from .ir import Code


@dataclass
class Loop:
    """A loop being written: ``index``, an i64 from 0; ``values``, what it carries: in the body what
    this turn starts with, behind it what the last turn left. The body sets ``after``."""

    index: str
    values: list[str]
    after: list[str] = field(default_factory=list)


class Function(Code):
    """A function being written: parameters are %p0, %p1 and so on; pointers do not alias."""

    def __init__(self, name: str, returns: str, parameters: Sequence[str]) -> None:
        super().__init__()
        self.name, self.returns, self.parameters = name, returns, tuple(parameters)
        self._block = "entry"

    def text(self, result: str = "") -> str:
        """The definition; ``result``: what it returns."""
        named = ", ".join(
            f"{t}{' noalias' if t == 'ptr' else ''} %p{i}" for i, t in enumerate(self.parameters)
        )
        head = f"define {self.returns} @{self.name}({named}) #0 {{"
        return "\n".join([head, "entry:", *self.lines, f"  ret {self.returns} {result}", "}"])

    def at(self, kind: str, base: str, index: str) -> str:
        """The address of an element of type ``kind``."""
        return self.t(f"getelementptr {kind}, ptr {base}, i64 {index}")

    def load(self, kind: str, address: str, align: int) -> str:
        return self.t(f"load {kind}, ptr {address}, align {align}")

    def store(self, kind: str, value: str, address: str, align: int) -> None:
        self.lines.append(f"  store {kind} {value}, ptr {address}, align {align}")

    def call_own(self, returns: str, name: str, *arguments: tuple[str, str]) -> str:
        """Calls a function of the same module; ``arguments``: types and values."""
        listed = ", ".join(f"{kind} {value}" for kind, value in arguments)
        if returns == "void":
            self.lines.append(f"  call void @{name}({listed})")
            return ""
        return self.t(f"call {returns} @{name}({listed})")

    def leave_unless(self, condition: str, result: str) -> None:
        """Returns ``result`` where the i1 does not hold."""
        self.n += 1
        name = f"on{self.n}"
        self.lines += [
            f"  br i1 {condition}, label %{name}, label %{name}.left",
            f"{name}.left:",
            f"  ret {self.returns} {result}",
            f"{name}:",
        ]
        self._block = name

    @contextmanager
    def loop(self, count: str, *carried: tuple[str, str]) -> Iterator[Loop]:
        """A loop of ``count`` turns, an i64 above zero; ``carried``: types and first values."""
        self.n += 1
        name, before = f"loop{self.n}", self._block
        loop = Loop(f"%{name}.i", [f"%{name}.c{k}" for k in range(len(carried))])
        self.lines.append(f"  br label %{name}")
        start = len(self.lines)
        self._block = name
        yield loop
        step = self.t(f"add i64 {loop.index}, 1")
        more = self.t(f"icmp ult i64 {step}, {count}")
        self.lines.append(f"  br i1 {more}, label %{name}, label %{name}.end")
        phis = [("i64", loop.index, "0", step)]
        for (kind, first), now, after in zip(carried, loop.values, loop.after, strict=True):
            phis.append((kind, now, first, after))
        self.lines[start:start] = [f"{name}:"] + [
            f"  {now} = phi {kind} [ {first}, %{before} ], [ {after}, %{self._block} ]"
            for kind, now, first, after in phis
        ]
        self.lines.append(f"{name}.end:")
        self._block = f"{name}.end"
        loop.values = loop.after
