"""Tensor maps that a kernel edits: tensormap.replace, tensormap.cp_fenceproxy and the fences of the
tensormap proxy (PTX ISA 9.1 sections 9.7.9.28, 9.7.13.16 and 9.7.13.4).

TMA reads maps through a proxy of its own. A map in global memory that the kernel has changed may be
used by a CTA once the change was released (``.release``, which tensormap.cp_fenceproxy contains)
and the CTA has executed the ``.acquire`` fence for the map's address: `MapUpdates` keeps count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..findings import EmulatorFault
from ..ptx.ast import Imm
from ..tensormap import DEFINED_BYTES, TENSOR_MAP_BYTES, TENSORMAP_ELEMENT_CODES
from .table import LANES, SHARED_GENERIC_BASE, Binding, Handler, first_lane, machine

if TYPE_CHECKING:
    from ..memory.global_memory import GlobalMemory
    from ..memory.shared import SharedMemory
    from ..state import Cta, Warp

_SCOPE = r"(cta|cluster|gpu|sys)"


class MapUpdates:
    """The tensor maps in global memory that a launch has changed, by address."""

    def __init__(self) -> None:
        self._changed: dict[int, int] = {}  # how often
        self._released: dict[int, int] = {}  # up to which change
        self._seen: dict[tuple[Cta, int], int] = {}

    def change(self, address: int) -> None:
        self._changed[address] = self._changed.get(address, 0) + 1

    def release(self, address: int | None = None) -> None:
        """Of one map, or of all."""
        for at in [*self._changed] if address is None else [address]:
            self._released[at] = self._changed.get(at, 0)

    def acquire(self, cta: Cta, address: int) -> None:
        self._seen[cta, address] = self._released.get(address, 0)

    def check(self, cta: Cta, address: int) -> None:
        """Raise missing_tensormap_fence unless the CTA may use the map now."""
        if not self._changed or self._seen.get((cta, address), 0) >= self._changed.get(address, 0):
            return
        released = self._released.get(address, 0) >= self._changed[address]
        fence = "acquire" if released else "release"
        raise EmulatorFault(
            "missing_tensormap_fence",
            f"TMA uses the tensor map at {address:#x}, which the kernel has changed; a"
            f" fence.proxy.tensormap::generic.{fence} of"
            f" {'this CTA for the address' if released else 'the thread that changed it'} is"
            " missing",
            address=address,
        )


# field -> ((word, low bit, bits) by ordinal, what is taken off the value, how far it is shifted)
_FIELDS: dict[str, tuple[tuple[tuple[int, int, int], ...], int, int]] = {
    "global_address": (((0, 0, 64),), 0, 0),
    "rank": (((1, 4, 3),), 0, 0),
    "global_dim": (((4, 0, 32), (4, 32, 32), (5, 0, 32), (5, 32, 32), (6, 0, 32)), 1, 0),
    "box_dim": (((6, 56, 8), (7, 0, 8), (7, 8, 8), (7, 16, 8), (7, 24, 8)), 1, 0),
    "element_stride": (tuple((6, 32 + 3 * k, 3) for k in range(5)), 1, 0),
    "global_stride": (((1, 32, 32), (2, 0, 32), (2, 32, 32), (3, 0, 32)), 0, 4),
    "interleave_layout": (((1, 11, 2),), 0, 0),
    "swizzle_mode": (((1, 13, 2),), 0, 0),
    "swizzle_atomicity": (((1, 19, 2),), 0, 0),
    "fill_mode": (((1, 15, 1),), 0, 0),
}
_ORDINAL = ("box_dim", "global_dim", "global_stride", "element_stride")
_WIDE = ("global_address", "global_stride")


def replaced(raw: bytes, field: str, ordinal: int, value: int) -> bytes:
    """A map's bytes with one field changed; `tensormap` has the format, sizes are stored minus 1.

    value: as the instruction takes it. Raises `EmulatorFault` tma_bad_tensor_map for a value that
    the field cannot hold.
    """
    words = [int(x) for x in np.frombuffer(raw, np.uint64)]

    def put(word: int, low: int, bits: int, number: int) -> None:
        mask = (1 << bits) - 1
        words[word] = words[word] & ~(mask << low) | (number & mask) << low

    if field == "elemtype":
        code, rounding = TENSORMAP_ELEMENT_CODES[value]
        put(1, 7, 4, code)
        put(1, 16, 1, rounding)
        return np.array(words, np.uint64).tobytes()
    places, less, shift = _FIELDS[field]
    word, low, bits = places[ordinal]
    number = (value >> shift) - less
    high_bits = 4 if field == "global_stride" else 0
    if not 0 <= number < 1 << bits + high_bits or value & (1 << shift) - 1:
        raise EmulatorFault(
            "tma_bad_tensor_map", f"tensormap.replace of .{field} {ordinal}: {value} does not fit"
        )
    put(word, low, bits, number)
    if high_bits:
        put(3, 32 + 4 * ordinal, 4, number >> 32)
    return np.array(words, np.uint64).tobytes()


@dataclass(frozen=True)
class _Place:
    """A map in memory, accessed by one lane: the ``index``-th of those that execute. Only the bytes
    that mean something are touched; CuTe DSL's kernels leave the others unwritten."""

    w: Warp
    shared: bool
    address: int
    index: int

    @classmethod
    def of(cls, w: Warp, space: str, address: int, index: int) -> _Place:
        shared = space.startswith("shared")
        if not space and address >= SHARED_GENERIC_BASE:
            shared, address = True, address - SHARED_GENERIC_BASE
        if address % TENSOR_MAP_BYTES:
            raise EmulatorFault(
                "tensormap_misaligned",
                f"tensor map at {address:#x}: its address is a multiple of {TENSOR_MAP_BYTES}",
                address=address,
            )
        return cls(w, shared, address, index)

    def _memory(self, write: bool) -> SharedMemory | GlobalMemory:
        cta = self.w.cta
        if not self.shared:
            return cta.gmem
        cta.smem.check_range(self.address, DEFINED_BYTES, "access to a tensor map")
        if (race := cta.machine.race) is not None:
            at, chosen = np.array([self.address]), np.array([self.index])
            race.smem(self.w, cta, at, DEFINED_BYTES, write, None, chosen)
        return cta.smem

    def read(self) -> bytes:
        memory = self._memory(False)
        return memory.read_bytes(self.address, DEFINED_BYTES, "reading a tensor map").tobytes()

    def write(self, raw: bytes) -> None:
        data = np.frombuffer(raw, np.uint8)
        self._memory(True).write_bytes(self.address, data, "writing a tensor map")


@machine(
    rf"tensormap\.replace\.tile\.({'|'.join([*_FIELDS, 'elemtype'])})"
    r"(?:\.(global|shared::cta))?\.b1024\.(b32|b64)"
)
def replace(b: Binding) -> Handler:
    """One field of a map in shared or global memory, by each lane."""
    field, space = b.match[1], b.match[2] or ""
    operands = b.ins.operands
    if (b.match[3] == "b64") != (field in _WIDE):
        raise b.unsupported(f".{field} is .{'b64' if field in _WIDE else 'b32'}")
    if len(operands) != 2 + (field in _ORDINAL):
        raise b.unsupported(f".{field} takes {1 + (field in _ORDINAL)} operands behind the address")
    ordinal = operands[1].value if field in _ORDINAL and isinstance(operands[1], Imm) else 0
    if field in _ORDINAL and not (
        isinstance(operands[1], Imm) and ordinal < len(_FIELDS[field][0])
    ):
        raise b.unsupported("the ordinal is an immediate below the rank")
    if field == "elemtype" and not (
        isinstance(operands[-1], Imm) and operands[-1].value < len(TENSORMAP_ELEMENT_CODES)
    ):
        raise b.unsupported(".elemtype is an immediate from 0 to 15")
    address, value = b.address(operands[0]), b.scalar(operands[-1])

    def run(w: Warp, mask: int) -> None:
        for index, lane in enumerate(map(int, LANES[mask])):
            place = _Place.of(w, space, address(w, lane), index)
            place.write(replaced(place.read(), field, ordinal, value(w, lane)))
            if not place.shared:
                w.cta.machine.map_updates.change(place.address)
        w.cta.machine.events += 1

    return run


@machine(
    rf"tensormap\.cp_fenceproxy\.global\.shared::cta\.tensormap::generic\.release\.{_SCOPE}"
    r"\.sync\.aligned",
    converged=True,
)
def copy_and_release(b: Binding) -> Handler:
    """A map from shared to global memory, and the release of the change."""
    target, source, size = b.ins.operands
    if not isinstance(size, Imm) or size.value != TENSOR_MAP_BYTES:
        raise b.unsupported(f"the size is {TENSOR_MAP_BYTES}")
    to, from_ = b.address(target), b.address(source)

    def run(w: Warp, mask: int) -> None:
        updates, lane = w.cta.machine.map_updates, first_lane(mask)
        at = to(w, lane)
        if any(to(w, k) != at or from_(w, k) != from_(w, lane) for k in map(int, LANES[mask])):
            raise EmulatorFault(
                "divergent_aligned", "tensormap.cp_fenceproxy: the lanes give different addresses"
            )
        raw = _Place.of(w, "shared::cta", from_(w, lane), 0).read()
        _Place.of(w, "global", at, 0).write(raw)
        updates.change(at)
        updates.release(at)
        w.cta.machine.events += 1

    return run


@machine(rf"fence\.proxy\.tensormap::generic\.(release|acquire)\.{_SCOPE}")
def fence(b: Binding) -> Handler:
    """Release: earlier changes of maps; acquire: of the map at an address."""
    if b.match[1] == "release":

        def release(w: Warp, mask: int) -> None:
            w.cta.machine.map_updates.release()

        return release
    where, size = b.ins.operands
    if not isinstance(size, Imm) or size.value != TENSOR_MAP_BYTES:
        raise b.unsupported(f"the size is {TENSOR_MAP_BYTES}")
    address = b.address(where)

    def acquire(w: Warp, mask: int) -> None:
        for lane in map(int, LANES[mask]):
            w.cta.machine.map_updates.acquire(w.cta, address(w, lane))

    return acquire
