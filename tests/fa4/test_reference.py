"""The reference against the definition in float64: values, gradients, edges, time and memory."""

from __future__ import annotations

import itertools

import pytest
import torch

import fa4
from fa4.backends import blockwise, flash_cpu
from tests.fa4.bench_reference import figures
from tests.fa4.problems import assert_numbers_rule, dense_attention, random_qkv

LENGTHS = [(65, 65), (1, 300), (129, 257), (300, 70), (5, 2), (64, 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_values(seqlen_q: int, seqlen_k: int, causal: bool, dtype: torch.dtype) -> None:
    qkv = random_qkv(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=6, dtype=dtype)
    out, lse = assert_numbers_rule(*qkv, causal=causal)
    assert out.dtype == dtype and out.is_contiguous()
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert lse.is_contiguous()


@pytest.mark.parametrize("head_dim", [1, 3, 8, 46, 72, 148, 256, 512])
def test_any_head_dim(head_dim: int) -> None:
    assert_numbers_rule(*random_qkv(head_dim=head_dim), causal=True)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 100), (16, 48)])
def test_head_dim_v(head_dim: int, head_dim_v: int) -> None:
    out, _ = assert_numbers_rule(*random_qkv(head_dim=head_dim, head_dim_v=head_dim_v))
    assert out.shape[-1] == head_dim_v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.3, 1e-3, 0.0, -0.2])
def test_softmax_scale(scale: float, causal: bool) -> None:
    assert_numbers_rule(*random_qkv(dtype=torch.float32), causal=causal, softmax_scale=scale)


@pytest.mark.parametrize("causal", [False, True])
def test_both_forwards_agree(causal: bool) -> None:
    """PyTorch's kernel and ours share no code; blocks here are many and ragged."""
    q, k, v = (
        t.transpose(1, 2) for t in random_qkv(seqlen_q=700, seqlen_k=2500, dtype=torch.float64)
    )
    ours = blockwise.forward(q, k, v, causal=causal, scale=0.1)
    torchs = flash_cpu.forward(q, k, v, causal=causal, scale=0.1)
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.4, 0.0, -0.4])
@pytest.mark.parametrize("head_dim_v", [5, 3])
def test_gradcheck(causal: bool, scale: float, head_dim_v: int) -> None:
    qkv = random_qkv(seqlen_q=6, seqlen_k=4, head_dim=5, head_dim_v=head_dim_v, dtype=torch.float64)
    qkv = tuple(t.requires_grad_() for t in qkv)
    # Rows 0 and 1 see no key where causal: their lse is -inf, which has no finite difference.
    first = 2 if causal else 0

    def out_and_lse(*qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = fa4.attention(*qkv, causal=causal, softmax_scale=scale, return_lse=True)
        return out, lse[:, :, first:]

    assert torch.autograd.gradcheck(out_and_lse, qkv)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(130, 1100), (700, 90)])
def test_gradients_over_many_blocks(
    seqlen_q: int, seqlen_k: int, dtype: torch.dtype, causal: bool
) -> None:
    qkv = random_qkv(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=12, kv_heads=3, dtype=dtype)
    exact_in = tuple(t.double().requires_grad_() for t in qkv)
    ours_in = tuple(t.clone().requires_grad_() for t in qkv)
    exact = dense_attention(*exact_in, causal=causal, scale=0.125)
    ours = fa4.attention(*ours_in, causal=causal, return_lse=True)
    seen = exact[1] > -torch.inf
    weights = [torch.randn_like(exact[0]), torch.randn_like(exact[1])]
    for out, lse in (exact, ours):
        lse = torch.where(seen, lse, 0.0)
        loss = (out * weights[0].to(out.dtype)).sum() + (lse * weights[1].to(lse.dtype)).sum()
        loss.backward()
    for a, b in zip(ours_in, exact_in, strict=True):
        assert a.grad.dtype == dtype
        rms = (a.grad.double() - b.grad).square().mean().sqrt() / b.grad.square().mean().sqrt()
        # bfloat16: the gradient of out, out itself and the result are rounded to 8 bits.
        assert rms < (2**-8 if dtype == torch.bfloat16 else 1e-6)


def test_rows_without_a_key() -> None:
    qkv = tuple(t.requires_grad_() for t in random_qkv(seqlen_q=100, seqlen_k=30))
    out, lse = fa4.attention(*qkv, causal=True, return_lse=True)
    assert (out[:, :70] == 0).all() and (lse[:, :, :70] == -torch.inf).all()
    assert out.isfinite().all() and lse[:, :, 70:].isfinite().all()
    (out.float().sum() + lse[:, :, 70:].sum()).backward()
    assert (qkv[0].grad[:, :70] == 0).all()
    assert all(t.grad.isfinite().all() and (t.grad != 0).any() for t in qkv)


NONFINITE = list(
    itertools.product(
        [torch.nan, torch.inf, -torch.inf], ["q", "k", "v"], [False, True], [flash_cpu, blockwise]
    )
)


@pytest.mark.parametrize(("value", "where", "causal", "forward"), NONFINITE)
def test_nan_and_infinity_propagate(
    value: float, where: str, causal: bool, forward: object
) -> None:
    """The same elements of out are NaN, infinite and finite as in PyTorch's plain attention."""
    tensors = dict(
        zip("qkv", random_qkv(seqlen_q=40, seqlen_k=40, dtype=torch.float32), strict=True)
    )
    tensors[where][1, 13, 1, 5] = value
    exact, _ = dense_attention(*tensors.values(), causal=causal, scale=0.125)
    q, k, v = (t.transpose(1, 2) for t in tensors.values())
    out = forward.forward(q, k, v, causal=causal, scale=0.125)[0].transpose(1, 2)
    torch.testing.assert_close(out, exact, equal_nan=True)
    assert not out.isfinite().all()


@pytest.mark.parametrize("forward", [flash_cpu, blockwise])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_minus_infinity_are_unseen_keys(forward: object, causal: bool) -> None:
    """In one head every score is -inf, in the other those of some keys, in both parts of a mask."""
    q, k, v = random_qkv(seqlen_q=20, seqlen_k=50, heads=2, dtype=torch.float32)
    q[..., 0] = 1.0
    k[:, :, 0, 0] = k[:, ::3, 1, 0] = -torch.inf
    exact, exact_lse = dense_attention(q, k, v, causal=causal, scale=0.125)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = forward.forward(q, k, v, causal=causal, scale=0.125)
    torch.testing.assert_close(out.transpose(1, 2), exact)
    torch.testing.assert_close(lse, exact_lse)
    assert (out[:, 0] == 0).all() and (lse[:, 0] == -torch.inf).all()
    assert (out[:, 1] != 0).all() and lse[:, 1].isfinite().all()


AWKWARD = {
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "dim not last": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    "every second": lambda t: torch.stack([t, t + 1], -1).flatten(3)[..., ::2],
    "reversed twice": lambda t: t.flip(1).flip(1),
}


@pytest.mark.parametrize("awkward", AWKWARD.values(), ids=AWKWARD)
@pytest.mark.parametrize("causal", [False, True])
def test_strides_do_not_change_a_bit(awkward: object, causal: bool) -> None:
    qkv = random_qkv(dtype=torch.float32)
    exact = fa4.attention(*qkv, causal=causal, return_lse=True)
    views = tuple(awkward(t) for t in qkv)
    before = [t.clone() for t in views]
    for a, b in zip(fa4.attention(*views, causal=causal, return_lse=True), exact, strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(views, before, strict=True))


def test_unaligned_addresses() -> None:
    """BLAS chooses its order of summation by the address, so these agree but for rounding."""
    qkv = random_qkv(dtype=torch.float32)
    views = tuple(torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in qkv)
    assert all(t.data_ptr() % 16 for t in views)
    torch.testing.assert_close(fa4.attention(*views), fa4.attention(*qkv), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_expanded_inputs(dim: int) -> None:
    """Stride 0, in every dimension; PyTorch's kernel would misread a row stride of 0."""
    q, k, v = random_qkv(dtype=torch.float32)
    k, v = (t.narrow(dim, 0, 1).expand(t.shape) for t in (k, v))
    assert k.stride(dim) == 0
    for causal in (False, True):
        ours = fa4.attention(q, k, v, causal=causal)
        assert torch.equal(ours, fa4.attention(q, k.contiguous(), v.contiguous(), causal=causal))


@pytest.mark.parametrize("threads", [1, 4])
def test_repeats_bitwise(threads: int) -> None:
    torch.set_num_threads(threads)
    qkv = tuple(t.requires_grad_() for t in random_qkv(seqlen_q=600, seqlen_k=600))
    runs = []
    for _ in range(3):
        out = fa4.attention(*qkv, causal=True, deterministic=True)
        runs.append((out, *torch.autograd.grad(out, qkv, torch.ones_like(out))))
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


def test_memory_is_linear_in_the_sequence() -> None:
    """No allocation of the size of the scores, forward or backward: counted by the profiler."""

    def most_allocated(seqlen: int) -> int:
        qkv = random_qkv(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads=1, kv_heads=1)
        qkv = tuple(t.requires_grad_() for t in qkv)
        with torch.profiler.profile(profile_memory=True) as profile:
            out, lse = fa4.attention(*qkv, causal=True, return_lse=True)
            (out.float().sum() + lse.sum()).backward()
        return max(event.cpu_memory_usage for event in profile.events())

    scores_bytes = 4096 * 4096 * 4
    assert most_allocated(4096) < scores_bytes / 4


@pytest.mark.slow
def test_figures() -> None:
    """1 head, 8192 tokens, head_dim 128: within twice PyTorch's time, under 300 MB above inputs."""
    measured = figures()
    assert measured["times_torch"] <= 2.0, measured
    assert measured["peak_bytes_above_inputs"] < 300e6, measured


def test_a_second_derivative_is_refused_not_wrong() -> None:
    """Also where the incoming gradient needs none: a gradient penalty."""
    w = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 5, 1, 8, dtype=torch.float64, requires_grad=True)
    out = fa4.attention(x @ w, x, x)
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(fa4.UnsupportedError, match="second derivative.*MATH"):
        torch.autograd.grad(dx.square().sum(), w)
    # A graph that nobody differentiates again costs nothing but its memory.
    torch.autograd.grad(fa4.attention(x @ w, x, x).sum(), w, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_result_can_be_changed_in_place(dtype: torch.dtype) -> None:
    q = torch.randn(1, 6, 2, 8, dtype=dtype, requires_grad=True)
    k, v = torch.randn(2, 1, 7, 2, 8, dtype=dtype)
    out, lse = fa4.attention(q, k, v, return_lse=True)
    expected = out.detach() * 2 + 1
    out *= 2
    out += 1
    lse += 1
    assert torch.equal(out.detach(), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_without_weight_are_nan_and_rows_without_keys_zero(causal: bool) -> None:
    """Every visible score of head 0 is -inf: 0 / 0 in PyTorch. More queries than keys, so that a
    causal mask also leaves rows that see nothing."""
    q, k, v = random_qkv(seqlen_q=50, seqlen_k=20, heads=2, dtype=torch.float32)
    q[..., 0], k[:, :, 0, 0] = 1.0, -torch.inf
    out, lse = fa4.attention(q, k, v, causal=causal, return_lse=True)
    blind = 30 if causal else 0
    assert (out[:, :blind] == 0).all() and out[:, blind:, 0].isnan().all()
    assert out[:, :, 1].isfinite().all() and (lse[:, 0] == -torch.inf).all()
    scores = (q.transpose(1, 2) @ k.transpose(1, 2).mT) * 0.125
    if causal:
        seen = torch.ones(50, 20, dtype=torch.bool).tril(-30)
        scores = scores.masked_fill(~seen, -torch.inf)
    plain = (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(out[:, blind:], plain[:, blind:], equal_nan=True)


def test_empty_keys_stay_zero() -> None:
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 0, 2, 8)
    out, lse = fa4.attention(q, k, k, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
