"""Launches whole PTX entries, clusters and tensor maps included, on the machine.

    ran = launch(text, [a, out, tmap], threads=128, grid=2, cluster=2, visibility="late")

A parameter is an array (its address is passed, its memory registered), a `TensorMap`, or bytes.

Launches whose results an H200 has given (hardware/isa_sm90.json, by `record_isa`) are compared with
them bit for bit, in whatever test they run and under every schedule.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.emulator.findings import Finding
from kernels.emulator.gpus import GPUS
from kernels.emulator.host_runtime import Launch
from kernels.emulator.machine import LaunchResult, run_launch
from kernels.emulator.memory import GlobalMemory
from kernels.emulator.schedule import POLICIES, VISIBILITIES, Options
from kernels.emulator.tensormap import TensorMap
from tests.emulator.hardware import goldens

WAYS = [{"schedule": s, "visibility": v} for s, v in product(POLICIES, VISIBILITIES)]
HEADER = ".version 9.1\n.target {target}\n.address_size 64\n"
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda w: f"{w['schedule']}-{w['visibility']}")
Parameter = NDArray[Any] | TensorMap | bytes


def module(params: str, body: str, *, shared: int = 0, target: str = "sm_100a") -> str:
    """One entry ``k``. ``params``: names; one that starts with ``map`` is a tensor map. ``shared``:
    bytes of a shared array ``smem``, aligned to 1024."""
    declared = ", ".join(
        f".param .align 64 .b8 {name}[128]" if name.startswith("map") else f".param .b64 {name}"
        for name in params.split()
    )
    array = f".shared .align 1024 .b8 smem[{shared}];" if shared else ""
    head = f"{HEADER.format(target=target)}.visible .entry k({declared})"
    return f"{head}\n{{\n{array}\n{body}\nret;\n}}"


# -- what hardware gave ----------------------------------------------------------------------------

RECORDED: dict[str, Any] = goldens.load("isa_sm90.json")
recording: list[dict[str, Any]] | None = None  # `record_isa` collects launches here


def work(
    text: str,
    params: Sequence[Parameter],
    arrays: Sequence[NDArray[Any]],
    threads: int,
    grid: int | tuple[int, int, int],
    cluster: int,
    smem_bytes: int,
) -> dict[str, Any]:
    """A launch as data that name it: instead of addresses, numbers of ``arrays``."""
    number = {a.ctypes.data: k for k, a in enumerate(arrays)}
    packed: list[Any] = []
    for x in params:
        if isinstance(x, np.ndarray):
            packed.append(["array", number[x.ctypes.data]])
        elif isinstance(x, TensorMap):
            bare = replace(x, address=0).encode(dsl=False)
            packed.append(["map", number[x.address], bare.hex()])
        else:
            packed.append(["bytes", x.hex()])
    shape = (grid, 1, 1) if isinstance(grid, int) else grid
    return {
        "text": text, "params": packed, "threads": threads, "grid": list(shape),
        "cluster": cluster, "smem_bytes": smem_bytes,
        "arrays": [np.ascontiguousarray(a).tobytes().hex() for a in arrays],
    }  # fmt: skip


def digest(given: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]


def outcome(arrays: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(arrays)).hexdigest()[:16]


def check_against_hardware(given: dict[str, Any], arrays: Sequence[NDArray[Any]]) -> None:
    after = [np.ascontiguousarray(a).tobytes() for a in arrays]
    if recording is not None:
        recording.append({**given, "name": digest(given), "emulated": [a.hex() for a in after]})
        return
    want = RECORDED["launches"].get(digest(given))
    assert want is None or want == outcome(after), "an H200 gives other results"


def _raw(parameter: Parameter) -> bytes:
    if isinstance(parameter, TensorMap):
        return parameter.encode()
    if isinstance(parameter, bytes):
        return parameter
    return int(parameter.ctypes.data).to_bytes(8, "little")


def launch(
    text: str,
    params: Sequence[Parameter],
    *,
    memory: Sequence[NDArray[Any]] = (),
    threads: int = 32,
    grid: int | tuple[int, int, int] = 1,
    cluster: int = 1,
    smem_bytes: int = 0,
    gpu: str = "b200",
    roles: dict[int, str] | None = None,
    max_instructions: int = 5_000_000,
    **options: Any,
) -> LaunchResult:
    """``memory``: arrays behind tensor maps."""
    space = GlobalMemory()
    given_arrays = [x for x in [*params, *memory] if isinstance(x, np.ndarray)]
    arrays = list({id(x): x for x in given_arrays}.values())
    for k, array in enumerate(arrays):
        space.add_array(array, f"array {k}")
    given = work(text, params, arrays, threads, grid, cluster, smem_bytes)
    shape = (grid, 1, 1) if isinstance(grid, int) else grid
    what = Launch(
        "k",
        shape,
        (threads, 1, 1),
        cluster=(cluster, 1, 1),
        smem_bytes=smem_bytes,
        params=tuple(_raw(p) for p in params),
    )
    ran = run_launch(
        text,
        what,
        GPUS[gpu],
        space,
        max_instructions=max_instructions,
        roles=roles,
        options=Options(**options),
    )
    if not ran.findings:
        check_against_hardware(given, arrays)
    return ran


def code_of(ran: LaunchResult) -> str:
    """The finding's code, or ``ok``."""
    return ran.findings[0].code if ran.findings else "ok"


def clean(ran: LaunchResult) -> LaunchResult:
    assert not ran.findings, describe(ran.findings[0])
    return ran


def describe(finding: Finding) -> str:
    return f"{finding}\n{finding.details}"
