"""Loads PTX through the CUDA driver and launches it on torch's current stream."""

from __future__ import annotations

import ctypes
from typing import Any


class Launcher:
    """The current CUDA device. Needs torch and cuda-python; errors of the driver are raised."""

    def __init__(self) -> None:
        import torch
        from cuda.bindings import driver

        self._torch, self._driver = torch, driver
        torch.zeros(1, device="cuda")  # makes the context
        properties = torch.cuda.get_device_properties(0)
        self.name, self.sms = properties.name, properties.multi_processor_count

    def _check(self, result: tuple[Any, ...]) -> Any:
        error, *values = result
        if int(error):
            raise RuntimeError(f"CUDA driver: {error}")
        return values[0] if values else None

    def load(self, ptx: bytes) -> Any:
        """A module; the driver compiles the PTX for this device."""
        return self._check(self._driver.cuModuleLoadData(ptx + b"\0"))

    def function(self, module: Any, name: str, smem: int = 0) -> Any:
        """A kernel of a module that may take ``smem`` bytes of dynamic shared memory."""
        function = self._check(self._driver.cuModuleGetFunction(module, name.encode()))
        attribute = self._driver.CUfunction_attribute
        most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._check(self._driver.cuFuncSetAttribute(function, most, smem))
        return function

    def launch(self, function: Any, ctas: int, threads: int, smem: int, *words: int) -> None:
        """words: the kernel's parameters, all of 64 bits."""
        stream = self._torch.cuda.current_stream().cuda_stream
        values = (tuple(words), (ctypes.c_uint64,) * len(words)) if words else 0
        self._check(
            self._driver.cuLaunchKernel(
                function, ctas, 1, 1, threads, 1, 1, smem, stream, values, 0
            )
        )
