"""What every test shares: where the tree is, and which tests this machine cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the checkout."""
    return ROOT


def _why_no_gpu() -> str | None:
    """Why tests marked `gpu` cannot run here, or None where they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="also what takes minutes a test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `exhaustive` tests unless asked for, and skip `gpu` tests with the reason; torch is
    only imported where there is such a test."""
    if not config.getoption("--exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in set(left_out)]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if gpu_items else None
    if reason:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
