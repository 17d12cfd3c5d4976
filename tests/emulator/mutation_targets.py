# SPDX-License-Identifier: Apache-2.0
"""Our kernels as subjects of `python -m kernels.emulator mutate`: small, but every ring wraps."""

import math

import torch

from kernels.blackwell.forward import AttentionForward
from kernels.blackwell.gemm import ROLES, Gemm
from kernels.common.plan import KernelPlan
from kernels.emulator.mutate import Subject
from tests.blackwell.attention import random_problem

SYNCHRONOUS = (
    "tcgen05.alloc and .dealloc are synchronous, a barrier orders them (PTX ISA 9.1 section"
    " 9.7.16.6.1); the fence here orders no asynchronous operation"
)
ONLY_TMA = (
    "the barrier brings bytes that TMA wrote to shared memory; no other thread's tcgen05 operation"
    " is handed over here, so there is nothing for a tcgen05 fence to order"
)
GEMM_REDUNDANT = {
    r"remove: tcgen05\.fence::\w+ @ blackwell/gemm\.py:\d+ in kernel": SYNCHRONOUS,
    r"remove: tcgen05\.fence::after\w+ @ blackwell/gemm\.py:\d+ in multiply": ONLY_TMA,
}
FORWARD_REDUNDANT = {
    r"remove: tcgen05\.fence::\w+ @ blackwell/forward\.py:\d+ in setup": SYNCHRONOUS,
    r"remove: tcgen05\.fence::after\w+ @ .*forward\.py:\d+ in free_tmem_barrier": SYNCHRONOUS,
    r"remove: tcgen05\.fence::before\w+ @ .*forward\.py:\d+ in free_tmem_barrier": (
        "the mma warp frees tensor memory itself: what it issued needs no hand-over"
    ),
    r"remove: tcgen05\.fence::after\w+ @ blackwell/mma\.py:\d+ in mma": ONLY_TMA,
    r"arrive only: bar\.sync 1.* in free_tmem_barrier": (
        "the correction warps do nothing behind the barrier, so they need not wait at it"
    ),
    r"remove: bar\.warp\.sync.* in correction: channels\.pv_ready\.arrive_warp": (
        "the first arrivals, before any block: no lane of the warp has accessed anything yet"
    ),
    r"remove: cp\.async\.bulk\.commit_group.* in store": (
        "of two: without the first, both copies are in the second's group, which is waited for"
    ),
}
DENSE_REDUNDANT = FORWARD_REDUNDANT | {
    r"^not reached: .* @ blackwell/softmax\.py": (
        "in a loop over further masked blocks: dense attention masks at most the first it visits"
    ),
}


def gemm():
    """10 K tiles on a ring of 4, ragged in M, N and K."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-8, 9, (130, 600), generator=generator).bfloat16()
    b = torch.randint(-8, 9, (120, 600), generator=generator).bfloat16()
    operands = (a, b, torch.full((130, 120), math.nan))
    return Subject(Gemm(), operands, roles=ROLES, redundant=GEMM_REDUNDANT)


def _forward(causal, seqlen_q):
    plan = KernelPlan.forward(head_dim=64, kv_stages=3, causal=causal)
    q, k, v = random_problem(plan, 1, seqlen_q, 600, 1, 1, seed=20)
    # Row maxima that grow from block to block (the last comes first): O has to be rescaled.
    k[0, :, 0, 0] = torch.linspace(60, 0, 600).bfloat16()
    q[..., 0] = 2.0
    out, lse = torch.full_like(q, math.nan), torch.full((1, 1, seqlen_q), math.nan)
    args = (q, k, v, out, lse, 0.125)
    redundant = FORWARD_REDUNDANT if causal else DENSE_REDUNDANT
    return Subject(AttentionForward(plan), args, roles=plan.role_of_warp(), redundant=redundant)


def forward_dense():
    """Five key blocks, ten tiles of K and V on a ring of 3."""
    return _forward(False, 256)


def forward_causal():
    """The same, causal and ragged in rows too."""
    return _forward(True, 230)
