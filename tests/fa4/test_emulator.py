"""What stands around the emulator: arguments, outputs, findings."""

from __future__ import annotations

import pytest
import torch

import fa4
from fa4.plan import make_plan
from tests.fa4.fake_emulator import FINDING, FakeEmulator
from tests.fa4.problems import assert_numbers_rule, random_qkv


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> FakeEmulator:
    fake = FakeEmulator()
    monkeypatch.setattr("kernels.emulator.emulate", fake, raising=False)
    return fake


def test_what_the_emulator_is_given(emulator: FakeEmulator) -> None:
    q, k, v = random_qkv(head_dim=48, dtype=torch.float16)
    before = [t.clone() for t in (q, k, v)]
    out, lse = assert_numbers_rule(
        q, k, v, causal=True, softmax_scale=0.3, backend="emulator", gpu="sm_103a"
    )
    assert out.dtype == torch.float16 and lse.dtype == torch.float32
    (call,) = emulator.calls
    plan = make_plan("b300", "float16", 48, True, {})
    assert call.plan == plan and call.gpu == "b300"
    assert call.roles[12] == "mma" and call.roles == plan.role_of_warp()
    assert call.progress is None
    assert [t.data_ptr() for t in call.qkv] == [t.data_ptr() for t in (q, k, v)]
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))


def test_without_autograd(emulator: FakeEmulator) -> None:
    qkv = tuple(t.requires_grad_() for t in random_qkv())
    with pytest.raises(fa4.UnsupportedError, match="bwd.*torch.no_grad"):
        fa4.attention(*qkv, backend="emulator")
    assert not emulator.calls
    with torch.no_grad():
        out = fa4.attention(*qkv, backend="emulator")
    assert not out.requires_grad and len(emulator.calls) == 1
    fa4.attention(*(t.detach() for t in qkv), backend="emulator")


def test_a_finding_raises_with_the_report(emulator: FakeEmulator) -> None:
    emulator.findings = (FINDING,)
    with pytest.raises(fa4.EmulationError, match="smem_unwritten_read") as caught:
        fa4.attention(*random_qkv(), backend="emulator")
    assert caught.value.report.findings == (FINDING,)


def test_nan_in_the_input_is_no_finding(emulator: FakeEmulator) -> None:
    q, k, v = random_qkv()
    k[0, 3] = torch.nan
    assert fa4.attention(q, k, v, backend="emulator")[0].isnan().all()


def test_auto_never_emulates(emulator: FakeEmulator) -> None:
    fa4.attention(*random_qkv())
    assert not emulator.calls


def test_a_missing_package_is_named_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"nvidia-cutlass-dsl": "4.7.0", "llvmlite": None, "numpy": "2.4.6"}
    monkeypatch.setattr("fa4.dependencies.installed", versions.__getitem__)
    with pytest.raises(fa4.MissingDependencyError) as caught:
        fa4.attention(*random_qkv(), backend="emulator")
    assert str(caught.value) == (
        "nvidia-cutlass-dsl 4.7.0 is not in the tested >=4.8.1,<4.9: "
        "pip install 'nvidia-cutlass-dsl>=4.8.1,<4.9'; "
        "llvmlite is not installed: pip install 'llvmlite>=0.45,<0.52'"
    )
    fa4.attention(*random_qkv())  # the reference needs neither
