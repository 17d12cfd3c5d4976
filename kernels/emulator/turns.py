"""Turns: the loop that runs the warps of a cluster, a segment at a time.

A turn is a few segments of one warp. Of its fragments the one with the lowest program counter runs,
and goes on without a look at the others until it blocks, parts, returns or reaches one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from .findings import EmulatorFault
from .isa.table import Wait
from .livelock import QUIET_STEPS, Circles
from .state import Cta, Fragment, Warp

if TYPE_CHECKING:
    from .checks import RaceDetector
    from .program import Program, Segment
    from .schedule import AsyncQueues, Options, PendingLoad, ReadyQueue
    from .sync.cluster import ClusterBarrier

_NEVER = 1 << 62  # above every program counter


class Turns:
    """What `machine.Machine` is while warps run; recording and tracing machines override `_step`,
    `_execute` and `_block`."""

    program: Program
    options: Options
    ctas: list[Cta]
    cluster: ClusterBarrier
    race: RaceDetector | None
    ready: ReadyQueue
    asyncs: AsyncQueues
    max_instructions: int | None
    events: int
    executed: int  # thread-instructions
    lanes: int  # those that execute the instruction
    _params_address: int
    _segments: list[Segment]
    _current: Warp | None
    _mask: int

    def _run_ready(self) -> None:
        """Turns, until no warp can run."""
        ready, asyncs, steps = self.ready, self.asyncs, self.ready.steps
        limit, circles = self.max_instructions, Circles()
        seen, quiet = self.events, 0  # turns since anything happened
        enough = max(QUIET_STEPS // steps, 4)
        while ready:
            if asyncs:
                asyncs.sometimes()
            warp = ready.next()
            self._current = warp
            if self._turn(warp, steps):
                ready.again(warp)
            if self.events != seen:
                if quiet >= enough:
                    circles.clear()
                seen, quiet = self.events, 0
            else:
                quiet += 1
                if quiet >= enough and self._nothing_left(circles, warp):
                    raise livelock_fault(self.ctas)
            if limit is not None and self.executed > limit:
                raise EmulatorFault(
                    "instruction_limit",
                    f"stopped after {self.executed} thread-instructions, max_instructions is"
                    f" {limit}",
                    executed=self.executed,
                )

    def _nothing_left(self, circles: Circles, warp: Warp) -> bool:
        """Nothing has happened for long: asynchronous work that is due completes, one at a time;
        if there is none, whether all that run go round in circles."""
        if self.asyncs:
            circles.clear()
            self.asyncs.complete_one()
            return False
        return circles.look(warp, (*self.ready, warp) if warp.queued else self.ready)

    def _turn(self, warp: Warp, steps: int) -> bool:
        """Up to ``steps`` segments of a warp; False if none of its fragments can run any more."""
        while steps:
            fragments = warp.fragments
            several = len(fragments) > 1
            if several:
                fragment, stop = _lowest(fragments)
            else:
                fragment, stop = fragments[0] if fragments else None, _NEVER
            if fragment is None or fragment.wait is not None:
                return False
            while steps:
                steps -= 1
                if not self._step(warp, fragment) or fragment.pc >= stop:
                    break
                if several and warp.queued:  # what it did has woken another of its fragments
                    break
            if len(warp.fragments) > 1:
                warp.merge()
        return any(fragment.wait is None for fragment in warp.fragments)

    def _step(self, warp: Warp, fragment: Fragment) -> bool:
        """Executes one segment of a fragment that can run. False if its lanes may no longer go on
        as they were: they wait, have parted or have returned."""
        warp.pc = pc = fragment.pc
        self._mask = mask = fragment.mask
        segment = self._segments[pc]
        if segment.tracked:
            _check_written(warp, segment, mask)
        if segment.ld_touches and warp.pending_ld:
            self._touch_loads(warp, segment)
        if not segment.native:
            return self._execute(warp, fragment, segment, mask)
        if segment.converged and (mask != warp.alive or segment.source_lanes & ~mask):
            if mask == warp.alive:
                raise shuffle_fault(segment.source_lanes & ~mask)
            self._converge(warp, fragment, segment, mask)
            return False
        taken = segment.run(warp.registers.address, mask, self._params_address)
        self.executed += segment.count * mask.bit_count()
        if segment.converged and self.race is not None:
            (self.race.warp_sync if segment.syncs else self.race.converged)(warp)
        if segment.branch == "none" or (taken == 0 and segment.branch == "conditional"):
            fragment.pc = pc + 1
        elif segment.branch == "always" or taken == mask:
            fragment.pc = segment.target
        else:
            warp.fragments.append(Fragment(taken, segment.target))
            fragment.mask = mask & ~taken
            fragment.pc = pc + 1
            return False
        return True

    def _execute(self, warp: Warp, fragment: Fragment, segment: Segment, mask: int) -> bool:
        """One machine instruction, as `_step`."""
        active = mask
        if segment.guard is not None:
            index, flip = segment.guard
            active &= warp.flags[index] ^ flip
        if active:
            if segment.converged and active != warp.alive:
                self._converge(warp, fragment, segment, active)
                return False
            self.lanes = active
            if segment.converged and self.race is not None:
                self.race.converged(warp)
            wait = segment.run(warp, active)
            if wait is not None:
                if wait.retry is False:
                    self.executed += mask.bit_count()
                self._block(warp, fragment, wait, active)
                return False
            if segment.leaves:
                self._leave(warp, fragment, active)
                return False
        self.executed += mask.bit_count()
        fragment.pc += 1
        return True

    def _leave(self, warp: Warp, fragment: Fragment, active: int) -> None:
        """Lanes have returned."""
        self.executed += fragment.mask.bit_count()
        fragment.mask &= ~active
        fragment.pc += 1
        warp.fragments = [f for f in warp.fragments if f.mask]
        warp.wake_converging()
        if len(self.ctas) > 1:
            self.cluster.check()

    def _touch_loads(self, warp: Warp, segment: Segment) -> None:
        """Registers of a tcgen05.ld are used that wait::ld has not yet covered: wrong by the PTX
        text, while silicon's scoreboard holds the use until the load is complete. Those of a wgmma
        are undefined until it was waited for."""
        last = -1
        for k, load in enumerate(warp.pending_ld):
            if load.pc in segment.overwrites:
                code = "wgmma_operand_overwritten"
                self._not_waited(load, code, "an operand register", "written")
            if load.pc in segment.ld_touches and load.effect is not None:
                load.effect()
                load.effect = None
            if load.pc in segment.ld_uses:
                last = k
        if last < 0:
            return
        newest = warp.pending_ld[last]
        if self.options.profile == "isa" or newest.code == "wgmma_not_waited":
            self._not_waited(newest, newest.code, "a register", "used")
        for load in warp.pending_ld[: last + 1]:  # loads complete in order
            if load.effect is not None:
                load.effect()
        if self.race is not None:
            self.race.ld_complete(warp, warp.pending_ld[last].clock)
        del warp.pending_ld[: last + 1]

    def _not_waited(self, load: PendingLoad, code: str, what: str, done: str) -> NoReturn:
        ins = self.program.segments[load.pc].first
        wait = "wgmma.wait_group" if ins.mods[0] == "wgmma" else "tcgen05.wait::ld"
        raise EmulatorFault(
            code,
            f"{what} of the {'.'.join(ins.mods[:2])} at ptx:{ins.line} is {done} without {wait}",
            load=ins.text,
            load_source=self.program.module.source_of(ins),
        )

    def _converge(self, warp: Warp, fragment: Fragment, segment: Segment, active: int) -> None:
        if active != fragment.mask:
            raise EmulatorFault(
                "divergent_aligned",
                f"{segment.first.op} needs every lane of the warp, but its guard leaves out lanes"
                f" {fragment.mask & ~active:#010x}",
                active=active,
            )
        missing = warp.alive & ~active
        detail = (("waits_for", f"lanes {missing:#010x} to reach it"),)
        wait = Wait(("converge", warp.index), segment.first.op, detail=detail)
        self._block(warp, fragment, wait, active)

    def _block(self, warp: Warp, fragment: Fragment, wait: Wait, active: int) -> None:
        if active != fragment.mask and wait.retry:
            # The guarded lanes wait, the others go on.
            rest = Fragment(fragment.mask & ~active, fragment.pc + 1)
            fragment.mask = active
            warp.fragments.append(rest)
        fragment.wait = wait
        if wait.key[0] != "converge":
            warp.cta.waiting.setdefault(wait.key, []).append((warp, fragment))


def shuffle_fault(lanes: int) -> EmulatorFault:
    """For a native block whose shfl reads lanes that have returned."""
    return EmulatorFault(
        "shfl_inactive_lane",
        f"a shfl reads lane {(lanes & -lanes).bit_length() - 1}, which does not take part: the"
        " result is undefined",
        lanes=lanes,
    )


def _lowest(fragments: list[Fragment]) -> tuple[Fragment | None, int]:
    """The fragment with the lowest counter of those that can run, and the lowest counter at which
    it meets another: one that can run, or waits for the warp to come together."""
    best, stop = None, _NEVER
    for fragment in fragments:
        if fragment.wait is not None:
            if fragment.wait.key[0] == "converge":
                stop = min(stop, fragment.pc)
        elif best is None or fragment.pc < best.pc:
            if best is not None:
                stop = min(stop, best.pc)
            best = fragment
        else:
            stop = min(stop, fragment.pc)
    return best, stop


def livelock_fault(ctas: list[Cta]) -> EmulatorFault:
    """For warps that can run, and never get anywhere; names what the others are blocked on."""
    fragments = [f for cta in ctas for warp in cta.warps for f in warp.fragments]
    waits = sorted({f.wait.what for f in fragments if f.wait is not None})
    others = f". The others wait for: {'; '.join(waits)}" if waits else ""
    return EmulatorFault(
        "livelock",
        "every warp that can run goes round in circles: what they look at does not change any"
        f" more, and nobody is left to change it{others}",
    )


def _check_written(warp: Warp, segment: Segment, mask: int) -> None:
    for name in segment.checks:
        if warp.unwritten[name] & mask:
            raise EmulatorFault(
                "register_unwritten_read",
                f"register {name} is read by lanes {warp.unwritten[name] & mask:#010x}, which"
                " never wrote it",
                register=name,
            )
    for name in segment.marks:
        warp.unwritten[name] &= ~mask
