"""The table of what events do to the model; one file per family fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kernels.emulator.records import Event

if TYPE_CHECKING:
    from roofline.cycles.blocks import Op
    from roofline.cycles.sm import Simulation
    from roofline.cycles.state import WarpState

    #: f(simulation, warp, instruction, cycle of issue, event row): False if the warp now waits.
    Handler = Callable[[Simulation, WarpState, Op, float, list[int]], bool]

HANDLERS: dict[int, Handler] = {}


def handles(*kinds: Event) -> Callable[[Handler], Handler]:
    """Registers the handler of events of these kinds."""

    def register(handler: Handler) -> Handler:
        for kind in kinds:
            HANDLERS[int(kind)] = handler
        return handler

    return register
