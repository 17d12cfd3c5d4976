"""What the SM model keeps: the state of warps, barriers and units, and what comes of a run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kernels.emulator.records import LANE_BITS, Code, OpClass, WarpRecord
from roofline.cycles.blocks import Block, Blocks
from roofline.cycles.hardware import SUB_PARTITIONS


@dataclass(frozen=True, slots=True)
class Span:
    """Something on the timeline: a track, a name, and its cycles."""

    track: str
    name: str
    start: float
    end: float


@dataclass
class Run:
    """What came of a cluster.

    cycles: from the first instruction to the last effect. busy: unit -> cycles in use, of one SM.
    stalls: role -> cause -> warp cycles. instructions: warp instructions issued. tensor_flops: of
    the MMAs; operand_bytes: that these read from SMEM; l2_bytes: moved from and to L2.
    """

    cycles: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    stalls: dict[str, dict[str, float]] = field(default_factory=dict)
    role_warps: dict[str, int] = field(default_factory=dict)
    instructions: int = 0
    tensor_flops: float = 0.0
    operand_bytes: float = 0.0
    l2_bytes: float = 0.0
    spans: list[Span] = field(default_factory=list)


class Mbarrier:
    __slots__ = ("expected", "pending", "phase", "tx", "waiters")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.pending = expected
        self.phase = 0
        self.tx = 0
        self.waiters: list[tuple[int, WarpState]] = []


class WarpState:
    """A warp's place in its record, and when its registers will be there."""

    __slots__ = (
        "after", "async_groups", "async_open", "block", "cause", "cluster_phase", "copy_groups",
        "copy_open", "entered", "events", "next_event", "next_visit", "op", "rank", "ready",
        "record", "role", "slot", "stores", "tmem_loads", "visits", "wanted", "wgmma_groups",
        "wgmma_issued", "who",
    )  # fmt: skip

    def __init__(self, record: WarpRecord, rank: int, visits: list[Block], registers: int) -> None:
        self.record = record
        self.role = record.role
        self.rank = rank
        self.slot = rank * SUB_PARTITIONS + record.warp % SUB_PARTITIONS
        self.visits = visits
        self.events: list[list[int]] = record.events.tolist()
        self.next_visit = self.next_event = self.op = 0
        self.block: Block | None = None
        self.ready = [0.0] * registers
        self.who = [int(OpClass.MOVE)] * registers  # class of each register's producer
        self.after = 0.0  # may issue from here on
        self.wanted = -1.0  # when operands of the next instruction are there; -1: not looked at
        self.cause = ""
        self.entered = 0.0
        self.tmem_loads = 0.0
        self.stores = 0.0
        self.copy_open: list[float] = []
        self.copy_groups: list[float] = []
        self.async_open = 0.0  # when the cp.async that no group has are there
        self.async_groups: list[float] = []
        self.cluster_phase = 0  # that its wait at barrier.cluster is for
        self.wgmma_issued = 0
        self.wgmma_groups: list[int] = []  # MMAs issued when each pending group was committed


@dataclass(slots=True)
class TensorWork:
    """An MMA, or a commit (with a barrier), in the order of issue."""

    issued: float
    name: str
    arithmetic: float = 0.0
    smem: float = 0.0
    tail: float = 0.0
    barrier: int | None = None
    sms: int = 1  # that the MMA keeps busy


@dataclass(slots=True)
class WarpGroup:
    """A warpgroup's MMAs. issued: warps that have, and the last one's time, by number; queue: not
    begun; begun: when each will be complete. blocked: warps that may not issue on, waiters: warps
    that wait for the first so many."""

    rank: int
    issued: list[tuple[int, float]] = field(default_factory=list)
    queue: deque[TensorWork] = field(default_factory=deque)
    begun: list[float] = field(default_factory=list)
    blocked: list[tuple[int, WarpState]] = field(default_factory=list)
    waiters: list[tuple[int, WarpState]] = field(default_factory=list)


@dataclass(slots=True)
class Sm:
    """The units that the warps of one SM share."""

    queue: deque[TensorWork] = field(default_factory=deque)
    tensor_free: float = 0.0  # when the next MMA can begin
    tensor_done: float = 0.0  # when the arithmetic of the last one ends
    tensor_tail: float = 0.0
    tensor_issue: float = 0.0
    port_debt: float = 0.0
    port_free: float = 0.0
    copy_in_free: float = 0.0
    first_copy: float = float("inf")  # when the first copy of the CTA arrives
    copy_out_free: float = 0.0
    warpgroups: list[WarpGroup] = field(default_factory=list)
    served: WarpGroup | None = None  # whose MMA the tensor core has begun last
    serving: bool = False  # somebody will look at the warpgroups' queues
    sub_tensor_free: list[float] = field(default_factory=lambda: [0.0] * SUB_PARTITIONS)


def visits_of(record: WarpRecord, code: Code, blocks: Blocks) -> list[Block]:
    """The blocks that a warp ran: consecutive segments up to the next leader."""
    segments = record.steps >> LANE_BITS
    if not len(segments):
        return []
    starts = np.ones(len(segments), np.bool_)
    starts[1:] = (segments[1:] != segments[:-1] + 1) | code.leader[segments[1:]]
    first = np.flatnonzero(starts)
    last = np.append(first[1:], len(segments)) - 1
    return [
        blocks.block(a, b)
        for a, b in zip(segments[first].tolist(), segments[last].tolist(), strict=True)
    ]
