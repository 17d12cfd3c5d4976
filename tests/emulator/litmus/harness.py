# SPDX-License-Identifier: Apache-2.0
"""Litmus tests: a few instructions that are right, and the same with one thing changed.

A `Litmus` holds both halves as one text: a line that ends in ``//right`` is in the right half only,
one that ends in ``//wrong`` in the wrong half only. The right half must run clean and give the
expected numbers under every schedule, visibility and profile; the wrong half must end in exactly
the given finding, whatever the schedule, because checks depend on synchronisation and not on luck.

The text of a warp can use, all declared here:

    %warp %lane          its numbers; %lead is true in lane 0
    %h0-%h1 %r0-%r15 %rd0-%rd7 %f0-%f3 %p0-%p3
    %out                 address of the thread's own word of ``out``, uint32[threads]
    %in                  address of ``data``, the input
    smem                 shared array, at window address BASE; bytes 0-255 for mbarriers and such
    %tmem                in threads of a `Litmus` with ``tmem``: 32 columns, at the warp's own lanes
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kernels.emulator.machine import LaunchResult
from kernels.emulator.schedule import POLICIES, VISIBILITIES
from tests.emulator.cluster_harness import launch

BASE = 1024  # window address of smem: the system's KiB comes first, and it is aligned to 1024
SMEM_BYTES = 16384
PROFILES = ("silicon", "isa")
WAYS = [
    {"schedule": s, "visibility": v, "seed": seed}
    for s, v in itertools.product(POLICIES, VISIBILITIES)
    for seed in ((0, 1) if s in ("random", "adversarial") else (0,))
]
# 1.0 in f16 for A (4096 bytes) and 2.0 for B (512 bytes): see `mma`.
DATA = np.concatenate([np.full(2048, 1.0, np.float16), np.full(4096, 2.0, np.float16)])


@dataclass(frozen=True)
class Litmus:
    """warps: the text of each warp, by number. setup: by warp 0 before everybody starts (a
    barrier follows). end: by every warp, behind another barrier; None for no such barrier.

    code: the finding of the wrong half (several where it depends on who comes first); profiles:
    those that see it, the others must not.
    expect: warp -> the number that all its lanes store, or a function of the lane.
    numbers: whether the wrong half gives wrong numbers with late visibility and checks off.
    gpu: "b200" or "h100", whose text has no tcgen05 fences.
    """

    name: str
    code: str | tuple[str, ...]
    warps: Mapping[int, str]
    setup: str = ""
    end: str | None = ""
    profiles: tuple[str, ...] = PROFILES
    expect: Mapping[int, int | Callable[[int], int]] = field(default_factory=dict)
    tmem: int = 0
    threads: int = 64
    grid: int = 1
    cluster: int = 1
    numbers: bool = False
    gpu: str = "b200"
    max_instructions: int = 100_000

    def text(self, right: bool) -> str:
        """The PTX of one half."""
        drop, keep = ("//wrong", "//right") if right else ("//right", "//wrong")
        lines = self._whole().splitlines()
        kept = [line.replace(keep, "") for line in lines if not line.rstrip().endswith(drop)]
        return "\n".join(kept)

    def _whole(self) -> str:
        branches, bodies = [], []
        for warp, body in self.warps.items():
            branches.append(f"setp.eq.u32 %p0, %warp, {warp};\n@%p0 bra WARP{warp};")
            bodies.append(f"WARP{warp}:\n{body}\nbra JOIN;")
        join = "" if self.end is None else f"{meet()}\n{self.end}"
        before, after = _tmem_life(self.tmem)
        code = [
            _HEAD, "setp.ne.u32 %p0, %warp, 0;\n@%p0 bra READY;", before, self.setup, "READY:",
            meet(), _TMEM_ADDRESS if self.tmem else "", *branches, "bra JOIN;", *bodies, "JOIN:",
            join, after, "ret;",
        ]  # fmt: skip
        params = ".param .b64 p_out, .param .b64 p_data"
        body = "\n".join(code)
        text = f"{_MODULE}.visible .entry k({params})\n{{\n{body}\n}}\n"
        return text if self.gpu == "b200" else _for_hopper(text)

    def run(self, right: bool, **options: Any) -> tuple[LaunchResult, np.ndarray]:
        """One half's result, and ``out``."""
        out = np.full(self.threads * self.grid, 0xEEEEEEEE, np.uint32)
        ran = launch(
            self.text(right), [out, DATA.copy()], threads=self.threads, grid=self.grid,
            cluster=self.cluster, max_instructions=self.max_instructions, gpu=self.gpu, **options,
        )  # fmt: skip
        return ran, out

    def is_right(self, out: np.ndarray) -> bool:
        return all(
            int(out[32 * warp + lane]) == (value(lane) if callable(value) else value)
            for warp, value in self.expect.items()
            for lane in range(32)
        )


def _for_hopper(text: str) -> str:
    """The same for sm_90a, which has no tcgen05: what `meet` says of it goes."""
    kept = [line for line in text.splitlines() if not line.startswith("tcgen05.fence::")]
    return "\n".join(kept).replace("sm_100a", "sm_90a") + "\n"


_MODULE = ".version 9.1\n.target sm_100a\n.address_size 64\n"
_HEAD = f"""
.shared .align 1024 .b8 smem[{SMEM_BYTES}];
.reg .b32 %thread, %warp, %lane, %tmem, %cta;
.reg .b16 %h<2>; .reg .b32 %r<16>; .reg .b64 %rd<8>;
.reg .f32 %f<4>; .reg .pred %p<4>; .reg .pred %lead;
.reg .b64 %out, %in;
mov.u32 %thread, %tid.x;
mov.u32 %cta, %ctaid.x;
mov.u32 %r1, %ntid.x;
shr.u32 %warp, %thread, 5;
and.b32 %lane, %thread, 31;
setp.eq.u32 %lead, %lane, 0;
ld.param.b64 %out, [p_out];
ld.param.b64 %in, [p_data];
mad.lo.u32 %r0, %cta, %r1, %thread;
mul.wide.u32 %rd0, %r0, 4;
add.s64 %out, %out, %rd0;
"""
# A warp reaches its own 32 lanes of Tensor Memory, those of its number modulo 4.
_TMEM_ADDRESS = """
ld.shared.b32 %tmem, [smem+128];
and.b32 %r0, %warp, 3;
shl.b32 %r0, %r0, 21;
add.u32 %tmem, %tmem, %r0;
"""
_labels = itertools.count()


def _tmem_life(columns: int) -> tuple[str, str]:
    if not columns:
        return "", ""
    alloc = f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+128], {columns};"
    alloc += _TMEM_ADDRESS  # for the setup; every warp reads it again behind the barrier
    free = f"""
{meet()}
setp.ne.u32 %p0, %warp, 0;
@%p0 bra FREED;
ld.shared.b32 %r0, [smem+128];
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r0, {columns};
FREED:
"""
    return alloc, free


def meet() -> str:
    """Everybody waits for everybody, tcgen05 operations included."""
    return "tcgen05.fence::before_thread_sync;\nbar.sync 0;\ntcgen05.fence::after_thread_sync;"


def init(*barriers: int, count: int = 1) -> str:
    """mbarriers at these offsets of smem, initialised by lane 0 and shown to the async proxy."""
    lines = [f"@%lead mbarrier.init.shared::cta.b64 [smem+{at}], {count};" for at in barriers]
    return "\n".join([*lines, "@%lead fence.mbarrier_init.release.cluster;"])


def wait(at: int, parity: int, note: str = "", order: str = "") -> str:
    """Waits for a phase of the mbarrier at smem + ``at``; ``note`` may be ``//right``."""
    label = f"WAIT{next(_labels)}"
    return "\n".join(
        f"{line} {note}"
        for line in (
            f"{label}:",
            f"mbarrier.try_wait.parity{order}.shared::cta.b64 %p1, [smem+{at}], {parity};",
            f"@!%p1 bra {label};",
        )
    )


def arrive(at: int, order: str = "") -> str:
    """One arrival for the warp, behind a bar.warp.sync."""
    return f"bar.warp.sync -1;\n@%lead mbarrier.arrive{order}.shared::cta.b64 _, [smem+{at}];"


def store(value: int | str) -> str:
    """Stores a number or register to the thread's word of ``out``."""
    register = value if isinstance(value, str) else "%r15"
    move = "" if isinstance(value, str) else f"mov.b32 %r15, {value};\n"
    return f"{move}st.global.b32 [%out], {register};"


A_AT, B_AT, D_ONE, D_TWO = 1024, 5120, 0x42000000, 0x42800000  # 32.0 and 64.0
A_BYTES, B_BYTES = 4096, 512
_IDESC = 1 << 4 | (16 >> 3) << 17 | (128 >> 4) << 24  # f16 x f16 -> f32, 128 x 16


def _descriptor(at: int) -> int:
    """K-major, no swizzle: 128 bytes from one core matrix to the next in K, 256 to the next rows
    (PTX ISA 9.1 table 40). Every element is the same, so the layout does not matter here."""
    return (BASE + at) >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32 | 1 << 46


def operands(a: int = A_AT, b: int = B_AT) -> str:
    """A and B by ordinary stores of one warp, 1.0 and 2.0; the proxy fence is not part of it."""
    lines = ["mov.b32 %r10, 0x3c003c00;", "mov.b32 %r11, 0x40004000;", "shl.b32 %r12, %lane, 4;"]
    lines += ["mov.u32 %r13, smem;", "add.u32 %r13, %r13, %r12;"]
    lines += [
        f"st.shared.v4.b32 [%r13+{a + 512 * k}], {{%r10, %r10, %r10, %r10}};" for k in range(8)
    ]
    lines.append(f"st.shared.v4.b32 [%r13+{b}], {{%r11, %r11, %r11, %r11}};")
    return "\n".join(lines)


def mma(column: int = 0, accumulate: bool = False, a: int = A_AT, b: int = B_AT) -> str:
    """D = A B by lane 0: 128 x 16 x 16, D at %tmem's column (of lane 0), every element 32.0."""
    return f"""
ld.shared.b32 %r8, [smem+128];
add.u32 %r8, %r8, {column};
mov.b64 %rd4, {_descriptor(a)};
mov.b64 %rd5, {_descriptor(b)};
mov.b32 %r9, {_IDESC};
setp.{"eq" if accumulate else "ne"}.u32 %p2, %lane, %lane;
@%lead tcgen05.mma.cta_group::1.kind::f16 [%r8], %rd4, %rd5, %r9, %p2;
"""


def commit(at: int) -> str:
    return (
        f"@%lead tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+{at}];"
    )


def tld(register: str = "%r2", column: int = 0) -> str:
    return f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{{register}}}, [%tmem+{column}];"


def tst(register: str = "%r2", column: int = 0) -> str:
    return f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%tmem+{column}], {{{register}}};"


def bulk_load(to: int, nbytes: int, barrier: int, start: int = 0) -> str:
    return f"""add.s64 %rd6, %in, {start};
@%lead cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem+{to}], [%rd6], \
{nbytes}, [smem+{barrier}];"""


def expect(at: int, nbytes: int) -> str:
    return f"@%lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem+{at}], {nbytes};"


BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
WAIT_LD, WAIT_ST = "tcgen05.wait::ld.sync.aligned;", "tcgen05.wait::st.sync.aligned;"
PROXY = "fence.proxy.async.shared::cta;"


def check_right(case: Litmus, ways: list[dict[str, Any]] = WAYS) -> None:
    """No finding, the expected numbers: every schedule, visibility and profile."""
    for profile, way in itertools.product(PROFILES, ways):
        ran, out = case.run(True, profile=profile, **way)
        assert not ran.findings, f"{profile} {way}: {ran.findings[0]}"
        assert case.is_right(out), f"{profile} {way}: {[hex(x) for x in out[:96:16]]}"


def check_wrong(case: Litmus, ways: list[dict[str, Any]] = WAYS) -> None:
    """Exactly the finding, whatever the schedule; none in the profiles that do not hold it."""
    assert case.text(True) != case.text(False)
    codes = (case.code,) if isinstance(case.code, str) else case.code
    for profile, way in itertools.product(PROFILES, ways):
        ran, _ = case.run(False, profile=profile, **way)
        got = [finding.code for finding in ran.findings]
        if profile not in case.profiles:
            assert got == [], f"{profile} {way}: {ran.findings}"
            continue
        assert len(got) == 1 and got[0] in codes, f"{profile} {way}: {ran.findings}"
        assert_names_both(ran, case)
    if case.numbers:
        late = [case.run(False, checks=False, **way) for way in WAYS if way["visibility"] == "late"]
        assert any(r.findings or not case.is_right(out) for r, out in late), "right by luck"


def assert_names_both(ran: LaunchResult, case: Litmus) -> None:
    """A race names both accesses, every finding a warp and its line of the wrong half's PTX."""
    finding = ran.findings[0]
    lines = case.text(False).splitlines()
    assert finding.role.startswith("warp ") and finding.warp is not None
    assert finding.ptx_line is not None
    instruction = finding.details.get("instruction")
    if instruction is not None:
        assert instruction.split()[0] in lines[finding.ptx_line - 1]
    else:
        assert finding.code == "deadlock"
    other = finding.details.get("other")
    if other is not None:
        assert other["instruction"].split()[0] in lines[other["ptx_line"] - 1]


def variants(case: Litmus, **changes: Any) -> Litmus:
    return replace(case, **changes)
