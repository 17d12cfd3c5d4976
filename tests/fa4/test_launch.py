"""What kernels are given to read: in place where a tensor map can say it, else a copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fa4
from fa4.backends import launch
from fa4.plan import plan_of
from fa4.problem import AttentionProblem
from tests.fa4.problems import QKV, random_qkv

View = Callable[[torch.Tensor], torch.Tensor]

IN_PLACE: dict[str, View] = {
    "contiguous": lambda t: t,
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every second key": lambda t: torch.stack([t, t + 1], 2).flatten(1, 2)[:, ::2],
    "part of the head dim": lambda t: torch.cat([t, t + 1], -1)[..., : t.shape[-1]],
    "one of three": lambda t: torch.stack([t + 1, t, t + 2], 2)[:, :, 1],
}
COPIED: dict[str, View] = {
    "dim not last": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    "every second element": lambda t: torch.stack([t, t + 1], -1).flatten(3)[..., ::2],
    "rows of 66": lambda t: torch.nn.functional.pad(t, (0, 2))[..., : t.shape[-1]],
    "address of 2": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "batch expanded": lambda t: t[:1].expand(t.shape),
    "sequence expanded": lambda t: t[:, :1].expand(t.shape),
}


@pytest.mark.parametrize("view", IN_PLACE.values(), ids=IN_PLACE)
def test_read_in_place(view: View) -> None:
    q = view(random_qkv()[0])
    (given, _, _) = launch.operands(q, q, q)
    assert given.data_ptr() == q.data_ptr() and given.stride() == q.stride()
    assert torch.equal(given, q)


@pytest.mark.parametrize("view", COPIED.values(), ids=COPIED)
def test_copied(view: View) -> None:
    q = view(random_qkv()[0])
    (given, _, _) = launch.operands(q, q, q)
    assert given.is_contiguous() and given.data_ptr() % 16 == 0
    assert given.data_ptr() != q.data_ptr() and torch.equal(given, q)


def _valid(t: torch.Tensor) -> bool:
    """The rule of a tensor map, on every stride, that of a dimension of size 1 too."""
    sizes = [stride * t.element_size() for stride in t.stride()[:-1]]
    return (
        t.stride(-1) == 1 and t.data_ptr() % 16 == 0 and all(s > 0 and s % 16 == 0 for s in sizes)
    )


@pytest.mark.parametrize("view", (IN_PLACE | COPIED).values(), ids=IN_PLACE | COPIED)
@pytest.mark.parametrize("shape", [(1, 5, 3), (2, 1, 3), (2, 5, 1), (1, 1, 1), (2, 5, 3)])
def test_always_what_a_tensor_map_can_say(view: View, shape: tuple[int, int, int]) -> None:
    batch, seqlen, heads = shape
    q = view(random_qkv(batch=batch, seqlen_q=seqlen, heads=heads)[0])
    odd = q.as_strided(
        q.shape, [3 if n == 1 else s for n, s in zip(q.shape, q.stride(), strict=True)]
    )
    for t in (q, odd):
        (given, _, _) = launch.operands(t, t, t)
        assert _valid(given) and torch.equal(given, t)


def _expanded_heads(qkv: QKV) -> QKV:
    q, k, v = qkv
    return q, k[:, :, :1].expand(k.shape), v[:, :, :1].expand(v.shape)


def test_heads_expanded_from_one_are_read_once() -> None:
    q, k, v = _expanded_heads(random_qkv(kv_heads=4))
    _, k_given, v_given = launch.operands(q, k, v)
    assert k_given.shape[2] == v_given.shape[2] == 1
    assert k_given.data_ptr() == k.data_ptr() and v_given.data_ptr() == v.data_ptr()


def test_heads_of_k_alone_expanded_are_copied() -> None:
    q, k, v = random_qkv(kv_heads=4)
    _, k_given, v_given = launch.operands(q, k[:, :, :1].expand(k.shape), v)
    assert k_given.shape == v_given.shape == v.shape and _valid(k_given)


def test_operands_leave_autograd_and_lazy_negation_behind() -> None:
    q = random_qkv(dtype=torch.float32)[0].requires_grad_()
    negated = torch._neg_view(q)
    given, plain, _ = launch.operands(negated, q, q)
    assert not given.requires_grad and not plain.requires_grad
    assert not given.is_neg() and torch.equal(given, -q.detach())


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_to_launch(
    batch: int, seqlen_q: int, seqlen_k: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fa4.backends.emulator.forward", None)
    qkv = random_qkv(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    out, lse = fa4.attention(*qkv, causal=causal, backend="emulator", return_lse=True)
    assert out.shape == (batch, seqlen_q, 4, 64) and out.dtype == torch.bfloat16
    assert lse.shape == (batch, 4, seqlen_q) and lse.dtype == torch.float32
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_plan_of_a_problem() -> None:
    problem = AttentionProblem.from_tensors(*random_qkv(head_dim=48), causal=True)
    plan = plan_of(problem, "b300", rescale_threshold=0.0)
    assert (plan.gpu, plan.dtype, plan.head_dim, plan.causal) == ("b300", "bfloat16", 48, True)
    assert plan.rescale_threshold == 0.0
    # Neither sizes nor scale are in it: one compiled kernel serves them all.
    other = AttentionProblem.from_tensors(
        *random_qkv(batch=1, seqlen_q=3, seqlen_k=300, heads=2, head_dim=48),
        causal=True,
        softmax_scale=3.0,
    )
    assert plan_of(other, "b300", rescale_threshold=0.0) == plan
