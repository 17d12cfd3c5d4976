"""Clocks: %clock, %clock64, %globaltimer and their halves (PTX ISA 9.1 section 10).

The emulator knows no cycles: a clock counts the thread-instructions of the launch so far. It only
ever grows, so that waits with a time limit end, and the same seed reads the same values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .addresses import put_wide
from .table import Binding, Handler, machine

if TYPE_CHECKING:
    from ..state import Warp


@machine(r"clock\.(lo|hi|b64)")
def clock(b: Binding) -> Handler:
    """What the front end makes of a mov from a clock (`ptx.body`)."""
    d, part = b.ins.operands[0], b.match[1]
    if part == "b64":
        put64 = put_wide(b, d)
        return lambda w, mask: put64(w, mask, np.full(32, w.cta.machine.executed, np.uint64))
    put, shift = b.put32(d), 32 if part == "hi" else 0

    def run(w: Warp, mask: int) -> None:
        put(w, mask, np.full(32, w.cta.machine.executed >> shift & 0xFFFFFFFF, np.uint32))

    return run
