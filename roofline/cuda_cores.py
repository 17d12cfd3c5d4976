"""What the CUDA cores do for one tile: exp2 shared between MUFU and FMA pipes, and the rest.

The exp term of the published roofline is MUFU alone. FlashAttention-4 computes a share of the
exponentials with a polynomial on the FMA pipe (arXiv 2603.05451 section 3); with share f the two
pipes take

    MUFU   (1 - f) M N / mufu_ex2
    FMA    M N (2 + ex2_polynomial f) / fma_sustained      2: scale-subtract and row sum

and the exp term is the larger. They are equal at the *balance share*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from roofline.errors import RooflineError
from roofline.gpus import Gpu
from roofline.tile import Tile

#: fp32 lane-slots per score beside exp2: the scale-subtract FMA and the row-sum add.
FMA_PER_SCORE = 2
#: Share of the tiles whose O is rescaled, with threshold tau = 8 (about ten times fewer than
#: without: Dao, Hot Chips 2025 talk on FlashAttention-4). FlashAttention-3, on Hopper, has none.
RESCALED_SHARE = Fraction(1, 10)
#: Warp instructions of one polynomial exp2 of degree 3, per score. Of a pair of scores: two clamps,
#: three packed adds, three packed FMAs, two shifts and two integer adds, the last four as two LEAs.
POLYNOMIAL_INSTRUCTIONS_PACKED = Fraction(5)
POLYNOMIAL_INSTRUCTIONS_SCALAR = Fraction(8)


@dataclass(frozen=True)
class ExpTerm:
    """Cycles of the exponentials of one tile.

    share: emulated share asked for; mufu, fma: cycles of the two pipes; cycles: what counts;
    balance_share, balance_cycles: where both pipes take the same time (share 0 if FMA is longer
    even without emulation).
    """

    share: Fraction
    mufu: Fraction
    fma: Fraction
    balance_share: Fraction
    balance_cycles: Fraction

    @property
    def cycles(self) -> Fraction:
        """As published without emulation; the longer pipe with it."""
        return max(self.mufu, self.fma) if self.share else self.mufu


def exp_share(value: float | Fraction) -> Fraction:
    """A checked emulated share; RooflineError unless it is in 0..1."""
    try:
        share = Fraction(str(value))
    except ValueError:
        raise RooflineError(f"exp2 share {value!r}: must be a number from 0 to 1") from None
    if not 0 <= share <= 1:
        raise RooflineError(f"exp2 share {value}: must lie from 0 (MUFU only) to 1 (FMA only)")
    return share


def exp_term(tile: Tile, share: Fraction = Fraction(0)) -> ExpTerm:
    """The exp budget of a tile; the same for forward and backward, which recomputes P."""
    scores = tile.tile_m * tile.tile_n
    balance = balance_share(tile.gpu)
    return ExpTerm(
        share=share,
        mufu=_mufu_cycles(tile.gpu, scores, share),
        fma=_fma_cycles(tile.gpu, scores, share),
        balance_share=balance,
        balance_cycles=max(
            _mufu_cycles(tile.gpu, scores, balance), _fma_cycles(tile.gpu, scores, balance)
        ),
    )


def balance_share(gpu: Gpu) -> Fraction:
    """The emulated share f at which (1-f)/mufu = (2 + c f)/fma; 0 where FMA is the longer at 0."""
    mufu, fma, cost = (gpu[k].exact for k in ("mufu_ex2", "fma_sustained", "ex2_polynomial"))
    return max(Fraction(0), (fma - FMA_PER_SCORE * mufu) / (fma + cost * mufu))


def _mufu_cycles(gpu: Gpu, scores: int, share: Fraction) -> Fraction:
    return (1 - share) * scores / gpu["mufu_ex2"].exact


def _fma_cycles(gpu: Gpu, scores: int, share: Fraction) -> Fraction:
    lanes = FMA_PER_SCORE + gpu["ex2_polynomial"].exact * share
    return scores * lanes / gpu["fma_sustained"].exact


@dataclass(frozen=True)
class Work:
    """One kind of CUDA-core work on a tile.

    pipe: one of `PIPES`; lanes: lane operations; instructions: warp instructions issued (32 lanes
    each, 64 where f32x2 packs two).
    """

    name: str
    pipe: str
    lanes: Fraction
    instructions: Fraction


@dataclass(frozen=True)
class CudaCores:
    """All CUDA-core work of one tile and the cycles each pipe takes for it."""

    work: tuple[Work, ...]
    pipes: Mapping[str, Fraction]
    issue: Fraction


PIPES = ("mufu", "fma", "alu", "cvt")


def _rate(tile: Tile, pipe: str) -> Fraction:
    fields = {"mufu": "mufu_ex2", "fma": "fma_sustained", "cvt": tile.format.cvt_field or "alu"}
    return tile.gpu[fields.get(pipe, pipe)].exact


def cuda_cores(tile: Tile, share: Fraction = Fraction(0)) -> CudaCores:
    """Scale, max, exp2, sum, convert and rescale (forward) or the dS chain (backward).

    A lower bound: loads, stores, waits, masks and address arithmetic are left out.
    """
    work_of = _forward_work if tile.direction == "forward" else _backward_work
    work = work_of(tile, share)
    pipes = {}
    for pipe in PIPES:
        lanes = sum((w.lanes for w in work if w.pipe == pipe), Fraction(0))
        pipes[pipe] = lanes / _rate(tile, pipe) if lanes else Fraction(0)
    instructions = sum((w.instructions for w in work), Fraction(0))
    return CudaCores(work, MappingProxyType(pipes), instructions / tile.gpu["issue"].exact)


def _forward_work(tile: Tile, share: Fraction) -> tuple[Work, ...]:
    scores = Fraction(tile.tile_m * tile.tile_n)
    rescaled = RESCALED_SHARE if tile.gpu.has_tmem else Fraction(1)
    outputs = tile.tile_m * tile.head_dim_v * rescaled
    return (
        _row_max(tile.gpu, scores),
        _packed(tile.gpu, "scale and subtract the max", scores),
        *_exp_work(tile.gpu, scores, share),
        _packed(tile.gpu, "row sum", scores),
        _convert(tile, "convert P", scores),
        _packed(tile.gpu, f"rescale O ({float(rescaled):.0%} of the tiles)", outputs),
    )


def _backward_work(tile: Tile, share: Fraction) -> tuple[Work, ...]:
    scores = Fraction(tile.tile_m * tile.tile_n)
    return (
        _packed(tile.gpu, "scale and subtract the LSE", scores),
        *_exp_work(tile.gpu, scores, share),
        _packed(tile.gpu, "dP minus delta", scores),
        _packed(tile.gpu, "times P", scores),
        _convert(tile, "convert P and dS", 2 * scores),
    )


def _packed(gpu: Gpu, name: str, lanes: Fraction) -> Work:
    """fp32 work on the FMA pipe; sm_100 packs two lanes' operations in one instruction (f32x2)."""
    return Work(name, "fma", lanes, lanes / (64 if gpu.arch_number >= 100 else 32))


def _convert(tile: Tile, name: str, values: Fraction) -> Work:
    """Pairs of f32 to the operand format; tf32 needs none."""
    pairs = values / 2 if tile.format.cvt_field else Fraction(0)
    return Work(name, "cvt", pairs, pairs / 32)


def _row_max(gpu: Gpu, scores: Fraction) -> Work:
    """max.f32 takes three inputs from sm_100 on; sm_103 gets it with the TMEM load (ld.red)."""
    if gpu.arch_number >= 103:
        return Work("row max (by the TMEM load)", "alu", Fraction(0), Fraction(0))
    lanes = scores / 2 if gpu.arch_number >= 100 else scores
    return Work("row max", "alu", lanes, lanes / 32)


def _exp_work(gpu: Gpu, scores: Fraction, share: Fraction) -> tuple[Work, ...]:
    on_mufu, emulated = (1 - share) * scores, share * scores
    work = [Work("exp2 on MUFU", "mufu", on_mufu, on_mufu / 32)]
    if share:
        packed = gpu.arch_number >= 100
        each = POLYNOMIAL_INSTRUCTIONS_PACKED if packed else POLYNOMIAL_INSTRUCTIONS_SCALAR
        lanes = emulated * gpu["ex2_polynomial"].exact
        work.append(Work("exp2 by polynomial", "fma", lanes, emulated * each / 32))
    return tuple(work)
