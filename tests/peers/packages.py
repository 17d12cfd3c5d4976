"""The peers' packages, or the reason why a test that needs them is skipped.

flash-attn-4 and quack-kernels are test-time packages (``pip install .[peers]``). Their kernels are
used through their kernel classes; no GPU and no driver is needed to import them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

_DISTRIBUTIONS = {"flash_attn.cute": "flash-attn-4", "quack": "quack-kernels"}


def peer(module: str) -> Any:
    """A module of a peer's package; skips the calling test where the package is not installed."""
    package = "quack" if module.startswith("quack") else "flash_attn.cute"
    for needed in (package, "quack"):
        try:
            found = importlib.util.find_spec(needed)
        except ModuleNotFoundError:  # the parent package
            found = None
        if found is None:
            pytest.skip(f"{_DISTRIBUTIONS[needed]} is not installed: pip install .[peers]")
    with _no_autotuner():
        return importlib.import_module(module)


class _Unused:
    """Stands for classes that importing quack names and that no kernel needs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


@contextmanager
def _no_autotuner() -> Iterator[None]:
    """Where Triton is missing, quack imports without its autotuner, its only user of Triton."""
    name = "quack.autotuner"
    if name in sys.modules or importlib.util.find_spec("triton") is not None:
        yield
        return
    stand_in = ModuleType(name)
    contents = {
        "autotune": lambda *args, **kwargs: lambda function: function,
        "AutotuneConfig": _Unused,
        "Autotuner": _Unused,
    }
    vars(stand_in).update(contents)
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]
