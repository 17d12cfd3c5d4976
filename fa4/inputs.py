"""Q, K and V for the command line: from a safetensors file, or random."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

_FLOAT32_BYTES = 4
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
LAYOUT = "q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, kv_heads, head_dim)"


def load(path: str | Path) -> QKV:
    """Tensors named q, k and v of a safetensors file, on the CPU.

    Raises ValueError for a file that is missing, is none, is cut short or lacks a name. Shapes and
    dtypes are for `AttentionProblem` to check.
    """
    from fa4.dependencies import require

    require("safetensors")
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"--input {path}: {kind}; give a safetensors file with {LAYOUT}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = sorted(file.keys())
            missing = [name for name in "qkv" if name not in names]
            if missing:
                raise ValueError(
                    f"--input {path}: no tensor named {', '.join(missing)}, only "
                    f"{', '.join(names) or 'none at all'}; name them so: {LAYOUT}"
                )
            q, k, v = (file.get_tensor(name) for name in "qkv")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"--input {path}: cannot be read as safetensors ({error}); it is cut short, or another "
            "kind of file: save q, k and v with safetensors.torch.save_file"
        ) from error
    return q, k, v


def random(
    *,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    seed: int,
) -> QKV:
    """Standard normal q, k and v, the same for the same seed on every machine."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim_v),
    ]
    nbytes = _FLOAT32_BYTES * sum(math.prod(shape) for shape in shapes)
    if nbytes > _physical_bytes():
        raise ValueError(
            f"q {shapes[0]}, k {shapes[1]} and v {shapes[2]} take {nbytes / 2**30:,.0f} GiB as "
            f"float32, and this machine has {_physical_bytes() / 2**30:,.0f}: give a smaller "
            "--batch, --seqlen, --heads or --head-dim"
        )
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
