"""The memories of one SM: shared memory, Tensor Memory and the global allocations it reaches."""

from .global_memory import Allocation, GlobalMemory
from .shared import SharedMemory
from .tensor import TensorMemory, TmemAddress

__all__ = ["Allocation", "GlobalMemory", "SharedMemory", "TensorMemory", "TmemAddress"]
