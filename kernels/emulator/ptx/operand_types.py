"""Which operands an instruction takes: its slots, matched against the shapes of operands.

A *shape* is what matters of an operand for this: the declared type of a register, or the kind of an
immediate, address or vector. A *slot* says what may stand at one place:

    t            a source of the opcode's type t (a group of its pattern), or of a type by name
    ~t           the same for ld, st and cvt: the register may be wider
    %t  &t       a source or a special register; &: or the address of a variable
    =t  =~t      a destination;  =t_: one that may be the sink _
    =t|p  =t[|p] with a predicate beside it, which in brackets may be left out
    {t*4}        a vector; {t*n}: as many elements as the group n says, {t*any}: any number
    @            an address;  ^: one in a tensor map, with coordinates;  $: one in Tensor Memory
    #            an integer that is known when compiled
    x?           may be left out;  x:word: there if and only if the opcode has that modifier

Rules: PTX ISA 9.1 sections 6.2 to 6.5 and 9.4 (tables "Operand type checking" and "Relaxed
type-checking rules"), and where those are silent what ptxas 13.4 takes: 16- and 32-bit words of
halves count as integers of that size, formats without registers of their own (bf16, tf32, fp8,
packed float32) want untyped ones, vectors only compare sizes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from .ast import Imm, Mem, Operand, Reg, RegPair, Sink, Special, Sym, Vec

Shape = str | tuple["Shape", ...]
_RE_TYPE = re.compile(r"([a-z]+)(\d+)")
_WORDS = {  # formats whose values lie in untyped registers
    "bf16": 16, "bf16x2": 32, "tf32": 32, "f32x2": 64, "e4m3x2": 16, "e5m2x2": 16,
    "ue8m0x2": 16, "s2f6x2": 16, "e2m1x2": 8, "e2m3x2": 16, "e3m2x2": 16, "e4m3x4": 32,
    "e5m2x4": 32, "e2m3x4": 32, "e3m2x4": 32, "e2m1x4": 16, "u16x2": 32, "s16x2": 32, "u8x4": 32,
    "s8x4": 32,
}  # fmt: skip
_UNTYPED = ("0", "#", "%")  # how shapes of literals and special registers begin
_WIDE_SPECIALS = ("%clock64", "%globaltimer", "%gridid")


def shape_of(operand: Operand) -> Shape:
    kind = type(operand)
    if kind is Reg:
        return "!pred" if operand.negated else operand.type  # type: ignore[union-attr]
    if kind is Vec:
        return ("{", *map(shape_of, operand.items))  # type: ignore[union-attr]
    if isinstance(operand, Imm):
        return f"0f{operand.bits}" if operand.is_float else "#"
    if isinstance(operand, Mem):
        base = shape_of(operand.base)
        assert isinstance(base, str)
        coords = map(shape_of, operand.coords) if operand.coords is not None else ()
        return ("[", base, *coords)
    if isinstance(operand, Special):
        return "%64" if operand.name in _WIDE_SPECIALS else "%32"
    if isinstance(operand, Sym):
        return "&+" if operand.offset else "&"
    if isinstance(operand, RegPair):
        return ("|", shape_of(operand.first), shape_of(operand.second))
    return "_" if isinstance(operand, Sink) else ":"


@cache
def _parts(name: str) -> tuple[str, int]:
    """Base and bits of a register's type: f16x2 is a word of its own kind."""
    if name == "f16x2":
        return "h", 32
    if name in ("pred", "!pred"):
        return "p", 1
    m = _RE_TYPE.fullmatch(name)
    return (m[1], int(m[2])) if m else ("", 0)


def fits(type_name: str, shape: Shape, relaxed: bool = False) -> bool:
    """Whether a register of this shape may be an operand of the type. ``i32``: an integer that is
    not the opcode's own type, such as a shift's amount."""
    if isinstance(shape, tuple):
        return False
    base, bits = _parts(shape)
    if type_name in _WORDS:
        return base == "b" and bits == _WORDS[type_name]
    want, want_bits = _parts(type_name)
    if want == "p" or base == "p":
        return want == base
    if relaxed and bits == 128 and want_bits < 128:
        return False
    if bits != want_bits and not (relaxed and bits > want_bits and base != "f"):
        # A half or float never lies in a wider float; a byte may lie in any register.
        if not (relaxed and bits > want_bits and want == "b"):
            return False
    if want == "i":
        return base in "bus"
    if base == "b" or want == "b":
        return base != ""
    if want in "us":
        return base in "us" or (base == "h")
    return base == want  # floats, halves, pairs of halves


def literal_fits(type_name: str, shape: Shape) -> bool:
    """Whether a literal may be an operand of the type."""
    if type_name in _WORDS:
        return False
    want, bits = _parts(type_name)
    if shape == "#":
        return want in ("b", "u", "s", "i", "p")
    if shape == "&+":
        return want in ("b", "u", "s", "i")
    if shape in ("0f32", "0f64"):
        return want == "f" and bits >= 32 or want == "b" and shape == f"0f{bits}"
    return False


def is_source(type_name: str, shape: Shape, relaxed: bool = False) -> bool:
    if type_name == "pred":
        return shape in ("pred", "!pred", "#")
    if type_name == "flag":
        return shape in ("pred", "!pred")
    return shape != "!pred" and (
        fits(type_name, shape, relaxed) or literal_fits(type_name, shape)
    )


def is_element(type_name: str, shape: Shape, relaxed: bool, destination: bool) -> bool:
    """An element of a vector: its size counts."""
    if isinstance(shape, tuple):
        return False
    if not destination and (shape[0] in "#%" or shape[:2] == "0f"):
        return True
    if destination and shape == "_":
        return True
    bits = _WORDS.get(type_name) or _parts(type_name)[1]
    base, own = _parts(shape)
    if base not in ("b", "u", "s", "f", "h"):
        return False
    return own == bits or relaxed and own > bits and base in ("b", "u", "s", "h")


@dataclass(frozen=True, slots=True)
class Slot:
    """One place of an instruction. ``count``: of a vector, -1 for any; 0: no vector. ``pair``: "",
    or "may" or "must" have a predicate beside it."""

    type: str
    destination: bool = False
    relaxed: bool = False
    special: bool = False
    symbol: bool = False
    count: int = 0
    sink: bool = False
    pair: str = ""
    optional: bool = False

    def takes(self, shape: Shape) -> bool:
        if self.type in "@^$":
            return _is_address(shape, self.type)
        if self.type == "#":
            return shape == "#"
        if self.count:
            return self._takes_vector(shape)
        if isinstance(shape, tuple):
            return shape[0] == "|" and self._takes_pair(shape[1], shape[2])
        return self.pair != "must" and self._takes_one(shape)

    def _takes_pair(self, first: Shape, second: Shape) -> bool:
        return self.pair != "" and second in ("pred", "_") and self._takes_one(first)

    def _takes_one(self, shape: Shape) -> bool:
        if isinstance(shape, tuple):
            return False
        if self.destination:
            if shape == "_":
                return self.sink
            return shape != "!pred" and fits(self.type, shape, self.relaxed)
        if self.special and shape[0] in ("%&:" if self.symbol else "%"):
            base, bits = _parts(self.type)
            return base in "busi" and (shape[0] != "%" or (bits == 64) == (shape == "%64"))
        return is_source(self.type, shape, self.relaxed)

    def _takes_vector(self, shape: Shape) -> bool:
        if not isinstance(shape, tuple):
            return self.count == 1 and is_element(self.type, shape, False, True) and shape != "_"
        items = shape[1:]
        if shape[0] != "{" or self.count not in (-1, len(items)):
            return False
        return _alike(items, self.type) and all(
            is_element(self.type, item, self.relaxed, self.destination) for item in items
        )


def _alike(items: tuple[Shape, ...], type_name: str) -> bool:
    """Elements of one vector have one size, and one of integers, floats or bits; floats are no
    integers, unless bits stand beside them."""
    parts = [_parts(item) for item in items if isinstance(item, str)]
    sizes = {bits for base, bits in parts if base}
    bases = {"u" if base in "sh" else base for base, _ in parts if base}
    plain = bases - {"b"}
    # A literal beside registers counts as what it is; beside bits it may be either.
    plain |= {"f" if item[0] == "0" else "u" for item in items if plain and item[0] in _UNTYPED}
    if not bases and "%32" not in items:
        return all(literal_fits(type_name, item) or item == "_" for item in items)
    integers = _parts(type_name)[0] in ("u", "s", "i", "h")
    return len(sizes) <= 1 and len(plain) <= 1 and not (integers and bases == {"f"})


def _is_address(shape: Shape, kind: str) -> bool:
    """``kind``: as in a slot. Registers of 8 and 16 bits, which ptxas takes in places, are none."""
    if not isinstance(shape, tuple) or shape[0] != "[" or (len(shape) > 2) != (kind == "^"):
        return False
    base, bits = _parts(shape[1]) if isinstance(shape[1], str) else ("", 0)
    if kind == "$":
        return base in ("b", "u", "s") and bits == 32 or shape[1] == "#"
    known = base in ("b", "u", "s") and bits in (32, 64)
    coords = all(is_element("b32", item, False, False) for item in shape[2:])
    return coords and (known or shape[1] in ("#", "&", "&+"))


_RE_SLOT = re.compile(
    r"(?P<destination>=)?(?P<brace>\{)?(?P<relaxed>~)?(?P<special>[%&])?(?P<type>[@^$#]|\w+?)"
    r"(?:\*(?P<count>\w+)\})?(?P<sink>_)?(?P<pair>\|p|\[\|p\])?(?P<optional>\?)?"
)


def read_slots(text: str, op: str, types: dict[str, str], counts: dict[str, int]) -> list[Slot]:
    """The slots of a row for one opcode. ``types``, ``counts``: what its names stand for."""
    slots = []
    for word in text.split():
        word, _, modifier = word.partition(":")
        if modifier and not re.search(rf"\.{re.escape(modifier)}(?![\w:])", op):
            continue
        m = _RE_SLOT.fullmatch(word)
        assert m is not None, word
        count = 0
        if m["brace"]:
            named = m["count"]
            count = -1 if named == "any" else counts[named] if named in counts else int(named)
        slots.append(
            Slot(
                type=types.get(m["type"], m["type"]),
                destination=bool(m["destination"]),
                relaxed=bool(m["relaxed"]),
                special=bool(m["special"]),
                symbol=m["special"] == "&",
                count=count,
                sink=bool(m["sink"]),
                pair={None: "", "|p": "must", "[|p]": "may"}[m["pair"]],
                optional=bool(m["optional"]),
            )
        )
    return slots


def place_of_mismatch(slots: list[Slot], shapes: tuple[Shape, ...]) -> int | None:
    """The first operand that no slot takes (one past the last if some are missing), or None."""
    at = 0
    for index, slot in enumerate(slots):
        left = len(shapes) - at
        wanted = sum(not later.optional for later in slots[index + 1 :])
        if slot.optional and left <= wanted:
            continue
        if at == len(shapes) or not slot.takes(shapes[at]):
            if not slot.optional:
                return at
            continue
        at += 1
    return None if at == len(shapes) else at
