"""The element types of matrix operands: how bits are packed, and their values in float64.

Memory is read in chunks of 16 bytes. A chunk holds 8 elements of 16 bits, 4 of 32, 16 of 8, and:

    e2m3 e3m2  16 elements of 6 bits in 12 bytes, then 4 bytes of padding
    e2m1       16 elements of 4 bits in 8 bytes, then 8 bytes of padding (.kind::f8f6f4, mxf8f6f4)
    e2m1x2     32 elements of 4 bits, no padding (.kind::mxf4 and mxf4nvf4)

(PTX ISA 9.1 section 9.7.16.10.4.2). In Tensor Memory every 6- and 4-bit element of the first two
has a byte of its own, e2m1 in bits 5:2 and the others in bits 6:1, which is how tcgen05.cp unpacks
them (section 9.7.16.9.1; CUTLASS's CuTe DSL example cp_narrow_a_to_tmem_mma.py names the bits).
Elements follow each other from the low bits up.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 16
# Bytes of an element that has whole ones, or the byte that it is unpacked to.
ELEMENT_BYTES = {
    "float16": 2, "bfloat16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "e2m3": 1, "e3m2": 1, "e2m1": 1,
    "e2m1x2": 1, "s8": 1, "u8": 1,
}  # fmt: skip
SIX_BITS = ("e2m3", "e3m2")
# Bits of exponent and of fraction; the rest is a sign, except in ue8m0 and ue4m3.
_FIELDS = {
    "e4m3": (4, 3), "e5m2": (5, 2), "e2m3": (2, 3), "e3m2": (3, 2), "e2m1": (2, 1),
}  # fmt: skip
_SIXTEEN = np.uint32(16)
UNSIGNED: dict[int, np.dtype[Any]] = {n: np.dtype(f"u{n}") for n in (1, 2, 4)}


def chunk_elements(dtype: str) -> int:
    """Elements in 16 bytes of shared memory."""
    return 32 if dtype == "e2m1x2" else CHUNK_BYTES // ELEMENT_BYTES[dtype]


def chunk_values(chunks: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Elements of 16-byte chunks, along the last axis: void16[..., n] to float64[..., n * count].

    chunks: contiguous, of a 16-byte type.
    """
    if dtype in SIX_BITS:
        return _decoded(dtype, six_bits(chunks.view(np.uint8)))
    if dtype in ("e2m1", "e2m1x2"):
        raw = chunks.view(np.uint8)
        return _decoded("e2m1", nibbles(raw if dtype == "e2m1x2" else data_bytes(raw, 8)))
    return widen(chunks.view(UNSIGNED[ELEMENT_BYTES[dtype]]), dtype)


def byte_values(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    """Elements of at most a byte as they lie in Tensor Memory: uint8[bytes, lanes], by axis 0."""
    if dtype == "e2m1x2":
        codes = np.stack((raw & np.uint8(15), raw >> np.uint8(4)), axis=1)
        return _decoded("e2m1", codes.reshape(-1, *raw.shape[1:]))
    if dtype == "e2m1":
        return _decoded(dtype, raw >> np.uint8(2) & np.uint8(15))
    if dtype in SIX_BITS:
        return _decoded(dtype, raw >> np.uint8(1) & np.uint8(63))
    return widen(raw, dtype)


def data_bytes(raw: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """The first ``count`` bytes of every 16 along the last axis."""
    parts = raw.reshape(*raw.shape[:-1], -1, CHUNK_BYTES)[..., :count]
    return np.asarray(parts.reshape(*raw.shape[:-1], -1), np.uint8)


def nibbles(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """4-bit codes of bytes, the low half first, along the last axis."""
    pairs = np.stack((raw & np.uint8(15), raw >> np.uint8(4)), axis=-1)
    return np.asarray(pairs.reshape(*raw.shape[:-1], -1), np.uint8)


def six_bits(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """6-bit codes of padded chunks: uint8[..., 16 n] to uint8[..., 16 n]."""
    triples = data_bytes(raw, 12).reshape(*raw.shape[:-1], -1, 3).astype(np.uint32)
    words = triples[..., 0] | triples[..., 1] << np.uint32(8) | triples[..., 2] << np.uint32(16)
    codes = words[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & np.uint32(63)
    return np.asarray(codes.reshape(*raw.shape[:-1], -1), np.uint8)


def widen(bits: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Bit patterns, one an element, as float64, exactly. Of tf32's 32 bits the lowest 13 are
    ignored; 6- and 4-bit types lie in the low bits of a byte."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << _SIXTEEN).view(np.float32).astype(np.float64)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    if dtype == "tf32":
        return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if dtype == "u8":
        return bits.astype(np.float64)
    if dtype == "s8":
        return bits.view(np.int8).astype(np.float64)
    return _decoded(dtype, bits)


def scale_values(codes: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    """Scale factors: "ue8m0" is 2 ** (code - 127), NaN at 255; "ue4m3" an e4m3 without sign, whose
    bit 7 is not looked at."""
    if dtype == "ue4m3":
        return _decoded("e4m3", codes & np.uint8(0x7F))
    return np.asarray(_powers()[codes], np.float64)


@lru_cache(maxsize=1)
def _powers() -> NDArray[np.float64]:
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[255] = np.nan
    return values


def _decoded(dtype: str, codes: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(_values(dtype)[codes], np.float64)


@lru_cache(maxsize=8)
def _values(dtype: str) -> NDArray[np.float64]:
    """Value of each code. e5m2 has infinities and NaNs, e4m3 the NaNs 0x7f and 0xff only, the 6-
    and 4-bit types have neither."""
    exponent_bits, mantissa = _FIELDS[dtype]
    bias = (1 << exponent_bits - 1) - 1
    code = np.arange(2 << exponent_bits + mantissa)
    body = code & (1 << exponent_bits + mantissa) - 1
    exponent, fraction = body >> mantissa, body & (1 << mantissa) - 1
    scale = 2.0 ** (np.maximum(exponent, 1) - bias - mantissa)
    values = (fraction + (exponent > 0) * (1 << mantissa)) * scale
    if dtype == "e4m3":
        values[body == 0x7F] = np.nan
    elif dtype == "e5m2":
        top = exponent == 31
        values[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    return np.asarray(np.where(code > body, -values, values), np.float64)
