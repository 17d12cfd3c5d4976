"""What is known of this project's forward kernel: registers by ptxas, cycles by the cycle model.

The rows are package data, so that a plan is chosen in milliseconds without compiler or emulator;
`python -m tests.roofline.forward_table` makes them, and tests make some anew.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from roofline.gpus import Gpu, find_gpu

_DATA = Path(__file__).with_name("gpu_data") / "forward_kernel.csv"
_HOPPER_DATA = _DATA.with_name("hopper_kernel.csv")
_T = TypeVar("_T")
#: The GPU whose SM stands for its architecture in the table.
GPU_OF_ARCH: Mapping[str, str] = MappingProxyType({"sm_100a": "b200", "sm_103a": "b300"})
#: Query rows, keys and query stages of the kernel's tile.
KERNEL_TILE = (256, 128, 2)
#: Slots of the K/V ring that fit, by head_dim of the kernel's tiles.
DEEPEST_STAGES: Mapping[int, int] = MappingProxyType({64: 10, 128: 3})
#: Quantities of an SM that a row's cycles depend on.
_SM_FIELDS: tuple[str, ...] = ("mma_bf16", "mma_fp16", "mufu_ex2", "fma", "alu", "cvt_16bit")
_SM_FIELDS += ("issue", "smem_bandwidth", "tmem_read_bandwidth")


@dataclass(frozen=True)
class Row:
    """One plan. head_dim: of the kernel's tiles, 64 or 128; mask: "dense" or "causal".

    stack_bytes: of a thread, by ptxas at softmax_registers; 0 says that nothing spills.
    key_block_cycles: of one more key block, in steady state; item_cycles: of a work item besides;
    both the mean of several replays.
    """

    arch: str
    dtype: str
    head_dim: int
    mask: str
    kv_stages: int
    exp2_share: float
    softmax_registers: int
    stack_bytes: int
    key_block_cycles: int
    item_cycles: int

    @property
    def is_deepest(self) -> bool:
        """Whether its K/V ring has as many slots as fit."""
        return self.kv_stages == DEEPEST_STAGES[self.head_dim]

    def cycles(self, blocks: int) -> int:
        """Of a work item with so many key blocks."""
        return self.item_cycles + blocks * self.key_block_cycles

    def to_dict(self) -> dict[str, str | int | float]:
        return dataclasses.asdict(self)


FIELDS = tuple(field.name for field in dataclasses.fields(Row))


def _read(path: Path, kind: type[_T]) -> Iterator[_T]:
    """The rows of a CSV file as dataclasses of one kind; lines of # are text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    read = csv.DictReader(line for line in lines if not line.startswith("#"))
    kinds = {"str": str, "int": int, "float": float}
    convert = {field.name: kinds[str(field.type)] for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for line in read:
        yield kind(**{name: convert[name](text) for name, text in line.items()})


@cache
def rows() -> tuple[Row, ...]:
    """The whole table."""
    return tuple(_read(_DATA, Row))


def rows_for(gpu: Gpu, dtype: str, head_dim: int, causal: bool) -> tuple[Row, ...]:
    """The rows of a GPU's architecture; none if its SM is another than theirs.

    dtype: as plans name it ("bfloat16"). head_dim: as asked; the kernel pads it to 64 or 128.
    float16 without rows of its own has those of bfloat16 that emulate no exp2: there the two
    kernels differ in the conversion of P alone.
    """
    if gpu.family not in GPU_OF_ARCH or not _same_sm(gpu, find_gpu(GPU_OF_ARCH[gpu.family])):
        return ()
    padded = 64 if head_dim <= 64 else 128
    mask = "causal" if causal else "dense"
    alike = [r for r in rows() if (r.arch, r.head_dim, r.mask) == (gpu.family, padded, mask)]
    own = tuple(r for r in alike if r.dtype == dtype)
    if own or dtype != "float16":
        return own
    return tuple(r for r in alike if r.dtype == "bfloat16" and not r.exp2_share)


def _same_sm(gpu: Gpu, other: Gpu) -> bool:
    return all(gpu.has(name) and gpu[name].value == other[name].value for name in _SM_FIELDS)


@dataclass(frozen=True)
class HopperRow:
    """Another's forward kernel on Hopper, bfloat16, as replayed on an H200: tile, and cycles."""

    kernel: str
    head_dim: int
    mask: str
    tile_m: int
    tile_n: int
    key_block_cycles: int
    item_cycles: int

    def to_dict(self) -> dict[str, str | int]:
        return dataclasses.asdict(self)


@cache
def hopper_rows() -> tuple[HopperRow, ...]:
    """The table of Hopper's replays."""
    return tuple(_read(_HOPPER_DATA, HopperRow))
