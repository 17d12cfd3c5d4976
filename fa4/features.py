"""Features by name: where each exists, and the keyword that asks for it.

`attention` knows the keywords of features that it lacks, by the names that other libraries use, so
that it can refuse them with a reason instead of ignoring them.
"""

from __future__ import annotations

from dataclasses import dataclass

_ALL = ("reference", "emulator", "cuda")


@dataclass(frozen=True)
class Feature:
    """`backends`: where it exists. `way_out`: what to do where it does not."""

    name: str
    what: str
    way_out: str
    backends: tuple[str, ...] = ()

    def refusal(self, backend: str) -> str:
        where = f"backend {backend!r} has" if self.backends else "fa4 has"
        return f"{self.name} ({self.what}): {where} no such feature; {self.way_out}"


FEATURES = {
    feature.name: feature
    for feature in (
        Feature("fwd", "forward pass", "", _ALL),
        Feature(
            "bwd",
            "gradients",
            "call it under torch.no_grad() or on detached tensors, or use backend='reference'",
            ("reference",),
        ),
        Feature("deterministic", "the same bits at every run", "", _ALL),
        Feature(
            "varlen", "packed sequences of many lengths", "call attention once for each sequence"
        ),
        Feature("paged", "K and V in pages", "gather the pages into one tensor first"),
        Feature("split_kv", "keys split over CTAs", "leave num_splits at 1"),
        Feature("window", "sliding window", "leave window_size unbounded"),
        Feature("softcap", "tanh-capped scores", "leave softcap at 0"),
        Feature("fp8", "8-bit inputs", "convert q, k and v to bfloat16"),
        Feature("block_sparse", "skipped blocks", "use torch.nn.attention.flex_attention"),
        Feature("sinks", "attention sinks", "rescale out by sigmoid(lse - sink), with return_lse"),
        Feature(
            "score_mod",
            "modified or masked scores",
            "use torch.nn.attention.flex_attention",
        ),
        Feature("mla", "absorbed latent attention", "give decompressed k and v"),
        Feature("dropout", "dropped probabilities", "leave dropout_p at 0"),
        Feature("alibi", "linear position bias", "use torch.nn.attention.flex_attention"),
        Feature("append_kv", "writes to a KV cache", "write the new keys and values first"),
        Feature("rotary", "rotary embedding inside attention", "rotate q and k first"),
        Feature("pack_gqa", "a choice of how heads share a tile", "leave pack_gqa out"),
    )
}

# keyword: (the feature it asks for, the values that ask for nothing)
_KEYWORDS: dict[str, tuple[str, tuple[object, ...]]] = {
    "deterministic": ("deterministic", (False,)),
    "window_size": ("window", ((-1, -1), (None, None), (-1, None), (None, -1))),
    "softcap": ("softcap", (0,)),
    "dropout_p": ("dropout", (0,)),
    "num_splits": ("split_kv", (1,)),
    "pack_gqa": ("pack_gqa", ()),
}
_KEYWORDS |= {
    keyword: (feature, ())
    for feature, keywords in {
        "varlen": "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k",
        "paged": "page_table block_table",
        "fp8": "q_descale k_descale v_descale",
        "block_sparse": "block_sparse_tensors block_mask",
        "sinks": "learnable_sink sinks",
        "score_mod": "score_mod mask_mod attn_mask attn_bias",
        "mla": "qv",
        "alibi": "alibi_slopes",
        "append_kv": "k_new v_new k_cache v_cache",
        "rotary": "rotary_cos rotary_sin",
    }.items()
    for keyword in keywords.split()
}


def features_asked(keywords: dict[str, object]) -> tuple[str, ...]:
    """The features that these keyword arguments ask for.

    None, and a value that means "off" (``dropout_p=0.0``), ask for nothing. TypeError for a keyword
    that no feature has.
    """
    asked = []
    for keyword, value in keywords.items():
        if keyword not in _KEYWORDS:
            raise TypeError(f"attention() got an unexpected keyword argument {keyword!r}")
        feature, off = _KEYWORDS[keyword]
        if value is not None and not _is_off(value, off):
            asked.append(feature)
    return tuple(dict.fromkeys(asked))


def _is_off(value: object, off: tuple[object, ...]) -> bool:
    if isinstance(value, list):
        value = tuple(value)
    return isinstance(value, int | float | tuple) and value in off
