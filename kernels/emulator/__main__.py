"""`python -m kernels.emulator COMMAND ...`: the emulator's command line."""

from __future__ import annotations

import sys
from importlib import import_module

# Each module has main(argv) -> exit status; its docstring's first line says what it does.
COMMANDS = {
    "run": ("kernels.emulator.script", "run a script with a modelled GPU in place of a real one"),
    "mutate": ("kernels.emulator.mutate", "remove or weaken every synchronisation of a kernel"),
    "coverage": ("kernels.emulator.coverage", "which instruction forms are modelled and tested"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status (2 for a command line that makes no sense)."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in COMMANDS:
        module = import_module(COMMANDS[arguments[0]][0])
        return int(module.main(arguments[1:]))
    wanted = not arguments or arguments[0] in ("-h", "--help")
    stream = sys.stdout if wanted else sys.stderr
    if not wanted:
        print(f"python -m kernels.emulator: no command {arguments[0]!r}", file=stream)
    print("usage: python -m kernels.emulator COMMAND [options]\n", file=stream)
    for name, (_, what) in COMMANDS.items():
        print(f"  {name:9} {what}", file=stream)
    return 0 if wanted else 2


if __name__ == "__main__":
    sys.exit(main())
