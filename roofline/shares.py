"""Which emulated share of exp2 is best, and which unit binds then: three answers beside each other.

*pipes*: the closed form, pipes alone; *chain*: with the latencies and the interference that the
cycle model knows of this GPU (`roofline.costs`), for any head dimension and format; *replay*: the
cycle model on this project's kernel, where there is one, from the table that `fa4` plans by
(`roofline.evidence`). The best share is the smallest that makes a key block shortest, to a per
cent: more of it only loads the FMA pipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from roofline.budgets import budget
from roofline.candidates import blackwell_candidate
from roofline.costs import Cost, calibration
from roofline.decisions import BLOCKS, SHARE_TIE, best_row, kernel_dtype
from roofline.evidence import KERNEL_TILE, rows_for
from roofline.formats import find_format
from roofline.gpus import Gpu, find_gpu
from roofline.problem import SEQLEN, published_problem
from roofline.terms import WGMMA_ROWS
from roofline.text import table
from roofline.tile import Tile
from roofline.tiles import SHARES

#: (head_dim, head_dim_v, dtype) of the rows.
CASES = tuple((d, dv, dtype) for d, dv in ((64, 64), (128, 128), (192, 128))
              for dtype in ("bf16", "fp8"))  # fmt: skip
#: Shares that --replay tries.
REPLAYED_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5)


@dataclass(frozen=True)
class Answer:
    """A share, and the part of a key block's time (of a work item's, replayed) that it saves."""

    share: float
    saves: float


@dataclass(frozen=True)
class ShareRow:
    """Cycles of a key block's MMA and SMEM, and of exp without and with the best share by pipes.

    share, bound: by pipes; chain: with latencies, None on Hopper;
    replay: of this project's kernel, None where there is none.
    """

    gpu: str
    tile: str
    head_dim: int
    head_dim_v: int
    dtype: str
    mma: int
    smem: int
    exp_plain: int
    exp_best: int
    share: Fraction
    bound: str
    chain: Answer | None
    replay: Answer | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; what there is no answer for is null."""
        page = {**vars(self), "share": float(self.share)}
        chain, replay = page.pop("chain"), page.pop("replay")
        return page | {
            "chain_share": None if chain is None else chain.share,
            "chain_saves": None if chain is None else round(chain.saves, 4),
            "replayed_share": None if replay is None else replay.share,
            "replayed_saves": None if replay is None else round(replay.saves, 4),
        }


def tile_of(gpu: Gpu) -> tuple[int, int]:
    """FlashAttention-4's tile; on Hopper, whose registers hold no such tile, two wgmma's rows."""
    tile_m, tile_n, _ = KERNEL_TILE
    return (tile_m, tile_n) if gpu.has_tmem else (2 * WGMMA_ROWS, tile_n)


def row_of(gpu: Gpu, head_dim: int, head_dim_v: int, dtype: str, *, anew: bool = False) -> ShareRow:
    """The best share for the tile of `tile_of`. anew: emulate and replay, and take no table."""
    tile_m, tile_n = tile_of(gpu)
    by_share = [
        (
            share,
            budget(
                gpu, tile_m, tile_n, head_dim, head_dim_v, dtype=dtype, exp2_emulated_share=share
            ),
        )
        for share in SHARES
    ]
    shortest = min(b.cycles for _, b in by_share)
    share, best = next((s, b) for s, b in by_share if b.cycles == shortest)
    plain = by_share[0][1]
    chain = _chain(gpu, head_dim, head_dim_v, dtype)
    replay = (_replayed if anew else _known)(gpu, head_dim, head_dim_v, dtype)
    return ShareRow(
        gpu.name, f"{tile_m}x{tile_n}", head_dim, head_dim_v, dtype, best.mma, best.smem_port,
        plain.exp, best.exp, share, best.bound, chain, replay,
    )  # fmt: skip


def _chain(gpu: Gpu, head_dim: int, head_dim_v: int, dtype: str) -> Answer | None:
    if not gpu.has_tmem:  # the tile is Blackwell's
        return None
    tile_m, tile_n, q_stages = KERNEL_TILE
    tile = Tile.of(gpu, tile_m, tile_n, head_dim, head_dim_v, dtype=dtype)
    cost, known = Cost.of(blackwell_candidate(tile, q_stages, 1)), calibration(tile)
    return _smallest({float(s): known.cycles(cost.iteration(float(s)).values()) for s in SHARES})


def _smallest(cycles: dict[float, float]) -> Answer:
    """The smallest share that ties with the fastest."""
    fastest = min(cycles.values())
    share = min(s for s, c in cycles.items() if c <= SHARE_TIE * fastest)
    return Answer(share, 1.0 - cycles[share] / cycles[0.0])


def _known(gpu: Gpu, head_dim: int, head_dim_v: int, dtype: str) -> Answer | None:
    """From the table of replays: what fa4's plan has."""
    if head_dim != head_dim_v or head_dim > 128:
        return None
    found = rows_for(gpu, kernel_dtype(find_format(dtype)), head_dim, causal=False)
    deepest = [row for row in found if row.is_deepest]
    best = best_row(deepest)
    plain = next((row for row in deepest if row.exp2_share == 0.0), None)
    if best is None or plain is None:
        return None
    return Answer(best.exp2_share, 1.0 - best.cycles(BLOCKS) / plain.cycles(BLOCKS))


def _replayed(gpu: Gpu, head_dim: int, head_dim_v: int, dtype: str) -> Answer | None:
    if not gpu.has_tmem or head_dim != head_dim_v or head_dim > 128 or dtype != "bf16":
        return None
    from roofline.cycles.predict import predict

    problem = published_problem(head_dim, SEQLEN, causal=False)
    return _smallest(
        {
            share: predict(
                gpu,
                problem,
                head_dim,
                dtype=dtype,
                gains=False,
                options={"exp2_emulated_share": share},
            ).seconds
            for share in REPLAYED_SHARES
        }
    )


def shares(gpu_name: str, *, replay: bool = False) -> list[ShareRow]:
    """A row for each head dimension and format that the GPU multiplies.

    replay: emulate and replay anew instead of looking replays up.
    """
    gpu = find_gpu(gpu_name)
    cases = [c for c in CASES if gpu.has(f"mma_{c[2]}")]
    return [row_of(gpu, d, dv, dtype, anew=replay) for d, dv, dtype in cases]


def text(found: list[ShareRow]) -> str:
    """The table."""
    header = ["head_dim", "dtype", "MMA", "SMEM", "exp", "exp, best", "pipes", "binds"]
    header += ["chain", "saves", "replay", "saves"]
    rows = []
    for r in found:
        dims = f"{r.head_dim}" if r.head_dim == r.head_dim_v else f"{r.head_dim}/{r.head_dim_v}"
        row: list[object] = [dims, r.dtype, r.mma, r.smem, r.exp_plain, r.exp_best]
        row += [f"{float(r.share):.1%}", r.bound, *_cells(r.chain), *_cells(r.replay)]
        rows.append(row)
    head = (
        f"{found[0].gpu}: tile {found[0].tile}, cycles of a key block by unit, and the best share"
    )
    if any(r.chain is not None for r in found):
        return f"{head}\n\n{table(header, rows)}"
    note = "chain and replay: none, for no kernel here emulates exp2 on this architecture"
    return f"{head}\n\n{table(header, rows)}\n\n{note}"


def _cells(answer: Answer | None) -> tuple[str, str]:
    return ("-", "-") if answer is None else (f"{answer.share:.1%}", f"{answer.saves:.1%}")
