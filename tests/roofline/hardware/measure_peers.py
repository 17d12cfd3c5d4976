"""Times other authors' Hopper kernels on one GPU: the points that the cycle model is held against.

    python -m tests.roofline.hardware.measure_peers --out tests/roofline/hardware/h200_peers.csv

needs an sm_90 GPU, torch, cuda-python, nvidia-ml-py, flash-attn-4 and quack-kernels
(``pip install .[peers]``), and three minutes. Kernels, all bf16 with float32 accumulation:

    flash_attn_4   the forward, out and log-sum-exp; 16384 tokens in all, hidden size 2048
    quack_gemm     out[m, n] = a[m, k] b[n, k]^T, persistent, tiles handed out statically
    cublas         the same product by torch.matmul
    copy           an elementwise kernel, m MiB read and m written
    empty          a kernel that does nothing: what a node of a graph costs

Every point is timed twice, as replays of a CUDA graph of warm launches one after another on the
same buffers (what fits into L2 is there):

    burst          a card that idled: the timed launches take about 1.5 ms (one launch at the least)
    sustained      0.6 s of replays after 0.4 s of them: the clock that the power limit leaves

``us`` are for one launch, gaps between launches included; clocks are means over exactly the timed
launches, from the SMs' own counters. Inputs are standard normal, where ``data`` does not say zeros:
zeros draw less power. quack launches its kernels with programmatic stream serialization, so that a
launch's prologue overlaps the end of the one before; the others do not.

Half of the points of flash_attn_4 and quack_gemm calibrate the model, half check it, by a rule that
knows no times (`split`). cublas, copy and empty are for calibration.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tests.roofline.hardware import gpu_clock

TOKENS, HIDDEN = 16384, 2048
SEQLENS = (1024, 2048, 4096, 8192, 16384)
SQUARES = ((2048,) * 3, (4096,) * 3, (8192,) * 3, (16384,) * 3)
RECTANGLES = ((8192, 1024, 8192), (2048, 16384, 4096), (4096, 4096, 1024), (5120, 3072, 2560))
BURST_MICROSECONDS = 1500.0
MAX_NODES = 64


@dataclass(frozen=True)
class Gemm:
    """quack's tile (M, N of a CTA), cluster (M, N) and whether two warpgroups take turns."""

    tile: tuple[int, int]
    cluster: tuple[int, int]
    pingpong: bool

    def __str__(self) -> str:
        tile, cluster = ("x".join(map(str, pair)) for pair in (self.tile, self.cluster))
        return f"{tile}-cluster{cluster}-{'pingpong' if self.pingpong else 'cooperative'}"


#: The first is quack's default on sm_90.
GEMMS = (
    Gemm((128, 192), (2, 1), True),
    Gemm((128, 256), (2, 1), False),
    Gemm((256, 128), (1, 2), False),
    Gemm((128, 128), (1, 1), True),
)


@dataclass(frozen=True)
class Point:
    """One thing to time; zeros and "" where a field says nothing about it."""

    kernel: str
    head_dim: int = 0
    causal: bool = False
    seqlen: int = 0
    m: int = 0
    n: int = 0
    k: int = 0
    gemm: Gemm | None = None
    data: str = "randn"

    @property
    def series(self) -> tuple[Any, ...]:
        return (self.kernel, self.head_dim, self.causal, str(self.gemm or ""), self.data)

    @property
    def heads(self) -> int:
        return HIDDEN // self.head_dim if self.head_dim else 0

    @property
    def batch(self) -> int:
        return TOKENS // self.seqlen if self.seqlen else 0

    @property
    def flops(self) -> float:
        """4 s^2 d for each head and batch, half of it when causal; 2 m n k of a product."""
        if self.kernel == "flash_attn_4":
            pairs = self.batch * self.heads * self.seqlen**2
            return 4.0 * pairs * self.head_dim * (0.5 if self.causal else 1.0)
        return 2.0 * self.m * self.n * self.k

    def __str__(self) -> str:
        if self.kernel == "flash_attn_4":
            mask = "causal" if self.causal else "dense"
            return f"{self.kernel} d{self.head_dim} {mask} {self.seqlen}"
        size = "x".join(str(x) for x in (self.m, self.n, self.k) if x)
        return " ".join(x for x in (self.kernel, size, str(self.gemm or ""), self.data) if x)


def points() -> list[Point]:
    """Every point, series after series, each from the smallest problem to the largest."""
    attention = [
        Point("flash_attn_4", head_dim=head_dim, causal=causal, seqlen=seqlen)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for seqlen in SEQLENS
    ]
    products = []
    for index, gemm in enumerate(GEMMS):
        shapes = sorted(SQUARES + (RECTANGLES if index < 2 else ()), key=math.prod)
        products += [Point("quack_gemm", m=m, n=n, k=k, gemm=gemm) for m, n, k in shapes]
    shapes = sorted(SQUARES + RECTANGLES, key=math.prod)
    cublas = [Point("cublas", m=m, n=n, k=k) for m, n, k in shapes]
    cublas += [Point("cublas", m=m, n=n, k=k, data="zeros") for m, n, k in SQUARES[1:]]
    copies = [Point("copy", m=m) for m in (64, 1024, 4096)]
    return attention + products + cublas + copies + [Point("empty")]


def split(every: list[Point]) -> dict[Point, str]:
    """``calibration`` or ``check``: in turns along each series of the kernels under test.

    The first series begins with calibration, the next with check, and so on, so that both sets
    hold small and large problems of every kind. All else is calibration.
    """
    series: dict[tuple[Any, ...], list[Point]] = {}
    for point in every:
        series.setdefault(point.series, []).append(point)
    sets = {}
    for number, members in enumerate(series.values()):
        for index, point in enumerate(members):
            check = point.kernel in ("flash_attn_4", "quack_gemm") and (number + index) % 2 == 1
            sets[point] = "check" if check else "calibration"
    return sets


# ------------------------------------------------------------------------------- the workloads


def _normal(*shape: int, data: str = "randn") -> Any:
    import torch

    make = getattr(torch, data)
    return make(*shape, device="cuda", dtype=torch.bfloat16)


def _attention(point: Point) -> tuple[Callable[[], None], Callable[[], float]]:
    import torch
    from flash_attn.cute.interface import _flash_attn_fwd

    shape = (point.batch, point.seqlen, point.heads, point.head_dim)
    q, k, v = (_normal(*shape) for _ in range(3))
    out = torch.empty_like(q)
    lse = torch.empty((point.batch, point.heads, point.seqlen), device="cuda")

    def launch() -> None:
        _flash_attn_fwd(q, k, v, causal=point.causal, out=out, lse=lse, return_lse=True)

    def error() -> float:
        """Against PyTorch's own attention in float32, on one head."""
        one = [x[:1, :, :1].transpose(1, 2).float() for x in (q, k, v)]
        want = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=point.causal)
        return _relative(out[:1, :, :1].transpose(1, 2), want)

    return launch, error


def _product(point: Point) -> tuple[Callable[[], None], Callable[[], float]]:
    import torch

    a, b = _normal(point.m, point.k, data=point.data), _normal(point.n, point.k, data=point.data)
    out = torch.empty((point.m, point.n), device="cuda", dtype=torch.bfloat16)
    gemm = point.gemm
    if gemm is None:

        def launch() -> None:
            torch.matmul(a, b.T, out=out)
    else:
        from quack.gemm import gemm as quack_gemm

        def launch() -> None:
            quack_gemm(a, b, out, None, None, *gemm.tile, *gemm.cluster, pingpong=gemm.pingpong)

    def error() -> float:
        """Against a float32 product, on 64 rows."""
        rows = slice(point.m // 2 - 32, point.m // 2 + 32)
        return _relative(out[rows], a[rows].float() @ b.float().T)

    return launch, error


def _copy(point: Point) -> tuple[Callable[[], None], Callable[[], float]]:
    import torch

    source = torch.randn(point.m << 18, device="cuda")
    target = torch.empty_like(source)

    def launch() -> None:
        torch.mul(source, 1.0, out=target)

    return launch, lambda: float((target != source).any())


def _relative(got: Any, want: Any) -> float:
    size = want.norm().item()
    return float((got.float() - want).norm().item() / (size or 1.0))


def workload(
    point: Point, probe: gpu_clock.Probe
) -> tuple[Callable[[], None], Callable[[], float]]:
    """(launches it once on torch's current stream, relative error of the last launch)."""
    if point.kernel == "empty":
        return probe.empty, lambda: 0.0
    makers = {"flash_attn_4": _attention, "copy": _copy}
    return makers.get(point.kernel, _product)(point)


def version(point: Point) -> str:
    package = {"flash_attn_4": "flash-attn-4", "quack_gemm": "quack-kernels"}
    return importlib.metadata.version(package.get(point.kernel, "torch"))


# -------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Row:
    """A line of the CSV. us: microseconds of a launch, the median (burst) or mean (sustained);
    spread: (p90 - p10) / median of the samples; mhz: mean SM clock of the same launches, so that
    us x mhz are cycles; nodes: launches in the graph; smem: bytes a CTA, dynamic and static."""

    kernel: str
    version: str
    data: str
    head_dim: int
    causal: int
    seqlen: int
    batch: int
    heads: int
    m: int
    n: int
    k: int
    config: str
    nodes: int
    burst_us: float
    burst_spread: float
    burst_mhz: float
    sustained_us: float
    sustained_spread: float
    sustained_mhz: float
    power_w: float
    power_instant_w: float
    celsius: float
    limits: str
    grid: str
    block: str
    registers: int
    smem: int
    set: str


def tile_of(point: Point) -> str:
    """The CTA's tile and what else the kernel was made with."""
    if point.kernel != "flash_attn_4":
        return str(point.gemm or "")
    from flash_attn.cute.interface import _tile_size_fwd_sm90

    tile = _tile_size_fwd_sm90(point.head_dim, point.head_dim, point.causal, False)
    return f"{tile.m_block_size}x{tile.n_block_size}"


def measure(point: Point, probe: gpu_clock.Probe, chosen: str) -> Row:
    import torch

    launch, error = workload(point, probe)
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    if (found := error()) > 0.01 or math.isnan(found):
        raise RuntimeError(f"{point}: relative error {found:.3g}: wrong results are not timed")
    first = gpu_clock.burst(probe, gpu_clock.graph_of(launch, 4), 4, repeats=2, rest=0.05)
    wanted = round(BURST_MICROSECONDS / first.microseconds)
    nodes = min(MAX_NODES, max(1, wanted))
    graph = gpu_clock.graph_of(launch, nodes)
    cold = gpu_clock.burst(probe, graph, nodes)
    warm, power = gpu_clock.sustained(probe, graph, nodes, cold.microseconds)
    return Row(
        point.kernel, version(point), point.data, point.head_dim, int(point.causal), point.seqlen,
        point.batch, point.heads, point.m, point.n, point.k, tile_of(point), nodes,
        round(cold.microseconds, 3), round(cold.spread, 4), round(cold.clock_mhz, 1),
        round(warm.microseconds, 3), round(warm.spread, 4), round(warm.clock_mhz, 1),
        round(power.watts, 1), round(power.watts_instant, 1), round(power.celsius, 1), power.limits,
        "", "", 0, 0, chosen,
    )  # fmt: skip


def with_attributes(row: Row, point: Point, probe: gpu_clock.Probe) -> Row:
    """The row with grid, block, registers and shared memory of the launch's longest kernel.

    Only after all timing: the profiler slows launches down, also those after it.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    launch, _ = workload(point, probe)
    launch()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        launch()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        return row
    found = max(kernels, key=lambda event: event["dur"])["args"]
    grid, block = ("x".join(map(str, found[name])) for name in ("grid", "block"))
    registers, smem = found["registers per thread"], found["shared memory"]
    return replace(row, grid=grid, block=block, registers=registers, smem=smem)


def _compile(point: Point) -> None:
    """Runs in a process of its own: leaves the compiled kernel in the peers' caches on disk."""
    import torch

    launch, _ = workload(point, gpu_clock.Probe())
    launch()
    torch.cuda.synchronize()


def compile_all(every: list[Point]) -> None:
    """One process a kernel, all at once; flash-attn-4 and quack find the results on disk."""
    kinds: dict[tuple[Any, ...], Point] = {}
    for point in every:
        if point.kernel in ("flash_attn_4", "quack_gemm"):
            kinds.setdefault(point.series, point)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=len(kinds) or 1, mp_context=context) as pool:
        list(pool.map(_compile, kinds.values()))


def write(path: Path, rows: list[Row], header: list[str]) -> None:
    with path.open("w", newline="") as file:
        file.writelines(f"# {line}\n" for line in header)
        writer = csv.writer(file, lineterminator="\n")
        names = [field.name for field in fields(Row)]
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)


def header() -> list[str]:
    import torch

    gpu = torch.cuda.get_device_properties(0)
    return [
        f"{gpu.name}, {gpu.multi_processor_count} SMs; torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}; python -m tests.roofline.hardware.measure_peers, whose text says",
        "how (columns: its class Row). set: calibration and check in turns along each series (same",
        "kernel, head_dim, mask, config), the first series beginning with calibration, the next",
        "with check; cublas, copy and empty are for calibration.",
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="times flash-attn-4 and quack on this GPU")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="points whose name contains this")
    options = parser.parse_args(arguments)
    every = points()
    sets = split(every)
    chosen = [point for point in every if options.only in str(point)]
    caches = Path(tempfile.gettempdir()) / "peer-kernels"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(caches / "flash-attn-4"))
    os.environ.setdefault("QUACK_CACHE_DIR", str(caches / "quack"))
    compile_all(chosen)
    probe = gpu_clock.Probe()
    rows = []
    for point in chosen:
        row = measure(point, probe, sets[point])
        rows.append(row)
        print(
            f"{point}: burst {row.burst_us} us +-{row.burst_spread:.1%} at {row.burst_mhz} MHz, "
            f"sustained {row.sustained_us} us +-{row.sustained_spread:.1%} at {row.sustained_mhz} "
            f"MHz, {row.power_w} W ({row.power_instant_w}), {row.limits}",
            flush=True,
        )
        write(options.out, rows, header())
    rows = [with_attributes(row, point, probe) for row, point in zip(rows, chosen, strict=True)]
    write(options.out, rows, header())
    return 0


if __name__ == "__main__":
    sys.exit(main())
