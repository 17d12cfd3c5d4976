"""Records: what an emulated launch did, for a cycle model. They know no cycles.

`emulate(..., record=True)` puts a `Records` on each `LaunchReport`. It holds

* the *code*, once: every PTX instruction with its class, the registers it reads and writes, and its
  source line; instructions are grouped in segments, what a warp executes in one step;
* of every CTA and warp the *steps* in the order executed: segment and number of active lanes;
* for every step that is not plain arithmetic, *events*: what was loaded, stored, multiplied or
  copied, and which barrier was told or awaited. A phase that is awaited names its number, so that
  the happens-before edges between warps and engines follow from the records alone.

Barriers are named by their shared::cluster address: the CTA's rank << 24, plus its own address.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 2
LANE_BITS = 6  # a step is segment << LANE_BITS | active lanes (0 to 32)
MORE = 1 << 8  # added to an event's kind: the same step has another event after it


class RecordsError(ValueError):
    """A file that holds no records, or records of another version."""


class OpClass(IntEnum):
    """What an instruction needs of an SM; pairs (``f32x2``) count as one instruction of width 2."""

    MOVE = 0  # mov, pack, unpack, parameters: renaming, or constants
    FMA = 1  # fp32 add, multiply, fused multiply-add
    ALU = 2  # fp32 minimum, maximum, compare, select; integer and logic
    IMAD = 3  # integer multiply
    MUFU = 4  # ex2, lg2, rcp, rsqrt, sin, cos, tanh
    CVT = 5  # conversions that change bits
    LONG = 6  # what a compiler expands: integer division and the like
    PREDICATE = 7  # logic on predicates
    BRANCH = 8
    SHUFFLE = 9  # shfl
    VOTE = 10  # vote, elect, redux, match, activemask
    SMEM = 11
    GLOBAL = 12
    TMEM = 13
    TENSOR = 14  # MMA and commit
    COPY = 15  # TMA and bulk copies
    BARRIER = 16
    FENCE = 17
    OTHER = 18


class Event(IntEnum):
    """Kinds of events, with the meaning of their four numbers (unused ones are 0)."""

    NONE = 0  # nothing a model needs to know, or guarded off
    MBARRIER_INIT = 1  # barrier, arrivals
    MBARRIER_ARRIVE = 2  # barrier, arrivals, bytes expected first
    MBARRIER_EXPECT = 3  # barrier, bytes expected (negative: completed)
    MBARRIER_WAIT = 4  # barrier, phase whose completion was awaited (-1: of a fresh barrier)
    NAMED_BARRIER = 5  # number, threads, whether the warp waits
    CLUSTER_BARRIER = 6  # whether the warp waits (else it arrives)
    SMEM_LOAD = 7  # bytes, wavefronts (passes over the banks)
    SMEM_STORE = 8  # bytes, wavefronts
    GLOBAL_LOAD = 9  # bytes, 32-byte sectors
    GLOBAL_STORE = 10  # bytes, 32-byte sectors
    TMEM_LOAD = 11  # bytes of the warp
    TMEM_STORE = 12  # bytes of the warp
    TMEM_WAIT = 13  # 0: loads, 1: stores
    MMA = 14  # M, N, K | form << 16 (see MmaForm), accumulator column
    COMMIT = 15  # barrier
    COPY_IN = 16  # barrier, bytes, shared address, `Source`: to shared memory
    COPY_OUT = 17  # bytes, shared address, lanes that ask for this same copy: to global memory
    COPY_COMMIT = 18
    COPY_WAIT = 19  # groups that may be pending, whether reads suffice
    REGISTERS = 20  # setmaxnreg: registers a thread
    TMEM_ALLOC = 21  # columns (negative: freed)
    LAUNCH_CONTROL = 22  # barrier, bytes of the answer
    WGMMA = 23  # 64, N, K | form << 16: a warp's part of its warpgroup's MMA
    WGMMA_COMMIT = 24
    WGMMA_WAIT = 25  # groups that may be pending
    WARP_MMA = 26  # M, N, K | form << 16: mma.sync, operands in registers
    CP_ASYNC = 27  # bytes, 32-byte sectors: global to shared memory, by the warp's threads
    CP_ASYNC_COMMIT = 28
    CP_ASYNC_WAIT = 29  # groups that may be pending, whether uncommitted copies count too
    CP_ASYNC_ARRIVE = 30  # barrier, arrivals, whether these raise the number that is expected
    LOCAL_LOAD = 31  # bytes
    LOCAL_STORE = 32  # bytes
    TMEM_COPY = 33  # bytes: tcgen05.cp, shared to Tensor Memory


class Source(IntEnum):
    """Where a copy to shared memory comes from."""

    GLOBAL = 0
    MULTICAST = 1  # read once for several CTAs, by the copy recorded before this one
    PEER = 2  # shared memory of a CTA of the cluster


@dataclass(frozen=True)
class MmaForm:
    """How an MMA runs: A in TMEM (wgmma, mma.sync: in registers) or SMEM, CTAs that share it, bits
    of an operand element."""

    a_in_tmem: bool
    ctas: int
    bits: int

    def encode(self) -> int:
        return int(self.a_in_tmem) | (self.ctas - 1) << 1 | self.bits << 2

    @staticmethod
    def decode(value: int) -> MmaForm:
        return MmaForm(bool(value & 1), (value >> 1 & 1) + 1, value >> 2)


@dataclass(frozen=True)
class Code:
    """The instructions of the kernel, by segment.

    segment_start: first instruction of each segment, and the number of instructions at the end.
    leader: whether a segment begins a basic block. machine: whether its steps have events.
    op: class; op_name, source: indices into op_names and sources; width: 2 for packed pairs.
    def_start and defs, use_start and uses: registers written and read, in compressed rows; register
    numbers count to ``registers``. target: segment that a branch at the end of a segment goes to.
    immediate: groups that a wait_group allows to be pending, 0 for all other instructions.
    """

    segment_start: NDArray[np.int32]
    leader: NDArray[np.bool_]
    machine: NDArray[np.bool_]
    target: NDArray[np.int32]
    op: NDArray[np.uint8]
    width: NDArray[np.uint8]
    op_name: NDArray[np.int32]
    source: NDArray[np.int32]
    ptx_line: NDArray[np.int32]
    immediate: NDArray[np.int32]
    def_start: NDArray[np.int32]
    defs: NDArray[np.int32]
    use_start: NDArray[np.int32]
    uses: NDArray[np.int32]
    registers: int
    op_names: tuple[str, ...]
    sources: tuple[str, ...]

    def instructions(self, segment: int) -> range:
        return range(int(self.segment_start[segment]), int(self.segment_start[segment + 1]))

    def reads(self, instruction: int) -> NDArray[np.int32]:
        return self.uses[self.use_start[instruction] : self.use_start[instruction + 1]]

    def writes(self, instruction: int) -> NDArray[np.int32]:
        return self.defs[self.def_start[instruction] : self.def_start[instruction + 1]]

    @cached_property
    def class_counts(self) -> NDArray[np.int64]:
        """Instructions of each class in each segment, packed pairs as two: (segments, classes)."""
        counts = np.zeros((len(self.segment_start) - 1, len(OpClass)), np.int64)
        segment = np.repeat(np.arange(len(counts)), np.diff(self.segment_start))
        np.add.at(counts, (segment, self.op), self.width)
        return counts


@dataclass(frozen=True)
class WarpRecord:
    """One warp: steps (int64: segment << 6 | lanes) and events (int64: kind and four numbers)."""

    cta: int
    warp: int
    role: str
    steps: NDArray[np.int64]
    events: NDArray[np.int64]

    @property
    def segments(self) -> NDArray[np.int64]:
        return self.steps >> LANE_BITS

    @property
    def lanes(self) -> NDArray[np.int64]:
        return self.steps & (1 << LANE_BITS) - 1


@dataclass(frozen=True)
class Records:
    """One launch. ``ctas``: linear block indices recorded, in the order executed; a cluster's CTAs
    stand together. ``warps``: all warps of all of them."""

    kernel: str
    gpu: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    ctas: tuple[int, ...]
    code: Code
    warps: tuple[WarpRecord, ...]

    @property
    def cluster_ctas(self) -> int:
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    def clusters(self) -> Iterator[tuple[WarpRecord, ...]]:
        """The warps of each recorded cluster in turn; of each CTA where there are no clusters."""
        size = self.cluster_ctas
        by_cta: dict[int, list[WarpRecord]] = {cta: [] for cta in self.ctas}
        for warp in self.warps:
            by_cta[warp.cta].append(warp)
        for first in range(0, len(self.ctas), size):
            yield tuple(w for cta in self.ctas[first : first + size] for w in by_cta[cta])

    def lane_counts(self) -> dict[str, int]:
        """Lane-operations by class over all warps; a packed pair counts twice."""
        totals = np.zeros(len(OpClass), np.int64)
        for warp in self.warps:
            totals += (self.code.class_counts[warp.segments] * warp.lanes[:, None]).sum(axis=0)
        return {c.name: int(totals[c]) for c in OpClass if totals[c]}

    def event_totals(self, kind: Event, number: int) -> int:
        """Sum of one of the four numbers over all events of a kind."""
        total = 0
        for warp in self.warps:
            total += int(warp.events[warp.events[:, 0] & ~MORE == kind, 1 + number].sum())
        return total

    def save(self, path: str | Path) -> None:
        """Writes an .npz file."""
        head = {
            "version": VERSION,
            "kernel": self.kernel,
            "gpu": self.gpu,
            "grid": self.grid,
            "block": self.block,
            "cluster": self.cluster,
            "smem_bytes": self.smem_bytes,
            "ctas": self.ctas,
            "registers": self.code.registers,
            "op_names": self.code.op_names,
            "sources": self.code.sources,
            "warps": [(w.cta, w.warp, w.role, len(w.steps), len(w.events)) for w in self.warps],
        }
        arrays = {f"code_{name}": getattr(self.code, name) for name in _CODE_ARRAYS}
        steps = [w.steps for w in self.warps]
        events = [w.events for w in self.warps]
        arrays["steps"] = np.concatenate(steps) if steps else np.zeros(0, np.int64)
        arrays["events"] = np.concatenate(events) if events else np.zeros((0, 5), np.int64)
        arrays["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
        with open(path, "wb") as file:  # a name of our own: numpy would append .npz
            np.savez_compressed(file, allow_pickle=False, **arrays)

    @staticmethod
    def load(path: str | Path) -> Records:
        """Reads what `save` wrote. Raises RecordsError for anything else, OSError if unreadable."""
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            head = json.loads(arrays.pop("head").tobytes())
            version = head["version"]
        except (ValueError, KeyError, TypeError, EOFError, AttributeError) + _ZIP_ERRORS as error:
            raise RecordsError(f"{path}: not a file of records ({error})") from None
        if version != VERSION:
            raise RecordsError(
                f"{path}: version: records of version {version}, this version reads {VERSION};"
                " record the kernel again"
            )
        try:
            records = _from_arrays(head, arrays)
            _check_head(records)
            _check_code(records.code)
            _check_warps(records)
        except KeyError as error:
            raise RecordsError(f"{path}: damaged records: no {error.args[0]}") from None
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise RecordsError(f"{path}: damaged records: {error}") from None
        return records


_ZIP_ERRORS: tuple[type[Exception], ...] = (zipfile.BadZipFile, zlib.error)
_DTYPES = {"leader": np.bool_, "machine": np.bool_, "op": np.uint8, "width": np.uint8}  # else int32
_CODE_ARRAYS = tuple(
    f.name for f in fields(Code) if f.name not in ("registers", "op_names", "sources")
)


def _from_arrays(head: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Records:
    code = Code(
        **{name: arrays[f"code_{name}"] for name in _CODE_ARRAYS},
        registers=head["registers"],
        op_names=tuple(head["op_names"]),
        sources=tuple(head["sources"]),
    )
    steps, events, warps = arrays["steps"], arrays["events"], []
    s = e = 0
    for cta, warp, role, n_steps, n_events in head["warps"]:
        warps.append(WarpRecord(cta, warp, role, steps[s : s + n_steps], events[e : e + n_events]))
        s, e = s + n_steps, e + n_events
    if s != len(steps) or e != len(events):
        raise ValueError("the warps' lengths do not add up")
    return Records(
        head["kernel"],
        head["gpu"],
        tuple(head["grid"]),
        tuple(head["block"]),
        tuple(head["cluster"]),
        head["smem_bytes"],
        tuple(head["ctas"]),
        code,
        tuple(warps),
    )


def _check(holds: bool, field: str, must: str) -> None:
    if not holds:
        raise ValueError(f"{field}: must {must}")


def _check_head(records: Records) -> None:
    """ValueError that names the field of a launch that cannot have been."""
    for name in ("kernel", "gpu"):
        _check(isinstance(getattr(records, name), str), name, "be text")
    for name in ("grid", "block", "cluster"):
        sizes = getattr(records, name)
        positive = all(type(n) is int and n > 0 for n in sizes)
        _check(len(sizes) == 3 and positive, name, "be three positive integers")
    for name, value in (("smem_bytes", records.smem_bytes), ("registers", records.code.registers)):
        _check(type(value) is int and value >= 0, name, "be a non-negative integer")
    for name in ("op_names", "sources"):
        _check(all(isinstance(n, str) for n in getattr(records.code, name)), name, "be texts")
    ctas = records.ctas
    known = all(type(n) is int and n >= 0 for n in ctas) and len(set(ctas)) == len(ctas)
    whole = len(ctas) > 0 and len(ctas) % records.cluster_ctas == 0
    _check(known and whole, "ctas", "be block indices of whole clusters")


def _check_code(code: Code) -> None:
    """ValueError that names the array whose type, length or range is not that of a kernel."""
    for field in fields(Code):
        if field.name not in _CODE_ARRAYS:
            continue
        array = getattr(code, field.name)
        kind = np.dtype(_DTYPES.get(field.name, np.int32))
        _check(array.dtype == kind and array.ndim == 1, field.name, f"be a list of {kind}")
    _check(len(code.segment_start) > 1, "segment_start", "name a segment")
    segments, count = len(code.segment_start) - 1, len(code.op)
    for name in ("leader", "machine", "target"):
        _check(len(getattr(code, name)) == segments, name, f"have {segments} entries")
    for name in ("width", "op_name", "source", "ptx_line", "immediate"):
        _check(len(getattr(code, name)) == count, name, f"have {count} entries")
    for name, rows, total in (
        ("segment_start", segments, count),
        ("def_start", count, len(code.defs)),
        ("use_start", count, len(code.uses)),
    ):
        start = getattr(code, name)
        _check(len(start) == rows + 1, name, f"have {rows + 1} entries")
        _check(start[0] == 0 and start[-1] == total, name, f"go from 0 to {total}")
        _check(bool((np.diff(start) >= 0).all()), name, "not fall")
    for name, low, high in (
        ("op", 0, len(OpClass)),
        ("width", 1, 3),
        ("op_name", 0, len(code.op_names)),
        ("source", 0, len(code.sources)),
        ("target", -1, segments),
        ("defs", 0, code.registers),
        ("uses", 0, code.registers),
        ("immediate", 0, 1 << 31),
    ):
        array = getattr(code, name)
        inside = bool(((array >= low) & (array < high)).all())
        _check(inside, name, f"be from {low} to {high - 1}")


def _check_warps(records: Records) -> None:
    """ValueError that names what a warp cannot have done."""
    code = records.code
    kinds = np.array(list(Event))
    answers = np.where(code.machine, np.diff(code.segment_start), 0)  # instructions with events
    for w in records.warps:
        who = f"of warp {w.warp} of CTA {w.cta}"
        _check(w.cta in records.ctas, "warps", "be of the CTAs recorded")
        _check(type(w.warp) is int and w.warp >= 0 and isinstance(w.role, str), "warps", "be named")
        _check(w.steps.dtype == np.int64 and w.steps.ndim == 1, "steps", "be a list of int64")
        shaped = w.events.dtype == np.int64 and w.events.shape[1:] == (5,)
        _check(shaped, "events", "be rows of five int64")
        inside = bool(((w.segments >= 0) & (w.segments < len(answers))).all())
        _check(inside and bool((w.lanes <= 32).all()), f"steps {who}", "be of the code's segments")
        _check(bool(np.isin(w.events[:, 0] & ~MORE, kinds).all()), f"events {who}", "be known")
        last = int((w.events[:, 0] & MORE == 0).sum())
        expected = int(answers[w.segments].sum())
        _check(last == expected, f"events {who}", f"answer {expected} instructions, not {last}")
    for i, warps in enumerate(records.clusters()):
        _check(any(len(w.steps) for w in warps), "steps", f"be there for cluster {i}")


def record(
    fn: Any,
    *args: Any,
    gpu: str = "b200",
    roles: Mapping[int, str] | None = None,
    sms: int | None = None,
) -> Records:
    """Runs ``fn(*args)`` as `kernels.emulator.emulate` does, and returns its last launch's records.

    sms: what host code is told of the number of SMs; None: what ``gpu`` has. Raises RecordsError if
    the emulator refuses the kernel, or finds it wrong.
    """
    from kernels.emulator import UnsupportedPTX, emulate, gpu_model

    model = gpu_model(gpu) if sms is None else replace(gpu_model(gpu), sm_count=sms)
    try:
        report = emulate(fn, *args, gpu=model, roles=roles, checks=False, record=True)
    except UnsupportedPTX as error:
        raise RecordsError(f"the emulator refuses it: {error}") from None
    if not report.ok:
        raise RecordsError(f"it does not run: {report.findings[0].message}")
    found = report.launches[-1].records if report.launches else None
    if found is None:
        raise RecordsError("it launches nothing")
    return found
