"""The modelled SM of Hopper on records whose cycles can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.emulator.records import Event, MmaForm, OpClass, Source, WarpRecord
from roofline.cycles.blocks import Blocks
from roofline.cycles.hardware import Hardware, hardware
from roofline.cycles.sm import simulate
from roofline.cycles.state import Run
from roofline.gpus import find_gpu
from roofline.intervals import wgmmas
from tests.roofline.synthetic import Kernel, Row, wgmma_row

FMA, TENSOR, COPY, BARRIER = OpClass.FMA, OpClass.TENSOR, OpClass.COPY, OpClass.BARRIER
COMMIT: Row = (Event.WGMMA_COMMIT, 0, 0, 0, 0)
D = 100  # an accumulator's register


@pytest.fixture(scope="module")
def hw() -> Hardware:
    return hardware(find_gpu("h200"))


def waits(allowed: int) -> Row:
    return (Event.WGMMA_WAIT, allowed, 0, 0, 0)


def warpgroup(
    kernel: Kernel, first: int, steps: list[int], rows: list[Row], role: str = "mma"
) -> list[WarpRecord]:
    return [kernel.warp(first + i, steps, rows, role) for i in range(4)]


def run(kernel: Kernel, *groups: list[WarpRecord], hw: Hardware) -> Run:
    return simulate([w for group in groups for w in group], Blocks(kernel.code(), hw), hw)


def multiply(count: int, n: int, *, a_in_registers: bool = False) -> tuple[Kernel, list[int], list]:  # type: ignore[type-arg]
    """A kernel that issues ``count`` MMAs as one group and waits for it."""
    kernel = Kernel()
    mma = kernel.event("wgmma.mma_async", TENSOR, [D], [D])
    commit = kernel.event("wgmma.commit_group", TENSOR, [], [])
    wait = kernel.event("wgmma.wait_group", TENSOR, [], [])
    row = wgmma_row(n, a_in_registers=a_in_registers)
    return kernel, [mma] * count + [commit, wait], [row] * count + [COMMIT, waits(0)]


@pytest.mark.parametrize(
    ("n", "a_in_registers", "interval"),
    [(256, False, 128), (128, False, 64), (64, False, 32), (32, False, 24), (64, True, 32)],
)
def test_back_to_back_the_longer_of_arithmetic_and_smem(
    n: int, a_in_registers: bool, interval: int, hw: Hardware
) -> None:
    """64 x N x 16 at 4096 FLOP a cycle; at 128 B a cycle B's rows, and A's unless in registers."""
    cycles = []
    for count in (16, 48):
        kernel, steps, rows = multiply(count, n, a_in_registers=a_in_registers)
        cycles.append(run(kernel, warpgroup(kernel, 0, steps, rows), hw=hw).cycles)
    assert cycles[1] - cycles[0] == 32 * interval
    assert cycles[0] == pytest.approx(16 * interval + hw.constants["wgmma_latency"], abs=8)


def test_intervals_are_the_measured_ones(hw: Hardware) -> None:
    """Every row of an H200, by the closed form and by the model of the SM."""
    rows = wgmmas()
    assert len(rows) > 300
    for row in rows:
        assert abs(row.residual) < (0.05 if row.warpgroups == 1 else 3.0), row
        bits = 16 if row.format == "bf16" else 8
        form = MmaForm(not row.a_in_smem, 1, bits)
        arithmetic, smem, _ = hw.wgmma(64, row.n, 256 // bits, form)
        assert max(arithmetic, smem) == row.model_cycles, row


def test_two_warpgroups_share_the_tensor_core(hw: Hardware) -> None:
    """The first keeps it while it has more; the second ends when the work of both is done."""
    kernel, steps, rows = multiply(16, 128)
    alone = run(kernel, warpgroup(kernel, 0, steps, rows), hw=hw).cycles
    first, second = (warpgroup(kernel, 4 * i, steps, rows, role) for i, role in enumerate("ab"))
    both = run(kernel, first, second, hw=hw)
    assert both.cycles == pytest.approx(alone + 16 * 64, abs=8)
    assert both.busy["tensor core"] == 2 * 16 * 64
    assert both.stalls["b"]["wait at kernel.py:1"] / 4 < alone
    waited = [sum(both.stalls[role].values()) / 4 for role in "ab"]
    assert waited[1] - waited[0] == pytest.approx(16 * 64, abs=2 * 64 + 8)


def test_a_wait_leaves_the_newest_groups_pending(hw: Hardware) -> None:
    """Of two groups the first is awaited: the warp goes on when that one is done."""
    kernel = Kernel()
    mma = kernel.event("wgmma.mma_async", TENSOR, [D], [D])
    commit = kernel.event("wgmma.commit_group", TENSOR, [], [])
    wait = kernel.event("wgmma.wait_group", TENSOR, [], [], immediate=1)
    work = kernel.block(*[("fma.rn.f32", FMA, [i], [i + 1]) for i in range(64)])
    steps = [mma, commit, *[mma] * 7, commit, wait, work]
    rows = [wgmma_row(256), COMMIT, *[wgmma_row(256)] * 7, COMMIT, waits(1)]
    patient = replace(hw, constants={**hw.constants, "wgmma_queue": 64.0})
    found = run(kernel, warpgroup(kernel, 0, steps, rows), hw=patient)
    wait_stall = found.stalls["mma"]["wait at kernel.py:1"] / 4
    assert wait_stall < 128 + hw.constants["wgmma_latency"]
    assert found.cycles == pytest.approx(8 * 128, abs=8)


def test_a_result_is_used_after_its_wait_only(hw: Hardware) -> None:
    """In one basic block what reads an accumulator stays behind the wait; the rest moves up."""
    kernel = Kernel()
    segments = [kernel.event("wgmma.mma_async", TENSOR, [D], [D])]
    segments.append(kernel.event("wgmma.commit_group", TENSOR, [], [], leader=False))
    segments.append(kernel.event("wgmma.wait_group", TENSOR, [], [], leader=False))
    segments.append(kernel.block(("fma.rn.f32", FMA, [D], [1]), ("mul.rn.f32", FMA, [2], [3])))
    kernel.leaders[segments[-1]] = False
    block = Blocks(kernel.code(), hw).block(0, 3)
    assert [op.index for op in block.ops] == [0, 1, 2, 3, 4]
    assert block.ops[2].writes == (D,)


def test_what_is_pending_may_wait_while_others_go_on(hw: Hardware) -> None:
    """wait_group 1 covers the older group's accumulators, not the newer one's."""
    kernel = Kernel()
    for register in (D, D + 1):
        kernel.event("wgmma.mma_async", TENSOR, [register], [register], leader=register == D)
        kernel.event("wgmma.commit_group", TENSOR, [], [], leader=False)
    kernel.event("wgmma.wait_group", TENSOR, [], [], leader=False, immediate=1)
    block = Blocks(kernel.code(), hw).block(0, 4)
    assert block.ops[4].writes == (D,)


def test_a_full_queue_stalls_the_warp(hw: Hardware) -> None:
    """A warp issues ahead by as many MMAs as the queue holds."""
    stalls = {}
    for queue in (1, 4):
        kernel, steps, rows = multiply(8, 256)
        short = replace(hw, constants={**hw.constants, "wgmma_queue": float(queue)})
        found = run(kernel, warpgroup(kernel, 0, steps, rows), hw=short)
        stalls[queue] = found.stalls["mma"]["tensor core busy"] / 4
    assert stalls[1] - stalls[4] == pytest.approx(3 * 128, abs=8)


def test_a_multicast_is_read_once(hw: Hardware) -> None:
    """Both CTAs' barriers hear of their bytes; L2 gives them once."""
    kernel = Kernel()
    init = kernel.event("mbarrier.init", BARRIER, [], [])
    expect = kernel.event("mbarrier.arrive", BARRIER, [], [])
    copy = kernel.event("cp.async.bulk.tensor", COPY, [], [])
    wait = kernel.event("mbarrier.try_wait", BARRIER, [], [1])
    bars = [1024, 1 << 24 | 1024]
    size = 16384

    def rows(rank: int) -> list[Row]:
        return [
            (Event.MBARRIER_INIT, bars[rank], 1, 0, 0),
            (Event.MBARRIER_ARRIVE, bars[rank], 1, size, 0),
        ]

    both: list[Row] = [
        (int(Event.COPY_IN) | 1 << 8, bars[0], size, 2048, Source.GLOBAL),
        (Event.COPY_IN, bars[1], size, 1 << 24 | 2048, Source.MULTICAST),
    ]
    first = kernel.warp(
        0, [init, expect, copy, wait], [*rows(0), *both, (Event.MBARRIER_WAIT, bars[0], 0, 0, 0)]
    )
    second = kernel.warp(
        0, [init, expect, wait], [*rows(1), (Event.MBARRIER_WAIT, bars[1], 0, 0, 0)]
    )
    second = replace(second, cta=1)
    found = simulate([first, second], Blocks(kernel.code(), hw), hw)
    assert found.l2_bytes == size
    constants = hw.constants
    expected = (
        size / hw.ingress + constants["first_copy_latency"] + constants["mbarrier_wake_latency"]
    )
    assert found.cycles == pytest.approx(expected, abs=8)


def test_mma_sync_takes_its_sub_partition(hw: Hardware) -> None:
    """Independent MMAs of one warp, and of two in the same and in different sub-partitions."""
    kernel = Kernel()
    mma = kernel.event("mma.sync", TENSOR, [0], [1])
    row: Row = (Event.WARP_MMA, 16, 8, 16 | MmaForm(True, 1, 16).encode() << 16, 0)
    interval = 2 * 16 * 8 * 16 / (4096 / 4 * hw.constants["warp_mma_share"])

    def cycles(*warps: int) -> float:
        records = [kernel.warp(w, [mma] * 32, [row] * 32) for w in warps]
        return simulate(records, Blocks(kernel.code(), hw), hw).cycles

    assert cycles(0, 1) == cycles(0)
    assert cycles(0, 4) - cycles(0) == pytest.approx(32 * interval, abs=interval)


def test_cp_async_arrives_when_its_copies_are_there(hw: Hardware) -> None:
    kernel = Kernel()
    steps = [
        kernel.event("cp.async.ca", OpClass.GLOBAL, [], []),
        kernel.event("cp.async.commit_group", OpClass.GLOBAL, [], []),
        kernel.event("cp.async.wait_group", OpClass.GLOBAL, [], []),
    ]
    rows: list[Row] = [
        (Event.CP_ASYNC, 512, 16, 0, 0),
        (Event.CP_ASYNC_COMMIT, 0, 0, 0, 0),
        (Event.CP_ASYNC_WAIT, 0, 0, 0, 0),
    ]
    found = simulate([kernel.warp(0, steps, rows)], Blocks(kernel.code(), hw), hw)
    expected = 512 / hw.ingress + hw.constants["global_latency"]
    assert found.cycles == pytest.approx(expected, abs=3)
