"""Element-wise reductions: what red, atom and the bulk reductions do to memory.

PTX ISA 9.1 sections 9.7.13.5 and 9.7.9.25.4.2. Elements are given as arrays of their own type; the
two-byte floats and packed pairs of them as uint16 bit patterns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "b32": np.dtype(np.uint32),
    "u32": np.dtype(np.uint32),
    "s32": np.dtype(np.int32),
    "b64": np.dtype(np.uint64),
    "u64": np.dtype(np.uint64),
    "s64": np.dtype(np.int64),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.uint16),
    "bf16": np.dtype(np.uint16),
    "f16x2": np.dtype(np.uint16),
    "bf16x2": np.dtype(np.uint16),
    "f32x2": np.dtype(np.float32),
    "b16": np.dtype(np.uint16),
    "b128": np.dtype(np.uint64),
}


def reduction(op: str, kind: str, ftz: bool = False) -> Callable[[Array, Array], Array]:
    """f(old, operand) -> new, of one operation on one type; ``ftz``: f32 subnormals become zeros.

    Raises KeyError for a combination that does not exist.
    """
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return _half(op, kind.removesuffix("x2"))
    if kind in ("f32", "f64", "f32x2"):
        if op not in _FLOAT:
            raise KeyError(f"{op}.{kind}")
        return _quiet(_FLOAT[op], ftz and kind != "f64")
    return _INTEGER[op]


def _inc(old: Array, bound: Array) -> Array:
    return np.where(old >= bound, np.zeros_like(old), old + old.dtype.type(1))


def _dec(old: Array, bound: Array) -> Array:
    return np.where((old == 0) | (old > bound), bound, old - old.dtype.type(1))


_INTEGER: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": _inc,
    "dec": _dec,
    "exch": lambda old, new: new,
}
_FLOAT: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "exch": lambda old, new: new,
}


def _flush(values: Array) -> Array:
    return np.where(np.abs(values) < np.float32(2.0**-126), np.copysign(0, values), values).astype(
        values.dtype
    )


def _quiet(apply: Callable[[Array, Array], Array], ftz: bool) -> Callable[[Array, Array], Array]:
    def run(old: Array, operand: Array) -> Array:
        with np.errstate(all="ignore"):
            if not ftz:
                return apply(old, operand)
            return _flush(apply(_flush(old), _flush(operand)))

    return run


def _half(op: str, kind: str) -> Callable[[Array, Array], Array]:
    if op not in ("add", "min", "max"):
        raise KeyError(f"{op}.{kind}")
    apply, widen, narrow = _FLOAT[op], _WIDEN[kind], _NARROW[kind]

    def run(old: Array, operand: Array) -> Array:
        with np.errstate(all="ignore"):
            return narrow(apply(widen(old), widen(operand)))

    return run


def bf16_bits(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """float64 to bfloat16, rounded once to nearest even; sums of two bfloat16 are subnormal only
    where they are exact."""
    bits = np.ascontiguousarray(values, np.float64).view(np.uint64)
    last = bits >> np.uint64(45) & np.uint64(1)
    rounded = bits + np.uint64((1 << 44) - 1) + last & ~np.uint64((1 << 45) - 1)
    finite = np.isfinite(values) & (np.abs(values) >= 2.0**-126)
    single = np.where(finite, rounded.view(np.float64), values).astype(np.float32)
    out = (single.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), out)


def _f16_bits(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    out = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), out)


_WIDEN: dict[str, Callable[[Array], Array]] = {
    "f16": lambda bits: bits.view(np.float16).astype(np.float64),
    "bf16": lambda bits: (
        (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    ),
}
_NARROW: dict[str, Callable[[Array], Array]] = {"f16": _f16_bits, "bf16": bf16_bits}
