"""Special registers: what a warp's read-only %registers hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .gpus import GpuModel
    from .host_runtime import Launch
    from .machine import Machine
    from .state import Cta, Warp


def special_registers(machine: Machine, warp: Warp) -> dict[str, Any]:
    """Values of the special registers: one for the warp, or one a lane."""
    launch, cta, gpu = machine.launch, warp.cta, machine.gpu
    lane = np.arange(32, dtype=np.int64)
    bx, by, _ = launch.block
    tid = warp.index * 32 + lane
    cluster = launch.cluster
    vectors = {
        "tid": (tid % bx, tid // bx % by, tid // (bx * by)),
        "ntid": launch.block,
        "ctaid": cta.block,
        "nctaid": launch.grid,
        "clusterid": tuple(b // c for b, c in zip(cta.block, cluster, strict=True)),
        "nclusterid": tuple(g // c for g, c in zip(launch.grid, cluster, strict=True)),
        "cluster_ctaid": tuple(b % c for b, c in zip(cta.block, cluster, strict=True)),
        "cluster_nctaid": cluster,
    }
    one = np.int64(1)
    values: dict[str, Any] = {
        "%laneid": lane,
        "%warpid": warp.index,
        "%nwarpid": len(cta.warps),
        "%smid": _sm(cta, launch, gpu),
        "%nsmid": gpu.sm_count,
        "%gridid": 0,
        "%cluster_ctarank": cta.rank,
        "%cluster_nctarank": len(machine.ctas),
        "%is_explicit_cluster": int(cluster != (1, 1, 1)),
        "%dynamic_smem_size": launch.smem_bytes,
        "%total_smem_size": machine.smem_bytes,
        "%lanemask_eq": one << lane,
        "%lanemask_lt": (one << lane) - 1,
        "%lanemask_le": (one << lane + 1) - 1,
        "%lanemask_gt": 0xFFFFFFFF & ~((one << lane + 1) - 1),
        "%lanemask_ge": 0xFFFFFFFF & ~((one << lane) - 1),
    }
    for name, triple in vectors.items():
        values |= {f"%{name}.{axis}": v for axis, v in zip("xyz", triple, strict=True)}
    return values


def _sm(cta: Cta, launch: Launch, gpu: GpuModel) -> int:
    """The SM of a CTA: one after the other in the order of the grid's clusters, then from the first
    again. Kernels that keep a workspace for each SM get one for each CTA, as far as there are."""
    shape = launch.cluster
    x, y, z = (b // c for b, c in zip(cta.block, shape, strict=True))
    across, down, _ = (g // c for g, c in zip(launch.grid, shape, strict=True))
    return ((x + across * (y + down * z)) * math.prod(shape) + cta.rank) % gpu.sm_count
