"""Every instruction of the peers' kernels can be recorded for the cycle model."""

from __future__ import annotations

import pytest

from kernels.emulator.records import Event, MmaForm, Records, Source
from tests.peers import attention, gemm

pytestmark = pytest.mark.slow


def recorded(report: object) -> Records:
    assert report.ok, str(report)  # type: ignore[attr-defined]
    records = report.launches[-1].records  # type: ignore[attr-defined]
    assert records is not None
    return records


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_on_hopper(head_dim: int, causal: bool) -> None:
    """A warpgroup's MMAs do the arithmetic of whole tiles: each of its four warps has them all."""
    problem = attention.Problem(causal, head_dim, 192, 160, 1, 1)
    report, *_ = attention.run(problem, "h200", record=True, checks=False)
    records = recorded(report)
    rows, keys = {64: (192, 128), 128: (128, 128), 256: (128, 80)}[head_dim]
    flops = 0
    for warp in records.warps:
        mma = warp.events[warp.events[:, 0] & 0xFF == Event.WGMMA]
        flops += int((2 * mma[:, 1] * mma[:, 2] * (mma[:, 3] & 0xFFFF)).sum())
    blocks = 0
    for first in range(0, 192, rows):
        last = min(first + rows, 192) - 1
        seen = min(last + 1 - 32, 160) if causal else 160  # the mask is aligned bottom-right
        blocks += -(-max(seen, 1) // keys)
    assert flops == 4 * blocks * 2 * rows * keys * 2 * head_dim


@pytest.mark.parametrize("pingpong", [False, True])
def test_gemm_on_hopper(pingpong: bool) -> None:
    """Of a cluster's multicast one copy reads for all."""
    problem = gemm.Problem((128, 128), (2, 1), 256, 128, 192, pingpong=pingpong)
    report, _ = gemm.run(problem, "h200", record=True, checks=False)
    records = recorded(report)
    copies = [w.events[w.events[:, 0] & 0xFF == Event.COPY_IN] for w in records.warps]
    read = sum(int(c[c[:, 4] == Source.GLOBAL, 2].sum()) for c in copies)
    shared = sum(int(c[c[:, 4] == Source.MULTICAST, 2].sum()) for c in copies)
    assert read == 2 * (256 + 128) * 192  # A's halves once each, B once for both
    assert shared == 2 * 128 * 192
    forms = {
        MmaForm.decode(int(row[3]) >> 16)
        for w in records.warps
        for row in w.events[w.events[:, 0] & 0xFF == Event.WGMMA]
    }
    assert forms == {MmaForm(False, 1, 16)}


@pytest.mark.parametrize(("tile", "cluster"), [((128, 256), (1, 1)), ((256, 256), (2, 1))])
def test_gemm_on_blackwell(tile: tuple[int, int], cluster: tuple[int, int]) -> None:
    problem = gemm.Problem(tile, cluster, 512, 256, 128)
    report, _ = gemm.run(problem, "b200", record=True, checks=False)
    records = recorded(report)
    total = 0
    for warp in records.warps:
        mma = warp.events[warp.events[:, 0] & 0xFF == Event.MMA]
        total += int((mma[:, 1] * mma[:, 2] * (mma[:, 3] & 0xFFFF)).sum())
    assert total == 512 * 256 * 128
    assert records.event_totals(Event.LAUNCH_CONTROL, 1) > 0
