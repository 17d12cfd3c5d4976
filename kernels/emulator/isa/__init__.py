"""Instructions that the machine executes itself, one file per family."""

from . import (  # noqa: F401  (they fill the table)
    addresses,
    allocation,
    atomics,
    bulk,
    clock,
    collective,
    cp_async,
    launch_control,
    match,
    matrix,
    memory,
    printf,
    register_pool,
    sync,
    tensor,
    tensor_map,
    tensor_mma,
    warp_mma,
    wgmma,
)
from .table import FULL, LANES, Handler, Wait, bind, first_lane

__all__ = ["FULL", "LANES", "Handler", "Wait", "bind", "first_lane"]
