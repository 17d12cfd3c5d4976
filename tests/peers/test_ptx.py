"""The PTX of the peers' kernels, as the DSL compiles it, is printed back unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kernels.emulator as emulator
from kernels.emulator import machine, ptx
from tests.peers import attention, gemm
from tests.peers.attention import Problem

pytestmark = pytest.mark.slow
STOP: dict[str, Any] = {"max_instructions": 1000}  # only the text counts here

KERNELS: dict[str, Callable[[], Any]] = {
    "fa-one-cta": lambda: attention.run(Problem(True, 64, 300, 333, heads=4, kv_heads=2), **STOP),
    "fa-two-ctas": lambda: attention.run(Problem(False, 128, 500, 300, two_ctas=True), **STOP),
    "fa-b300": lambda: attention.run(Problem(True, 128, 300, 300), "b300", **STOP),
    "fa-h100": lambda: attention.run(
        Problem(True, 128, 200, 300, heads=2, kv_heads=1), "h100", **STOP
    ),
    "quack": lambda: gemm.run(gemm.Problem((128, 128)), **STOP),
    "quack-two-ctas": lambda: gemm.run(gemm.Problem((256, 128), (2, 1)), **STOP),
    "quack-h100": lambda: gemm.run(gemm.Problem((128, 128)), "h100", **STOP),
}


@pytest.mark.parametrize("name", KERNELS)
def test_printed_back_unchanged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(machine, "parse", lambda text: texts.append(text) or ptx.parse(text))
    machine._parse_cached.cache_clear()
    emulator.clear_cache()
    report = KERNELS[name]()[0]
    assert [finding.code for finding in report.findings] in ([], ["instruction_limit"])
    (text,) = texts
    parsed = ptx.parse(text)
    assert str(parsed) == text
    assert sum(len(entry.body) for entry in parsed.entries.values()) > 500
