"""What is refused before anything else is asked: types, ranks, shapes, dtypes, devices."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy
import pytest
import torch

import fa4
from fa4.problem import AttentionProblem, dtype_name
from tests.fa4.problems import random_qkv


def test_fields_of_a_problem() -> None:
    q, k, v = random_qkv(batch=3, seqlen_q=5, seqlen_k=7, heads=6, kv_heads=2, head_dim_v=16)
    problem = AttentionProblem.from_tensors(q, k, v, causal=True)
    assert dataclasses.astuple(problem) == (
        *(3, 5, 7, 6, 2, 64, 16),
        *("bfloat16", "cpu", True, 0.125, False),
    )
    assert problem.out_shape == (3, 5, 6, 16) and problem.lse_shape == (3, 6, 5)
    assert hash(problem) == hash(AttentionProblem.from_tensors(q, k, v, causal=True))
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.batch = 1  # type: ignore[misc]


def test_needs_grad_follows_autograd() -> None:
    q, k, v = random_qkv()
    assert AttentionProblem.from_tensors(q, k, v.requires_grad_()).needs_grad
    with torch.no_grad():
        assert not AttentionProblem.from_tensors(q, k, v).needs_grad


def _refused(mistake: Any, **options: Any) -> str:
    tensors = dict(zip("qkv", random_qkv(), strict=True))
    tensors |= mistake(**tensors)
    with pytest.raises(ValueError) as caught:
        fa4.attention(**tensors, **options)
    return str(caught.value)


SHAPES = [
    (lambda q, k, v: {"q": q[0]}, ["q has shape (65, 4, 64)", "rank 4"]),
    (lambda q, k, v: {"k": k[:1]}, ["k has batch 1 and q has 2"]),
    (lambda q, k, v: {"v": v[:, 1:]}, ["v has seqlen 96 and k has 97"]),
    (lambda q, k, v: {"v": v[:, :, :1]}, ["v has heads 1 and k has 2"]),
    (lambda q, k, v: {"k": k[..., :32]}, ["k has head_dim 32 and q has 64"]),
    (lambda q, k, v: {"q": q[:, :, :0]}, ["heads is 0", "at least 1"]),
    (lambda q, k, v: {"k": k[:, :, :0], "v": v[:, :, :0]}, ["kv_heads is 0"]),
    (lambda q, k, v: {"v": v[..., :0]}, ["head_dim_v is 0"]),
    (lambda q, k, v: {"q": q[..., :0], "k": k[..., :0]}, ["head_dim is 0"]),
    (lambda q, k, v: {"k": k.float()}, ["mixed dtypes", "q bfloat16, k float32, v bfloat16"]),
    (lambda q, k, v: {"v": v.to("meta")}, ["mixed devices", "v meta"]),
    (lambda q, k, v: {"k": k.to_sparse()}, ["k is a sparse_coo tensor"]),
    (
        lambda q, k, v: {"q": torch.nested.nested_tensor([q[0, :5], q[1]], layout=torch.jagged)},
        ["q is a nested tensor"],
    ),
    # every broken rule in one error
    (
        lambda q, k, v: {"k": k[:1, :, :, :32], "v": v[:, 1:]},
        ["k has batch 1", "v has batch 2", "v has seqlen 96", "k has head_dim 32"],
    ),
    (lambda q, k, v: {"q": q[0], "k": k.float()}, ["q has shape", "mixed dtypes"]),
]


@pytest.mark.parametrize(("mistake", "texts"), SHAPES)
@pytest.mark.parametrize("backend", ["auto", "reference", "emulator", "cuda"])
def test_bad_tensors(mistake: Any, texts: list[str], backend: str) -> None:
    message = _refused(mistake, backend=backend)
    assert [text for text in texts if text not in message] == []
    assert "\n" not in message


TYPES = [
    ({"q": [[1.0]]}, "q is a list"),
    ({"v": numpy.zeros((2, 97, 2, 64), numpy.float32)}, "v is a ndarray"),
    ({"causal": 1}, "causal is a int"),
    ({"causal": None}, "causal is a NoneType"),
    ({"softmax_scale": True}, "softmax_scale is a bool"),
    ({"softmax_scale": "0.1"}, "softmax_scale is a str"),
    ({"softmax_scale": torch.tensor(0.1)}, "softmax_scale is a Tensor"),
    ({"causual": True}, "unexpected keyword argument 'causual'"),
]


@pytest.mark.parametrize(("mistake", "text"), TYPES)
def test_bad_types(mistake: dict[str, Any], text: str) -> None:
    arguments = dict(zip("qkv", random_qkv(), strict=True)) | mistake
    with pytest.raises(TypeError, match=text):
        fa4.attention(**arguments)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_scale_is_finite(scale: float) -> None:
    with pytest.raises(ValueError, match=f"softmax_scale is {scale}.*finite"):
        fa4.attention(*random_qkv(), softmax_scale=scale)


def test_scale_takes_any_real_number() -> None:
    qkv = random_qkv()
    default = fa4.attention(*qkv)
    for scale in (0.125, numpy.float64(0.125), numpy.float32(0.125)):
        assert torch.equal(fa4.attention(*qkv, softmax_scale=scale), default)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (torch.bfloat16, "bfloat16"),
        ("bf16", "bfloat16"),
        ("FP16", "float16"),
        ("double", "float64"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.int32, "int32"),
    ],
)
def test_dtype_name(given: Any, name: str) -> None:
    assert dtype_name(given) == name
