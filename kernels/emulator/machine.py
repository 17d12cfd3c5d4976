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
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from . import deadlock
from .checks import GlobalRaces, RaceDetector
from .findings import EmulatorFault, Finding, UnsupportedPTX
from .gpus import GpuModel
from .host_runtime import Dim3, Launch
from .isa import bind
from .isa.table import Wait
from .memory import GlobalMemory
from .program import SHARED_WINDOW_BASE, Program, Segment, decode
from .ptx import Module, parse
from .ptx.ast import Special
from .records import Records
from .schedule import AsyncQueues, Options, PendingLoad, ReadyQueue
from .state import Cta, Fragment, Warp
from .tensormap import TensorMap

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
    """Runs every CTA of a launch; stops at the first finding. Raises `UnsupportedPTX`."""
    started = time.perf_counter()
    options = options or Options(seed=seed)
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


class ClusterBarrier:
    """barrier.cluster: every thread of every CTA arrives, then waits."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._arrived: set[Warp] = set()
        self._owed: dict[Warp, int] = {}  # warp -> the phase its last arrival belongs to
        self.phase = 0

    def arrive(self, warp: Warp, relaxed: bool) -> None:
        if warp in self._arrived:
            raise EmulatorFault(
                "cluster_barrier_rearrive",
                f"{warp.name} arrives at the cluster's barrier twice in one phase",
            )
        self._arrived.add(warp)
        self._owed[warp] = self.phase
        machine = self._machine
        machine.events += 1
        if machine.race is not None:
            machine.race.cluster_arrive(warp, relaxed)
        self.check()

    def check(self) -> None:
        """Completes the phase if every warp that still lives has arrived."""
        machine = self._machine
        alive = {w for cta in machine.ctas for w in cta.warps if w.alive}
        if self._arrived and alive <= self._arrived:
            self._arrived = set()
            self.phase += 1
            if machine.race is not None:
                machine.race.cluster_phase()
            for cta in machine.ctas:
                machine.wake(("cluster",), cta)

    def passed(self, warp: Warp) -> bool:
        """Whether the phase that the warp arrived in is over."""
        if warp not in self._owed:
            raise EmulatorFault(
                "cluster_barrier_no_arrive", f"{warp.name} waits for a barrier it did not arrive at"
            )
        if self._owed[warp] == self.phase:
            return False
        del self._owed[warp]
        if self._machine.race is not None:
            self._machine.race.cluster_release([warp])
        return True


class Machine:
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
        self.params = self._parameter_block()
        self._maps: dict[bytes, TensorMap] = {}
        self._current: Warp | None = None
        self._pending = clusters(launch)
        self.ctas_taken = 0  # of the grid, by clusters that ran or were cancelled
        self._mask = 0
        self.lanes = 0  # those that execute the instruction

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
        if 0 <= offset <= self.program.entry.param_bytes - _TENSOR_MAP_BYTES:
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

    def _run_ready(self) -> None:
        """Turns, until no warp can run."""
        ready, asyncs, steps = self.ready, self.asyncs, self.ready.steps
        limit = self.max_instructions
        while ready:
            if asyncs:
                asyncs.sometimes()
            warp = ready.next()
            self._current = warp
            for _ in range(steps):
                if not self._step(warp):
                    break
            else:
                ready.again(warp)
            if limit is not None and self.executed > limit:
                raise EmulatorFault(
                    "instruction_limit",
                    f"stopped after {self.executed} thread-instructions, max_instructions is"
                    f" {limit}",
                    executed=self.executed,
                )

    def _step(self, warp: Warp) -> bool:
        """Executes one segment of one fragment; False if none of the warp's can run any more."""
        fragments = warp.fragments
        if len(fragments) == 1:
            fragment = fragments[0]
            if fragment.wait is not None:
                return False
        else:
            lowest = _lowest(fragments)
            if lowest is None:
                return False
            fragment = lowest
        warp.pc = pc = fragment.pc
        self._mask = mask = fragment.mask
        segment = self.program.segments[pc]
        if segment.checks or segment.marks:
            _check_written(warp, segment, mask)
        if warp.pending_ld and segment.ld_touches:
            self._touch_loads(warp, segment)
        if not segment.native:
            self._execute(warp, fragment, segment, mask)
        elif segment.converged and (mask != warp.alive or segment.source_lanes & ~mask):
            if mask == warp.alive:
                raise shuffle_fault(segment.source_lanes & ~mask)
            self._converge(warp, fragment, segment, mask)
        else:
            taken = segment.run(warp.registers.address, mask, self._params_address)
            self.executed += segment.count * mask.bit_count()
            if segment.converged and self.race is not None:
                (self.race.warp_sync if segment.syncs else self.race.converged)(warp)
            if segment.branch == "none":
                fragment.pc = pc + 1
            elif segment.branch == "always" or taken == mask:
                fragment.pc = segment.target
            elif taken == 0:
                fragment.pc = pc + 1
            else:
                fragments.append(Fragment(taken, segment.target))
                fragment.mask = mask & ~taken
                fragment.pc = pc + 1
        fragments = warp.fragments
        if len(fragments) == 1:
            return fragments[0].wait is None
        warp.merge()
        return any(fragment.wait is None for fragment in warp.fragments)

    def _execute(self, warp: Warp, fragment: Fragment, segment: Segment, mask: int) -> None:
        """One machine instruction."""
        ins = segment.instrs[0]
        active = mask
        if ins.guard is not None:
            value = int(warp.preds[self.program.layout.pred(ins.guard.name)])
            active &= ~value if ins.guard.negated else value
        if active:
            if segment.converged and active != warp.alive:
                self._converge(warp, fragment, segment, active)
                return
            self.lanes = active
            if segment.converged and self.race is not None:
                self.race.converged(warp)
            wait = segment.run(warp, active)
            if wait is not None:
                if wait.retry is False:
                    self.executed += mask.bit_count()
                self._block(warp, fragment, wait, active)
                return
            if segment.leaves:
                self.executed += mask.bit_count()
                fragment.mask &= ~active
                fragment.pc += 1
                warp.fragments = [f for f in warp.fragments if f.mask]
                warp.wake_converging()
                if len(self.ctas) > 1:
                    self.cluster.check()
                return
        self.executed += mask.bit_count()
        fragment.pc += 1

    def _touch_loads(self, warp: Warp, segment: Segment) -> None:
        """Registers of a tcgen05.ld are used that wait::ld has not yet covered: wrong by the PTX
        text, while silicon's scoreboard holds the use until the load is complete. Those of a wgmma
        are undefined until it was waited for."""
        last = -1
        for k, load in enumerate(warp.pending_ld):
            if load.pc in segment.overwrites:
                code = "wgmma_operand_overwritten"
                self._not_waited(load, code, "an operand register", "written")
            if load.pc in segment.ld_touches and load.effect is not None:
                load.effect()
                load.effect = None
            if load.pc in segment.ld_uses:
                last = k
        if last < 0:
            return
        newest = warp.pending_ld[last]
        if self.options.profile == "isa" or newest.code == "wgmma_not_waited":
            self._not_waited(newest, newest.code, "a register", "used")
        for load in warp.pending_ld[: last + 1]:  # loads complete in order
            if load.effect is not None:
                load.effect()
        if self.race is not None:
            self.race.ld_complete(warp, warp.pending_ld[last].clock)
        del warp.pending_ld[: last + 1]

    def _not_waited(self, load: PendingLoad, code: str, what: str, done: str) -> NoReturn:
        ins = self.program.segments[load.pc].first
        wait = "wgmma.wait_group" if ins.mods[0] == "wgmma" else "tcgen05.wait::ld"
        raise EmulatorFault(
            code,
            f"{what} of the {'.'.join(ins.mods[:2])} at ptx:{ins.line} is {done} without {wait}",
            load=ins.text,
            load_source=self.program.module.source_of(ins),
        )

    def _converge(self, warp: Warp, fragment: Fragment, segment: Segment, active: int) -> None:
        if active != fragment.mask:
            raise EmulatorFault(
                "divergent_aligned",
                f"{segment.first.op} needs every lane of the warp, but its guard leaves out lanes"
                f" {fragment.mask & ~active:#010x}",
                active=active,
            )
        missing = warp.alive & ~active
        detail = (("waits_for", f"lanes {missing:#010x} to reach it"),)
        wait = Wait(("converge", warp.index), segment.first.op, detail=detail)
        self._block(warp, fragment, wait, active)

    def _block(self, warp: Warp, fragment: Fragment, wait: Wait, active: int) -> None:
        if active != fragment.mask and wait.retry:
            # The guarded lanes wait, the others go on.
            rest = Fragment(fragment.mask & ~active, fragment.pc + 1)
            fragment.mask = active
            warp.fragments.append(rest)
        fragment.wait = wait
        if wait.key[0] != "converge":
            warp.cta.waiting.setdefault(wait.key, []).append((warp, fragment))

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
        if fault.code == "instruction_limit":  # a livelock, perhaps: where does everybody stand?
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


def special_registers(machine: Machine, warp: Warp) -> dict[str, Any]:
    """Values of the special registers: one for the warp, or one a lane."""
    launch, cta, gpu = machine.launch, warp.cta, machine.gpu
    lane = np.arange(32, dtype=np.int64)
    bx, by, _ = launch.block
    tid = warp.index * 32 + lane
    cluster = launch.cluster
    vectors = {
        "tid": (tid % bx, tid // bx % by, tid // (bx * by)),
        "ntid": launch.block,
        "ctaid": cta.block,
        "nctaid": launch.grid,
        "clusterid": tuple(b // c for b, c in zip(cta.block, cluster, strict=True)),
        "nclusterid": tuple(g // c for g, c in zip(launch.grid, cluster, strict=True)),
        "cluster_ctaid": tuple(b % c for b, c in zip(cta.block, cluster, strict=True)),
        "cluster_nctaid": cluster,
    }
    one = np.int64(1)
    values: dict[str, Any] = {
        "%laneid": lane,
        "%warpid": warp.index,
        "%nwarpid": len(cta.warps),
        "%smid": cta.rank,
        "%nsmid": gpu.sm_count,
        "%gridid": 0,
        "%cluster_ctarank": cta.rank,
        "%cluster_nctarank": len(machine.ctas),
        "%is_explicit_cluster": int(cluster != (1, 1, 1)),
        "%dynamic_smem_size": launch.smem_bytes,
        "%total_smem_size": machine.smem_bytes,
        "%lanemask_eq": one << lane,
        "%lanemask_lt": (one << lane) - 1,
        "%lanemask_le": (one << lane + 1) - 1,
        "%lanemask_gt": 0xFFFFFFFF & ~((one << lane + 1) - 1),
        "%lanemask_ge": 0xFFFFFFFF & ~((one << lane) - 1),
    }
    for name, triple in vectors.items():
        values |= {f"%{name}.{axis}": v for axis, v in zip("xyz", triple, strict=True)}
    return values


def shuffle_fault(lanes: int) -> EmulatorFault:
    """For a native block whose shfl reads lanes that have returned."""
    return EmulatorFault(
        "shfl_inactive_lane",
        f"a shfl reads lane {(lanes & -lanes).bit_length() - 1}, which does not take part: the"
        " result is undefined",
        lanes=lanes,
    )


def _lowest(fragments: list[Fragment]) -> Fragment | None:
    best = None
    for fragment in fragments:
        if fragment.wait is None and (best is None or fragment.pc < best.pc):
            best = fragment
    return best


def _check_written(warp: Warp, segment: Segment, mask: int) -> None:
    for name in segment.checks:
        if warp.unwritten[name] & mask:
            raise EmulatorFault(
                "register_unwritten_read",
                f"register {name} is read by lanes {warp.unwritten[name] & mask:#010x}, which"
                " never wrote it",
                register=name,
            )
    for name in segment.marks:
        warp.unwritten[name] &= ~mask


def _smem_bytes(program: Program, launch: Launch) -> int:
    """The CTA's part of the shared window: static variables, alignment, dynamic bytes."""
    dynamic = [v.name for v in program.entry.shared if v.extern]
    start = (
        program.symbols[dynamic[0]] - SHARED_WINDOW_BASE if dynamic else program.static_smem_bytes
    )
    return start + launch.smem_bytes
