"""Records of an emulated launch: counted by hand on a small kernel; what a file must survive."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from kernels.emulator.coverage import RECORD
from kernels.emulator.gpus import gpu_model
from kernels.emulator.host_runtime import Launch
from kernels.emulator.machine import run_launch
from kernels.emulator.memory import GlobalMemory
from kernels.emulator.native import table as native
from kernels.emulator.readers import class_of, wavefronts
from kernels.emulator.records import MORE, Event, OpClass, Records, RecordsError
from kernels.emulator.schedule import Options

# Warp 0 stores to shared memory and arrives; warp 1 waits, loads, and computes in a loop of three.
PTX = """
.version 8.7
.target sm_100a
.address_size 64
.visible .entry k()
{
.reg .pred %p<4>;
.reg .b32 %r<12>;
.reg .f32 %f<4>;
.reg .b64 %rd<6>;
.shared .align 16 .b8 cells[256];
.shared .align 8 .b8 bar[8];
mov.u32 %r0, %tid.x;
shl.b32 %r1, %r0, 2;
mov.u32 %r2, cells;
setp.ne.s32 %p0, %r0, 0;
@%p0 bra READY;
mov.u32 %r3, bar;
mbarrier.init.shared.b64 [%r3], 32;
READY:
bar.sync 0;
mov.u32 %r3, bar;
setp.gt.s32 %p1, %r0, 31;
@%p1 bra SECOND;
add.s32 %r4, %r2, %r1;
st.shared.b32 [%r4], %r0;
mbarrier.arrive.shared.b64 _, [%r3];
bra.uni END;
SECOND:
mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
@!%p2 bra SECOND;
ld.shared.b32 %r5, [%r2];
cvt.rn.f32.s32 %f0, %r5;
mov.b32 %r6, 0;
LOOP:
fma.rn.f32 %f0, %f0, %f0, %f0;
mov.b64 %rd0, {%f0, %f0};
mul.rn.f32x2 %rd1, %rd0, %rd0;
ex2.approx.ftz.f32 %f1, %f0;
add.s32 %r6, %r6, 1;
setp.lt.s32 %p3, %r6, 3;
@%p3 bra LOOP;
END:
ret;
}
"""


def run(ctas: frozenset[int] | None = None) -> Records:
    launch = Launch("k", (3, 1, 1), (64, 1, 1), (1, 1, 1), 0, 0, ())
    options = Options(record=True, ctas=ctas, checks=False)
    result = run_launch(PTX, launch, gpu_model("b200"), GlobalMemory(), options=options)
    assert result.findings == []
    assert result.records is not None
    return result.records


def test_every_instruction_that_tests_have_run_can_be_recorded() -> None:
    """What a native block does not compute needs a reader, or a kernel that uses it is refused."""
    with RECORD.open(encoding="utf-8", newline="") as file:
        ran = sorted({row["opcode"] for row in csv.DictReader(file)})
    machine = [op for op in ran if op not in ("bra", "bra.uni") and native.find(op) is None]
    assert len(machine) > 200
    assert [op for op in machine if class_of(op) is None] == []


@pytest.fixture(scope="module")
def records() -> Records:
    return run(frozenset({1}))


def test_only_the_asked_ctas_run(records: Records) -> None:
    assert records.ctas == (1,)
    assert [(w.cta, w.warp) for w in records.warps] == [(1, 0), (1, 1)]
    assert run().ctas == (0, 1, 2)


def test_lane_counts_are_those_of_the_path_taken(records: Records) -> None:
    counts = records.lane_counts()
    # Warp 1: three rounds of fma and of a pair; warp 0: none.
    assert counts["FMA"] == 32 * 3 * (1 + 2)
    assert counts["MUFU"] == 32 * 3
    assert counts["SMEM"] == 32 + 32
    assert counts["CVT"] == 32
    first = records.warps[0]
    assert records.code.class_counts[first.segments][:, OpClass.FMA].sum() == 0


def events(records: Records, warp: int) -> list[tuple[int, ...]]:
    rows = records.warps[warp].events
    return [(int(r[0]) & ~MORE, *map(int, r[1:])) for r in rows if r[0] & ~MORE != Event.NONE]


def test_events_name_barriers_phases_and_bytes(records: Records) -> None:
    barrier = events(records, 0)[0][1]
    assert events(records, 0) == [
        (Event.MBARRIER_INIT, barrier, 32, 0, 0),
        (Event.NAMED_BARRIER, 0, 64, 1, 0),
        (Event.SMEM_STORE, 128, 1, 0, 0),
        (Event.MBARRIER_ARRIVE, barrier, 32, 0, 0),
    ]
    assert events(records, 1) == [
        (Event.NAMED_BARRIER, 0, 64, 1, 0),
        (Event.MBARRIER_WAIT, barrier, 0, 0, 0),  # once, however often it was tried
        (Event.SMEM_LOAD, 128, 1, 0, 0),
    ]


def test_registers_link_producers_to_consumers(records: Records) -> None:
    code = records.code
    fma = next(i for i in range(len(code.op)) if code.op[i] == OpClass.FMA)
    ex2 = next(i for i in range(len(code.op)) if code.op[i] == OpClass.MUFU)
    assert set(code.writes(fma)) == set(code.reads(ex2))


@pytest.mark.parametrize(
    ("addresses", "nbytes", "passes"),
    [
        (range(0, 128, 4), 4, 1),
        ([64] * 32, 4, 1),  # one word for all
        (range(0, 256, 8), 4, 2),  # every other bank
        (range(0, 32 * 128, 128), 4, 32),  # one bank
        (range(0, 512, 16), 16, 4),  # 512 bytes
        (range(0, 32 * 128, 128), 16, 32),  # eight lanes at a time, all in four banks
        ([4], 4, 1),
    ],
)
def test_wavefronts(addresses: list[int], nbytes: int, passes: int) -> None:
    assert wavefronts(np.array(list(addresses), np.int64), nbytes) == passes


def test_a_file_keeps_everything(records: Records, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "r.npz"
    records.save(path)
    again = Records.load(path)
    assert again.lane_counts() == records.lane_counts()
    assert (again.kernel, again.gpu, again.grid, again.ctas) == ("k", "b200", (3, 1, 1), (1,))
    for a, b in zip(again.warps, records.warps, strict=True):
        assert (a.cta, a.warp, a.role) == (b.cta, b.warp, b.role)
        assert np.array_equal(a.steps, b.steps) and np.array_equal(a.events, b.events)
    assert again.code.op_names == records.code.op_names
    assert np.array_equal(again.code.uses, records.code.uses)


def test_another_version_is_refused(records: Records, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "r.npz"
    monkeypatch.setattr("kernels.emulator.records.VERSION", 99)
    records.save(path)
    monkeypatch.undo()
    with pytest.raises(RecordsError, match="version: records of version 99"):
        Records.load(path)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 torn"])
def test_other_files_are_refused(content: bytes, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "r.npz"
    path.write_bytes(content)
    with pytest.raises(RecordsError):
        Records.load(path)


def test_a_damaged_file_is_refused(records: Records, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "r.npz"
    records.save(path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["steps"] = arrays["steps"][:-1]
    with open(path, "wb") as out:
        np.savez(out, **arrays)
    with pytest.raises(RecordsError, match="damaged"):
        Records.load(path)


ARRAYS = ("segment_start", "leader", "machine", "target", "op", "width", "op_name", "source",
          "ptx_line", "immediate", "def_start", "defs", "use_start", "uses")  # fmt: skip


def changed(records: Records, path, name: str, change) -> None:  # type: ignore[no-untyped-def]
    """Writes the records with one array of the file changed."""
    records.save(path)
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files}
    arrays[name] = change(arrays[name])
    with open(path, "wb") as out:
        np.savez(out, **arrays)


@pytest.mark.parametrize("name", [*(f"code_{name}" for name in ARRAYS), "steps", "events"])
@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[: len(a) // 2],
        lambda a: a[:0],
        lambda a: a.astype(np.float64),
        lambda a: np.array(["x"] * len(a)),
        lambda a: np.concatenate([a, a[-1:]]),
        lambda a: np.stack([a, a]),
    ],
    ids=["half", "empty", "float", "text", "longer", "deeper"],
)
def test_an_array_of_another_shape_is_named(records: Records, tmp_path, name: str, change) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "r.npz"
    changed(records, path, name, change)
    with pytest.raises(RecordsError, match="damaged") as caught:
        Records.load(path)
    known = {*ARRAYS, "steps", "events", "lengths do not add up"}
    assert any(word in str(caught.value) for word in known)


@pytest.mark.parametrize(
    ("name", "value"),
    [("segment_start", 1 << 20), ("target", 1 << 20), ("target", -2), ("op", 200), ("width", 0)]
    + [("op_name", 1 << 20), ("op_name", -1), ("source", 1 << 20), ("def_start", 1 << 20)]
    + [("defs", 1 << 20), ("defs", -1), ("use_start", -1), ("uses", 1 << 20), ("immediate", -1)]
    + [("steps", -1), ("steps", 1 << 40), ("steps", 63)],
)
def test_an_index_out_of_range_is_named(records: Records, tmp_path, name: str, value: int) -> None:  # type: ignore[no-untyped-def]
    def put(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[len(array) // 2] = value
        return array

    path = tmp_path / "r.npz"
    changed(records, path, name if name == "steps" else f"code_{name}", put)
    with pytest.raises(RecordsError, match=rf"damaged records: {name}\b"):
        Records.load(path)


@pytest.mark.parametrize("value", [None, "x", [0, 1, 1], [1.5, 1, 1], [1, 1], -1])
@pytest.mark.parametrize("name", ["grid", "cluster", "ctas", "smem_bytes", "registers", "warps"])
def test_a_bad_head_is_named(records: Records, tmp_path, name: str, value) -> None:  # type: ignore[no-untyped-def]
    if name == "ctas" and value == [1, 1]:
        value = [1, 1, 2]  # the same twice

    def put(head: np.ndarray) -> np.ndarray:
        fields = json.loads(head.tobytes())
        return np.frombuffer(json.dumps(fields | {name: value}).encode(), np.uint8)

    path = tmp_path / "r.npz"
    changed(records, path, "head", put)
    with pytest.raises(RecordsError, match="damaged records: "):
        Records.load(path)


def test_a_missing_event_is_named(records: Records, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A warp that answers fewer instructions than it ran would end the replay in the middle."""
    first, *others = records.warps
    short = replace(first, events=first.events[:-1])
    path = tmp_path / "r.npz"
    replace(records, warps=(short, *others)).save(path)
    with pytest.raises(RecordsError, match="events of warp 0 of CTA 1: must answer"):
        Records.load(path)
