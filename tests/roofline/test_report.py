"""The page, the plots and the table of shares."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from roofline import report
from roofline.choice import choose
from roofline.cli import main
from roofline.errors import RooflineError
from roofline.report import LENGTHS, Report
from roofline.shares import shares

pytest.importorskip("cutlass", reason="the emulator needs the CuTe DSL (nvidia-cutlass-dsl)")


@pytest.fixture(scope="module")
def made() -> Iterator[Report]:
    yield report.make("b200", 128, False, measured_ms=2.0, shares=False)


def test_the_page_has_every_length_beside_what_is_published(made: Report) -> None:
    page = report.markdown(made)
    for seqlen, published in made.published.items():
        line = next(x for x in page.splitlines() if x.startswith(f"| {seqlen} |"))
        predicted = next(p.tflops for p in made.sweep if p.problem.seqlen == seqlen)
        assert f"| {predicted:.0f} |" in line and f"| {published} |" in line
        assert line.endswith(f"| {predicted / published - 1:+.1%} |")
    assert [p.problem.seqlen for p in made.sweep] == list(LENGTHS)
    assert "model beside it |" in page and "is no error of the model" in page
    for heading in ("unit by unit", "warps wait for", "## Tiles", "What this stands on"):
        assert heading in page


def test_a_measurement_is_put_beside_the_model(made: Report) -> None:
    measured = made.to_dict()["measured"]
    flops = 4 * 4 * 16 * 8192 * 8192 * 128
    assert measured["tflops"] == pytest.approx(flops / 2e-3 / 1e12, abs=0.1)
    assert measured["of_model"] == pytest.approx(made.detail.seconds / 2e-3, abs=1e-3)
    assert "slower than the model" in measured["verdict"]
    model_ms = made.detail.seconds * 1e3
    assert "within" in report.verdict(made.detail, model_ms * 1.05)
    assert "faster than the model" in report.verdict(made.detail, model_ms * 0.8)
    # 148 SMs of 8192 FLOP a cycle at no more than 1.965 GHz: nothing is faster than that.
    peak_ms = flops / (148 * 8192 * 1.965e9) * 1e3
    assert "impossible" not in report.verdict(made.detail, peak_ms * 1.01)
    assert "impossible: the tensor cores' peak is 2382" in report.verdict(
        made.detail, peak_ms * 0.99
    )


def test_json_has_no_nan(made: Report) -> None:
    json.dumps(made.to_dict(), allow_nan=False)


def test_plots_are_written_with_units(made: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    from roofline.plots import save

    files = save(made, tmp_path / "new")
    assert {f.name for f in files} == {
        f"{name}.{suffix}"
        for name in ("roofline", "budget", "speed", "timeline")
        for suffix in ("png", "svg")
    }
    assert all(f.stat().st_size > 5000 for f in files)
    with pytest.raises(RooflineError, match="cannot be made"):
        save(made, files[0] / "below a file")


@pytest.mark.parametrize("ms", ["0", "-1", "inf", "-inf", "nan"])
def test_a_time_of_nothing_or_for_ever_is_refused(
    ms: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", f"--measured-ms={ms}", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"measured_ms {float(ms)}: must be a finite number above 0" in err


def test_best_shares_are_where_the_pipes_balance() -> None:
    """B200: 16 exponentials a cycle bind below head_dim 128 and in fp8; B300: hardly ever."""
    b200 = {(c.head_dim, c.dtype): c for c in shares("b200")}
    assert float(b200[64, "bf16"].share) == 0.375
    assert float(b200[128, "bf16"].share) == 0.0 and b200[128, "bf16"].bound == "mma+exp"
    assert float(b200[128, "fp8"].share) == 0.375
    b300 = {(c.head_dim, c.dtype): c for c in shares("b300")}
    assert all(c.share == 0 for c in b300.values() if (c.head_dim, c.dtype) != (64, "fp8"))
    for choice in (*b200.values(), *b300.values()):
        assert choice.exp_best <= choice.exp_plain


@pytest.mark.parametrize("gpu", ["b200", "gb300"])
def test_replayed_shares_are_what_fa4_plans(gpu: str) -> None:
    """And the forecast, which knows the chain, is nearer to them than the pipes alone."""
    found = {(row.head_dim, row.dtype): row for row in shares(gpu)}
    for head_dim in (64, 128):
        row = found[head_dim, "bf16"]
        assert row.replay is not None and row.chain is not None
        plan = choose(gpu, head_dim).plan_fields
        assert row.replay.share == plan["exp2_emulated_share"]
        assert row.replay.saves >= 0 and row.chain.saves >= 0
        assert abs(row.chain.share - row.replay.share) <= 0.125
    assert found[128, "fp8"].replay is None and found[192, "bf16"].replay is None


def test_hopper_has_pipes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a tile that its registers hold, with what its wgmma read; and the page says why."""
    found = shares("h200")
    assert all(row.chain is None and row.replay is None for row in found)
    assert {row.tile for row in found} == {"128x128"}
    assert next(r for r in found if (r.head_dim, r.dtype) == (128, "bf16")).smem == 1280
    assert main(["shares", "--gpu", "h200"]) == 0
    assert "chain and replay: none, for no kernel here" in capsys.readouterr().out
    assert {row.tile for row in shares("b200")} == {"256x128"}


def test_shares_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shares", "--gpu", "b300", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["head_dim"], r["head_dim_v"], r["dtype"]) for r in rows][4] == (192, 128, "bf16")


@pytest.mark.slow
def test_report_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    folder = tmp_path / "page"
    status = main(["report", "--head-dim", "64", "--causal", "--no-shares", "--out", str(folder)])
    assert status == 0
    page = (folder / "report.md").read_text()
    for line in capsys.readouterr().out.splitlines():
        assert Path(line).is_file()
    assert "](timeline.png)" in page and "causal" in page
