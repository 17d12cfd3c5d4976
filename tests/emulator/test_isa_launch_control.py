"""Cluster launch control: clusters take over the work of clusters that have not started."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.cluster_harness import clean, code_of, every_way, launch, module

MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
# The first CTA of a cluster asks; all CTAs get the response and do the block's work: they add
# 1 + their thread number to the block's cells.
BODY = f"""
.reg .b32 %t, %rank, %base, %bar, %x, %y, %z, %phase, %v; .reg .b64 %o, %at, %w, %w1, %lo, %hi;
.reg .b128 %q; .reg .pred %p, %first, %done, %more, %ask;
mov.u32 %t, %tid.x; mov.u32 %base, smem; mov.u32 %rank, %cluster_ctarank; add.u32 %bar, %base, 16;
setp.eq.u32 %first, %t, 0; setp.eq.u32 %ask, %rank, 0; and.pred %ask, %ask, %first;
ld.param.b64 %o, [out];
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
@%first fence.mbarrier_init.release.cluster;
mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mov.u32 %z, %ctaid.z; mov.b32 %phase, 0;
{MEET}
WORK:
@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 16;
{MEET}
@%ask clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes<all>.b128
  [%base], [%bar];
mad.lo.u32 %v, %z, 3, %y; mad.lo.u32 %v, %v, 4, %x; mad.lo.u32 %v, %v, 32, %t;
mul.wide.u32 %w, %v, 4; add.u64 %at, %o, %w; add.u32 %v, %t, 1;
red.relaxed.gpu.global.add.u32 [%at], %v;
SPIN: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], %phase;
@!%done bra SPIN;
xor.b32 %phase, %phase, 1;
<load>
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %more, %q;
@!%more bra END;
<ids>
{MEET}
fence.proxy.async.shared::cta;
add.u32 %x, %x, %rank;
bra WORK;
END:
{MEET}
<end>
"""
ALL = ".multicast::cluster::all"
LOAD = "ld.shared.b128 %q, [%base];"
PAIR = "ld.shared.v2.b64 {%lo, %hi}, [%base]; mov.b128 %q, {%lo, %hi};"
VECTOR = "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%x, %y, %z, _}, %q;"
EACH = " ".join(
    f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{a}.b32.b128 %{a}, %q;" for a in "xyz"
)


def run(
    cluster: int, load: str = LOAD, ids: str = VECTOR, end: str = "", all_: str = ALL, **options
):  # type: ignore[no-untyped-def]
    out = np.zeros((2, 3, 4, 32), np.uint32)
    body = BODY
    for name, part in {"load": load, "ids": ids, "end": end, "all": all_}.items():
        body = body.replace(f"<{name}>", part)
    ran = launch(
        module("out", body, shared=1024), [out], grid=(4, 3, 2), cluster=cluster, **options
    )
    return ran, out


@pytest.mark.parametrize("cluster", [1, 2, 4])
@every_way
def test_every_block_is_done_once(way: dict, cluster: int) -> None:
    ran, out = run(cluster, **way)
    clean(ran)
    assert (out == np.arange(1, 33)).all()
    assert ran.ctas == 24


def test_both_ways_to_read_the_response() -> None:
    for load in (LOAD, PAIR):
        for ids in (VECTOR, EACH):
            ran, out = run(2, load, ids)
            clean(ran)
            assert (out == np.arange(1, 33)).all()


def test_without_multicast_only_the_asker_hears() -> None:
    assert code_of(run(1, all_="")[0]) == "ok"
    assert code_of(run(2, all_="")[0]) == "deadlock"


def test_nobody_asks_again_after_a_refusal() -> None:
    again = """
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%base], [%bar];
"""
    assert code_of(run(1, end=again)[0]) == "launch_control_after_refusal"


def test_a_refusal_names_no_block() -> None:
    assert code_of(run(1, end=VECTOR, profile="isa")[0]) == "launch_control_refused"
    clean(run(1, end=VECTOR)[0])  # silicon: it may be asked for, and is garbage


def test_the_response_must_be_waited_for() -> None:
    wait = (
        "SPIN: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], %phase;\n@!%done bra SPIN;\n"
    )
    assert wait in BODY
    text = BODY.replace(wait, "")
    for name, part in {"load": LOAD, "ids": VECTOR, "end": "", "all": ""}.items():
        text = text.replace(f"<{name}>", part)
    out = np.zeros((2, 3, 4, 32), np.uint32)
    ran = launch(module("out", text, shared=1024), [out], grid=(4, 3, 2))
    assert code_of(ran) == "tma_load_not_waited"
    ran = launch(
        module("out", text, shared=1024), [out], grid=(4, 3, 2), visibility="late", checks=False
    )
    assert code_of(ran) == "smem_unwritten_read"
