"""The ``fa4`` command: output, JSON, exit status, and one line for bad input."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fa4.cli import main
from fa4.features import FEATURES
from fa4.plan import make_plan
from fa4.progress import ProgressBar
from kernels.common.plan import FORWARD_ARCHS, GPU_ARCHS, KernelPlan
from roofline.choice import choose
from tests.fa4.fake_emulator import FINDING, FakeEmulator
from tests.fa4.problems import random_qkv

JSON_KEYS = (
    "max_abs_error torch_max_abs_error rms_error torch_rms_error lse_max_abs_error findings "
    "thread_instructions seconds backend gpu plan budget"
).split()


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> FakeEmulator:
    fake = FakeEmulator()
    monkeypatch.setattr("kernels.emulator.emulate", fake, raising=False)
    return fake


def _json(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    assert main([*argv, "--json"]) == status
    captured = capsys.readouterr()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    answer: dict[str, Any] = json.loads(captured.out, parse_constant=refuse)
    return answer


def _refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("fa4: ")
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n")
    return captured.err


def test_run_emulates_by_default(
    emulator: FakeEmulator, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = _json(capsys, "run", "--seqlen", "130", "--heads", "4", "--kv-heads", "2", "--causal")
    assert [key for key in JSON_KEYS if key not in answer] == []
    plan = make_plan("b200", "bfloat16", 128, True, {})
    assert answer["backend"] == "emulator" and answer["gpu"] == "b200"
    assert answer["plan"] == json.loads(json.dumps(plan.to_dict()))
    assert answer["thread_instructions"] == 1000 and answer["seconds"] == 0.5
    assert answer["findings"] == [] and answer["ok"] is True
    budget = answer["budget"]
    assert (budget["mma"], budget["smem"], budget["exp"]) == (2048, 1536, 2048)
    assert budget["bound"] == "mma+exp" and budget["tile"] == "256x128"
    assert 0 < answer["max_abs_error"] < answer["torch_max_abs_error"]
    assert 0 < answer["rms_error"] < answer["torch_rms_error"]
    assert answer["lse_max_abs_error"] < 1e-5
    assert emulator.calls[0].qkv[0].shape == (1, 130, 4, 128)


def test_run_prints_plan_errors_report_and_budget(
    emulator: FakeEmulator, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = "run --seqlen 40 --seqlen-k 70 --dtype fp16 --exp2-share 0.125"
    assert main(argv.split()) == 0
    out = capsys.readouterr().out
    plan = KernelPlan.forward(dtype="float16", exp2_emulated_share=0.125)
    for text in (str(plan), "(1, 40, 1, 128)", "(1, 70, 1, 128)", "plain PyTorch", "no findings"):
        assert text in out
    for text in ("1,000 thread-instructions", "2048", "12.5% of exp2", "exp 1792"):
        assert text in out
    assert out.index("TMEM") < out.index("thread-instructions") < out.index("plain PyTorch")
    assert out.rstrip().endswith("ok")


def test_shape_options_reach_the_input(
    emulator: FakeEmulator, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = "run --batch 2 --seqlen 3 --seqlen-k 5 --heads 6 --kv-heads 2 --head-dim 32 --dtype fp16"
    first = _json(capsys, *argv.split(), "--seed", "7", "--gpu", "sm_103a")
    assert first["problem"] == {
        "batch": 2,
        "seqlen_q": 3,
        "seqlen_k": 5,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 32,
        "head_dim_v": 32,
        "dtype": "float16",
        "causal": False,
        "softmax_scale": pytest.approx(32**-0.5),
    }
    assert first["gpu"] == "b300" and first["plan"]["arch"] == "sm_103a"
    call = emulator.calls[0]
    assert [tuple(t.shape) for t in call.qkv] == [(2, 3, 6, 32), (2, 5, 2, 32), (2, 5, 2, 32)]
    assert call.seed == 7
    _json(capsys, *argv.split(), "--seed", "7")
    _json(capsys, *argv.split(), "--seed", "8")
    same, other = emulator.calls[1].qkv[0], emulator.calls[2].qkv[0]
    assert torch.equal(call.qkv[0], same) and not torch.equal(same, other)


def test_plan_options(emulator: FakeEmulator, capsys: pytest.CaptureFixture[str]) -> None:
    argv = "run --seqlen 9 --tile 256x128 --exp2-share 0.25 --rescale-threshold 0 --kv-stages 3"
    plan = _json(capsys, *argv.split())["plan"]
    assert (plan["exp2_emulated_share"], plan["rescale_threshold"], plan["kv_stages"]) == (
        0.25,
        0,
        3,
    )


def test_emulation_options(emulator: FakeEmulator, capsys: pytest.CaptureFixture[str]) -> None:
    argv = "run --seqlen 9 --schedule adversarial --visibility late --profile isa --no-checks"
    _json(capsys, *argv.split())
    assert emulator.calls[0].options == {
        "schedule": "adversarial", "visibility": "late", "profile": "isa", "checks": False,
    }  # fmt: skip
    _json(capsys, "run", "--seqlen", "9")
    assert emulator.calls[1].options == {}


def test_emulation_choices_are_the_emulators() -> None:
    from fa4.cli import _EMULATION
    from kernels.emulator.running import SUPPORTED

    assert all(SUPPORTED[name] == values for name, values in _EMULATION.items())


def test_findings_make_the_status_1(
    emulator: FakeEmulator, capsys: pytest.CaptureFixture[str]
) -> None:
    emulator.findings = (FINDING,)
    answer = _json(capsys, "run", "--seqlen", "9", status=1)
    assert answer["ok"] is False and answer["findings"][0]["code"] == FINDING.code
    assert main(["run", "--seqlen", "9"]) == 1
    out = capsys.readouterr().out
    assert FINDING.code in out and "FAILED: the emulator has findings" in out


@pytest.mark.parametrize("value", [math.nan, math.inf, 5.0])
def test_wrong_numbers_make_the_status_1(
    value: float, emulator: FakeEmulator, capsys: pytest.CaptureFixture[str]
) -> None:
    emulator.spoil = lambda out, lse: out[0, 3].fill_(value)
    answer = _json(capsys, "run", "--seqlen", "9", status=1)
    assert answer["ok"] is False
    assert (answer["max_abs_error"] is None) == (not math.isfinite(value))


def test_run_on_a_file(
    tmp_path: Path, emulator: FakeEmulator, capsys: pytest.CaptureFixture[str]
) -> None:
    q, k, v = random_qkv(batch=1, head_dim=32)
    save_file({"q": q, "k": k, "v": v, "other": q + 1}, tmp_path / "qkv.safetensors")
    answer = _json(capsys, "run", "--input", str(tmp_path / "qkv.safetensors"), "--causal")
    assert answer["problem"]["seqlen_k"] == 97 and answer["problem"]["causal"] is True
    assert all(torch.equal(a, b) for a, b in zip(emulator.calls[0].qkv, (q, k, v), strict=True))


@pytest.mark.slow
def test_run_for_real(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing stands in for anything: the kernel is compiled, emulated and checked."""
    argv = "run --seqlen 130 --seqlen-k 200 --heads 2 --kv-heads 1 --head-dim 64 --causal --seed 3"
    answer = _json(capsys, *argv.split())
    assert answer["backend"] == "emulator" and answer["ok"] and answer["findings"] == []
    # two heads of one tile, each thread of 12 warps works through 200 keys or so
    assert 100_000 < answer["thread_instructions"] < 10_000_000
    assert 0 < answer["max_abs_error"] and 0 < answer["lse_max_abs_error"] < 1e-3


def test_run_on_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "run --backend reference --seqlen 50 --head-dim 20 --head-dim-v 12 --dtype fp32"
    answer = _json(capsys, *argv.split())
    assert answer["backend"] == "reference" and answer["seconds"] > 0
    for key in ("gpu", "plan", "budget", "thread_instructions"):
        assert answer[key] is None
    assert main(argv.split()) == 0
    assert "plain PyTorch" in capsys.readouterr().out


BAD = [
    ("", "COMMAND"),
    ("fly", "invalid choice: 'fly'"),
    ("run --seqlen 0", "0 is out of range: give 1 to 2147483647"),
    ("run --batch -1", "-1 is out of range"),
    ("run --seqlen many", "'many' is not a whole number"),
    ("run --seqlen", "expected one argument"),
    ("run --seq 5", "unrecognized arguments: --seq"),
    ("run --gpu b100", "unknown GPU 'b100'"),
    ("run --gpu h100", "sm_90 has no kernel"),
    ("run --backend gpu", "unknown backend 'gpu'"),
    ("run --backend cuda", "no GPU for backend 'cuda'"),
    ("run --backend reference --gpu b200", "gpu picks the emulator's model"),
    ("run --backend reference --tile 256x128", "backend 'reference', which has no plan"),
    ("run --dtype fp8", "--dtype fp8: give one of bfloat16"),
    ("run --dtype fp32", "the kernel takes bfloat16 and float16"),
    ("run --head-dim 72", "multiples of 16 up to 128"),
    ("run --head-dim 64 --head-dim-v 32", "the kernel takes equal ones"),
    ("run --heads 3 --kv-heads 2", "3 heads of q and 2"),
    ("run --tile 256", "tile '256': must be MxN"),
    ("run --tile 256x-128", "--tile 256x-128: this kernel's tile is 256x128"),
    ("run --tile 257x128", "this kernel's tile is 256x128"),
    ("run --tile 100x100", "this kernel's tile is 256x128"),
    ("run --seqlen 99999999999", "is out of range"),
    ("run --seqlen 2000000000 --heads 64", "GiB as float32, and this machine has"),
    ("run --seed 18446744073709551616", "0 to 2^64 - 1"),
    ("run --schedule fifo", "'round_robin'"),
    ("run --backend reference --seqlen 8 --no-checks", "checks with backend 'reference'"),
    ("supports --head-dim 0", "0 is out of range"),
    ("supports --heads 0", "0 is out of range"),
    ("run --tile 128x128", "this kernel's tile is 256x128"),
    ("run --ctas 2", "ctas 2: this kernel takes 1 only"),
    ("run --exp2-share 2", "exp2_emulated_share 2.0"),
    ("run --rescale-threshold nan", "rescale_threshold nan"),
    ("run --kv-stages 99", "lower kv_stages from 99"),
    ("run --seed -1", "give a whole number, 0 to 2^64 - 1"),
    ("supports --gpu b100", "unknown GPU 'b100'"),
    ("supports --feature flash", "unknown feature 'flash'"),
    ("supports --backend gpu", "unknown backend 'gpu'"),
    ("plan --head-dim 200", "head_dim 200"),
    ("plan --gpu h200 --kv-stages 3", "plan fields kv_stages on h200: there is no kernel"),
    ("plan --gpu h200 --dtype fp32", "dtype 'float32' is unknown"),
    ("plan --gpu sm_120", "gpu 'sm_120' is unknown"),
    ("plan --dtype fp32", "dtype 'float32'"),
    ("env --gpu b200", "unrecognized arguments"),
]


@pytest.mark.parametrize(("command", "text"), BAD)
def test_bad_command_lines(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert text in _refused(capsys, *command.split())


def _truncated(path: Path) -> None:
    save_file(dict(zip("qkv", random_qkv(), strict=True)), path)
    path.write_bytes(path.read_bytes()[:-1000])


def _nameless(path: Path) -> None:
    q, _, v = random_qkv()
    save_file({"query": q, "v": v}, path)


def _rank_3(path: Path) -> None:
    save_file({name: t[0].contiguous() for name, t in zip("qkv", random_qkv(), strict=True)}, path)


def _mixed(path: Path) -> None:
    q, k, v = random_qkv()
    save_file({"q": q, "k": k.half(), "v": v[:, 1:].contiguous()}, path)


FILES = {
    "missing": (lambda path: None, "does not exist"),
    "folder": (lambda path: path.mkdir(), "is a folder"),
    "empty": (lambda path: path.touch(), "cannot be read as safetensors"),
    "text": (lambda path: path.write_text("hello\n" * 99), "cannot be read as safetensors"),
    "truncated": (_truncated, "cannot be read as safetensors"),
    "pickle": (lambda path: torch.save({}, path), "cannot be read as safetensors"),
    "nameless": (_nameless, "no tensor named q, k, only query, v"),
    "rank 3": (_rank_3, "q has shape (65, 4, 64): rank 4"),
    "mixed": (_mixed, "mixed dtypes"),
}


@pytest.mark.parametrize(("make", "text"), FILES.values(), ids=FILES)
def test_bad_files(
    make: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "qkv.safetensors"
    make(path)
    assert text in _refused(capsys, "run", "--input", str(path))


def test_the_file_says_its_shape(capsys: pytest.CaptureFixture[str]) -> None:
    line = _refused(capsys, "run", "--input", "x", "--seqlen", "5", "--dtype", "bf16")
    assert "--seqlen, --dtype with --input" in line


def test_supports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["supports", "--gpu", "b300", "--head-dim", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(FEATURES)
    assert lines[0].split()[1] == "yes" and "sm_103" in lines[0]
    assert lines[1].split()[1] == "no" and "torch.no_grad()" in lines[1]
    answer = _json(capsys, "supports", "--gpu", "sm_120", "--feature", "fwd", "--head-dim", "72")
    assert answer["fwd"]["ok"] is False
    assert "sm_120" in answer["fwd"]["reason"] and "head_dim 72" in answer["fwd"]["reason"]


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--head-dim", "64", "--causal"]) == 0
    out = capsys.readouterr().out
    plan = make_plan("b200", "bfloat16", 64, True, {})
    assert out.startswith(str(plan))
    why = out[len(str(plan)) :]
    for text in ("Why", "ptxas spills nothing", "in the replay a key block takes", "256x128"):
        assert text in why
    assert _json(capsys, "plan", "--gpu", "sm_103a")["gpu"] == "b300"


@pytest.mark.parametrize("gpu", sorted(GPU_ARCHS))
def test_plan_follows_the_roofline_on_every_gpu(
    gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = choose(gpu, 128, causal=True)
    page = _json(capsys, "plan", "--gpu", gpu, "--causal")
    assert page["gpu"] == gpu and page["arch"] == GPU_ARCHS[gpu]
    why = page["why"]
    assert why["tiles"][0]["place"] == 1 and all(tile["reason"] for tile in why["tiles"])
    for name, value in found.plan_fields.items():
        assert page[name] == value
    if GPU_ARCHS[gpu] in FORWARD_ARCHS:
        assert why["kernel"] and set(why["reasons"]) == set(found.reasons)
        assert page["tile_order"] == "longest_first"
    else:
        assert not why["kernel"] and "sm_90a" in why["no_kernel"][0]
        assert "reference" in why["instead"]
        assert main(["plan", "--gpu", gpu]) == 0
        out = capsys.readouterr().out
        assert f"No kernel for {gpu} (sm_90a)" in out and "What runs there: the PyTorch" in out


def test_plan_says_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    page = _json(capsys, "plan", "--exp2-share", "0.0625", "--kv-stages", "2")
    assert (page["exp2_emulated_share"], page["kv_stages"]) == (0.0625, 2)
    asked = {name for name, why in page["why"]["reasons"].items() if why.startswith("as asked")}
    assert asked == {"exp2_emulated_share", "kv_stages"}


def test_env_never_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    for text in ("fa4 ", "python", "nvidia-cutlass-dsl", "4.8", "driver_cuda", "gpus", "cache"):
        assert text in out

    def broken(*_: object) -> None:
        raise RuntimeError("the driver is asleep")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr("ctypes.CDLL", broken)
    facts = _json(capsys, "env")
    assert facts["gpus"] == facts["driver_cuda"] == "unknown: RuntimeError: the driver is asleep"
    assert facts["packages"]["torch"].startswith("2.")


class _Stream(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


@pytest.mark.parametrize(
    ("tty", "shown", "draws"),
    [(True, None, True), (False, None, False), (False, True, True), (True, False, False)],
)
def test_progress_bar(tty: bool, shown: bool | None, draws: bool) -> None:
    stream = _Stream(tty)
    with ProgressBar("emulating", shown, stream) as bar:
        bar(0.0)
        bar(1.0)
    text = stream.getvalue()
    assert bool(text) == draws
    if draws:
        assert "0%" in text and "100%" in text and "#" * 32 in text


def test_progress_goes_to_stderr(
    emulator: FakeEmulator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--seqlen", "9", "--json", "--progress"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "emulating b200" in captured.err and "100%" in captured.err
    assert main(["run", "--seqlen", "9", "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_module_entry(root: Path) -> None:
    """As a process: the status is the exit status, and there is no traceback."""
    command = [sys.executable, "-m", "fa4", "run", "--gpu", "b100"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
