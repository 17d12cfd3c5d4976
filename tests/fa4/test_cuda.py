"""The GPU backend, as far as a machine without one can tell; the rest is marked gpu."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fa4
from fa4.backends import cuda, launch
from fa4.plan import make_plan
from kernels.common.plan import KernelPlan
from tests.fa4.problems import assert_numbers_rule, dense_attention, random_qkv


def test_arguments_have_dynamic_layouts() -> None:
    """Sizes and strides are not compiled in, so that one kernel serves every shape of a plan."""
    q, k, v = launch.operands(*random_qkv())
    arguments = cuda.arguments(q, k, v, torch.empty_like(q), torch.empty(2, 4, 65), 0.25, 7)
    for tensor in arguments[:4]:
        assert str(tensor).endswith("o (?,?,?,?):(?{i64},?{i64},?{i64},1)>")
    assert str(arguments[4]).endswith("o (?,?,?):(?{i64},?{i64},1)>")
    assert float(arguments[5].value) == 0.25 and int(arguments[6]) == 7


@pytest.mark.slow
def test_arguments_fit_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch from `compile_forward`'s fake tensors and these arguments has the right parameters.

    The host function runs on the CPU with its launch caught, once compiled for the fake tensors and
    once for the arguments themselves; what both hand to the kernel must be the same.
    """
    from kernels.blackwell import forward
    from kernels.emulator import capture

    plan = KernelPlan.forward(head_dim=64)
    seen: list[Any] = []
    monkeypatch.setattr(forward.cute, "compile", lambda *args, **_: seen.append(args))
    forward.compile_forward.__wrapped__(plan)
    monkeypatch.undo()
    compiled = capture.compile(*seen[0])
    for batch, seqlen_q in ((1, 300), (2, 65)):
        qkv = launch.operands(*random_qkv(batch=batch, seqlen_q=seqlen_q))
        outs = torch.empty_like(qkv[0]), torch.empty(batch, 4, seqlen_q)
        arguments = cuda.arguments(*qkv, *outs, 0.125, 0)
        bound = capture.HostArguments(compiled.fn, arguments)
        bound.key = compiled.key  # the GPU's executor does not ask for equal types either
        (ours,) = compiled.launch_bound(bound)
        exact = capture.compile(forward.AttentionForward(plan), *arguments)
        (expected,) = exact.launch(*arguments)
        assert (ours.grid, ours.block, ours.smem_bytes) == (
            *(expected.grid, expected.block, expected.smem_bytes),
        )
        assert list(map(_meaning, ours.params)) == list(map(_meaning, expected.params))


def _meaning(parameter: bytes) -> bytes:
    """What a parameter says: a tensor map has 64 bytes of content, and lse's view 4 of padding."""
    if len(parameter) == 128:
        return parameter[:64]
    return parameter[:20] + parameter[24:] if len(parameter) == 40 else parameter


class _FakeCuda:
    """PyTorch's CUDA state, and CPU tensors that say they are on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        self.launches: list[Any] = []
        self.compiled: list[KernelPlan] = []
        stream = SimpleNamespace(cuda_stream=42)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
        monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
        monkeypatch.setattr("fa4.api._resolve", lambda *_: "cuda")
        monkeypatch.setattr("kernels.blackwell.forward.compile_forward", self.compile)
        cuda._compiled.cache_clear()

    def compile(self, plan: KernelPlan) -> Any:
        self.compiled.append(plan)
        return lambda *arguments: self.launches.append(arguments)


@pytest.mark.parametrize(("capability", "gpu"), [((10, 0), "b200"), ((10, 3), "b300")])
def test_one_compile_for_all_shapes_of_a_plan(
    capability: tuple[int, int], gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = _FakeCuda(monkeypatch, capability)
    for batch, seqlen_q, seqlen_k in ((1, 1, 100), (4, 128, 333), (2, 1000, 7), (4, 128, 333)):
        q, k, v = random_qkv(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        for scale in (0.1, 0.2):
            fa4.attention(q, k, v, softmax_scale=scale)
        expanded = k[:, :, :1].expand(k.shape)
        fa4.attention(q, expanded, expanded)
        fa4.attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    assert fake.compiled == [make_plan(gpu, "bfloat16", 64, False, {})]
    assert len(fake.launches) == 16
    assert {int(arguments[6]) for arguments in fake.launches} == {42}
    fa4.attention(*random_qkv(head_dim=64), causal=True)
    fa4.attention(*random_qkv(head_dim=64, dtype=torch.float16))
    assert len(set(fake.compiled)) == len(fake.compiled) == 3
    cuda._compiled.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (11, 0), (12, 0), (12, 1)])
def test_other_archs_are_refused_before_any_compile(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = _FakeCuda(monkeypatch, capability)
    gpu = "sm_{}{}".format(*capability)
    with pytest.raises(fa4.UnsupportedError, match=f"{gpu} has no kernel.*reference") as caught:
        fa4.attention(*random_qkv())
    assert str(caught.value) == fa4.supports(gpu=gpu).reason
    assert not fake.compiled


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu(causal: bool) -> None:
    if not fa4.supports():
        pytest.skip(fa4.supports().reason)
    qkv = random_qkv(seqlen_q=300, seqlen_k=500)
    out, lse = fa4.attention(*(t.cuda() for t in qkv), causal=causal, return_lse=True)
    exact, exact_lse = dense_attention(*(t.double() for t in qkv), causal=causal, scale=0.125)
    torch.testing.assert_close(lse.cpu().double(), exact_lse, atol=1e-3, rtol=0)
    torch.testing.assert_close(out.cpu().double(), exact, atol=2e-2, rtol=0)


@pytest.mark.gpu
def test_auto_answers_for_this_gpu() -> None:
    """Where this machine's GPU has no kernel: the refusal of `supports`, not a wrong kernel."""
    qkv = tuple(t.cuda() for t in random_qkv())
    answer = fa4.supports()
    if answer:
        assert fa4.attention(*qkv).is_cuda
        return
    with pytest.raises(fa4.UnsupportedError) as caught:
        fa4.attention(*qkv)
    assert str(caught.value) == answer.reason


@pytest.mark.gpu
def test_reference_on_a_gpu() -> None:
    """No Blackwell needed: the reference runs on the tensors' own device."""
    qkv = tuple(t.cuda() for t in random_qkv(seqlen_q=300, seqlen_k=500))
    out, _ = assert_numbers_rule(*qkv, causal=True, backend="reference")
    assert out.is_cuda
