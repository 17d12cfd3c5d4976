# SPDX-License-Identifier: Apache-2.0
"""Seeded faults: a kernel's source with a line changed, imported beside the original.

Changing the source, not the PTX, plants the fault where an author would make it, and keeps the
line numbers of reports right (as long as the replacement has as many lines as what it replaces).
"""

import importlib.util
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

_serial = itertools.count()


def load_mutated(source: Path, edits: Mapping[str, str], folder: Path) -> ModuleType:
    """Imports ``source`` from ``folder`` with each key of ``edits`` replaced by its value.

    Raises AssertionError when a key does not occur exactly once: a fault that is not planted must
    not pass for one that is not noticed.
    """
    text = source.read_text()
    for old, new in edits.items():
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {source}"
        text = text.replace(old, new)
    name = f"{source.stem}_mutated_{next(_serial)}"
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and the DSL look the module up while it is loading
    spec.loader.exec_module(module)
    return module
