"""barrier.cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..findings import EmulatorFault

if TYPE_CHECKING:
    from ..machine import Machine
    from ..state import Warp


class ClusterBarrier:
    """barrier.cluster: every thread of every CTA arrives, then waits."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._arrived: set[Warp] = set()
        self._owed: dict[Warp, int] = {}  # warp -> the phase its last arrival belongs to
        self.phase = 0

    def arrive(self, warp: Warp, relaxed: bool) -> None:
        if warp in self._arrived:
            raise EmulatorFault(
                "cluster_barrier_rearrive",
                f"{warp.name} arrives at the cluster's barrier twice in one phase",
            )
        self._arrived.add(warp)
        self._owed[warp] = self.phase
        machine = self._machine
        machine.events += 1
        if machine.race is not None:
            machine.race.cluster_arrive(warp, relaxed)
        self.check()

    def check(self) -> None:
        """Completes the phase if every warp that still lives has arrived."""
        machine = self._machine
        alive = {w for cta in machine.ctas for w in cta.warps if w.alive}
        if self._arrived and alive <= self._arrived:
            self._arrived = set()
            self.phase += 1
            if machine.race is not None:
                machine.race.cluster_phase()
            for cta in machine.ctas:
                machine.wake(("cluster",), cta)

    def passed(self, warp: Warp) -> bool:
        """Whether the phase that the warp arrived in is over."""
        if warp not in self._owed:
            raise EmulatorFault(
                "cluster_barrier_no_arrive", f"{warp.name} waits for a barrier it did not arrive at"
            )
        if self._owed[warp] == self.phase:
            return False
        del self._owed[warp]
        if self._machine.race is not None:
            self._machine.race.cluster_release([warp])
        return True
