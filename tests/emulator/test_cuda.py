"""What nvcc makes of CUDA files: read in full, printed back unchanged, executed, or refused."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.emulator.coverage import unmodelled
from kernels.emulator.findings import UnsupportedPTX
from kernels.emulator.ptx import parse
from tests.emulator import cuda_kernels
from tests.emulator.cluster_harness import RECORDED, outcome
from tests.emulator.cuda_kernels import CASES, FOLDER, Case, run

FILES = sorted(path.stem for path in FOLDER.glob("*.ptx"))
REFUSED = {
    "recursion": r"^ptx:\d+: _Z9fibonaccii calls itself: recursion is not modelled",
    "pointers": r"^ptx:\d+: .*calls through pointers are not modelled",
}


def test_every_file_is_compiled_and_has_a_test() -> None:
    sources = {path.stem for path in FOLDER.glob("*.cu")}
    assert sources == set(FILES) == {case.file for case in CASES} | set(REFUSED)


@pytest.mark.parametrize("name", [name for name in FILES if name not in REFUSED])
def test_files_are_printed_back_unchanged_and_known(name: str) -> None:
    text = (FOLDER / f"{name}.ptx").read_text()
    module = parse(text)
    assert str(module) == text
    assert unmodelled(text) == {}
    launched = {case.entry for case in CASES if case.file == name}
    assert set(module.entries) - launched <= {"spoken"}  # which has a test of its own


@pytest.mark.parametrize(
    ("case", "gpu"),
    [pytest.param(case, gpu, id=f"{case}-{gpu}") for case in CASES for gpu in case.gpus],
)
def test_results(case: Case, gpu: str) -> None:
    given = case.inputs()
    after, launch = run(case, gpu)
    assert not launch.findings, "\n".join(map(str, launch.findings))
    for name, expected in case.expected(given).items():
        if name in case.close:
            np.testing.assert_allclose(after[name], expected, rtol=case.close[name], atol=1e-6)
        else:
            np.testing.assert_array_equal(after[name], expected, err_msg=name)


@pytest.mark.parametrize("case", [c for c in CASES if c.on_sm90], ids=str)
def test_an_h200_gives_the_same(case: Case) -> None:
    """Bit for bit, but for approximations and sums whose order is the tensor core's."""
    item = cuda_kernels.item(case)
    want = RECORDED["launches"].get(item["name"])
    if want is None:
        assert case.close and item["name"] in RECORDED["open"], "record again (record_isa.py)"
    else:
        assert want == outcome([bytes.fromhex(array) for array in item["emulated"]])


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.entry in ("called", "summed", "copied")], ids=str
)
def test_schedules_do_not_matter(case: Case) -> None:
    from kernels.emulator.schedule import Options

    first, _ = run(case, "h100")
    for seed in range(3):
        way = Options(schedule="random", visibility="late", seed=seed)
        after, launch = run(case, "h100", options=way)
        assert not launch.findings
        for name in case.expected(case.inputs()):
            assert after[name].tobytes() == first[name].tobytes()


def test_printf(capfd: pytest.CaptureFixture[str]) -> None:
    x = np.arange(64, dtype=np.float32) / 8 + 1
    case = Case("memory", "spoken", lambda rng: {"x": x}, lambda given: {})
    _, launch = run(case, "h100")
    assert not launch.findings
    out = capfd.readouterr().out
    words = [line.partition("] ")[2] for line in out.splitlines()]
    assert words == ["thread 0 has 1.000, it says", "thread 1 has 1.125, it says"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedPTX, match=REFUSED[name]):
        parse((FOLDER / f"{name}.ptx").read_text())
