# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the forward kernel's source, one at a time: none may pass for a good run."""

import importlib
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kernels import emulator
from kernels.blackwell.forward import AttentionForward
from kernels.common.plan import KernelPlan
from tests.blackwell.attention import attention, random_problem
from tests.blackwell.mutation import load_mutated

WRONG = "wrong numbers"
PLAN = KernelPlan.forward(head_dim=64, kv_stages=3, causal=True, rescale_threshold=0.0)


@dataclass(frozen=True)
class Fault:
    """module: of kernels.blackwell; old, new: the edit; seen: the finding's code, or WRONG."""

    module: str
    old: str
    new: str
    seen: str


def fault(module, name, old, new, seen):
    return pytest.param(Fault(module, old, new, seen), id=f"{module}: {name}")


def rising_problem():
    """Five key blocks, ragged, whose scores rise to the left: most rows rescale at every block,
    and all blocks still matter to the result."""
    q, k, v = random_problem(PLAN, 1, 230, 600, 1, 1, seed=20)
    k[0, :, 0, 0] = torch.linspace(24, 0, 600).bfloat16()
    q[..., 0] = 1.0
    return q, k, v


def observe():
    """The findings' codes, WRONG if the numbers are, nothing if all is well."""
    q, k, v = rising_problem()
    out = torch.full_like(q, math.nan)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
    kernel = AttentionForward(PLAN)
    report = emulator.emulate(kernel, q, k, v, out, lse, 0.125, roles=PLAN.role_of_warp())
    seen = {finding.code for finding in report.findings}
    exact, exact_lse = attention(q.double(), k.double(), v.double(), 0.125, causal=True)
    close = torch.allclose(out.double(), exact, rtol=0.02, atol=0.02)
    if not seen and not (close and torch.allclose(lse.double(), exact_lse, rtol=0, atol=1e-3)):
        seen.add(WRONG)
    return seen, report


def plant(monkeypatch, tmp_path, fault):
    """Replaces what the faulty copy of a module defines, wherever the kernel uses it."""
    original = importlib.import_module(f"kernels.blackwell.{fault.module}")
    faulty = load_mutated(Path(original.__file__), {fault.old: fault.new}, tmp_path)
    users = [m for name, m in sys.modules.items() if name.startswith("kernels.blackwell.")]
    for name, thing in vars(original).items():
        if getattr(thing, "__module__", None) == original.__name__:
            for user in users:
                if vars(user).get(name) is thing:
                    monkeypatch.setattr(user, name, getattr(faulty, name))
    emulator.clear_cache()


def test_nothing_is_seen_without_a_fault():
    seen, report = observe()
    assert seen == set(), str(report)


FAULTS = [
    # barriers swapped
    fault(
        "mma",
        "s_full and o_full swapped",
        "channels.s_full.commit(stage)",
        "channels.o_full.commit(stage)",
        "deadlock",
    ),
    fault(
        "mma",
        "stages of s_full swapped",
        "channels.s_full.commit(stage)",
        "channels.s_full.commit(1 - stage)",
        "tmem_unwritten_read",
    ),
    fault(
        "mma",
        "PV waits for P but not for O",
        "channels.pv_ready.wait(stage, block & 1)",
        "channels.p_tail.wait(stage, block & 1)",
        "tcgen05_st_not_waited",
    ),
    fault(
        "load",
        "kv_full and q_full swapped",
        "k.copy(block, slot, channels.kv_full.expect(slot))",
        "k.copy(block, slot, channels.q_full.expect(slot % 2))",
        "deadlock",
    ),
    fault(
        "correction",
        "the stats of another warp",
        "barrier = stage * 4 + warp",
        "barrier = stage * 4 + 3 - warp",
        "smem_race",
    ),
    # waits dropped
    fault(
        "mma",
        "no wait for V",
        "channels.kv_full.wait(v_slot, v_parity)",
        "pass",
        "tma_load_not_waited",
    ),
    fault("mma", "no wait for Q", "channels.q_full.wait(stage, 0)", "pass", "tma_load_not_waited"),
    fault(
        "mma",
        "no wait for P and rescaled O",
        "channels.pv_ready.wait(stage, block & 1)",
        "pass",
        "tcgen05_st_not_waited",
    ),
    fault(
        "mma",
        "no wait for the tail of P",
        "channels.p_tail.wait(stage, block & 1)",
        "pass",
        "tcgen05_st_not_waited",
    ),
    fault(
        "load",
        "no wait for an empty slot",
        "channels.kv_empty.wait(slot, parity)\n        k.copy",
        "k.copy",
        "tma_load_not_waited",
    ),
    fault(
        "softmax",
        "no wait for S",
        "channels.s_full.wait(row.stage, j & 1)",
        "pass",
        "tmem_unwritten_read",
    ),
    fault(
        "softmax",
        "no wait until the last factors are read",
        "channels.stats_empty.wait(row.stats_barrier, tile.blocks & 1)",
        "pass",
        "smem_race",
    ),
    fault(
        "correction",
        "no wait for the factors",
        "channels.stats_full.wait(barrier, (j - 1) & 1)",
        "pass",
        "smem_unwritten_read",
    ),
    fault(
        "correction",
        "no wait for the sums",
        "channels.stats_full.wait(stage * 4 + row // 32, (tile.blocks - 1) & 1)",
        "pass",
        "smem_race",
    ),
    fault(
        "correction",
        "no wait for O",
        "channels.o_full.wait(stage, 0)",
        "pass",
        "tmem_access_before_commit",
    ),
    fault(
        "store", "no wait for O", "channels.o_stored.wait(stage, 0)", "pass", "smem_unwritten_read"
    ),
    # tensor memory
    fault(
        "tensors",
        "P read from the first columns of S",
        'weights(f"P{i}")',
        'weights(f"S{i}")',
        WRONG,
    ),
    fault(
        "tensors",
        "P of the other stage",
        'weights(f"P{i}")',
        'weights(f"P{1 - i}")',
        "tcgen05_st_not_waited",
    ),
    fault(
        "mma",
        "the first PV adds to what TMEM held",
        "(block > 0) | (step > 0)",
        "(block >= 0) | (step > 0)",
        "tmem_unwritten_read",
    ),
    # arithmetic
    fault("correction", "O is never rescaled", "rescale != 1.0", "rescale > 1.0", WRONG),
    fault("softmax", "a key too many is seen", "columns = limit -", "columns = 1 + limit -", WRONG),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_seen(monkeypatch, tmp_path, fault):
    plant(monkeypatch, tmp_path, fault)
    try:
        seen, report = observe()
    finally:
        emulator.clear_cache()
    assert seen == {fault.seen}, str(report)
