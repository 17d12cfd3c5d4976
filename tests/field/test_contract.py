"""What a caller may rely on: answers for every arch and feature, signatures, imports, refusals."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fa4
from fa4.cli import main
from tests.fa4.problems import random_qkv
from tests.field.cases import refused

ARCHS = "sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_103 sm_110 sm_120 sm_121 none".split()
FEATURES = (
    "fwd bwd varlen paged split_kv fp8 block_sparse sinks score_mod deterministic mla dropout "
    "alibi append_kv rotary"
).split()
KEYWORD = {
    "varlen": {"cu_seqlens_q": torch.tensor([0, 32])},
    "paged": {"page_table": torch.zeros(2, 4, dtype=torch.int32)},
    "split_kv": {"num_splits": 4},
    "fp8": {"q_descale": torch.ones(2, 2)},
    "block_sparse": {"block_mask": object()},
    "sinks": {"sinks": torch.zeros(2)},
    "score_mod": {"score_mod": lambda score, *_: score},
    "deterministic": {"deterministic": True},
    "mla": {"qv": torch.zeros(2, 32, 2, 64)},
    "dropout": {"dropout_p": 0.1},
    "alibi": {"alibi_slopes": torch.ones(2)},
    "append_kv": {"k_new": torch.zeros(2, 1, 2, 64)},
    "rotary": {"rotary_cos": torch.ones(32, 16), "rotary_sin": torch.ones(32, 16)},
}


def _call(arch: str, feature: str) -> Any:
    """Ask for the feature on the arch, as far as a machine without a GPU can."""
    qkv = random_qkv(seqlen_q=32, seqlen_k=32, heads=2, kv_heads=2)
    if feature == "bwd":
        qkv = tuple(t.requires_grad_() for t in qkv)
    where = {} if arch == "none" else {"backend": "emulator", "gpu": arch}
    return fa4.attention(*qkv, **where, **KEYWORD.get(feature, {}))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_arch_and_feature_has_a_clear_answer(
    arch: str,
    feature: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """FC29. DA#2376, #2572, #2589, #2590, #2763, vllm-project/vllm#46002, flashinfer#3327."""
    plans: list[Any] = []

    class Emulated(Exception):
        pass

    def emulate(problem: Any, plan: Any, *_: Any, **__: Any) -> None:
        plans.append(plan)
        raise Emulated

    monkeypatch.setattr("fa4.backends.emulator.forward", emulate)
    backend = "auto" if arch == "none" else "emulator"
    answer = fa4.supports(feature, gpu=arch, backend=backend)
    assert answer.reason
    argv = ["supports", "--gpu", arch, "--backend", backend, "--feature", feature, "--json"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out) == {
        feature: {"ok": answer.ok, "reason": answer.reason}
    }
    if not answer:
        with pytest.raises(fa4.UnsupportedError) as caught:
            _call(arch, feature)
        assert str(caught.value) == answer.reason and not plans
    elif arch == "none":
        assert _call(arch, feature).shape == (2, 32, 2, 64)
    else:
        with pytest.raises(Emulated):
            _call(arch, feature)
        assert plans[0].arch.rstrip("af") == arch


def test_archs_with_a_kernel() -> None:
    """FC29: sm_103 takes the sm_100 path, sm_120 and sm_121 never do, by number and not by text."""
    ours = [arch for arch in ARCHS[:-1] if fa4.supports(gpu=arch)]
    assert ours == ["sm_100", "sm_103"]
    for text in ("sm_100a", "sm_100f", "sm_103a", "sm_103f", "b200", "GB200", "b300", "gb300"):
        assert fa4.supports(gpu=text)
    for text in ("sm_120a", "sm_120f", "sm_121a", "sm_90a", "h100", "h200"):
        assert not fa4.supports(gpu=text)
    for way in ("reference", "emulator"):
        assert way in fa4.supports(gpu="none").reason + fa4.supports(gpu="sm_120").reason


WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
import importlib.metadata as metadata
version = metadata.version
def fake(name):
    if name in {versions!r}:
        found = {versions!r}[name]
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found
    return version(name)
metadata.version = fake
import torch, fa4
q = torch.randn(1, 4, 2, 64, dtype=torch.bfloat16)
print(fa4.attention(q, q, q).shape)
try:
    fa4.attention(q, q, q, backend="emulator")
except fa4.MissingDependencyError as error:
    print(isinstance(error, ImportError), error)
"""


@pytest.mark.parametrize(
    ("blocked", "versions", "text"),
    [
        (["cutlass"], {"nvidia-cutlass-dsl": None}, "nvidia-cutlass-dsl is not installed: pip"),
        (
            [],
            {"nvidia-cutlass-dsl": "4.7.1"},
            "nvidia-cutlass-dsl 4.7.1 is not in the tested >=4.8",
        ),
        (
            [],
            {"nvidia-cutlass-dsl": "4.9.0"},
            "nvidia-cutlass-dsl 4.9.0 is not in the tested >=4.8",
        ),
    ],
)
def test_import_without_the_dsl_or_with_another(
    blocked: list[str], versions: dict[str, str | None], text: str, root: Path
) -> None:
    """FC30 a, b. DA#2205, DA#2234, NVIDIA/cutlass#3001 and #3034: a version message, and only when
    the missing piece is used."""
    code = WITHOUT.format(blocked=blocked, versions=versions)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shape, message = done.stdout.splitlines()
    assert shape == "torch.Size([1, 4, 2, 64])" and message.startswith("True ") and text in message


def test_own_top_level_names(root: Path) -> None:
    """FC30 a. NVIDIA/Megatron-LM#6545, prime-rl#1949: no directory that another wheel owns."""
    assert not (root / "flash_attn").exists()
    assert not list(root.glob("*/flash_attn"))
    assert fa4.__name__ == "fa4"


def test_signature() -> None:
    """FC30 d, e. DA PR#2700, diffusers#13173, TorchSpec#170: what returns what, by keyword only."""
    parameters = list(inspect.signature(fa4.attention).parameters.values())
    assert [p.name for p in parameters[:3]] == ["q", "k", "v"]
    assert {p.kind.name for p in parameters[3:]} == {"KEYWORD_ONLY", "VAR_KEYWORD"}
    q, k, v = random_qkv()
    with pytest.raises(TypeError):
        fa4.attention(q, k, v, True)
    out = fa4.attention(q, k, v)
    assert isinstance(out, torch.Tensor)
    pair = fa4.attention(q, k, v, return_lse=True)
    assert isinstance(pair, tuple) and len(pair) == 2 and torch.equal(pair[0], out)


@pytest.mark.parametrize("window", [None, (-1, -1), [-1, -1], (None, None), [None, -1]])
def test_unbounded_windows(window: Any) -> None:
    """FC30 c. meta-pytorch/MSLK#397: None, a tuple and a list; unbounded on both sides is dense."""
    qkv = random_qkv()
    assert torch.equal(fa4.attention(*qkv, window_size=window), fa4.attention(*qkv))


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_mixed_dtypes_and_gradients_on_an_inference_path(backend: str) -> None:
    """FC30 f."""
    q, k, v = random_qkv()
    with pytest.raises(ValueError, match="mixed dtypes.*k float16"):
        fa4.attention(q, k.half(), v, backend=backend)
    with pytest.raises(fa4.UnsupportedError, match="bwd.*no_grad.*reference"):
        fa4.attention(q.requires_grad_(), k, v, backend="emulator")


@pytest.mark.parametrize("keyword", ["dropout_p", "alibi_slopes"])
def test_dropout_and_alibi_are_not_ignored(keyword: str) -> None:
    """FC30 h. DA#1251, DA#1666."""
    feature = {"dropout_p": "dropout", "alibi_slopes": "alibi"}[keyword]
    refused(feature, **{keyword: {"dropout_p": 0.5}.get(keyword, torch.ones(2))})


def test_inputs_are_not_changed() -> None:
    """FC28, FC30. thu-ml/SageAttention#401: the caller's K was smoothed in place."""
    qkv = random_qkv()
    before = [t.clone() for t in qkv]
    for causal in (False, True):
        for scale in (None, 0.0, -1.0):
            fa4.attention(*qkv, causal=causal, softmax_scale=scale)
    assert all(torch.equal(a, b) for a, b in zip(qkv, before, strict=True))


# Cases of features that are not there yet: they are refused, and `supports` says so.
NOT_YET = {
    "FC05 ragged batches (DA#2562, DA#1713, DA#1254, candle#3603, DA#2192)": (
        "varlen",
        [{"cu_seqlens_q": torch.tensor([0, 5, 5, 9])}, {"max_seqlen_q": 1}],
    ),
    "FC08 stale cache past the used length (DA#2374, DA#1745, DA#1974, DA#2163)": (
        "varlen",
        [{"seqused_k": torch.tensor([32, 16])}],
    ),
    "FC10 paged KV (DA#2367, DA PR#2745, sglang#35757, sglang#32902)": (
        "paged",
        [{"page_table": torch.zeros(2, 2, dtype=torch.int32)}],
    ),
    "FC16 windows (DA#1133, DA#1116, DA#2199, transformers#39408)": (
        "window",
        [{"window_size": w} for w in ((-1, 0), (None, 0), (64, -1), (32, 64), (0, 0), [64, 0])],
    ),
    "FC16 mask_mod beside causal (torchtitan#2267)": (
        "score_mod",
        [{"mask_mod": lambda *_: True, "causal": True}],
    ),
    "FC17 softcap (vllm#56578, DA#2396, DA#2366)": (
        "softcap",
        [{"softcap": 15.0}, {"softcap": 50.0}],
    ),
    "FC21 split KV (DA PR#2595, DA#1897, flashinfer#1675)": ("split_kv", [{"num_splits": 7}]),
    "FC23 max_seqlen in every form (DA#2635, transformers#48353)": (
        "varlen",
        [{"max_seqlen_k": m} for m in (100, torch.tensor(128))],
    ),
    "FC26 block sparsity (DA PR#2258, DA PR#2504)": (
        "block_sparse",
        [{"block_sparse_tensors": (torch.zeros(1),)}],
    ),
}


@pytest.mark.parametrize(("feature", "asks"), NOT_YET.values(), ids=NOT_YET)
def test_features_that_are_not_there_are_refused(feature: str, asks: list[dict[str, Any]]) -> None:
    for keywords in asks:
        refused(feature, **keywords)
