"""mbarriers: phases, arrivals and transactions as PTX ISA 9.1 section 9.7.13.15 has them."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from kernels.emulator.findings import EmulatorFault
from kernels.emulator.memory.shared import SharedMemory
from kernels.emulator.sync.mbarrier import MAX_COUNT, MbarrierUnit

AT = 1024 + 64


def unit(count: int | None = None) -> MbarrierUnit:
    made = MbarrierUnit(SharedMemory(1024))
    if count is not None:
        made.init(AT, count)
    return made


def code_of(call, *args, **kwargs) -> str:
    with pytest.raises(EmulatorFault) as caught:
        call(*args, **kwargs)
    return caught.value.code


def test_a_phase_takes_its_arrivals() -> None:
    bars = unit(3)
    for phase in range(5):
        parity = phase & 1
        for _ in range(2):
            assert bars.arrive(AT) == phase
            assert not bars.try_parity(AT, parity)
            assert bars.try_parity(AT, parity ^ 1)
        assert bars.arrive(AT) == phase
        assert bars.try_parity(AT, parity)
        assert not bars.try_parity(AT, parity ^ 1)


def test_a_fresh_barrier_lets_a_wait_for_the_phase_before_the_first_through() -> None:
    bars = unit(1)
    assert bars.try_parity(AT, 1)
    assert not bars.try_parity(AT, 0)


def test_a_phase_also_takes_its_bytes() -> None:
    bars = unit(1)
    assert bars.arrive_expect_tx(AT, 1024) == 0
    bars.complete_tx(AT, 1000)
    assert not bars.try_parity(AT, 0)
    bars.complete_tx(AT, 24)
    assert bars.try_parity(AT, 0)
    assert bars.state(AT).tx_count == 0 and bars.state(AT).pending == 1


def test_bytes_may_complete_before_they_are_expected() -> None:
    bars = unit(2)
    bars.complete_tx(AT, 512)
    assert bars.state(AT).tx_count == -512
    bars.arrive(AT)
    bars.arrive(AT)
    assert not bars.try_parity(AT, 0)  # all have arrived, but the tx-count is not zero
    bars.expect_tx(AT, 512)
    assert bars.try_parity(AT, 0)


def test_expecting_nothing_is_an_arrival_only() -> None:
    bars = unit(1)
    bars.arrive_expect_tx(AT, 0)
    assert bars.try_parity(AT, 0)


def test_zero_tx_without_arrivals_does_not_complete() -> None:
    bars = unit(1)
    bars.expect_tx(AT, 64)
    bars.complete_tx(AT, 64)
    assert not bars.try_parity(AT, 0)


def test_arrive_with_a_count() -> None:
    bars = unit(8)
    bars.arrive(AT, 5)
    assert bars.state(AT).pending == 3
    assert code_of(bars.arrive, AT, 4) == "mbarrier_overflow"
    bars.arrive(AT, 3)
    assert bars.state(AT).phase == 1
    assert code_of(bars.arrive, AT, 0) == "mbarrier_bad_count"


def test_one_arrival_too_many_while_bytes_are_out() -> None:
    bars = unit(1)
    bars.arrive_expect_tx(AT, 16)
    with pytest.raises(EmulatorFault) as caught:
        bars.arrive(AT, who="store warp")
    assert caught.value.code == "mbarrier_overflow"
    assert caught.value.details["pending_bytes"] == 16
    assert "store warp" in caught.value.message
    assert code_of(bars.arrive_expect_tx, AT, 16) == "mbarrier_overflow"
    assert bars.state(AT).tx_count == 16  # the refused arrival left nothing behind


def test_tx_count_limits() -> None:
    bars = unit(1)
    bars.expect_tx(AT, MAX_COUNT)
    assert code_of(bars.expect_tx, AT, 1) == "mbarrier_tx_overflow"
    bars.complete_tx(AT, MAX_COUNT)
    bars.complete_tx(AT, MAX_COUNT)
    assert code_of(bars.complete_tx, AT, 1) == "mbarrier_tx_overflow"
    assert code_of(unit(1).arrive_expect_tx, AT, MAX_COUNT + 1) == "mbarrier_tx_overflow"


def test_arrive_drop_lowers_later_phases() -> None:
    bars = unit(3)
    bars.arrive_drop(AT)
    bars.arrive(AT, 2)
    assert bars.state(AT).phase == 1
    bars.arrive(AT, 2)
    assert bars.state(AT).phase == 2
    assert code_of(bars.arrive_drop, AT, 3) == "mbarrier_bad_count"
    bars.arrive(AT)
    assert code_of(bars.arrive_drop, AT, 2) == "mbarrier_overflow"
    assert bars.state(AT).expected == 2


def test_no_complete_must_not_complete() -> None:
    bars = unit(2)
    bars.arrive(AT, no_complete=True)
    assert code_of(bars.arrive, AT, no_complete=True) == "mbarrier_unexpected_completion"
    assert bars.state(AT).pending == 1


def test_wait_by_token() -> None:
    bars = unit(1)
    token = bars.arrive(AT)
    assert bars.try_phase(AT, token)
    assert not bars.try_phase(AT, token + 1)
    bars.arrive(AT)
    assert code_of(bars.try_phase, AT, token) == "mbarrier_stale_token"
    assert code_of(bars.try_phase, AT, token + 3) == "mbarrier_stale_token"
    assert code_of(bars.try_parity, AT, 2) == "mbarrier_bad_parity"


def test_init_rules() -> None:
    bars = unit(1)
    assert code_of(bars.init, AT, 1) == "mbarrier_double_init"
    assert code_of(bars.init, AT + 4, 1) == "mbarrier_misaligned"
    for count in (0, -1, MAX_COUNT + 1):
        assert code_of(bars.init, AT + 8, count) == "mbarrier_bad_count"
    bars.init(AT + 8, MAX_COUNT)
    assert code_of(bars.init, 0, 1) == "smem_out_of_bounds"
    assert code_of(bars.init, 2048, 1) == "smem_out_of_bounds"
    bars.inval(AT)
    assert code_of(bars.arrive, AT) == "mbarrier_not_initialised"
    bars.init(AT, 7)
    assert (bars.state(AT).phase, bars.state(AT).pending) == (0, 7)


@pytest.mark.parametrize(
    "operation",
    [
        lambda b, a: b.arrive(a),
        lambda b, a: b.arrive_expect_tx(a, 4),
        lambda b, a: b.arrive_drop(a),
        lambda b, a: b.expect_tx(a, 4),
        lambda b, a: b.complete_tx(a, 4),
        lambda b, a: b.try_parity(a, 0),
        lambda b, a: b.try_phase(a, 0),
        lambda b, a: b.inval(a),
        lambda b, a: b.state(a),
    ],
)
def test_every_operation_needs_a_live_barrier(operation) -> None:
    bars = unit(1)
    assert code_of(operation, bars, AT + 8) == "mbarrier_not_initialised"
    assert code_of(operation, bars, AT + 1) == "mbarrier_misaligned"
    assert code_of(operation, bars, 0) == "smem_out_of_bounds"
    bars.inval(AT)
    assert code_of(operation, bars, AT) == "mbarrier_not_initialised"


def test_the_bytes_belong_to_the_barrier_while_it_lives() -> None:
    shared = SharedMemory(1024)
    bars = MbarrierUnit(shared)
    shared.store(np.array([AT]), np.zeros((1, 8), np.uint8))
    bars.init(AT, 1)
    assert code_of(shared.load, np.array([AT]), 8) == "mbarrier_ordinary_access"
    assert code_of(shared.store, np.array([AT + 4]), np.zeros((1, 4), np.uint8)) == (
        "mbarrier_ordinary_access"
    )
    bars.inval(AT)
    assert code_of(shared.load, np.array([AT]), 8) == "smem_unwritten_read"
    shared.store(np.array([AT]), np.zeros((1, 8), np.uint8))


def test_waiters_are_told_of_each_phase_once() -> None:
    bars = unit(1)
    seen: list[tuple[int, int]] = []
    bars.on_phase.append(lambda addr, phase: seen.append((addr, phase)))
    bars.arrive(AT)
    bars.arrive_expect_tx(AT, 32)
    bars.complete_tx(AT, 32)
    bars.init(AT + 8, 1)
    bars.arrive(AT + 8)
    assert seen == [(AT, 0), (AT, 1), (AT + 8, 0)]


def test_the_report_is_json_and_names_the_last_arrivers() -> None:
    bars = unit(3)
    bars.arrive(AT, who="softmax0")
    bars.expect_tx(AT, 4096)
    state = json.loads(json.dumps(bars.state(AT).to_dict()))
    assert state["pending_arrivals"] == 2 and state["pending_bytes"] == 4096
    assert state["last_arrivers"] == [{"who": "softmax0", "phase": 0}]
    assert "lacks 2 of 3 arrivals and 4096 bytes" in str(bars.state(AT))


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_against_counting(seed: int) -> None:
    """The phase is the number of times that arrivals and bytes balanced, whatever the order."""
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    bars = unit(count)
    for phase in range(10):
        chunks = [rng.randint(1, 300) for _ in range(rng.randint(0, 4))]
        events = [("tx", c) for c in chunks] + [("expect", c) for c in chunks]
        events += [("arrive", 1)] * (count - 1)
        rng.shuffle(events)
        for kind, value in events:  # one arrival is held back, so the phase cannot complete early
            if kind == "tx":
                bars.complete_tx(AT, value)
            elif kind == "expect":
                bars.expect_tx(AT, value)
            else:
                bars.arrive(AT)
            assert bars.state(AT).phase == phase
        bars.arrive(AT)
        assert bars.state(AT).phase == phase + 1


def test_an_init_may_be_repeated_as_long_as_nothing_has_happened() -> None:
    bars = unit()
    bars.init(AT, 2)
    bars.init(AT, 2, again=True)
    assert code_of(bars.init, AT, 1, again=True) == "mbarrier_double_init"
    bars.arrive(AT, who="warp 0")
    assert code_of(bars.init, AT, 2, again=True) == "mbarrier_double_init"
