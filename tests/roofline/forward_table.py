"""What ptxas and the cycle model say of the forward kernel's plans: the table that fa4's plan is
chosen from (roofline/gpu_data/forward_kernel.csv).

    python -m tests.roofline.forward_table > forward_kernel.csv         # 12 minutes of one core
    python -m tests.roofline.forward_table sm_100a bfloat16 128 causal  # the rows that begin so
    python -m tests.roofline.forward_table --hopper > hopper_kernel.csv # flash-attn-4's, on Hopper

Needs CuTe DSL and cuobjdump, no GPU: each row compiles a plan, reads its stack from the cubin, runs
a few tiles on the emulator and replays them.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields
from importlib.metadata import version

from kernels.blackwell.forward import compile_forward
from kernels.common.plan import GPU_ARCHS, KernelPlan
from kernels.common.resources import kernel_resources
from roofline.cycles.predict import predict
from roofline.evidence import FIELDS, GPU_OF_ARCH, HopperRow, Row
from roofline.problem import Problem

#: Emulated shares of exp2: where the MUFU is twice as fast, or the polynomial longer, few are worth
#: a look. Without a row a plan in float16 takes those of bfloat16 that emulate nothing.
SHARES = {
    ("b200", "bfloat16"): (0.0, 0.25, 0.375, 0.5),
    ("b200", "float16"): (0.0, 0.25, 0.375),
    ("b300", "bfloat16"): (0.0, 0.125),
    ("b300", "float16"): (),
}
#: Slots of the K/V ring that are tried beside as many as fit (B200, dense, bfloat16), and at which
#: share of exp2.
STAGES, STAGES_SHARE = 2, 0.375
PROBLEM = {causal: Problem(1, 8192, 8192, 1, 1, causal) for causal in (False, True)}
HEAD = """\
# The forward kernel of kernels/blackwell by plan: stack bytes of ptxas (spills; 0 is none), and the
# cycles of a steady key block and of the rest of a work item as roofline simulate replays them.
# Made by python -m tests.roofline.forward_table; a test makes rows anew.
"""
HOPPER_HEAD = """\
# flash-attn-4's forward kernel on Hopper: its tile, and the cycles of a steady key block and of the
# rest of a work item as roofline simulate replays them on an H200, bfloat16.
# Made by python -m tests.roofline.forward_table --hopper.
"""


def plans() -> Iterator[KernelPlan]:
    """The plans of the table, in its order."""
    for arch, gpu in GPU_OF_ARCH.items():
        assert GPU_ARCHS[gpu] == arch
        for dtype in ("bfloat16", "float16"):
            for head_dim in (64, 128):
                for causal in (False, True):
                    yield from _plans(gpu, dtype, head_dim, causal)


def _plans(gpu: str, dtype: str, head_dim: int, causal: bool) -> Iterator[KernelPlan]:
    asked = {"gpu": gpu, "dtype": dtype, "head_dim": head_dim, "causal": causal}
    for share in SHARES[gpu, dtype]:
        yield KernelPlan.forward(**asked, exp2_emulated_share=share)
    if (gpu, dtype, causal) == ("b200", "bfloat16", False):
        yield KernelPlan.forward(**asked, exp2_emulated_share=STAGES_SHARE, kv_stages=STAGES)


def row(plan: KernelPlan) -> Row:
    """One plan, compiled, emulated and replayed."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --keep-cubin --dump-dir={folder}"
        compiled = compile_forward.__wrapped__(plan, options)
        (used,) = kernel_resources(compiled.__cubin__)
    options = {"exp2_emulated_share": plan.exp2_emulated_share, "kv_stages": plan.kv_stages}
    found = predict(
        plan.gpu,
        PROBLEM[plan.causal],
        plan.head_dim,
        dtype=plan.dtype,
        gains=False,
        options=options,
    )
    return Row(
        arch=plan.arch,
        dtype=plan.dtype,
        head_dim=plan.head_dim,
        mask="causal" if plan.causal else "dense",
        kv_stages=plan.kv_stages,
        exp2_share=plan.exp2_emulated_share,
        softmax_registers=plan.softmax_registers,
        stack_bytes=used.stack_bytes,
        key_block_cycles=round(found.cost.slope),
        item_cycles=round(found.cost.overhead),
    )


def hopper_row(head_dim: int, causal: bool) -> HopperRow:
    """flash-attn-4's kernel for Hopper, emulated and replayed; needs the peers."""
    problem = Problem(1, 8192, 8192, 1, 1, causal)
    kernel = "tests.roofline.peer_workloads:flash_attention_4"
    found = predict("h200", problem, head_dim, kernel=kernel, gains=False)
    return HopperRow(
        kernel=f"flash-attn-4-{version('flash-attn-4')}",
        head_dim=head_dim,
        mask="causal" if causal else "dense",
        tile_m=found.work.tile_rows,
        tile_n=found.work.tile_keys,
        key_block_cycles=round(found.cost.slope),
        item_cycles=round(found.cost.overhead),
    )


def hopper_main() -> int:
    names = [field.name for field in fields(HopperRow)]
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    sys.stdout.write(HOPPER_HEAD)
    writer.writeheader()
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            writer.writerow(hopper_row(head_dim, causal).to_dict())
            sys.stdout.flush()
    return 0


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] == "--hopper":
        return hopper_main()
    writer = csv.DictWriter(sys.stdout, FIELDS, lineterminator="\n")
    sys.stdout.write(HEAD)
    writer.writeheader()
    for plan in plans():
        mask = "causal" if plan.causal else "dense"
        begins = [plan.arch, plan.dtype, str(plan.head_dim), mask][: len(argv)]
        if list(argv) == begins:
            writer.writerow(row(plan).to_dict())
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
