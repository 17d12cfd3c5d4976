"""Operand values for the oracle tests: a grid of special values first, then seeded random bits.

A fresh seed is drawn for every test and printed when it fails; FA4_TEST_SEED repeats one.
"""

from __future__ import annotations

import math
import os
import random
import secrets
from collections.abc import Sequence
from itertools import product

from .oracle import mask, width
from .oracle_float import BF16, F16, F32, F64, Format


def fresh_seed() -> int:
    return int(os.environ.get("FA4_TEST_SEED", "0")) or secrets.randbits(31)


def _float_corner(fmt: Format) -> list[int]:
    one = 1 << (fmt.bits - fmt.precision - 1)
    one = (one - 1) << (fmt.precision - 1)
    values = [0, one, 1, fmt.max_finite, fmt.inf, fmt.inf + 1]  # last: a signalling NaN
    return values + [v | fmt.sign for v in values]


def _float_specials(fmt: Format) -> list[int]:
    p, ulp_half = fmt.precision - 1, 1 << (fmt.precision - 2)
    bias = (1 << (fmt.bits - fmt.precision - 1)) - 1
    one = bias << p
    out = [one + 1, one - 1, one + ulp_half, one + (1 << p), one - (1 << p), 2, 3]
    out += [fmt.min_normal, fmt.min_normal - 1, fmt.min_normal + 1, fmt.max_finite - 1]
    out += [fmt.inf | ulp_half, fmt.inf | fmt.min_normal - 1, fmt.inf | 5]
    for exponent in (-1, 1, 2, 7, 8, 15, 16, 23, 24, 30, 31, 32, 62, 63, 64, 126, 127, -24, -126):
        if 0 < exponent + bias < 2 * bias + 1:
            power = exponent + bias << p
            out += [power, power - 1, power + 1, power + ulp_half]
    return [v ^ s for v in out for s in (0, fmt.sign)]


# Arguments where 2**x, rounding to integers or to 16 bits turn a corner.
_F32_ARGUMENTS = [
    0x43000000, 0x42FFFFFF, 0xC2FC0000, 0xC2FD0000, 0xC3150000, 0xC3158000, 0xC3160000, 0xC3160001,
    0x3F000000, 0x3FC00000, 0x40200000, 0x4B000001, 0x4AFFFFFF, 0x4EFFFFFF, 0x4F7FFFFF, 0x5F7FFFFF,
    0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7F8000, 0x7F7F7FFF, 0x477FE000, 0x477FF000,
    0x477FEFFF, 0x33000000, 0x33000001, 0x387FE000, 0x3F801000, 0x3F803000, 0x42C80000, 0x43C80000,
]  # fmt: skip

_FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}


def corner(kind: str) -> list[int]:
    """The few values of which every combination is tried."""
    if kind in _FORMATS:
        return _float_corner(_FORMATS[kind])
    if kind == "pred":
        return [0, 1]
    if kind.endswith("x2"):
        element = kind.removesuffix("x2")
        return [v << width(element) | v for v in _float_corner(_FORMATS[element])]
    bits = width(kind)
    return [v & mask(bits) for v in (0, 1, -1, 1 << (bits - 1), (1 << (bits - 1)) - 1, 2, -2)]


def special(kind: str) -> list[int]:
    if kind in _FORMATS:
        extra = _F32_ARGUMENTS + [v | F32.sign for v in _F32_ARGUMENTS] if kind == "f32" else []
        return corner(kind) + _float_specials(_FORMATS[kind]) + extra
    if kind == "pred":
        return [0, 1]
    if kind.endswith("x2"):
        return special(kind.removesuffix("x2"))
    bits = width(kind)
    narrow = int("".join(ch for ch in kind.split(".")[0] if ch.isdigit()))
    powers = [1 << i for i in range(bits)]
    near = [p + d for p in powers for d in (-1, 0, 1)] + [-p for p in powers]
    chopped = [v | 0xA5 << narrow for v in (0, mask(narrow), 1 << (narrow - 1), mask(narrow - 1))]
    return [v & mask(bits) for v in (*corner(kind), *near, *chopped, 0x5555555555555555)]


def _random(kind: str, rng: random.Random, like: int | None) -> int:
    bits = width(kind)
    value = rng.getrandbits(bits)
    if kind in _FORMATS and like is not None and rng.random() < 0.6:
        # Close exponents, so that sums cancel and carries travel.
        fmt = _FORMATS[kind]
        exponent = (like >> fmt.precision - 1) + rng.randint(-26, 26)
        value = (exponent << fmt.precision - 1 | value & (fmt.min_normal - 1)) & mask(bits)
        value ^= fmt.sign * rng.getrandbits(1)
    return value


def _one(kind: str, rng: random.Random, like: int | None, known: list[int]) -> int:
    if kind.endswith("x2"):
        element = kind.removesuffix("x2")
        shift = width(element)
        below = None if like is None else like & mask(shift)
        above = None if like is None else like >> shift
        low, high = (_one(element, rng, near, known) for near in (below, above))
        return high << shift | low
    if known and rng.random() < 0.45:
        return rng.choice(known)
    return _random(kind, rng, like)


def rows(
    kinds: Sequence[str],
    count: int,
    rng: random.Random,
    fixed: Sequence[tuple[int, Sequence[int]]] = (),
) -> list[tuple[int, ...]]:
    """``count`` tuples of register bits, one value for each kind. ``fixed``: (position, the values
    to draw from there)."""
    drawn = {at: list(values) for at, values in fixed}
    out: list[tuple[int, ...]] = []
    if not fixed:
        corners = [corner(k) for k in kinds]
        if math.prod(map(len, corners)) <= count * 5 // 8:
            out = list(product(*corners))
        else:  # too many combinations: a random part of them
            out = [tuple(rng.choice(c) for c in corners) for _ in range(count // 2)]
    known = [special(k) for k in kinds]
    while len(out) < count:
        row: list[int] = []
        for at, kind in enumerate(kinds):
            if at in drawn:
                row.append(rng.choice(drawn[at]))
            else:
                row.append(_one(kind, rng, row[-1] if row else None, known[at]))
        out.append(tuple(row))
    return out
