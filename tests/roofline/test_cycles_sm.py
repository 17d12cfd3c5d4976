"""The modelled SM on records whose cycles can be counted by hand."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from kernels.emulator.records import Event, OpClass
from roofline.cycles.blocks import Blocks
from roofline.cycles.hardware import UNITS, Hardware, hardware, latencies
from roofline.cycles.sm import simulate
from roofline.cycles.state import Run
from roofline.errors import RooflineError
from roofline.gpus import find_gpu
from roofline.intervals import measurements
from tests.roofline.synthetic import Kernel, Row, mma_row

FMA, ALU, MUFU, MOVE = OpClass.FMA, OpClass.ALU, OpClass.MUFU, OpClass.MOVE
BARRIER, TENSOR, COPY = OpClass.BARRIER, OpClass.TENSOR, OpClass.COPY
N = 64


@pytest.fixture(scope="module")
def hw() -> Hardware:
    return hardware(find_gpu("b200"))


def run(kernel: Kernel, *warps, hw: Hardware) -> Run:  # type: ignore[no-untyped-def]
    return simulate(warps, Blocks(kernel.code(), hw), hw)


def chain(name: str, op: OpClass) -> Kernel:
    kernel = Kernel()
    kernel.block(*[(name, op, [i], [i + 1]) for i in range(N)])
    return kernel


def independent(name: str, op: OpClass) -> Kernel:
    kernel = Kernel()
    kernel.block(*[(name, op, [0], [i + 1]) for i in range(N)])
    return kernel


@pytest.mark.parametrize(
    ("name", "op", "latency"), [("fma.rn.f32", FMA, 4), ("ex2.approx.ftz.f32", MUFU, 17)]
)
def test_a_chain_takes_its_latencies(name: str, op: OpClass, latency: int, hw: Hardware) -> None:
    kernel = chain(name, op)
    assert run(kernel, kernel.warp(0, [0]), hw=hw).cycles == N * latency


@pytest.mark.parametrize(
    ("name", "op", "interval"),
    [
        ("fma.rn.f32", FMA, 1),
        ("fma.rn.f32x2", FMA, 2),
        ("max.f32", ALU, 2),
        ("ex2.approx.ftz.f32", MUFU, 8),
    ],
)
def test_independent_work_takes_its_pipe(
    name: str, op: OpClass, interval: int, hw: Hardware
) -> None:
    """One warp has a sub-partition's pipe; two share it, warps 0 and 1 do not."""
    kernel = independent(name, op)
    tail = hw.latency[op]
    one = run(kernel, kernel.warp(0, [0]), hw=hw)
    assert one.cycles == (N - 1) * interval + tail
    apart = run(kernel, kernel.warp(0, [0]), kernel.warp(1, [0]), hw=hw)
    assert apart.cycles == one.cycles
    together = run(kernel, kernel.warp(0, [0]), kernel.warp(4, [0]), hw=hw)
    assert together.cycles == (2 * N - 1) * interval + tail
    pipe = {FMA: "FMA", ALU: "ALU", MUFU: "MUFU"}[op]
    assert together.busy[pipe] == pytest.approx(2 * N * interval / 4)


def test_a_doubled_mufu_halves_the_time() -> None:
    kernel = independent("ex2.approx.ftz.f32", MUFU)
    cycles = {
        gpu: run(kernel, kernel.warp(0, [0]), hw=hardware(find_gpu(gpu))).cycles
        for gpu in ("b200", "b300")
    }
    assert cycles["b200"] - 17 == 2 * (cycles["b300"] - 17)


def test_moves_are_free_and_carry_dependencies(hw: Hardware) -> None:
    kernel = Kernel()
    kernel.block(
        ("fma.rn.f32", FMA, [0], [1]),
        ("mov.b64", MOVE, [1, 0], [2]),
        ("mov.b32", MOVE, [2], [3]),
        ("fma.rn.f32", FMA, [3], [4]),
    )
    found = run(kernel, kernel.warp(0, [0]), hw=hw)
    assert (found.cycles, found.instructions) == (8, 2)


def test_a_move_reaches_the_next_block(hw: Hardware) -> None:
    kernel = Kernel()
    kernel.block(("ex2.approx.ftz.f32", MUFU, [0], [1]), ("mov.b32", MOVE, [1], [2]))
    kernel.block(("fma.rn.f32", FMA, [2], [3]))
    assert run(kernel, kernel.warp(0, [0, 1]), hw=hw).cycles == 17 + 4


def test_a_block_is_scheduled_around_its_latencies(hw: Hardware) -> None:
    """Four chains one after the other in PTX take as long as one: the compiler interleaves."""
    kernel = Kernel()
    kernel.block(
        *[("fma.rn.f32", FMA, [100 * c + i], [100 * c + i + 1]) for c in range(4) for i in range(N)]
    )
    assert run(kernel, kernel.warp(0, [0]), hw=hw).cycles == N * 4 + 3


def test_what_has_events_keeps_its_order(hw: Hardware) -> None:
    kernel = Kernel()
    kernel.block(*[("ex2.approx.ftz.f32", MUFU, [0], [1])])
    first = kernel.event("st.shared.b32", OpClass.SMEM, [1], [])
    second = kernel.event("st.shared.b32", OpClass.SMEM, [0], [])
    kernel.leaders[first] = kernel.leaders[second] = False
    block = Blocks(kernel.code(), hw).block(0, 2)
    assert [op.index for op in block.ops] == [0, 1, 2]


BAR = 1024


def waits(phase: int) -> Row:
    return (Event.MBARRIER_WAIT, BAR, phase, 0, 0)


def test_a_wait_ends_when_its_phase_does(hw: Hardware) -> None:
    """Warp 0 arrives after a chain; warp 1 has waited, and goes on after arrival and wake-up."""
    kernel = Kernel()
    init = kernel.event("mbarrier.init", BARRIER, [], [])
    sync = kernel.event("bar.sync", BARRIER, [], [])
    work = kernel.block(*[("fma.rn.f32", FMA, [i], [i + 1]) for i in range(N)])
    arrive = kernel.event("mbarrier.arrive", BARRIER, [N], [])
    wait = kernel.event("mbarrier.try_wait", BARRIER, [], [N + 1])
    named = (Event.NAMED_BARRIER, 0, 64, 1, 0)
    rows0: list[Row] = [(Event.MBARRIER_INIT, BAR, 1, 0, 0), named, (2, BAR, 1, 0, 0)]
    sender = kernel.warp(0, [init, sync, work, arrive], rows0)
    found = run(kernel, sender, kernel.warp(1, [sync, wait], [named, waits(0)]), hw=hw)
    c = hw.constants
    begin = 1 + c["named_barrier_latency"]
    expected = begin + 4 * N + c["mbarrier_arrive_latency"] + c["mbarrier_wake_latency"]
    assert found.cycles == pytest.approx(expected, abs=2)
    stalled = found.stalls["warp 1"]["wait at kernel.py:1"]
    assert stalled == pytest.approx(expected - begin, abs=c["named_barrier_latency"] + 2)


def test_a_fresh_barrier_lets_its_producer_pass(hw: Hardware) -> None:
    kernel = Kernel()
    init = kernel.event("mbarrier.init", BARRIER, [], [])
    wait = kernel.event("mbarrier.try_wait", BARRIER, [], [0])
    warp = kernel.warp(0, [init, wait], [(Event.MBARRIER_INIT, BAR, 1, 0, 0), waits(-1)])
    assert run(kernel, warp, hw=hw).cycles == 1 + hw.constants["mbarrier_try_latency"]


def test_a_wait_that_nobody_ends_is_an_error(hw: Hardware) -> None:
    kernel = Kernel()
    init = kernel.event("mbarrier.init", BARRIER, [], [])
    wait = kernel.event("mbarrier.try_wait", BARRIER, [], [0])
    warp = kernel.warp(0, [init, wait], [(Event.MBARRIER_INIT, BAR, 1, 0, 0), waits(0)], role="mma")
    with pytest.raises(RooflineError, match="mma wait for a barrier that nobody completes"):
        run(kernel, warp, hw=hw)


def mmas(m: int, n: int, count: int, hw: Hardware, **form) -> float:  # type: ignore[no-untyped-def]
    """Cycles from the issue of ``count`` MMAs to the end of the wait for their commit."""
    kernel = Kernel()
    init = kernel.event("mbarrier.init", BARRIER, [], [])
    mma = kernel.event("tcgen05.mma", TENSOR, [], [])
    commit = kernel.event("tcgen05.commit", TENSOR, [], [])
    wait = kernel.event("mbarrier.try_wait", BARRIER, [], [0])
    rows: list[Row] = [(Event.MBARRIER_INIT, BAR, 1, 0, 0)]
    rows += [mma_row(m, n, **form)] * count + [(Event.COMMIT, BAR, 0, 0, 0), waits(0)]
    return run(kernel, kernel.warp(0, [init] + [mma] * count + [commit, wait], rows), hw=hw).cycles


@pytest.mark.parametrize(
    "row",
    [r for r in measurements() if r.format == "bf16" and r.mma.ctas == 1],
    ids=lambda r: f"{'SS' if r.mma.a_in_smem else 'TS'}-{r.mma.m}x{r.mma.n}",
)
def test_mmas_take_the_measured_cycles(row, hw: Hardware) -> None:  # type: ignore[no-untyped-def]
    """Latency of one, and interval of many, against the B200 table."""
    mma, form = row.mma, {"a_in_tmem": not row.mma.a_in_smem}
    one = mmas(mma.m, mma.n, 1, hw, **form)
    assert one == pytest.approx(row.latency_cycles, abs=4)
    many = [mmas(mma.m, mma.n, count, hw, **form) for count in (8, 16)]
    assert (many[1] - many[0]) / 8 == pytest.approx(row.interval_cycles, abs=0.1)


@pytest.mark.parametrize(
    "row",
    [r for r in measurements() if r.format == "bf16" and r.mma.ctas == 2],
    ids=lambda r: f"{'SS' if r.mma.a_in_smem else 'TS'}-{r.mma.m}x{r.mma.n}",
)
def test_mmas_of_a_pair_take_the_measured_cycles(row, hw: Hardware) -> None:  # type: ignore[no-untyped-def]
    mma, form = row.mma, {"a_in_tmem": not row.mma.a_in_smem, "ctas": 2}
    assert mmas(mma.m, mma.n, 1, hw, **form) == pytest.approx(row.latency_cycles, abs=5)
    many = [mmas(mma.m, mma.n, count, hw, **form) for count in (8, 16)]
    assert (many[1] - many[0]) / 8 == pytest.approx(row.interval_cycles, abs=4)


def test_a_pairs_mma_keeps_two_sms_busy(hw: Hardware) -> None:
    kernel = Kernel()
    mma = kernel.event("tcgen05.mma", TENSOR, [], [])
    idle = kernel.block(("fma.rn.f32", FMA, [0], [1]))
    leader = kernel.warp(0, [mma], [mma_row(256, 128, ctas=2)])
    peer = replace(kernel.warp(0, [idle]), cta=1)
    found = run(kernel, leader, peer, hw=hw)
    assert found.busy["tensor core"] == 64  # of each SM


def test_ss_mmas_and_copies_share_the_smem_port(hw: Hardware) -> None:
    """128x128 from SMEM fills the port, so a copy's bytes are added; from TMEM they fit beside."""
    for in_tmem, extra in ((False, 16384 / 128), (True, 0.0)):
        cycles = []
        for copies in (0, 1):
            kernel = Kernel()
            init = kernel.event("mbarrier.init", BARRIER, [], [])
            copy = kernel.event("cp.async.bulk.tensor", COPY, [], [])
            mma = kernel.event("tcgen05.mma", TENSOR, [], [])
            commit = kernel.event("tcgen05.commit", TENSOR, [], [])
            wait = kernel.event("mbarrier.try_wait", BARRIER, [], [0])
            rows: list[Row] = [(Event.MBARRIER_INIT, BAR, 1, 0, 0)]
            rows.append((Event.MBARRIER_INIT, BAR + 8, 1, 0, 0))
            rows += [(Event.COPY_IN, BAR + 8, 16384, 0, 0)] * copies
            pause = kernel.block(*[("fma.rn.f32", FMA, [i], [i + 1]) for i in range(20)])
            rows += [mma_row(128, 128, a_in_tmem=in_tmem)] * 64
            rows += [(Event.COMMIT, BAR, 0, 0, 0), waits(0)]
            steps = [init, init] + [copy] * copies + [pause] + [mma] * 64 + [commit, wait]
            cycles.append(run(kernel, kernel.warp(0, steps, rows), hw=hw).cycles)
        assert cycles[1] - cycles[0] == pytest.approx(extra, abs=12)


def test_a_copy_takes_latency_and_bandwidth(hw: Hardware) -> None:
    kernel = Kernel()
    init = kernel.event("mbarrier.init", BARRIER, [], [])
    expect = kernel.event("mbarrier.arrive.expect_tx", BARRIER, [], [])
    copy = kernel.event("cp.async.bulk.tensor", COPY, [], [])
    wait = kernel.event("mbarrier.try_wait", BARRIER, [], [0])
    cycles = []
    for tiles in (1, 4):
        rows: list[Row] = [(Event.MBARRIER_INIT, BAR, 1, 0, 0)]
        rows.append((Event.MBARRIER_ARRIVE, BAR, 1, 16384 * tiles, 0))
        rows += [(Event.COPY_IN, BAR, 16384, 0, 0)] * tiles + [waits(0)]
        warp = kernel.warp(0, [init, expect] + [copy] * tiles + [wait], rows)
        cycles.append(run(kernel, warp, hw=hw).cycles)
    c = hw.constants
    alone = c["tma_latency"] + c["mbarrier_wake_latency"] + 16384 / hw.l2
    assert cycles[0] == pytest.approx(alone, abs=4)
    assert cycles[1] - cycles[0] == pytest.approx(3 * 16384 / hw.l2, abs=4)


@pytest.mark.parametrize("unit", UNITS)
def test_a_faster_unit_never_hurts_a_straight_line(unit: str, hw: Hardware) -> None:
    kernel = independent("ex2.approx.ftz.f32", MUFU)
    kernel.block(*[("max.f32", ALU, [i], [i + 1]) for i in range(N)])
    kernel.block(*[("fma.rn.f32", FMA, [i], [i + 1]) for i in range(N)])
    warps = [kernel.warp(i, [0, 1, 2]) for i in range(4)]
    base = run(kernel, *warps, hw=hw).cycles
    faster = hw.faster(unit, 2.0)
    cycles = simulate(warps, Blocks(kernel.code(), faster, hw), faster).cycles
    assert cycles <= base
    if unit in ("MUFU", "latencies"):
        assert cycles < base


def test_an_unknown_unit_is_named(hw: Hardware) -> None:
    with pytest.raises(RooflineError, match="unit 'warp drive': unknown"):
        hw.faster("warp drive", 2.0)


def test_the_timeline_is_in_order(hw: Hardware) -> None:
    kernel = chain("fma.rn.f32", FMA)
    spans = simulate(
        [kernel.warp(0, [0, 0, 0])], Blocks(kernel.code(), hw), hw, timeline=True
    ).spans
    assert len(spans) == 3
    assert all(a.end <= b.start for a, b in pairwise(spans))


def test_constants_are_the_recorded_measurements(root) -> None:  # type: ignore[no-untyped-def]
    """What is said to be measured on an H200 follows from the recorded run, as its source says."""
    recorded = root / "tests/roofline/hardware/latencies_h200.json"
    h200 = json.loads(recorded.read_text())
    value = {name: q.value for name, q in latencies().items()}
    assert value["fma_latency"] == h200["chain_fma"]
    assert value["alu_latency"] == h200["chain_max"] == h200["chain_lop"] / 2
    assert value["imad_latency"] == h200["chain_imad"]
    assert value["mufu_latency"] == h200["chain_ex2"]
    assert value["cvt_latency"] == h200["chain_cvt"]
    assert value["shuffle_latency"] == h200["chain_shfl"]
    assert value["vote_latency"] == h200["chain_vote"] - 4
    answer = value["mbarrier_arrive_latency"] + value["mbarrier_wake_latency"]
    assert answer == pytest.approx(h200["mbarrier_arrive_to_wake"], abs=0.5)
    assert value["named_barrier_latency"] == pytest.approx(h200["named_barrier"], abs=0.5)
    assert value["proxy_fence_latency"] == pytest.approx(h200["proxy_fence"] - 2, abs=0.5)
    per_tile = h200["tma_32k_alone"] - h200["tma_16k_alone"]
    to_wake = h200["tma_16k_alone"] - per_tile
    b200 = find_gpu("b200")["l2_latency"].value + 300 / 2
    farther = b200 - h200["chain_global_l2"]
    latency = to_wake + farther - value["mbarrier_wake_latency"]
    assert latency == 593
    assert value["tma_latency"] == latency + 44  # what its source adds, and says why


def test_the_recorded_run_is_that_of_the_programs(root) -> None:  # type: ignore[no-untyped-def]
    """latencies.cu prints these names; memory.cu and pipes.cu, of their own, the same latencies."""

    folder = root / "tests/roofline/hardware"
    h200 = json.loads((folder / "latencies_h200.json").read_text())
    program = (folder / "latencies.cu").read_text()
    printed = set(re.findall(r'\\"(\w+)\\": %', program)) | set(
        re.findall(r"REPORT\((\w+)\)", program)
    )
    assert set(h200) == printed - {"NAME"} | {"gpu", "sms"}
    hopper = {name: q.value for name, q in latencies(90).items()}
    assert hopper["global_latency"] == h200["chain_global_l2"]
    assert hopper["smem_latency"] == h200["chain_smem"]
    for name in ("tma_latency", "mbarrier_try_latency"):  # the numbers that the sources quote
        said = latencies()[name].source
        keys = ("tma_16k_alone", "chain_global_l2") if name == "tma_latency" else ("mbarrier_try",)
        assert all(f"{h200[key]:g}" in said for key in keys)
    with (folder / "h200_memory.csv").open(newline="") as file:
        memory = {row[0]: row[1] for row in csv.reader(file) if len(row) == 3}
    box = float(memory["TMA latency from L2: 1 CTAs; 1 of 128x64"])  # 16 KiB, in another program
    assert h200["tma_16k_alone"] == pytest.approx(box, rel=0.06)
