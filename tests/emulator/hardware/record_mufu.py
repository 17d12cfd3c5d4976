"""Record the tables of the special-function unit that the emulator reads (native/mufu.py there).

    python record_mufu.py FOLDER        on a Hopper GPU, with numpy: mufu_ex2.xz and the others

For every significand, silicon's result less a reference value, in units of the last place: two bits
each, the least of that function's distances as zero. The reference is computed with NumPy as the
emulator computes it, bit for bit: every step is one IEEE operation.
"""

from __future__ import annotations

import lzma
import math
import sys
from pathlib import Path

import numpy as np
import record_approx
from numpy.typing import NDArray

LEAST = {"ex2": -1, "rcp": -1, "rsqrt": -2, "sqrt": -1}


def operands(name: str) -> NDArray[np.float32]:
    one_to_two = record_approx.binade()
    if name.endswith("sqrt"):
        return np.concatenate([one_to_two, one_to_two * np.float32(2)])
    return one_to_two


def reference(name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    one = np.float32(1)
    if name == "ex2":  # of x - 1, so from 1 to 2
        f = x.astype(np.float64) - 1.5
        terms = [math.sqrt(2) * math.log(2) ** k / math.factorial(k) for k in range(8)]
        value = np.full(f.shape, terms[-1])
        for term in terms[-2::-1]:
            value = value * f + term
        return 2 * value.astype(np.float32)
    if name == "rcp":
        return one / x
    if name == "sqrt":
        return np.sqrt(x)
    return (1 / np.sqrt(x.astype(np.float64))).astype(np.float32)


def packed(name: str, silicon: NDArray[np.float32]) -> bytes:
    """Four distances a byte, the first in the lowest bits. Raises ValueError beyond two bits."""
    true = reference(name, operands(name))
    distance = silicon.view(np.int32) - true.view(np.int32) - LEAST[name]
    if distance.min() < 0 or distance.max() > 3:
        raise ValueError(f"{name}: distances from {distance.min()} to {distance.max()}")
    by_4 = distance.astype(np.uint8).reshape(-1, 4)
    return (by_4 << np.array([0, 2, 4, 6], np.uint8)).sum(1, dtype=np.uint8).tobytes()


def record(folder: Path) -> None:
    gpu = record_approx.Gpu()
    for name in LEAST:
        table = packed(name, gpu.apply(f"{name}.approx.ftz", operands(name)))
        compressed = lzma.compress(table, preset=9 | lzma.PRESET_EXTREME)
        (folder / f"mufu_{name}.xz").write_bytes(compressed)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
