"""How a run is asked for (`Settings`), and a host function's launches run one after another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any

from kernels.emulator.findings import Finding
from kernels.emulator.gpus import GpuModel
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
    "unwritten": ("finding", "poison"),
}
MAX_PROCESSES = 256


@dataclass(frozen=True)
class Settings:
    """How launches are run: the arguments of `emulate` that are not the function's.

    Raises ValueError for a choice that is not supported. `roles` becomes a dict of warp to name.
    """

    gpu: GpuModel
    seed: int = 0
    schedule: str = "round_robin"
    visibility: str = "eager"
    checks: bool = True
    profile: str = "silicon"
    roles: Any = None
    processes: int = 1
    max_instructions: int | None = None
    progress: Progress | None = None
    record: bool = False
    trace: bool = False
    ctas: Any = None
    unwritten: str = "finding"

    def __post_init__(self) -> None:
        for name in ("seed", "processes", "max_instructions"):  # numpy's integers are integers too
            value = getattr(self, name)
            if hasattr(value, "__index__") and not isinstance(value, bool):
                object.__setattr__(self, name, index(value))
        _check_choices(
            {name: getattr(self, name) for name in SUPPORTED}, self.seed, self.max_instructions
        )
        _check_processes(self.processes, self.record, self.trace)
        object.__setattr__(self, "roles", role_names(self.roles))
        object.__setattr__(self, "ctas", _chosen_ctas(self.ctas))

    @property
    def options(self) -> Options:
        """What the machine is told."""
        return Options(
            self.seed,
            self.schedule,
            self.visibility,
            self.checks,
            self.profile,
            self.record,
            self.ctas,
            self.trace,
            self.unwritten,
        )

    def report(
        self, function: str, ptx: str, launches: Sequence[Launch], compile_seconds: float
    ) -> Report:
        """Run a host function's launches and report."""
        return Report(
            function=function,
            gpu=self.gpu,
            launches=run_launches(ptx, launches, self),
            seed=self.seed,
            schedule=self.schedule,
            visibility=self.visibility,
            profile=self.profile,
            compile_seconds=compile_seconds,
        )


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


def role_names(roles: Roles) -> dict[int, str]:
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


# --- Running --------------------------------------------------------------------------------------


def run_launches(
    ptx: str, launches: Sequence[Launch], settings: Settings
) -> tuple[LaunchReport, ...]:
    """Run the launches in order, up to and including the first that has a finding."""
    reports: list[LaunchReport] = []
    left = settings.max_instructions
    before: object | None = None  # what the last launch touched
    for number, launch in enumerate(launches):
        if any(report.findings for report in reports):
            reports.append(LaunchReport(launch, ran=False))
            continue
        findings = check_launch(launch, settings.gpu)
        if findings:
            reports.append(LaunchReport(launch, tuple(findings)))
            continue
        launch = with_cluster(launch, settings.seed)
        progress = _part(settings.progress, number, len(launches))
        memory = _memory(launch)
        if launch.programmatic_stream_serialization:
            memory.before = before
        reports.append(_run_launch(ptx, launch, settings, left, progress, memory))
        before = memory.footprint
        if left is not None:
            left = max(left - reports[-1].thread_instructions, 1)
    if settings.progress is not None:
        settings.progress(1.0)
    return tuple(reports)


def with_cluster(launch: Launch, seed: int) -> Launch:
    """The launch in clusters of one kind, where the device may choose: preferred ones if the seed
    is even, regular ones if it is odd. Either alone is what a device may do, and each kind counts
    its clusters as if the grid had no other (driver_types.h, preferredClusterDimension)."""
    if launch.preferred_cluster is None or seed % 2:
        return launch
    return replace(launch, cluster=launch.preferred_cluster)


def _memory(launch: Launch) -> Any:
    from kernels.emulator.memory import GlobalMemory

    memory = GlobalMemory()
    for allocation in launch.allocations:
        memory.add(allocation.base, allocation.nbytes, allocation.name)
    return memory


def _run_launch(
    ptx: str,
    launch: Launch,
    settings: Settings,
    limit: int | None,
    progress: Progress | None,
    memory: Any,
) -> LaunchReport:
    """Run one launch that the driver would take, at most `limit` thread-instructions of it."""
    from kernels.emulator.machine import run_launch

    last = launch_ctas(launch) - 1
    if settings.ctas is not None and max(settings.ctas) > last:
        raise ValueError(
            f"ctas: {max(settings.ctas)} is not in the grid of {launch.kernel}, whose"
            f" {last + 1} CTAs are 0 to {last}"
        )
    several = min(settings.processes, last + 1) > 1
    run: Any = run_launch
    if several:
        from kernels.emulator.parallel import run_parallel

        run = partial(run_parallel, processes=settings.processes)
    try:
        result = run(
            ptx,
            launch,
            settings.gpu,
            memory,
            options=settings.options,
            roles=settings.roles,
            max_instructions=limit,
            progress=progress,
        )
    except KeyboardInterrupt as interrupt:
        if not several:
            interrupt.add_note("the emulation was interrupted; the tensors are partial")
        raise
    return LaunchReport(
        launch,
        tuple(result.findings),
        result.thread_instructions,
        result.ctas,
        result.seconds,
        records=result.records,
        trace=result.trace,
    )


def _part(progress: Progress | None, number: int, total: int) -> Progress | None:
    """Progress of one launch as progress of them all."""
    if progress is None:
        return None
    return lambda fraction: progress((number + fraction) / total)


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
    for cluster in filter(None, (launch.cluster, launch.preferred_cluster)):
        ctas = cluster[0] * cluster[1] * cluster[2]
        if not 1 <= ctas <= gpu.max_cluster_ctas or any(
            size < 1 or grid % size for grid, size in zip(launch.grid, cluster, strict=True)
        ):
            refuse(
                "launch_bad_cluster",
                f"cluster {cluster} in grid {launch.grid}: a cluster has at most "
                f"{gpu.max_cluster_ctas} CTAs and divides the grid",
                cluster=cluster,
            )
    preferred = launch.preferred_cluster or launch.cluster
    if not findings and any(p % c for p, c in zip(preferred, launch.cluster, strict=True)):
        refuse(
            "launch_bad_cluster",
            f"preferred cluster {preferred}: each size is a multiple of cluster {launch.cluster}'s",
            cluster=preferred,
        )
    return findings
