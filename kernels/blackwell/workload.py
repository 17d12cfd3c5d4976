# SPDX-License-Identifier: Apache-2.0
"""The forward kernel as a workload of the cycle model: `roofline simulate --kernel` names it.

A workload is a function of a problem that returns what to launch and how its grid is cut; any
kernel can have one, and nothing else of it needs to be known.
"""

import math
from typing import Any

import torch

from kernels.blackwell.forward import AttentionForward
from kernels.common.plan import KernelPlan

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def attention_forward(
    *,
    gpu: str,
    dtype: str,
    head_dim: int,
    batch: int,
    seqlen: int,
    seqlen_k: int,
    heads: int,
    kv_heads: int,
    causal: bool,
    **plan_fields: Any,
) -> dict[str, Any]:
    """The forward kernel on random normal data.

    Returns ``fn`` and ``args``, to launch; ``roles``, names by warp; ``tile_rows`` and
    ``tile_keys``, the query rows of a work item and the keys of an iteration; ``persistent``,
    whether a CTA takes one work item after another; ``longest_first``, whether the grid starts with
    the longest items. plan_fields: fields of the plan to set, such as ``exp2_emulated_share``.
    Raises ValueError where the kernel has no such plan.
    """
    plan = KernelPlan.forward(gpu=gpu, dtype=dtype, head_dim=head_dim, causal=causal, **plan_fields)
    generator = torch.Generator().manual_seed(0)

    def normal(length: int, count: int) -> torch.Tensor:
        values = torch.randn((batch, length, count, head_dim), generator=generator)
        return values.to(_DTYPES[plan.dtype])

    q, k, v = normal(seqlen, heads), normal(seqlen_k, kv_heads), normal(seqlen_k, kv_heads)
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, seqlen))
    return {
        "fn": AttentionForward(plan),
        "args": (q, k, v, out, lse, 1.0 / math.sqrt(head_dim)),
        "roles": plan.role_of_warp(),
        "tile_rows": plan.tile_q,
        "tile_keys": plan.tile_n,
        "persistent": False,
        "longest_first": plan.tile_order == "longest_first",
    }
