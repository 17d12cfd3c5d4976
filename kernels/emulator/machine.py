"""The machine: runs one launch of one PTX entry, CTA after CTA, warps in turn.

Scheduling is round-robin over the warps that can run, one segment a turn: deterministic. Visibility
is eager: copies, MMAs and Tensor Memory accesses take effect when they are issued. A warp that
waits is woken by the event it waits for, never polled. CTAs of a launch run one after the other, so
a kernel whose CTAs wait for each other is reported as a deadlock (see LIMITATIONS.md).
"""

from __future__ import annotations

import ctypes
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from . import deadlock
from .findings import EmulatorFault, Finding, UnsupportedPTX
from .gpus import GpuModel
from .host_runtime import Launch
from .isa import bind
from .isa.table import Wait
from .memory import GlobalMemory
from .program import SHARED_WINDOW_BASE, Program, Segment, decode
from .ptx import Module, parse
from .state import Cta, Fragment, Warp
from .tensormap import TensorMap

_TENSOR_MAP_BYTES = 128


@dataclass
class LaunchResult:
    """thread_instructions: PTX instructions by active lanes; seconds: emulating, not decoding."""

    thread_instructions: int = 0
    ctas: int = 0
    seconds: float = 0.0
    decode_seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)


@lru_cache(maxsize=8)
def _parse_cached(ptx: str) -> Module:
    return parse(ptx)


_programs: OrderedDict[tuple[str, str], Program] = OrderedDict()


def load(ptx: str, entry: str) -> Program:
    """The decoded entry, kept for the next launch of the same text."""
    key = (ptx, entry)
    if key in _programs:
        _programs.move_to_end(key)
        return _programs[key]

    def bind_segment(program: Program, segment: Segment) -> Any:
        handler, segment.converged = bind(program, segment.index, segment.first)
        return handler

    _programs[key] = decode(_parse_cached(ptx), entry, bind_segment)
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
) -> LaunchResult:
    """Runs every CTA of a launch; stops at the first finding. Raises `UnsupportedPTX`."""
    started = time.perf_counter()
    program = load(ptx, launch.kernel)
    decoded = time.perf_counter()
    machine = Machine(program, launch, gpu, memory, roles or {}, max_instructions)
    result = LaunchResult(decode_seconds=decoded - started)
    grid = launch.grid
    total = grid[0] * grid[1] * grid[2]
    for number in range(total):
        block = (number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1]))
        finding = machine.run_cta(block)
        result.ctas += 1
        if finding is not None:
            result.findings.append(finding)
            break
        if progress is not None:
            progress((number + 1) / total)
    result.thread_instructions = machine.executed
    result.seconds = time.perf_counter() - decoded
    return result


class _InstructionLimit(EmulatorFault):
    pass


class Machine:
    """State shared by the CTAs of a launch, and the scheduler."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        gpu: GpuModel,
        memory: GlobalMemory,
        roles: dict[int, str],
        max_instructions: int | None,
    ) -> None:
        if launch.cluster != (1, 1, 1):
            raise UnsupportedPTX(
                f"clusters of {launch.cluster} CTAs are not modelled; use (1, 1, 1)"
            )
        self.program = program
        self.launch = launch
        self.gpu = gpu
        self.gmem = memory
        self.roles = roles
        self.max_instructions = max_instructions
        self.executed = 0
        self.events = 0  # what may have changed a waiter's mind; see _give_up
        self.ready: deque[Warp] = deque()
        self.smem_bytes = _smem_bytes(program, launch)
        self.params = self._parameter_block()
        self._maps: dict[bytes, TensorMap] = {}

    def _parameter_block(self) -> ctypes.Array[ctypes.c_char]:
        entry = self.program.entry
        block = ctypes.create_string_buffer(max(entry.param_bytes, 1) + 128)
        # Parameters are aligned as declared (tensor maps to 64 bytes), also in host memory.
        self._params_address = (ctypes.addressof(block) + 127) // 128 * 128
        for param, data in zip(entry.params, self.launch.params, strict=True):
            if len(data) != param.nbytes:
                raise ValueError(
                    f"parameter {param.name}: {len(data)} bytes given, {param.nbytes} declared"
                )
            ctypes.memmove(self._params_address + param.offset, data, len(data))
        return block

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

    # -- one CTA ---------------------------------------------------------------------------------

    def run_cta(self, block: tuple[int, int, int]) -> Finding | None:
        """Runs a CTA to its end, or to its first finding."""
        cta = Cta(self, block, self.gmem)
        for warp in cta.warps:
            self._set_specials(warp)
            self._enqueue(warp)
        try:
            while True:
                self._run_ready()
                if not self._give_up(cta):
                    break
            if any(warp.fragments for warp in cta.warps):
                return deadlock.report(cta, self.program)
        except EmulatorFault as fault:
            return self._finding(fault, cta)
        finally:
            self.ready.clear()
        try:
            cta.check_exit()
        except EmulatorFault as fault:  # the CTA's, not a warp's
            details = fault.details
            return Finding(fault.code, fault.message, role="CTA exit", cta=block, details=details)
        return None

    def _set_specials(self, warp: Warp) -> None:
        lane = np.arange(32, dtype=np.uint32)
        bx, by, _ = self.launch.block
        tid = warp.index * 32 + lane
        at = {
            "tid": (tid % bx, tid // bx % by, tid // (bx * by)),
            "ntid": self.launch.block,
            "ctaid": warp.cta.block,
            "nctaid": self.launch.grid,
            "clusterid": warp.cta.block,
            "nclusterid": self.launch.grid,
            "cluster_ctaid": (0, 0, 0),
            "cluster_nctaid": (1, 1, 1),
        }
        scalars = {
            "laneid": lane,
            "warpid": warp.index,
            "nwarpid": len(warp.cta.warps),
            "smid": 0,
            "nsmid": self.gpu.sm_count,
            "gridid": 0,
            "cluster_ctarank": 0,
            "cluster_nctarank": 1,
            "is_explicit_cluster": 0,
            "dynamic_smem_size": self.launch.smem_bytes,
            "total_smem_size": self.smem_bytes,
            "lanemask_eq": 1 << lane,
            "lanemask_lt": (1 << lane) - 1,
            "lanemask_le": (2 << lane.astype(np.uint64)) - 1,
            "lanemask_gt": ~((2 << lane.astype(np.uint64)) - 1),
            "lanemask_ge": ~((1 << lane.astype(np.uint64)) - 1),
        }
        for name in self.program.specials:
            base, _, axis = name[1:].partition(".")
            if axis:
                value: Any = at[base]["xyz".index(axis)]
            elif base in scalars:
                value = scalars[base]
            else:
                raise UnsupportedPTX(f"special register {name} is not modelled")
            row = self.program.layout.row(name)
            warp.r32[row] = np.asarray(value).astype(np.uint64).astype(np.uint32)

    # -- scheduling --------------------------------------------------------------------------------

    def _enqueue(self, warp: Warp) -> None:
        if not warp.queued:
            warp.queued = True
            self.ready.append(warp)

    def wake(self, key: tuple[Any, ...], cta: Cta) -> None:
        """An event happened: the fragments that wait for it can run again."""
        for warp, fragment in cta.waiting.pop(key, ()):
            assert fragment.wait is not None
            if not fragment.wait.retry:
                fragment.pc += 1
            fragment.wait = None
            self._enqueue(warp)

    def _run_ready(self) -> None:
        ready, segments, params = self.ready, self.program.segments, self._params_address
        limit = self.max_instructions
        while ready:
            warp = ready.popleft()
            warp.queued = False
            self._current = warp
            fragments = warp.fragments
            if len(fragments) == 1:
                fragment = fragments[0]
                if fragment.wait is not None:
                    continue
            else:
                lowest = _lowest(fragments)
                if lowest is None:
                    continue
                fragment = lowest
            self._fragment = fragment
            mask = fragment.mask
            segment = segments[fragment.pc]
            if segment.checks or segment.marks:
                _check_written(warp, segment, mask)
            if segment.native:
                taken = segment.run(warp.registers.address, mask, params)
                self.executed += segment.count * mask.bit_count()
                if segment.branch == "none":
                    fragment.pc += 1
                elif segment.branch == "always" or taken == mask:
                    fragment.pc = segment.target
                elif taken == 0:
                    fragment.pc += 1
                else:
                    fragments.append(Fragment(taken, segment.target))
                    fragment.mask = mask & ~taken
                    fragment.pc += 1
            else:
                self._execute(warp, fragment, segment, mask)
            if limit is not None and self.executed > limit:
                raise _InstructionLimit(
                    "instruction_limit",
                    f"stopped after {self.executed} thread-instructions, max_instructions is"
                    f" {limit}",
                    executed=self.executed,
                )
            if len(warp.fragments) > 1:
                warp.merge()
            if not warp.queued and any(f.wait is None for f in warp.fragments):
                warp.queued = True
                ready.append(warp)

    def _execute(self, warp: Warp, fragment: Fragment, segment: Segment, mask: int) -> None:
        """One machine instruction."""
        ins = segment.first
        active = mask
        if ins.guard is not None:
            value = int(warp.preds[self.program.layout.pred(ins.guard.name)])
            active &= ~value if ins.guard.negated else value
        if active:
            if segment.converged and active != warp.alive:
                self._converge(warp, fragment, segment, active)
                return
            wait = segment.run(warp, active)
            if wait is not None:
                if wait.retry is False:
                    self.executed += mask.bit_count()
                self._block(warp, fragment, wait, active)
                return
            if ins.mods[0] in ("ret", "exit"):
                self.executed += mask.bit_count()
                fragment.mask &= ~active
                fragment.pc += 1
                warp.fragments = [f for f in warp.fragments if f.mask]
                warp.wake_converging()
                return
        self.executed += mask.bit_count()
        fragment.pc += 1

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
        self._block(
            warp, fragment, Wait(("converge", warp.index), segment.first.op, detail=detail), active
        )

    def _block(self, warp: Warp, fragment: Fragment, wait: Wait, active: int) -> None:
        if active != fragment.mask and wait.retry:
            # The guarded lanes wait, the others go on.
            rest = Fragment(fragment.mask & ~active, fragment.pc + 1)
            fragment.mask = active
            warp.fragments.append(rest)
        fragment.wait = wait
        if wait.key[0] != "converge":
            warp.cta.waiting.setdefault(wait.key, []).append((warp, fragment))

    def _give_up(self, cta: Cta) -> bool:
        """Nothing can run. A try_wait may fail spuriously, so those outside spin loops now do, one
        at a time; False if there is none, or if giving up has led back here without any event."""
        if self.events == cta.gave_up_at:
            return False
        for key, waiters in list(cta.waiting.items()):
            for warp, fragment in waiters:
                if fragment.wait is not None and fragment.wait.soft:
                    waiters.remove((warp, fragment))
                    if not waiters:
                        del cta.waiting[key]
                    cta.gave_up_at = self.events
                    fragment.wait = None
                    warp.timed_out = True
                    self._enqueue(warp)
                    return True
        return False

    # -- findings ----------------------------------------------------------------------------

    def _finding(self, fault: EmulatorFault, cta: Cta) -> Finding:
        warp, fragment = self._current, self._fragment
        segment = self.program.segments[fragment.pc]
        ins = segment.first
        return Finding(
            code=fault.code,
            message=fault.message,
            role=warp.name,
            cta=cta.block,
            warp=warp.index,
            ptx_line=ins.line,
            source=self.program.module.source_of(ins),
            details={**fault.details, "instruction": ins.text, "lanes": fragment.mask},
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
