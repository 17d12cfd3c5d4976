"""Distributed shared memory: addresses, remote accesses, arrivals and asynchronous stores; each
synchronisation once as it should be and once missing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.cluster_harness import clean, code_of, every_way, launch, module

CTAS = 4
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
HEAD = """
.reg .b32 %t, %rank, %next, %base, %far, %at, %bar, %x<4>; .reg .b64 %o, %w, %g;
.reg .pred %p, %first, %done;
mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; mov.u32 %base, smem;
ld.param.b64 %o, [out]; mad.lo.u32 %at, %rank, 32, %t; mul.wide.u32 %w, %at, 4;
add.u64 %o, %o, %w;
add.u32 %next, %rank, 1; and.b32 %next, %next, 3; setp.eq.u32 %first, %t, 0;
shl.b32 %at, %t, 2; add.u32 %at, %at, %base; add.u32 %bar, %base, 512;
mad.lo.u32 %x0, %rank, 1000, %t;
"""


def run(body: str, *, gpu: str = "b200", **options):  # type: ignore[no-untyped-def]
    out = np.zeros((CTAS, 32), np.uint32)
    ran = launch(
        module("out", HEAD + body, shared=1024), [out], grid=CTAS, cluster=CTAS, gpu=gpu, **options
    )
    return ran, out


def ring(step: int) -> np.ndarray:
    return np.array([[1000 * ((r + step) % CTAS) + t for t in range(32)] for r in range(CTAS)])


READ = f"""
st.shared.b32 [%at], %x0;
{MEET}
mapa.shared::cluster.u32 %far, %at, %next;
ld.shared::cluster.b32 %x1, [%far];
st.global.b32 [%o], %x1;
{MEET}
"""


@every_way
def test_a_neighbour_is_read(way: dict) -> None:
    ran, out = run(READ, **way)
    clean(ran)
    assert np.array_equal(out, ring(1))
    ran, _ = run(READ.replace(MEET, "", 1), **way)
    assert code_of(ran) == "cluster_cta_not_started"


@every_way
def test_a_cta_must_not_leave_before_it_is_read(way: dict) -> None:
    """Whether or not it had left when it was read."""
    last = READ.rindex(MEET)
    early = READ[:last] + READ[last:].replace(MEET, "")
    slow = early.replace(
        "mapa", "setp.ne.u32 %p, %rank, 0; @%p bra GO;\nmov.b32 %x2, 0;\n"
        "LOOP: add.u32 %x2, %x2, 1; nanosleep.u32 1; setp.lt.u32 %done, %x2, 50; @%done bra LOOP;\n"
        "GO: mapa", 1,
    )  # fmt: skip
    for body in (early, slow):
        assert code_of(run(body, **way)[0]) == "cluster_cta_exited"
    ran, out = run(slow + MEET, **way)
    clean(ran)
    assert np.array_equal(out, ring(1))


def test_generic_addresses_reach_shared_memory() -> None:
    """cvta, mapa.u64, generic ld and st, cvta.to, getctarank, isspacep."""
    body = f"""
.reg .b64 %a, %f, %back; .reg .b32 %r; .reg .pred %c, %gl;
cvt.u64.u32 %a, %at; cvta.shared.u64 %a, %a;
st.b32 [%a], %x0;
{MEET}
mapa.u64 %f, %a, %next;
ld.b32 %x1, [%f];
getctarank.u64 %r, %f;
cvta.to.shared::cluster.u64 %back, %f; cvt.u32.u64 %far, %back;
ld.shared::cluster.b32 %x2, [%far];
isspacep.shared::cta %p, %f; isspacep.shared::cluster %c, %f; isspacep.global %gl, %o;
setp.eq.u32 %done, %x1, %x2; and.pred %c, %c, %done; and.pred %c, %c, %gl;
not.pred %p, %p; and.pred %c, %c, %p; setp.eq.u32 %p, %r, %next; and.pred %c, %c, %p;
selp.b32 %x1, %x1, 7777, %c;
st.b32 [%o], %x1;
{MEET}
"""
    ran, out = run(body)
    clean(ran)
    assert np.array_equal(out, ring(1))


def test_addresses_that_lead_nowhere() -> None:
    beyond = "mapa.shared::cluster.u32 %far, %at, 4;"
    for profile in ("silicon", "isa"):
        clean(run(beyond, profile=profile)[0])  # only its use is a fault
        hoisted = f"{beyond} @%first ld.shared::cluster.b32 %x1, [%far];"
        assert code_of(run(hoisted, profile=profile)[0]) == "cluster_address"
    for rank in (4, 256, -1):
        used = beyond.replace("4;", f"{rank}; ld.shared::cluster.b32 %x1, [%far];")
        assert code_of(run(used)[0]) == "cluster_address"
    nowhere = "add.u32 %far, %at, 0x7000000; ld.shared::cluster.b32 %x1, [%far];"
    assert code_of(run(nowhere)[0]) == "cluster_address"
    assert code_of(run("cvta.to.shared.u64 %g, %o;")[0]) == "generic_not_shared"


ARRIVE = f"""
@%first mbarrier.init.shared::cta.b64 [%bar], 32;
@%first fence.mbarrier_init.release.cluster;
{MEET}
mapa.shared::cluster.u32 %far, %at, %next;
st.shared::cluster.b32 [%far], %x0;
mapa.shared::cluster.u32 %x3, %bar, %next;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%x3];
SPIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %done, [%bar], 0;
@!%done bra SPIN;
ld.shared.b32 %x1, [%at];
st.global.b32 [%o], %x1;
{MEET}
"""


@pytest.mark.parametrize("profile", ["silicon", "isa"])
@every_way
def test_remote_arrivals(way: dict, profile: str) -> None:
    ran, out = run(ARRIVE, **way, profile=profile)
    clean(ran)
    assert np.array_equal(out, ring(3))


@every_way
def test_remote_arrivals_with_a_part_missing(way: dict) -> None:
    spin = ARRIVE[ARRIVE.index("SPIN") : ARRIVE.index("ld.shared.b32 %x1")]
    ran, _ = run(ARRIVE.replace(spin, ""), **way)
    assert code_of(ran) in ("smem_race", "smem_unwritten_read")
    ran, _ = run(
        ARRIVE.replace("mbarrier.arrive.release", "@%first mbarrier.arrive.release"), **way
    )
    assert code_of(ran) == "deadlock"
    ran, _ = run(ARRIVE.replace(MEET, "", 1), **way)
    assert code_of(ran) == "cluster_cta_not_started"


STORE = f"""
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
@%first fence.mbarrier_init.release.cluster;
{MEET}
@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 128;
mapa.shared::cluster.u32 %far, %at, %next;
mapa.shared::cluster.u32 %x3, %bar, %next;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%far], %x0, [%x3];
SPIN: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
@!%done bra SPIN;
ld.shared.b32 %x1, [%at];
st.global.b32 [%o], %x1;
{MEET}
"""


@every_way
def test_asynchronous_stores(way: dict) -> None:
    ran, out = run(STORE, **way)
    clean(ran)
    assert np.array_equal(out, ring(3))
    spin = STORE[STORE.index("SPIN") : STORE.index("ld.shared.b32 %x1")]
    ran, _ = run(STORE.replace(spin, ""), **way)
    assert code_of(ran) in ("st_async_not_waited", "smem_unwritten_read")
    ran, _ = run(STORE.replace("], 128;", "], 132;"), **way)
    assert code_of(ran) == "deadlock"
    ran, _ = run(STORE.replace("%x0, [%x3]", "%x0, [%bar]"), **way)
    assert code_of(ran) == "tma_barrier_elsewhere"


@pytest.mark.parametrize("op", ["add", "max", "xor"])
def test_asynchronous_reductions(op: str) -> None:
    """All CTAs reduce into CTA 0's memory, 32 cells."""
    kind = "b32" if op == "xor" else "u32"
    body = f"""
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
@%first fence.mbarrier_init.release.cluster;
mov.b32 %x1, 5; st.shared.b32 [%at], %x1;
setp.eq.u32 %p, %rank, 0; and.pred %p, %p, %first;
@%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {128 * CTAS};
{MEET}
mapa.shared::cluster.u32 %far, %at, 0; mapa.shared::cluster.u32 %x3, %bar, 0;
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{op}.{kind} [%far],
  %x0, [%x3];
setp.ne.u32 %p, %rank, 0; @%p bra REST;
SPIN: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
@!%done bra SPIN;
REST:
ld.shared.b32 %x1, [%at];
st.global.b32 [%o], %x1;
{MEET}
"""
    combine = {"add": np.add, "max": np.maximum, "xor": np.bitwise_xor}[op]
    want = np.full(32, 5)
    for rank in range(CTAS):
        want = combine(want, 1000 * rank + np.arange(32))
    ran, out = run(body, checks=False, schedule="adversarial", visibility="late")
    clean(ran)
    assert np.array_equal(out[0], want)
    assert (out[1:] == 5).all()
