"""The peers' public functions, on tensors of a CUDA device that stands for a GPU, against float64.

They compile for TVM-FFI and launch for themselves: nothing of theirs is changed. Both packages
remember their GPU, which is a B200 here.
"""

from __future__ import annotations

import math

import pytest
import torch

from kernels.emulator import stand_in
from tests.peers.packages import peer

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_disk_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """quack would keep what it compiles in the user's home."""
    monkeypatch.setattr(peer("quack.cache"), "CACHE_ENABLED", False)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=make).to(dtype)


def exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().double()


def close(result: torch.Tensor, wanted: torch.Tensor, plain: torch.Tensor) -> None:
    """No further from float64 than twice what plain PyTorch in the same types is."""
    error = (exact(result) - wanted).abs().max()
    assert error <= 2 * (exact(plain) - wanted).abs().max() + 1e-6, error


# --- flash-attn-4 -------------------------------------------------------------------------------


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal, bottom-right; [batch, seqlen, heads, dim], in the inputs' type."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (
        t.transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
    )
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def test_flash_attn_func() -> None:
    q, k, v = (normal(1, s, h, 64, seed=s + h) for s, h in ((130, 2), (190, 1), (190, 1)))
    with stand_in("b200") as session:
        flash = peer("flash_attn.cute.interface").flash_attn_func
        out, *_ = flash(q.cuda(), k.cuda(), v.cuda(), causal=True)
    close(out, attention(exact(q), exact(k), exact(v)), attention(q, k, v))
    assert session.ok and session.reports


# --- quack --------------------------------------------------------------------------------------


def test_rmsnorm_of_a_number_of_rows_that_fills_no_tile() -> None:
    """Rows that are not there are read from shared memory that nobody wrote, and masked later."""
    x, weight = normal(9, 1024, seed=1), normal(1024, seed=2, dtype=torch.float32)
    with stand_in("b200", unwritten="poison") as session:
        out = peer("quack.rmsnorm").rmsnorm(x.cuda(), weight.cuda())
    close(
        out,
        torch.nn.functional.rms_norm(exact(x), (1024,), exact(weight), 1e-6),
        torch.nn.functional.rms_norm(x.float(), (1024,), weight, 1e-6).bfloat16(),
    )
    assert len(session.reports) == 1


def test_softmax_and_its_gradient() -> None:
    x, d_out = normal(8, 1000, seed=3), normal(8, 1000, seed=4)
    with stand_in("b200") as session:
        leaf = x.cuda().requires_grad_()
        out = peer("quack.softmax").softmax(leaf)
        (d_x,) = torch.autograd.grad(out, leaf, d_out.cuda())
    reference, plain = exact(x).requires_grad_(), x.clone().requires_grad_()
    wanted, usual = reference.softmax(-1), plain.softmax(-1)
    close(out, wanted.detach(), usual)
    close(
        d_x,
        torch.autograd.grad(wanted, reference, exact(d_out))[0],
        torch.autograd.grad(usual, plain, d_out)[0],
    )
    assert len(session.reports) == 2


def test_topk_is_exact() -> None:
    x = normal(6, 256, seed=5, dtype=torch.float32)
    with stand_in("b200"):
        values, indices = peer("quack.topk").topk(x.cuda(), 8)
    wanted = x.topk(8)
    assert torch.equal(indices.cpu().long(), wanted.indices)
    torch.testing.assert_close(values.cpu(), wanted.values, rtol=0, atol=1e-4)


def test_gemm_with_an_activation() -> None:
    a, b = normal(200, 192, seed=6), normal(192, 256, seed=7)
    with stand_in("b200"):
        gemm_act = peer("quack.gemm_interface").gemm_act
        before, out = gemm_act(a.cuda(), b.cuda(), activation="relu", tuned=False)
    product, plain = exact(a) @ exact(b), (a.float() @ b.float()).bfloat16()
    close(before, product, plain)
    close(out, product.relu(), plain.relu())
