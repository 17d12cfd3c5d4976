"""A CTA pair at work: collective allocation, one MMA on both CTAs, one commit to both, and what is
found when a piece is missing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.cluster_harness import clean, code_of, every_way, launch, module

M, N = 256, 64  # of the pair; K = 16
IDESC = 1 << 4 | 1 << 7 | 1 << 10 | N // 8 << 17 | M // 16 << 24

# K-major without swizzle: chunk j of row r lies at 16 (r % 8) + 128 (r / 8) + LBO j.
BODY = f"""
.reg .b32 %t, %rank, %base, %bar, %at, %x<8>, %d<64>, %tm, %hi, %s;
.reg .b64 %a, %b, %o, %w, %da, %db;
.reg .b16 %mask;
.reg .pred %p, %lead, %one, %done;
mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; mov.u32 %base, smem;
setp.eq.u32 %one, %t, 0; setp.eq.u32 %lead, %rank, 0; and.pred %lead, %lead, %one;
add.u32 %bar, %base, 8192;
ld.param.b64 %a, [a]; ld.param.b64 %b, [b]; ld.param.b64 %o, [out];
@%one mbarrier.init.shared::cta.b64 [%bar], 1;
@%one fence.mbarrier_init.release.cluster;
// A: row rank * 128 + t; B: row rank * 32 + t of N
mad.lo.u32 %x0, %rank, 128, %t; mul.wide.u32 %w, %x0, 32; add.u64 %a, %a, %w;
shr.u32 %x1, %t, 3; shl.b32 %x1, %x1, 7; and.b32 %x2, %t, 7; shl.b32 %x2, %x2, 4;
add.u32 %at, %x1, %x2; add.u32 %at, %at, %base;
ld.global.v4.b32 {{%x4, %x5, %x6, %x7}}, [%a]; st.shared.v4.b32 [%at], {{%x4, %x5, %x6, %x7}};
ld.global.v4.b32 {{%x4, %x5, %x6, %x7}}, [%a+16];
st.shared.v4.b32 [%at+2048], {{%x4, %x5, %x6, %x7}};
setp.lt.u32 %p, %t, 32;
@!%p bra NOB;
mad.lo.u32 %x0, %rank, 32, %t; mul.wide.u32 %w, %x0, 32; add.u64 %b, %b, %w;
ld.global.v4.b32 {{%x4, %x5, %x6, %x7}}, [%b];
st.shared.v4.b32 [%at+4096], {{%x4, %x5, %x6, %x7}};
ld.global.v4.b32 {{%x4, %x5, %x6, %x7}}, [%b+16];
st.shared.v4.b32 [%at+4608], {{%x4, %x5, %x6, %x7}};
add.u32 %x3, %base, 8200;
tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%x3], 64;
tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
NOB:
fence.proxy.async.shared::cta;
tcgen05.fence::before_thread_sync;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
tcgen05.fence::after_thread_sync;
ld.shared.b32 %tm, [%base+8200];
// descriptors: no swizzle, LBO 2048 (A) and 512 (B), SBO 128
and.b32 %s, %base, 0x3ffff; shr.u32 %s, %s, 4;
or.b32 %x0, %s, 0x800000; mov.b32 %hi, 0x4008; mov.b64 %da, {{%x0, %hi}};
add.u32 %x1, %s, 256; or.b32 %x1, %x1, 0x200000; mov.b64 %db, {{%x1, %hi}};
setp.ne.u32 %p, %t, %t;
mov.b16 %mask, 3;
@%lead tcgen05.mma.cta_group::2.kind::f16 [%tm], %da, %db, {IDESC}, %p;
@%lead tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%bar], %mask;
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
@!%done bra WAIT;
tcgen05.fence::after_thread_sync;
shr.u32 %x0, %t, 5; shl.b32 %x0, %x0, 21; add.u32 %x0, %x0, %tm;
tcgen05.ld.sync.aligned.32x32b.x64.b32 {{{", ".join(f"%d{i}" for i in range(64))}}}, [%x0];
tcgen05.wait::ld.sync.aligned;
mad.lo.u32 %x0, %rank, 128, %t; mul.wide.u32 %w, %x0, 256; add.u64 %o, %o, %w;
{chr(10).join(f"st.global.b32 [%o+{4 * i}], %d{i};" for i in range(64))}
tcgen05.fence::before_thread_sync;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
tcgen05.fence::after_thread_sync;
setp.ge.u32 %p, %t, 32;
@%p bra END;
tcgen05.dealloc.cta_group::2.sync.aligned.b32 %tm, 64;
END:
"""  # noqa: E501


def problem(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-8, 9, (rows, 16)).astype(np.float32) for rows in (M, N))
    bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
    return *bits, np.full((M, N), np.nan, np.float32), a @ b.T


def run(body: str = BODY, **options) -> tuple:
    a, b, out, want = problem()
    ran = launch(
        module("a b out", body, shared=16384),
        [a, b, out],
        threads=128,
        grid=2,
        cluster=2,
        **options,
    )
    return ran, out, want


@pytest.mark.parametrize("profile", ["silicon", "isa"])
@every_way
def test_one_mma_on_two_ctas(way: dict, profile: str) -> None:
    ran, out, want = run(**way, profile=profile, seed=3)
    clean(ran)
    assert np.array_equal(out, want)


def without(*parts: str) -> str:
    body = BODY
    for part in parts:
        assert part in body, part
        body = body.replace(part, "", 1)
    return body


CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
MULTICAST = ".multicast::cluster.b64 [%bar], %mask"


@pytest.mark.parametrize(
    "body,code",
    [
        (without("fence.proxy.async.shared::cta;"), "missing_proxy_fence"),
        (BODY.replace("mov.b16 %mask, 3;", "mov.b16 %mask, 1;"), "deadlock"),
        (BODY.replace("mov.b16 %mask, 3;", "mov.b16 %mask, 5;"), "cluster_bad_mask"),
        (BODY.replace(MULTICAST, ".b64 [%bar]"), "deadlock"),
        (BODY.replace("WAIT:", "bra GO; WAIT:").replace("bra WAIT;", "bra WAIT; GO:"), "tmem_"),
        (BODY.replace("cta_group::2.kind", "cta_group::1.kind"), "tcgen05_mixed_cta_group"),
        (BODY.replace("b32 %tm, 64;", "b32 %tm, 32;"), "tmem_dealloc_mismatch"),
    ],
)  # fmt: skip
def test_a_piece_is_missing(body: str, code: str) -> None:
    found = code_of(run(body)[0])
    assert found.startswith(code), found


ODD_ONLY = "setp.eq.u32 %p, %rank, 1; @%p bra ODD{0};\n{1}\nODD{0}:\n"
WAIT = BODY[BODY.index("WAIT:") : BODY.index("tcgen05.fence::after_thread_sync;\nshr")]
OVERWRITE = "setp.ne.u32 %p, %rank, {}; @%p bra KEEP; st.shared.b32 [%base+{}], %t; KEEP:\n"


@pytest.mark.parametrize(
    "body,code",
    [
        # Only one of the CTAs leaves it out.
        (
            BODY.replace(
                "fence.proxy.async.shared::cta;",
                ODD_ONLY.format(1, "fence.proxy.async.shared::cta;"),
            ),
            ("missing_proxy_fence",),
        ),
        (
            BODY.replace(WAIT, ODD_ONLY.format(2, WAIT)),
            ("tmem_access_before_commit", "tcgen05_ld_"),
        ),
        # The MMA of the even CTA reads the odd one's A and B, and both wait for it to be over.
        (BODY.replace("WAIT:", OVERWRITE.format(1, 128) + "WAIT:"), ("mma_operand_", "smem_race")),
        (BODY.replace("WAIT:", OVERWRITE.format(0, 4096) + "WAIT:"), ("mma_operand_", "smem_race")),
        # Nothing orders the odd CTA's operands, or its allocation, before the MMA.
        (
            without(CLUSTER).replace("ld.shared.b32 %tm", "bar.sync 0; ld.shared.b32 %tm", 1),
            ("cluster_cta_not_started",),
        ),
        (
            BODY.replace(CLUSTER, f"{CLUSTER} st.shared.b32 [%base+256], %rank;", 1),
            ("missing_proxy_fence", "smem_race", "mma_operand_"),
        ),
    ],
    ids=["odd proxy fence", "odd wait", "odd A", "even B", "no barrier", "written late"],
)
@every_way
def test_the_odd_cta_is_held_to_it_too(way: dict, body: str, code: tuple[str, ...]) -> None:
    found = code_of(run(body.replace("%t; KEEP", "%rank; KEEP"), **way)[0])
    assert found.startswith(code), found


def test_both_must_free() -> None:
    last = "setp.ge.u32 %p, %t, 32;"
    ran, _, _ = run(
        BODY.replace(last, f"mad.lo.u32 %x0, %rank, 64, %t; {last.replace('%t', '%x0')}")
    )
    assert code_of(ran) in ("deadlock", "cluster_cta_exited")


def test_an_early_wait_gives_wrong_numbers_when_late() -> None:
    body = BODY.replace("WAIT:", "bra GO; WAIT:").replace("bra WAIT;", "bra WAIT; GO:")
    ran, _, _ = run(body, checks=False, visibility="late")
    assert code_of(ran) == "tmem_unwritten_read"


def test_a_pair_needs_two_ctas() -> None:
    a, b, out, _ = problem()
    ran = launch(module("a b out", BODY, shared=16384), [a, b, out], threads=128)
    assert code_of(ran) == "cta_pair_missing"


def test_the_peer_must_not_have_left() -> None:
    """The odd CTA ends at once; the even one's collective call finds it gone."""
    body = BODY.replace(
        "ld.param.b64 %a, [a];", "setp.eq.u32 %p, %rank, 1; @%p exit; ld.param.b64 %a, [a];"
    )
    assert code_of(run(body)[0]) in ("cluster_cta_exited", "deadlock")
    ran, _, _ = run(body, schedule="adversarial", seed=1)
    assert code_of(ran) in ("cluster_cta_exited", "deadlock")


def test_dealloc_waits_for_the_peer_as_it_may() -> None:
    """Table 48 of the ISA: a dealloc before the barrier that lets the peer reach its own hangs."""
    end = BODY[BODY.rindex(CLUSTER) :]
    swapped = f"""
setp.eq.u32 %p, %rank, 0;
@%p bra EVEN;
setp.ge.u32 %p, %t, 32;
@%p bra ODD;
tcgen05.dealloc.cta_group::2.sync.aligned.b32 %tm, 64;
ODD:
{CLUSTER}
bra END;
EVEN:
{end}"""
    ran, _, _ = run(BODY[: BODY.rindex(CLUSTER)] + swapped)
    assert code_of(ran) == "deadlock"
    rows = ran.findings[0].details["blocked"]
    assert any("tcgen05.dealloc" in row["waits_on"] for row in rows)
