"""What this project's forward kernel leaves open, decided for a GPU: each field with its reason.

Registers as ptxas needs them, cycles as the cycle model replays them (`roofline.evidence`); where
no row of that table is for this GPU's SM, the closed forms decide. Compiled in are only decisions
that do not depend on sequence lengths, so that one kernel serves every shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from kernels.common.plan import GPU_ARCHS, TILE_ORDERS, KernelPlan, PlanError
from roofline.cuda_cores import balance_share
from roofline.evidence import Row, rows_for
from roofline.formats import Format
from roofline.gpus import ARCH_DEFAULTS, Gpu
from roofline.problem import Problem, item_lengths, makespan_in_order, published_problem

#: A smaller share is taken if its key blocks are at most this much longer than the best's: the
#: quartiles of the replays lie further apart.
SHARE_TIE = 1.01
#: Key blocks of the work items that shares are compared on: 8192 keys.
BLOCKS = 64
#: An order of tiles must gain as much, or heads go one after another.
ORDER_GAIN = 1.005


@dataclass(frozen=True)
class Decisions:
    """fields: of the plan, those decided; reasons: a sentence by decision. row: of the table, the
    one that the plan has, None without evidence."""

    fields: Mapping[str, Any]
    reasons: Mapping[str, str]
    row: Row | None


def kernel_dtype(fmt: Format) -> str:
    """A format as plans name it."""
    return {"bf16": "bfloat16", "fp16": "float16"}.get(fmt.name, fmt.name)


def kernel_gpu(gpu: Gpu) -> str:
    """The GPU that plans know for this one: itself, or the first of its architecture."""
    return gpu.name if gpu.name in GPU_ARCHS else ARCH_DEFAULTS.get(gpu.arch_number, gpu.name)


def decide(gpu: Gpu, fmt: Format, head_dim: int, causal: bool, balanced: Fraction) -> Decisions:
    """The fields for a GPU, format (bf16, fp16) and mask. PlanError where there is no kernel.

    balanced: the share that the closed forms take, where the table has no row for this GPU.
    """
    plan = KernelPlan.forward(
        gpu=kernel_gpu(gpu), dtype=kernel_dtype(fmt), head_dim=head_dim, causal=causal
    )
    known = [
        row
        for row in rows_for(gpu, plan.dtype, head_dim, causal)
        if row.softmax_registers == plan.softmax_registers
    ]
    deepest = [row for row in known if row.kv_stages == plan.kv_stages]
    row = best_row(deepest)
    share = float(balanced) if row is None else row.exp2_share
    order, why_order = _order(gpu, plan, row)
    reasons = {
        "exp2_emulated_share": _share_reason(gpu, share, row, deepest),
        "registers": _register_reason(plan, deepest),
        "kv_stages": _stage_reason(plan, known),
        "tile_order": why_order,
    }
    fields = {
        "exp2_emulated_share": share,
        "softmax_registers": plan.softmax_registers,
        "correction_registers": plan.correction_registers,
        "other_registers": plan.other_registers,
        "kv_stages": plan.kv_stages,
        "tile_order": order,
    }
    return Decisions(MappingProxyType(fields), MappingProxyType(reasons), row)


def no_kernel(gpu: Gpu, fmt: Format, head_dim: int, head_dim_v: int) -> tuple[str, ...]:
    """Every rule that keeps this project's kernel from a problem; () where it takes it."""
    rules = []
    if head_dim != head_dim_v:
        dims = f"head_dim {head_dim} with head_dim_v {head_dim_v}"
        rules.append(f"{dims}: the kernel takes equal ones")
    try:
        KernelPlan.forward(gpu=kernel_gpu(gpu), dtype=kernel_dtype(fmt), head_dim=head_dim)
    except PlanError as error:
        rules += error.rules
    return tuple(rules)


def best_row(deepest: Sequence[Row]) -> Row | None:
    """The smallest share that ties with the fastest, of those that do not spill; None if all do."""
    fits = [row for row in deepest if not row.stack_bytes]
    fastest = min((row.cycles(BLOCKS) for row in fits), default=0)
    tied = [row for row in fits if row.cycles(BLOCKS) <= SHARE_TIE * fastest]
    return min(tied, key=lambda row: row.exp2_share, default=None)


def _share_reason(gpu: Gpu, share: float, row: Row | None, deepest: list[Row]) -> str:
    balance = f"by closed form the pipes balance at {float(balance_share(gpu)):.1%}"
    if row is None:
        return f"{share:.1%} of the exponentials by polynomial: {balance}; nothing was replayed"
    others = [r for r in deepest if r.exp2_share != share]
    spills = [f"{r.exp2_share:.1%}" for r in deepest if r.stack_bytes]
    spilled = f"; {', '.join(spills)} would spill" if spills else ""
    compared = "".join(f", {r.key_block_cycles} with {r.exp2_share:.1%}" for r in others)
    amount = f"{share:.1%} of the exponentials" if share else "no exponential"
    return (
        f"{amount} by polynomial: in the replay a key block takes {row.key_block_cycles} cycles"
        f"{compared}; {balance}{spilled}"
    )


def _register_reason(plan: KernelPlan, deepest: list[Row]) -> str:
    text = (
        f"{plan.softmax_registers}, {plan.correction_registers}, {plan.other_registers} for "
        "softmax, correction and the rest, FlashAttention-4's split"
    )
    if not deepest:
        return f"{text}; not compiled for this GPU"
    fits = [row.exp2_share for row in deepest if not row.stack_bytes]
    if not fits:
        return f"{text}; ptxas spills at every share"
    return f"{text}: ptxas spills nothing at shares up to {max(fits):.1%}"


def _stage_reason(plan: KernelPlan, known: list[Row]) -> str:
    text = f"{plan.kv_stages} K and V tiles, as many as shared memory holds beside Q and O"
    shallow = [row for row in known if row.kv_stages != plan.kv_stages]
    losses = []
    for row in sorted(shallow, key=lambda row: -row.kv_stages):
        deep = next(
            (r for r in known if (r.kv_stages, r.exp2_share) == (plan.kv_stages, row.exp2_share)),
            None,
        )
        if deep:
            more = row.cycles(BLOCKS) / deep.cycles(BLOCKS) - 1
            losses.append(f"{row.kv_stages} take {more:+.1%}")
    return text + (f"; replayed, {', '.join(losses)} of the time" if losses else "")


def _order(gpu: Gpu, plan: KernelPlan, row: Row | None) -> tuple[str, str]:
    """The order of the grid, by when the last SM is done on the published benchmark."""
    head_major, longest_first = TILE_ORDERS
    problem = published_problem(plan.head_dim, causal=plan.causal)
    start = 2.0 if row is None else row.item_cycles / row.key_block_cycles
    lengths = [n + start for n in item_lengths(problem, plan.tile_q, plan.tile_n)]
    slots = int(gpu["sms"].value)
    copies = problem.batch * problem.heads
    by_head = makespan_in_order(lengths * copies, slots)
    longest = [n for n in sorted(lengths, reverse=True) for _ in range(copies)]
    gain = by_head / makespan_in_order(longest, slots)
    if gain > ORDER_GAIN:
        return longest_first, (
            f"longest tiles first: head by head the last SM is done {gain - 1:.1%} later on the "
            f"published benchmark ({_problem(problem)})"
        )
    return head_major, (
        f"head by head, so that few heads' K and V are in L2 ({_in_flight(gpu, plan, problem)}); "
        f"longest tiles first is {'no' if gain <= 1 else f'{gain - 1:.1%}'} faster"
    )


def _problem(problem: Problem) -> str:
    return f"batch {problem.batch}, {problem.heads} heads, {problem.seqlen} tokens"


def _in_flight(gpu: Gpu, plan: KernelPlan, problem: Problem) -> str:
    """MiB of K and V that the CTAs on all SMs read at a time."""
    tiles = -(-problem.seqlen // plan.tile_q)
    heads = min(-(-int(gpu["sms"].value) // tiles) + 1, problem.batch * problem.kv_heads)
    mib = heads * 2 * problem.seqlen_k * plan.head_dim * plan.element_bytes / 2**20
    return f"{mib:.0f} of {float(gpu['l2'].value):g} MiB"
