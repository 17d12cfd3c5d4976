"""The 128 bytes of a CUtensorMap, decoded and encoded.

NVIDIA does not document them. What follows holds for two encoders: `cuTensorMapEncodeTiled` of
driver 580 for sm_90 (tests/emulator/hardware/record_tma.py records it, parameter by parameter), and
the code that CuTe DSL 4.8.1 puts into a kernel's host function, whose MLIR shows every field. The
DSL sets the first 64 bytes only, so nothing in the rest matters. As little-endian 64-bit words:

    w0          global address
    w1 3:0      2 from the DSL, 0 from the driver
       6:4      rank - 1
       10:7     element type, see `ELEMENT_TYPES` and `NARROW_TYPES`
       12:11    interleave: 0 none, 1 16-byte, 2 32-byte
       14:13    swizzle: 0 none, 1 32-byte, 2 64-byte, 3 128-byte
       15       out-of-bounds fill: 0 zeros, 1 NaN
       16       32-bit floats are rounded to tf32
       18:17    L2 promotion: 0 none, 1 64-byte, 2 128-byte, 3 256-byte
       20:19    atom of the 128-byte swizzle: 0 16-byte, 1 32-byte, 2 not seen, 3 64-byte
       21       the DSL sets it for tensors that span 128 KiB or more
       31:22    0
       63:32    byte stride of dimension 1 / 16, low 32 bits
    w2, w3 31:0 byte strides of dimensions 2, 3, 4 / 16, low 32 bits each
    w3 47:32    bits 39:36 of the byte strides of dimensions 1, 2, 3, 4, four bits each
       63:48    0
    w4, w5, w6 31:0   size of dimensions 0 .. 4, minus 1
    w6 46:32    element stride of dimensions 0 .. 4, minus 1, three bits each
       55:47    0
       63:56    box size of dimension 0, minus 1
    w7 31:0     box size of dimensions 1 .. 4, minus 1, eight bits each
       63:32    0
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .findings import EmulatorFault, UnsupportedPTX

TENSOR_MAP_BYTES = 128
DEFINED_BYTES = 64
MAX_RANK = 5

# Code in bits 10:7 -> (name, bytes).
ELEMENT_TYPES: dict[int, tuple[str, int]] = {
    0: ("uint8", 1),
    1: ("uint16", 2),
    2: ("uint32", 4),
    3: ("int32", 4),
    4: ("uint64", 8),
    5: ("int64", 8),
    6: ("float16", 2),
    7: ("float32", 4),
    8: ("float32_ftz", 4),
    9: ("float64", 8),
    10: ("bfloat16", 2),
}
# Types below a byte, codes that the DSL gives: (name, bits in global, in shared memory). Sixteen
# elements are 8 or 12 bytes; without padding ("4x16") or, in shared memory, padded to 16 bytes.
NARROW_TYPES: dict[int, tuple[str, int, int]] = {
    11: ("4x16", 4, 4),
    12: ("4x16_p64", 4, 8),
    13: ("6x16_p32", 6, 8),
}
_NARROW_BITS = {name: (bits, shared) for name, bits, shared in NARROW_TYPES.values()}
_NAMES = {code: name for code, (name, *_) in (ELEMENT_TYPES | NARROW_TYPES).items()}
_TYPE_CODES = {name: code for code, name in _NAMES.items()}
# tensormap.replace's codes of element types (PTX ISA 9.1 table 33) -> ours, and bit 16.
TENSORMAP_ELEMENT_CODES = (
    *((code, 0) for code in range(11)), (7, 1), (8, 1), (11, 0), (12, 0), (13, 0),
)  # fmt: skip
SWIZZLE_BYTES = (0, 32, 64, 128)
_SWIZZLE_ATOM_BYTES = {0: 16, 1: 32, 3: 64}
_ATOM_CODES = {size: code for code, size in _SWIZZLE_ATOM_BYTES.items()}
_LARGE_TENSOR_BYTES = 1 << 17


@dataclass(frozen=True)
class TensorMap:
    """A tiled-mode tensor map. Tuples start with the innermost dimension.

    address: global byte address of element (0, ..., 0); dims: sizes in elements; strides_bytes: of
    dimensions 1 and up; box: the tile's sizes in elements, before element strides; swizzle_bytes:
    0, 32, 64 or 128; swizzle_atom_bytes: 16, or 32 or 64 with the 128-byte swizzle; nan_fill: what
    lies outside the tensor reads as NaN, else as zero; l2_promotion_bytes has no effect on values.
    """

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle_bytes: int = 0
    swizzle_atom_bytes: int = 16
    nan_fill: bool = False
    tf32_rounding: bool = False
    l2_promotion_bytes: int = 128

    def __hash__(self) -> int:  # of a key that every copy looks up, several times
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    @property
    def rank(self) -> int:
        return len(self.dims)

    @cached_property
    def element_bits(self) -> int:
        """Of an element in global memory."""
        if self.dtype in _NARROW_BITS:
            return _NARROW_BITS[self.dtype][0]
        return 8 * self.element_bytes

    @cached_property
    def smem_element_bits(self) -> int:
        """Of an element in shared memory, padding included."""
        return _NARROW_BITS[self.dtype][1] if self.dtype in _NARROW_BITS else self.element_bits

    @cached_property
    def element_bytes(self) -> int:
        """Of an element of at least a byte."""
        return ELEMENT_TYPES[_TYPE_CODES[self.dtype]][1]

    @cached_property
    def in_bytes(self) -> TensorMap:
        """The map of the same memory as bytes, where elements are smaller and not padded."""
        share = self.element_bits / 8
        return replace(
            self,
            dtype="uint8",
            dims=(int(self.dims[0] * share), *self.dims[1:]),
            box=(int(self.box[0] * share), *self.box[1:]),
        )

    @cached_property
    def tile(self) -> tuple[int, ...]:
        """Elements moved along each dimension: the box, thinned by the element strides."""
        pairs = zip(self.box, self.element_strides, strict=True)
        return tuple(-(-extent // step) for extent, step in pairs)

    @cached_property
    def tile_bytes(self) -> int:
        """Bytes of one tile in shared memory."""
        return int(np.prod(self.tile, dtype=np.int64)) * self.smem_element_bits // 8

    @cached_property
    def tx_bytes(self) -> int:
        """What the load of a tile completes on an mbarrier: its bytes without padding, as CuTe
        DSL's kernels of padded types expect (cutlass.experimental.cuda.TensorMap)."""
        return int(np.prod(self.tile, dtype=np.int64)) * self.element_bits // 8

    @cached_property
    def all_strides_bytes(self) -> tuple[int, ...]:
        """Byte strides of every dimension, the innermost one's element size first."""
        return (self.element_bytes, *self.strides_bytes)

    @staticmethod
    def decode(raw: bytes | bytearray | memoryview) -> TensorMap:
        """Decode a map's 128 bytes (the first 64 are looked at).

        Raises `UnsupportedPTX`, naming word and bits, for interleaved layouts and for every value
        that neither encoder has shown; `EmulatorFault` tma_bad_tensor_map for a map that breaks the
        rules of cuTensorMapEncodeTiled.
        """
        if len(raw) < DEFINED_BYTES:
            raise ValueError(f"a tensor map has {TENSOR_MAP_BYTES} bytes, not {len(raw)}")
        words = struct.unpack("<8Q", bytes(raw[:DEFINED_BYTES]))
        _check_known_bits(words)
        flags = words[1]
        rank = (flags >> 4 & 7) + 1
        dtype = _NAMES[flags >> 7 & 15]
        low = (words[1] >> 32, words[2] & _U32, words[2] >> 32, words[3] & _U32)
        strides = [lo << 4 | (words[3] >> 32 + 4 * i & 15) << 36 for i, lo in enumerate(low)]
        sizes = [words[4] & _U32, words[4] >> 32, words[5] & _U32, words[5] >> 32, words[6] & _U32]
        boxes = [words[6] >> 56, *struct.pack("<I", words[7])]
        steps = [words[6] >> 32 + 3 * i & 7 for i in range(MAX_RANK)]
        made = TensorMap(
            address=words[0],
            dtype=dtype,
            dims=tuple(size + 1 for size in sizes[:rank]),
            strides_bytes=tuple(strides[: rank - 1]),
            box=tuple(extent + 1 for extent in boxes[:rank]),
            element_strides=tuple(step + 1 for step in steps[:rank]),
            swizzle_bytes=SWIZZLE_BYTES[flags >> 13 & 3],
            swizzle_atom_bytes=_SWIZZLE_ATOM_BYTES[flags >> 19 & 3],
            nan_fill=bool(flags >> 15 & 1),
            tf32_rounding=bool(flags >> 16 & 1),
            l2_promotion_bytes=(0, 64, 128, 256)[flags >> 17 & 3],
        )
        rest = strides[rank - 1 :] + sizes[rank:] + boxes[rank:] + steps[rank:]
        if any(rest):
            raise UnsupportedPTX(f"tensor map of rank {rank}: fields of higher dimensions are set")
        made.check()
        return made

    def encode(self, dsl: bool = True) -> bytes:
        """The map's 128 bytes, zeros after the first 64; ``dsl`` chooses whose bits 3:0 and 21."""
        rank = self.rank
        strides = [*self.strides_bytes, 0, 0, 0, 0][:4]
        sizes = [*(size - 1 for size in self.dims), 0, 0, 0, 0][:5]
        boxes = [*(extent - 1 for extent in self.box), 0, 0, 0, 0][:5]
        steps = [*(step - 1 for step in self.element_strides), 0, 0, 0, 0][:5]
        flags = (
            (2 if dsl else 0)
            | rank - 1 << 4
            | _TYPE_CODES[self.dtype] << 7
            | SWIZZLE_BYTES.index(self.swizzle_bytes) << 13
            | self.nan_fill << 15
            | self.tf32_rounding << 16
            | (0, 64, 128, 256).index(self.l2_promotion_bytes) << 17
            | _ATOM_CODES[self.swizzle_atom_bytes] << 19
            | (dsl and self.span_bytes >= _LARGE_TENSOR_BYTES) << 21
        )
        low = [stride >> 4 & _U32 for stride in strides]
        high = sum((stride >> 36 & 15) << 4 * i for i, stride in enumerate(strides))
        step_bits = sum(step << 3 * i for i, step in enumerate(steps))
        words = (
            self.address,
            flags | low[0] << 32,
            low[1] | low[2] << 32,
            low[3] | high << 32,
            sizes[0] | sizes[1] << 32,
            sizes[2] | sizes[3] << 32,
            sizes[4] | step_bits << 32 | boxes[0] << 56,
            int.from_bytes(bytes(boxes[1:]), "little"),
        )
        return struct.pack("<8Q", *words) + bytes(TENSOR_MAP_BYTES - DEFINED_BYTES)

    @property
    def span_bytes(self) -> int:
        """Bytes from the tensor's first element to the end of its last."""
        outer = zip(self.dims[1:], self.strides_bytes, strict=True)
        return self.dims[0] * self.element_bits // 8 + sum((n - 1) * s for n, s in outer)

    def check(self) -> None:
        """Raise tma_bad_tensor_map unless the rules of cuTensorMapEncodeTiled hold."""
        inner_bytes = self.box[0] * self.smem_element_bits // 8
        padded = self.smem_element_bits != self.element_bits
        broken = [
            (
                padded and (self.address % 32 != 0 or any(s % 32 for s in self.strides_bytes)),
                f"address {self.address:#x} and strides {self.strides_bytes} of {self.dtype} are"
                " not all multiples of 32 bytes",
            ),
            (
                padded and (self.box[0] != 128 or self.dims[0] % 128 != 0),
                f"{self.dtype} with an inner box of {self.box[0]} of {self.dims[0]} elements, not"
                " 128 of a multiple of 128",
            ),
            (
                padded and self.swizzle_bytes not in (0, 128),
                f"{self.dtype} with the {self.swizzle_bytes}-byte swizzle",
            ),
            (
                self.dtype == "4x16" and self.dims[0] % 2 != 0,
                f"{self.dims[0]} elements of 4 bits in a row, an odd number",
            ),
            (self.address % 16 != 0, f"address {self.address:#x} is not a multiple of 16"),
            (
                any(s % 16 for s in self.strides_bytes),
                f"strides {self.strides_bytes} are not all multiples of 16 bytes",
            ),
            (inner_bytes % 16 != 0, f"inner box of {inner_bytes} bytes is no multiple of 16"),
            (
                0 < self.swizzle_bytes < inner_bytes,
                f"inner box of {inner_bytes} bytes exceeds the {self.swizzle_bytes}-byte swizzle",
            ),
            (
                self.swizzle_atom_bytes != 16 and self.swizzle_bytes != 128,
                f"{self.swizzle_atom_bytes}-byte atoms without the 128-byte swizzle",
            ),
            (self.element_strides[0] != 1, "the innermost element stride is not 1"),
            (
                self.nan_fill and "float" not in self.dtype,
                f"NaN fill of {self.dtype} elements",
            ),
            (
                self.tf32_rounding and not self.dtype.startswith("float32"),
                f"tf32 rounding of {self.dtype} elements",
            ),
        ]
        rules = [rule for failed, rule in broken if failed]
        if rules:
            raise EmulatorFault("tma_bad_tensor_map", "tensor map: " + "; ".join(rules))


_U32 = 0xFFFFFFFF
# (word, low bit, high bit, values seen, meaning)
_KNOWN_BITS: tuple[tuple[int, int, int, frozenset[int], str], ...] = (
    (0, 0, 3, frozenset({0}), "low bits of the address"),
    (0, 57, 63, frozenset({0}), "high bits of the address"),
    (1, 0, 3, frozenset({0, 2}), "version"),
    (1, 4, 6, frozenset(range(MAX_RANK)), "rank - 1"),
    (1, 7, 10, frozenset(_NAMES), "element type"),
    (1, 11, 12, frozenset({0}), "interleave, not modelled"),
    (1, 19, 20, frozenset(_SWIZZLE_ATOM_BYTES), "swizzle atom"),
    (1, 22, 31, frozenset({0}), "reserved"),
    (3, 48, 63, frozenset({0}), "reserved"),
    (6, 47, 55, frozenset({0}), "reserved"),
    (7, 32, 63, frozenset({0}), "reserved"),
)


def _check_known_bits(words: tuple[int, ...]) -> None:
    for word, low, high, known, meaning in _KNOWN_BITS:
        value = words[word] >> low & (1 << high - low + 1) - 1
        if value not in known:
            raise UnsupportedPTX(
                f"tensor map word {word} ({words[word]:#018x}): bits {high}:{low} ({meaning})"
                f" are {value:#x}, which no known encoder has shown"
            )
