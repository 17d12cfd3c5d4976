"""The cycle model beside published speeds of FlashAttention-4 on a B200, every residual printed.

    python -m tests.roofline.published                  # flash-attn-4's kernel, if it is installed
    python -m tests.roofline.published --kernel fa4     # this project's kernel

Rows: arXiv 2603.05451, figure 4, forward, head_dim 128, bf16, 32k tokens, 16 heads. They are an
earlier version's than the package's. None of them calibrates anything: the model's constants are
measured on other programs (B200: MMA intervals; H200: latencies), so every row is a check.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from importlib.metadata import version

from roofline.cycles.predict import Prediction, predict
from roofline.problem import Problem
from roofline.text import table

PEER = "tests.roofline.peer_workloads:flash_attention_4"
TOKENS, HEADS, HEAD_DIM = 32768, 16, 128
PUBLISHED: dict[bool, dict[int, int]] = {  # causal -> seqlen -> TFLOP/s
    False: {1024: 1355, 2048: 1468, 4096: 1532, 8192: 1579, 16384: 1601, 32768: 1613},
    True: {1024: 744, 2048: 1053, 4096: 1279, 8192: 1426, 16384: 1526, 32768: 1576},
}
CALIBRATION: tuple[tuple[bool, int], ...] = ()  # rows that a constant was fitted to: none


@dataclass(frozen=True)
class Row:
    causal: bool
    seqlen: int
    published: int
    predicted: Prediction

    @property
    def error(self) -> float:
        return self.predicted.tflops / self.published - 1.0


def rows(kernel: str) -> list[Row]:
    """Predictions for all published rows, in turn."""
    out = []
    for causal, row in PUBLISHED.items():
        for seqlen, tflops in row.items():
            problem = Problem(TOKENS // seqlen, seqlen, seqlen, HEADS, HEADS, causal)
            found = predict("b200", problem, HEAD_DIM, kernel=kernel, gains=False)
            out.append(Row(causal, seqlen, tflops, found))
    return out


def mean_error(found: list[Row]) -> float:
    return sum(abs(row.error) for row in found) / len(found)


def worst_error(found: list[Row]) -> float:
    return max(abs(row.error) for row in found)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.roofline.published")
    parser.add_argument("--kernel", default=PEER)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    found = rows(args.kernel)
    if args.json:
        page = {
            "rows": [
                {
                    "causal": row.causal,
                    "seqlen": row.seqlen,
                    "published": row.published,
                    "predicted": round(row.predicted.tflops, 1),
                    "error": round(row.error, 4),
                }
                for row in found
            ],
            "mean_error": round(mean_error(found), 4),
            "worst_error": round(worst_error(found), 4),
            "calibration": list(CALIBRATION),
        }
        print(json.dumps(page, indent=2))
        return 0
    cells = [
        [
            "causal" if row.causal else "dense",
            row.seqlen,
            row.published,
            f"{row.predicted.tflops:.0f}",
            f"{row.error:+.1%}",
        ]
        for row in found
    ]
    name = f"flash-attn-4 {version('flash-attn-4')}" if args.kernel == PEER else args.kernel
    print(f"B200, forward, head_dim {HEAD_DIM}, bf16, {TOKENS} tokens; kernel {name}\n")
    print(table(["mask", "seqlen", "published", "model", "error"], cells))
    print(f"\nmean {mean_error(found):.1%}, worst {worst_error(found):.1%}; calibrated on: no row")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
