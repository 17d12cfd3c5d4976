"""A progress bar on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

_WIDTH, _INTERVAL_SECONDS = 32, 0.1


class ProgressBar:
    """Call it with the fraction done; it redraws one line of a terminal, and clears it at the end.

    shown: None draws only where the stream is a terminal.
    """

    def __init__(self, label: str, shown: bool | None = None, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty() if shown is None else shown
        self._start = time.monotonic()
        self._next = 0.0
        self._drawn = False

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._drawn:
            self._stream.write("\r\033[K" if self._stream.isatty() else "\n")
            self._stream.flush()

    def __call__(self, fraction: float) -> None:
        """fraction: 0.0 to 1.0."""
        now = time.monotonic()
        if not self._shown or (now < self._next and fraction < 1.0):
            return
        self._next = now + _INTERVAL_SECONDS
        self._drawn = True
        fraction = min(1.0, max(0.0, fraction))
        done = round(_WIDTH * fraction)
        bar = "#" * done + "." * (_WIDTH - done)
        seconds = now - self._start
        self._stream.write(f"\r{self._label} [{bar}] {fraction:4.0%} {seconds:5.1f} s")
        self._stream.flush()
