"""The memories of one SM: shared, local, Tensor Memory, and the global allocations it reaches."""

from .global_memory import Allocation, GlobalMemory
from .local import LocalMemory
from .shared import SharedMemory
from .tensor import TensorMemory, TmemAddress

__all__ = [
    "Allocation",
    "GlobalMemory",
    "LocalMemory",
    "SharedMemory",
    "TensorMemory",
    "TmemAddress",
]
