"""Readers of Tensor Memory and of the tensor core: tcgen05, wgmma, mma.sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..isa.table import LANES, Binding, first_lane
from ..ptx.ast import Imm, Mem, Vec
from ..records import Event, MmaForm, OpClass
from ..schedule import CTA_RANK_SHIFT, CTA_WINDOW_MASK
from .table import Reader, Row, reads

if TYPE_CHECKING:
    from ..state import Warp

# Bytes of the cells that one repetition of a shape moves for a warp.
_SHAPE_BYTES = {"32x32b": 128, "16x64b": 128, "16x128b": 256, "16x256b": 512, "16x32bx2": 128}
# Bits of an element as an operand occupies the tensor core, by the names of wgmma and mma.sync.
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "b1": 1, "s4": 4, "u4": 4}
_BYTE_TYPES = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "s8", "u8")


@reads(r"tcgen05\.(ld|st)(?:\.red)?\.sync\.aligned\.(\w+)\.x(\d+)\..*", OpClass.TMEM)
def _tmem(b: Binding) -> Reader:
    kind = Event.TMEM_LOAD if b.match[1] == "ld" else Event.TMEM_STORE
    row: Row = (kind, _SHAPE_BYTES[b.match[2]] * int(b.match[3]), 0, 0, 0)
    return lambda w, mask: row


@reads(r"tcgen05\.wait::(ld|st)\..*", OpClass.TMEM)
def _tmem_wait(b: Binding) -> Reader:
    row: Row = (Event.TMEM_WAIT, int(b.match[1] == "st"), 0, 0, 0)
    return lambda w, mask: row


@reads(r"tcgen05\.(alloc|dealloc)\..*", OpClass.TMEM)
def _tmem_alloc(b: Binding) -> Reader:
    columns, sign = b.scalar(b.ins.operands[1]), 1 if b.match[1] == "alloc" else -1
    return lambda w, mask: (Event.TMEM_ALLOC, sign * columns(w, first_lane(mask)), 0, 0, 0)


@reads(r"tcgen05\.cp\.cta_group::([12])\.(\d+)x(\d+)b.*", OpClass.TENSOR)
def _tmem_copy(b: Binding) -> Reader:
    """Shared to Tensor Memory, in the order of the thread's MMAs."""
    nbytes = int(b.match[2]) * int(b.match[3]) // 8
    return lambda w, mask: [(Event.TMEM_COPY, nbytes, 0, 0, 0)] * mask.bit_count()


# kind -> K of a dense MMA, bits of an operand element
_KINDS = {
    "f16": (16, 16), "tf32": (8, 32), "f8f6f4": (32, 8), "i8": (32, 8),
    "mxf8f6f4": (32, 8), "mxf4": (64, 4), "mxf4nvf4": (64, 4),
}  # fmt: skip


@reads(
    rf"tcgen05\.mma(\.ws)?(\.sp)?\.cta_group::([12])\.kind::({'|'.join(_KINDS)})(?:\.[\w:]+)*",
    OpClass.TENSOR,
)
def _mma(b: Binding) -> Reader:
    """M and N are bits 24-28 and 17-22 of the instruction descriptor, which comes after the
    metadata of a sparse MMA; K of fp4 is in bit 31 (PTX ISA 9.1 tables 42 to 44)."""
    d, a = b.ins.operands[:2]
    idesc = b.ins.operands[4 if b.match[2] else 3]
    column, descriptor = b.address(d), b.scalar(idesc)
    depth, bits = _KINDS[b.match[4]]
    sparse = 2 if b.match[2] else 1
    form = MmaForm(isinstance(a, Mem), int(b.match[3]), bits).encode()

    def read(w: Warp, mask: int) -> list[Row]:
        rows: list[Row] = []
        for lane in map(int, LANES[mask]):
            value = descriptor(w, lane)
            m, n = (value >> 24 & 31) << 4, (value >> 17 & 63) << 3
            k = 96 if bits == 4 and value >> 31 & 1 else depth * sparse
            rows.append((Event.MMA, m, n, k | form << 16, column(w, lane) & 0xFFFF))
        return rows

    return read


@reads(r"tcgen05\.commit\..*?(\.multicast::cluster)?(?:\.b64)", OpClass.TENSOR)
def _commit(b: Binding) -> Reader:
    operand = b.ins.operands[0]
    bar = b.address(operand) if isinstance(operand, Mem) else b.scalar(operand)
    multicast = b.scalar(b.ins.operands[1]) if len(b.ins.operands) > 1 else None

    def read(w: Warp, mask: int) -> list[Row]:
        lane = first_lane(mask)
        at = bar(w, lane)
        if multicast is None:
            return [(Event.COMMIT, at, 0, 0, 0)]
        ranks = multicast(w, lane) & 0xFFFF
        return [
            (Event.COMMIT, rank << CTA_RANK_SHIFT | at & CTA_WINDOW_MASK, 0, 0, 0)
            for rank in range(16)
            if ranks >> rank & 1
        ]

    return read


# -- wgmma, mma.sync ------------------------------------------------------------------------------


def _bits(dtype: str) -> int:
    return 8 if dtype in _BYTE_TYPES else _BITS[dtype]


@reads(
    r"wgmma\.mma_async(?:\.sp)?\.sync\.aligned\.m64n(\d+)k(\d+)(?:\.satfinite)?\.\w+\.(\w+)\.(\w+?)"
    r"(?:\.satfinite)?",
    OpClass.TENSOR,
)
def _wgmma(b: Binding) -> Reader:
    """A warp's part of its warpgroup's MMA, 64 x N x K."""
    in_registers = isinstance(b.ins.operands[1], Vec)
    form = MmaForm(in_registers, 1, _bits(b.match[3])).encode()
    row: Row = (Event.WGMMA, 64, int(b.match[1]), int(b.match[2]) | form << 16, 0)
    return lambda w, mask: row


@reads(r"wgmma\.commit_group\..*", OpClass.TENSOR)
def _wgmma_commit(b: Binding) -> Reader:
    return lambda w, mask: (Event.WGMMA_COMMIT, 0, 0, 0, 0)


@reads(r"wgmma\.wait_group\..*", OpClass.TENSOR)
def _wgmma_wait(b: Binding) -> Reader:
    count = b.ins.operands[0]
    allowed = count.value if isinstance(count, Imm) else 0
    return lambda w, mask: (Event.WGMMA_WAIT, allowed, 0, 0, 0)


@reads(r"mma(?:\.sp)?\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\.row\.col\.(.*)", OpClass.TENSOR)
def _warp_mma(b: Binding) -> Reader:
    """The types of D, A, B and C come last; a few kinds put words in front of them."""
    bits = _bits(b.match[4].split(".")[-3])
    m, n, k = (int(b.match[i]) for i in (1, 2, 3))
    form = MmaForm(True, 1, bits).encode()
    return lambda w, mask: (Event.WARP_MMA, m, n, k | form << 16, 0)
