"""Clocks count thread-instructions: they grow, and the same seed reads the same values."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.emulator.ptx import PTXSyntaxError
from tests.emulator.ptx_harness import execute

CLOCKS = [
    ("%clock", "u32"), ("%clock64", "u64"), ("%globaltimer", "u64"), ("%globaltimer_lo", "u32"),
]  # fmt: skip


@pytest.mark.parametrize(("clock", "kind"), CLOCKS)
def test_clocks_grow(clock: str, kind: str) -> None:
    """A wait of 500 ends, and takes at least that long."""
    body = f"""{{ .reg .{kind} start, now, gone; .reg .pred p; mov.{kind} start, {clock};
      LOOP: mov.{kind} now, {clock}; sub.{kind} gone, now, start; setp.lt.{kind} p, gone, 500;
      @p bra LOOP; mov.{kind} %d, gone; }}"""
    dtype = np.dtype(f"uint{kind[1:]}")
    first, again = (execute(body, {}, {"d": dtype})["d"] for _ in range(2))
    assert (first >= 500).all() and (first < 1000).all()
    assert first.tobytes() == again.tobytes()


@pytest.mark.parametrize("half", ["%clock_hi", "%globaltimer_hi"])
def test_upper_halves(half: str) -> None:
    assert (execute(f"mov.u32 %d, {half};", {}, {"d": np.uint32})["d"] == 0).all()


@pytest.mark.parametrize("text", ["mov.u32 %d, %clock64;", "mov.b64 %w, %clock;"])
def test_clocks_are_read_at_their_width(text: str) -> None:
    with pytest.raises(PTXSyntaxError, match="operand 2 of mov"):
        execute(text, {"w": np.zeros(32, np.uint64)}, {"d": np.uint32})
