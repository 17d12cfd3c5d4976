"""FlashAttention-4 for PyTorch: on a Blackwell GPU, on a modelled one, or in plain PyTorch.

    import fa4
    out = fa4.attention(q, k, v, causal=True)                       # the tensors' device decides
    out = fa4.attention(q, k, v, causal=True, backend="emulator")   # the kernel, without a GPU
    fa4.supports("bwd", gpu="b200").reason

Importing it loads neither the DSL nor CUDA; a backend loads what it needs when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fa4.api import attention
from fa4.errors import MissingDependencyError, UnsupportedError
from fa4.features import FEATURES
from fa4.problem import AttentionProblem
from fa4.support import Support, supports

if TYPE_CHECKING:
    from kernels.emulator.findings import EmulationError

__all__ = [
    "FEATURES",
    "AttentionProblem",
    "EmulationError",
    "MissingDependencyError",
    "Support",
    "UnsupportedError",
    "attention",
    "supports",
]


def __getattr__(name: str) -> Any:
    if name == "EmulationError":
        from kernels.emulator.findings import EmulationError

        return EmulationError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
