"""What one KV iteration of a tile waits for, and what a work item adds once.

The pipes of an SM give lower bounds: `mma`, `smem`, `exp`, `issue`. What one query tile cannot
overlap with itself is the *chain*:

    chain = softmax x (1 + crowding x other query tiles) + exposure x MMAs of the query tile
            + completion + latency

softmax is the row maximum, then exponentials and conversion; the MMAs are P V and the next Q K^T,
of which a part runs under the softmax (P is announced before its last quarter is written).
*crowding* (how far the softmaxes of a CTA's query tiles fall together, on pipes that they share),
*exposure* and *latency* (barriers, loads from TMEM, results of instructions) are taken from the
cycle model, and so is how much terms of like length get in each other's way:

    cycles = (mma^p + smem^p + exp^p + issue^p + chain^p)^(1/p)     p: the *interference*

The four are those that meet the replays of a kernel best (`gpu_data/chain.csv`, made by
`python -m tests.roofline.chain_fit`, which prints every residual). A second score tile hides the
MMAs, and not the latency.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from roofline.candidates import ROW_REGISTERS, Candidate
from roofline.cuda_cores import cuda_cores, exp_term
from roofline.gpus import Gpu
from roofline.intervals import COMPLETION_CYCLES, serial_cycles
from roofline.terms import mma_exact, smem_exact, total
from roofline.tile import Tile

#: Cycles from a load's issue to its data where a GPU's entry does not say (as B200's, measured).
DEFAULT_LATENCY_CYCLES = 840
_DATA = Path(__file__).with_name("gpu_data") / "chain.csv"


@dataclass(frozen=True)
class Line:
    """A count that grows linearly with the emulated share."""

    start: float
    end: float

    def at(self, share: float) -> float:
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True)
class Cost:
    """The terms of one iteration, as lines over the emulated share.

    stage: pipes of one query tile's softmax; stage_mma: its MMAs, 0 where a second score tile hides
    them; completion: from the last of them to the wait; reload: its scores read a second time,
    where a row does not fit a thread's registers; others: query tiles of the CTA beside it;
    chained: whether there is a chain (forward); crowding, exposure, latency: see the module's text.
    """

    mma: float
    smem: float
    mufu: Line
    fma: Line
    issue: Line
    stage: Mapping[str, Line]
    stage_mma: float
    completion: float
    reload: float
    chained: bool
    others: int
    crowding: float = 0.0
    exposure: float = 1.0
    latency: float = 0.0

    @classmethod
    def of(cls, candidate: Candidate) -> Cost:
        """With what the cycle model knows of this GPU's architecture."""
        found = calibration(candidate.tile)
        return cls.bare(candidate).calibrated(found)

    @classmethod
    def bare(cls, candidate: Candidate) -> Cost:
        """The closed forms alone."""
        tile = candidate.tile
        exp, cores = _ends(exp_term, tile), _ends(cuda_cores, tile)
        stage = replace(tile, tile_m=candidate.rows)
        stage_cores = _ends(cuda_cores, stage)
        chained = tile.direction == "forward"
        exposed = chained and candidate.s_stages == 1
        return cls(
            mma=_tensor_cycles(tile),
            smem=_smem_cycles(tile),
            mufu=Line(*(float(e.mufu) for e in exp)),
            fma=Line(*(float(e.fma) for e in exp)),
            issue=Line(*(float(c.issue) for c in cores)),
            stage={
                pipe: Line(*(float(c.pipes[pipe]) for c in stage_cores))
                for pipe in stage_cores[0].pipes
            },
            stage_mma=_tensor_cycles(stage) if exposed else 0.0,
            completion=_completion(stage) if exposed else 0.0,
            reload=_reload(stage) if chained else 0.0,
            chained=chained,
            others=candidate.q_stages - 1,
        )

    def calibrated(self, found: Calibration) -> Cost:
        """With the chain of a calibration."""
        return replace(
            self, crowding=found.crowding, exposure=found.exposure, latency=found.latency
        )

    def iteration(self, share: float) -> dict[str, float]:
        """Cycles of one KV iteration by what it might wait for."""
        mufu, fma = self.mufu.at(share), self.fma.at(share)
        cycles = {
            "mma": self.mma,
            "smem": self.smem,
            "exp": max(mufu, fma) if share else mufu,
            "issue": self.issue.at(share),
        }
        if self.chained:
            waited = self.exposure * self.stage_mma + self.completion + self.latency
            cycles["chain"] = self.softmax(share) * (1 + self.crowding * self.others) + waited
        return cycles

    def softmax(self, share: float) -> float:
        """Cycles of one query tile's softmax, pipe after pipe where one needs the other."""
        pipes = {name: line.at(share) for name, line in self.stage.items()}
        return self.reload + pipes["alu"] + max(pipes["mufu"], pipes["fma"], pipes["cvt"])


def _ends(term: Any, tile: Tile) -> tuple[Any, Any]:
    """A term without and with full emulation."""
    return term(tile, Fraction(0)), term(tile, Fraction(1))


def _tensor_cycles(tile: Tile) -> float:
    serial = serial_cycles(tile)
    return float(total(mma_exact(tile)) if serial is None else serial)


def _smem_cycles(tile: Tile) -> float:
    """On Hopper the slower reading: each 64-row wgmma reads its B operand anew."""
    return float(total(smem_exact(tile)))


def _reload(stage: Tile) -> float:
    """More than `ROW_REGISTERS` keys are read from TMEM in parts, for the maximum and for exp2."""
    if not stage.gpu.has_tmem or stage.tile_n <= ROW_REGISTERS:
        return 0.0
    scores_bytes = 4 * stage.tile_m * stage.tile_n
    return scores_bytes / float(stage.gpu["tmem_read_bandwidth"].value)


def _completion(stage: Tile) -> float:
    """From the last MMA of S = Q K^T to the softmax warps' wait; in the latency on Hopper."""
    if not stage.gpu.has_tmem:
        return 0.0
    return COMPLETION_CYCLES[True, stage.ctas, min(128, stage.tile_m) * stage.ctas]


@dataclass(frozen=True)
class Calibration:
    """What the cycle model adds to the closed forms on one architecture.

    crowding: share of each other query tile's softmax that a chain waits for; exposure: share of
    its own MMAs; latency: its other cycles; interference: the exponent of the terms' sum, infinite
    where the longest counts alone; item_dense, item_causal: cycles of a work item beyond the closed
    form, by mask.
    """

    crowding: float = 0.0
    exposure: float = 1.0
    latency: float = 0.0
    interference: float = math.inf
    item_dense: float = 0.0
    item_causal: float = 0.0

    def cycles(self, terms: Iterable[float]) -> float:
        """Of an iteration with these terms."""
        values = list(terms)
        longest = max(values)
        if math.isinf(self.interference):
            return longest
        total = sum((value / longest) ** self.interference for value in values)
        return float(longest * total ** (1 / self.interference))


#: The closed forms alone: the backward pass, and architectures that nothing was replayed on.
PLAIN = Calibration()


@cache
def _calibrations() -> Mapping[str, Calibration]:
    lines = _DATA.read_text(encoding="utf-8").splitlines()
    read = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {
        line.pop("arch"): Calibration(**{name: float(value) for name, value in line.items()})
        for line in read
    }


def calibration(tile: Tile) -> Calibration:
    """Of a tile's architecture and pass."""
    if tile.direction == "backward":
        return PLAIN
    return _calibrations().get(tile.gpu.family, PLAIN)


def item_cycles(tile: Tile, chain: float, causal: bool) -> float:
    """What a work item takes besides its iterations: first load, first chain, the epilogue (O
    scaled, written to SMEM and stored), and what the replayed kernel takes on top of these."""
    if tile.direction == "backward":
        return _load_latency(tile.gpu)
    found = calibration(tile)
    extra = found.item_causal if causal else found.item_dense
    return bare_item_cycles(tile, chain) + extra


def bare_item_cycles(tile: Tile, chain: float) -> float:
    """First load, first chain and epilogue by closed form."""
    outputs = tile.tile_m * tile.head_dim_v
    scale = outputs / float(tile.gpu["fma_sustained"].value)
    staged = 2 * outputs * max(2.0, float(tile.format.element_bytes))
    stored = staged / float(tile.gpu["smem_bandwidth"].value)
    return _load_latency(tile.gpu) + chain + scale + stored


def _load_latency(gpu: Gpu) -> float:
    return float(gpu["hbm_latency"].value) if gpu.has("hbm_latency") else DEFAULT_LATENCY_CYCLES
