"""The cycle budget of one tile: MMA, SMEM and exp, and which of them binds.

``mma``, ``smem`` and ``exp`` are the published closed forms (arXiv 2603.05451), rounded to whole
cycles; ``smem_exact`` and ``mma_exact`` count what the issued MMAs read and take (`terms`). On
Hopper, whose wgmma reads more than the published form says, ``smem_exact`` is what binds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from roofline.cuda_cores import CudaCores, ExpTerm, cuda_cores, exp_share, exp_term
from roofline.fit import Excess, excesses
from roofline.gpus import Gpu
from roofline.intervals import serial_cycles
from roofline.terms import (
    Term,
    mma_exact,
    mma_published,
    smem_exact,
    smem_published,
    total,
    whole_cycles,
)
from roofline.text import budget_text
from roofline.tile import Tile


@dataclass(frozen=True)
class Budget:
    """Cycles of one KV iteration of one CTA (see `roofline.tile` for what ctas=2 means)."""

    tile: Tile
    exp2_emulated_share: Fraction = Fraction(0)

    @cached_property
    def mma_terms(self) -> tuple[Term, ...]:
        return mma_published(self.tile)

    @cached_property
    def smem_terms(self) -> tuple[Term, ...]:
        return smem_published(self.tile)

    @cached_property
    def smem_exact_terms(self) -> tuple[Term, ...]:
        return smem_exact(self.tile)

    @cached_property
    def exp_term(self) -> ExpTerm:
        return exp_term(self.tile, self.exp2_emulated_share)

    @cached_property
    def cuda_cores(self) -> CudaCores:
        return cuda_cores(self.tile, self.exp2_emulated_share)

    @cached_property
    def excesses(self) -> tuple[Excess, ...]:
        """Why the tile cannot be built on this GPU; empty if it can."""
        return excesses(self.tile)

    @property
    def mma(self) -> int:
        """Tensor-core cycles, as published."""
        return whole_cycles(total(self.mma_terms))

    @property
    def mma_exact(self) -> int:
        """Tensor-core cycles with the rows and reduction steps that the MMA pads to."""
        return whole_cycles(total(mma_exact(self.tile)))

    @property
    def mma_serial(self) -> int | None:
        """Tensor-core cycles of the MMAs one after another at measured intervals; None: Hopper."""
        cycles = serial_cycles(self.tile)
        return None if cycles is None else whole_cycles(cycles)

    @property
    def smem(self) -> int:
        """SMEM port cycles, as published."""
        return whole_cycles(total(self.smem_terms))

    @property
    def smem_exact(self) -> int:
        """SMEM port cycles of the operands that the issued MMAs read."""
        return whole_cycles(total(self.smem_exact_terms))

    @property
    def smem_port(self) -> int:
        """SMEM port cycles that limit the tile: as published on Blackwell, for whose MMAs that form
        is; exact on Hopper, where each 64-row wgmma reads its B anew."""
        return self.smem if self.tile.gpu.has_tmem else self.smem_exact

    @property
    def exp(self) -> int:
        """Exponential cycles: MUFU's, or with an emulated share the longer of MUFU and FMA."""
        return whole_cycles(self.exp_term.cycles)

    @property
    def bound(self) -> str:
        """What binds, as published: "mma", "smem" or "exp", joined by "+" on a tie."""
        return _binding({"mma": self.mma, "smem": self.smem_port, "exp": self.exp})

    @property
    def bound_exact(self) -> str:
        """What binds by the exact counts."""
        return _binding({"mma": self.mma_exact, "smem": self.smem_exact, "exp": self.exp})

    @property
    def cycles(self) -> int:
        """The longest of the three published terms (SMEM: `smem_port`)."""
        return max(self.mma, self.smem_port, self.exp)

    @property
    def cycles_exact(self) -> int:
        """The longest of the three exact terms."""
        return max(self.mma_exact, self.smem_exact, self.exp)

    @property
    def mma_share(self) -> float:
        """Share of the tensor core's peak that this tile can reach, as published."""
        return self.mma / self.cycles

    @property
    def mma_share_exact(self) -> float:
        """The same by the exact counts, padding counted as lost."""
        return min(1.0, self.mma / self.cycles_exact)

    @property
    def peak_tflops(self) -> float:
        """Dense peak of the GPU in this format, TFLOP/s at its `clock`."""
        gpu = self.tile.gpu
        rate = gpu[self.tile.format.rate_field].exact
        return float(gpu["sms"].exact * gpu["clock"].exact * rate / 1000)

    @property
    def ceiling_tflops(self) -> float:
        """What the binding term leaves of the peak, TFLOP/s."""
        return self.peak_tflops * self.mma_share

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(_notes(self))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; cycles are integers, shares and TFLOP/s floats, nothing is NaN."""
        tile, exp, cores = self.tile, self.exp_term, self.cuda_cores
        return {
            "gpu": tile.gpu.name,
            "arch": tile.gpu.arch,
            "pass": tile.direction,
            "dtype": tile.format.name,
            "tile": f"{tile.tile_m}x{tile.tile_n}",
            "tile_m": tile.tile_m,
            "tile_n": tile.tile_n,
            "head_dim": tile.head_dim,
            "head_dim_v": tile.head_dim_v,
            "ctas": tile.ctas,
            "mma": self.mma,
            "mma_exact": self.mma_exact,
            "mma_serial": self.mma_serial,
            "smem": self.smem,
            "smem_exact": self.smem_exact,
            "smem_port": self.smem_port,
            "exp": self.exp,
            "bound": self.bound,
            "bound_exact": self.bound_exact,
            "mma_share": round(self.mma_share, 4),
            "mma_share_exact": round(self.mma_share_exact, 4),
            "peak_tflops": round(self.peak_tflops, 1),
            "ceiling_tflops": round(self.ceiling_tflops, 1),
            "terms": {
                "mma": [term.to_dict() for term in self.mma_terms],
                "smem": [term.to_dict() for term in self.smem_terms],
                "smem_exact": [term.to_dict() for term in self.smem_exact_terms],
            },
            "exp2": {
                "emulated_share": float(exp.share),
                "mufu": whole_cycles(exp.mufu),
                "fma": whole_cycles(exp.fma),
                "balance_share": round(float(exp.balance_share), 4),
                "balance": whole_cycles(exp.balance_cycles),
            },
            "cuda_cores": {
                "issue": whole_cycles(cores.issue),
                **{pipe: round(float(cycles)) for pipe, cycles in cores.pipes.items()},
                "work": [
                    {
                        "name": work.name,
                        "pipe": work.pipe,
                        "lane_operations": round(float(work.lanes)),
                        "warp_instructions": round(float(work.instructions)),
                    }
                    for work in cores.work
                ],
            },
            "fits": not self.excesses,
            "excesses": [str(excess) for excess in self.excesses],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return budget_text(self)


def budget(
    gpu: str | Gpu,
    tile_m: int,
    tile_n: int,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    direction: str = "forward",
    ctas: int = 1,
    dtype: str = "bf16",
    exp2_emulated_share: float | Fraction = 0,
) -> Budget:
    """The cycle budget of one tile.

    gpu: a name ("b200"), an architecture ("sm_100a"), a TOML file or a `Gpu`.
    tile_m, tile_n: query rows and keys of one CTA, multiples of 16; FlashAttention-4's forward is
    256x128, its backward 128x128. head_dim, head_dim_v: of Q and K, and of V (the same if None).
    Returns a `Budget` with ``mma``, ``smem``, ``smem_exact``, ``exp`` (whole cycles) and ``bound``.
    It prices a tile that does not fit the GPU too: ``excesses`` says by how much.
    Raises RooflineError (a ValueError) naming the value, the rule and the way out.
    """
    tile = Tile.of(
        gpu, tile_m, tile_n, head_dim, head_dim_v, direction=direction, ctas=ctas, dtype=dtype
    )
    return Budget(tile, exp_share(exp2_emulated_share))


def _binding(cycles: Mapping[str, int]) -> str:
    longest = max(cycles.values())
    return "+".join(name for name, value in cycles.items() if value == longest)


def _notes(b: Budget) -> list[str]:
    tile, notes = b.tile, []
    if not tile.gpu.has_tmem:
        notes.append(
            f"SMEM is {b.smem_exact}: each 64-row wgmma reads its B anew (measured: roofline"
            " intervals --gpu h200)"
        )
    elif b.smem_exact != b.smem:
        what = "over" if b.smem > b.smem_exact else "under"
        notes.append(f"the published SMEM form {what}-counts this tile; exact: {b.smem_exact}")
    if b.mma_exact != b.mma:
        notes.append(f"the MMAs are padded: {b.mma_exact} cycles on the tensor core")
    if b.mma_serial is not None and b.mma_serial > max(b.mma_exact, b.smem_exact):
        notes.append(
            f"issued one after another the MMAs take {b.mma_serial} cycles: some wait for SMEM "
            "while others leave it idle"
        )
    if tile.direction == "backward" and not tile.gpu.has_tmem:
        notes.append("the backward form is Blackwell's: P and dS as A operands outside SMEM")
    if tile.direction == "backward" and tile.ctas == 2 and not _is_published_pair(tile):
        notes.append("the pair's dS exchange is fitted at 128x128, head_dim 128 (384 cycles)")
    if whole_cycles(b.cuda_cores.issue) > b.cycles:
        notes.append("issue slots take longer than any of the three: they bind")
    return notes


def _is_published_pair(tile: Tile) -> bool:
    return (tile.tile_m, tile.tile_n, tile.head_dim, tile.head_dim_v) == (128, 128, 128, 128)
