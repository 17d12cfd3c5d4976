"""What ptxas and the cycle model say of the forward kernel's plans: the table that fa4's plan is
chosen from (roofline/gpu_data/forward_kernel.csv).

    python -m tests.roofline.forward_table > forward_kernel.csv         # 12 minutes of one core
    python -m tests.roofline.forward_table sm_100a bfloat16 128 causal  # the rows that begin so

Needs CuTe DSL and cuobjdump, no GPU: each row compiles a plan, reads its stack from the cubin, runs
a few tiles on the emulator and replays them.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Iterator, Sequence

from kernels.blackwell.forward import compile_forward
from kernels.common.plan import GPU_ARCHS, KernelPlan
from kernels.common.resources import kernel_resources
from roofline.cycles.predict import predict
from roofline.evidence import FIELDS, GPU_OF_ARCH, Row
from roofline.problem import Problem

#: Emulated shares of exp2 by GPU: where the MUFU is twice as fast, few are worth a look.
SHARES = {"b200": (0.0, 0.25, 0.375, 0.5), "b300": (0.0, 0.125)}
#: Slots of the K/V ring that are tried beside as many as fit (B200, dense, bfloat16), and at which
#: share of exp2.
STAGES, STAGES_SHARE = 2, 0.375
PROBLEM = {causal: Problem(1, 8192, 8192, 1, 1, causal) for causal in (False, True)}
HEAD = """\
# The forward kernel of kernels/blackwell by plan: stack bytes of ptxas (spills; 0 is none), and the
# cycles of a steady key block and of the rest of a work item as roofline simulate replays them.
# Made by python -m tests.roofline.forward_table; a test makes rows anew.
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
    for share in SHARES[gpu]:
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


def main(argv: Sequence[str]) -> int:
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
