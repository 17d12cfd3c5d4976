"""What a finding of the race detector says: who, where, what is missing between two accesses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..findings import EmulatorFault
from ..memory.tensor import COLUMNS
from .clocks import (
    ASYNC,
    GENERIC,
    LOOSE,
    TENSOR_CORE,
    TMA_LOAD,
    TMA_STORE,
    TMEM_LD,
    TMEM_ST,
    TMEM_VIEW,
    UNRELEASED,
    WARP,
    Agent,
    Agents,
    Bundle,
)
from .lanes import MANY
from .shadow import Conflict

if TYPE_CHECKING:
    from ..program import Program

CELL_BYTES = 4
CP_ASYNC, ST_ASYNC, WGMMA = "cp.async", "st.async", "wgmma"  # kinds of agents
_BEHIND = "{}, or a synchronisation of the two behind it, is missing"
LANES_RACE = "lanes of a warp are threads: bar.warp.sync between them is missing"


class Reports:
    """Names and messages; needs the agents and the program."""

    program: Program
    agents: Agents

    def _name(self, agent: Agent) -> str:
        name = "nobody"
        if (warp := agent.warp) is not None:
            alike = sum(other.name == warp.name for other in warp.cta.warps)
            name = f"{warp.name} (warp {warp.index})" if alike > 1 else warp.name
        return name if agent.kind == WARP else f"{agent.kind} of {name}"

    def _fault(
        self, conflict: Conflict, agent: Agent, row: int, write: bool, space: str, base: int
    ) -> EmulatorFault:
        other = self.agents.all[conflict.agent]
        bundle = self.agents.fit(agent)
        code, why = self._classify(conflict, other, agent, bundle, row, write, space)
        if space == "smem":
            where = f"shared address {base + conflict.cell * CELL_BYTES // conflict.split:#x}"
        else:
            where = (
                f"Tensor Memory lanes {conflict.cell // COLUMNS * 32}.."
                f"{conflict.cell // COLUMNS * 32 + 31}, column {conflict.cell % COLUMNS}"
            )
        ins = self.program.segments[conflict.pc].first
        source = self.program.module.source_of(ins)
        by, before = self._name(agent), self._name(other)
        if conflict.lanes is not None:
            by, before = (
                f"{who}, {lane_name(k)}"
                for who, k in zip((by, before), conflict.lanes[::-1], strict=True)
            )
        if other.warp is not None and other.warp.cta is not agent.warp.cta:
            before += f" of CTA {other.warp.cta.block}"
        earlier = f"{'write' if conflict.wrote else 'read'} by {before}"
        at = f" at {source}" if source else ""
        return EmulatorFault(
            code,
            f"{'write' if write else 'read'} by {by} of {where} is not ordered after"
            f" the {earlier}{at} (ptx:{ins.line}): {why}",
            space=space,
            other={
                "access": "write" if conflict.wrote else "read",
                "agent": before,
                "source": source,
                "ptx_line": ins.line,
                "instruction": ins.text,
            },
            access="write" if write else "read",
            agent=by,
        )

    def _classify(
        self, conflict: Conflict, other: Agent, agent: Agent, bundle: Bundle, row: int,
        write: bool, space: str,
    ) -> tuple[str, str]:  # fmt: skip
        if conflict.lanes is not None:
            if other.kind == CP_ASYNC:
                return "cp_async_not_waited", f"behind cp.async.wait_group, {LANES_RACE}"
            return f"{space}_race", LANES_RACE
        known = conflict.clock <= int(bundle[GENERIC, other.index])
        if row == ASYNC and known:
            return "missing_proxy_fence", "fence.proxy.async is missing between them"
        loose = conflict.clock <= max(bundle[LOOSE, other.index], bundle[UNRELEASED, other.index])
        if row == TMEM_VIEW and (known or loose) and other is not agent:
            return (
                "missing_tcgen05_fence",
                "tcgen05.fence::before_thread_sync before, or ::after_thread_sync behind, the"
                " synchronisation between them is missing",
            )
        if loose and other is not agent:
            return (
                "sync_scope_too_narrow",
                "what synchronises them is relaxed, or its scope (.cta where none is given) does"
                " not reach both threads",
            )
        if other.kind == TMA_LOAD:
            return "tma_load_not_waited", "the copy's mbarrier was not waited for"
        if other.kind == WGMMA:
            return "mma_operand_overwritten", _BEHIND.format("wgmma.wait_group")
        if other.kind == CP_ASYNC:
            return "cp_async_not_waited", "cp.async.wait_group or the copy's mbarrier is missing"
        if other.kind == ST_ASYNC:
            return "st_async_not_waited", "the store's mbarrier was not waited for"
        if other.kind == TMA_STORE:
            return "tma_store_not_waited", _BEHIND.format("cp.async.bulk.wait_group")
        if other.kind == TENSOR_CORE:
            if space == "tmem":
                return (
                    "tmem_access_before_commit",
                    "no tcgen05.commit behind the MMA was waited for",
                )
            return "mma_operand_overwritten", "no tcgen05.commit behind the MMA was waited for"
        if other.kind == TMEM_LD:
            return "tcgen05_ld_not_waited", _BEHIND.format("tcgen05.wait::ld")
        if other.kind == TMEM_ST:
            return "tcgen05_st_not_waited", _BEHIND.format("tcgen05.wait::st")
        return f"{space}_race", "no synchronisation orders them"


def lane_name(lane: int) -> str:
    return f"lane {lane}" if lane < MANY else "several lanes"


def same_word_twice(where: str, lanes: tuple[int, int]) -> str:
    """For a store whose lanes give one place different values."""
    return (
        f"lanes {lanes[0]} and {lanes[1]} store different values to {where} in one instruction:"
        " which of them stays there is not defined"
    )
