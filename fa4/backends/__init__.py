"""Where attention runs: ``reference`` (PyTorch), ``emulator`` (a modelled SM), ``cuda`` (a GPU).

Each module has ``forward(problem, q, k, v, ...) -> Result``; only the one asked is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kernels.common.plan import KernelPlan

BACKENDS = ("auto", "reference", "emulator", "cuda")


@dataclass(frozen=True)
class Result:
    """What one backend computed.

    out: (batch, seqlen_q, heads, head_dim_v) in q's dtype. lse: (batch, heads, seqlen_q), natural
    log. plan: of the kernel that ran, None for the reference. report: the emulator's, else None.
    """

    out: torch.Tensor
    lse: torch.Tensor
    plan: KernelPlan | None = None
    report: Any = None
