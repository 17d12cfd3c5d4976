"""One launch over several processes, for CTAs that share no global writes.

The grid's clusters are dealt to forked workers in turn. Each works on its own copy of global
memory (copy on write) and sends back the bytes that it changed; the parent writes them when all
workers are done, so that an interrupted launch leaves the tensors as they were. Two workers that
changed the same byte did share writes: that is an error, and nothing is written. What a worker
wrote is not seen by the others, so a kernel whose CTAs read each other's results needs
``processes=1``: with checks on, a worker that accessed what another one changed is an error too
(without checks nobody knows what was read). A fork waits while another thread is inside numpy's
BLAS (OpenBLAS takes its lock before a fork), so call it where none keeps that busy.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import machine
from .checks.previous_grid import Footprint
from .gpus import GpuModel
from .host_runtime import Launch
from .machine import LaunchResult, clusters, load
from .memory import GlobalMemory
from .native import matmul
from .schedule import Options

# Per allocation: (index of the allocation, offsets of changed bytes, their values).
Changes = list[tuple[int, NDArray[np.int64], NDArray[np.uint8]]]
# Per tensor accessed: first address, bytes of a cell, and of each cell whether it was.
Touched = list[tuple[int, int, NDArray[np.bool_]]]
Answer = tuple[LaunchResult, Changes, Touched]


def run_parallel(
    ptx: str,
    launch: Launch,
    gpu: GpuModel,
    memory: GlobalMemory,
    processes: int,
    *,
    options: Options,
    roles: dict[int, str] | None = None,
    max_instructions: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> LaunchResult:
    """As `machine.run_launch`, over at most ``processes`` workers; the first finding in grid order
    is reported. Raises ValueError where CTAs share global writes or launch control."""
    program = load(ptx, launch.kernel, launch.cluster != (1, 1, 1))  # once, before the fork
    matmul.functions()  # as well
    if any(ins.op.startswith("clusterlaunchcontrol.") for ins in program.entry.body):
        raise ValueError(
            f"processes={processes}: {launch.kernel} takes clusters over with"
            " clusterlaunchcontrol, which needs the whole grid in one process; use processes=1"
        )
    shares = deal(launch, processes, options)
    settings = {"roles": roles, "max_instructions": max_instructions}
    fork = multiprocessing.get_context("fork")
    workers, pipes = [], []
    try:
        for share in shares:
            receive, send = fork.Pipe(duplex=False)
            mine = Options(**{**vars_of(options), "ctas": share})
            args = (send, ptx, launch, gpu, memory, mine, settings)
            worker = fork.Process(target=_work, args=args, daemon=True)
            worker.start()
            send.close()
            workers.append(worker)
            pipes.append(receive)
        answers = _collect(pipes, launch, progress)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note("the emulation was interrupted; the tensors are as they were")
        raise
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
            worker.join()
    changes = [changes for _, changes, _ in answers]
    _refuse_shared_writes(memory, changes, launch)
    _refuse_shared_results(memory, changes, [touched for _, _, touched in answers], launch)
    for index, at, values in (part for worker in changes for part in worker):
        memory.allocations[index].data[at] = values
    return merge([result for result, _, _ in answers])


def vars_of(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


def deal(launch: Launch, processes: int, options: Options) -> list[frozenset[int]]:
    """The linear indices of each worker's CTAs: clusters in turn, for neighbours cost alike."""
    gx, gy, _ = launch.grid
    hands: list[set[int]] = [set() for _ in range(processes)]
    kept = [b for b in clusters(launch) if not options.leaves_out(b, launch.grid)]
    for number, blocks in enumerate(kept):
        hands[number % processes].update(x + gx * (y + gy * z) for x, y, z in blocks)
    return [frozenset(hand) for hand in hands if hand]


def _work(
    pipe: Connection,
    ptx: str,
    launch: Launch,
    gpu: GpuModel,
    memory: GlobalMemory,
    options: Options,
    settings: dict[str, Any],
) -> None:
    """A worker's life: run its share, send what changed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of it and ends the workers
    try:
        # The launch adds its parameters and variables to the list, wherever they happen to lie.
        before = [(a, a.data.copy()) for a in memory.allocations]
        report = lambda fraction: pipe.send(("progress", fraction))
        # Looked up now: a name bound while a test had put something in its place would stay that.
        run = machine.run_launch
        result = run(ptx, launch, gpu, memory, options=options, progress=report, **settings)
        changes: Changes = []
        for index, (allocation, old) in enumerate(before):
            at = np.flatnonzero(old != allocation.data)
            if at.size:
                changes.append((index, at, allocation.data[at]))
        pipe.send(("done", (result, changes, _touched(memory))))
    except BaseException as error:  # sent to the parent, which raises it
        try:
            pickle.dumps(error)
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(("error", error))
    finally:
        pipe.close()


def _touched(memory: GlobalMemory) -> Touched:
    """What the launch just run in this process has accessed; nothing if checks were off."""
    footprint = memory.footprint
    return footprint.touched() if isinstance(footprint, Footprint) else []


def _collect(
    pipes: list[Connection], launch: Launch, progress: Callable[[float], None] | None
) -> list[Answer]:
    answers: dict[Connection, Answer] = {}
    done = dict.fromkeys(pipes, 0.0)
    while len(answers) < len(pipes):
        for pipe in wait([p for p in pipes if p not in answers]):
            assert isinstance(pipe, Connection)
            try:
                kind, value = pipe.recv()
            except EOFError:
                raise RuntimeError(
                    f"a worker process of {launch.kernel} died (out of memory?); use processes=1"
                ) from None
            if kind == "error":
                raise value
            if kind == "done":
                answers[pipe] = value
            else:
                done[pipe] = value
                if progress is not None:
                    progress(min(sum(done.values()) / len(pipes), 1.0))
    return [answers[pipe] for pipe in pipes]


def _refuse_shared_results(
    memory: GlobalMemory, changes: list[Changes], touched: list[Touched], launch: Launch
) -> None:
    """Raises ValueError if a worker accessed a byte that another one changed."""
    for writer, changed in enumerate(changes):
        for index, at, _ in changed:
            allocation = memory.allocations[index]
            addresses = allocation.base + at
            for other, tensors in enumerate(touched):
                if other == writer:
                    continue
                for base, unit, flags in tensors:
                    cells = (addresses - base) // unit
                    inside = (cells >= 0) & (cells < flags.size)
                    met = addresses[inside][flags[cells[inside]]]
                    if met.size:
                        raise ValueError(
                            f"a CTA of {launch.kernel} accessed bytes of {allocation} that a CTA in"
                            f" another process changed, the first at {int(met[0]):#x}: what one"
                            " process writes the others do not see; use processes=1. The tensors"
                            " are as they were"
                        )


def _refuse_shared_writes(memory: GlobalMemory, changes: list[Changes], launch: Launch) -> None:
    """Raises ValueError if two workers changed the same byte."""
    by_allocation: dict[int, list[NDArray[np.int64]]] = {}
    for index, at, _ in (part for worker in changes for part in worker):
        by_allocation.setdefault(index, []).append(at)
    for index, parts in by_allocation.items():
        every = np.concatenate(parts)
        unique, counts = np.unique(every, return_counts=True)
        if unique.size != every.size:
            allocation = memory.allocations[index]
            first = allocation.base + int(unique[counts > 1][0])
            raise ValueError(
                f"CTAs of {launch.kernel} in different processes wrote the same bytes of"
                f" {allocation}, the first at {first:#x}: the CTAs share global writes; use"
                " processes=1. The tensors are as they were"
            )


def merge(results: list[LaunchResult]) -> LaunchResult:
    """One result: sums, the longest time, and the finding of the earliest CTA."""
    findings = [finding for result in results for finding in result.findings]
    findings.sort(key=lambda f: tuple(reversed(f.cta or (0, 0, 0))))
    return LaunchResult(
        thread_instructions=sum(r.thread_instructions for r in results),
        ctas=sum(r.ctas for r in results),
        seconds=max((r.seconds for r in results), default=0.0),
        decode_seconds=max((r.decode_seconds for r in results), default=0.0),
        findings=findings[:1],
    )
