"""Proves the checks on a kernel: each of its synchronisations is broken in turn.

    python -m kernels.emulator mutate TARGET

TARGET is an import string, ``package.module:name``, of a function without arguments. It returns a
`Subject`, or the tuple ``(fn, args)`` or ``(fn, args, check)`` that one is made of. Each mutant of
the kernels that ``fn(*args)`` launches (see `mutations`) must end in a finding, a deadlock or a
wrong result under one of the runs tried in turn. What survives all of them is listed; it counts as
explained when it is a wait that never blocked and ordered nothing new in any run, or when the
subject says why it is redundant, or why nothing reaches it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from .findings import Finding, UnsupportedPTX
from .gpus import GpuModel, gpu_model
from .host_runtime import Launch
from .machine import Machine, load, run_machine
from .memory import GlobalMemory
from .mutations import Mutation, mutate, mutations, watch
from .program import Program
from .report import json_ready
from .running import Roles, check_launch, role_names
from .schedule import POLICIES, VISIBILITIES, Options

PROFILES = ("silicon", "isa")
# Tried in turn until one catches the mutant: the cheapest first, then what each alone can see.
RUNS = (
    "round_robin/eager/silicon",
    "round_robin/eager/isa",
    "round_robin/late/silicon",
    "adversarial/late/isa",
    "run_until_blocked/eager/isa",
    "random:1/eager/isa",
    "random:2/late/isa",
    "random:3/late/silicon",
)
_INSTRUCTIONS_FACTOR = 4  # a mutant that executes this many times the original's is stopped
CAUGHT = ("finding", "deadlock", "wrong result", "refused")


@dataclass(frozen=True)
class Subject:
    """What is mutated: ``fn(*args)``, as for `kernels.emulator.emulate`.

    check: called after a run whose tensors differ from the original's; True or None if they are
        right all the same, else (False, or an AssertionError) the result is wrong. Without it any
        bit that differs is wrong.
    redundant: regular expression -> reason, for mutants that cannot be seen; it is searched in
        "STATUS: KIND: INSTRUCTION @ FILE:LINE in FUNCTION: CODE", as the table's end prints them.
    """

    fn: Any
    args: tuple[Any, ...]
    check: Callable[[], Any] | None = None
    gpu: str = "b200"
    roles: Roles = None
    redundant: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    status: "finding", "deadlock", "wrong result", "refused" (by the emulator), "survived",
    "not reached", or "error" (the emulator failed). code: of the finding. run: which run saw it,
    "POLICY[:SEED]/VISIBILITY/PROFILE". reason: why a survivor is redundant, empty if nobody knows.
    """

    mutation: Mutation
    status: str
    code: str = ""
    run: str = ""
    reason: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Caught, or explained."""
        return self.status in CAUGHT or bool(self.reason)

    def to_dict(self) -> dict[str, Any]:
        mutation = {k: getattr(self.mutation, k) for k in ("kind", "ptx", "ptx_line", "source")}
        rest = {k: getattr(self, k) for k in ("status", "code", "run", "reason", "seconds")}
        return {"entry": self.mutation.entry, **mutation, **rest}


class MutationRun:
    """A compiled subject and its unmutated results; `outcome` runs one mutant."""

    def __init__(self, subject: Subject, runs: Sequence[str] = RUNS) -> None:
        from .capture import HostArguments, compile_bound

        self.subject = subject
        self.gpu: GpuModel = gpu_model(subject.gpu)
        self.roles = role_names(subject.roles)
        self.runs = {name: parse_run(name) for name in runs}
        arguments = HostArguments(subject.fn, subject.args)
        compiled = compile_bound(subject.fn, arguments, self.gpu)
        self.launches: list[Launch] = compiled.launch_bound(arguments)
        bad = [f for launch in self.launches for f in check_launch(launch, self.gpu)]
        if bad or not self.launches:
            raise ValueError("; ".join(map(str, bad)) or f"{subject.fn} launches nothing")
        self.programs: dict[str, Program] = {
            launch.kernel: load(compiled.ptx, launch.kernel, launch.cluster != (1, 1, 1))
            for launch in self.launches
        }
        self.mutations = [m for program in self.programs.values() for m in mutations(program)]
        self.memory = _Snapshot(self.launches)
        self._watch_original()

    def _watch_original(self) -> None:
        """Runs the original under every run: it must be clean. Notes what each synchronisation
        that is to be mutated orders (see `_Watcher`), and the right results."""
        self._watcher = _Watcher()
        programs = {
            entry: watch(
                program,
                {m.segment for m in self.mutations if m.entry == entry},
                self._watcher.of(entry, program),
            )
            for entry, program in self.programs.items()
        }
        self._right: dict[str, bytes] = {}
        self._limit: int | None = None
        most = 0
        try:
            for name, options in self.runs.items():
                findings, executed = self._run(programs, options)
                if findings:
                    raise ValueError(f"the kernel as it is fails under {name}: {findings[0]}")
                self._right[name] = self.memory.contents()
                most = max(most, executed)
                self.memory.restore()
        finally:
            self.memory.restore()
        self._limit = most * _INSTRUCTIONS_FACTOR

    def outcome(self, mutation: Mutation) -> Outcome:
        """Runs a mutant until a run catches it; tensors are left as they were."""
        started = time.perf_counter()
        found = self._outcome(mutation)
        return replace(found, seconds=time.perf_counter() - started)

    def _outcome(self, mutation: Mutation) -> Outcome:
        key = (mutation.entry, mutation.segment)
        if not self._watcher.executed[key]:
            reason = self._annotated("not reached", mutation)
            return Outcome(mutation, "not reached", reason=reason)
        try:
            mutant = mutate(self.programs[mutation.entry], mutation)
        except UnsupportedPTX as refusal:
            return Outcome(mutation, "refused", str(refusal))
        programs = {**self.programs, mutation.entry: mutant}
        for name, options in self.runs.items():
            try:
                findings, _ = self._run(programs, options)
                if findings:
                    code = findings[0].code
                    status = "deadlock" if code == "deadlock" else "finding"
                    return Outcome(mutation, status, code, name)
                if self._wrong(name):
                    return Outcome(mutation, "wrong result", "", name)
            except UnsupportedPTX as refusal:
                return Outcome(mutation, "refused", str(refusal), name)
            except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
                return Outcome(mutation, "error", f"{type(error).__name__}: {error}", name)
            finally:
                self.memory.restore()
        return Outcome(mutation, "survived", reason=self._reason(mutation))

    def _reason(self, mutation: Mutation) -> str:
        idle = self._watcher.idle(mutation, len(self.runs)) if mutation.kind == "remove" else ""
        return idle or self._annotated("survived", mutation)

    def _annotated(self, status: str, mutation: Mutation) -> str:
        text = f"{status}: {mutation}"
        found = (why for pattern, why in self.subject.redundant.items() if re.search(pattern, text))
        return next(found, "")

    def _wrong(self, name: str) -> bool:
        if self.memory.contents() == self._right[name]:
            return False
        if self.subject.check is None:
            return True
        try:
            return self.subject.check() is False
        except AssertionError:
            return True

    def _run(self, programs: dict[str, Program], options: Options) -> tuple[list[Finding], int]:
        executed = 0
        for launch in self.launches:
            memory = GlobalMemory()
            for allocation in launch.allocations:
                memory.add(allocation.base, allocation.nbytes, allocation.name)
            machine = Machine(
                programs[launch.kernel], launch, self.gpu, memory, self.roles, self._limit, options
            )
            result = run_machine(machine)
            executed += result.thread_instructions
            if result.findings:
                return result.findings, executed
        return [], executed


class _Snapshot:
    """The bytes of all tensors, as they were and as they are."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        sizes: dict[int, int] = {}
        for launch in launches:
            for allocation in launch.allocations:
                sizes[allocation.base] = max(allocation.nbytes, sizes.get(allocation.base, 0))
        self._before = {base: ctypes.string_at(base, n) for base, n in sizes.items()}

    def contents(self) -> bytes:
        return b"".join(ctypes.string_at(base, len(raw)) for base, raw in self._before.items())

    def restore(self) -> None:
        for base, raw in self._before.items():
            ctypes.memmove(base, raw, len(raw))


class _Watcher:
    """How often each synchronisation was executed, and how often it ordered something new."""

    def __init__(self) -> None:
        self.executed: Counter[tuple[str, int]] = Counter()
        self._useful: set[tuple[str, int]] = set()

    def of(self, entry: str, program: Program) -> Callable[[int, Any, int], None]:
        waits = {
            s.index
            for s in program.segments
            if not s.native and re.match(r"mbarrier\.(?:try|test)_wait", s.first.op)
        }

        def seen(segment: int, warp: Any, mask: int) -> None:
            key = (entry, segment)
            self.executed[key] += 1
            if key in self._useful:
                return
            if segment not in waits or self._brings(program, segment, warp, mask):
                self._useful.add(key)

        return seen

    @staticmethod
    def _brings(program: Program, segment: int, warp: Any, mask: int) -> bool:
        """Whether a wait on an mbarrier blocks, or orders what was not ordered before."""
        operands = program.segments[segment].first.operands
        race, unit = warp.cta.machine.race, warp.cta.mbarriers
        if race is None:
            return True
        from .isa.table import Binding, first_lane

        binding = Binding(program, program.segments[segment].first, None, segment)  # type: ignore[arg-type]
        lane = first_lane(mask)
        at = binding.address(operands[1])(warp, lane) - warp.cta.window
        value = binding.scalar(operands[2])(warp, lane)
        parity = ".parity" in program.segments[segment].first.op
        if at not in unit.live:
            return True
        done = unit.try_parity(at, value & 1) if parity else unit.try_phase(at, value)
        return not done or bool(race.brings(warp, warp.cta, at))

    def idle(self, mutation: Mutation, runs: int) -> str:
        """Says so if the wait never blocked and never ordered anything new; else nothing."""
        key = (mutation.entry, mutation.segment)
        if key in self._useful:
            return ""
        return (
            f"never blocked and ordered nothing new in any of {self.executed[key]} executions"
            f" ({runs} runs)"
        )


# -- the command -----------------------------------------------------------------------------------


def parse_run(text: str) -> Options:
    """``POLICY[:SEED]/VISIBILITY/PROFILE`` as `Options`; raises ValueError."""
    parts = text.split("/")
    policy, _, seed = parts[0].partition(":")
    if (
        len(parts) != 3
        or policy not in POLICIES
        or parts[1] not in VISIBILITIES
        or parts[2] not in PROFILES
        or not re.fullmatch(r"\d*", seed)
    ):
        raise ValueError(
            f"{text!r} is not POLICY[:SEED]/VISIBILITY/PROFILE with a policy of"
            f" {', '.join(POLICIES)}, visibility {' or '.join(VISIBILITIES)}, profile"
            f" {' or '.join(PROFILES)}"
        )
    return Options(int(seed or 0), policy, parts[1], True, parts[2])


def load_subject(target: str) -> Subject:
    """The subject that an import string names. Raises ValueError for one that does not."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"{target!r} is not an import string such as package.module:name")
    sys.path.insert(0, "")  # as `python -m` has it: targets of the tree one stands in
    try:
        made = getattr(import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{target}: {error}") from error
    finally:
        sys.path.remove("")
    if isinstance(made, Subject):
        return made
    if isinstance(made, tuple) and 2 <= len(made) <= 3 and isinstance(made[1], (tuple, list)):
        return Subject(made[0], tuple(made[1]), *made[2:])
    raise ValueError(
        f"{target} returns {type(made).__name__}: it must return a Subject, (fn, args) or"
        " (fn, args, check)"
    )


def run(
    target: str | Subject,
    *,
    runs: Sequence[str] = RUNS,
    sample: int | None = None,
    seed: int = 0,
    only: str = "",
    told: Callable[[Outcome, int, int], None] | None = None,
) -> list[Outcome]:
    """Mutates a subject and returns an `Outcome` for each mutant.

    sample, seed: run that many mutants, chosen at random. only: those that this regular expression
    finds in ``str(mutation)``. told: called with each outcome, its number and how many
    there are. Raises ValueError where the original is not clean under every run.
    """
    if sample is not None and sample < 1:
        raise ValueError(f"a sample of {sample} mutants: give 1 or more, or no sample for all")
    subject = load_subject(target) if isinstance(target, str) else target
    mutated = MutationRun(subject, runs)
    chosen = [m for m in mutated.mutations if re.search(only, str(m))]
    if not chosen:
        raise ValueError(f"no mutation of the {len(mutated.mutations)} there are matches {only!r}")
    if sample is not None and sample < len(chosen):
        picked = random.Random(seed).sample(range(len(chosen)), sample)
        chosen = [chosen[k] for k in sorted(picked)]
    outcomes = []
    for mutation in chosen:
        outcomes.append(mutated.outcome(mutation))
        if told is not None:
            told(outcomes[-1], len(outcomes), len(chosen))
    return outcomes


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """The outcomes for a terminal: a row each, then the survivors with their reasons."""
    rows = [("mutation", "ptx", "source", "outcome", "run")]
    for o in outcomes:
        m = o.mutation
        op = m.ptx.rstrip(";").split()
        op = op[1:] if op[0].startswith("@") else op
        what = f"{m.kind}: {op[0]}"
        seen = o.code if o.status in ("finding", "error", "refused") else o.status
        rows.append((what, str(m.ptx_line), _short(m.source), seen, o.run))
    widths = [max(len(row[k]) for row in rows) for k in range(4)]
    lines = ["  ".join([*map(str.ljust, row[:4], widths), row[4]]).rstrip() for row in rows]
    for o in outcomes:
        if o.status not in CAUGHT:
            why = o.code or o.reason or "no reason known"
            lines.append(f"{o.status}: {o.mutation} (ptx:{o.mutation.ptx_line})\n    {why}")
    return lines


def _short(source: str) -> str:
    return "/".join(source.split("/")[-2:])


def totals(outcomes: Sequence[Outcome]) -> str:
    """For example "49 mutants: 45 caught (29 finding, 16 deadlock), 4 redundant, ..."."""
    caught = Counter(o.status for o in outcomes if o.status in CAUGHT)
    parts = ", ".join(f"{caught[status]} {status}" for status in CAUGHT if caught[status])
    redundant = sum(1 for o in outcomes if o.status == "survived" and o.ok)
    unreached = sum(1 for o in outcomes if o.status == "not reached" and o.ok)
    bad = sum(1 for o in outcomes if not o.ok)
    return (
        f"{len(outcomes)} mutants: {sum(caught.values())} caught ({parts}), {redundant} redundant,"
        f" {unreached} out of reach, {bad} unexplained"
    )


def main(argv: Sequence[str]) -> int:
    """The command line; returns 0, 1 (a mutant is unexplained) or 2 (bad arguments)."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.emulator mutate",
        description="Removes or weakens each synchronisation of a kernel and says who notices.",
    )
    parser.add_argument("target", help="import string of a function that returns (fn, args)")
    parser.add_argument(
        "--schedules",
        default=",".join(RUNS),
        metavar="RUN,...",
        help="runs to try in turn, each POLICY[:SEED]/VISIBILITY/PROFILE",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", default="", metavar="REGEX", help="only mutants that it matches")
    parser.add_argument("--json", action="store_true", help="print outcomes as JSON")
    options = parser.parse_args(argv)
    outcomes: list[Outcome] = []

    def told(outcome: Outcome, number: int, total: int) -> None:
        outcomes.append(outcome)
        if sys.stderr.isatty():
            print(f"\r{number}/{total}", end="", file=sys.stderr, flush=True)

    try:
        runs = options.schedules.split(",")
        run(options.target, runs=runs, sample=options.sample, seed=options.seed,
            only=options.only, told=told)  # fmt: skip
    except (ValueError, re.error) as error:
        print(f"mutate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: what follows is a part", file=sys.stderr)
        _print(outcomes, options.json)
        return 130
    _print(outcomes, options.json)
    return 0 if outcomes and all(o.ok for o in outcomes) else 1


def _print(outcomes: list[Outcome], as_json: bool) -> None:
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if as_json:
        print(json.dumps(json_ready({"mutants": [o.to_dict() for o in outcomes]}), indent=1))
        return
    print("\n".join([*table(outcomes), totals(outcomes)]))
