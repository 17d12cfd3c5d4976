"""`emulate`: compile a host function, catch its launches, run each on the modelled SM, report."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from kernels.emulator.gpus import GpuModel, gpu_model
from kernels.emulator.host_runtime import Launch
from kernels.emulator.report import Report
from kernels.emulator.running import Progress, Roles, Settings, function_name

if TYPE_CHECKING:
    from kernels.emulator.capture.standin import StandIn


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
    unwritten: str = "finding",
    memory: Sequence[Any] = (),
) -> Report:
    """Run a `@cute.jit` function's kernels on a modelled SM, instruction by instruction.

    fn: a function, bound method, or object whose `__call__` is `@cute.jit`.
    args: what `fn` takes, with CPU tensors where CUDA tensors would stand; kernels read and write
        them in place. A tensor has a dynamic layout; `from_dlpack(tensor)` says more of it, as
        `mark_compact_shape_dynamic` does. A `stream` may be None or left out.
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
    unwritten: "poison" lets threads load shared and local memory and use registers that nothing
        has written, as kernels do whose predicates keep the value from the result; what does use it
        becomes NaN. Engines may not, and Tensor Memory is no part of it.
    memory: CPU tensors that kernels reach by pointers alone (`make_ptr`, tables of addresses).

    Findings do not raise: see `Report.ok` and `Report.raise_if_findings`. A launch with findings is
    the last one that runs. Raises ValueError for a choice that is not supported, TypeError for a
    wrong `fn` or arguments, UnsupportedPTX and UnsupportedLaunch for what is not modelled.
    """
    settings = Settings(
        gpu_model(gpu),
        seed,
        schedule,
        visibility,
        checks,
        profile,
        roles,
        processes,
        max_instructions,
        progress,
        record,
        trace,
        ctas,
        unwritten,
    )
    from kernels.emulator.capture import HostArguments

    arguments = HostArguments(fn, args, memory)
    compiled, compile_seconds = _compile_cached(fn, arguments, settings.gpu)
    launches = compiled.launch_bound(arguments)
    return settings.report(function_name(fn), compiled.ptx, launches, compile_seconds)


@contextmanager
def stand_in(
    gpu: str | GpuModel = "b200", *, keep_going: bool = False, **options: Any
) -> Iterator[StandIn]:
    """A modelled GPU in the place of a real one while the block runs: code that compiles and
    launches CuTe DSL kernels for itself, or through a library, runs as it stands.

    `cute.compile`, `@cute.jit` functions called as they are and TVM-FFI functions run their kernels
    on the model, in the order of the calls; every stream is one. torch has a CUDA device whose
    tensors lie in CPU memory (of this thread; factories, `.cuda()`, `.to("cuda")`, `torch.cuda`).
    Kernels may touch what was shown to host code, by DLPack or `data_ptr()`, and still lives.
    `cute.testing.benchmark` calls its function once and returns NaN: the emulator knows no time.

    options: as of `emulate`. Yields a `StandIn` with a report for each call. A finding raises
    EmulationError, or with `keep_going` is in its report only; what the kernel should have written
    after it is then missing.
    """
    settings = Settings(gpu_model(gpu), **options)
    from kernels.emulator.capture.standin import standing_in

    def run(function: str, ptx: str, launches: Sequence[Launch]) -> Report:
        return settings.report(function, ptx, launches, 0.0)

    with standing_in(settings.gpu, run, keep_going) as session:
        yield session


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
