"""A script that needs a GPU: the GEMM, compiled once and launched on CUDA tensors."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

from kernels.blackwell.gemm import Gemm


def main() -> None:
    assert torch.cuda.is_available(), "this script needs a GPU"
    a = torch.randn(200, 328, device="cuda").bfloat16()
    b = torch.randn(136, 328, device="cuda").bfloat16()
    c = torch.zeros(200, 136, device="cuda")
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    views = [from_dlpack(t, assumed_align=16).mark_layout_dynamic(leading_dim=1) for t in (a, b, c)]
    gemm = cute.compile(Gemm(), *views, stream)
    gemm(*views, stream)
    torch.cuda.synchronize()
    error = (c.double() - a.double() @ b.double().T).abs().max().item()
    print(f"{torch.cuda.get_device_name()}: largest error {error:.1e}")


if __name__ == "__main__":
    main()
