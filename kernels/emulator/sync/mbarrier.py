"""mbarrier objects of one CTA (PTX ISA 9.1 section 9.7.13.15).

An mbarrier goes through phases 0, 1, 2, ... A phase completes when its pending arrivals and its
tx-count are both zero; the next one then starts with the expected arrival count. The object is
opaque in PTX: the model keeps its state beside shared memory, under the address, and lets no
ordinary access touch its bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..findings import EmulatorFault
from ..memory.shared import MBARRIER_BYTES, SharedMemory

MAX_COUNT = (1 << 20) - 1  # of expected and pending arrivals, and of the tx-count's magnitude
_REMEMBERED_ARRIVERS = 8


@dataclass
class Mbarrier:
    """State of one live mbarrier.

    phase: full phase number, its parity is what ``.parity`` waits name; expected: arrivals a phase
    takes; pending: arrivals this phase still lacks; tx_count: bytes expected minus bytes completed.
    arrivers: who arrived last, with the phase they arrived in, newest last.
    """

    addr: int
    expected: int
    pending: int
    phase: int = 0
    tx_count: int = 0
    arrivers: deque[tuple[str, int]] = field(
        default_factory=lambda: deque(maxlen=_REMEMBERED_ARRIVERS)
    )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready state, for deadlock reports."""
        return {
            "address": self.addr,
            "phase": self.phase,
            "parity": self.phase & 1,
            "expected_arrivals": self.expected,
            "pending_arrivals": self.pending,
            "pending_bytes": self.tx_count,
            "last_arrivers": [{"who": who, "phase": phase} for who, phase in self.arrivers],
        }

    def __str__(self) -> str:
        lacks = []
        if self.pending:
            lacks.append(f"{self.pending} of {self.expected} arrivals")
        if self.tx_count:
            lacks.append(f"{self.tx_count} bytes")
        return (
            f"mbarrier {self.addr:#x} phase {self.phase}, lacks {' and '.join(lacks) or 'nothing'}"
        )


PhaseCallback = Callable[[int, int], None]


class MbarrierUnit:
    """All mbarriers of a CTA.

    on_phase: functions called as ``f(addr, completed_phase)`` each time a phase completes, with the
    next phase already begun; the machine wakes its waiters there.

    ``who`` names the arriver for reports. Every operation but `init` raises `EmulatorFault`
    mbarrier_not_initialised where no live mbarrier is, and mbarrier_misaligned for a bad address.
    """

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self._live: dict[int, Mbarrier] = {}
        self._invalidated: set[int] = set()
        self.on_phase: list[PhaseCallback] = []

    @property
    def live(self) -> dict[int, Mbarrier]:
        """Live mbarriers by address (the unit's own objects: look, do not touch)."""
        return self._live

    def state(self, addr: int) -> Mbarrier:
        """The live mbarrier at ``addr``."""
        return self._live.get(addr) or self._missing(addr)

    # --- life ---------------------------------------------------------------------------------

    def init(self, addr: int, count: int, again: bool = False) -> None:
        """mbarrier.init: phase 0, ``count`` arrivals a phase. ``again``: it may be repeated as long
        as nothing else has happened to the mbarrier.

        Raises mbarrier_bad_count unless 1 <= count < 2**20, and mbarrier_double_init where a live
        mbarrier is or overlaps.
        """
        addr = int(addr)
        self._check_aligned(addr)
        if not 1 <= count <= MAX_COUNT:
            raise EmulatorFault(
                "mbarrier_bad_count",
                f"mbarrier.init at {addr:#x} with count {count}: it must be from 1 to {MAX_COUNT}",
                address=addr,
                count=count,
            )
        if addr in self._live:
            if again and self._live[addr] == Mbarrier(addr, expected=count, pending=count):
                return
            raise EmulatorFault(
                "mbarrier_double_init",
                f"mbarrier.init at {addr:#x} over a live one ({self._live[addr]}):"
                " mbarrier.inval must come first",
                **self._live[addr].to_dict(),
            )
        self._shared.mark_mbarrier(addr)
        self._live[addr] = Mbarrier(addr, expected=count, pending=count)
        self._invalidated.discard(addr)

    def inval(self, addr: int) -> None:
        """mbarrier.inval: the bytes return to ordinary use, unwritten."""
        barrier = self.state(int(addr))
        del self._live[barrier.addr]
        self._invalidated.add(barrier.addr)
        self._shared.unmark_mbarrier(barrier.addr)

    # --- arrivals and transactions ------------------------------------------------------------

    def arrive(self, addr: int, count: int = 1, who: str = "", no_complete: bool = False) -> int:
        """mbarrier.arrive: ``count`` arrivals; returns the phase they belong to (the state token).

        Raises mbarrier_overflow when the phase does not lack that many arrivals, mbarrier_bad_count
        for a count outside [1, 2**20), and with ``.noComplete`` mbarrier_unexpected_completion.
        """
        barrier = self._live.get(addr) or self._missing(addr)
        if not 1 <= count <= MAX_COUNT:
            raise EmulatorFault(
                "mbarrier_bad_count",
                f"arrival at {barrier} with count {count}: it must be from 1 to {MAX_COUNT}",
                **barrier.to_dict(),
            )
        if count > barrier.pending:
            raise self._overflow(barrier, count, who)
        phase = barrier.phase
        if no_complete and barrier.pending == count and barrier.tx_count == 0:
            raise EmulatorFault(
                "mbarrier_unexpected_completion",
                f"mbarrier.arrive.noComplete would complete phase {phase} of {barrier}",
                **barrier.to_dict(),
            )
        barrier.pending -= count
        barrier.arrivers.append((who, phase))
        self._advance(barrier)
        return phase

    def expect_tx(self, addr: int, nbytes: int, who: str = "") -> None:
        """mbarrier.expect_tx: the phase expects ``nbytes`` more. Raises mbarrier_tx_overflow.

        A tx-count that returns to zero here (bytes that completed first) can complete the phase.
        """
        barrier = self._live.get(addr) or self._missing(addr)
        self._add_tx(barrier, nbytes, "expect_tx", who)
        self._advance(barrier)

    def complete_tx(self, addr: int, nbytes: int, who: str = "") -> None:
        """complete-tx by an engine or mbarrier.complete_tx: ``nbytes`` have arrived.

        Bytes may complete before they are expected: the tx-count is then negative and the phase
        stays incomplete. Raises mbarrier_tx_overflow.
        """
        barrier = self._live.get(addr) or self._missing(addr)
        self._add_tx(barrier, -nbytes, "complete_tx", who)
        self._advance(barrier)

    def arrive_expect_tx(self, addr: int, nbytes: int, who: str = "") -> int:
        """mbarrier.arrive.expect_tx: expect ``nbytes``, then one arrival; returns the phase."""
        barrier = self._live.get(addr) or self._missing(addr)
        if barrier.pending < 1:
            raise self._overflow(barrier, 1, who)
        self._add_tx(barrier, nbytes, "expect_tx", who)
        return self.arrive(addr, 1, who)

    def add_pending(self, addr: int, count: int) -> None:
        """The current phase lacks ``count`` arrivals more (cp.async.mbarrier.arrive)."""
        barrier = self._live.get(addr) or self._missing(addr)
        if barrier.pending + count > MAX_COUNT:
            raise EmulatorFault(
                "mbarrier_bad_count",
                f"the pending count of {barrier} would pass {MAX_COUNT}",
                **barrier.to_dict(),
            )
        barrier.pending += count

    def arrive_drop(self, addr: int, count: int = 1, who: str = "") -> int:
        """mbarrier.arrive_drop: arrive, and later phases expect ``count`` arrivals fewer."""
        barrier = self._live.get(addr) or self._missing(addr)
        if count > barrier.expected:
            raise EmulatorFault(
                "mbarrier_bad_count",
                f"mbarrier.arrive_drop of {count} at {barrier}, which expects {barrier.expected}"
                " a phase",
                **barrier.to_dict(),
            )
        if count > barrier.pending:
            raise self._overflow(barrier, count, who)
        barrier.expected -= count
        return self.arrive(addr, count, who)

    # --- waits --------------------------------------------------------------------------------

    def try_parity(self, addr: int, parity: int) -> bool:
        """mbarrier.try_wait.parity / test_wait.parity: has the phase of that parity completed?

        True when the current phase's parity differs: the preceding phase had that parity. Raises
        mbarrier_bad_parity for a value other than 0 and 1.
        """
        barrier = self._live.get(addr) or self._missing(addr)
        if parity not in (0, 1):
            raise EmulatorFault(
                "mbarrier_bad_parity",
                f"wait on {barrier} for parity {parity}: it must be 0 or 1",
                asked_parity=int(parity),
                **barrier.to_dict(),
            )
        return barrier.phase & 1 != parity

    def try_phase(self, addr: int, token: int) -> bool:
        """Wait by state token: has the phase that `arrive` returned completed?

        Raises mbarrier_stale_token unless it is the current or the immediately preceding phase.
        """
        barrier = self._live.get(addr) or self._missing(addr)
        if token not in (barrier.phase, barrier.phase - 1):
            raise EmulatorFault(
                "mbarrier_stale_token",
                f"wait on {barrier} for phase {token}: only the current and the preceding phase"
                " can be"
                " waited for",
                token=int(token),
                **barrier.to_dict(),
            )
        return token != barrier.phase

    # --- details ------------------------------------------------------------------------------

    def _advance(self, barrier: Mbarrier) -> None:
        if barrier.pending or barrier.tx_count:
            return
        completed = barrier.phase
        barrier.phase += 1
        barrier.pending = barrier.expected
        for callback in self.on_phase:
            callback(barrier.addr, completed)

    def _add_tx(self, barrier: Mbarrier, nbytes: int, what: str, who: str) -> None:
        total = barrier.tx_count + nbytes
        if abs(nbytes) > MAX_COUNT or abs(total) > MAX_COUNT:
            raise EmulatorFault(
                "mbarrier_tx_overflow",
                f"{what} of {abs(nbytes)} bytes{f' by {who}' if who else ''} takes the tx-count of"
                f" {barrier} to {total}: it must stay within +-{MAX_COUNT}",
                who=who,
                **barrier.to_dict(),
            )
        barrier.tx_count = total

    def _overflow(self, barrier: Mbarrier, count: int, who: str) -> EmulatorFault:
        return EmulatorFault(
            "mbarrier_overflow",
            f"{count} arrival(s){f' by {who}' if who else ''} at {barrier}: phase {barrier.phase}"
            " lacks"
            f" only {barrier.pending} of {barrier.expected}"
            + (" and waits for its bytes" if not barrier.pending else ""),
            who=who,
            **barrier.to_dict(),
        )

    def _check_aligned(self, addr: int) -> None:
        if addr % MBARRIER_BYTES:
            raise EmulatorFault(
                "mbarrier_misaligned",
                f"mbarrier operation at {addr:#x}, which is not a multiple of {MBARRIER_BYTES}",
                address=addr,
            )

    def _missing(self, addr: int) -> Mbarrier:
        self._check_aligned(addr)
        self._shared.check_range(addr, MBARRIER_BYTES, "mbarrier operation")
        before = ", it was invalidated" if addr in self._invalidated else ""
        known = ", ".join(f"{a:#x}" for a in sorted(self._live)) or "none"
        raise EmulatorFault(
            "mbarrier_not_initialised",
            f"mbarrier operation at {addr:#x}, where no live mbarrier is{before}; live ones:"
            f" {known}",
            address=addr,
        )
