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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests with the reason; torch is only imported where there is such a test."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if gpu_items else None
    if reason:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
