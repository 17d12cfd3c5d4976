# SPDX-License-Identifier: Apache-2.0
"""A plan as text: ``print(KernelPlan.forward())``."""

from __future__ import annotations

from kernels.common.plan import SMEM_LIMIT_BYTES, KernelPlan


def describe(plan: KernelPlan) -> str:
    """The plan as tables: roles, tensor memory, shared memory, barriers."""
    mask = "causal" if plan.causal else "dense"
    lines = [
        f"forward {mask} {plan.dtype} on {plan.gpu} ({plan.arch}), "
        f"head_dim {plan.head_dim} in tiles of {plan.head_dim_padded}",
        f"tile {plan.tile_q}x{plan.tile_n} ({plan.q_stages} x {plan.tile_m} query rows), "
        f"{plan.kv_stages} K/V stages, {plan.threads} threads, {plan.ctas} CTA, "
        f"tiles {plan.tile_order.replace('_', ' ')}",
        f"exp2 on the FMA pipe: asked {plan.exp2_emulated_share:.4g}, "
        f"realised {plan.exp2_realised_share:.4g} "
        f"({plan.exp2_emulated_pairs} of {plan.tile_n // 2} pairs a row, degree "
        f"{plan.exp2_degree}); "
        f"rescale threshold {plan.rescale_threshold:g}",
        "",
        "Warps",
        *_table(
            ("role", "warps", "registers"),
            [(r.name, _span(r.warps), r.registers) for r in plan.roles],
        ),
        "",
        f"TMEM, {plan.tmem_cols} columns",
        *_table(
            ("tensor", "first", "cols", "lifetime"),
            [(r.name, r.first_col, r.cols, r.lifetime) for r in plan.tmem_map],
        ),
        "",
        f"SMEM, {plan.smem_bytes} of {SMEM_LIMIT_BYTES} bytes",
        *_table(
            ("region", "offset", "bytes"),
            [(r.name, r.offset_bytes, r.bytes) for r in plan.smem_map],
        ),
        "",
        "mbarriers",
        *_table(
            ("barrier", "count", "arrivals", "tx bytes", "arrives", "waits", "first parity"),
            [
                (b.name, b.count, b.arrivals, b.tx_bytes, b.arrives, b.waits, b.first_parity)
                for b in plan.barriers
            ],
        ),
    ]
    return "\n".join(lines)


def _table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> list[str]:
    """Rows as aligned text, numbers to the right."""
    cells = [head, *[tuple(str(c) for c in row) for row in rows]]
    columns = []
    for i, column in enumerate(zip(*cells, strict=True)):
        width = max(len(cell) for cell in column)
        numbers = all(not isinstance(row[i], str) for row in rows)
        columns.append([c.rjust(width) if numbers else c.ljust(width) for c in column])
    return ["  " + "  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def _span(warps: tuple[int, ...]) -> str:
    return f"{warps[0]}-{warps[-1]}" if len(warps) > 1 else str(warps[0])
