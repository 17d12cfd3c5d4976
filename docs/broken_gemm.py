# SPDX-License-Identifier: Apache-2.0
"""The GEMM of docs/first_kernel.md with one mistake in it, run on the modelled SM.

    python docs/broken_gemm.py hang          (or: numbers, race)

docs/emulator.md goes from each report to the line at fault.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

import torch

from kernels.blackwell import gemm
from kernels.emulator import emulate

# Name -> the line as it should be, and as it is here. Line numbers stay those of gemm.py.
MISTAKES = {
    "hang": ("            tcgen05.commit(empty + stage)", "            pass"),
    "numbers": (
        "mbarrier_arrive_and_expect_tx(full + stage, tx_bytes)",
        "mbarrier_arrive_and_expect_tx(full + stage, tx_bytes // 2)",
    ),
    "race": (
        "            cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=128)",
        "            pass",
    ),
}


def broken(name, folder):
    """gemm.py with the mistake, imported from ``folder``."""
    right, wrong = MISTAKES[name]
    text = Path(gemm.__file__).read_text()
    assert text.count(right) == 1
    path = Path(folder) / "broken_gemm.py"
    path.write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("broken_gemm", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main():
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if name not in MISTAKES:
        sys.exit(__doc__)
    a, b = torch.randn(128, 640).bfloat16(), torch.randn(128, 640).bfloat16()
    c = torch.zeros(128, 128)
    with tempfile.TemporaryDirectory() as folder:
        module = broken(name, folder)
        report = emulate(module.Gemm(), a, b, c, roles=module.ROLES)
    print(str(report).replace(f"{folder}/", ""))


if __name__ == "__main__":
    main()
