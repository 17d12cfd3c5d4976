"""`supports` and `attention` answer from the same rules, with the same words."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fa4
from fa4 import support
from fa4.arch import Arch, gpu_name
from fa4.features import FEATURES
from kernels.common.plan import FORWARD_ARCHS, GPU_ARCHS, KernelPlan, PlanError
from tests.fa4.problems import random_qkv


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("b200", 100),
        ("GB300", 103),
        ("h100", 90),
        ("sm_90a", 90),
        ("sm_103f", 103),
        ("sm_100", 100),
        ("SM120", 120),
        ("sm_75", 75),
    ],
)
def test_arch_is_a_number(text: str, number: int) -> None:
    assert Arch.parse(text) == Arch(number)


def test_archs_are_ordered_by_number() -> None:
    texts = ["sm_120", "sm_90a", "sm_100a", "sm_75", "sm_103f", "sm_86"]
    ordered = [arch.number for arch in sorted(map(Arch.parse, texts))]
    assert ordered == [75, 86, 90, 100, 103, 120]


@pytest.mark.parametrize("text", ["", "b100", "sm_", "sm_9x", "sm_1000", "100", "none", "sm_90 a"])
def test_unknown_gpu(text: str) -> None:
    with pytest.raises(ValueError, match="unknown GPU.*b200.*h100"):
        Arch.parse(text)
    with pytest.raises(ValueError, match="unknown GPU"):
        fa4.attention(*random_qkv(), backend="emulator", gpu=text or "?")


def test_gpu_name_of_an_arch_is_one_with_a_plan() -> None:
    assert {gpu_name(arch) for arch in ("sm_100", "sm_100a", "sm_100f")} == {"b200"}
    assert gpu_name("sm_103a") == "b300" and gpu_name(" GB200 ") == "gb200"
    assert gpu_name("sm_120") == "sm_120"
    for arch in FORWARD_ARCHS:
        assert KernelPlan.forward(gpu=gpu_name(arch)).arch == arch


@pytest.mark.parametrize("gpu", sorted(GPU_ARCHS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_support_agrees_with_the_plan(gpu: str, dtype: str) -> None:
    """The rules of `supports` accept what a plan accepts, for every head dim."""
    for head_dim in range(1, 600):
        try:
            KernelPlan.forward(gpu=gpu, dtype=dtype, head_dim=head_dim)
            plans = True
        except PlanError:
            plans = False
        answer = fa4.supports(gpu=gpu, dtype=dtype, head_dim=head_dim)
        assert bool(answer) == plans, answer
        assert answer.reason


ASKS: list[dict[str, Any]] = [
    {"head_dim": 72},
    {"head_dim": 8},
    {"head_dim": 144},
    {"head_dim": 64, "head_dim_v": 32},
    {"heads": 7, "kv_heads": 2},
    {"heads": 2, "kv_heads": 4},
    {"dtype": torch.float32},
    {"dtype": torch.float64},
    {"dtype": torch.int32},
    {"dtype": torch.float8_e4m3fn},
    {"softmax_scale": 0.0},
    {"softmax_scale": -1.0},
    {"softmax_scale": 1e-50},
    {"softmax_scale": 1e38 * 3},
    {"head_dim": 24, "heads": 3, "kv_heads": 2, "dtype": torch.float32},
    {"feature": "bwd"},
    {"feature": "bwd", "head_dim": 20, "head_dim_v": 12, "dtype": torch.float64},
    {},
]


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize(
    ("backend", "gpu"),
    [("reference", None), ("emulator", "b200"), ("emulator", "sm_120"), ("emulator", "h100")],
)
def test_the_call_says_what_supports_says(
    ask: dict[str, Any], backend: str, gpu: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"heads": 4, "kv_heads": 4, "head_dim": 64, "dtype": torch.bfloat16} | ask
    feature, scale = shape.pop("feature", "fwd"), shape.pop("softmax_scale", None)
    answer = fa4.supports(feature, gpu=gpu, backend=backend, softmax_scale=scale, **shape)
    dtype = shape.pop("dtype")
    qkv = tuple(t.to(dtype) for t in random_qkv(**shape, dtype=torch.float32))
    if feature == "bwd":
        qkv = tuple(t.requires_grad_() for t in qkv)
    ran = []
    monkeypatch.setattr("fa4.backends.emulator.forward", lambda *_, **__: ran.append(1))
    call = lambda: fa4.api.run(*qkv, causal=False, softmax_scale=scale, backend=backend, gpu=gpu)
    if answer:
        call()
        assert bool(ran) == (backend == "emulator")
    else:
        with pytest.raises(fa4.UnsupportedError) as caught:
            call()
        assert str(caught.value) == answer.reason and isinstance(caught.value, ValueError)
        assert not ran


def test_every_broken_rule_is_named() -> None:
    answer = fa4.supports(
        "bwd", gpu="sm_120", dtype="fp32", head_dim=72, heads=3, kv_heads=2, softmax_scale=-1.0
    )
    for text in ("bwd", "sm_120", "float32", "head_dim 72", "3 heads", "softmax_scale -1"):
        assert text in answer.reason
    assert answer.reason.count("; ") >= 5 and "\n" not in answer.reason


@pytest.mark.parametrize("rule", support.RULES)
def test_each_rule_refuses_something_alone(rule: Any) -> None:
    """No rule is dead, and each gives a way out."""
    broken = {
        "_features_exist": {"features": ("fwd", "varlen")},
        "_gpu_has_a_kernel": {"arch": Arch(90)},
        "_dtype_fits": {"dtype": "float32"},
        "_head_dim_fits": {"head_dim": 72, "head_dim_v": 72},
        "_heads_divide": {"heads": 3, "kv_heads": 2},
        "_scale_fits": {"softmax_scale": -1.0},
    }[rule.__name__]
    ask = support.Ask(**({"backend": "cuda", "arch": Arch(100)} | broken))
    assert [r.__name__ for r in support.RULES if r(ask)] == [rule.__name__]


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown feature 'flash'.*fwd.*bwd"):
        fa4.supports("flash")
    for call in (fa4.supports, lambda **kw: fa4.attention(*random_qkv(), **kw)):
        with pytest.raises(ValueError, match="unknown backend 'gpu'.*auto.*reference"):
            call(backend="gpu")


def test_without_a_gpu_the_answer_says_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "detect_arch", lambda: None)
    for gpu in (None, "none"):
        assert fa4.supports(gpu=gpu) and fa4.supports("bwd", gpu=gpu)
        assert "emulator" in fa4.supports(gpu=gpu).reason
        no = fa4.supports(gpu=gpu, backend="cuda")
        assert not no
        for way in ("reference", "emulator", "ahead of time"):
            assert way in no.reason
        assert fa4.supports(gpu=gpu, backend="emulator")


def test_auto_asks_this_machines_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for arch, ok in ((Arch(103), True), (Arch(90), False), (Arch(120), False)):
        monkeypatch.setattr(support, "detect_arch", lambda arch=arch: arch)
        answer = fa4.supports()
        assert bool(answer) == ok and str(arch) in answer.reason


@pytest.mark.parametrize(
    ("capability", "number"), [((9, 0), 90), ((10, 0), 100), ((10, 3), 103), ((12, 0), 120)]
)
def test_detected_arch(
    capability: tuple[int, int], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert support.detect_arch() == Arch(number)


def test_gpu_that_would_be_ignored_is_an_error() -> None:
    for backend in ("auto", "reference"):
        with pytest.raises(ValueError, match="gpu 'b200' with backend 'reference'.*emulator"):
            fa4.attention(*random_qkv(), backend=backend, gpu="b200")


def test_devices() -> None:
    qkv = random_qkv()
    with pytest.raises(fa4.UnsupportedError, match="tensors on cpu.*backend 'cuda' takes cuda"):
        fa4.attention(*qkv, backend="cuda")
    meta = tuple(t.to("meta") for t in qkv)
    with pytest.raises(fa4.UnsupportedError, match="tensors on meta.*use backend='reference'"):
        fa4.attention(*meta)
    with pytest.raises(fa4.UnsupportedError, match="tensors on meta.*takes cpu"):
        fa4.attention(*meta, backend="emulator")
    assert fa4.attention(*meta, backend="reference").shape == qkv[0].shape


ON = {
    "window_size": (64, 0),
    "softcap": 30.0,
    "dropout_p": 0.1,
    "num_splits": 2,
    "pack_gqa": True,
    "deterministic": True,
}
OFF = [
    ("window_size", (-1, -1)),
    ("window_size", [None, None]),
    ("window_size", None),
    ("softcap", 0.0),
    ("dropout_p", 0.0),
    ("num_splits", 1),
    ("deterministic", False),
    ("alibi_slopes", None),
    ("cu_seqlens_q", None),
]


@pytest.mark.parametrize(("keyword", "value"), OFF)
def test_a_keyword_that_is_off_asks_for_nothing(keyword: str, value: Any) -> None:
    qkv = random_qkv()
    assert torch.equal(fa4.attention(*qkv, **{keyword: value}), fa4.attention(*qkv))


KEYWORDS = sorted(fa4.features._KEYWORDS)


@pytest.mark.parametrize("keyword", KEYWORDS)
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_a_keyword_that_is_on_is_refused_in_the_words_of_supports(
    keyword: str, backend: str
) -> None:
    feature = fa4.features._KEYWORDS[keyword][0]
    value = ON.get(keyword, torch.zeros(3))
    if fa4.supports(feature, backend=backend):
        assert keyword == "deterministic"
        return
    with pytest.raises(fa4.UnsupportedError) as caught:
        fa4.attention(*random_qkv(), backend=backend, **{keyword: value})
    assert str(caught.value) == fa4.supports(feature, backend=backend).reason


def test_every_feature_has_a_keyword_or_is_no_argument() -> None:
    asked = {feature for feature, _ in fa4.features._KEYWORDS.values()}
    assert set(FEATURES) - asked == {"fwd", "bwd"}
    for feature, backend in itertools.product(FEATURES.values(), ("reference", "emulator", "cuda")):
        if backend not in feature.backends:
            assert feature.way_out
