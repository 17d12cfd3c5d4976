"""Rounding to odd: how a value can pass through a wider format and still be rounded only once.

Cut off and, if anything was cut, made odd, a result with two more bits than the target rounds to
the target as the exact value does (Boldo and Melquiond, "When double rounding is odd", 2005).
"""

from __future__ import annotations

from .ir import F32, F64, I1, I32, I64, ZERO, Code, splat_i


def sum_error(b: Code, x: str, y: str, s: str) -> str:
    """Knuth's TwoSum in double: exact (x + y) - s."""
    t = b.t(f"fsub {F64} {s}, {x}")
    left = b.t(f"fsub {F64} {x}, {b.t(f'fsub {F64} {s}, {t}')}")
    return b.t(f"fadd {F64} {left}, {b.t(f'fsub {F64} {y}, {t}')}")


def _make_odd(b: Code, ty: str, ints: str, nearest: str, error: str) -> str:
    """``nearest``, of type ``ty`` (bits as ``ints``), moved to the odd neighbour of the exact value
    whose distance from it has the sign of the double ``error``. NaN: nothing was lost."""
    width = int(ints.split(" i")[1].rstrip(">"))
    bits = b.t(f"bitcast {ty} {nearest} to {ints}")
    lost = b.t(f"fcmp one {F64} {error}, {ZERO}")
    negative = b.t(f"icmp slt {ints} {bits}, {ZERO}")
    inwards = b.t(f"xor {I1} {negative}, {b.t(f'fcmp olt {F64} {error}, {ZERO}')}")
    inwards = b.t(f"and {I1} {inwards}, {lost}")
    bits = b.t(f"sub {ints} {bits}, {b.t(f'zext {I1} {inwards} to {ints}')}")
    odd = b.t(f"or {ints} {bits}, {splat_i(width, 1)}")
    bits = b.t(f"select {I1} {lost}, {ints} {odd}, {ints} {bits}")
    return b.t(f"bitcast {ints} {bits} to {ty}")


def add_odd(b: Code, x: str, y: str) -> str:
    """x + y of two doubles, rounded to odd. Their sum must not overflow."""
    s = b.t(f"fadd {F64} {x}, {y}")
    return _make_odd(b, F64, I64, s, sum_error(b, x, y, s))


def narrow_odd(b: Code, x: str) -> str:
    """A double as float32, rounded to odd; what is too large becomes the largest finite number,
    infinity stays."""
    r = b.t(f"fptrunc {F64} {x} to {F32}")
    error = b.t(f"fsub {F64} {x}, {b.t(f'fpext {F32} {r} to {F64}')}")
    return _make_odd(b, F32, I32, r, error)
