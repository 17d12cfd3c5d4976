"""Which emulated share of exp2 is best, and which unit binds then: by closed form, and replayed.

The best share is the smallest that makes a key block shortest: more of it only loads the FMA pipe.
The closed form knows pipes alone; the replay, where this project has a kernel, knows latencies too,
but not how many registers the polynomial takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from roofline.budgets import budget
from roofline.gpus import Gpu, find_gpu
from roofline.text import table
from roofline.tiles import SHARES

#: (head_dim, head_dim_v, dtype) of the rows.
CASES = tuple((d, dv, dtype) for d, dv in ((64, 64), (128, 128), (192, 128))
              for dtype in ("bf16", "fp8"))  # fmt: skip
TILE = (256, 128)
SEQLEN = 8192
REPLAYED_SHARES = (0.0, 0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.5)


@dataclass(frozen=True)
class Choice:
    """One row: cycles of a key block's MMA and SMEM, and of exp without and with the best share.

    replayed_share, replayed_gain: the same from the cycle model, None where it was not asked or
    there is no kernel; gain is the time saved over no emulation.
    """

    gpu: str
    head_dim: int
    head_dim_v: int
    dtype: str
    mma: int
    smem: int
    exp_plain: int
    exp_best: int
    share: Fraction
    bound: str
    replayed_share: float | None = None
    replayed_gain: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "share": float(self.share)}


def choose(gpu: Gpu, head_dim: int, head_dim_v: int, dtype: str, *, replay: bool = False) -> Choice:
    """The best share for FlashAttention-4's tile."""
    by_share = [
        (share, budget(gpu, *TILE, head_dim, head_dim_v, dtype=dtype, exp2_emulated_share=share))
        for share in SHARES
    ]
    shortest = min(b.cycles for _, b in by_share)
    share, best = next((s, b) for s, b in by_share if b.cycles == shortest)
    plain = by_share[0][1]
    found = (None, None)
    if replay and head_dim == head_dim_v and dtype == "bf16":
        found = _replayed(gpu, head_dim)
    return Choice(
        gpu.name, head_dim, head_dim_v, dtype, best.mma, best.smem, plain.exp, best.exp, share,
        best.bound, *found,
    )  # fmt: skip


def _replayed(gpu: Gpu, head_dim: int) -> tuple[Any, Any]:
    from roofline.cycles.predict import predict
    from roofline.problem import published_problem

    problem = published_problem(head_dim, SEQLEN, causal=False)
    seconds = {
        share: predict(
            gpu, problem, head_dim, gains=False, options={"exp2_emulated_share": share}
        ).seconds
        for share in REPLAYED_SHARES
    }
    best = min(seconds, key=lambda share: seconds[share])
    return best, 1.0 - seconds[best] / seconds[0.0]


def shares(gpu_name: str, *, replay: bool = False) -> list[Choice]:
    """A row for each head dimension and format that the GPU multiplies."""
    gpu = find_gpu(gpu_name)
    cases = [c for c in CASES if gpu.has(f"mma_{c[2]}")]
    return [choose(gpu, d, dv, dtype, replay=replay) for d, dv, dtype in cases]


def text(choices: list[Choice]) -> str:
    """The table."""
    header = ["head_dim", "dtype", "MMA", "SMEM", "exp", "exp, best", "share", "binds"]
    replayed = any(c.replayed_share is not None for c in choices)
    header += ["replayed share", "saves"] if replayed else []
    rows = []
    for c in choices:
        dims = f"{c.head_dim}" if c.head_dim == c.head_dim_v else f"{c.head_dim}/{c.head_dim_v}"
        row: list[object] = [dims, c.dtype, c.mma, c.smem, c.exp_plain, c.exp_best]
        row += [f"{float(c.share):.1%}", c.bound]
        if replayed:
            none = c.replayed_share is None or c.replayed_gain is None
            row += ["-", "-"] if none else [f"{c.replayed_share:.1%}", f"{c.replayed_gain:.1%}"]
        rows.append(row)
    head = f"{choices[0].gpu}: tile {TILE[0]}x{TILE[1]}, cycles of a key block by unit"
    return f"{head}\n\n{table(header, rows)}"
