"""The demo's input is what it says: a real model's Q, K and V, and the paragraph describes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
INPUT = "fa4/demo/smollm2_layer14.safetensors"


@pytest.fixture(scope="module")
def qkv(root: Path) -> dict[str, torch.Tensor]:
    return load_file(root / INPUT)


def test_shapes_are_the_models_and_ragged(root: Path, qkv: dict[str, torch.Tensor]) -> None:
    assert sorted(qkv) == ["k", "q", "v"]
    seqlen = qkv["q"].shape[1]
    assert qkv["q"].shape == (1, seqlen, HEADS, HEAD_DIM)
    assert qkv["k"].shape == qkv["v"].shape == (1, seqlen, KV_HEADS, HEAD_DIM)
    assert {tensor.dtype for tensor in qkv.values()} == {torch.bfloat16}
    assert seqlen > 256 and seqlen % 128 != 0, "the demo shows two row tiles and a ragged tail"
    assert all(tensor.isfinite().all() for tensor in qkv.values())
    assert (root / INPUT).stat().st_size < 1_000_000


def test_metadata_names_model_license_and_scale(root: Path) -> None:
    with safe_open(root / INPUT, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["license"] == "Apache-2.0"
    assert "SmolLM2-135M" in metadata["model"]
    assert float(metadata["softmax_scale"]) == HEAD_DIM**-0.5
    assert json.dumps(metadata).isascii()
    assert (root / "fa4/demo" / metadata["text"]).is_file()


def test_one_token_for_each_piece_of_the_paragraph(
    root: Path, qkv: dict[str, torch.Tensor]
) -> None:
    """Words, punctuation marks and single digits bound the number of tokens from below."""
    text = (root / "fa4/demo/paragraph.txt").read_text()
    pieces = re.findall(r"\d|[^\W\d]+|[^\w\s]", text)
    assert len(pieces) * 0.9 < qkv["q"].shape[1] < len(text) / 2


def test_the_paragraph_says_what_the_numbers_are(qkv: dict[str, torch.Tensor]) -> None:
    """Outlying key dimensions and an attention sink: what standard normal numbers never show."""
    q, k = (qkv[name][0].double() for name in "qk")
    largest = k.abs().amax(dim=(0, 1))
    assert largest.max() > 3 * largest.median()

    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS // KV_HEADS, dim=1)) / 8
    hidden = torch.ones_like(scores[0]).triu(1).bool()
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    to_first = probabilities[:, 1:, 0].mean()
    assert 0.4 < to_first < 0.6, f"the first token draws {to_first:.0%}"
