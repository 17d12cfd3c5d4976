"""The SM's asynchronous engines: the tensor core and the Tensor Memory Accelerator (TMA)."""

from .descriptors import InstrDescriptor, SmemDescriptor
from .tensorcore import mma, mma_pair
from .tma import bulk_load, bulk_store, load_tile, store_tile

__all__ = [
    "InstrDescriptor",
    "SmemDescriptor",
    "bulk_load",
    "bulk_store",
    "load_tile",
    "mma",
    "mma_pair",
    "store_tile",
]
