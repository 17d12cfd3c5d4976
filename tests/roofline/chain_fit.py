"""The chain of a query tile, fitted to replays: roofline/gpu_data/chain.csv.

    python -m tests.roofline.chain_fit              # the file
    python -m tests.roofline.chain_fit --residuals  # every row, predicted and replayed

Rows are this project's kernel on Blackwell (forward_kernel.csv), and flash-attn-4's on Hopper
(hopper_kernel.csv, made by tests.roofline.forward_table --hopper, which needs the peers). For each
architecture, the crowding, exposure, latency and interference (see roofline.costs) with the least
squares of the relative errors over all rows that have as many K/V stages as fit; then the median of
what a work item takes beyond its closed form, by mask.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

from roofline.candidates import Candidate, blackwell_candidate, hopper_candidate
from roofline.costs import Calibration, Cost, bare_item_cycles
from roofline.evidence import GPU_OF_ARCH, KERNEL_TILE, HopperRow, Row, hopper_rows, rows
from roofline.text import table
from roofline.tile import Tile

CROWDINGS = EXPOSURES = tuple(i / 5 for i in range(6))
LATENCIES = tuple(range(0, 1500, 50))
INTERFERENCES = (3, 4, 6, 8, 12)
HOPPER = "sm_90a"
ARCHS = (HOPPER, *GPU_OF_ARCH)
HEAD = """\
# What the cycle model adds to the closed forms of one query tile's chain, by architecture; see
# roofline/costs.py. Made by python -m tests.roofline.chain_fit from forward_kernel.csv and
# hopper_kernel.csv.
"""


@dataclass(frozen=True)
class Replay:
    """A replayed row: its tile, the closed forms of an iteration, and the cycles it took."""

    name: str
    candidate: Candidate
    share: float
    cycles: float
    item_cycles: float
    causal: bool

    def predicted(self, found: Calibration) -> float:
        cost = Cost.bare(self.candidate).calibrated(found)
        return found.cycles(cost.iteration(self.share).values())


def replays(arch: str) -> list[Replay]:
    """Every row of an architecture that is fitted to."""
    if arch == HOPPER:
        return [_hopper(row) for row in hopper_rows()]
    return [_replay(row) for row in rows() if row.arch == arch and row.is_deepest]


def _hopper(row: HopperRow) -> Replay:
    tile = Tile.of("h200", row.tile_m, row.tile_n, row.head_dim)
    return Replay(
        f"{HOPPER} {row.kernel} {row.head_dim} {row.mask}",
        hopper_candidate(tile, row.tile_m // 64),
        0.0,
        row.key_block_cycles,
        row.item_cycles,
        row.mask == "causal",
    )


def _replay(row: Row) -> Replay:
    dtype = {"bfloat16": "bf16", "float16": "fp16"}[row.dtype]
    tile_m, tile_n, q_stages = KERNEL_TILE
    tile = Tile.of(GPU_OF_ARCH[row.arch], tile_m, tile_n, row.head_dim, dtype=dtype)
    return Replay(
        f"{row.arch} {row.dtype} {row.head_dim} {row.mask} {row.exp2_share:g}",
        blackwell_candidate(tile, q_stages, 1),
        row.exp2_share,
        row.key_block_cycles,
        row.item_cycles,
        row.mask == "causal",
    )


def fit(found: Sequence[Replay]) -> Calibration:
    """The calibration that meets these rows best."""
    costs = [(one, Cost.bare(one.candidate)) for one in found]

    def squares(guess: Calibration) -> float:
        total = 0.0
        for one, cost in costs:
            terms = cost.calibrated(guess).iteration(one.share)
            total += (guess.cycles(terms.values()) / one.cycles - 1) ** 2
        return total

    best = min(
        (
            Calibration(crowding, exposure, float(latency), float(interference))
            for crowding in CROWDINGS
            for exposure in EXPOSURES
            for latency in LATENCIES
            for interference in INTERFERENCES
        ),
        key=squares,
    )
    extra: dict[bool, list[float]] = {False: [], True: []}
    for one, cost in costs:
        chain = cost.calibrated(best).iteration(one.share)["chain"]
        extra[one.causal].append(one.item_cycles - bare_item_cycles(one.candidate.tile, chain))
    dense, causal = (round(statistics.median(extra[mask] or [0.0])) for mask in (False, True))
    return replace(best, item_dense=float(dense), item_causal=float(causal))


def main(argv: Sequence[str]) -> int:
    names = ["arch", *(field.name for field in fields(Calibration))]
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    if "--residuals" not in argv:
        sys.stdout.write(HEAD)
        writer.writeheader()
    for arch in ARCHS:
        found = replays(arch)
        best = fit(found)
        if "--residuals" not in argv:
            row = {name: f"{value:g}" for name, value in asdict(best).items()}
            writer.writerow({"arch": arch} | row)
            continue
        errors = [one.predicted(best) / one.cycles - 1 for one in found]
        lines = [
            [one.name, round(one.cycles), round(one.predicted(best)), f"{error:+.1%}"]
            for one, error in zip(found, errors, strict=True)
        ]
        print(table(["row", "replayed", "predicted", "error"], lines))
        sizes = [abs(error) for error in errors]
        print(f"\nmean {statistics.fmean(sizes):.1%}, worst {max(sizes):.1%}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
