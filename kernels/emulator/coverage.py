"""Which instruction forms are modelled, which test executes each, and what hardware has confirmed.

A *form* is an opcode pattern of the two instruction tables: native code, and the machine. What ran
in which test is recorded (`recording`, tests/coverage_recorder.py) and kept in coverage.csv beside
this file; `python -m kernels.emulator coverage` prints both together, and with `--ptx FILE` says
whether a kernel uses anything that is not modelled.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from . import machine
from .findings import UnsupportedPTX
from .isa import table as machine_table
from .native import table as native_table
from .program import Program, Segment, is_branch
from .ptx import PTXSyntaxError, parse

RECORD = Path(__file__).with_name("coverage.csv")
Tests = Mapping[str, tuple[str, ...]]  # opcode -> tests that executed it, one of each file

# Whose kernels the tests of a folder or file run.
_KERNELS = (
    ("tests/blackwell/", "fa4"),
    ("tests/peers/test_flash_attention.py", "flash-attn-4"),
    ("tests/peers/test_quack.py", "quack"),
)


@dataclass(frozen=True)
class Form:
    """An opcode pattern. ``native``: compiled with its block, else executed by the machine;
    ``family``: what the module that models it says it is about."""

    pattern: re.Pattern[str]
    native: bool
    family: str

    def __str__(self) -> str:
        """The pattern as people write it: ``add.(u32|s32)``; N is a number, * a word."""
        text = re.sub(r"\(\?(?::|P<\w+>)", "(", self.pattern.pattern)
        text = text.replace(r"\d+", "N").replace(r"\w+", "*")
        return re.sub(r"\\(.)", r"\1", text)


def forms() -> list[Form]:
    """Every form, by family."""
    found = [Form(re.compile(r"bra(?:\.uni)?"), True, "Branches")]
    for pattern, emitter in native_table._PATTERNS:
        found.append(Form(pattern, True, _family(emitter)))
    for pattern, binder, _ in machine_table._PATTERNS:
        found.append(Form(pattern, False, _family(binder)))
    return sorted(found, key=lambda form: (form.family, str(form)))


def _family(handler: Any) -> str:
    """First sentence of the docstring of the module that a handler lives in."""
    text = import_module(handler.__module__).__doc__ or handler.__module__
    return re.split(r"[.:](?:\s|$)| \(PTX", " ".join(text.split()), maxsplit=1)[0]


def is_modelled(op: str) -> bool:
    """Whether some form takes an opcode; its operands may still be refused."""
    if op in ("bra", "bra.uni") or native_table.find(op) is not None:
        return True
    return any(pattern.fullmatch(op) for pattern, _, _ in machine_table._PATTERNS)


# -- recording -----------------------------------------------------------------------------------


@contextmanager
def recording() -> Iterator[set[str]]:
    """Yields the set of opcodes that launches execute while the block runs.

    An opcode counts when its block of straight-line code has run, or for the machine's
    instructions when it has itself. Recording costs one extra call for each block's first run.
    """
    ran: set[str] = set()
    armed: dict[int, Program] = {}
    real = machine.load

    def load(*args: Any, **options: Any) -> Program:
        program = real(*args, **options)
        if id(program) not in armed:
            armed[id(program)] = program
            for segment in program.segments:
                _arm(segment, ran)
        return program

    machine.load = load
    try:
        yield ran
    finally:
        machine.load = real
        for program in armed.values():
            for segment in program.segments:
                segment.run = getattr(segment.run, "unrecorded", segment.run)


def _arm(segment: Segment, ran: set[str]) -> None:
    """Has a segment's first run note its opcodes and take the note-taking off again."""
    run = segment.run

    def first(*args: Any) -> Any:
        ran.update(ins.op for ins in segment.instrs)
        segment.run = run
        return run(*args)

    first.unrecorded = run  # type: ignore[attr-defined]
    segment.run = first


def read_record(path: Path = RECORD) -> dict[str, tuple[str, ...]]:
    """What was recorded. Raises FileNotFoundError where nothing was."""
    with path.open(newline="") as file:
        return {row["opcode"]: tuple(row["tests"].split()) for row in csv.DictReader(file)}


def write_record(tests: Mapping[str, Iterable[str]], path: Path = RECORD) -> None:
    """Writes opcodes and the tests that ran them, one test of each file."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["opcode", "tests"])
        for op in sorted(tests):
            by_file: dict[str, str] = {}
            for test in sorted(tests[op]):
                by_file.setdefault(test.split("::")[0], test)
            if by_file:
                writer.writerow([op, " ".join(by_file.values())])


def is_hardware_test(test: str) -> bool:
    """Whether a test compares with what a GPU did: those in files called test_*_hardware.py."""
    return test.split("::")[0].endswith("_hardware.py")


# -- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A form with what was recorded of it. opcodes: that ran; confirmed: of those, on hardware."""

    form: Form
    opcodes: tuple[str, ...]
    confirmed: tuple[str, ...]
    kernels: tuple[str, ...]
    tests: tuple[str, ...]

    def hardware(self) -> str:
        if not self.confirmed:
            return "no"
        everything = len(self.confirmed) == len(self.opcodes)
        return "yes" if everything else f"{len(self.confirmed)} of {len(self.opcodes)}"


def rows(record: Tests) -> list[Row]:
    """Every form with what was recorded of it."""
    out = []
    for form in forms():
        opcodes = tuple(op for op in sorted(record) if form.pattern.fullmatch(op))
        tests = sorted({test for op in opcodes for test in record[op]})
        confirmed = tuple(op for op in opcodes if any(map(is_hardware_test, record[op])))
        kernels = [name for start, name in _KERNELS if any(t.startswith(start) for t in tests)]
        out.append(Row(form, opcodes, confirmed, tuple(kernels), tuple(tests)))
    return out


def _shown_tests(tests: Sequence[str]) -> str:
    """A hardware test, an instruction test and a kernel's test, as far as there are."""

    def rank(test: str) -> tuple[bool, bool, str]:
        return (not is_hardware_test(test), not test.startswith("tests/emulator/"), test)

    chosen = sorted(tests, key=rank)
    kinds: dict[tuple[bool, bool], str] = {}
    for test in chosen:
        kinds.setdefault(rank(test)[:2], test)
    return ", ".join(f"`{test.removeprefix('tests/')}`" for test in kinds.values())


HEADER = """# Instruction coverage

Printed by `python -m kernels.emulator coverage`. Each row is an instruction form: an opcode
pattern that the emulator takes as a whole; whatever matches no form is refused with its PTX line.
*Run* says how many different opcodes of the form tests have executed, *kernels* whose compiled
kernels use it, *tests* a few of the tests (below `tests/`), *hardware* whether a GPU has given the
same bits.
"""


def markdown(record: Tests) -> str:
    """The whole table, by family, as Markdown."""
    table = rows(record)
    untested = sum(not row.opcodes for row in table)
    confirmed = sum(bool(row.confirmed) for row in table)
    opcodes = {op for row in table for op in row.opcodes}
    lines = [
        HEADER,
        f"{len(table)} forms, of which {len(table) - untested} ran in a test ({len(opcodes)}"
        f" opcodes); {confirmed} have opcodes that hardware has confirmed.",
    ]
    family = None
    for row in table:
        if row.form.family != family:
            family = row.form.family
            lines += ["", f"## {family}", "", "| form | run | kernels | tests | hardware |"]
            lines.append("|---|---|---|---|---|")
        form = str(row.form).replace("|", "\\|")
        kernels, tests = ", ".join(row.kernels), _shown_tests(row.tests) or "none"
        lines.append(f"| `{form}` | {len(row.opcodes)} | {kernels} | {tests} | {row.hardware()} |")
    return "\n".join(lines) + "\n"


# -- one PTX file --------------------------------------------------------------------------------


def unmodelled(ptx: str) -> dict[str, str]:
    """Opcodes of a PTX module that no form takes, with the first instruction that uses each.

    Raises PTXSyntaxError or UnsupportedPTX for text that the front end does not read.
    """
    missing: dict[str, str] = {}
    for entry in parse(ptx).entries.values():
        for ins in entry.body:
            if not is_branch(ins) and not is_modelled(ins.op):
                missing.setdefault(ins.op, f"ptx:{ins.line}: {ins.text}")
    return missing


def _check_ptx(path: Path) -> int:
    try:
        missing = unmodelled(path.read_text())
    except (OSError, UnicodeDecodeError, PTXSyntaxError, UnsupportedPTX) as error:
        print(f"python -m kernels.emulator coverage: {path}: {error}", file=sys.stderr)
        return 2
    for op, where in sorted(missing.items()):
        print(f"{op}\n    {where[:200]}")
    print(f"{len(missing)} opcodes of {path} are not modelled")
    return 1 if missing else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the coverage table, or checks a PTX file. Returns the exit status: 1 where the file
    uses an opcode that is not modelled, 2 where it cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.emulator coverage",
        description="Which instruction forms are modelled, tested, and confirmed by hardware.",
    )
    parser.add_argument(
        "--ptx", type=Path, metavar="FILE", help="list the opcodes of a PTX file not modelled"
    )
    arguments = parser.parse_args(argv)
    if arguments.ptx is not None:
        return _check_ptx(arguments.ptx)
    print(markdown(read_record()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
