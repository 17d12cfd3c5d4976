"""The SM's asynchronous engines: the tensor core and the Tensor Memory Accelerator (TMA)."""

from .descriptors import InstrDescriptor, SmemDescriptor
from .tensorcore import mma

__all__ = ["InstrDescriptor", "SmemDescriptor", "mma"]
