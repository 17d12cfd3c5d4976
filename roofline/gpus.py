"""GPU facts: every number with its unit, its tag and its source.

A GPU is one TOML file of `gpu_data/`; a user's own file has the same form, so that a new GPU is one
entry. ``base`` names an entry to start from; what is measured there is assumed here:

    name = "b200-fast-mufu"
    base = "b200"
    [mufu_ex2]
    value = 32
    unit = "op/clk/SM"
    tag = "assumed"
    source = "what if"

A table without ``tag`` is *assumed*, one without ``source`` is from that file.

Tags: *measured* on silicon by the source named, *vendor* as NVIDIA publishes it, *derived* from
other published numbers by the arithmetic in the source line, *assumed* where nothing better is
public.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from roofline.errors import RooflineError

TAGS = ("measured", "vendor", "derived", "assumed")
GPU_NAMES = ("h100", "h200", "b200", "gb200", "b300", "gb300")
#: What a bare architecture stands for, by its number: sm_100, sm_100a and sm_100f mean the same.
ARCH_DEFAULTS = MappingProxyType({90: "h100", 100: "b200", 103: "b300"})
_FIRST_WITH_TMEM = 100
#: A user's number that is so many times above or below every known GPU's is taken for an error.
_FAR = 1000
_DATA = Path(__file__).with_name("gpu_data")


@dataclass(frozen=True)
class Field:
    """What a GPU entry may say: its unit, its meaning and whether every GPU must say it."""

    unit: str
    meaning: str
    required: bool = False


FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        # chip
        "sms": Field("SM", "streaming multiprocessors enabled", True),
        "clock": Field("GHz", "SM clock of the vendor's dense peak; turns cycles into time", True),
        "clock_max": Field("GHz", "highest SM clock the driver reports"),
        "tdp": Field("W", "board power"),
        # tensor core, dense
        "mma_bf16": Field("FLOP/clk/SM", "bf16 matrix multiply-accumulate", True),
        "mma_fp16": Field("FLOP/clk/SM", "fp16 matrix multiply-accumulate", True),
        "mma_tf32": Field("FLOP/clk/SM", "tf32 matrix multiply-accumulate"),
        "mma_fp8": Field("FLOP/clk/SM", "fp8 matrix multiply-accumulate"),
        "mma_mxfp8": Field("FLOP/clk/SM", "fp8 with one scale per 32 elements"),
        "mma_nvfp4": Field("FLOP/clk/SM", "fp4 with one scale per 16 elements"),
        # CUDA cores
        "mufu_ex2": Field("op/clk/SM", "ex2.approx.f32 on the special-function unit", True),
        "fma": Field("lane/clk/SM", "fp32 fused multiply-adds, nominal", True),
        "fma_sustained": Field("lane/clk/SM", "fp32 fused multiply-adds, reached", True),
        "alu": Field("lane/clk/SM", "fp32 max, integer and logic operations", True),
        "cvt_16bit": Field("op/clk/SM", "two f32 converted to a bf16 or fp16 pair", True),
        "cvt_fp8": Field("op/clk/SM", "two f32 converted to an fp8 pair"),
        "cvt_fp4": Field("op/clk/SM", "two f32 converted to an fp4 pair"),
        "issue": Field("warp-instr/clk/SM", "warp instructions issued", True),
        "ex2_polynomial": Field("lane/op", "fp32 lane-slots of one degree-3 exp2", True),
        # on-chip memories
        "registers": Field("reg/SM", "32-bit registers", True),
        "smem_sm": Field("B/SM", "shared memory of an SM", True),
        "smem_block": Field("B", "largest shared memory of one CTA", True),
        "smem_bandwidth": Field("B/clk/SM", "shared memory read or written", True),
        "dsmem_bandwidth": Field("B/clk/SM", "shared memory of another SM of the cluster"),
        "tmem_columns": Field("column/SM", "TMEM columns of 128 lanes x 4 B"),
        "tmem_read_bandwidth": Field("B/clk/SM", "tcgen05.ld while MMAs run"),
        # off-SM memories
        "l2": Field("MiB", "L2 cache", True),
        "l2_bandwidth": Field("TB/s", "L2 read", True),
        "hbm": Field("GB", "device memory", True),
        "hbm_bandwidth": Field("TB/s", "device memory, peak", True),
        "hbm_sustained": Field("TB/s", "device memory, reached"),
        # latencies and launch
        "smem_latency": Field("clk", "shared-memory load"),
        "l2_latency": Field("clk", "load that hits L2"),
        "hbm_latency": Field("clk", "load from device memory"),
        "launch_latency": Field("us", "smallest kernel after another on one stream"),
        "cta_launch": Field("clk", "from a CTA's end to the next one's start on that slot"),
    }
)
_TEXTS = ("name", "title", "base", "arch")
#: Units of things that are counted: their values are whole.
_COUNTED = ("SM", "column/SM", "reg/SM", "B/SM", "B")


@dataclass(frozen=True)
class Quantity:
    """One number of a GPU: its value in ``unit``, how it is known, and from where."""

    value: int | float
    unit: str
    tag: str
    source: str

    @cached_property
    def exact(self) -> Fraction:
        """The decimal value as written, for arithmetic without rounding."""
        return Fraction(str(self.value))

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "unit": self.unit, "tag": self.tag, "source": self.source}


@dataclass(frozen=True)
class Gpu:
    """One GPU: ``name`` as on the command line, ``arch`` as in `--gpu-arch`, and its quantities."""

    name: str
    title: str
    arch: str
    quantities: Mapping[str, Quantity] = dataclasses.field(hash=False)

    def __getitem__(self, field: str) -> Quantity:
        """The quantity; RooflineError if this GPU has none (no such unit, or not known)."""
        found = self.quantities.get(field)
        if found is None:
            raise RooflineError(
                f"gpu {self.name}: no {field} ({FIELDS[field].meaning}); "
                f'choose another GPU or give it in a TOML file with base = "{self.name}"'
            )
        return found

    def has(self, field: str) -> bool:
        return field in self.quantities

    @property
    def arch_number(self) -> int:
        """90 for sm_90a, 100 for sm_100a, 103 for sm_103a."""
        return _arch_number(self.arch)

    @property
    def family(self) -> str:
        """What code is compiled for: sm_100a, whether the entry says sm_100, sm_100a or sm_100f."""
        return f"sm_{self.arch_number}a"

    @property
    def has_tmem(self) -> bool:
        """Whether accumulators and P live in TMEM (tcgen05) and not in registers (wgmma)."""
        return self.has("tmem_columns")

    def override(self, **values: int | float) -> Gpu:
        """The same GPU with some numbers replaced, each tagged *assumed* (what-if studies)."""
        changed = dict(self.quantities)
        for field, value in values.items():
            if field not in FIELDS:
                raise RooflineError(f"{field}: unknown field; known are {', '.join(FIELDS)}")
            table = {"value": value, "unit": FIELDS[field].unit}
            changed[field] = _quantity(field, table, "override", builtin=False)
        return _consistent(replace(self, quantities=MappingProxyType(changed)), "override")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: name, title, arch and every quantity with its unit, tag and source."""
        return {
            "name": self.name,
            "title": self.title,
            "arch": self.arch,
            "quantities": {name: q.to_dict() for name, q in self.quantities.items()},
        }


def _arch_number(arch: str) -> int:
    """The number in sm_100a; RooflineError if there is none."""
    digits = arch[3:].rstrip("af") if arch.startswith("sm_") else ""
    if not digits.isdecimal():
        raise RooflineError(f"arch {arch!r}: must look like sm_100a")
    return int(digits)


def _quantity(field: str, table: Any, where: str, *, builtin: bool) -> Quantity:
    """One validated table of a GPU file."""
    spec = FIELDS[field]
    if not isinstance(table, Mapping):
        raise RooflineError(f"{where}: {field}: must be a table with value and unit")
    unknown = sorted(set(table) - {"value", "unit", "tag", "source"})
    if unknown:
        raise RooflineError(
            f"{where}: {field}.{unknown[0]}: unknown; a quantity has value, unit, tag and source"
        )
    for key in ("value", "unit", *(("tag", "source") if builtin else ())):
        if key not in table:
            raise RooflineError(f"{where}: {field}.{key}: missing; add {key} ({spec.unit})")
    value = table["value"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RooflineError(f"{where}: {field}.value: {value!r} is not a finite number")
    if value <= 0:
        raise RooflineError(f"{where}: {field}.value: {value} must be positive")
    if spec.unit in _COUNTED and value != int(value):
        unit = spec.unit
        raise RooflineError(f"{where}: {field}.value: {value} must be a whole number of {unit}")
    if table["unit"] != spec.unit:
        raise RooflineError(
            f"{where}: {field}.unit: {table['unit']!r} is not its unit; convert to {spec.unit!r}"
        )
    tag = table.get("tag", "assumed")
    if tag not in TAGS:
        raise RooflineError(f"{where}: {field}.tag: {tag!r} is none of {', '.join(TAGS)}")
    source = table.get("source", where)
    if not isinstance(source, str) or not source.strip():
        raise RooflineError(f"{where}: {field}.source: must be a text that names where it is from")
    return Quantity(value, spec.unit, tag, source)


def parse_gpu(entry: Mapping[str, Any], where: str, *, builtin: bool = False) -> Gpu:
    """A validated Gpu from the tables of a TOML file; ``where`` begins each error."""
    for key in _TEXTS:
        if key in entry and (not isinstance(entry[key], str) or not entry[key].strip()):
            raise RooflineError(f"{where}: {key}: {entry[key]!r} must be a non-empty text")
    unknown = sorted(set(entry) - set(FIELDS) - set(_TEXTS))
    if unknown:
        raise RooflineError(f"{where}: {unknown[0]}: unknown field; known are {', '.join(FIELDS)}")
    if "name" not in entry:
        raise RooflineError(f"{where}: name: missing; give the GPU a name")
    base = _base(entry["base"], where) if "base" in entry else None
    if "arch" not in entry and base is None:
        raise RooflineError(f'{where}: arch: missing; add arch = "sm_100a" or base = "b200"')
    arch = str(entry.get("arch", base.arch if base else ""))
    try:
        _arch_number(arch)
    except RooflineError as error:
        raise RooflineError(f"{where}: {error}") from None
    quantities = {f: _inherited(q, base.name) for f, q in base.quantities.items()} if base else {}
    for field in FIELDS:
        if field in entry:
            quantities[field] = _quantity(field, entry[field], where, builtin=builtin)
    for field, spec in FIELDS.items():
        if spec.required and field not in quantities:
            raise RooflineError(f"{where}: {field}: missing; add value and unit ({spec.unit})")
    ordered = {field: quantities[field] for field in FIELDS if field in quantities}
    title = str(entry.get("title", entry["name"]))
    gpu = _consistent(Gpu(entry["name"], title, arch, MappingProxyType(ordered)), where)
    for field in () if builtin else entry.keys() & FIELDS.keys():
        _plausible(gpu, field, where)
    return gpu


def _consistent(gpu: Gpu, where: str) -> Gpu:
    """The GPU. RooflineError if its numbers contradict each other or its architecture."""
    if gpu.arch_number not in ARCH_DEFAULTS:
        known = ", ".join(f"sm_{number}a" for number in ARCH_DEFAULTS)
        raise RooflineError(f"{where}: arch {gpu.arch!r}: unknown; known are {known}")
    if gpu.has_tmem != (gpu.arch_number >= _FIRST_WITH_TMEM):
        what = "has no TMEM, but tmem_columns says so" if gpu.has_tmem else "needs tmem_columns"
        raise RooflineError(
            f"{where}: arch {gpu.arch!r}: {what}; choose the base of that architecture"
        )
    block, sm = gpu["smem_block"].value, gpu["smem_sm"].value
    if block > sm:
        raise RooflineError(
            f"{where}: smem_block.value: {block} B, but smem_sm is {sm}: {block - sm} too many"
        )
    return gpu


def _plausible(gpu: Gpu, field: str, where: str) -> None:
    """RooflineError if a number is so far from every GPU's that its unit must be another."""
    known = [float(other[field].value) for other in gpus() if other.has(field)]
    value = gpu[field].value
    if not min(known) / _FAR <= value <= max(known) * _FAR:
        raise RooflineError(
            f"{where}: {field}.value: {value} is more than {_FAR} times off the known GPUs'"
            f" {min(known):g} to {max(known):g}; is it in {FIELDS[field].unit}?"
        )


def _base(name: str, where: str) -> Gpu:
    if name not in GPU_NAMES:
        raise RooflineError(f"{where}: base: {name!r} is none of {', '.join(GPU_NAMES)}")
    return _builtin(name)


def _inherited(quantity: Quantity, base: str) -> Quantity:
    """A number taken over from another GPU: nobody has measured it on this one."""
    tag = "assumed" if quantity.tag == "measured" else quantity.tag
    return replace(quantity, tag=tag, source=f"as {base}: {quantity.source}")


def read_gpu(path: str | Path) -> Gpu:
    """A GPU from a user's TOML file; RooflineError names the file and the field."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise RooflineError(f"{path}: cannot be read: {reason}") from None
    try:
        entry = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RooflineError(f"{path}: not TOML: {' '.join(str(error).split())}") from None
    return parse_gpu(entry, str(path))


@cache
def _builtin(name: str) -> Gpu:
    path = _DATA / f"{name}.toml"
    return parse_gpu(tomllib.loads(path.read_text(encoding="utf-8")), path.name, builtin=True)


def gpus(names: Iterable[str] = GPU_NAMES) -> tuple[Gpu, ...]:
    """The built-in GPUs, in the order of their generations."""
    return tuple(_builtin(name) for name in names)


def find_gpu(name: str) -> Gpu:
    """A GPU by name ("b200"), by architecture ("sm_100a": its first GPU) or from a ".toml" file."""
    key = name.strip().lower()
    if key.endswith(".toml"):
        return read_gpu(name)
    if key in GPU_NAMES:
        return _builtin(key)
    if key.startswith("sm_"):
        digits = key[3:].rstrip("af")
        default = ARCH_DEFAULTS.get(int(digits)) if digits.isdecimal() else None
        if default:
            return _builtin(default)
    known = ", ".join((*GPU_NAMES, *(f"sm_{number}a" for number in ARCH_DEFAULTS)))
    raise RooflineError(f"gpu {name!r} is unknown; choose one of {known}, or a .toml file")
