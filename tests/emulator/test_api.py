"""`emulate`: what it validates, compiles once, hands to the machine, and makes of its answers.

The machine is replaced by a recorder here: how it executes is tested with the machine.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from kernels.emulator import EmulationError, Finding, api, capture, clear_cache, emulate, running
from kernels.emulator.gpus import GPUS, gpu_model
from kernels.emulator.host_runtime import Launch
from tests.emulator import capture_kernels as k


@dataclass
class Result:
    thread_instructions: int = 1000
    findings: list[Finding] = field(default_factory=list)
    ctas: int = 2
    seconds: float = 0.5
    records: None = None
    trace: None = None


@dataclass
class Machine:
    """Records what it is asked to run; answers are given in order, then the default."""

    answers: list[Result] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def run_launch(self, ptx, launch, gpu, memory, **keywords):
        self.calls.append({"ptx": ptx, "launch": launch, "gpu": gpu, "memory": memory, **keywords})
        if keywords["progress"] is not None:
            keywords["progress"](0.5)
        return self.answers.pop(0) if self.answers else Result()


@pytest.fixture
def machine(monkeypatch) -> Machine:
    recorder = Machine()
    monkeypatch.setattr("kernels.emulator.machine.run_launch", recorder.run_launch)
    return recorder


@pytest.fixture
def compiles(monkeypatch) -> list[Any]:
    """Starts with an empty cache; lists the functions that were really compiled."""
    clear_cache()
    compiled: list[Any] = []
    inner = capture.compile_bound

    def counted(fn, arguments, gpu):
        compiled.append(fn)
        return inner(fn, arguments, gpu)

    monkeypatch.setattr(capture, "compile_bound", counted)
    yield compiled
    clear_cache()


def make(n: int = 100, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((n,), float(i + 1), dtype=dtype) for i in range(3))


# --- What the machine is given ------------------------------------------------------------------


def test_every_launch_runs_in_order_with_its_memory(machine):
    x, y, out = make()
    report = emulate(k.axpy_then_double, x, y, out, 2.0, gpu="gb200", seed=5, roles=["load", "mma"])
    assert [call["launch"].block[0] for call in machine.calls] == [64, 128, 64]
    for call in machine.calls:
        assert call["gpu"] == GPUS["gb200"] and call["options"].seed == 5
        assert call["roles"] == {0: "load", 1: "mma"}
        assert f".entry {call['launch'].kernel}(" in call["ptx"]
        # GlobalMemory of the real engine: the tensors' own bytes, and nothing beside them.
        address = call["memory"].load(*addresses(out, 7), 4)
        assert bytes(address[0]) == bytes(out[7:8].numpy())
    assert report.ok and len(report.launches) == 3
    assert (report.thread_instructions, report.seconds) == (3000, 1.5)
    assert report.function == "axpy_then_double"


def addresses(tensor: torch.Tensor, index: int):
    import numpy as np

    return (np.array([tensor.data_ptr() + index * tensor.element_size()], np.int64),)


def test_progress_covers_all_launches_and_ends_at_one(machine):
    seen: list[float] = []
    emulate(k.axpy_then_double, *make(), 1.0, progress=seen.append)
    assert seen == [0.5 / 3, 1.5 / 3, 2.5 / 3, 1.0]


def test_the_instruction_limit_is_for_all_launches_together(machine):
    emulate(k.axpy_then_double, *make(), 1.0, max_instructions=1800)
    assert [call["max_instructions"] for call in machine.calls] == [1800, 800, 1]
    machine.calls.clear()
    emulate(k.axpy, *make(), 1.0)
    assert machine.calls[0]["max_instructions"] is None


def test_findings_stop_the_run_and_are_raised_on_request(machine):
    bad = Finding("smem_unwritten_read", "4 bytes at 0x400")
    machine.answers = [Result(), Result(findings=[bad])]
    report = emulate(k.axpy_then_double, *make(), 1.0)
    assert not report.ok and report.findings == (bad,)
    assert [launch.ran for launch in report.launches] == [True, True, False]
    with pytest.raises(EmulationError, match="smem_unwritten_read") as caught:
        report.raise_if_findings()
    assert caught.value.report is report


def test_a_launch_the_driver_would_refuse_does_not_run(machine):
    x, y, out = make(0)
    report = emulate(k.axpy, x, y, out, 1.0)  # no elements: a grid of none
    assert machine.calls == []
    assert [finding.code for finding in report.findings] == ["launch_bad_grid"]


@pytest.mark.parametrize(
    "change, code",
    [
        ({"grid": (8, 0, 1)}, "launch_bad_grid"),
        ({"grid": (8, 1 << 16, 1)}, "launch_bad_grid"),
        ({"block": (1056, 1, 1)}, "launch_bad_block"),
        ({"block": (32, 33, 1)}, "launch_bad_block"),
        ({"block": (1, 1, 65)}, "launch_bad_block"),
        ({"smem_bytes": 232449}, "launch_smem_too_large"),
        ({"grid": (6, 1, 1), "cluster": (4, 1, 1)}, "launch_bad_cluster"),
        ({"grid": (32, 1, 1), "cluster": (32, 1, 1)}, "launch_bad_cluster"),
        ({"preferred_cluster": (3, 1, 1)}, "launch_bad_cluster"),
        ({"preferred_cluster": (1, 5, 1)}, "launch_bad_cluster"),
        ({"preferred_cluster": (16, 1, 1)}, "launch_bad_cluster"),
    ],
)
def test_launch_limits(change, code):
    good = {"grid": (8, 65535, 1), "block": (1024, 1, 1), "cluster": (2, 1, 1)}
    assert running.check_launch(Launch("k", **good, smem_bytes=232448), gpu_model("b200")) == []
    findings = running.check_launch(Launch("k", **{**good, **change}), gpu_model("b200"))
    assert [finding.code for finding in findings] == [code]


# --- Compiling once -----------------------------------------------------------------------------


def test_a_preferred_cluster_is_taken_with_even_seeds(machine):
    launch = Launch("k", (8, 4, 1), (32, 1, 1), (2, 1, 1), preferred_cluster=(4, 2, 1))
    used = []
    for seed in (0, 1, 2):
        settings = running.Settings(gpu_model("b200"), seed)
        (report,) = running.run_launches("", [launch], settings)
        used.append(machine.calls[-1]["launch"].cluster)
        assert report.launch.cluster == used[-1]
    assert used == [(4, 2, 1), (2, 1, 1), (4, 2, 1)]


def test_other_sizes_and_values_do_not_compile_again(machine, compiles):
    first = emulate(k.axpy, *make(100), 1.0)
    second = emulate(k.axpy, *make(5000), 3)
    assert len(compiles) == 1
    assert first.compile_seconds > 0.0 == second.compile_seconds
    assert [call["launch"].grid[0] for call in machine.calls] == [2, 79]


@pytest.mark.filterwarnings("ignore:Dynamic variable in block size")
def test_other_types_layouts_gpus_and_constants_do(machine, compiles):
    x, y, out = make()
    emulate(k.axpy, x, y, out, 1.0)
    emulate(k.axpy, *make(dtype=torch.bfloat16), 1.0)
    emulate(k.axpy, x[::2], y, out, 1.0)
    emulate(k.axpy, x, y, out, 1.0, gpu="b300")
    emulate(k.scaled_by_constant, out, 1, 32)
    emulate(k.scaled_by_constant, out, 2, 32)
    assert len(compiles) == 6
    assert [call["launch"].block[0] for call in machine.calls[-2:]] == [32, 32]
    assert machine.calls[-1]["ptx"] != machine.calls[-2]["ptx"]


def test_equal_frozen_launchers_share_a_compile_and_unequal_ones_do_not(machine, compiles):
    out = torch.zeros(128)
    for threads in (32, 64, 32, 64):
        emulate(k.Doubler(threads), out)
    assert len(compiles) == 2
    assert [call["launch"].block[0] for call in machine.calls] == [32, 64, 32, 64]


def test_a_changed_mutable_launcher_is_compiled_again(machine, compiles):
    out = torch.zeros(128)
    launcher = k.MutableDoubler(32)
    emulate(launcher, out)
    emulate(launcher, out)
    assert len(compiles) == 1
    launcher.threads = 64
    emulate(launcher, out)
    emulate(k.MutableDoubler(64), out)
    assert len(compiles) == 3
    assert [call["launch"].block[0] for call in machine.calls] == [32, 32, 64, 64]


def test_the_cache_forgets_on_request_and_is_bounded(machine, compiles, monkeypatch):
    emulate(k.axpy, *make(), 1.0)
    clear_cache()
    emulate(k.axpy, *make(), 1.0)
    assert len(compiles) == 2
    monkeypatch.setattr(api, "_CACHE_SIZE", 1)
    emulate(k.Doubler(), torch.zeros(4))
    emulate(k.axpy, *make(), 1.0)
    assert len(compiles) == 4


# --- Refusals, before any compile ---------------------------------------------------------------


@pytest.mark.parametrize(
    "choice, value",
    [
        ("schedule", "fifo"),
        ("visibility", "lazy"),
        ("checks", 1),
        ("profile", "ptx"),
        ("processes", 0),
        ("processes", 2.0),
        ("processes", True),
        ("gpu", "b100"),
        ("seed", -1),
        ("seed", 1.5),
        ("max_instructions", 0),
        ("max_instructions", "many"),
        ("roles", {"0": "load"}),
        ("roles", {0: 1}),
        ("roles", "load"),
        ("roles", {-1: "load"}),
    ],
)
def test_choices_that_are_not_supported_are_named(choice, value, machine, compiles):
    with pytest.raises(ValueError, match=choice):
        emulate(k.axpy, *make(), 1.0, **{choice: value})
    assert compiles == [] and machine.calls == []


def test_the_message_says_what_is_supported():
    with pytest.raises(ValueError, match="'fifo' is not supported.*'round_robin'"):
        emulate(k.axpy, *make(), 1.0, schedule="fifo")
    with pytest.raises(ValueError, match="h100, h200, b200, gb200, b300, gb300"):
        emulate(k.axpy, *make(), 1.0, gpu="tpu")


def test_gpus_are_found_by_name_and_architecture():
    assert {gpu_model(name).name for name in ("sm_100a", "B200", GPUS["b200"])} == {"b200"}
    assert gpu_model("sm_90a").tmem_columns == 0 < gpu_model("sm_103a").tmem_columns
    for name in ("h100", "h200", "b200", "gb200", "b300", "gb300"):
        gpu = gpu_model(name)
        major, minor = gpu.compute_capability
        assert gpu.name == name and gpu.arch == f"sm_{major}{minor}a"
        assert gpu.smem_per_cta_bytes == 232448


def test_importing_the_package_loads_neither_the_dsl_nor_torch():
    code = (
        "import sys, kernels.emulator as e; e.emulate; e.Report; e.Launch; "
        "sys.exit([m for m in ('cutlass', 'torch', 'cuda') if m in sys.modules].__repr__() "
        "if {'cutlass', 'torch', 'cuda'} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
