# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the GEMM's source, one at a time: none of them may pass for a good run."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kernels.blackwell import gemm as gemm_module
from kernels.emulator import emulate
from tests.blackwell.mutation import load_mutated

SOURCE = Path(gemm_module.__file__)
WRONG = "wrong result"


@dataclass(frozen=True)
class Fault:
    """name: what was done. old, new: the edit. seen: the code of the finding, or WRONG."""

    name: str
    old: str
    new: str
    seen: str


def fault(name, old, new, seen):
    return pytest.param(Fault(name, old, new, seen), id=name)


def observe(module):
    """Runs 24 K tiles on a ring of 4; the findings' codes, WRONG, or nothing when all is well."""
    m, n, k = 130, 120, 1528
    random = torch.Generator().manual_seed(1)
    a = torch.randint(-8, 9, (m, k), generator=random).bfloat16()
    b = torch.randint(-8, 9, (n, k), generator=random).bfloat16()
    c = torch.full((m, n), torch.nan)
    report = emulate(module.Gemm(), a, b, c, roles=module.ROLES)
    seen = {finding.code for finding in report.findings}
    if not seen and not torch.equal(c, a.float() @ b.float().T):
        seen.add(WRONG)
    return seen, report


def test_nothing_is_seen_without_a_fault():
    seen, report = observe(gemm_module)
    assert seen == set(), str(report)


FAULTS = [
    fault(
        "multiply does not wait for the load",
        "cute.arch.mbarrier_wait(full + stage, parity)",
        "pass",
        "tma_load_not_waited",
    ),
    fault(
        "load does not wait for an empty stage",
        "cute.arch.mbarrier_wait(empty + stage, parity ^ 1)",
        "pass",
        "tma_load_not_waited",
    ),
    fault(
        "load waits for the other parity first",
        "cute.arch.mbarrier_wait(empty + stage, parity ^ 1)",
        "cute.arch.mbarrier_wait(empty + stage, parity)",
        "deadlock",
    ),
    fault(
        "epilogue does not wait for the last MMA",
        "cute.arch.mbarrier_wait(done, 0)",
        "pass",
        "tmem_unwritten_read",
    ),
    fault(
        "multiply has full and empty swapped",
        "tCrA, tCrB, tCtC, full, empty, done)\n        if",
        "tCrA, tCrB, tCtC, empty, full, done)\n        if",
        "deadlock",
    ),
    fault(
        "the stage is never given back",
        "tcgen05.commit(empty + stage)",
        "pass",
        "deadlock",
    ),
    fault(
        "the accumulator is never announced",
        "tcgen05.commit(done)",
        "pass",
        "deadlock",
    ),
    fault(
        "expect_tx asks for 16 bytes too many",
        "mbarrier_arrive_and_expect_tx(full + stage, tx_bytes)",
        "mbarrier_arrive_and_expect_tx(full + stage, tx_bytes + 16)",
        "deadlock",
    ),
    fault(
        "expect_tx asks for the bytes of A alone",
        "mbarrier_arrive_and_expect_tx(full + stage, tx_bytes)",
        "mbarrier_arrive_and_expect_tx(full + stage, tx_bytes // 2)",
        "smem_unwritten_read",
    ),
    fault(
        "a barrier expects two arrivals",
        "cute.arch.mbarrier_init(done, 1)",
        "cute.arch.mbarrier_init(done, 2)",
        "deadlock",
    ),
    fault(
        "a barrier is not initialised",
        "cute.arch.mbarrier_init(done, 1)",
        "pass",
        "mbarrier_not_initialised",
    ),
    fault(
        "the epilogue's barrier counts 160 threads",
        "number_of_threads=128",
        "number_of_threads=160",
        "deadlock",
    ),
    fault(
        "the first MMA adds to what TMEM held",
        "(k_tile > 0) | (k_block > 0)",
        "(k_tile >= 0) | (k_block > 0)",
        "tmem_unwritten_read",
    ),
    fault(
        "every K tile overwrites the accumulator",
        "(k_tile > 0) | (k_block > 0)",
        "k_block > 0",
        WRONG,
    ),
    fault(
        "the epilogue reads 32 columns further on",
        "epilogue(tidx, out_dtype, tCtC,",
        "epilogue(tidx, out_dtype, cute.make_tensor(tmem + 32, tCtC.layout),",
        "tmem_use_before_alloc",
    ),
    fault(
        "multiply writes 32 columns further on",
        "multiply(k_tiles, self.stages, tiled_mma, tCrA, tCrB, tCtC,",
        "multiply(k_tiles, self.stages, tiled_mma, tCrA, tCrB, "
        "cute.make_tensor(tmem + 32, tCtC.layout),",
        "tmem_use_before_alloc",
    ),
    fault(
        "the epilogue reads its neighbour's 32 columns",
        "cute.copy(tmem_load, tLtC[None, chunk], rAcc)",
        "cute.copy(tmem_load, tLtC[None, (chunk + 1) % 4], rAcc)",
        WRONG,
    ),
    fault(
        "a K block is read twice, another never",
        "slot = (None, None, k_block, stage)",
        "slot = (None, None, k_block // 2 * 2, stage)",
        WRONG,
    ),
    fault(
        "the ring's parity never flips",
        "return k_tile % stages, (k_tile // stages) % 2",
        "return k_tile % stages, 0 * k_tile",
        "tma_load_not_waited",
    ),
    fault(
        "A is multiplied with the B of the next stage",
        "tCrA[slot], tCrB[slot]",
        "tCrA[slot], tCrB[None, None, k_block, (stage + 1) % stages]",
        "smem_unwritten_read",
    ),
    fault(
        "the store starts before the other warps have written",
        "cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=128)",
        "pass",
        "smem_race",
    ),
    fault(
        "the store reads what may still be in the generic proxy",
        "cute.arch.fence_view_async_shared()",
        "pass",
        "missing_proxy_fence",
    ),
    fault(
        "tensor memory is not freed",
        "cute.arch.dealloc_tmem(tmem, self.tile_n)",
        "pass",
        "tmem_not_freed",
    ),
    fault(
        "too little tensor memory is allocated",
        "cute.arch.alloc_tmem(self.tile_n, tmem_address)",
        "cute.arch.alloc_tmem(self.tile_n // 2, tmem_address)",
        "tmem_use_before_alloc",
    ),
    fault(
        "the roles start before the barriers are initialised",
        "cute.arch.sync_threads()",
        "pass",
        "smem_race",
    ),
]


@pytest.mark.parametrize("planted", FAULTS)
def test_a_planted_fault_is_seen(planted, tmp_path):
    module = load_mutated(SOURCE, {planted.old: planted.new}, tmp_path)
    seen, report = observe(module)
    assert seen == {planted.seen}, f"{planted.name}: {seen}\n{report}"
