"""Runs a few lines of PTX on the machine, one thread an element.

    got = execute("add.s32 %d, %a, %b;", {"a": a, "b": b}, {"d": np.uint32})["d"]

Each input array becomes the register ``%<name>`` of every thread (loaded from global memory), each
output is stored from the register of its name. A numpy bool array is a predicate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kernels.emulator.findings import Finding
from kernels.emulator.gpus import GPUS
from kernels.emulator.host_runtime import Launch
from kernels.emulator.machine import run_launch
from kernels.emulator.memory import GlobalMemory

HEADER = ".version 9.1\n.target sm_100a\n.address_size 64\n"
SENTINEL = 0xCD  # bytes of outputs that no thread stored


@dataclass
class Result:
    """``outputs``: arrays by name; ``findings`` of the launch; ``thread_instructions``."""

    outputs: dict[str, NDArray[Any]]
    findings: list[Finding]
    thread_instructions: int
    text: str = field(repr=False)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.outputs[name]


def _kind(dtype: DTypeLike) -> str:
    dtype = np.dtype(dtype)
    return "pred" if dtype == np.bool_ else f"b{8 * dtype.itemsize}"


def _load(name: str, kind: str) -> list[str]:
    if kind == "pred":
        return [
            f"ld.global.b8 %byte_{name}, [%at_{name}];",
            f"setp.ne.b32 %{name}, %byte_{name}, 0;",
        ]
    return [f"ld.global.{kind} %{name}, [%at_{name}];"]


def _store(name: str, kind: str) -> list[str]:
    if kind == "pred":
        return [
            f"selp.b32 %byte_{name}, 1, 0, %{name};",
            f"st.global.b8 [%at_{name}], %byte_{name};",
        ]
    return [f"st.global.{kind} [%at_{name}], %{name};"]


def _address(name: str, nbytes: int) -> list[str]:
    return [
        f"ld.param.b64 %base_{name}, [p_{name}];",
        f"mul.wide.u32 %at_{name}, %thread_, {nbytes};",
        f"add.s64 %at_{name}, %at_{name}, %base_{name};",
    ]


def entry_text(
    body: str, inputs: Mapping[str, DTypeLike], outputs: Mapping[str, DTypeLike], shared: str = ""
) -> str:
    """A whole PTX module with one entry ``k``. ``body`` may declare registers of its own and use
    ``%thread_``, the number of the thread in the grid. ``shared``: a declaration in front of it."""
    dtypes = {**inputs, **outputs}
    lines = [f".reg .{_kind(d)} %{n};" for n, d in dtypes.items()]
    lines += [".reg .b32 %thread_, %block_, %threads_;"]
    for name in dtypes:
        lines.append(f".reg .b64 %at_{name}, %base_{name}; .reg .b32 %byte_{name};")
    lines += [
        "mov.u32 %thread_, %tid.x;",
        "mov.u32 %block_, %ctaid.x;",
        "mov.u32 %threads_, %ntid.x;",
        "mad.lo.s32 %thread_, %block_, %threads_, %thread_;",
    ]
    for name, dtype in dtypes.items():
        lines += _address(name, np.dtype(dtype).itemsize)
    for name, dtype in inputs.items():
        lines += _load(name, _kind(dtype))
    lines += ["{", body, "}"]
    for name, dtype in outputs.items():
        lines += _store(name, _kind(dtype))
    params = ", ".join(f".param .u64 p_{name}" for name in dtypes)
    code = "\n".join([*lines, "ret;"])
    return f"{HEADER}{shared}\n.visible .entry k({params})\n{{\n{code}\n}}\n"


def launch_text(
    text: str,
    arrays: Mapping[str, NDArray[Any]],
    *,
    threads: int,
    blocks: int = 1,
    smem_bytes: int = 0,
    max_instructions: int | None = 10_000_000,
    gpu: str = "b200",
) -> Result:
    """Launches entry ``k`` of a module whose parameters are pointers to ``arrays``, in order."""
    memory = GlobalMemory()
    for name, array in arrays.items():
        memory.add_array(array, name)
    pointers = tuple(int(a.ctypes.data).to_bytes(8, "little") for a in arrays.values())
    launch = Launch("k", (blocks, 1, 1), (threads, 1, 1), smem_bytes=smem_bytes, params=pointers)
    ran = run_launch(text, launch, GPUS[gpu], memory, max_instructions=max_instructions)
    return Result(dict(arrays), ran.findings, ran.thread_instructions, text)


def run(
    body: str,
    inputs: Mapping[str, NDArray[Any]],
    outputs: Mapping[str, DTypeLike],
    *,
    threads: int | None = None,
    block: int = 512,
    shared: str = "",
    smem_bytes: int = 0,
    max_instructions: int | None = 10_000_000,
    gpu: str = "b200",
) -> Result:
    """Runs ``body`` in ``threads`` threads (as many as the inputs are long, or 32), CTAs of at most
    ``block``, on ``gpu`` and for its target. Findings are returned, not raised. Outputs start as
    bytes of SENTINEL."""
    threads = threads or max((len(a) for a in inputs.values()), default=32)
    block = min(block, threads)
    if threads % block:
        raise ValueError(f"{threads} threads do not fill CTAs of {block}")
    arrays: dict[str, NDArray[Any]] = {n: np.ascontiguousarray(a) for n, a in inputs.items()}
    for name, dtype in outputs.items():
        raw = np.full(threads * np.dtype(dtype).itemsize, SENTINEL, np.uint8)
        arrays[name] = raw.view(np.uint8 if np.dtype(dtype) == np.bool_ else dtype)
    text = entry_text(body, {n: a.dtype for n, a in inputs.items()}, outputs, shared)
    return launch_text(
        text.replace(".target sm_100a", f".target {GPUS[gpu].arch}"),
        arrays,
        threads=block,
        blocks=threads // block,
        smem_bytes=smem_bytes,
        max_instructions=max_instructions,
        gpu=gpu,
    )


def execute(
    body: str,
    inputs: Mapping[str, NDArray[Any]],
    outputs: Mapping[str, DTypeLike],
    **options: Any,
) -> dict[str, NDArray[Any]]:
    """`run`, and the outputs; a finding fails the test."""
    result = run(body, inputs, outputs, **options)
    assert not result.findings, "\n".join(map(str, result.findings))
    return {name: result.outputs[name] for name in outputs}
