"""Catches what a `@cute.jit` host function launches, on a machine with no GPU and no CUDA driver.

The CuTe DSL compiles a host function to LLVM and leaves the CUDA runtime as undefined symbols
(`_cudaLaunchKernelEx`, `_cudaLibraryGetKernel`, ...). `compile` asks the DSL for its module
*without* the DSL's own JIT engine, builds a private engine from it and binds those symbols to
Python. An ordinary `cute.compile` or a real launch in the same process goes its own way: what
`host_sees` changes of the DSL, it puts back. The kernel's own host code then runs on the CPU, so
grid, cluster, shared memory and parameters (tensor maps included, which the DSL encodes inline)
are those that a GPU would be given.

This is the only package of the emulator that loads the DSL and torch, inside functions.
"""

from __future__ import annotations

from kernels.emulator.capture.arguments import (
    HostArguments,
    TensorArgument,
    cuda_stream,
    host_signature,
)
from kernels.emulator.capture.compiled import CompiledKernel, compile, compile_bound, ptx_of
from kernels.emulator.capture.device import host_sees

__all__ = [
    "CompiledKernel",
    "HostArguments",
    "TensorArgument",
    "compile",
    "compile_bound",
    "cuda_stream",
    "host_sees",
    "host_signature",
    "ptx_of",
]
