"""`emulate`: compile a host function, catch its launches, run each on the modelled SM, report."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from kernels.emulator.findings import Finding
from kernels.emulator.gpus import GpuModel, gpu_model
from kernels.emulator.host_runtime import Launch
from kernels.emulator.report import LaunchReport, Report
from kernels.emulator.schedule import POLICIES, VISIBILITIES, Options

Roles = Mapping[int, str] | Sequence[str] | None
Progress = Callable[[float], None]

# What this version can do for each choice that `emulate` offers.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "schedule": POLICIES,
    "visibility": VISIBILITIES,
    "checks": (True, False),
    "profile": ("silicon", "isa"),
}
MAX_PROCESSES = 256


def emulate(
    fn: Any,
    *args: Any,
    gpu: str | GpuModel = "b200",
    seed: int = 0,
    schedule: str = "round_robin",
    visibility: str = "eager",
    checks: bool = True,
    profile: str = "silicon",
    roles: Roles = None,
    processes: int = 1,
    max_instructions: int | None = None,
    progress: Progress | None = None,
    record: bool = False,
    trace: bool = False,
    ctas: Sequence[int] | None = None,
) -> Report:
    """Run a `@cute.jit` function's kernels on a modelled SM, instruction by instruction.

    fn: a function, bound method, or object whose `__call__` is `@cute.jit`.
    args: what `fn` takes, with CPU tensors where CUDA tensors would stand; kernels read and write
        them in place. A `stream` may be None or left out.
    gpu: a name ("b200") or an architecture ("sm_100a"). seed: of the scheduler.
    roles: names of a CTA's warps, by index, for findings; "warp N" where there is none.
    processes: workers that share out the grid, for CTAs that share no global writes (ValueError
        where they do; the tensors then stay as they were).
    max_instructions: stop with a finding after this many thread-instructions of all launches.
    progress: called with the fraction done, 0.0 to 1.0, from the calling thread.
    record: keep what a cycle model needs, as `records.Records` on each `LaunchReport`.
    trace: keep a timeline of warps and engines, for `Report.write_trace`.
    ctas: run only these CTAs of each launch, by linear index (and those of their clusters); what
        the others would write stays as it was.

    Findings do not raise: see `Report.ok` and `Report.raise_if_findings`. A launch with findings is
    the last one that runs. Raises ValueError for a choice that is not supported, TypeError for a
    wrong `fn` or arguments, UnsupportedPTX and UnsupportedLaunch for what is not modelled.
    """
    model = gpu_model(gpu)
    settings = {"schedule": schedule, "visibility": visibility, "profile": profile}
    _check_choices({**settings, "checks": checks}, seed, max_instructions)
    _check_processes(processes, record, trace)
    names = _role_names(roles)
    chosen = _chosen_ctas(ctas)

    from kernels.emulator.capture import HostArguments

    arguments = HostArguments(fn, args)
    compiled, compile_seconds = _compile_cached(fn, arguments, model)
    launches = compiled.launch_bound(arguments)
    reports = _run_launches(
        compiled.ptx,
        launches,
        model,
        options=Options(
            seed,
            schedule,
            visibility,
            checks,
            profile,
            record,
            chosen,
            trace,
        ),
        processes=processes,
        roles=names,
        max_instructions=max_instructions,
        progress=progress,
    )
    return Report(
        function=function_name(fn),
        gpu=model,
        launches=reports,
        seed=seed,
        compile_seconds=compile_seconds,
        **settings,
    )


# --- Arguments ----------------------------------------------------------------------------------


def _chosen_ctas(ctas: Any) -> frozenset[int] | None:
    if ctas is None:
        return None
    if isinstance(ctas, str) or not isinstance(ctas, Iterable):
        raise ValueError(f"ctas={ctas!r}: must be linear indices of CTAs, such as [0, 5]")
    chosen = list(ctas)
    if not chosen or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in chosen):
        raise ValueError(f"ctas={ctas!r}: must be linear indices of CTAs, such as [0, 5]")
    return frozenset(chosen)


def launch_ctas(launch: Launch) -> int:
    """CTAs of a launch's grid."""
    return launch.grid[0] * launch.grid[1] * launch.grid[2]


def _check_processes(processes: Any, record: bool, trace: bool) -> None:
    if isinstance(processes, bool) or not isinstance(processes, int):
        raise ValueError(f"processes={processes!r}: must be an integer, 1 or more")
    if not 1 <= processes <= MAX_PROCESSES:
        raise ValueError(f"processes={processes}: must be from 1 to {MAX_PROCESSES}")
    if processes > 1 and record:
        raise ValueError(f"processes={processes} with record=True: records need processes=1")
    if trace and (record or processes > 1):
        raise ValueError("trace=True: a run that is traced has processes=1 and is not recorded")


def _check_choices(choices: dict[str, Any], seed: Any, max_instructions: Any) -> None:
    for name, value in choices.items():
        supported = SUPPORTED[name]
        if not any(type(value) is type(other) and value == other for other in supported):
            raise ValueError(
                f"{name}={value!r} is not supported; this version supports "
                f"{' or '.join(map(repr, supported))}"
            )
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed={seed!r}: must be an integer, 0 or more")
    if max_instructions is not None and (
        isinstance(max_instructions, bool)
        or not isinstance(max_instructions, int)
        or max_instructions < 1
    ):
        raise ValueError(
            f"max_instructions={max_instructions!r}: must be an integer above 0, or None"
        )


def _role_names(roles: Roles) -> dict[int, str]:
    """Warp index to name; raises ValueError for anything but names of warps."""
    if roles is None:
        return {}
    pairs = roles.items() if isinstance(roles, Mapping) else enumerate(roles)
    names = dict(pairs)
    for warp, name in names.items():
        if isinstance(warp, bool) or not isinstance(warp, int) or warp < 0:
            raise ValueError(f"roles: {warp!r} is not the index of a warp (0, 1, ...)")
        if isinstance(roles, str) or not isinstance(name, str):
            raise ValueError(f"roles: warp {warp} is called {name!r}; a role is a string")
    return names


def function_name(fn: Any) -> str:
    """What to call the host function in a report."""
    if inspect.isfunction(fn) or inspect.ismethod(fn):
        return str(fn.__qualname__).removeprefix("<locals>.")
    return type(fn).__qualname__


# --- Compiling once -----------------------------------------------------------------------------

_CACHE_SIZE = 32
_cache: OrderedDict[Any, Any] = OrderedDict()
_cache_lock = threading.Lock()


def clear_cache() -> None:
    """Forget compiled kernels; needed after patching something that a kernel's source calls."""
    with _cache_lock:
        _cache.clear()


def _compile_cached(fn: Any, arguments: Any, gpu: GpuModel) -> tuple[Any, float]:
    """The compiled kernel for these argument types, and the seconds spent (0.0 when reused)."""
    from kernels.emulator.capture import compile_bound

    key = (_function_key(fn), arguments.key, gpu)
    with _cache_lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key], 0.0
    compiled = compile_bound(fn, arguments, gpu)
    with _cache_lock:
        # Compiling may leave attributes on the object; it serves the object as it is now, too.
        for each in (key, (_function_key(fn), arguments.key, gpu)):
            _cache[each] = compiled
        while len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
    return compiled, compiled.seconds


class _Identity:
    """Key of an object by identity and by what its attributes are now; keeps both alive.

    Attributes that are numbers or strings count by value, all others by identity.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._attributes = dict(getattr(value, "__dict__", {}))

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Identity)
            and self._value is other._value
            and self._attributes.keys() == other._attributes.keys()
            and all(
                item is other._attributes[name] or _same_plain(item, other._attributes[name])
                for name, item in self._attributes.items()
            )
        )


def _same_plain(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, (bool, int, float, str, bytes)) and bool(a == b)


def _function_key(fn: Any) -> Any:
    """Functions by identity; objects by value where they define one and cannot change."""
    if inspect.ismethod(fn):
        return (fn.__func__, _function_key(fn.__self__))
    if inspect.isfunction(fn):
        return fn
    params = getattr(type(fn), "__dataclass_params__", None)
    if is_dataclass(fn) and params is not None and params.frozen and params.eq:
        try:
            hash(fn)
        except TypeError:  # a field that cannot be hashed
            return _Identity(fn)
        return (type(fn), fn)
    return _Identity(fn)


# --- Running ------------------------------------------------------------------------------------


def _run_launches(
    ptx: str,
    launches: Sequence[Launch],
    gpu: GpuModel,
    *,
    options: Options,
    processes: int,
    roles: dict[int, str],
    max_instructions: int | None,
    progress: Progress | None,
) -> tuple[LaunchReport, ...]:
    """Run the launches in order, up to and including the first that has a finding."""
    from kernels.emulator.machine import run_launch
    from kernels.emulator.memory import GlobalMemory
    from kernels.emulator.parallel import run_parallel

    reports: list[LaunchReport] = []
    left = max_instructions
    for index, launch in enumerate(launches):
        if any(report.findings for report in reports):
            reports.append(LaunchReport(launch, ran=False))
            continue
        findings = check_launch(launch, gpu)
        if findings:
            reports.append(LaunchReport(launch, tuple(findings)))
            continue
        memory = GlobalMemory()
        for allocation in launch.allocations:
            memory.add(allocation.base, allocation.nbytes, allocation.name)
        if options.ctas is not None and max(options.ctas) >= launch_ctas(launch):
            raise ValueError(
                f"ctas: {max(options.ctas)} is not in the grid of {launch.kernel}, whose"
                f" {launch_ctas(launch)} CTAs are 0 to {launch_ctas(launch) - 1}"
            )
        several = min(processes, launch_ctas(launch)) > 1
        run: Any = partial(run_parallel, processes=processes) if several else run_launch
        try:
            result = run(
                ptx,
                launch,
                gpu,
                memory,
                options=options,
                roles=roles,
                max_instructions=left,
                progress=_part(progress, index, len(launches)),
            )
        except KeyboardInterrupt as interrupt:
            if not several:
                interrupt.add_note("the emulation was interrupted; the tensors are partial")
            raise
        if left is not None:
            left = max(left - result.thread_instructions, 1)
        reports.append(
            LaunchReport(
                launch,
                tuple(result.findings),
                result.thread_instructions,
                result.ctas,
                result.seconds,
                records=result.records,
                trace=result.trace,
            )
        )
    if progress is not None:
        progress(1.0)
    return tuple(reports)


def _part(progress: Progress | None, index: int, total: int) -> Progress | None:
    """Progress of one launch as progress of them all."""
    if progress is None:
        return None
    return lambda fraction: progress((index + fraction) / total)


# CUDA C++ Programming Guide, technical specifications: grid x below 2^31, y and z below 2^16; block
# x and y up to 1024, z up to 64.
_GRID_LIMITS = (1 << 31, 1 << 16, 1 << 16)
_BLOCK_LIMITS = (1024, 1024, 64)


def check_launch(launch: Launch, gpu: GpuModel) -> list[Finding]:
    """What the CUDA driver would refuse about a launch (cudaErrorInvalidConfiguration and kin)."""
    findings: list[Finding] = []

    def refuse(code: str, message: str, **details: Any) -> None:
        findings.append(Finding(code, message, details={"kernel": launch.kernel, **details}))

    if any(not 1 <= n < limit for n, limit in zip(launch.grid, _GRID_LIMITS, strict=True)):
        refuse(
            "launch_bad_grid",
            f"grid {launch.grid}: each dimension is at least 1, x below 2^31, y and z below 2^16; "
            "host code must not launch for an empty problem",
            grid=launch.grid,
        )
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    if (
        any(not 1 <= n <= limit for n, limit in zip(launch.block, _BLOCK_LIMITS, strict=True))
        or threads > gpu.max_threads_per_cta
    ):
        refuse(
            "launch_bad_block",
            f"block {launch.block} is {threads} threads: {gpu.name} allows "
            f"{gpu.max_threads_per_cta} a CTA",
            block=launch.block,
        )
    if launch.smem_bytes > gpu.smem_per_cta_bytes:
        refuse(
            "launch_smem_too_large",
            f"{launch.smem_bytes} bytes of dynamic shared memory: {gpu.name} has "
            f"{gpu.smem_per_cta_bytes} for a CTA; use fewer stages or smaller tiles",
            smem_bytes=launch.smem_bytes,
        )
    ctas = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    if not 1 <= ctas <= gpu.max_cluster_ctas or any(
        size < 1 or grid % size for grid, size in zip(launch.grid, launch.cluster, strict=True)
    ):
        refuse(
            "launch_bad_cluster",
            f"cluster {launch.cluster} in grid {launch.grid}: a cluster has at most "
            f"{gpu.max_cluster_ctas} CTAs and divides the grid",
            cluster=launch.cluster,
        )
    return findings
