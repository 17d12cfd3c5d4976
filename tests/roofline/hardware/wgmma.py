"""Cycles of Hopper's wgmma on one SM: the interval between MMAs back to back, and their latency.

    python -m tests.roofline.hardware.wgmma --out roofline/gpu_data/h200_wgmma_intervals.csv

needs an sm_90 GPU, torch and cuda-python; PTX is written here and compiled by the driver. Each row:
m64nNkK of bf16 or e4m3 into float32, A from SMEM or registers, B K-major or MN-major (128-byte
swizzle), by 1, 2 or 3 warpgroups of a CTA that issue at once, each into its own accumulators.

    latency_L          cycles from wgmma.fence to wait_group 0 passing, for L MMAs into the same
                       accumulators in one group; issue_L: to the instruction after commit_group
    interval           cycles of the SM a MMA, between 64 and 192 in a row, all warpgroups counted

With several warpgroups only the interval is given: one that issues holds the others up, so that
they do not begin together.
The MMAs go in turn through the four k-steps of a tile of 64 x 64 (bf16) or 64 x 128 (e4m3).
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTHS = (1, 2, 4, 8)  # straight code
LONG, STEP = (64, 192), 8  # loops over groups of STEP
WORDS = 4  # of 8 bytes a timing: begun, issued, done, unused
ROUNDS, COLD = 20, 4  # the median of the rounds after the cold ones counts
SMEM = 160 * 1024
A_BYTES = 8192  # 64 rows of 128 bytes
TYPES = {"bf16": ("bf16.bf16", 16), "e4m3": ("e4m3.e4m3", 32)}


@dataclass(frozen=True)
class Form:
    """One instruction. k: of one MMA; a: smem or registers; b: the major mode, K or MN."""

    dtype: str
    n: int
    a: str
    b: str

    @property
    def k(self) -> int:
        return TYPES[self.dtype][1]

    @property
    def warpgroups(self) -> tuple[int, ...]:
        """How many are timed: three have 168 registers a thread, too few for the widest sums."""
        return (1, 2) if self.a == "registers" and self.n > 224 else (1, 2, 3)

    @property
    def name(self) -> str:
        return f"{self.dtype}_n{self.n}_{self.a}_{self.b}"


def forms() -> list[Form]:
    """bf16: every N in steps of 8; MN-major and e4m3 (K-major only) where kernels use them."""
    steps = [Form("bf16", n, a, "K") for a in ("smem", "registers") for n in range(8, 257, 8)]
    some = (16, 32, 64, 80, 96, 128, 160, 176, 192, 208, 224, 256)
    steps += [Form("bf16", n, a, "MN") for a in ("smem", "registers") for n in some]
    return steps + [Form("e4m3", n, a, "K") for a in ("smem", "registers") for n in some]


def descriptor(offset: int, leading: int, stride: int) -> int:
    """The constant half of an SMEM matrix descriptor (PTX ISA 9.1, 9.7.15.5.1.2), 128-byte swizzle.

    offset: bytes from the start of shared memory, whose own address is added at run time; leading,
    stride: byte offsets of the canonical layout.
    """
    return (1 << 62) | (stride >> 4) << 32 | (leading >> 4) << 16 | offset >> 4


def _operands(form: Form, step: int) -> tuple[str, int, int]:
    """(A registers or "", A's descriptor, B's) of one k-step of 32 bytes."""
    a = descriptor(32 * step, 16, 1024)
    if form.b == "K":
        b = descriptor(A_BYTES + 32 * step, 16, 1024)
    else:  # atoms of 64 columns x 8 k; k-groups follow one another, then the next 64 columns
        b = descriptor(A_BYTES + 2048 * step, 8192, 1024)
    return "{" + ", ".join(f"%a{4 * step + i}" for i in range(4)) + "}", a, b


def mma(form: Form, step: int) -> str:
    types, k = TYPES[form.dtype]
    registers, a, b = _operands(form, step)
    sums = ", ".join(f"%f{i}" for i in range(form.n // 2))
    lines = [f"add.s64 %bd, %base, {b};"]
    if form.a == "smem":
        lines.append(f"add.s64 %ad, %base, {a};")
    transposes = ""
    if form.dtype == "bf16":
        b_major = int(form.b == "MN")
        transposes = f", 0, {b_major}" if form.a == "smem" else f", {b_major}"
    source = "%ad" if form.a == "smem" else registers
    lines.append(
        f"wgmma.mma_async.sync.aligned.m64n{form.n}k{k}.f32.{types} "
        f"{{{sums}}}, {source}, %bd, %yes, 1, 1{transposes};"
    )
    return "\n  ".join(lines)


def group(form: Form, length: int) -> str:
    mmas = [mma(form, i % 4) for i in range(length)]
    return "\n  ".join([*mmas, "wgmma.commit_group.sync.aligned;"])


def timed(index: int, mmas: str) -> str:
    """Code that stores when the MMAs began, when they were issued, and when they were done."""
    return f"""
  bar.sync 0;
  mov.u64 %t0, %clock64;
  wgmma.fence.sync.aligned;
  {mmas}
  mov.u64 %t1, %clock64;
  wgmma.wait_group.sync.aligned 0;
  mov.u64 %t2, %clock64;
  @%first st.global.v2.u64 [%out+{WORDS * 8 * index}], {{%t0, %t1}};
  @%first st.global.u64 [%out+{WORDS * 8 * index + 16}], %t2;"""


def entry(form: Form) -> str:
    """A kernel: times[round, warpgroup, length, WORDS] of clock64."""
    body = []
    for index, length in enumerate(LENGTHS):
        body.append(timed(index, group(form, length)))
    for index in range(len(LENGTHS), len(LENGTHS + LONG)):  # as many as a parameter says
        loop = f"""mov.u32 %r3, 0;
long{index}:
  .pragma "nounroll";
  {group(form, STEP)}
  add.u32 %r3, %r3, {STEP};
  setp.lt.u32 %again, %r3, {f"%long{index}"};
  @%again bra long{index};"""
        body.append(timed(index, loop))
    longs = range(len(LENGTHS), len(LENGTHS + LONG))
    parameters = ", ".join([".param .u64 times", *(f".param .u64 count{i}" for i in longs)])
    counts = "\n  ".join(f"ld.param.u32 %long{i}, [count{i}];" for i in longs)
    zero = "\n  ".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(form.n // 2))
    total = "\n  ".join(f"add.f32 %f0, %f0, %f{i};" for i in range(1, form.n // 2))
    return f"""
.visible .entry {form.name}({parameters})
.maxntid {128 * form.warpgroups[-1]}, 1, 1
{{
  .reg .f32 %f<{form.n // 2}>;
  .reg .b32 %a<16>;
  .reg .b32 %r<4>;
  .reg .b64 %out, %step, %t0, %t1, %t2, %base, %ad, %bd;
  .reg .pred %yes, %first, %again, %never;
  .reg .b32 {", ".join(f"%long{i}" for i in longs)};
  ld.param.u64 %out, [times];
  {counts}
  mov.u32 %r0, %tid.x;
  shr.u32 %r1, %r0, 7;
  mad.wide.u32 %out, %r1, {8 * WORDS * len(LENGTHS + LONG)}, %out;
  mov.u32 %r1, %ntid.x;
  shr.u32 %r1, %r1, 7;
  mul.wide.u32 %step, %r1, {8 * WORDS * len(LENGTHS + LONG)};
  and.b32 %r1, %r0, 127;
  setp.eq.u32 %first, %r1, 0;
  setp.eq.u32 %yes, 0, 0;
  mov.u32 %r1, smem;
  shr.u32 %r1, %r1, 4;
  cvt.u64.u32 %base, %r1;
  {" ".join(f"shl.b32 %a{i}, %r0, {i};" for i in range(16))}
  {zero}
  mov.u32 %r2, 0;
again:{"".join(body)}
  add.s64 %out, %out, %step;
  add.u32 %r2, %r2, 1;
  setp.lt.u32 %again, %r2, {ROUNDS};
  @%again bra again;
  {total}
  setp.eq.f32 %never, %f0, 0f4B800000;
  @%never st.global.f32 [%out], %f0;
  ret;
}}
"""


def module(every: list[Form]) -> str:
    head = (
        ".version 8.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
    )
    return head + "".join(entry(form) for form in every)


def measure(kernel: Any, launch: Any, warpgroups: int) -> tuple[dict[int, int], dict[int, int]]:
    """Number of MMAs -> cycles from the first warpgroup's begin until all are done, and until all
    are issued; the median round."""
    import torch

    lengths = LENGTHS + LONG
    shape = (ROUNDS, warpgroups, len(lengths), WORDS)
    times = torch.zeros(shape, dtype=torch.int64, device="cuda")
    launch(kernel, 128 * warpgroups, times.data_ptr())
    torch.cuda.synchronize()
    begun = times[..., 0].amin(1)
    done, issued = (
        (times[..., word].amax(1) - begun)[COLD:].median(0).values.tolist() for word in (2, 1)
    )
    return dict(zip(lengths, done, strict=True)), dict(zip(lengths, issued, strict=True))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="times wgmma on this GPU")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ptx", action="store_true", help="write the PTX to --out, time nothing")
    parser.add_argument("--cubin", type=Path, help="that PTX, assembled elsewhere (takes a minute)")
    options = parser.parse_args(arguments)
    every = forms()
    if options.ptx:
        options.out.write_text(module(every))
        return 0
    from tests.roofline.hardware.launcher import Launcher

    gpu = Launcher()
    code = options.cubin.read_bytes() if options.cubin else module(every).encode()
    loaded = gpu.load(code)
    with options.out.open("w", newline="") as file:
        file.write(f"# wgmma, 64 rows, float32 sums, on one SM of an {gpu.name}: cycles; made by\n")
        file.write("# python -m tests.roofline.hardware.wgmma, whose text says what they are.\n")
        writer = csv.writer(file, lineterminator="\n")
        columns = [f"{what}_{length}" for what in ("latency", "issue") for length in LENGTHS]
        writer.writerow(["dtype", "n", "k", "a", "b", "warpgroups", "interval", *columns])
        for form in every:
            kernel = gpu.function(loaded, form.name, smem=SMEM)
            for count in form.warpgroups:
                done, issued = measure(
                    kernel,
                    lambda function, threads, out: gpu.launch(
                        function, 1, threads, SMEM, out, *LONG
                    ),
                    count,
                )
                interval = (done[LONG[1]] - done[LONG[0]]) / (LONG[1] - LONG[0]) / count
                alone = [cycles[length] for cycles in (done, issued) for length in LENGTHS]
                row = [form.dtype, form.n, form.k, form.a, form.b, count, f"{interval:.2f}"]
                writer.writerow(row + (alone if count == 1 else [""] * len(alone)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
