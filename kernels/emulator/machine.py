"""The machine: runs one launch of one PTX entry, CTA after CTA, warps in turn.

A turn is one segment of one warp; `schedule` says whose turn it is and when asynchronous work takes
effect. A warp that waits is woken by the event it waits for, never polled. The CTAs of a cluster
run together; clusters run one after the other, so a kernel whose clusters wait for each other is
reported as a deadlock (see LIMITATIONS.md).
"""

from __future__ import annotations

import ctypes
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from . import deadlock
from .checks import GlobalRaces, RaceDetector
from .findings import EmulatorFault, Finding, UnsupportedPTX
from .gpus import GpuModel
from .host_runtime import Dim3, Launch
from .isa import bind
from .isa.tensor_map import MapUpdates
from .memory import GlobalMemory
from .program import SHARED_WINDOW_BASE, Program, Segment, decode
from .ptx import Module, parse
from .ptx.ast import Special
from .records import Records
from .schedule import AsyncQueues, Options, ReadyQueue
from .special import special_registers
from .state import Cta, Warp
from .sync.cluster import ClusterBarrier
from .tensormap import TensorMap
from .turns import Turns

if TYPE_CHECKING:
    from .trace import Trace

_TENSOR_MAP_BYTES = 128


@dataclass
class LaunchResult:
    """thread_instructions: PTX instructions by active lanes; seconds: emulating, not decoding."""

    thread_instructions: int = 0
    ctas: int = 0
    seconds: float = 0.0
    decode_seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    records: Records | None = None
    trace: Trace | None = None


@lru_cache(maxsize=8)
def _parse_cached(ptx: str) -> Module:
    return parse(ptx)


_programs: OrderedDict[tuple[str, str, bool], Program] = OrderedDict()


def load(ptx: str, entry: str, clustered: bool = False) -> Program:
    """The decoded entry, kept for the next launch of the same text. ``clustered``: addresses of
    shared variables carry the CTA's rank."""
    key = (ptx, entry, clustered)
    if key in _programs:
        _programs.move_to_end(key)
        return _programs[key]

    def bind_segment(program: Program, segment: Segment) -> Any:
        handler, segment.converged = bind(program, segment.index, segment.first)
        return handler

    _programs[key] = decode(_parse_cached(ptx), entry, bind_segment, clustered)
    while len(_programs) > 8:
        _programs.popitem(last=False)
    return _programs[key]


def run_launch(
    ptx: str,
    launch: Launch,
    gpu: GpuModel,
    memory: GlobalMemory,
    *,
    seed: int = 0,
    roles: dict[int, str] | None = None,
    max_instructions: int | None = None,
    progress: Callable[[float], None] | None = None,
    options: Options | None = None,
) -> LaunchResult:
    """Runs every CTA of a launch; stops at the first finding. Raises `UnsupportedPTX`, and
    `PTXSyntaxError` for text that is no PTX or is for other GPUs."""
    started = time.perf_counter()
    options = options or Options(seed=seed)
    _parse_cached(ptx).check_gpu(gpu.name, gpu.arch)
    program = load(ptx, launch.kernel, launch.cluster != (1, 1, 1))
    decode_seconds = time.perf_counter() - started
    kind: type[Machine] = Machine
    if options.record:
        from .recorder import RecordingMachine  # which stands on this module

        kind = RecordingMachine
    elif options.trace:
        from .trace import TracingMachine

        kind = TracingMachine
    machine = kind(program, launch, gpu, memory, roles or {}, max_instructions, options)
    result = run_machine(machine, progress)
    result.decode_seconds = decode_seconds
    if machine.globals is not None and machine.globals.race is not None:
        memory.footprint = machine.globals.footprint()
    result.records = machine.records()
    result.trace = getattr(machine, "trace", None)
    return result


def run_machine(machine: Machine, progress: Callable[[float], None] | None = None) -> LaunchResult:
    """Runs the machine's launch, cluster after cluster."""
    started = time.perf_counter()
    launch, result, left_out = machine.launch, LaunchResult(), 0
    only = machine.options.ctas
    total = launch.grid[0] * launch.grid[1] * launch.grid[2] if only is None else len(only)
    while (blocks := machine.next_cluster()) is not None:
        if machine.options.leaves_out(blocks, launch.grid):
            left_out += len(blocks)
            continue
        finding = machine.run_cluster(blocks)
        result.ctas = machine.ctas_taken - left_out
        if finding is not None:
            result.findings.append(finding)
            break
        if progress is not None:
            progress(min(result.ctas / total, 1.0))
    result.thread_instructions = machine.executed
    result.seconds = time.perf_counter() - started
    return result


def clusters(launch: Launch) -> Iterator[list[Dim3]]:
    """The grid's clusters in order, each as its CTAs' block indices by rank."""
    grid, shape = launch.grid, launch.cluster
    ranges = [range(0, g, c) for g, c in zip(grid, shape, strict=True)]
    for z in ranges[2]:
        for y in ranges[1]:
            for x in ranges[0]:
                yield [
                    (x + i, y + j, z + k)
                    for k in range(shape[2])
                    for j in range(shape[1])
                    for i in range(shape[0])
                ]


class Machine(Turns):
    """State shared by the CTAs of a launch, and the loop that runs their warps."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        gpu: GpuModel,
        memory: GlobalMemory,
        roles: dict[int, str],
        max_instructions: int | None,
        options: Options,
    ) -> None:
        self.program = program
        self._segments = program.segments
        self.launch = launch
        self.gpu = gpu
        self.gmem = memory
        self.roles = roles
        self.max_instructions = max_instructions
        self.options = options
        self.executed = 0
        self.events = 0  # what may have changed a waiter's mind; see _give_up
        self.ctas: list[Cta] = []
        self.race: RaceDetector | None = None
        self.globals = GlobalRaces(memory) if options.checks else None
        self.cluster = ClusterBarrier(self)
        self.ready = ReadyQueue(options.schedule, options.seed)
        late = options.visibility == "late"
        self.asyncs = AsyncQueues(options.schedule, late, self.ready.random)
        self.smem_bytes = _smem_bytes(program, launch)
        self._param_bytes = program.entry.param_bytes
        self.params = self._parameter_block()
        self._maps: dict[bytes, TensorMap] = {}
        self.map_updates = MapUpdates()
        self._current: Warp | None = None
        self._pending = clusters(launch)
        self.ctas_taken = 0  # of the grid, by clusters that ran or were cancelled
        self._mask = 0
        self.lanes = 0

    def _parameter_block(self) -> ctypes.Array[ctypes.c_char]:
        entry = self.program.entry
        variables, places = self.program.module.variables, self.program.variables
        nbytes = max(
            [1, entry.param_bytes, *(places[v.name] + max(v.nbytes, 1) for v in variables)]
        )
        block = ctypes.create_string_buffer(nbytes + 128)
        # Parameters are aligned as declared (tensor maps to 64 bytes), also in host memory.
        self._params_address = (ctypes.addressof(block) + 127) // 128 * 128
        if len(entry.params) != len(self.launch.params):
            raise ValueError(
                f"entry {entry.name} declares {len(entry.params)} parameters, the launch gives"
                f" {len(self.launch.params)}"
            )
        for param, data in zip(entry.params, self.launch.params, strict=True):
            if len(data) != param.nbytes:
                raise ValueError(
                    f"parameter {param.name}: {len(data)} bytes given, {param.nbytes} declared"
                )
            ctypes.memmove(self._params_address + param.offset, data, len(data))
        if entry.param_bytes:
            self.gmem.add(self._params_address, entry.param_bytes, "parameters", False, owner=block)
        for variable in variables:
            at = self._params_address + places[variable.name]
            ctypes.memmove(at, variable.data, len(variable.data))
            if variable.nbytes:
                writable = variable.space != "const"
                self.gmem.add(at, variable.nbytes, variable.name, writable, owner=block)
        return block

    def variable_address(self, name: str) -> int:
        """Generic address of a .global or .const variable of the module."""
        return self._params_address + self.program.variables[name]

    def tensor_map(self, address: int) -> TensorMap:
        """The tensor map at a generic address: a kernel parameter, or global memory."""
        offset = address - self._params_address
        if 0 <= offset <= self._param_bytes - _TENSOR_MAP_BYTES:
            raw = ctypes.string_at(address, _TENSOR_MAP_BYTES)
        else:
            raw = self.gmem.read_bytes(address, _TENSOR_MAP_BYTES, "tensor map").tobytes()
        if raw not in self._maps:
            self._maps[raw] = TensorMap.decode(raw)
        return self._maps[raw]

    def records(self) -> Records | None:
        """What a recording machine has recorded."""
        return None

    def next_cluster(self) -> list[Dim3] | None:
        """The grid's next cluster that has not started: it starts, or another takes it over."""
        blocks = next(self._pending, None)
        if blocks is not None:
            self.ctas_taken += len(blocks)
        return blocks

    def cancel_next(self) -> Dim3 | None:
        """Cluster launch control: the first block of a cluster that will now not start, or None."""
        blocks = self.next_cluster()
        return blocks[0] if blocks is not None else None

    # -- one cluster ------------------------------------------------------------------------------

    def run_cluster(self, blocks: list[Dim3]) -> Finding | None:
        """Runs the CTAs of a cluster together, to their end or to the first finding."""
        self.ctas = [Cta(self, block, rank) for rank, block in enumerate(blocks)]
        self.cluster = ClusterBarrier(self)
        self.race = (
            RaceDetector(self.program, self.options.profile) if self.options.checks else None
        )
        if self.globals is not None:
            self.globals.begin(self.race)
        for cta in self.ctas:
            if self.race is not None:
                self.race.add_cta(cta)
            for warp in cta.warps:
                self._set_specials(warp)
                self.ready.wake(warp)
        try:
            while True:
                self._run_ready()
                if not (self.asyncs.complete_one() or self._give_up()):
                    break
            if any(warp.fragments for cta in self.ctas for warp in cta.warps):
                return deadlock.report(self.ctas, self.program)
        except EmulatorFault as fault:
            return self._finding(fault)
        finally:
            self.ready.clear()
            self.asyncs.clear()
        return self._check_exit()

    def _check_exit(self) -> Finding | None:
        for cta in self.ctas:
            try:
                cta.check_exit()
                if self.race is not None:
                    self.race.check_exit(cta)
            except EmulatorFault as fault:  # the CTA's, not a warp's
                details = {**fault.details, "found_at": "CTA exit"}
                # The operation that is not over, or what nobody has undone, and whose it is.
                pc, issuer = details.pop("pc", None), details.pop("issuer", None)
                ins = self.program.segments[pc].first if pc is not None else None
                if ins is not None:
                    details["instruction"] = ins.text
                return Finding(
                    fault.code,
                    fault.message,
                    role=issuer.name if issuer is not None else "CTA exit",
                    warp=issuer.index if issuer is not None else None,
                    cta=cta.block,
                    ptx_line=ins.line if ins is not None else None,
                    source=self.program.module.source_of(ins) if ins is not None else "",
                    details=details,
                )
        return None

    def _set_specials(self, warp: Warp) -> None:
        values = special_registers(self, warp)
        for name in self.program.specials:
            if name not in values:
                ins = next(i for i in self.program.entry.body if Special(name) in i.operands)
                source = self.program.module.source_of(ins)
                raise UnsupportedPTX(
                    f"ptx:{ins.line}{f' ({source})' if source else ''}: {ins.text!r}: special"
                    f" register {name} is not modelled"
                )
            row = self.program.layout.row(name)
            warp.r32[row] = np.asarray(values[name]).astype(np.uint64).astype(np.uint32)

    # -- scheduling -------------------------------------------------------------------------------

    def wake(self, key: tuple[Any, ...], cta: Cta) -> None:
        """An event happened: the fragments that wait for it can run again."""
        for warp, fragment in cta.waiting.pop(key, ()):
            assert fragment.wait is not None
            if not fragment.wait.retry:
                fragment.pc += 1
            fragment.wait = None
            self.ready.wake(warp)

    def _give_up(self) -> bool:
        """Nothing can run. A try_wait may fail spuriously, so those outside spin loops now do, one
        at a time; False if there is none, or if giving up has led back here without any event."""
        for cta in self.ctas:
            if self.events == cta.gave_up_at:
                continue
            for key, waiters in list(cta.waiting.items()):
                for warp, fragment in waiters:
                    if fragment.wait is not None and fragment.wait.soft:
                        waiters.remove((warp, fragment))
                        if not waiters:
                            del cta.waiting[key]
                        cta.gave_up_at = self.events
                        fragment.wait = None
                        warp.timed_out = True
                        self.ready.wake(warp)
                        return True
        return False

    # -- findings ----------------------------------------------------------------------------------

    def _finding(self, fault: EmulatorFault) -> Finding:
        """The fault, with who was executing: a warp, or the engine that works for one."""
        op = self.asyncs.current
        warp = op.warp if op is not None else self._current
        assert warp is not None
        ins = self.program.segments[op.pc if op is not None else warp.pc].first
        details: dict[str, Any] = {**fault.details, "instruction": ins.text}
        if fault.code in ("livelock", "instruction_limit"):  # where does everybody stand?
            details["blocked"] = deadlock.frontier(self.ctas, self.program)
        details |= {"engine": op.what} if op is not None else {"lanes": self._mask}
        return Finding(
            code=fault.code,
            message=fault.message,
            role=warp.name,
            cta=warp.cta.block,
            warp=warp.index,
            ptx_line=ins.line,
            source=self.program.module.source_of(ins),
            details=details,
        )


def _smem_bytes(program: Program, launch: Launch) -> int:
    """The CTA's part of the shared window: static variables, alignment, dynamic bytes."""
    dynamic = [v.name for v in program.entry.shared if v.extern]
    start = (
        program.symbols[dynamic[0]] - SHARED_WINDOW_BASE if dynamic else program.static_smem_bytes
    )
    return start + launch.smem_bytes
