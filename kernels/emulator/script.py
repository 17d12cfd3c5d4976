"""Run a script with a modelled GPU in the place of a real one: `python -m kernels.emulator run`."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from kernels.emulator.api import stand_in
from kernels.emulator.findings import EmulationError, UnsupportedPTX
from kernels.emulator.host_runtime import UnsupportedLaunch
from kernels.emulator.report import Report, count, finding_lines, speed
from kernels.emulator.running import SUPPORTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.emulator run",
        description="Run a Python script as it stands, with a modelled GPU in the place of a real "
        "one: CuTe DSL kernels that it compiles and launches run on the emulator, and torch has a "
        "CUDA device. Exit status 1 for a finding, or what the script exits with.",
    )
    parser.add_argument("--gpu", default="b200", help="a name or an architecture (%(default)s)")
    for name in ("schedule", "visibility", "profile", "unwritten"):
        choices = SUPPORTED[name]
        parser.add_argument(f"--{name}", choices=choices, default=choices[0])
    parser.add_argument("--seed", type=int, default=0, help="of the scheduler (%(default)s)")
    parser.add_argument("--no-checks", action="store_true", help="look for no races; faster")
    parser.add_argument(
        "--max-instructions",
        type=int,
        metavar="N",
        help="stop a call with a finding after N thread-instructions",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="report findings at the end, do not stop at one"
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return parser


def summary(reports: Sequence[Report], complete: bool = True) -> str:
    """What ran, and the findings of each call that has some. complete: the last call is among them,
    and was not broken off."""
    instructions = sum(report.thread_instructions for report in reports)
    seconds = sum(report.seconds for report in reports)
    calls = count(len(reports), "emulated call")
    kernels = count(sum(len(report.launches) for report in reports), "kernel")
    lines = [f"{calls}, {kernels}: {speed(instructions, seconds)}"]
    for index, report in enumerate(reports, 1):
        if report.findings:
            lines.append(f"call {index}, {report.function}: {finding_lines(report.findings)[0]}")
            lines += [f"  {line}" for line in finding_lines(report.findings)[1:]]
    if complete and all(report.ok for report in reports):
        lines.append("no findings")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Runs a script with a modelled GPU in the place of a real one; returns the exit status."""
    options = _parser().parse_args(argv)
    if not options.script.is_file():
        print(f"{options.script}: there is no such script", file=sys.stderr)
        return 2
    sys.argv = [str(options.script), *options.arguments]
    sys.path.insert(0, str(options.script.resolve().parent))
    status, complete = 0, True
    with stand_in(
        options.gpu,
        keep_going=options.keep_going,
        schedule=options.schedule,
        visibility=options.visibility,
        profile=options.profile,
        unwritten=options.unwritten,
        seed=options.seed,
        checks=not options.no_checks,
        max_instructions=options.max_instructions,
    ) as gpu:
        try:
            runpy.run_path(str(options.script), run_name="__main__")
        except EmulationError:
            pass  # in the reports
        except (UnsupportedPTX, UnsupportedLaunch) as refusal:
            print(f"not modelled: {refusal}", file=sys.stderr)
            status, complete = 1, False
        except KeyboardInterrupt:
            print("interrupted: what the script computes is partial", file=sys.stderr)
            status, complete = 130, False  # 128 + SIGINT, as shells have it
        except SystemExit as end:
            if end.code is not None and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
                status = 1
            else:
                status = end.code or 0
    print(summary(gpu.reports, complete), file=sys.stderr)
    return status if gpu.ok else 1
