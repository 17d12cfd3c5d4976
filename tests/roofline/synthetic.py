"""Records written by hand, for tests that know the answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kernels.emulator.records import LANE_BITS, Code, Event, MmaForm, OpClass, Records, WarpRecord

Row = tuple[int, int, int, int, int]


@dataclass
class Kernel:
    """A straight-line kernel; every instruction is added once and run by whom it is given to."""

    names: list[str] = field(default_factory=list)
    ops: list[OpClass] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    writes: list[list[int]] = field(default_factory=list)
    machine: list[bool] = field(default_factory=list)
    leaders: list[bool] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    immediates: dict[int, int] = field(default_factory=dict)

    def block(self, *instructions: tuple[str, OpClass, list[int], list[int]]) -> int:
        """Adds a native basic block of (name, class, reads, writes); returns its segment."""
        for name, op, reads, writes in instructions:
            self.names.append(name)
            self.ops.append(op)
            self.widths.append(2 if name.endswith("f32x2") else 1)
            self.reads.append(reads)
            self.writes.append(writes)
        return self._close(machine=False, leader=True)

    def event(
        self,
        name: str,
        op: OpClass,
        reads: list[int],
        writes: list[int],
        *,
        leader: bool = True,
        immediate: int = 0,
    ) -> int:
        """Adds a machine instruction, in a basic block of its own unless it is no leader; returns
        its segment. immediate: groups that a wait_group allows."""
        self.names.append(name)
        self.ops.append(op)
        self.widths.append(1)
        self.reads.append(reads)
        self.writes.append(writes)
        self.immediates[len(self.names) - 1] = immediate
        return self._close(machine=True, leader=leader)

    def _close(self, *, machine: bool, leader: bool) -> int:
        self.machine.append(machine)
        self.leaders.append(leader)
        self.starts.append(len(self.names))
        return len(self.machine) - 1

    def code(self) -> Code:
        names = list(dict.fromkeys(self.names))
        count = len(self.names)

        def rows(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
            start = np.cumsum([0, *map(len, lists)], dtype=np.int32)
            return start, np.array([r for row in lists for r in row], np.int32)

        def_start, defs = rows(self.writes)
        use_start, uses = rows(self.reads)
        registers = max([-1, *defs.tolist(), *uses.tolist()]) + 1
        return Code(
            np.array(self.starts, np.int32),
            np.array(self.leaders, np.bool_),
            np.array(self.machine, np.bool_),
            np.full(len(self.machine), -1, np.int32),
            np.array(self.ops, np.uint8),
            np.array(self.widths, np.uint8),
            np.array([names.index(n) for n in self.names], np.int32),
            np.zeros(count, np.int32),
            np.arange(count, dtype=np.int32),
            np.array([self.immediates.get(i, 0) for i in range(count)], np.int32),
            def_start,
            defs,
            use_start,
            uses,
            registers,
            tuple(names),
            ("kernel.py:1",),
        )

    def warp(
        self, index: int, steps: list[int], rows: list[Row] | None = None, role: str = ""
    ) -> WarpRecord:
        """A warp that runs these segments; rows: the events of its machine steps, in order."""
        packed = np.array([s << LANE_BITS | 32 for s in steps], np.int64)
        events = np.array(rows or [], np.int64).reshape(-1, 5)
        return WarpRecord(0, index, role or f"warp {index}", packed, events)

    def records(self, *warps: WarpRecord) -> Records:
        return Records(
            "hand", "b200", (1, 1, 1), (128, 1, 1), (1, 1, 1), 0, (0,), self.code(), warps
        )


def mma_row(m: int, n: int, k: int = 16, *, a_in_tmem: bool = False, ctas: int = 1) -> Row:
    return (Event.MMA, m, n, k | MmaForm(a_in_tmem, ctas, 16).encode() << 16, 0)


def wgmma_row(n: int, k: int = 16, *, a_in_registers: bool = False) -> Row:
    form = MmaForm(a_in_registers, 1, 16).encode()
    return (Event.WGMMA, 64, n, k | form << 16, 0)
