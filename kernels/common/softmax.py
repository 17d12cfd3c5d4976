# SPDX-License-Identifier: Apache-2.0
"""Online softmax of one row held by one thread, with conditional rescaling.

For each block of scores s the row keeps a reference maximum m and the sum l of 2^((s - m) c), with
c = softmax_scale * log2(e). When a block raises the maximum by no more than tau (in log2 units), m
stays as it is and nothing needs rescaling: P is then at most 2^tau, and O / l is the same either
way (arXiv 2603.05451, section 3).

NaN and infinity end as in PyTorch: a NaN or +inf score makes its row NaN. The maximum propagates
NaN, and ``m - m`` poisons the sum if m is NaN or infinite, so neither exp2 path has to. A row whose
scores are all -inf (masked) has m = -inf and l = 0; its m counts as 0 in ``s - m``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from kernels.common.exp2 import exp2_mufu, exp2_polynomial

LANES = 4  # independent chains of a reduction


@dsl_user_op
def _max3(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """NaN-propagating maximum of three: one ``max.NaN.f32`` on sm_100 and later."""
    a, b, c = (Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c))
    return Float32(nvvm.fmax(a, b, c=c, nan=True, loc=loc, ip=ip))


def row_maximum(scores: cute.Tensor, start: Float32) -> Float32:
    """Maximum of ``start`` and of a row of float32 scores; NaN if any is NaN."""
    chains = [start] + [scores[i] for i in range(LANES - 1)]
    rest = [scores[i] for i in range(LANES - 1, cute.size(scores))]
    for i in range(0, len(rest) - 1, 2):
        lane = i // 2 % LANES
        chains[lane] = _max3(chains[lane], rest[i], rest[i + 1])
    odd = rest[-1:] if len(rest) % 2 else []
    last = _max3(chains[0], chains[1], chains[2])
    return _max3(last, chains[3], *odd) if odd else cute.arch.fmax(last, chains[3], nan=True)


@cute.jit
def advance_maximum(
    old: Float32, block: Float32, scale_log2: Float32, threshold: cutlass.Constexpr
) -> tuple[Float32, Float32, Float32]:
    """The row's next reference maximum.

    old, block: reference so far and maximum with the new block. Returns ``(reference, subtrahend,
    rescale)``: what to remember, what to subtract from scores (finite where scores are), and the
    factor for the sum and for O, 1 where nothing needs it.
    """
    subtrahend = block if block != -Float32.inf else Float32(0.0)
    drop_log2 = (old - subtrahend) * scale_log2
    reference, rescale = block, exp2_mufu(drop_log2)
    if drop_log2 >= -Float32(threshold):
        reference, subtrahend, rescale = old, old, Float32(1.0)
    if old == -Float32.inf:  # so far the row has seen no key: its sum and O are 0
        rescale = Float32(1.0)
    return reference, subtrahend, rescale


def subtract_maximum(scores: cute.Tensor, subtrahend: Float32, scale_log2: Float32) -> None:
    """scores := (scores - subtrahend) * scale_log2, in place, two at a time."""
    offset = -subtrahend * scale_log2
    for i in range(0, cute.size(scores), 2):
        pair = (scores[i], scores[i + 1])
        scores[i], scores[i + 1] = cute.arch.fma_packed_f32x2(
            pair, (scale_log2, scale_log2), (offset, offset)
        )


def exp2_row(scores: cute.Tensor, first: int, last: int, is_emulated, degree: int) -> None:
    """scores[first:last] := 2^scores, in place; ``is_emulated(pair)`` picks the pipe, ``degree`` is
    the polynomial's."""
    for i in range(first, last, 2):
        if is_emulated(i // 2):
            scores[i], scores[i + 1] = exp2_polynomial(scores[i], scores[i + 1], degree)
        else:
            scores[i], scores[i + 1] = exp2_mufu(scores[i]), exp2_mufu(scores[i + 1])


def add_to_sums(sums: list, weights: cute.Tensor, first: int, last: int) -> list:
    """Adds weights[first:last] to ``LANES`` packed partial sums; [] starts them."""
    sums = list(sums)
    for i in range(first, last, 2):
        lane, pair = i // 2 % LANES, (weights[i], weights[i + 1])
        if lane < len(sums):
            sums[lane] = cute.arch.add_packed_f32x2(sums[lane], pair)
        else:
            sums.append(pair)
    return sums


def total_of(sums: list) -> Float32:
    """The sum of all partial sums."""
    even = cute.arch.add_packed_f32x2(sums[0], sums[1])
    odd = cute.arch.add_packed_f32x2(sums[2], sums[3])
    low, high = cute.arch.add_packed_f32x2(even, odd)
    return low + high
