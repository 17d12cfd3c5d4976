"""Happens-before over the warps and engines of a cluster: who may touch what, and when.

Every access of shared and tensor memory is checked against the last write and the last reads of its
cells (`Shadow`), under the clock view that the memory model prescribes for it (`clocks`). The check
depends on the order in which operations are *issued* and on synchronisation only, never on when
their effects happen to become visible: a race is found even where the numbers come out right.

Profiles: ``silicon`` takes tcgen05 operations to be ordered by any synchronisation, as hardware
does (flash-attention-4's forward has no tcgen05.fence, and no tcgen05.wait::ld: the scoreboard
holds a load's registers until it is complete); ``isa`` holds kernels to the PTX text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..findings import EmulatorFault
from .clocks import GENERIC, TENSOR_CORE, TMA_LOAD, TMA_STORE, TMEM_ST
from .copies import CopyHooks
from .reports import WGMMA
from .tensor_core import TensorCoreHooks
from .threads import ThreadHooks

if TYPE_CHECKING:
    from ..state import Cta

_MUST_FINISH = (TMA_LOAD, TMA_STORE, TENSOR_CORE, TMEM_ST, WGMMA)


class RaceDetector(ThreadHooks, CopyHooks, TensorCoreHooks):
    """Clocks and shadows of the CTAs that run together. Methods name what happened; those that
    access memory raise `EmulatorFault` for an unordered conflict."""

    def check_exit(self, cta: Cta) -> None:
        """Every asynchronous operation of the CTA must have been waited for by somebody, and every
        access to it from another CTA must have come before its end."""
        self.check_hosts(cta)
        known = self.agents.zero()[GENERIC]
        for agent in self._warps.values():
            known = np.maximum(known, self.agents.fit(agent)[GENERIC])
        for agent in self.agents.all[1:]:
            if agent.kind in _MUST_FINISH and agent.clock and agent.warp.cta is cta:
                if known[agent.index] < agent.clock:
                    raise EmulatorFault(
                        "exit_with_work_in_flight",
                        f"the CTA ends, but nobody has waited for the last {agent.kind} of"
                        f" {agent.warp.name}",
                        engine=agent.kind,
                        issued_by=agent.warp.name,
                        issuer=agent.warp,
                        pc=agent.pc,
                    )
