"""Operands an ulp of a wider format away from the middle of two 16-bit floats, where rounding twice
goes wrong: random operands do not find them."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from . import oracle
from . import oracle_float as fp
from .oracle_float import BF16, F16, F64, Format
from .samples import fresh_seed
from .test_native_oracle import _mismatches, _run

FORMATS = {"f16": F16, "bf16": BF16}


def _middles(fmt: Format, rng: random.Random, count: int) -> list[tuple[int, int]]:
    """(mantissa, exponent) of points between neighbours: also subnormal, also below infinity."""
    out = []
    for _ in range(count):
        bits = rng.choice([rng.randrange(fmt.inf), rng.randrange(fmt.min_normal), fmt.max_finite])
        a = fp.decode(bits, fmt)
        out.append((2 * a.mant + 1, a.exp - 1))
    return out


def _double(value: Fraction) -> int:
    """Bits of a double that holds the value exactly."""
    n, d = value.numerator, value.denominator
    exp = d.bit_length() - 1
    assert d == 1 << exp
    return fp.rounded(int(n < 0), abs(n), -exp, False, F64, "rn")


def _check(op: str, table: list[tuple[int, ...]], seed: int) -> None:
    (spec, *_) = oracle.SPECS[op]
    got = _run([spec], table)["d0_0"].tolist()
    bad = _mismatches(spec, table, [got])
    assert not bad, f"FA4_TEST_SEED={seed}:\n" + "\n".join(bad[:5])


@pytest.mark.parametrize("name", FORMATS)
def test_double_to_half(name: str) -> None:
    seed = fresh_seed()
    rng, table = random.Random(seed), []
    for mant, exp in _middles(FORMATS[name], rng, 256):
        middle = mant * Fraction(2) ** exp
        ulp = Fraction(2) ** (mant.bit_length() + exp - 53)
        value = middle + rng.choice([-1, 0, 1]) * ulp
        table.append((_double(rng.choice([-1, 1]) * value),))
    _check(f"cvt.rn.{name}.f64", table, seed)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_integer_to_bfloat16(kind: str) -> None:
    """float16 is infinite before integers get long enough."""
    seed = fresh_seed()
    rng, table = random.Random(seed), []
    bits = int(kind[1:])
    for _ in range(256):
        mant = 2 * rng.randrange(1 << 7, 1 << 8) + 1
        value = (mant << bits - 10 - rng.choice([0, 1, 3])) + rng.choice([-1, 0, 1])
        value = -value if kind[0] == "s" and rng.random() < 0.5 else value
        table.append((value & (1 << bits) - 1,))
    _check(f"cvt.rn.bf16.{kind}", table, seed)


@pytest.mark.parametrize("name", FORMATS)
def test_product_beside_the_middle(name: str) -> None:
    """fma: a * b lies in the middle exactly, c is the smallest number, or nothing."""
    seed = fresh_seed()
    rng, fmt, table = random.Random(seed), FORMATS[name], []
    odd = range(3, 1 << fmt.precision, 2)
    pairs = [(a, b) for a in odd for b in odd if (a * b).bit_length() == fmt.precision + 1]
    for a, b in rng.choices(pairs, k=256):
        x, y = (
            fp.rounded(rng.getrandbits(1), v, -(fmt.precision // 2), False, fmt, "rn")
            for v in (a, b)
        )
        table.append((x, y, rng.choice([0, 1]) | rng.getrandbits(1) * fmt.sign))
    _check(f"fma.rn.{name}", table, seed)
    _check(f"fma.rn.relu.{name}", table, seed)


def test_subnormal_products_of_bfloat16() -> None:
    """Products whose last bits lie below float32's smallest number."""
    seed = fresh_seed()
    rng, table = random.Random(seed), []
    while len(table) < 256:
        a, b = (rng.randrange(1 << 7, 1 << 8) for _ in range(2))
        split = rng.randrange(-60, -20)
        low = BF16.emin - 1 - rng.randrange(4, 15)
        x = fp.rounded(0, a, split, False, BF16, "rn")
        y = fp.rounded(rng.getrandbits(1), b, low - split, False, BF16, "rn")
        if fp.decode(y, BF16).mant:
            table.append((x, y))
    _check("mul.bf16", table, seed)
