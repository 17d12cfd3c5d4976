"""The two descriptors of tcgen05.mma (PTX ISA 9.1 section 9.7.16.4), decoded and checked.

Every bit is accounted for: a value that the ISA forbids is a fault of the kernel
(``mma_bad_descriptor``), one that it allows and the model lacks is an `UnsupportedPTX`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from ..findings import EmulatorFault, UnsupportedPTX

# Swizzle code (bits 61-63) -> length of the swizzled row in 16-byte chunks; 1 is no swizzle.
_SWIZZLE_CHUNKS = {0: 1, 6: 2, 4: 4, 2: 8, 1: 8}
SWIZZLE_128B_BASE_32B = 1
# Kind -> code of A's and B's type (bits 7-9 and 10-12) -> type.
_OPERAND_TYPES: dict[str, dict[int, str]] = {
    "f16": {0: "float16", 1: "bfloat16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
}


def _reject(what: str, value: int, digits: int, rule: str) -> NoReturn:
    raise EmulatorFault(
        "mma_bad_descriptor",
        f"{what} {value:#0{digits + 2}x}: {rule}",
        descriptor=f"{value:#0{digits + 2}x}",
    )


@dataclass(frozen=True)
class InstrDescriptor:
    """Instruction descriptor: types and shape of D = A @ B + D.

    a_dtype, b_dtype: "float16" or "bfloat16" (.kind::f16), "tf32" (.kind::tf32), "e4m3" or "e5m2"
    (.kind::f8f6f4); d_dtype: "float32" or "float16"; m, n: D's shape; a_mn_major, b_mn_major: the
    transpose bits (False: K-major); a_negate, b_negate.
    """

    m: int
    n: int
    a_dtype: str
    b_dtype: str
    d_dtype: str
    a_mn_major: bool
    b_mn_major: bool
    a_negate: bool
    b_negate: bool

    @staticmethod
    @lru_cache(maxsize=256)
    def decode(value: int, kind: str = "f16", cta_group: int = 1) -> InstrDescriptor:
        """Decode 32 bits (PTX ISA 9.1 table 42).

        Raises `EmulatorFault` mma_bad_descriptor, or `UnsupportedPTX` for sparse operands,
        weight-stationary shifts and other kinds. m and n are those of the whole CTA pair with
        cta_group::2.
        """
        if kind not in _OPERAND_TYPES:
            raise UnsupportedPTX(
                f"tcgen05.mma .kind::{kind}: {', '.join(_OPERAND_TYPES)} are modelled"
            )
        if cta_group not in (1, 2):
            raise ValueError(f"cta_group is 1 or 2, not {cta_group}")

        def bad(rule: str) -> NoReturn:
            _reject("instruction descriptor", value, 8, rule)

        if value >> 32 or value < 0:
            bad("it has 32 bits")
        if value & 7:
            raise UnsupportedPTX(f"instruction descriptor {value:#010x}: sparse A is not modelled")
        if value >> 30:
            raise UnsupportedPTX(f"instruction descriptor {value:#010x}: bits 30-31 are .ws only")
        for bit, name in ((3, "saturate"), (6, "reserved"), (23, "reserved"), (29, "reserved")):
            if value >> bit & 1:
                bad(f"bit {bit} ({name}) must be 0 for .kind::{kind}")
        d_dtype = {0: "float16", 1: "float32"}.get(value >> 4 & 3)
        if d_dtype is None:
            bad(f"D type {value >> 4 & 3} (bits 4-5) is neither 0 (f16) nor 1 (f32)")
        types = _OPERAND_TYPES[kind]
        codes = value >> 7 & 7, value >> 10 & 7
        if kind == "f8f6f4" and any(code in (3, 4, 5) for code in codes):
            raise UnsupportedPTX(
                f"instruction descriptor {value:#010x}: operands of 6 or 4 bits are not modelled"
            )
        a_dtype, b_dtype = (types.get(code) for code in codes)
        if a_dtype is None or b_dtype is None:
            known = ", ".join(f"{code} ({name})" for code, name in types.items())
            bad(f"A or B type (bits 7-9, 10-12) is not one of .kind::{kind}: {known}")
        if a_dtype != b_dtype and kind == "f16":
            raise UnsupportedPTX(f"instruction descriptor {value:#010x}: A {a_dtype}, B {b_dtype}")
        if d_dtype == "float16" and a_dtype in ("bfloat16", "tf32"):
            bad(f"D of f16 does not go with A and B of {a_dtype}")
        m, n = (value >> 24 & 31) << 4, (value >> 17 & 63) << 3
        low, step = 64 * cta_group, 8 * cta_group
        if m not in (low, 2 * low):
            bad(f"M is {m} (bits 24-28); with cta_group::{cta_group} it is {low} or {2 * low}")
        if not step <= n <= 256 or n % step:
            bad(
                f"N is {n} (bits 17-22); with cta_group::{cta_group} it is a multiple of {step}"
                f" from {step} to 256"
            )
        return InstrDescriptor(
            m=m,
            n=n,
            a_dtype=a_dtype,
            b_dtype=b_dtype,
            d_dtype=d_dtype,
            a_mn_major=bool(value >> 15 & 1),
            b_mn_major=bool(value >> 16 & 1),
            a_negate=bool(value >> 13 & 1),
            b_negate=bool(value >> 14 & 1),
        )


@dataclass(frozen=True)
class SmemDescriptor:
    """Shared memory descriptor of a matrix operand.

    start, leading_bytes, stride_bytes: address and the two byte strides of the canonical layout;
    swizzle_chunks: 16-byte chunks in a swizzled row: 1 (no swizzle), 2, 4 or 8 (128 bytes);
    atom_bytes: what the swizzle moves as one, 16 bytes or, of 128-byte rows, 32.
    """

    start: int
    leading_bytes: int
    stride_bytes: int
    swizzle_chunks: int
    atom_bytes: int = 16

    @staticmethod
    @lru_cache(maxsize=4096)
    def decode(value: int) -> SmemDescriptor:
        """Decode 64 bits (PTX ISA 9.1 table 40).

        Raises `EmulatorFault` mma_bad_descriptor, or `UnsupportedPTX` for a base offset and
        absolute leading dimension addresses.
        """

        def bad(rule: str) -> NoReturn:
            _reject("shared memory descriptor", value, 16, rule)

        if value >> 64 or value < 0:
            bad("it has 64 bits")
        for low, high in ((14, 15), (30, 31), (53, 60)):
            if value >> low & (1 << high - low + 1) - 1:
                bad(f"bits {low}-{high} must be 0")
        if value >> 46 & 7 != 1:
            bad(f"bits 46-48 must be 0b001, not {value >> 46 & 7:#05b}")
        code = value >> 61
        if code not in _SWIZZLE_CHUNKS:
            bad(f"swizzling mode {code} (bits 61-63) does not exist")
        if value >> 52 & 1:
            raise UnsupportedPTX(
                f"shared memory descriptor {value:#018x}: absolute leading dimension address"
            )
        if value >> 49 & 7:
            raise UnsupportedPTX(
                f"shared memory descriptor {value:#018x}: matrix base offset {value >> 49 & 7};"
                " only tiles on their swizzle pattern's boundary are modelled"
            )
        return SmemDescriptor(
            start=(value & 0x3FFF) << 4,
            leading_bytes=(value >> 16 & 0x3FFF) << 4,
            stride_bytes=(value >> 32 & 0x3FFF) << 4,
            swizzle_chunks=_SWIZZLE_CHUNKS[code],
            atom_bytes=32 if code == SWIZZLE_128B_BASE_32B else 16,
        )


_WGMMA_UNUSED_BITS = ((14, 15), (30, 31), (46, 48), (52, 61))


def wgmma_descriptor(value: int) -> int:
    """A wgmma matrix descriptor (PTX ISA 9.1 section 9.7.15.5.1.2.2) as tcgen05.mma's.

    Both have addresses and strides in the same bits, and wgmma's two bits of swizzling mode, 62-63,
    are the upper two of tcgen05's three; tcgen05 adds a constant. Raises mma_bad_descriptor.
    """
    if value >> 64 or value < 0:
        _reject("wgmma descriptor", value, 16, "it has 64 bits")
    for low, high in _WGMMA_UNUSED_BITS:
        if value >> low & (1 << high - low + 1) - 1:
            _reject("wgmma descriptor", value, 16, f"bits {low}-{high} must be 0")
    return value | 1 << 46
