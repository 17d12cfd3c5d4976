"""The comparison with an H200 that `cluster_harness.launch` makes is alive: tests' launches are
found among those recorded, and a result that differs fails."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.emulator import cluster_harness, test_isa_bulk, test_isa_cluster, test_wgmma
from tests.emulator import test_isa_atomics as atomics
from tests.emulator import test_isa_cp_async as cp_async
from tests.emulator import test_isa_matrix as matrix
from tests.emulator.cluster_harness import RECORDED, launch, module

WAY = {"schedule": "round_robin", "visibility": "eager"}
SAMPLES: dict[str, Callable[[], None]] = {
    "ldmatrix": lambda: matrix.test_ldmatrix(4, ".trans"),
    "mma.sync": lambda: matrix.test_mma_sync(16, "f32", "bf16", False),
    "red": lambda: atomics.test_packed_halves("bf16x2", ".v2"),
    "cp.async": lambda: cp_async.test_what_is_not_taken_is_zero("cg", 3),
    "mapa": test_isa_cluster.test_generic_addresses_reach_shared_memory,
    "st.async": lambda: test_isa_cluster.test_asynchronous_stores(WAY),
    "cp.reduce.async.bulk": lambda: test_isa_bulk.test_half_sums_round_once("bf16"),
    "multicast": lambda: test_isa_bulk.test_a_tile_for_every_cta(WAY),
    "wgmma": lambda: test_wgmma.test_both_operands_in_shared_memory(8, True, False),
}


@pytest.mark.parametrize("what", SAMPLES)
def test_launches_are_those_recorded(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test whose text or inputs change must be recorded again."""
    names: list[str] = []
    monkeypatch.setattr(
        cluster_harness,
        "digest",
        lambda given, digest=cluster_harness.digest: _kept(names, digest(given)),
    )
    SAMPLES[what]()
    assert any(name in RECORDED["launches"] for name in names), "record again (record_isa.py)"


def _kept(names: list[str], name: str) -> str:
    names.append(name)
    return name


def test_another_result_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    out = np.zeros(32, np.uint32)
    body = ".reg .b64 %o; ld.param.b64 %o, [out]; st.global.b32 [%o], 7;"
    launch(module("out", body), [out])
    out[:] = 0
    given = cluster_harness.work(module("out", body), [out], [out], 32, 1, 1, 0)
    name = cluster_harness.digest(given)
    monkeypatch.setitem(RECORDED["launches"], name, "0123456789abcdef")
    with pytest.raises(AssertionError, match="an H200 gives other results"):
        launch(module("out", body), [out])


def test_most_launches_were_recorded() -> None:
    assert "H200" in RECORDED["gpu"]
    assert len(RECORDED["launches"]) > 250
