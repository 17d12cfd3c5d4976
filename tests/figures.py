"""Prints the project's figures as measured on this machine, each beside its bound: `make bench`.

    python -m tests.figures [NAME ...]

Every figure is taken in a process of its own, so that what it measures starts cold. The exit status
is 1 if a figure misses its bound. Times on a busy machine say little: run it on an idle one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fa4 import bench_reference

ROOT = Path(__file__).resolve().parent.parent
PROBLEM = ("--seqlen", "512", "--heads", "1", "--head-dim", "128", "--backend", "emulator")
DEMO = ("--input", "fa4/demo/smollm2_layer14.safetensors", "--causal")


@dataclass(frozen=True)
class Figure:
    """One measured number. `bound` is the largest value allowed, or the smallest if `at_least`."""

    what: str
    value: float
    unit: str
    bound: float
    at_least: bool = False

    @property
    def ok(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        relation = ">=" if self.at_least else "<="
        verdict = "ok" if self.ok else "MISSED"
        bound = f"{relation} {self.bound:g} {self.unit}"
        return f"{self.what:<70} {self.value:>9.3g} {self.unit:<8} {bound:<16} {verdict}"


@dataclass(frozen=True)
class Finished:
    """A child process that ended well: what it printed, its wall time and its peak memory."""

    stdout: str
    seconds: float
    peak_mb: float


def run(*arguments: str) -> Finished:
    """Runs this interpreter on the arguments, from the root of the checkout."""
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    with tempfile.TemporaryFile("w+") as out:
        start = time.perf_counter()
        command = [sys.executable, *arguments]
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, text=True) as child:
            _, status, usage = os.wait4(child.pid, 0)
            seconds = time.perf_counter() - start
            child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        stdout = out.read()
    if child.returncode:
        sys.exit(f"{' '.join(arguments)} ended with status {child.returncode}\n{stdout}")
    return Finished(stdout, seconds, usage.ru_maxrss * 1024 / 1e6)


def emulated() -> Iterator[Figure]:
    """One head of 512 tokens on the emulator, from a cold process."""
    done = run("-m", "fa4", "run", *PROBLEM, "--json")
    result: dict[str, Any] = json.loads(done.stdout)
    speed = result["thread_instructions"] / result["seconds"] / 1e6
    what = "emulated, 1 head x 512 x d128"
    yield Figure(f"{what}: cold process", done.seconds, "s", 10)
    yield Figure(f"{what}: peak memory", done.peak_mb, "MB", 1000)
    yield Figure(f"{what}: thread-instructions", speed, "M/s", 5, at_least=True)
    yield from errors(what, result)


LONG = ("--seqlen", "4096", "--heads", "1", "--head-dim", "128", "--backend", "emulator")
ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def long() -> Iterator[Figure]:
    """One head of 4096 tokens: checks on and off, one process and two, one BLAS thread each."""
    os.environ.update(ONE_BLAS_THREAD)
    runs = {
        "checks off": ("--no-checks",),
        "checks on": (),
        "checks off, 2 processes": ("--no-checks", "--processes", "2"),
    }
    seconds, peak = {}, 0.0
    for name, options in runs.items():
        done = run("-m", "fa4", "run", *LONG, *options, "--json")
        result = json.loads(done.stdout)
        seconds[name] = result["seconds"]
        peak = max(peak, done.peak_mb)
        if name == "checks off":
            speed = result["thread_instructions"] / result["seconds"] / 1e6
    what = "emulated, 1 head x 4096 x d128"
    yield Figure(f"{what}: checks off, thread-instructions", speed, "M/s", 20, at_least=True)
    yield Figure(f"{what}: checks off", seconds["checks off"], "s", 7)
    slower = seconds["checks on"] / seconds["checks off"]
    yield Figure(f"{what}: checks on over off", slower, "x", 3)
    faster = seconds["checks off"] / seconds["checks off, 2 processes"]
    yield Figure(f"{what}: 2 processes over 1", faster, "x", 1.7, at_least=True)
    yield Figure(f"{what}: peak memory", peak, "MB", 1000)


def errors(what: str, result: dict[str, Any]) -> Iterator[Figure]:
    """The errors of a run against float64, as the numbers rule bounds them."""
    largest = result["torch_max_abs_error"]
    bound = 1.5 * largest + 1e-5
    yield Figure(f"{what}: largest error", result["max_abs_error"], "", bound)
    yield Figure(f"{what}: RMS error", result["rms_error"], "", result["torch_rms_error"])
    yield Figure(f"{what}: largest LSE error", result["lse_max_abs_error"], "", 1e-3)


def demo() -> Iterator[Figure]:
    """What `make demo` runs after the install."""
    done = run("-m", "fa4", "run", *DEMO, "--backend", "emulator", "--json")
    yield Figure("demo: cold process", done.seconds, "s", 60)
    yield from errors("demo", json.loads(done.stdout))


def reference() -> Iterator[Figure]:
    """The CPU reference, 1 head of 8192 tokens, beside torch's own float32 attention."""
    for dtype, causal in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
        result = bench_reference.figures(dtype, causal)
        what = f"reference, 1 head x 8192 x d128, {dtype}{', causal' if causal else ''}"
        yield Figure(f"{what}: time over torch's", result["times_torch"], "x", 2)
        memory = result["peak_bytes_above_inputs"] / 1e6
        yield Figure(f"{what}: memory above inputs", memory, "MB", 300)


IMPORT = """
import time
import torch
start = time.perf_counter()
import fa4
print(time.perf_counter() - start)
"""


def imports() -> Iterator[Figure]:
    """What `import fa4` adds to `import torch`, the median of five processes."""
    seconds = statistics.median(float(run("-c", IMPORT).stdout) for _ in range(5))
    yield Figure("import fa4, after import torch", seconds, "s", 0.2)


FIGURES: dict[str, Callable[[], Iterator[Figure]]] = {
    "imports": imports,
    "reference": reference,
    "emulated": emulated,
    "long": long,
    "demo": demo,
}


def main() -> int:
    """Prints the figures asked for, all by default."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}")
    names = parser.parse_args().names or list(FIGURES)
    if unknown := [name for name in names if name not in FIGURES]:
        parser.error(f"unknown figure {unknown[0]!r}; there are {', '.join(FIGURES)}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    missed = 0
    for name in names:
        for figure in FIGURES[name]():
            print(figure, flush=True)
            missed += not figure.ok
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
