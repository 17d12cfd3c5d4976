"""The PTX program as data. Names of registers and labels are unique: scopes are resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from .source import error
from .syntax import Syntax
from .targets import why_not_on


@dataclass(frozen=True, slots=True)
class Reg:
    """A virtual register: ``name`` is unique in its entry (scoped names are renamed), ``kind`` is
    ``pred``, ``b8``, ``b16``, ``b32``, ``b64`` or ``b128``. ``negated``: written ``!p``. ``type``:
    as it was declared (``f32``), which decides what may use it but not what it holds."""

    name: str
    kind: str
    negated: bool = False
    type: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate. ``value`` is an int, or the bits of a float for ``0f``/``0d`` literals
    (``is_float`` set, ``bits`` 32 or 64)."""

    value: int
    is_float: bool = False
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Sym:
    """A named variable (shared or local array, kernel parameter, global), plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Mem:
    """``[base + offset]``; base is a register, a symbol or an immediate. TMA operands carry
    ``coords``: ``[tensor_map, {c0, c1, ...}]``."""

    base: Reg | Special | Sym | Imm
    offset: int = 0
    coords: tuple[Operand, ...] | None = None


@dataclass(frozen=True, slots=True)
class Vec:
    """``{a, b, ...}``"""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class RegPair:
    """``d|p``: a data and a predicate destination."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: a destination that is thrown away."""


@dataclass(frozen=True, slots=True)
class Label:
    name: str


Operand = Reg | Special | Imm | Sym | Mem | Vec | RegPair | Sink | Label


@cache
def _mods(op: str) -> tuple[str, ...]:
    return tuple(op.split("."))


@dataclass(frozen=True, slots=True)
class Instr:
    """One instruction. ``op`` is the full opcode text (``add.s32``); ``loc`` is (file index, line,
    column) of the last ``.loc``; ``line`` is 1-based in the PTX text."""

    op: str
    operands: tuple[Operand, ...]
    guard: Reg | None
    line: int
    loc: tuple[int, int, int]
    text: str

    @property
    def mods(self) -> tuple[str, ...]:
        return _mods(self.op)


@dataclass(frozen=True, slots=True)
class Param:
    """An entry parameter: byte size, alignment and offset in the parameter block."""

    name: str
    nbytes: int
    align: int
    offset: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the state space ``shared``, ``local``, ``param``, ``global`` or ``const``.
    ``nbytes``: 0 for an extern (dynamic) array; ``data``: what the initialiser gives, the rest is
    zero."""

    name: str
    nbytes: int
    align: int
    extern: bool
    space: str = "shared"
    data: bytes = b""


@dataclass(slots=True)
class Entry:
    """A kernel, its device functions inlined. ``body`` holds instructions in order; ``labels`` maps
    a label to the index of the instruction that follows it. ``local``: each thread's own variables,
    among them the parameters of calls."""

    name: str
    params: tuple[Param, ...]
    body: list[Instr] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)  # unique name -> kind
    shared: list[Variable] = field(default_factory=list)
    local: list[Variable] = field(default_factory=list)
    directives: dict[str, str] = field(default_factory=dict)  # .maxntid, .reqntid, ...

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.nbytes for p in self.params), default=0)


@dataclass(slots=True)
class Module:
    """A PTX file. ``files`` maps ``.file`` indices to paths; ``variables``: .global and .const;
    ``address_bits``: 32 or 64. ``str(module)`` is the text that was parsed, from its statements."""

    version: str
    target: str
    entries: dict[str, Entry]
    shared: list[Variable]
    files: dict[int, str]
    syntax: Syntax
    variables: list[Variable] = field(default_factory=list)
    address_bits: int = 32

    def __str__(self) -> str:
        return str(self.syntax)

    def check_gpu(self, name: str, arch: str) -> None:
        """Raises PTXSyntaxError if the code does not run on a GPU, such as b200, sm_100a."""
        why = why_not_on(self.target, arch)
        if why is not None:
            at = next(s.line for s in self.syntax.statements if s.text.startswith(".target"))
            raise error(str(self), at, f"{why}, and {name} is {arch}")

    def source_of(self, instr: Instr) -> str:
        """``path:line`` of the instruction, empty where the compiler gave none (line 0)."""
        index, line, _ = instr.loc
        path = self.files.get(index)
        return f"{path}:{line}" if path and line else ""
