"""mma.sync: a warp's own MMA, operands in registers (PTX ISA 9.1 section 9.7.14.5).

With g = lane / 4, t = lane % 4 and p elements in a register, element i of register r is

    A (16, K)   row g + 8 (r % 2), column p t + i + 4 p (r / 2)       (8 rows: row g, r from K)
    B (K, 8)    row p t + i + 4 p r, column g
    C, D        row g + 8 (e / 2), column 2 t + e % 2, e counting elements

for every type and shape, .f64 with p = 1 and a register of 64 bits. Arithmetic is the tensor core's
(mode ``exact-f32``): products and sums exact, rounded once; integers wrap, or with .satfinite are
clamped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..engines.formats import nibbles, widen
from ..ptx.ast import Imm, Operand, Vec
from .table import FULL, Binding, Handler, machine

if TYPE_CHECKING:
    from ..state import Warp

_LANES = 32
_NAMES = {"f16": "float16", "bf16": "bfloat16"}  # of `formats`; the others are called alike
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4,
         "u4": 4, "f64": 64}  # fmt: skip
# (M, K) of the shapes of each family.
_SHAPES = {
    "half": ((16, 8), (16, 16)),
    "tf32": ((16, 4), (16, 8)),
    "byte": ((16, 16), (16, 32)),
    "s8": ((8, 16), (16, 16), (16, 32)),
    "s4": ((8, 32), (16, 32), (16, 64)),
    "f64": ((8, 4), (16, 4), (16, 8), (16, 16)),
}
_INT32 = np.iinfo(np.int32)
Array = NDArray[Any]


@dataclass(frozen=True)
class _Form:
    m: int
    k: int
    a: str
    b: str
    d: str
    clamp: bool


def _form(b: Binding, family: str, a: str, other: str, d: str, clamp: bool = False) -> _Form:
    m, k = int(b.match["m"]), int(b.match["k"])
    if (m, k) not in _SHAPES[family]:
        known = ", ".join(f"m{rows}n8k{depth}" for rows, depth in _SHAPES[family])
        raise b.unsupported(f"mma.sync of .{a} has the shapes {known}")
    return _Form(m, k, a, other, d, clamp)


_MMA = r"mma\.sync\.aligned\.m(?P<m>8|16)n8k(?P<k>\d+)\.row\.col"


@machine(rf"{_MMA}\.(?P<d>f32|f16)\.(?P<a>f16|bf16)\.(?P=a)\.(?P=d)", converged=True)
def mma_half(b: Binding) -> Handler:
    if b.match["d"] == "f16" and b.match["a"] != "f16":
        raise b.unsupported("an f16 accumulator takes f16 operands")
    return _handler(b, _form(b, "half", b.match["a"], b.match["a"], b.match["d"]))


@machine(rf"{_MMA}\.f32\.tf32\.tf32\.f32", converged=True)
def mma_tf32(b: Binding) -> Handler:
    return _handler(b, _form(b, "tf32", "tf32", "tf32", "f32"))


@machine(rf"{_MMA}\.(?P<d>f32|f16)\.(?P<a>e4m3|e5m2)\.(?P<b>e4m3|e5m2)\.(?P=d)", converged=True)
def mma_byte(b: Binding) -> Handler:
    return _handler(b, _form(b, "byte", b.match["a"], b.match["b"], b.match["d"]))


@machine(
    rf"{_MMA}(?P<clamp>\.satfinite)?\.s32\.(?P<a>[su][84])\.(?P<b>[su][84])\.s32", converged=True
)
def mma_integer(b: Binding) -> Handler:
    a, other = b.match["a"], b.match["b"]
    if a[1] != other[1]:
        raise b.unsupported("A and B have elements of one size")
    return _handler(b, _form(b, f"s{a[1]}", a, other, "s32", b.match["clamp"] is not None))


@machine(rf"{_MMA}\.f64\.f64\.f64\.f64(?:\.rn)?", converged=True)
def mma_double(b: Binding) -> Handler:
    return _handler(b, _form(b, "f64", "f64", "f64", "f64"))


def _handler(b: Binding, form: _Form) -> Handler:
    d, a, other, c = b.ins.operands
    rows = form.m // 8
    per = max(32 // _BITS[form.a], 1)
    read_a = _reader(b, a, rows * form.k // (4 * per), form.a)
    read_b = _reader(b, other, form.k // (4 * per), form.b)
    count = rows if form.d == "f16" else 2 * rows
    read_c = _reader(b, c, count, form.d)
    put = _writer(b, d, count, form.d)
    places_a, places_b = _a_places(form.m, form.k, per), _b_places(form.k, per)
    places_d = _d_places(form.m)

    def run(w: Warp, mask: int) -> None:
        with np.errstate(all="ignore"):
            left, right = np.empty((form.m, form.k)), np.empty((form.k, 8))
            left[places_a] = _values(read_a(w), form.a)
            right[places_b] = _values(read_b(w), form.b)
            old = _elements(read_c(w), form.d)
            put(w, _registers(_accumulated(left, right, old, places_d, form), form.d))

    return run


# -- registers ------------------------------------------------------------------------------------


def _reader(b: Binding, op: Operand, count: int, dtype: str) -> Callable[[Warp], Array]:
    """Reader of a fragment: uint32[count, 32] (uint64 for f64). Some may be immediates."""
    items = op.items if isinstance(op, Vec) else (op,)
    if len(items) != count:
        raise b.unsupported(f"the fragment {op} should have {count} registers")
    if dtype == "f64":
        readers = [b.lanes64(item) for item in items]
        return lambda w: np.stack([read(w) for read in readers])
    if any(isinstance(item, Imm) for item in items):
        singles = [b.lanes32(item) for item in items]
        return lambda w: np.stack([read(w) for read in singles])
    rows = b.vector_rows(op)
    return lambda w: w.r32[rows]


def _writer(b: Binding, op: Operand, count: int, dtype: str) -> Callable[[Warp, Array], None]:
    items = op.items if isinstance(op, Vec) else (op,)
    if len(items) != count:
        raise b.unsupported(f"the fragment {op} should have {count} registers")
    if dtype != "f64":
        rows = b.vector_rows(op)

        def put(w: Warp, registers: Array) -> None:
            w.r32[rows] = registers

        return put
    wide = [b.row(item, "b64") for item in items]

    def put_wide(w: Warp, registers: Array) -> None:
        for row, value in zip(wide, registers, strict=True):
            w.r32[row] = value & np.uint64(FULL)
            w.r32[row + 1] = value >> np.uint64(32)

    return put_wide


def _values(registers: Array, dtype: str) -> Array:
    """Operand values over (register, lane, element)."""
    registers = np.ascontiguousarray(registers)
    if dtype == "f64":
        return registers.view(np.float64)[:, :, None]
    if dtype in ("s4", "u4"):
        codes = nibbles(registers.view(np.uint8).reshape(*registers.shape, 4))
        return codes.astype(np.int64) - 16 * (codes > 7) if dtype == "s4" else codes
    bits = registers.view(f"u{_BITS[dtype] // 8}").reshape(*registers.shape, -1)
    return widen(bits, _NAMES.get(dtype, dtype))


def _elements(registers: Array, dtype: str) -> Array:
    """Accumulator registers as elements, [2 or 4, lane]."""
    registers = np.ascontiguousarray(registers)
    if dtype == "f16":
        halves = registers.view(np.float16).reshape(-1, _LANES, 2)
        return halves.transpose(0, 2, 1).reshape(-1, _LANES)
    return registers.view({"f32": np.float32, "s32": np.int32, "f64": np.float64}[dtype])


def _registers(elements: Array, dtype: str) -> Array:
    elements = np.ascontiguousarray(elements)
    if dtype == "f16":
        halves = elements.reshape(-1, 2, _LANES).transpose(0, 2, 1)
        return np.ascontiguousarray(halves).view(np.uint32)[:, :, 0]
    return elements.view(np.uint64 if dtype == "f64" else np.uint32)


# -- arithmetic -----------------------------------------------------------------------------------


def _accumulated(left: Array, right: Array, old: Array, places: Places, form: _Form) -> Array:
    """A B + C, as the accumulator's elements."""
    if form.d == "f64":
        return _exact_double(left, right, old, places)
    product = (left @ right)[places]
    if form.d == "s32":
        sums = product.astype(np.int64) + old
        return (sums.clip(_INT32.min, _INT32.max) if form.clamp else sums).astype(np.int32)
    return (product + old).astype(np.float32 if form.d == "f32" else np.float16)


_SPLITTER = float((1 << 27) + 1)  # Veltkamp's, for 53 bits


def _exact_double(left: Array, right: Array, old: Array, places: Places) -> Array:
    """Sums of products of doubles, rounded once: each product as two doubles (Dekker), summed by
    `math.fsum`, which is exact. Products that overflow or are not finite are summed as they are."""
    row, column = places
    x = left[row.reshape(-1)]  # [element * lane, k]
    y = right[:, column.reshape(-1)].T
    high = x * y
    low = _product_error(x, y, high)
    sure = np.isfinite(high) & np.isfinite(low)
    terms = np.concatenate((high, np.where(sure, low, 0.0), old.reshape(-1, 1)), axis=1)
    plain = terms.sum(1)
    exact = [
        math.fsum(line) if whole else total
        for line, whole, total in zip(
            terms, np.isfinite(plain) & sure.all(1), plain, strict=True
        )
    ]  # fmt: skip
    return np.array(exact, np.float64).reshape(old.shape)


def _product_error(x: Array, y: Array, high: Array) -> Array:
    """x y - high, exactly where nothing underflows."""

    def split(v: Array) -> tuple[Array, Array]:
        scaled = _SPLITTER * v
        upper = scaled - (scaled - v)
        return upper, v - upper

    (x1, x0), (y1, y0) = split(x), split(y)
    error: Array = x0 * y0 - (((high - x1 * y1) - x0 * y1) - x1 * y0)
    return error


# -- layouts --------------------------------------------------------------------------------------

Places = tuple[NDArray[np.int64], NDArray[np.int64]]  # row and column of each element


@lru_cache(maxsize=32)
def _a_places(m: int, k: int, per: int) -> Places:
    """Of A's elements over (register, lane, element)."""
    rows = m // 8
    reg, lane, i = np.meshgrid(
        np.arange(rows * k // (4 * per)), np.arange(_LANES), np.arange(per), indexing="ij"
    )
    return lane // 4 + 8 * (reg % rows), per * (lane % 4) + i + 4 * per * (reg // rows)


@lru_cache(maxsize=32)
def _b_places(k: int, per: int) -> Places:
    reg, lane, i = np.meshgrid(
        np.arange(k // (4 * per)), np.arange(_LANES), np.arange(per), indexing="ij"
    )
    return per * (lane % 4) + i + 4 * per * reg, lane // 4


@lru_cache(maxsize=2)
def _d_places(m: int) -> Places:
    """Of C's and D's elements over (element, lane)."""
    index, lane = np.meshgrid(np.arange(m // 4), np.arange(_LANES), indexing="ij")
    return lane // 4 + 8 * (index // 2), 2 * (lane % 4) + index % 2
