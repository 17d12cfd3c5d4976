# SPDX-License-Identifier: Apache-2.0
"""Our kernels as subjects of `python -m kernels.emulator mutate`: small, but every ring wraps."""

import math

import torch

from kernels.blackwell.forward import AttentionForward
from kernels.blackwell.gemm import ROLES, Gemm
from kernels.common.plan import KernelPlan
from kernels.emulator.mutate import Subject
from tests.blackwell.attention import random_problem


def gemm():
    """10 K tiles on a ring of 4, ragged in M, N and K."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-8, 9, (130, 600), generator=generator).bfloat16()
    b = torch.randint(-8, 9, (120, 600), generator=generator).bfloat16()
    return Subject(Gemm(), (a, b, torch.full((130, 120), math.nan)), roles=ROLES)


def _forward(causal, seqlen_q):
    plan = KernelPlan.forward(head_dim=64, kv_stages=3, causal=causal)
    q, k, v = random_problem(plan, 1, seqlen_q, 600, 1, 1, seed=20)
    # Row maxima that grow from block to block (the last block comes first), so that the correction warps have work to do.
    k[0, :, 0, 0] = torch.linspace(60, 0, 600).bfloat16()
    q[..., 0] = 2.0
    out, lse = torch.full_like(q, math.nan), torch.full((1, 1, seqlen_q), math.nan)
    args = (q, k, v, out, lse, 0.125)
    return Subject(AttentionForward(plan), args, roles=plan.role_of_warp())


def forward_dense():
    """Five key blocks, ten tiles of K and V on a ring of 3."""
    return _forward(False, 256)


def forward_causal():
    """The same, causal and ragged in rows too."""
    return _forward(True, 230)
