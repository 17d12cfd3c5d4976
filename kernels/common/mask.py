# SPDX-License-Identifier: Apache-2.0
"""Which keys a query row sees, block by block, and how a row of scores is masked.

Causal masks align bottom-right: row ``r`` sees key ``c`` if ``c <= r + seqlen_k - seqlen_q``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, Uint64
from cutlass.cutlass_dsl import select_

CHUNK = 32  # columns a mask word covers


@cute.jit
def visible_keys(row: Int32, seqlen_q: Int32, seqlen_k: Int32, causal: cutlass.Constexpr) -> Int32:
    """Keys that row ``row`` sees: 0 to ``seqlen_k``, always the first ones."""
    keys = seqlen_k
    if cutlass.const_expr(causal):
        keys = max(min(row + 1 + seqlen_k - seqlen_q, seqlen_k), 0)
    return keys


@cute.jit
def mask_beyond(scores: cute.Tensor, limit: Int32) -> None:
    """Sets ``scores[c]`` to -inf for every column ``c >= limit``; ``limit`` is at least -2^30.

    scores: (columns) float32 registers of one row. A 32-bit word of kept columns is made per 32
    columns, so that ptxas can move it into predicates at once (R2P) instead of comparing.
    """
    for chunk in cutlass.range_constexpr(cute.size(scores) // CHUNK):
        # Shifted as 64 bits: a 32-bit shift by 32 is not defined in LLVM.
        beyond = min(max((chunk + 1) * CHUNK - limit, 0), CHUNK)
        keep = Uint32(Uint64(0xFFFFFFFF) >> Uint64(beyond))
        for bit in cutlass.range_constexpr(CHUNK):
            column = chunk * CHUNK + bit
            kept = Boolean(keep & Uint32(1 << bit))
            scores[column] = select_(kept, scores[column], Float32(-Float32.inf))
