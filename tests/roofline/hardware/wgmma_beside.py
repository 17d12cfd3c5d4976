"""wgmma beside other work on one SM: how two warpgroups share the tensor core and everything else.

    python -m tests.roofline.hardware.wgmma_beside --out h200_wgmma_beside.csv

needs an sm_90 GPU, torch and cuda-python. Warpgroups of one CTA, the first multiplies. Rows:

    turns     both multiply: one group of 8 MMAs each, the second warpgroup ``delay`` cycles later.
              Cycles from the first one's begin: when each had issued its MMAs (instruction after
              commit_group), and when its wait_group 0 passed
    stream    the second (and third: ``warps`` on each sub-partition) does something else, while
              the first issues MMAs without end: its warps are held up, since the queue of MMAs is
              full. Cycles of a warp instruction of the other work, alone and beside the MMAs;
              cycles of a MMA, alone and beside the other work
    groups    the same, the first in groups of 4 MMAs, each waited for: nobody is held up

``softmax`` is what attention does with 8 scores of a thread: 8 fma, 8 max, 8 ex2, 8 add, 4 cvt.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.roofline.hardware.wgmma import SMEM, Form, group

GROUPS = {"stream": 8, "groups": 4}  # MMAs of a commit group
WORDS = 4  # begun, issued, done, unused
FORMS = tuple(Form("bf16", n, a, "K") for n in (64, 80, 128, 256) for a in ("smem", "registers"))
DELAYS = (0, 100, 200, 400, 800)
BLOCKS, SOFTMAXES = 8, 4  # of eight independent instructions, or scores, a loop


def _each(text: str) -> list[str]:
    """at: of the shared memory that it reads or writes: another each, or ptxas merges them."""
    return [
        text.format(i=i, at=f"%at+{2048 * i + 16 * block}")
        for block in range(BLOCKS)
        for i in range(8)
    ]


def _softmax() -> list[str]:
    lines = []
    for i in range(8 * SOFTMAXES):
        score = f"%g{i % 8}"
        lines += [
            f"fma.rn.f32 {score}, {score}, %c, %c;",
            f"max.f32 %m, %m, {score};",
            f"ex2.approx.ftz.f32 {score}, {score};",
            f"add.f32 %s, %s, {score};",
        ]
        if i % 2:
            lines.append(f"cvt.rn.bf16x2.f32 %y{i // 2}, %g{i % 8 - 1}, {score};")
    return lines


#: name -> instructions of a loop's body
WORK = {
    "fma": _each("fma.rn.f32 %g{i}, %g{i}, %c, %c;"),
    "max": _each("max.f32 %g{i}, %g{i}, %c;"),
    "ex2": _each("ex2.approx.ftz.f32 %g{i}, %g{i};"),
    "cvt": _each("mov.b32 %t, %h{i}; cvt.rn.bf16x2.f32 %h{i}, %t, %c;"),
    "shfl": _each("shfl.sync.bfly.b32 %h{i}, %h{i}, 1, 31, 0xffffffff;"),
    "ld.shared.v4": _each(
        "ld.shared.v4.b32 {{%h{i}, %x1, %x2, %x3}}, [{at}];"
        " lop3.b32 %x0, %h{i}, %x1, %x0, 0x96; lop3.b32 %x4, %x2, %x3, %x4, 0x96;"
    ),
    "st.shared.v4": _each("st.shared.v4.b32 [{at}], {{%h{i}, %x0, %x0, %x0}};"),
    "softmax": _softmax(),
}


def instructions(work: str) -> int:
    """Warp instructions of a body that are timed: not what keeps loads alive."""
    return 36 * SOFTMAXES if work == "softmax" else 8 * BLOCKS


def _multiply(form: Form, kind: str, label: str) -> str:
    """A loop over groups; notes begin, the end of issue, and the end."""
    size = GROUPS[kind]
    wait = "wgmma.wait_group.sync.aligned 0;" if kind == "groups" else ""
    return f"""
  mov.u64 %t0, %clock64;
  mov.u32 %r3, 0;
{label}:
  .pragma "nounroll";
  wgmma.fence.sync.aligned;
  {group(form, size)}
  {wait}
  add.u32 %r3, %r3, {size};
  setp.lt.u32 %again, %r3, %mmas;
  @%again bra {label};
  mov.u64 %t1, %clock64;
  wgmma.wait_group.sync.aligned 0;
  mov.u64 %t2, %clock64;"""


def _other(form: Form, kind: str, work: str) -> str:
    if work == "wgmma":
        return _multiply(form, kind, "second")
    body = "\n  ".join(WORK[work])
    return f"""
  mov.u64 %t0, %clock64;
  mov.u32 %r3, 0;
second:
  .pragma "nounroll";
  {body}
  add.u32 %at, %at, %zero;
  add.u32 %r3, %r3, 1;
  setp.lt.u32 %again, %r3, %loops;
  @%again bra second;
  mov.u64 %t1, %clock64;
  mov.u64 %t2, %t1;"""


def warps(form: Form) -> tuple[int, ...]:
    """How many others a sub-partition has at most: as the registers of the sums allow."""
    return (1, 2) if form.n <= 128 else (1,)


def name(form: Form, kind: str, work: str) -> str:
    return f"{form.name}_{kind}_{work.replace('.', '_')}"


def entry(form: Form, kind: str, work: str) -> str:
    """times[warpgroup, WORDS]; mmas of the first (and second) warpgroup; loops of the other work;
    cycles that the second waits first; zero."""
    parameters = ("times", "mmas", "loops", "delay", "zero")
    sums = form.n // 2
    listed = "\n  ".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(sums))
    total = "\n  ".join(f"add.f32 %f0, %f0, %f{i};" for i in range(1, sums))
    rest = [f"add.f32 %f0, %f0, %g{i};" for i in range(8)]
    rest += [f"xor.b32 %h0, %h0, %h{i};" for i in range(1, 8)]
    rest += [f"xor.b32 %h0, %h0, %y{i};" for i in range(4 * SOFTMAXES)]
    floats = "\n  ".join(rest)
    return f"""
.visible .entry {name(form, kind, work)}({", ".join(f".param .u64 {x}" for x in parameters)})
.maxntid {128 + 128 * warps(form)[-1]}, 1, 1
{{
  .reg .f32 %f<{sums}>, %g<8>, %c, %t, %m, %s;
  .reg .b32 %a<16>, %h<8>, %x<5>, %y<{4 * SOFTMAXES}>, %r<4>, %mmas, %loops, %zero, %at;
  .reg .b64 %out, %t0, %t1, %t2, %base, %ad, %bd, %wait;
  .reg .pred %yes, %first, %again, %never, %p;
  ld.param.u64 %out, [times];
  ld.param.u32 %mmas, [mmas];
  ld.param.u32 %loops, [loops];
  ld.param.u64 %wait, [delay];
  ld.param.u32 %zero, [zero];
  mov.u32 %r0, %tid.x;
  shr.u32 %r1, %r0, 7;
  shfl.sync.idx.b32 %r1, %r1, 0, 31, 0xffffffff;
  mad.wide.u32 %out, %r1, {8 * WORDS}, %out;
  and.b32 %r2, %r0, 127;
  setp.eq.u32 %first, %r2, 0;
  setp.eq.u32 %yes, 0, 0;
  mov.u32 %r2, smem;
  mad.lo.u32 %at, %r0, 16, %r2;
  add.u32 %at, %at, 65536;
  shr.u32 %r2, %r2, 4;
  cvt.u64.u32 %base, %r2;
  cvt.rn.f32.u32 %c, %r0;
  {" ".join(f"shl.b32 %a{i}, %r0, {i};" for i in range(16))}
  {" ".join(f"mov.b32 %h{i}, %r0; cvt.rn.f32.u32 %g{i}, %r0;" for i in range(8))}
  {" ".join(f"mov.b32 %x{i}, 0;" for i in range(5))}
  {" ".join(f"mov.b32 %y{i}, 0;" for i in range(4 * SOFTMAXES))}
  mov.f32 %m, %c;
  mov.f32 %s, %c;
  {listed}
  setp.eq.u32 %p, %r1, 0;
  bar.sync 0;
  @!%p bra other;{_multiply(form, kind, "firsts")}
  bra done;
other:
  mov.u64 %t0, %clock64;
  add.u64 %wait, %wait, %t0;
hold:
  mov.u64 %t0, %clock64;
  setp.lt.u64 %again, %t0, %wait;
  @%again bra hold;{_other(form, kind, work)}
done:
  @%first st.global.v2.u64 [%out], {{%t0, %t1}};
  @%first st.global.u64 [%out+16], %t2;
  {total}
  {floats}
  add.f32 %f0, %f0, %m;
  add.f32 %f0, %f0, %s;
  xor.b32 %h0, %h0, %x0;
  xor.b32 %h0, %h0, %x4;
  setp.eq.f32 %never, %f0, 0f4B800000;
  @%never st.global.f32 [%out], %f0;
  setp.eq.u32 %never, %h0, 0x12345678;
  @%never st.global.u32 [%out], %h0;
  ret;
}}
"""


def module(forms: tuple[Form, ...] = FORMS) -> str:
    head = (
        ".version 8.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
    )
    runs = [("stream", "wgmma"), *((kind, work) for kind in GROUPS for work in WORK)]
    return head + "".join(entry(form, *run) for form in forms for run in runs)


@dataclass
class Bench:
    """Launches entries; every run is the second of its kind, with instructions cached."""

    gpu: Any
    loaded: Any

    def run(
        self, form: Form, kind: str, work: str, mmas: int, loops: int, delay: int, others: int = 1
    ) -> Any:
        """int64 [1 + others warpgroups, begun/issued/done], from the first one's begin."""
        import torch

        kernel = self.gpu.function(self.loaded, name(form, kind, work), smem=SMEM)
        times = torch.zeros((1 + others, WORDS), dtype=torch.int64, device="cuda")
        for _ in range(2):
            self.gpu.launch(
                kernel, 1, 128 + 128 * others, SMEM, times.data_ptr(), mmas, loops, delay, 0
            )
        torch.cuda.synchronize()
        return (times - times[0, 0])[:, :3].cpu()


def turns(bench: Bench, form: Form) -> list[list[object]]:
    rows = []
    for delay in DELAYS:
        times = bench.run(form, "stream", "wgmma", GROUPS["stream"], 0, delay)
        (_, issued, done), (begun, other_issued, other_done) = times.tolist()
        cells = [issued, done, begun, other_issued, other_done]
        rows.append(["turns", form.n, form.a, "wgmma", 1, delay, *cells])
    return rows


def beside(bench: Bench, form: Form, kind: str, work: str, others: int) -> list[object]:
    """Both sides run long; the one that is timed ends before the other does. Cycles of the other
    work are for one instruction of any of a sub-partition's other warps."""

    def cycles(mmas: int, loops: int, delay: int) -> tuple[float, float]:
        """(of a MMA, of a loop of the other work), each over its own whole time."""
        times = bench.run(form, kind, work, mmas, loops, delay, others)
        span = times[1:, 1].max() - times[1:, 0].min()
        return float(times[0, 2]) / mmas, float(span) / loops / others

    long = 4096
    _, alone = cycles(GROUPS[kind], 64, 3000)  # the MMAs are over before it begins
    interval, _ = cycles(long, 1, 0)
    enough = long * interval
    _, under = cycles(long, max(4, int(enough / alone / others / 5)), 2000)
    slowed, _ = cycles(long, int(3 * enough / alone / others), 0)
    count = instructions(work)
    cells = [f"{value:.3f}" for value in (alone / count, under / count, interval, slowed)]
    return [kind, form.n, form.a, work, others, *cells, "", ""]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="times wgmma beside other work on this GPU")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ptx", action="store_true", help="write the PTX to --out, time nothing")
    parser.add_argument("--cubin", type=Path, help="that PTX, assembled elsewhere")
    options = parser.parse_args(arguments)
    if options.ptx:
        options.out.write_text(module())
        return 0
    from tests.roofline.hardware.launcher import Launcher

    gpu = Launcher()
    code = options.cubin.read_bytes() if options.cubin else module().encode()
    bench = Bench(gpu, gpu.load(code))
    with options.out.open("w", newline="") as file:
        file.write(f"# wgmma m64nNk16 bf16 beside other work on one SM of an {gpu.name}: cycles;\n")
        file.write(
            "# made by python -m tests.roofline.hardware.wgmma_beside, whose text says how.\n"
        )
        file.write(
            "# turns: delay, first issued, done, second begun, issued, done; else: the other\n"
        )
        file.write("# work's instruction alone, beside MMAs, a MMA alone, beside the other work.\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["kind", "n", "a", "other", "warps", *(f"cycles_{i}" for i in range(6))])
        for form in FORMS:
            writer.writerows(turns(bench, form))
            for kind in GROUPS:
                writer.writerows(
                    beside(bench, form, kind, work, others)
                    for work in WORK
                    for others in warps(form)
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
