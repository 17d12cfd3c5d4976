"""What a user's script does, for test_stand_in.py: tensors on the GPU, a launch, a check."""

from __future__ import annotations

import argparse

import torch
from cutlass.cute.runtime import from_dlpack

from tests.emulator import capture_kernels as k


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int)
    parser.add_argument("--beyond", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise RuntimeError("this script needs a GPU")
    x = torch.randn(options.n, device="cuda")
    before = x.clone()
    function = k.doubles_beyond if options.beyond else k.double_all
    function(from_dlpack(x).mark_layout_dynamic())
    torch.cuda.synchronize()
    torch.testing.assert_close(x, 2 * before, rtol=0, atol=0)
    print("right")


if __name__ == "__main__":
    main()
