"""The two descriptors of tcgen05.mma (PTX ISA 9.1 section 9.7.16.4), decoded and checked.

Every bit is accounted for: a value that the ISA forbids is a fault of the kernel
(``mma_bad_descriptor``), one that it allows and the model lacks is an `UnsupportedPTX`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from ..findings import EmulatorFault, UnsupportedPTX

# Swizzle code (bits 61-63) -> length of the swizzled row in 16-byte chunks; 1 is no swizzle.
_SWIZZLE_CHUNKS = {0: 1, 6: 2, 4: 4, 2: 8, 1: 8}
SWIZZLE_128B_BASE_32B, SWIZZLE_128B = 1, 2
# Kind -> code of A's and B's type (bits 7-9 and 10-12) -> type.
_SMALL_FLOATS = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_OPERAND_TYPES: dict[str, dict[int, str]] = {
    "f16": {0: "float16", 1: "bfloat16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _SMALL_FLOATS,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _SMALL_FLOATS,
    "mxf4": {1: "e2m1x2"},
    "mxf4nvf4": {1: "e2m1x2"},
}
_D_TYPES = {0: "float16", 1: "float32", 2: "int32"}
BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
_PACKED = ("mxf4", "mxf4nvf4")  # two elements a byte


def _reject(what: str, value: int, digits: int, rule: str) -> NoReturn:
    raise EmulatorFault(
        "mma_bad_descriptor",
        f"{what} {value:#0{digits + 2}x}: {rule}",
        descriptor=f"{value:#0{digits + 2}x}",
    )


@dataclass(frozen=True)
class InstrDescriptor:
    """Instruction descriptor: types and shape of D = A @ B + D.

    a_dtype, b_dtype: as `formats` names them; d_dtype: "float32", "float16" or "int32"; m, n: D's
    shape, of the whole CTA pair with cta_group::2; a_mn_major, b_mn_major: the transpose bits
    (False: K-major); a_negate, b_negate; saturate: of int32 sums, which wrap otherwise.
    k_bytes: of a row of A in memory, 32 or (K = 96) 48. sparse: A holds half of its K; selector:
    which part of the metadata is meant. scale_dtype: "ue8m0" or "ue4m3" with block scaling, and
    the bytes in a word where the scale factors of A and B start.
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
    saturate: bool = False
    k_bytes: int = 32
    sparse: bool = False
    selector: int = 0
    scale_dtype: str | None = None
    scale_a_byte: int = 0
    scale_b_byte: int = 0

    @staticmethod
    @lru_cache(maxsize=256)
    def decode(
        value: int, kind: str = "f16", cta_group: int = 1, sparse: bool = False, ws: bool = False
    ) -> InstrDescriptor:
        """Decode 32 bits (PTX ISA 9.1 tables 42, 43 and 44).

        sparse, ws: whether the instruction is .sp and .ws. Raises `EmulatorFault`
        mma_bad_descriptor, or `UnsupportedPTX` for what is not modelled.
        """
        if kind not in _OPERAND_TYPES:
            raise UnsupportedPTX(
                f"tcgen05.mma .kind::{kind}: {', '.join(_OPERAND_TYPES)} are modelled"
            )
        if cta_group not in (1, 2):
            raise ValueError(f"cta_group is 1 or 2, not {cta_group}")
        if value >> 32 or value < 0:
            _reject("instruction descriptor", value, 8, "it has 32 bits")
        decoded = (_scaled if kind in BLOCK_SCALED else _unscaled)(value, kind, ws)
        if decoded.sparse != sparse:
            _bad(
                value, f"bit 2 says {'sparse' if decoded.sparse else 'dense'}, the instruction"
                f" is{'' if sparse else ' not'} .sp",
            )  # fmt: skip
        if rule := _broken_shape(decoded, kind, cta_group, ws):
            _bad(value, rule)
        return decoded


def _bad(value: int, rule: str) -> NoReturn:
    _reject("instruction descriptor", value, 8, rule)


def _zero_bits(value: int, kind: str, *bits: int) -> None:
    for bit in bits:
        if value >> bit & 1:
            _bad(value, f"bit {bit} must be 0 for .kind::{kind}")


def _types(value: int, kind: str) -> tuple[str, str]:
    """Types of A (bits 7-9) and B (bits 10-12)."""
    types = _OPERAND_TYPES[kind]
    a, b = types.get(value >> 7 & 7), types.get(value >> 10 & 7)
    if a is None or b is None:
        known = ", ".join(f"{code} ({name})" for code, name in types.items())
        _bad(value, f"A or B type (bits 7-9, 10-12) is not one of .kind::{kind}: {known}")
    return a, b


def _common(value: int, kind: str) -> dict[str, Any]:
    a_dtype, b_dtype = _types(value, kind)
    return {
        "m": (value >> 24 & 31) << 4,
        "n": (value >> 17 & 63) << 3,
        "a_dtype": a_dtype,
        "b_dtype": b_dtype,
        "a_mn_major": bool(value >> 15 & 1),
        "b_mn_major": bool(value >> 16 & 1),
        "a_negate": bool(value >> 13 & 1),
        "b_negate": bool(value >> 14 & 1),
        "sparse": bool(value >> 2 & 1),
    }


def _unscaled(value: int, kind: str, ws: bool) -> InstrDescriptor:
    """Table 42: .kind::f16, tf32, f8f6f4 and i8."""
    _zero_bits(value, kind, 6, 23, 29)
    if value >> 30 and not ws:
        _bad(value, "bits 30-31 (maximum shift) are of .ws only")
    if value >> 30:
        raise UnsupportedPTX(f"instruction descriptor {value:#010x}: shifts of .ws (bits 30-31)")
    fields = _common(value, kind)
    a_dtype, b_dtype, d_dtype = fields["a_dtype"], fields["b_dtype"], _D_TYPES.get(value >> 4 & 3)
    if d_dtype is None or (kind == "i8") != (d_dtype == "int32"):
        known = "2 (s32)" if kind == "i8" else "0 (f16) nor 1 (f32)"
        _bad(value, f"D type {value >> 4 & 3} (bits 4-5) is neither {known}")
    if a_dtype != b_dtype and kind == "f16":
        raise UnsupportedPTX(f"instruction descriptor {value:#010x}: A {a_dtype}, B {b_dtype}")
    if d_dtype == "float16" and a_dtype in ("bfloat16", "tf32"):
        _bad(value, f"D of f16 does not go with A and B of {a_dtype}")
    if kind == "i8":
        _zero_bits(value, kind, 13, 14)
    else:
        _zero_bits(value, kind, 3)
    if value & 3 and not fields["sparse"]:
        _bad(value, "bits 0-1 (sparsity selector) must be 0 where A is dense")
    return InstrDescriptor(
        **fields, d_dtype=d_dtype, saturate=bool(value >> 3 & 1), selector=value & 3
    )


def _scaled(value: int, kind: str, ws: bool) -> InstrDescriptor:
    """Tables 43 and 44: .kind::mxf8f6f4, mxf4 and mxf4nvf4."""
    if ws:
        _bad(value, f".kind::{kind} has no .ws form")
    _zero_bits(value, kind, 0, 1, 3, 6, 24, 25, 26)
    if kind in _PACKED:
        _zero_bits(value, kind, 15, 16)
        # Reserved in the ISA; CuTe DSL's builder (Tcgen05MxOmmaInstrDesc) sets it, as a sparsity
        # version that "is irrelevant for SM100".
        value &= ~(1 << 12)
    else:
        _zero_bits(value, kind, 31)
    a_byte, b_byte, long_k = value >> 29 & 3, value >> 4 & 3, value >> 31
    scale_dtype = "ue8m0" if value >> 23 & 1 else "ue4m3"
    if scale_dtype == "ue4m3" and kind != "mxf4nvf4":
        _bad(value, f"scale type (bit 23) is ue4m3; .kind::{kind} takes ue8m0")
    fields = _common(value, kind)
    if long_k and fields["sparse"]:
        _bad(value, "K = 96 (bit 31) is of dense MMAs only")
    return InstrDescriptor(
        **fields,
        d_dtype="float32",
        k_bytes=48 if long_k else 32,
        scale_dtype=scale_dtype,
        scale_a_byte=a_byte,
        scale_b_byte=b_byte,
    )


def _broken_shape(inst: InstrDescriptor, kind: str, ctas: int, ws: bool) -> str | None:
    """The rule of table 39 (and 52) that M or N breaks."""
    many = f"with cta_group::{ctas}{' and .ws' if ws else ''}"
    rows: tuple[int, ...] = (32, 64, 128) if ws else (64 * ctas, 128 * ctas)
    if kind in BLOCK_SCALED:
        rows = (256,) if inst.sparse and ctas == 2 else (128, 256)[:ctas]
    if inst.m not in rows:
        return f"M is {inst.m} (bits 24-28); {many} it is {' or '.join(map(str, rows))}"
    if ws:
        widths = [64, 128] if inst.sparse else [64, 128, 256]
        if ctas == 2 or inst.n not in widths:
            return f"N is {inst.n} (bits 17-22); {many} it is one of {widths}"
        return None
    step = 8 * ctas
    bytes_of_b = kind in ("f8f6f4", "mxf8f6f4", "i8")
    if (bytes_of_b and inst.b_mn_major) or (kind == "i8" and inst.n > 32 // ctas * ctas):
        step = 16 * ctas
    if not step <= inst.n <= 256 or inst.n % step:
        return f"N is {inst.n} (bits 17-22); {many} it is a multiple of {step} from {step} to 256"
    return None


@dataclass(frozen=True)
class SmemDescriptor:
    """Shared memory descriptor of a matrix operand.

    start, leading_bytes, stride_bytes: address and the two byte strides of the canonical layout;
    swizzle_chunks: 16-byte chunks in a swizzled row: 1 (no swizzle), 2, 4 or 8 (128 bytes);
    atom_bytes: what the swizzle moves as one, 16 bytes or, of 128-byte rows, 32. absolute:
    ``leading_bytes`` is the address where rows go on that end at the 128-byte boundary.
    """

    start: int
    leading_bytes: int
    stride_bytes: int
    swizzle_chunks: int
    atom_bytes: int = 16
    absolute: bool = False

    @staticmethod
    @lru_cache(maxsize=4096)
    def decode(value: int) -> SmemDescriptor:
        """Decode 64 bits (PTX ISA 9.1 table 40).

        Raises `EmulatorFault` mma_bad_descriptor, or `UnsupportedPTX` for a base offset.
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
        if value >> 52 & 1 and code != SWIZZLE_128B:
            bad("an absolute leading dimension address (bit 52) goes with the 128-byte swizzle")
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
            absolute=bool(value >> 52 & 1),
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
