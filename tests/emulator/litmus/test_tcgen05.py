# SPDX-License-Identifier: Apache-2.0
"""tcgen05: completion, pipelines and hand-overs (PTX ISA 9.1 section 9.7.16.6).

The cases are those of JAX Pallas's Mosaic-GPU interpreter tests, restated as PTX, and a few more.
"""

import pytest

from .harness import (
    A_AT,
    A_BYTES,
    AFTER,
    B_AT,
    BEFORE,
    D_ONE,
    D_TWO,
    PROXY,
    WAIT_LD,
    WAIT_ST,
    Litmus,
    arrive,
    bulk_load,
    check_right,
    check_wrong,
    commit,
    expect,
    init,
    mma,
    operands,
    store,
    tld,
    tst,
    wait,
)

SEVEN = "mov.b32 %r2, 7;"
NINE = "mov.b32 %r3, 9;"
# Of two accesses that nothing orders, the one that comes later in a schedule is reported.
COMMIT_OR_LOAD = ("tmem_access_before_commit", "tcgen05_ld_not_waited")
STORE_OR_LOAD = ("tcgen05_st_not_waited", "tcgen05_ld_not_waited")
OPERANDS = f"{operands()}\n{PROXY}\nbar.warp.sync -1;"
OTHER = 4  # a warp with the same Tensor Memory lanes as warp 0
LD = f"{tld()}\n{WAIT_LD}\n{store('%r2')}"
PREFILL = f"mov.b32 %r2, 5;\n{tst()}\n{tst(column=1)}\n{WAIT_ST}"

ONE_WARP = [
    Litmus(
        "a load of what was stored needs wait::st", "tcgen05_st_not_waited",
        {0: f"{SEVEN}\n{tst()}\n{WAIT_ST} //right\n{LD}"}, tmem=32, expect={0: 7}, numbers=True,
    ),
    Litmus(
        "registers of a load need wait::ld", "tcgen05_ld_not_waited",
        {0: f"{SEVEN}\n{tst()}\n{WAIT_ST}\n{tld('%r4')}\n{WAIT_LD} //right\n{store('%r4')}"},
        tmem=32, expect={0: 7}, profiles=("isa",),
    ),
    Litmus(
        "a store over what is being loaded needs wait::ld", "tcgen05_ld_not_waited",
        {0: f"{SEVEN}\n{NINE}\n{tst()}\n{WAIT_ST}\n{tld('%r4')}\n{WAIT_LD} //right\n{tst('%r3')}\n"
            f"{WAIT_LD}\n{WAIT_ST}\n{store('%r4')}"},
        tmem=32, expect={0: 7},
    ),
    Litmus(
        "two stores to one place need wait::st", "tcgen05_st_not_waited",
        {0: f"{SEVEN}\n{NINE}\n{tst()}\n{WAIT_ST} //right\n{tst('%r3')}\n{WAIT_ST}\n{LD}"},
        tmem=32, expect={0: 9}, profiles=("isa",),
    ),
    Litmus(
        "a store must be over before its columns are freed", "tcgen05_st_not_waited",
        {0: f"{SEVEN}\n{tst()}\n{WAIT_ST} //right\n{store(1)}"}, tmem=32, expect={0: 1},
    ),
    Litmus(
        "an MMA that adds to what was stored needs wait::st", "tcgen05_st_not_waited",
        {w: f"mov.b32 %r2, 0x42000000;\n{tst()}\n{tst(column=1)}\n"
            + "\n".join(tst(column=c) for c in range(2, 16))
            + (f"\n{WAIT_ST} //right\n" if w == 3 else f"\n{WAIT_ST}\n") + f"{BEFORE}\n{arrive(0)}"
         for w in range(4)}
        | {4: f"{OPERANDS}\n{wait(0, 0)}\n{AFTER}\n{mma(accumulate=True)}\n{commit(8)}\n"
              f"{wait(8, 0)}\n{AFTER}\n{LD}"},
        setup=f"{init(0, count=4)}\n{init(8)}", tmem=32, threads=160, expect={4: D_TWO},
    ),
    Litmus(
        "the accumulator needs its commit waited for", "tmem_access_before_commit",
        {0: f"{OPERANDS}\n{mma()}\n{commit(0)}\n{wait(0, 0, '//right')}\n{AFTER}\n{LD}\n"
            f"{wait(0, 0)}"},
        setup=init(0), tmem=32, expect={0: D_ONE}, numbers=True,
    ),
    Litmus(
        "a wait for a commit needs the commit", "deadlock",
        {0: f"{OPERANDS}\n{mma()}\n{commit(0)} //right\n{wait(0, 0)}\n{AFTER}\n{LD}"},
        setup=init(0), tmem=32, expect={0: D_ONE},
    ),
    Litmus(
        "a load behind a commit needs fence::after_thread_sync", "missing_tcgen05_fence",
        {0: f"{OPERANDS}\n{mma()}\n{commit(0)}\n{wait(0, 0)}\n{AFTER} //right\n{LD}"},
        setup=init(0), tmem=32, expect={0: D_ONE}, profiles=("isa",),
    ),
    Litmus(
        "a commit covers earlier MMAs only", "tmem_access_before_commit",
        {0: f"{OPERANDS}\n{mma(16)}\n{commit(0)} //wrong\n{mma()}\n{commit(0)} //right\n"
            f"{wait(0, 0)}\n{AFTER}\n{LD}\n{commit(8)}\n{wait(8, 0)}"},
        setup=init(0, 8), tmem=32, expect={0: D_ONE}, numbers=True,
    ),
    Litmus(
        "MMAs on one accumulator are a pipeline, a store in between is not",
        "tmem_access_before_commit",
        {0: f"{OPERANDS}\n{mma()}\n{mma(accumulate=True)}\n{commit(0)}\n{tst('%r3')} //wrong\n"
            f"{WAIT_ST}\n{wait(0, 0)}\n{AFTER}\n{LD}"},
        setup=f"{NINE}\n{init(0)}", tmem=32, expect={0: D_TWO},
    ),
    Litmus(
        "a later phase is another commit", "tmem_access_before_commit",
        {0: f"{OPERANDS}\n{mma()}\n{commit(0)}\n{wait(0, 0)}\n{AFTER}\n{mma(accumulate=True)}\n"
            f"{commit(0)}\n{wait(0, 1, '//right')}\n{AFTER}\n{LD}\n{wait(0, 1)}"},
        setup=init(0), tmem=32, expect={0: D_TWO}, numbers=True,
    ),
    Litmus(
        "of two barriers either will do, but one it must be", "tmem_access_before_commit",
        {0: f"{OPERANDS}\n{mma()}\n{commit(0)}\n{commit(8)}\n{arrive(16)}\n"
            f"{wait(8, 0, '//right')}\n{wait(16, 0, '//wrong')}\n{AFTER}\n{LD}\n{wait(0, 0)}"},
        setup=init(0, 8, 16), tmem=32, expect={0: D_ONE},
    ),
]  # fmt: skip

OPERAND = [
    Litmus(
        "operands written by a warp need a proxy fence", "missing_proxy_fence",
        {0: f"{operands()}\n{PROXY} //right\nbar.warp.sync -1;\n{mma()}\n{commit(0)}\n{wait(0, 0)}"
            f"\n{AFTER}\n{LD}"},
        setup=init(0), tmem=32, expect={0: D_ONE},
    ),
    Litmus(
        "operands written by another warp need a barrier", "smem_race",
        {0: f"{wait(8, 0, '//right')}\n{PROXY}\n{mma()}\n{commit(0)}\n{wait(0, 0)}\n{AFTER}\n{LD}",
         1: f"{operands()}\n{PROXY}\n{arrive(8)}"},
        setup=f"{init(0, 8)}\n{OPERANDS}", tmem=32, expect={0: D_ONE},
    ),
    Litmus(
        "the fence belongs before the arrival, if the reader has none", "missing_proxy_fence",
        {0: f"{wait(8, 0)}\n{mma()}\n{commit(0)}\n{wait(0, 0)}\n{AFTER}\n{LD}",
         1: f"{operands()}\n{PROXY} //right\n{arrive(8)}\n{PROXY} //wrong"},
        setup=init(0, 8), tmem=32, expect={0: D_ONE},
    ),
    Litmus(
        "an operand must not be overwritten before the commit", "mma_operand_overwritten",
        {0: f"{OPERANDS}\n{mma()}\n{commit(0)}\n{wait(0, 0, '//right')}\n"
            f"mov.b32 %r2, 0;\nst.shared.b32 [smem+{A_AT}], %r2;\n{wait(0, 0)}\n{AFTER}\n{LD}"},
        setup=init(0), tmem=32, expect={0: D_ONE}, numbers=True,
    ),
    Litmus(
        "TMA's arrival says nothing about the MMA", "mma_operand_overwritten",
        {0: f"{OPERANDS}\n{mma()}\n{commit(0)}\n{wait(0, 0, '//right')}\n{expect(8, 64)}\n"
            f"{bulk_load(A_AT, 64, 8, start=A_BYTES)}\n{wait(8, 0)}\n{wait(0, 0)}\n{AFTER}\n{LD}"},
        setup=init(0, 8), tmem=32, expect={0: D_ONE}, numbers=True,
    ),
    Litmus(
        "an operand that TMA brings must be waited for", "tma_load_not_waited",
        {0: f"{OPERANDS}\n{expect(8, 512)}\n{bulk_load(B_AT, 512, 8)}\n{wait(8, 0, '//right')}\n"
            f"{mma()}\n{commit(0)}\n{wait(0, 0)}\n{AFTER}\n{LD}\n{wait(8, 0)}"},
        setup=init(0, 8), tmem=32, expect={0: 0x41800000}, numbers=True,
    ),
]  # fmt: skip

HAND_OVER = [
    Litmus(
        "the accumulator of another warp needs the wait", COMMIT_OR_LOAD,
        {0: f"{OPERANDS}\n{mma()}\n{commit(0)}",
         OTHER: f"{wait(0, 0, '//right')}\n{AFTER}\n{LD}\n{wait(0, 0)}"},
        setup=f"{PREFILL}\n{init(0)}", tmem=32, threads=160, expect={OTHER: D_ONE},
        end=f"{wait(0, 0)}",
    ),
    Litmus(
        "one of two waiters does not wait", COMMIT_OR_LOAD,
        {1: f"{OPERANDS}\n{mma()}\n{commit(0)}", 0: f"{wait(0, 0)}\n{AFTER}\n{LD}",
         OTHER: f"{wait(0, 0, '//right')}\n{AFTER}\n{LD}"},
        setup=f"{PREFILL}\n{init(0)}", tmem=32, threads=160, expect={0: D_ONE, OTHER: D_ONE},
        end=f"{wait(0, 0)}",
    ),
    Litmus(
        "a commit does not cover another thread's MMA", "tmem_access_before_commit",
        {0: f"{OPERANDS}\n{mma()}\n{commit(0)} //right\n{commit(8)}\n{BEFORE}\n{arrive(16)}",
         OTHER: f"{wait(16, 0)}\n{AFTER}\n{commit(0)} //wrong\n{wait(0, 0)}\n{AFTER}\n{LD}\n"
                f"{wait(8, 0)}"},
        setup=f"{PREFILL}\n{init(0, 8, 16)}", tmem=32, threads=160, expect={OTHER: D_ONE},
    ),
    Litmus(
        "a store handed over needs wait::st", "tcgen05_st_not_waited",
        {0: f"{SEVEN}\n{tst()}\n{WAIT_ST} //right\n{BEFORE}\n{arrive(0)}",
         OTHER: f"{wait(0, 0)}\n{AFTER}\n{LD}"},
        setup=f"{PREFILL}\n{init(0)}", tmem=32, threads=160, expect={OTHER: 7}, numbers=True,
    ),
    Litmus(
        "a store handed over needs fence::before_thread_sync", "missing_tcgen05_fence",
        {0: f"{SEVEN}\n{tst()}\n{WAIT_ST}\n{BEFORE} //right\n{arrive(0)}",
         OTHER: f"{wait(0, 0)}\n{AFTER}\n{LD}"},
        setup=f"{PREFILL}\n{init(0)}", tmem=32, threads=160, expect={OTHER: 7}, profiles=("isa",),
    ),
    Litmus(
        "a store handed over needs fence::after_thread_sync", "missing_tcgen05_fence",
        {0: f"{SEVEN}\n{tst()}\n{WAIT_ST}\n{BEFORE}\n{arrive(0)}",
         OTHER: f"{wait(0, 0)}\n{AFTER} //right\n{LD}"},
        setup=f"{PREFILL}\n{init(0)}", tmem=32, threads=160, expect={OTHER: 7}, profiles=("isa",),
    ),
    Litmus(
        "a store handed over needs the hand-over", STORE_OR_LOAD,
        {0: f"{SEVEN}\n{tst()}\n{WAIT_ST}\n{BEFORE}\n{arrive(0)}",
         OTHER: f"{wait(0, 0, '//right')}\n{AFTER}\n{LD}"},
        setup=f"{PREFILL}\n{init(0)}", tmem=32, threads=160, expect={OTHER: 7},
    ),
    Litmus(
        "relaxed barriers do, where tcgen05 fences stand on both sides", "missing_tcgen05_fence",
        {0: f"{SEVEN}\n{tst()}\n{WAIT_ST}\n{BEFORE} //right\n{arrive(0, '.relaxed.cluster')}",
         OTHER: f"{wait(0, 0, order='.relaxed.cluster')}\n{AFTER}\n{LD}"},
        setup=f"{PREFILL}\n{init(0)}", tmem=32, threads=160, expect={OTHER: 7}, profiles=("isa",),
    ),
    Litmus(
        "a load must be over before another warp stores", "tcgen05_ld_not_waited",
        {0: f"{tld('%r4')}\n{WAIT_LD} //right\n{BEFORE}\n{arrive(0)}\n{WAIT_LD}\n{store('%r4')}",
         OTHER: f"{wait(0, 0)}\n{AFTER}\n{SEVEN}\n{tst()}\n{WAIT_ST}"},
        setup=f"{PREFILL}\n{init(0)}", tmem=32, threads=160, expect={0: 5},
    ),
    Litmus(
        "an MMA over what another warp loads needs wait::ld", "tcgen05_ld_not_waited",
        {0: f"{tld('%r4')}\n{WAIT_LD} //right\n{BEFORE}\n{arrive(0)}\n{WAIT_LD}\n{store('%r4')}",
         1: f"{OPERANDS}\n{wait(0, 0)}\n{AFTER}\n{mma()}\n{commit(8)}\n{wait(8, 0)}"},
        setup=f"{PREFILL}\n{init(0, 8)}", tmem=32, threads=64, expect={0: 5},
    ),
]  # fmt: skip

CASES = ONE_WARP + OPERAND + HAND_OVER


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right(case):
    check_right(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong(case):
    check_wrong(case)
