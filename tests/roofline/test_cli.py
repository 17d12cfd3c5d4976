"""The `roofline` command as a user runs it: fresh processes, output, errors and time."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from roofline.cli import main
from roofline.gpus import GPU_NAMES

ROOT = Path(__file__).resolve().parents[2]


def roofline(*args: str) -> subprocess.CompletedProcess[str]:
    """A fresh process, as from a shell."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "roofline", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def as_json(*args: str, capsys: pytest.CaptureFixture[str]) -> dict:  # type: ignore[type-arg]
    assert main([*args, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def test_the_example_of_the_readme() -> None:
    done = roofline(*"budget --gpu b200 --tile 256x128 --head-dim 128 --json".split())
    assert (done.returncode, done.stderr) == (0, "")
    page = json.loads(done.stdout)
    assert [page[key] for key in ("mma", "smem", "smem_exact", "exp")] == [2048, 1536, 1536, 2048]
    assert all(type(page[key]) is int for key in ("mma", "smem", "smem_exact", "exp"))
    assert page["bound"] == "mma+exp"


def test_backward_pair(capsys: pytest.CaptureFixture[str]) -> None:
    args = "budget --gpu b200 --tile 128x128 --head-dim 128 --pass backward --ctas 2".split()
    page = as_json(*args, capsys=capsys)
    assert (page["mma"], page["smem"], page["exp"]) == (2560, 2688, 1024)


@pytest.mark.parametrize("gpu", GPU_NAMES)
def test_every_gpu_prints_a_budget(gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["budget", "--gpu", gpu]) == 0
    text = capsys.readouterr().out
    page = as_json("budget", "--gpu", gpu, capsys=capsys)
    for name in ("mma", "smem", "exp"):
        label = {"mma": "MMA", "smem": "SMEM", "exp": "exp"}[name]
        line = next(line for line in text.splitlines() if line.split()[:1] == [label])
        assert line.split()[1] == str(page[name])


def test_torch_dtype_names(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("bf16", "bfloat16"), ("fp16", "float16")
    for short, long in names:
        pages = [as_json("budget", "--dtype", n, capsys=capsys) for n in (short, long)]
        assert pages[0] == pages[1]
        assert pages[0]["dtype"] == short


def test_exp2_share(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["budget", "--tile", "128x128", "--head-dim", "64", "--exp2-share", "0.125"]
    page = as_json(*args, capsys=capsys)
    assert page["exp"] == page["exp2"]["mufu"] == 896
    assert page["exp2"]["balance"] == 647


def test_whole_problem(capsys: pytest.CaptureFixture[str]) -> None:
    args = "budget --seqlen 8192 --heads 16 --kv-heads 2 --batch 4 --causal".split()
    page = as_json(*args, capsys=capsys)
    problem = page["problem"]
    assert problem["visible_share"] == pytest.approx(8193 / 16384, abs=1e-6)
    assert problem["us"] == max(problem[k] for k in ("sm_us", "l2_us", "hbm_us"))
    assert main(args) == 0
    text = capsys.readouterr().out
    assert "16/2 heads" in text
    assert f"{problem['us']:.1f} us" in text


def test_problem_options_without_seqlen_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    page = as_json("budget", "--causal", "--heads", "4", capsys=capsys)
    assert page["problem"] is None
    assert page["notes"] == ["--heads, --causal: for a whole problem; add --seqlen"]


def test_user_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    text = 'name = "mine"\nbase = "b300"\n[smem_bandwidth]\nvalue = 64\nunit = "B/clk/SM"\n'
    path.write_text(text)
    page = as_json("budget", "--gpu", str(path), capsys=capsys)
    assert (page["gpu"], page["arch"], page["smem"], page["bound"]) == (
        "mine",
        "sm_103a",
        3072,
        "smem",
    )


def test_hopper_says_what_wgmma_reads(capsys: pytest.CaptureFixture[str]) -> None:
    """128 keys a wgmma: Q once, K and V for each of the two; 32 keys: K and V more than MMA."""
    for keys, read in ((128, 1280), (32, 512)):
        args = ["budget", "--gpu", "h200", "--tile", f"128x{keys}"]
        page = as_json(*args, capsys=capsys)
        assert page["smem_port"] == page["smem_exact"] == read
        assert sum(term["cycles"] for term in page["terms"]["smem_exact"]) == read
        assert page["bound"] == page["bound_exact"] == ("mma" if keys == 128 else "mma+smem")
        assert main(args) == 0
        text = capsys.readouterr().out
        line = next(line for line in text.splitlines() if line.split()[:1] == ["SMEM"])
        assert line.split()[2] == str(read)
        assert f"SMEM is {read}: each 64-row wgmma reads its B anew" in text
    assert as_json("budget", capsys=capsys)["smem_port"] == 1536


def test_tile_without_room(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["budget", "--tile", "256x128", "--head-dim", "256"]
    assert main(args) == 2
    error = capsys.readouterr().err
    assert "SMEM: 262144 bytes needed, 232448 there, 29696 too many" in error
    assert "TMEM: 768 columns needed, 512 there, 256 too many" in error
    page = as_json(*args, "--ignore-fit", capsys=capsys)
    assert (page["mma"], page["fits"], len(page["excesses"])) == (4096, False, 2)


ERRORS = [
    ("budget --gpu a100", "gpu 'a100' is unknown; choose one of h100, h200, b200"),
    ("budget --gpu none.toml", "none.toml: cannot be read"),
    ("budget --tile 256", "tile '256': must be MxN"),
    ("budget --tile 256x128x64", "must be MxN"),
    ("budget --tile 0x128", "tile_m 0: must be positive"),
    ("budget --tile 128x-64", "tile_n -64: must be positive"),
    ("budget --tile 100x128", "tile_m 100: must be a multiple of 16"),
    ("budget --tile 999999999x128", "at most"),
    ("budget --head-dim 0", "head_dim 0: must be positive"),
    ("budget --head-dim -64", "head_dim -64: must be positive"),
    ("budget --head-dim 1.5", "--head-dim"),
    ("budget --head-dim-v 0", "head_dim_v 0: must be positive"),
    ("budget --ctas 3", "ctas 3: one tensor-core operation spans 1 or 2 CTAs"),
    ("budget --gpu h100 --ctas 2", "use ctas 1"),
    ("budget --dtype int8", "dtype 'int8' is unknown; choose one of bf16"),
    ("budget --gpu h100 --dtype nvfp4", "h100 has no nvfp4 MMA"),
    ("budget --pass sideways", "pass 'sideways' is unknown; choose forward or backward"),
    ("budget --exp2-share 1.5", "exp2 share 1.5: must lie from 0"),
    ("budget --exp2-share nan", "exp2 share nan: must be a number"),
    ("budget --seqlen 0", "seqlen 0: must be a positive integer"),
    ("budget --seqlen 8 --heads 3 --kv-heads 2", "must be a multiple of kv_heads"),
    ("budget --seqlen 8 --visible nan", "visible nan"),
    ("budget --batch -3", "batch -3: must be a positive integer"),
    ("budget --seqlen-k 0", "seqlen_k 0: must be a positive integer"),
    ("budget --heads 0", "heads 0: must be a positive integer"),
    ("budget --kv-heads -1", "kv_heads -1: must be a positive integer"),
    ("budget --visible 5", "visible 5.0: must be above 0 and at most 1"),
    ("budget --seqlen 8 --visible 0", "visible 0.0: must be above 0 and at most 1"),
    ("budget --tile=", "tile '': must be MxN"),
    ("tiles --tile=", "tile '': must be MxN"),
    ("simulate --gemm=", "gemm '': must look like"),
    ("simulate --records=", "records '': must name a file"),
    ("simulate --visible 0.5", "unrecognized arguments: --visible"),
    ("simulate --timeline /nowhere/t.json", "timeline '/nowhere/t.json': cannot be written"),
    ("simulate --timeline=", "timeline '': cannot be written"),
    ("simulate --save-records /dev", "save-records '/dev': cannot be written: Is a directory"),
    ("report --out /dev/null/page", "out '/dev/null/page': cannot be made: Not a directory"),
    ("report --out=", "out '': must name a folder"),
    ("report --visible 0.5", "unrecognized arguments: --visible"),
    ("budget --gpus b200", "unrecognized arguments: --gpus"),
    ("budget --head 128", "unrecognized arguments: --head"),
    ("tiles --seqlen 0", "seqlen 0: must be a positive integer"),
    ("tiles --head-dim 0", "head_dim 0: must be positive"),
    ("tiles --top 0", "top 0: must be positive"),
    ("tiles --dtype int8", "dtype 'int8' is unknown"),
    ("tiles --pass sideways", "pass 'sideways' is unknown"),
    ("tiles --tile 512x128", "tile 512x128: not considered"),
    ("tiles --tile 384x128", "TMEM: 768 columns needed, 512 there, 256 too many"),
    ("gpus --gpu b100", "gpu 'b100' is unknown"),
    ("bugdet", "invalid choice: 'bugdet'"),
    ("", "COMMAND"),
]


@pytest.mark.parametrize(("command", "message"), ERRORS)
def test_one_line_errors(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("roofline: ")
    assert err.count("\n") == 1


def test_error_from_the_shell() -> None:
    done = roofline("budget", "--gpu", "a100")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_gpus_pages(capsys: pytest.CaptureFixture[str]) -> None:
    pages = as_json("gpus", capsys=capsys)
    assert tuple(pages) == GPU_NAMES
    for page in pages.values():
        assert all(q["source"] and q["tag"] for q in page["quantities"].values())
    assert main(["gpus", "--gpu", "gb300"]) == 0
    text = capsys.readouterr().out
    for quantity in pages["gb300"]["quantities"].values():
        assert quantity["source"] in text


def test_tiles_page(capsys: pytest.CaptureFixture[str]) -> None:
    args = "tiles --gpu b200 --head-dim 64 --seqlen 8192 --causal --top 2".split()
    page = as_json(*args, capsys=capsys)
    assert [tile["place"] for tile in page["tiles"]] == list(range(1, len(page["tiles"]) + 1))
    assert page["built"]["tile"] == "256x128"
    assert all(tile["reason"] for tile in page["tiles"] + page["refused"])
    assert main(args) == 0
    text = capsys.readouterr().out
    for tile in [*page["tiles"][:2], page["built"]]:
        assert f"{tile['us']:.1f}" in text
    assert f"{len(page['tiles'])} tiles fit, {len(page['refused'])} do not" in text


def test_intervals_page(capsys: pytest.CaptureFixture[str]) -> None:
    rows = as_json("intervals", capsys=capsys)
    assert len(rows) == 216
    assert main(["intervals"]) == 0
    assert "2 CTAs: 120 rows, worst interval residual 2.03 cycles" in capsys.readouterr().out


def test_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m roofline gpus --json | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.splitlines()[-1].endswith("0")
    assert done.stderr == ""


def test_commands_take_under_half_a_second() -> None:
    """Processor time of whole processes, which other work on the machine does not stretch."""
    for command in (
        "budget --seqlen 32768 --heads 16 --causal",
        "tiles --head-dim 64 --seqlen 8192 --causal",
        "gpus --json",
        "intervals",
    ):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert roofline(*command.split()).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert seconds < 0.5, command


def test_import_is_light() -> None:
    heavy = ("torch", "cutlass", "cuda", "numpy", "matplotlib")
    code = f"import sys, roofline.cli; print([m for m in {heavy} if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
