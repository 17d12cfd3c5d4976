"""What the command lines `roofline` and `fa4` share: parsing, errors as one line, exit status."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from roofline.errors import RooflineError
from roofline.tile import parse_tile


class UsageError(RooflineError):
    """A command line that makes no sense."""


class Parser(argparse.ArgumentParser):
    """argparse without its usage lines: an error is one line, and option names are whole."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(" ".join(message.split()) + f"; {self.prog} --help lists the options")


def tile_option(text: str) -> tuple[int, int]:
    """`roofline.tile.parse_tile` as the type of an option."""
    try:
        return parse_tile(text)
    except RooflineError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def json_text(value: Any) -> str:
    """Indented JSON; ValueError for what JSON has no word for (NaN, infinity)."""
    return json.dumps(value, indent=2, allow_nan=False)


def run(
    prog: str,
    action: Callable[[], int],
    *,
    refused: tuple[type[Exception], ...],
    failed: tuple[type[Exception], ...] = (),
) -> int:
    """The exit status of a command: its own; 2 for bad input, 1 for what failed, each with one line
    on stderr; 130 if it was interrupted.

    refused, failed: the exceptions that mean so.
    """
    try:
        status = action()
        sys.stdout.flush()
        return status
    except refused as error:
        _say(prog, error)
        return 2
    except failed as error:
        _say(prog, error)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells have it
    except BrokenPipeError:
        # The reader (head, less) has gone: what it wanted is written, so nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _say(prog: str, error: Exception) -> None:
    print(f"{prog}: {' '.join(str(error).split())}", file=sys.stderr)
