# SPDX-License-Identifier: Apache-2.0
"""In which order CTAs take the tiles of a problem.

*head_major*: all query tiles of a head one after another, so that its K and V stay in L2.
*longest_first*, for causal masks: the longest tile first (LPT scheduling: short ones fill the gaps
at the end), over as many heads at a time as have their K and V in L2 together (arXiv 2603.05451,
section 3.3). A plan says which (``KernelPlan.tile_order``).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

# Of B200's 126 MiB of L2, what K and V of the heads in flight may take.
L2_BUDGET_BYTES = 50 * 1024 * 1024


@cute.jit
def heads_in_l2(kv_bytes: Int64, heads: Int32) -> Int32:
    """How many of ``heads`` (of all batches) to walk together, at least 1.

    kv_bytes: bytes of K and V of one head.
    """
    fit = min(Int64(L2_BUDGET_BYTES) // max(kv_bytes, Int64(1)), Int64(heads))
    return Int32(max(fit, Int64(1)))


@cute.jit
def tile_of(index: Int32, m_tiles: Int32, heads: Int32, section: Int32, lpt: cutlass.Constexpr):
    """Tile ``index`` of ``m_tiles * heads`` as ``(m_tile, head)``; heads count over all batches.

    section: heads walked together, from :func:`heads_in_l2`; only with ``lpt``.
    """
    # unsigned: one div each, where signed floor division takes five more instructions
    t, m = Uint32(index), Uint32(m_tiles)
    if cutlass.const_expr(not lpt):
        head = t // m
        return Int32(t - head * m), Int32(head)
    per_section = Uint32(section) * m
    number = t // per_section
    first_head = number * Uint32(section)
    inside = t - number * per_section
    width = min(Uint32(section), Uint32(heads) - first_head)
    rank = inside // width
    return Int32(m - 1 - rank), Int32(first_head + inside - rank * width)
