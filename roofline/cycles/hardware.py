"""What the cycle model knows of an SM: rates from the GPU's entry, latencies with their sources."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from kernels.emulator.records import MmaForm, OpClass
from roofline.errors import RooflineError
from roofline.gpus import TAGS, Gpu, Quantity
from roofline.intervals import COMPLETION_CYCLES, Mma

SUB_PARTITIONS = 4  # of an SM; a warp stays in that of its index modulo 4
WARP = 32
_DATA = Path(__file__).with_name("cycle_model.toml")
_HOPPER = Path(__file__).with_name("cycle_model_sm_90.toml")

#: Pipes of a sub-partition; every instruction takes an issue slot besides.
PIPES = ("FMA", "ALU", "MUFU", "CVT", "LSU", "TMEM", "none")
FMA, ALU, MUFU, CVT, LSU, TMEM, NO_PIPE = range(len(PIPES))
PIPE_OF: Mapping[OpClass, int] = {
    OpClass.FMA: FMA,
    OpClass.IMAD: FMA,
    OpClass.ALU: ALU,
    OpClass.PREDICATE: ALU,
    OpClass.VOTE: ALU,
    OpClass.LONG: ALU,
    OpClass.MUFU: MUFU,
    OpClass.CVT: CVT,
    OpClass.SHUFFLE: LSU,
    OpClass.SMEM: LSU,
    OpClass.GLOBAL: LSU,
    OpClass.TMEM: TMEM,
}
#: Units whose speed can be asked about ("what if it were faster"), with what they scale.
UNITS = (
    "tensor core",
    "SMEM port",
    "MUFU",
    "FMA",
    "ALU",
    "CVT",
    "issue",
    "TMEM",
    "L2",
    "latencies",
)


def _tables(arch_number: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """File, name and fields of each constant; Hopper's own come last."""
    for path in (_DATA, _HOPPER) if arch_number < 100 else (_DATA,):
        for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
            yield path.name, name, table


@cache
def latencies(arch_number: int = 100) -> Mapping[str, Quantity]:
    """The model's own constants on an architecture, by name, each with unit, tag and source."""
    found: dict[str, Quantity] = {}
    for file, name, table in _tables(arch_number):
        fields = {key: value for key, value in table.items() if key != "calibrated_on"}
        found[name] = quantity = Quantity(**fields)
        if quantity.tag not in TAGS or quantity.value <= 0 or not quantity.source:
            raise RooflineError(f"{file}: {name}: bad tag, value or source")
    return found


@cache
def calibrations(arch_number: int = 100) -> Mapping[str, str]:
    """Constants that measured times of whole kernels decided, with the rows that did.

    Rows: of tests/roofline/hardware/h200_peers.csv. There are none on Blackwell.
    """
    tables = _tables(arch_number)
    return {name: t["calibrated_on"] for _, name, t in tables if "calibrated_on" in t}


@dataclass(frozen=True)
class Hardware:
    """An SM in numbers, all in cycles of its clock.

    interval: cycles that a warp instruction holds its pipe, by class (a packed pair twice that of
    FMA). latency: cycles until its result can be used, by class. issue: cycles between two
    instructions of a sub-partition. Bandwidths in bytes a cycle: of the SM for smem_port, l2 (its
    share), ingress (what it can take in) and peer (to another SM of the cluster), of a
    sub-partition for the TMEM ports. mma_rates: FLOP a cycle of the tensor core, by bits of an
    operand element; mma_speed: factor on all of them.
    """

    gpu: Gpu
    interval: tuple[float, ...]
    latency: tuple[float, ...]
    issue: float
    smem_port: float
    tmem_read: float
    tmem_write: float
    l2: float
    ingress: float
    peer: float
    mma_rates: Mapping[int, float]
    mma_speed: float
    constants: Mapping[str, float]

    def faster(self, unit: str, factor: float) -> Hardware:
        """The same SM with one unit faster (one of `UNITS`)."""
        if unit not in UNITS:
            raise RooflineError(f"unit {unit!r}: unknown; known are {', '.join(UNITS)}")
        if unit == "tensor core":
            return replace(self, mma_speed=self.mma_speed * factor)
        if unit == "SMEM port":
            return replace(self, smem_port=self.smem_port * factor)
        if unit == "issue":
            return replace(self, issue=self.issue / factor)
        if unit == "L2":
            return replace(self, l2=self.l2 * factor, ingress=self.ingress * factor)
        if unit == "TMEM":
            read, write = self.tmem_read * factor, self.tmem_write * factor
            return replace(self, tmem_read=read, tmem_write=write)
        if unit == "latencies":
            constants = {
                name: value / factor if name.endswith("latency") else value
                for name, value in self.constants.items()
            }
            return replace(
                self, latency=tuple(x / factor for x in self.latency), constants=constants
            )
        pipe = PIPES.index(unit)
        interval = [
            x / factor if PIPE_OF.get(OpClass(c)) == pipe else x
            for c, x in enumerate(self.interval)
        ]
        return replace(self, interval=tuple(interval))

    def mma(self, m: int, n: int, k: int, form: MmaForm) -> tuple[float, float, float]:
        """One MMA: cycles of arithmetic, of the SMEM port, and from its end to a waiter's start."""
        mma = Mma(m, n, not form.a_in_tmem, form.ctas)
        rows_bytes = Fraction(k * form.bits, 8)  # of K; the closed form is for 32
        share = float(rows_bytes / 32)
        arithmetic = float(mma.math_cycles) * share / self.mma_speed
        arithmetic *= 8192 * 16 / form.bits / self._rate(form.bits)  # the form is a B200's
        smem = float(mma.smem_cycles) * share * 128 / self.smem_port
        key = (not form.a_in_tmem, form.ctas, m)
        if key not in COMPLETION_CYCLES:
            raise RooflineError(f"MMA with M={m}, {form.ctas} CTAs: no measured latency")
        return arithmetic, smem, float(mma.latency_cycles() - mma.math_cycles)

    def wgmma(self, m: int, n: int, k: int, form: MmaForm) -> tuple[float, float, float]:
        """One warpgroup's MMA: cycles of arithmetic, of the SMEM port, and from its end until its
        warps go on."""
        arithmetic = 2 * m * n * k / self._rate(form.bits) / self.mma_speed
        arithmetic = max(arithmetic, self.constants["wgmma_interval"] / self.mma_speed)
        rows = n + (0 if form.a_in_tmem else m)
        smem = rows * k * form.bits / 8 / self.smem_port
        return arithmetic, smem, self.constants["wgmma_latency"]

    def warp_mma(self, m: int, n: int, k: int, form: MmaForm) -> tuple[float, float]:
        """One mma.sync: cycles of its sub-partition's tensor core, and until its result comes."""
        rate = self._rate(form.bits) / SUB_PARTITIONS * self.constants["warp_mma_share"]
        cycles = 2 * m * n * k / rate / self.mma_speed
        return cycles, self.constants["warp_mma_latency"]

    def _rate(self, bits: int) -> float:
        if bits not in self.mma_rates:
            raise RooflineError(f"gpu {self.gpu.name}: no MMA rate for operands of {bits} bits")
        return self.mma_rates[bits]


_RATE_FIELDS = {32: "mma_tf32", 16: "mma_bf16", 8: "mma_fp8", 4: "mma_nvfp4"}


def hardware(gpu: Gpu) -> Hardware:
    """The model's SM of a GPU. RooflineError if the GPU lacks a number that it needs."""
    constants = {name: float(q.value) for name, q in latencies(gpu.arch_number).items()}

    def rate(field: str) -> float:
        return float(gpu[field].value)

    lanes = SUB_PARTITIONS * WARP
    interval = dict.fromkeys(OpClass, 1.0)
    interval |= {
        OpClass.MOVE: 0.0,
        OpClass.FMA: lanes / rate("fma"),
        OpClass.IMAD: 2 * lanes / rate("fma"),
        OpClass.ALU: lanes / rate("alu"),
        OpClass.PREDICATE: lanes / rate("alu"),
        OpClass.VOTE: lanes / rate("alu"),
        OpClass.LONG: 20 * lanes / rate("alu"),
        OpClass.MUFU: lanes / rate("mufu_ex2"),
        OpClass.CVT: lanes / rate("cvt_16bit"),
    }
    latency = dict.fromkeys(OpClass, 1.0)
    for op in ("FMA", "ALU", "IMAD", "MUFU", "CVT", "LONG", "SHUFFLE", "VOTE", "SMEM"):
        latency[OpClass[op]] = constants[f"{op.lower()}_latency"]
    latency[OpClass.PREDICATE] = constants["alu_latency"]
    latency[OpClass.BRANCH] = constants["branch_latency"]
    latency[OpClass.GLOBAL] = constants["global_latency"]
    latency[OpClass.TMEM] = constants["tmem_load_latency"]
    latency[OpClass.MOVE] = 0.0
    sms, clock = rate("sms"), rate("clock") * 1e9
    read = rate("tmem_read_bandwidth") / SUB_PARTITIONS if gpu.has_tmem else 1.0
    peer = "dsmem_bandwidth"
    return Hardware(
        gpu=gpu,
        interval=tuple(interval[op] for op in OpClass),
        latency=tuple(latency[op] for op in OpClass),
        issue=SUB_PARTITIONS / rate("issue"),
        smem_port=rate("smem_bandwidth"),
        tmem_read=read,
        tmem_write=read * constants["tmem_write_share"],
        l2=rate("l2_bandwidth") * 1e12 / sms / clock,
        ingress=constants["copy_in_bandwidth"],
        peer=rate(peer) if gpu.has(peer) else constants["peer_bandwidth"],
        mma_rates={bits: rate(f) for bits, f in _RATE_FIELDS.items() if gpu.has(f)},
        mma_speed=1.0,
        constants=constants,
    )
