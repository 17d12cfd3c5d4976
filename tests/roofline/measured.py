"""The cycle model beside times measured on an H200, every residual printed.

    python -m tests.roofline.measured                 # flash-attn-4 and quack-kernels, if installed
    python -m tests.roofline.measured --clock sustained

Rows: hardware/h200_peers.csv (how they were measured: hardware/measure_peers.py). *burst* is a
short run on a card that idled, at nearly its highest clock; *sustained* goes on until the power
limit has slowed the card down. ``set`` says which rows may calibrate the model and which only check
it; the split was made before anybody had seen an error. The model predicts cycles and clock; the
time of the table stands on both, and the last column compares cycles alone, at the measured clock.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roofline.cycles.hardware import calibrations
from roofline.cycles.pages import calibration_text
from roofline.cycles.predict import Prediction, predict
from roofline.gemm import Gemm
from roofline.problem import Problem
from roofline.text import table

DATA = Path(__file__).parent / "hardware" / "h200_peers.csv"
ATTENTION = "tests.roofline.peer_workloads:flash_attention_4"
PRODUCT = "tests.roofline.peer_workloads:quack_gemm"
#: Constants of the model that rows decided, and which.
CALIBRATED = calibrations(90)


@dataclass(frozen=True)
class Row:
    """A measured point and what the model says of it. us: measured; mhz: the clock meanwhile."""

    name: str
    used: str
    us: float
    mhz: float
    predicted: Prediction

    @property
    def error(self) -> float:
        """Of the time, predicted over measured."""
        return self.predicted.seconds * 1e6 / self.us - 1.0

    @property
    def cycles_error(self) -> float:
        """Of the SMs' cycles, launch left out."""
        return self.predicted.filled.cycles / (self.us * self.mhz) - 1.0


def measured() -> list[dict[str, str]]:
    """The rows of the file."""
    lines = DATA.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def attention(row: dict[str, str], clock: str) -> Prediction:
    seqlen, heads = int(row["seqlen"]), int(row["heads"])
    problem = Problem(int(row["batch"]), seqlen, seqlen, heads, heads, row["causal"] == "1")
    head_dim = int(row["head_dim"])
    return predict("h200", problem, head_dim, kernel=ATTENTION, gains=False, clock=clock)


def product(row: dict[str, str], clock: str) -> Prediction:
    tile, cluster, how = row["config"].split("-")
    options: dict[str, Any] = {
        "tile": tuple(map(int, tile.split("x"))),
        "cluster": tuple(map(int, cluster.removeprefix("cluster").split("x"))),
        "pingpong": how == "pingpong",
    }
    problem = Gemm(int(row["m"]), int(row["n"]), int(row["k"]))
    return predict("h200", problem, kernel=PRODUCT, gains=False, clock=clock, options=options)


def rows(clock: str, kernels: Sequence[str] = ("flash_attn_4", "quack_gemm")) -> list[Row]:
    """Predictions for all measured points of the kernels, in turn."""
    out = []
    for row in measured():
        if row["kernel"] not in kernels:
            continue
        if row["kernel"] == "flash_attn_4":
            mask = "causal" if row["causal"] == "1" else "dense"
            name, found = f"d{row['head_dim']} {mask} {row['seqlen']}", attention(row, clock)
        else:
            name = f"{row['m']}x{row['n']}x{row['k']} {row['config']}"
            found = product(row, clock)
        us, mhz = float(row[f"{clock}_us"]), float(row[f"{clock}_mhz"])
        out.append(Row(name, row["set"], us, mhz, found))
    return out


def summary(found: Sequence[Row]) -> str:
    """Mean and worst error of all rows, and of those that calibrated nothing."""
    parts = []
    for name, some in (
        ("all rows", found),
        ("check rows", [r for r in found if r.used == "check"]),
    ):
        errors = [abs(r.error) for r in some]
        parts.append(f"{name}: mean {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}")
    return "; ".join(parts)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.roofline.measured")
    parser.add_argument("--clock", choices=("burst", "sustained"), default="burst")
    parser.add_argument("--kernel", choices=("flash_attn_4", "quack_gemm"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    kernels = (args.kernel,) if args.kernel else ("flash_attn_4", "quack_gemm")
    results = {kernel: rows(args.clock, (kernel,)) for kernel in kernels}
    if args.json:
        page = {
            kernel: [
                {
                    "row": r.name,
                    "set": r.used,
                    "us": r.us,
                    "model_us": round(r.predicted.seconds * 1e6, 2),
                    "error": round(r.error, 4),
                    "cycles_error": round(r.cycles_error, 4),
                    "model_ghz": round(r.predicted.clock_ghz, 3),
                }
                for r in found
            ]
            for kernel, found in results.items()
        }
        print(json.dumps(page, indent=2))
        return 0
    for kernel, found in results.items():
        print(f"H200, {kernel}, {args.clock}: us, and GHz of the SMs\n")
        cells = [
            [
                r.name,
                r.used,
                f"{r.us:.1f}",
                f"{r.predicted.seconds * 1e6:.1f}",
                f"{r.error:+.1%}",
                f"{r.mhz / 1e3:.2f}",
                f"{r.predicted.clock_ghz:.2f}",
                f"{r.cycles_error:+.1%}",
            ]
            for r in found
        ]
        head = ["row", "set", "measured", "model", "error", "GHz", "model", "cycles"]
        print(table(head, cells))
        print(f"\n{summary(found)}\n")
    print(calibration_text(90))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
