"""Time and memory of the reference on 1 head, 8192 tokens, head_dim 128, beside PyTorch's.

    python -m tests.fa4.bench_reference

Each figure comes from a process of its own. Both sides compute in float32; the memory is the peak
resident size above that with the inputs in place and the libraries warm.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEQLEN, HEAD_DIM, REPEATS = 8192, 128, 5


def figures(dtype: str = "float32", causal: bool = False) -> dict[str, float]:
    """Seconds of ours and of PyTorch's, their ratio, and our peak bytes above the inputs."""
    timed = _in_a_process("times", dtype, causal)
    return {
        **timed,
        "times_torch": timed["seconds"] / timed["torch_seconds"],
        **_in_a_process("memory", dtype, causal),
    }


def times(dtype: str, causal: bool) -> dict[str, float]:
    """The best of some runs, taken in turns so that both meet the same load."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import fa4

    qkv = [torch.randn(1, SEQLEN, 1, HEAD_DIM, dtype=getattr(torch, dtype)) for _ in range(3)]
    qkv_float = [t.float().transpose(1, 2) for t in qkv]
    best = {"seconds": float("inf"), "torch_seconds": float("inf")}
    calls: dict[str, Callable[[], object]] = {
        "seconds": lambda: fa4.attention(*qkv, causal=causal),
        "torch_seconds": lambda: scaled_dot_product_attention(*qkv_float, is_causal=causal),
    }
    for _ in range(REPEATS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def memory(dtype: str, causal: bool) -> dict[str, float]:
    """Linux: writing 5 to clear_refs resets the peak to the present size (proc(5))."""
    import torch

    import fa4

    qkv = [torch.randn(1, SEQLEN, 1, HEAD_DIM, dtype=getattr(torch, dtype)) for _ in range(3)]
    fa4.attention(*(t[:, :256] for t in qkv), causal=causal)
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    fa4.attention(*qkv, causal=causal)
    return {"peak_bytes_above_inputs": float(_peak_bytes() - before)}


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def _in_a_process(what: str, dtype: str, causal: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.fa4.bench_reference", what, dtype, str(int(causal))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def main(argv: list[str]) -> None:
    if argv:
        function = {"times": times, "memory": memory}[argv[0]]
        print(json.dumps(function(argv[1], bool(int(argv[2])))))
        return
    for dtype, causal in (("float32", False), ("float32", True), ("bfloat16", False)):
        f = figures(dtype, causal)
        print(
            f"reference {dtype:8} causal={causal!s:5}: {f['seconds']:.3f} s, "
            f"{f['times_torch']:.2f} x torch float32 ({f['torch_seconds']:.3f} s), "
            f"{f['peak_bytes_above_inputs'] / 1e6:.0f} MB above the inputs"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
