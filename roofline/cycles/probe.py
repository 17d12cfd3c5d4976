"""Small problems that stand for a large one: what is emulated, and how many iterations it runs.

An attention kernel repeats itself: along the keys, over heads and batches. So the emulator runs a
few work items with few key blocks, and the model extends them (see `roofline.cycles.grid`); how
long the sequence is then costs nothing. The probes keep what makes a problem special: the rest that
is left of the last key block, the mask and its offset.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kernels.emulator.records import MORE, Event, Records, RecordsError, record
from roofline.budgets import budget
from roofline.choice import chosen_fields
from roofline.cycles.grid import in_grid_order
from roofline.errors import RooflineError
from roofline.fit import Excess
from roofline.gpus import ARCH_DEFAULTS, GPU_NAMES, Gpu
from roofline.problem import Bounds, Problem, bounds
from roofline.terms import ceil_div

if TYPE_CHECKING:
    from roofline.cycles.gemm import GemmWorkload
    from roofline.gemm import Gemm

#: What `--kernel fa4` stands for.
KERNELS: Mapping[str, str] = {"fa4": "kernels.blackwell.workload:attention_forward"}
#: Key blocks of the probes: by then the row maxima have settled, and with them the rescaling.
SHORT, LONG = 16, 24
CAUSAL = 16  # key blocks of the longest item of a causal probe


@dataclass(frozen=True)
class Workload:
    """An attention kernel as its workload function describes it (kernels/blackwell/workload.py)."""

    name: str
    make: Any
    gpu: str
    dtype: str
    head_dim: int
    tile_rows: int
    tile_keys: int
    persistent: bool
    longest_first: bool
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    #: What an iteration of a work item is called.
    iteration: ClassVar[str] = "key block"
    #: What the workload function must return beside fn, args and tile_rows.
    needs: ClassVar[tuple[str, ...]] = ("tile_keys",)

    def iterations(self, problem: Problem) -> list[int]:
        """Key blocks of the work items of one head, in the order of their query rows."""
        counts = []
        for first in range(0, problem.seqlen, self.tile_rows):
            last = min(first + self.tile_rows, problem.seqlen) - 1
            counts.append(ceil_div(problem.keys_seen(last), self.tile_keys))
        return counts

    def items(self, problem: Problem) -> list[int]:
        """Key blocks of all work items in the order in which the grid starts them."""
        return in_grid_order(self.iterations(problem), problem, self.longest_first)

    def arguments(self, problem: Problem) -> dict[str, Any]:
        """What the workload function is told of a problem."""
        names = ("batch", "seqlen", "seqlen_k", "heads", "kv_heads", "causal")
        return {"head_dim": self.head_dim} | {name: getattr(problem, name) for name in names}

    def stand_ins(self, problem: Problem) -> tuple[Problem, ...]:
        """The small problems to emulate for a problem."""
        found = _persistent_problems if self.persistent else _problems
        return tuple(found(self, problem))

    def limits(self, gpu: Gpu, problem: Problem) -> Bounds:
        """What the problem costs at the least on the whole GPU."""
        tile = budget(
            gpu,
            self.tile_rows,
            self.tile_keys,
            self.head_dim,
            dtype=self.short_dtype,
            exp2_emulated_share=self.options.get("exp2_emulated_share", 0),
        )
        return bounds(problem, tile)

    def describe(self, problem: Problem) -> str:
        """The problem in words."""
        mask = "causal" if problem.causal else "dense"
        heads = f"{problem.heads} heads"
        if problem.kv_heads != problem.heads:
            heads = f"{problem.heads}/{problem.kv_heads} heads"
        return (
            f"head_dim {self.head_dim}, {self.dtype}, {mask}; batch {problem.batch}, {heads},"
            f" {problem.seqlen} queries x {problem.seqlen_k} keys"
        )

    @property
    def short_dtype(self) -> str:
        return {"bfloat16": "bf16", "float16": "fp16"}.get(self.dtype, self.dtype)


@dataclass(frozen=True)
class Probe:
    """An emulated problem: its records, and the key blocks of each recorded cluster.

    items: work items that the clusters have together.
    """

    problem: Problem | Gemm
    records: Records
    iterations: tuple[int, ...]
    items: int


def workload(
    kernel: str,
    gpu: Gpu,
    dtype: str,
    head_dim: int,
    causal: bool,
    options: Mapping[str, Any] | None = None,
) -> Workload:
    """The kernel that an import string names. RooflineError if there is none, or it refuses.

    options: what its workload function takes besides the problem.
    """
    make, name = imported(kernel), known_gpu(gpu)
    dtype = long_dtype(dtype)
    asked = dict(options or {})
    if kernel == "fa4":  # as fa4 plans it
        asked = chosen_fields(name, head_dim, dtype=dtype, causal=causal) | asked
    first = Workload(kernel, make, name, dtype, head_dim, 1, 1, False, False, asked)
    made = made_for(first, Problem(1, 1, 1, 1, 1, causal))
    return replace(
        first,
        tile_rows=int(made["tile_rows"]),
        tile_keys=int(made["tile_keys"]),
        persistent=bool(made.get("persistent", False)),
        longest_first=bool(made.get("longest_first", False)),
    )


def imported(kernel: str) -> Any:
    """The workload function that an import string names."""
    target = KERNELS.get(kernel, kernel)
    module, colon, attribute = target.partition(":")
    if not colon or not module or not attribute:
        raise RooflineError(
            f"kernel {kernel!r}: must be {' or '.join(KERNELS)}, or MODULE:FUNCTION"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        said = _said(error, (ImportError, AttributeError))
        raise RooflineError(f"kernel {kernel!r}: cannot be imported: {said}") from error


def takes(make: Any, names: Sequence[str]) -> bool:
    """Whether a workload function has parameters of these names, or of any."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # not callable, or not written in Python: calling it will tell
        return True
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return all(name in parameters for name in names) or (anything and "seqlen" not in parameters)


def known_gpu(gpu: Gpu) -> str:
    """The name that kernels know a GPU by: its own, or that of its architecture."""
    return gpu.name if gpu.name in GPU_NAMES else ARCH_DEFAULTS[gpu.arch_number]


def long_dtype(dtype: str) -> str:
    return {"bf16": "bfloat16", "fp16": "float16"}.get(dtype, dtype)


def made_for(work: Workload | GemmWorkload, problem: Any) -> dict[str, Any]:
    """What the workload function returns for a problem. RooflineError if it refuses."""
    arguments = work.arguments(problem)
    try:
        made: dict[str, Any] = work.make(
            gpu=work.gpu, dtype=work.dtype, **arguments, **work.options
        )
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        said = _said(error, (ValueError, TypeError, ImportError))
        raise RooflineError(f"kernel {work.name}: {said}") from error
    needed = ("fn", "args", "tile_rows", *work.needs)
    if not isinstance(made, Mapping):
        raise RooflineError(
            f"kernel {work.name}: returned {type(made).__name__}; must return a dict with"
            f" {', '.join(needed)}"
        )
    missing = [name for name in needed if name not in made]
    if missing:
        raise RooflineError(f"kernel {work.name}: {missing[0]}: missing in what it returned")
    for name in needed[2:]:
        if not isinstance(made[name], int) or made[name] <= 0:
            raise RooflineError(
                f"kernel {work.name}: {name} {made[name]!r}: must be a positive integer"
            )
    return made


def check_room(gpu: Gpu, found: Sequence[Probe]) -> None:
    """RooflineError if the kernel takes more shared memory than the GPU gives a CTA."""
    needed, there = found[0].records.smem_bytes, int(gpu["smem_block"].value)
    if needed > there:
        excess = Excess("SMEM", needed, there, "bytes")
        raise RooflineError(f"kernel {found[0].records.kernel} does not fit {gpu.name}: {excess}")


def _said(error: BaseException, plain: tuple[type[BaseException], ...]) -> str:
    """What an exception of a user's code says, and its kind unless it is a plain one."""
    text = " ".join(str(error).split())
    if text and isinstance(error, plain):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def stand_ins(work: Workload | GemmWorkload, problem: Any) -> tuple[Any, ...]:
    """The small problems to emulate for a problem."""
    return work.stand_ins(problem)


def probes(work: Workload | GemmWorkload, small: Sequence[Any]) -> list[Probe]:
    """The problems of `stand_ins`, emulated."""
    return [_run(work, problem) for problem in small]


def _problems(work: Workload, problem: Problem) -> list[Problem]:
    """One head. Dense: one item of few and one of more key blocks; causal: the first items."""
    keys, rows = work.tile_keys, work.tile_rows
    if problem.causal:
        offset = problem.seqlen_k - problem.seqlen
        length = min(problem.seqlen, max(rows, CAUSAL * keys // rows * rows))
        rest = (problem.seqlen - length) % rows  # what the last item lacks
        length -= rest if length > rest else 0
        small_offset = offset if abs(offset) <= CAUSAL * keys else offset % keys
        return [Problem(1, length, max(1, length + small_offset), 1, 1, True)]
    blocks = ceil_div(problem.seqlen_k, keys)
    lengths = [SHORT, LONG] if blocks > LONG else sorted({max(1, blocks // 2), blocks})
    seqlen = min(problem.seqlen, rows)
    return [
        Problem(1, seqlen, problem.seqlen_k - (blocks - n) * keys, 1, 1, False) for n in lengths
    ]


def _persistent_problems(work: Workload, problem: Problem) -> list[Problem]:
    """For a CTA that takes several items: one, two, and a longer one."""
    singles = _problems(work, problem)
    if problem.causal:
        length = max(work.tile_rows, singles[0].seqlen // 2)
        singles = [replace(singles[0], seqlen=length, seqlen_k=length), singles[0]]
    two = replace(singles[0], heads=2, kv_heads=2)
    return [singles[0], two, *singles[1:]]


def _run(work: Workload | GemmWorkload, problem: Any) -> Probe:
    made = made_for(work, problem)
    # A persistent kernel sees one SM (a cluster's), so that its one cluster takes all items.
    sms = int(made.get("cluster_ctas", 1)) if work.persistent else None
    try:
        records = record(made["fn"], *made["args"], gpu=work.gpu, roles=made.get("roles"), sms=sms)
    except RecordsError as error:
        raise RooflineError(f"kernel {work.name}: {error}") from None
    items = work.items(problem)
    clusters = len(records.ctas) // records.cluster_ctas
    if work.persistent:
        return Probe(problem, records, (sum(items),), len(items))
    if clusters != len(items):
        raise RooflineError(
            f"kernel {work.name}: {clusters} clusters for {len(items)} work items of"
            f" {work.tile_rows} rows; is it persistent?"
        )
    return Probe(problem, records, _by_work(records, items), len(items))


def _by_work(records: Records, items: Sequence[int]) -> tuple[int, ...]:
    """Key blocks of each cluster: the more a cluster multiplies, the more it has."""
    flops = []
    for warps in records.clusters():
        total = 0
        for warp in warps:
            kinds = warp.events[:, 0] & ~MORE
            mma = warp.events[np.isin(kinds, (Event.MMA, Event.WGMMA, Event.WARP_MMA))]
            total += int((mma[:, 1] * mma[:, 2] * (mma[:, 3] & 0xFFFF)).sum())
        flops.append(total)
    by_flops = sorted(range(len(flops)), key=lambda i: flops[i])
    counts = [0] * len(flops)
    for index, n in zip(by_flops, sorted(items), strict=True):
        counts[index] = n
    return tuple(counts)
