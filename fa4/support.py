"""What runs where: one predicate a rule, asked by `supports` and by `attention` alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from fa4.arch import Arch
from fa4.backends import BACKENDS
from fa4.errors import UnsupportedError
from fa4.features import FEATURES
from fa4.problem import AttentionProblem, dtype_name
from kernels.common.plan import DTYPE_BYTES, FORWARD_ARCHS, GPU_ARCHS, MAX_HEAD_DIM

HEAD_DIM_STEP = 16  # the K of one 16-bit tcgen05.mma (PTX ISA 9.1 section 9.7.16.2.1)
KERNEL_ARCHS = tuple(sorted(Arch.parse(arch) for arch in FORWARD_ARCHS))
REFERENCE_DTYPES = ("bfloat16", "float16", "float32", "float64")
USE_REFERENCE = "use backend='reference'"


@dataclass(frozen=True)
class Support:
    """An answer, true or false as `ok` is; `reason` says what will run, or every broken rule."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Ask:
    """One question. `backend` is never "auto"; `arch` None is a machine without a GPU."""

    backend: str
    arch: Arch | None
    features: tuple[str, ...] = ("fwd",)
    dtype: str = "bfloat16"
    head_dim: int = 128
    head_dim_v: int = 128
    heads: int = 1
    kv_heads: int = 1
    softmax_scale: float | None = None

    @property
    def is_kernel(self) -> bool:
        return self.backend != "reference"


def supports(
    feature: str = "fwd",
    *,
    gpu: str | None = None,
    backend: str = "auto",
    dtype: str | torch.dtype = "bfloat16",
    head_dim: int = 128,
    head_dim_v: int | None = None,
    heads: int = 1,
    kv_heads: int | None = None,
    softmax_scale: float | None = None,
) -> Support:
    """Whether `attention` can do this, and why not, without tensors and without a GPU.

    feature: a name in `fa4.FEATURES`, such as "fwd", "bwd", "varlen". gpu: a GPU name, sm_*, "none"
    for a machine without one, or None: this machine's GPU, and b200 for backend "emulator".
    backend: "auto" asks what tensors on that GPU (on the CPU where there is none) would use.
    head_dim_v: None is head_dim; kv_heads: None is heads. A "no" has the text of the
    `UnsupportedError` that the call raises. Unknown names raise ValueError.
    """
    if feature not in FEATURES:
        raise ValueError(f"unknown feature {feature!r}: give one of {', '.join(FEATURES)}")
    check_backend(backend)
    arch = _arch_asked(gpu, backend)
    if backend == "auto":
        backend = "reference" if arch is None else "cuda"
    ask = Ask(
        backend,
        arch,
        ("fwd",) if feature == "fwd" else ("fwd", feature),
        dtype=dtype_name(dtype),
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        softmax_scale=softmax_scale,
    )
    refusal = why_not(ask)
    return Support(False, refusal) if refusal else Support(True, _what_runs(ask))


def check(
    problem: AttentionProblem, backend: str, arch: Arch | None, features: tuple[str, ...]
) -> None:
    """Raise UnsupportedError where `supports` says no. `features`: those asked beside "fwd"."""
    ask = Ask(
        backend,
        arch,
        ("fwd", *(("bwd",) if problem.needs_grad else ()), *features),
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        softmax_scale=problem.softmax_scale,
    )
    refusal = why_not(ask)
    if refusal:
        raise UnsupportedError(refusal)


def check_backend(backend: str) -> None:
    """Raise ValueError for a name that is no backend."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: give one of {', '.join(BACKENDS)}")


def detect_arch() -> Arch | None:
    """The architecture of this machine's current GPU, None where PyTorch sees none."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return Arch(10 * major + minor)


def _arch_asked(gpu: str | None, backend: str) -> Arch | None:
    none = isinstance(gpu, str) and gpu.strip().lower() == "none"
    if gpu is not None and not none:
        return Arch.parse(gpu)
    if backend == "emulator":  # needs no GPU
        return Arch.parse(GPU_ARCHS["b200"])
    return None if none else detect_arch()


def _what_runs(ask: Ask) -> str:
    if ask.backend == "cuda":
        return f"the Blackwell kernel, on {ask.arch}"
    if ask.backend == "emulator":
        return f"the Blackwell kernel for {ask.arch}, emulated on the CPU"
    where = "" if ask.arch else "; there is no GPU: backend='emulator' runs the Blackwell kernel"
    return f"the PyTorch reference{where}"


# -- rules: each returns None, or one sentence with the value, the rule and the way out ---------


def _features_exist(ask: Ask) -> str | None:
    features = (FEATURES[name] for name in ask.features)
    missing = [f.refusal(ask.backend) for f in features if ask.backend not in f.backends]
    return "; ".join(missing) or None


def _gpu_has_a_kernel(ask: Ask) -> str | None:
    """Code for sm_100a and sm_103a does not run on sm_110 or sm_120, whatever their order."""
    if not ask.is_kernel or ask.arch in KERNEL_ARCHS:
        return None
    ours = " and ".join(map(str, KERNEL_ARCHS))
    emulate = "backend='emulator' (a modelled B200)"
    if ask.arch is None:
        return (
            f"no GPU for backend {ask.backend!r}: {USE_REFERENCE} or {emulate} on CPU tensors, or "
            "compile ahead of time with kernels.blackwell"
        )
    return (
        f"{ask.arch} has no kernel, only {ours} have: {USE_REFERENCE} (tensors on any device), "
        f"or {emulate} on CPU tensors"
    )


def _dtype_fits(ask: Ask) -> str | None:
    if ask.dtype in (DTYPE_BYTES if ask.is_kernel else REFERENCE_DTYPES):
        return None
    if ask.is_kernel:
        kinds = " and ".join(DTYPE_BYTES)
        way = f", or {USE_REFERENCE}" if ask.dtype in REFERENCE_DTYPES else ""
        return f"dtype {ask.dtype}: the kernel takes {kinds}; convert q, k and v{way}"
    return f"dtype {ask.dtype}: the reference takes {', '.join(REFERENCE_DTYPES)}; convert q, k, v"


def _head_dim_fits(ask: Ask) -> str | None:
    if ask.head_dim < 1 or ask.head_dim_v < 1:
        return f"head_dim {ask.head_dim}, head_dim_v {ask.head_dim_v}: at least 1"
    if not ask.is_kernel:
        return None
    if ask.head_dim_v != ask.head_dim:
        return (
            f"head_dim {ask.head_dim} with head_dim_v {ask.head_dim_v} on {ask.arch}: the kernel "
            f"takes equal ones; pad the smaller with zeros, or {USE_REFERENCE}"
        )
    if ask.head_dim % HEAD_DIM_STEP == 0 and ask.head_dim <= MAX_HEAD_DIM:
        return None
    way = USE_REFERENCE
    if ask.head_dim < MAX_HEAD_DIM:
        padded = -(-ask.head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP
        way = f"pad with zeros to {padded} and keep softmax_scale={ask.head_dim}**-0.5, or {way}"
    return (
        f"head_dim {ask.head_dim} on {ask.arch}: the kernel takes multiples of {HEAD_DIM_STEP} up "
        f"to {MAX_HEAD_DIM}; {way}"
    )


def _heads_divide(ask: Ask) -> str | None:
    if ask.heads > 0 and ask.kv_heads > 0 and ask.heads % ask.kv_heads == 0:
        return None
    return (
        f"{ask.heads} heads of q and {ask.kv_heads} of k and v: the former must be a positive "
        "multiple of the latter; repeat or drop heads of k and v"
    )


# softmax_scale * log2(e) must be a normal float32, for the kernel computes in base 2.
_KERNEL_SCALES = (2.0**-125, 2.0**127)


def _scale_fits(ask: Ask) -> str | None:
    """The kernel takes the row maximum before it scales, which a scale <= 0 would turn over; and
    its scale is a float32, which must not be 0 or infinite."""
    if not ask.is_kernel or ask.softmax_scale is None:
        return None
    if ask.softmax_scale <= 0:
        return (
            f"softmax_scale {ask.softmax_scale:g}: the kernel takes positive ones; negate q and "
            f"the scale, or {USE_REFERENCE}"
        )
    low, high = _KERNEL_SCALES
    if low <= ask.softmax_scale <= high:
        return None
    return (
        f"softmax_scale {ask.softmax_scale:g}: the kernel's is a float32 and takes {low:.2g} to "
        f"{high:.2g}; scale q instead, or {USE_REFERENCE}"
    )


RULES: tuple[Callable[[Ask], str | None], ...] = (
    _features_exist,
    _gpu_has_a_kernel,
    _dtype_fits,
    _head_dim_fits,
    _heads_divide,
    _scale_fits,
)


@lru_cache(maxsize=1024)  # a training loop asks the same question at every call
def why_not(ask: Ask) -> str:
    """Every broken rule, joined, or "" where there is none."""

    def broken() -> Iterator[str]:
        for rule in RULES:
            sentence = rule(ask)
            if sentence:
                yield sentence

    return "; ".join(broken())
