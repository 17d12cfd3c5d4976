"""Mutations of valid instructions, and what ptxas says of them.

    python -m tests.emulator.ptx_fuzz seeds FILE.ptx ...      instructions of PTX files, one a form
    python -m tests.emulator.ptx_fuzz compare [--seed N] [--count N]
    python -m tests.emulator.ptx_fuzz record --count 5000     ptx_verdicts.txt.xz, for CI

An instruction is written with registers that the header declares, `%<type>_<number>`, so that its
text alone says what its operands are. ptxas (the one in PTXAS, or on the PATH; of CUDA 13.4 or
newer) reads thousands of them in one file and names the lines that it refuses.
"""

from __future__ import annotations

import argparse
import lzma
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kernels.emulator.coverage import is_modelled
from kernels.emulator.findings import UnsupportedPTX
from kernels.emulator.program import is_branch
from kernels.emulator.ptx import (
    Imm,
    Instr,
    Mem,
    Operand,
    PTXSyntaxError,
    Reg,
    RegPair,
    Sym,
    Vec,
    parse,
)
from kernels.emulator.ptx.ast import Special
from kernels.emulator.ptx.declarations import split_top

HERE = Path(__file__).parent
SEEDS, VERDICTS = HERE / "ptx_seeds.txt.xz", HERE / "ptx_verdicts.txt.xz"
# The targets that seeds are tried with; a mutant is compared at the first of TRIED_AT that takes
# the seed.
TARGETS = (
    "sm_75 sm_80 sm_89 sm_90 sm_90a sm_100 sm_100f sm_100a sm_103 sm_103a sm_103f sm_120 sm_120a"
).split()
TRIED_AT = ("sm_100a", "sm_90a", "sm_103a")
TYPES = "pred b8 b16 u16 s16 f16 b32 u32 s32 f32 f16x2 b64 u64 s64 f64 b128".split()
LITERALS = (
    "1", "-1", "0x1FFFFFFFF", "1.5", "0f3F800000", "0d3FF8000000000000", "_", "dyn", "%tid.x",
)  # fmt: skip
_OPEN = (
    ".extern .shared .align 16 .b8 dyn[];\n.global .align 16 .b8 glob[64];\n"
    ".const .align 16 .b8 fix[64];\n"
    ".visible .entry k(.param .b64 par, .param .align 64 .b8 map[128])\n{\n"
    ".local .align 16 .b8 loc[64]; "
    + " ".join(f".reg .{t} %{t}_<140>;" for t in TYPES)
    + "\n"
)


def module(lines: Iterable[str], target: str) -> tuple[str, int]:
    """A module of instructions, one a line, and the number of its first."""
    head = f".version 9.4\n.target {target}\n.address_size 64\n{_OPEN}"
    # ptxas names the line of the token behind the instruction that it refuses.
    return head + "".join(f"{line} {{}}\n" for line in lines) + "ret;\n}\n", head.count("\n") + 1


# -- seeds -----------------------------------------------------------------------------------------


def written(instr: Instr) -> str:
    """The instruction with registers of `TYPES` in place of its own."""
    names: dict[str, str] = {}
    used: dict[str, int] = {}

    def name(reg: Reg) -> str:
        if reg.name not in names:
            used[reg.type] = used.get(reg.type, 0) + 1
            names[reg.name] = f"%{reg.type}_{used[reg.type]}"
        return "!" * reg.negated + names[reg.name]

    def show(op: Operand) -> str:
        if isinstance(op, Reg):
            return name(op)
        if isinstance(op, Special):
            return op.name
        if isinstance(op, Imm):
            return f"0{'f' if op.bits == 32 else 'd'}{op.value:0{op.bits // 4}X}" if (
                op.is_float
            ) else str(op.value)
        if isinstance(op, Sym):
            spaces = {"shared": "dyn", "global": "glob", "param": "par", "const": "fix"}
            at = [instr.op.find(f".{space}") for space in spaces]
            if max(at) < 0:
                return "loc" if ".local" in instr.op else "dyn"
            return list(spaces.values())[next(i for i, a in enumerate(at) if a >= 0)]
        if isinstance(op, Vec):
            return "{" + ", ".join(map(show, op.items)) + "}"
        if isinstance(op, RegPair):
            return f"{show(op.first)}|{show(op.second)}"
        if isinstance(op, Mem):
            coords = ", {" + ", ".join(map(show, op.coords)) + "}" if op.coords is not None else ""
            return f"[{show(op.base)}{coords}]"
        return "_"

    operands = [show(op) for op in instr.operands if "%CC.CF" not in repr(op)]
    if "%CC.CF" in repr(instr.operands[:1]):
        operands.insert(0, show(instr.operands[0].first))  # type: ignore[union-attr]
    return f"{instr.op} {', '.join(operands)};".replace(" ;", ";")


def seeds_of(files: Sequence[str]) -> list[str]:
    """One instruction of each form."""
    found: dict[tuple[str, str], str] = {}
    for path in files:
        try:
            parsed = parse(Path(path).read_text())
        except (PTXSyntaxError, UnsupportedPTX) as error:
            print(f"{path}: {error}", file=sys.stderr)
            continue
        for entry in parsed.entries.values():
            for instr in entry.body:
                if is_branch(instr) or instr.op.startswith(("clock.", "call.", "trap")):
                    continue
                line = written(instr)
                form = re.sub(r"-?\b(?:0[xfd])?[0-9A-F]+\b", "N", line)
                found.setdefault((instr.op, form), line)
    return sorted(set(found.values()))


def write_seeds(lines: Sequence[str]) -> None:
    """Keeps the lines that some target takes, with a 1 for each of TARGETS that does."""
    refused = [ptxas_refuses(lines, target) for target in TARGETS]
    rows = []
    for line in lines:
        marks = "".join("01"[line not in here] for here in refused)
        if "1" in marks:
            rows.append(f"{marks} {line}\n")
        else:
            print(f"refused: {line}", file=sys.stderr)
    SEEDS.write_bytes(lzma.compress("".join(rows).encode(), preset=9))
    print(f"{len(rows)} seeds")


def read_seeds() -> dict[str, str]:
    """Valid instructions, and which of TARGETS take them."""
    lines = lzma.decompress(SEEDS.read_bytes()).decode().splitlines()
    return {line: marks for marks, _, line in (row.partition(" ") for row in lines)}


def tried_at(marks: str) -> str:
    return next((t for t in TRIED_AT if marks[TARGETS.index(t)] == "1"), TRIED_AT[0])


# -- mutations -------------------------------------------------------------------------------------

_RE_TYPE = re.compile(
    r"(?<=\.)(?:[busf](?:8|16|32|64)|b128|b?f16x2|bf16|f32x2|pred|tf32|e[45]m[32]x2)\b"
)
_RE_REG = re.compile(r"%(\w+?)_(\d+)")


def mutants(line: str, rng: random.Random, pool: Sequence[str]) -> Iterator[str]:
    """Endless mutants of an instruction. ``pool``: modifiers to add."""
    op, _, rest = line.rstrip(";").partition(" ")
    operands = split_top(rest)
    while True:
        new_op, new = op, list(operands)
        kind = rng.choice(("drop", "repeat", "swap", "register", "register", "literal", "suffix",
                           "modifier", "extra", "vector"))  # fmt: skip
        at = rng.randrange(len(new)) if new else 0
        if kind == "drop" and new:
            del new[at]
        elif kind == "repeat" and new:
            new.insert(at, new[at])
        elif kind == "swap" and len(new) > 1:
            other = rng.randrange(len(new))
            new[at], new[other] = new[other], new[at]
        elif kind == "register" and (places := list(_RE_REG.finditer(", ".join(new)))):
            text, place = ", ".join(new), rng.choice(places)
            text = f"{text[: place.start()]}%{rng.choice(TYPES)}_{place[2]}{text[place.end() :]}"
            new = split_top(text)
        elif kind == "literal" and new:
            new[at] = rng.choice(LITERALS)
        elif kind == "suffix" and (places := list(_RE_TYPE.finditer(op))):
            place = rng.choice(places)
            new_op = op[: place.start()] + rng.choice(TYPES) + op[place.end() :]
        elif kind == "modifier" and "." in op:
            parts = op.split(".")
            del parts[rng.randrange(1, len(parts))]
            new_op = ".".join(parts)
        elif kind == "extra":
            parts = op.split(".")
            parts.insert(rng.randrange(1, len(parts) + 1), rng.choice(pool))
            new_op = ".".join(parts)
        elif kind == "vector" and new and new[at].startswith("{"):
            items = split_top(new[at][1:-1])
            if rng.random() < 0.5:
                items.pop()
            else:
                items.append(items[-1])
            new[at] = "{" + ", ".join(items) + "}"
        mutant = f"{new_op} {', '.join(new)};".replace(" ;", ";")
        if mutant != line:
            yield mutant


# -- verdicts --------------------------------------------------------------------------------------


def ptxas_refuses(lines: Sequence[str], target: str) -> dict[str, str]:
    """The lines that ptxas refuses, with its words. It reads them all again until none is left that
    it refuses, because it stops at some errors."""
    refused: dict[str, str] = {}
    # One function uses one cta_group.
    pairs = [line for line in dict.fromkeys(lines) if "cta_group::2" in line]
    others = [line for line in dict.fromkeys(lines) if "cta_group::2" not in line]
    batches = [part[at : at + 2000] for part in (pairs, others) for at in range(0, len(part), 2000)]
    for live in batches:
        while why := _ptxas(live, target):
            here = _blamed(live, target, why) or _bisected(live, target)
            refused |= here
            live = [line for line in live if line not in here]
    return refused


def _ptxas(lines: Sequence[str], target: str) -> str:
    """What ptxas says of a module of these instructions; empty if it takes it."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(module(lines, target)[0])
        file.flush()
        command = [os.environ.get("PTXAS", "ptxas"), "-arch", target, "-O0", file.name]
        ran = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True)
    return (ran.stderr.strip() or "failed") if ran.returncode else ""


def _blamed(lines: list[str], target: str, why: str) -> dict[str, str]:
    """Lines that ptxas names. It names the first of a function for some errors in any ``mov``: then
    each of those is tried alone."""
    first = module([], target)[1]
    found: dict[str, str] = {}
    suspects: set[str] = set()
    for number, message in re.findall(r"line '?(\d+)'?(?:; (?:error|fatal)\s*:)? (.*)", why):
        index = int(number) - first
        if "32-bit address" in why and "conflicting" in message and "ABI" not in why:
            continue  # a warning
        named = re.search(r"instruction '(\w+)", message)
        if not 0 <= index < len(lines):
            continue
        if named and not lines[index].startswith(named[1]):
            suspects.add(named[1])
        else:
            found[lines[index]] = message
    for line in lines:
        if line.startswith(tuple(suspects)) and (alone := _ptxas([line], target)):
            found[line] = alone.splitlines()[0]
    return found


def _bisected(lines: list[str], target: str) -> dict[str, str]:
    """One line at fault where ptxas names none (it failed at a later stage)."""
    while len(lines) > 1:
        half = lines[: len(lines) // 2]
        lines = half if _ptxas(half, target) else lines[len(lines) // 2 :]
    return {lines[0]: (_ptxas(lines, target) or "only beside others").splitlines()[0]}


def verdict(line: str, target: str) -> str:
    """What we say of one instruction: "takes", "refuses", or "lacks" it."""
    op = line.partition(" ")[0].rstrip(";")
    if not is_modelled(op) and not op.startswith(("bra", "call")):
        return "lacks: opcode"
    try:
        parsed = parse(module([line], target)[0])
    except PTXSyntaxError as error:
        return f"refuses: {error}"
    except UnsupportedPTX as error:
        return f"lacks: {error}"
    assert len(parsed.entries["k"].body) == 2
    return "takes"


def sample(seed: int, count: int) -> dict[str, list[str]]:
    """Mutants of all seeds in turn, by target."""
    rng = random.Random(seed)
    seeds = read_seeds()
    opcodes = {line.partition(" ")[0].rstrip(";") for line in seeds}
    pool = sorted({part for op in opcodes for part in op.split(".")[1:]})
    streams = [(tried_at(marks), mutants(line, rng, pool)) for line, marks in seeds.items()]
    rng.shuffle(streams)
    out: dict[str, list[str]] = {target: [] for target in TRIED_AT}
    for i in range(count):
        target, stream = streams[i % len(streams)]
        out[target].append(next(stream))
    return {target: list(dict.fromkeys(lines)) for target, lines in out.items()}


# Where we are stricter than ptxas, which takes these although its manual has no such forms.
STRICTER = (
    r"(atom|red)\b.*",  # a fourth operand
    r"fence\b.* \[%f\d+_\d+\], .*",  # floating-point addresses
    r"red\.async\b.*",  # without its mbarrier
    r"cp\.async\.bulk\.tensor\b.*|red\b.* _,.*",  # addresses without brackets
    r".*\{.*%pred_\d+.*\}.*",  # predicates in vectors
    r"mov\.\w+ [^{]*\{(_,.*|.*, _)\};",  # a sink as a source
    r".*\[%[busf]16\w*\b.*|.*\[%b8\w*\b.*|.*\[%f16x2\w*\b.*",  # addresses of 8 or 16 bits
    r".*%b128_.*",  # values in wider registers than they can be moved from
)


def _known(line: str, ours: str) -> bool:
    """Whether a difference counts: ptxas decides on 32-bit addresses by the whole program."""
    return "needs a 64-bit address" not in ours and not any(re.fullmatch(p, line) for p in STRICTER)


# What the machine reports when it executes it, with a code, whether immediate or in a register.
LATER = (
    r"(bar|barrier)\b.*",  # barriers from 0 to 15, of whole warps
    r"mbarrier\.(init|arrive)\b.*",  # counts
    r"cp\.(reduce\.)?async\.bulk\b.*",  # sizes
    r"tcgen05\.(de)?alloc\b.*",  # columns
    r"createpolicy\b.*",  # fractions, which nothing depends on
)


def _is_value(why: str) -> bool:
    """Whether ptxas complains of the value of an immediate."""
    return re.search("out of range|unexpected value|multiple of|non-zero", why) is not None


def verdicts(seed: int, count: int) -> Iterator[tuple[str, str, str]]:
    """(target, mutant, why ptxas refuses it or nothing). Where we differ, the mutant alone counts:
    among others it may be blamed for their errors."""
    for target, lines in sample(seed, count).items():
        refused = ptxas_refuses(lines, target)
        for line in lines:
            why = refused.get(line, "")
            if (verdict(line, target) == "takes") == bool(why):
                why = _ptxas([line], target).partition("\n")[0]
            yield target, line, why


def difference(line: str, ours: str, refused: bool, value: bool = False) -> str:
    """"strict" where we refuse what ptxas takes, "loose" where we take what it refuses; empty where
    both agree or the difference is a known one. ``value``: ptxas refuses an immediate's value."""
    if ours == "takes" and refused:
        return "" if value and any(re.fullmatch(p, line) for p in LATER) else "loose"
    return "strict" if ours.startswith("refuses") and not refused and _known(line, ours) else ""


def compare(seed: int, count: int) -> int:
    """Prints every difference. Returns how many there are."""
    found: dict[str, list[str]] = {"strict": [], "loose": []}
    both = total = 0
    for target, line, why in verdicts(seed, count):
        ours = verdict(line, target)
        if kind := difference(line, ours, bool(why), _is_value(why)):
            found[kind].append(f"{target} {line}   # {why or ours}")
        both += ours != "takes" and bool(why)
        total += 1
    for kind, title in (("strict", "ptxas takes, we refuse"), ("loose", "we take, ptxas refuses")):
        print("\n    ".join([f"{title}: {len(found[kind])}", *found[kind]]))
    print(f"{total} mutants, of which both refuse {both}")
    return sum(map(len, found.values()))


def record(seed: int, count: int) -> None:
    """Mutants with the verdict of ptxas, for the tests: + taken, - refused, = for a value."""
    rows = []
    for target, line, why in verdicts(seed, count):
        mark = "+" if not why else "=" if _is_value(why) else "-"
        rows.append(f"{TRIED_AT.index(target)}{mark} {line}\n")
    VERDICTS.write_bytes(lzma.compress("".join(rows).encode(), preset=9))
    print(f"{len(rows)} verdicts")


def read_verdicts() -> list[tuple[str, str, str]]:
    """(target, mark, mutant)"""
    lines = lzma.decompress(VERDICTS.read_bytes()).decode().splitlines()
    return [(TRIED_AT[int(line[0])], line[1], line[3:]) for line in lines]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.ptx_fuzz")
    parser.add_argument("what", choices=["seeds", "compare", "record"])
    parser.add_argument("files", nargs="*")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20_000)
    args = parser.parse_args(argv)
    if args.what == "seeds":
        write_seeds(seeds_of(args.files))
    elif args.what == "record":
        record(args.seed, args.count)
    else:
        return 1 if compare(args.seed, args.count) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
