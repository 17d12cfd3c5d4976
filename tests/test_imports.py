"""Who may import whom, read from syntax trees, and what an import loads, in a fresh process.

    fa4                         everything below
    roofline                    kernels.common.plan; kernels.emulator.records, for the cycle model
    kernels.blackwell, .hopper  kernels.common
    kernels.common              itself; kernels.common.plan: neither the DSL nor torch
    kernels.emulator            no other part; the DSL and torch only in its host-side capture

A kernel file may have a `main` that runs it on the emulator; imports inside it are the program's,
not the kernel's.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PARTS = ("fa4", "roofline", "kernels")
CAPTURE = "kernels.emulator.capture"
HEAVY = ("cutlass", "cuda", "torch")


@dataclass(frozen=True)
class Import:
    """One import: `importer` is the module that does it, `target` the module or member imported."""

    importer: str
    target: str
    line: int
    in_main: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def is_in(name: str, *packages: str) -> bool:
    """Whether the dotted name is one of the packages or inside one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def module_name(path: Path, root: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def resolve(node: ast.ImportFrom, importer: str, is_package: bool) -> str:
    """The absolute module of a `from x import y`, relative ones included."""
    if not node.level:
        return node.module or ""
    base = importer.split(".") if is_package else importer.split(".")[:-1]
    base = base[: len(base) - (node.level - 1)]
    return ".".join([*base, node.module] if node.module else base)


def targets(node: ast.AST, importer: str, is_package: bool) -> list[str]:
    """What one node imports; import_module("x") and __import__("x") count."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = resolve(node, importer, is_package)
        return [f"{module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Every import in a file, at whatever depth."""
    importer = module_name(path, root)
    is_package = path.name == "__init__.py"

    def walk(node: ast.AST, in_main: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = in_main or (isinstance(child, ast.FunctionDef) and child.name == "main")
            for target in targets(child, importer, is_package):
                yield Import(importer, target, child.lineno, inside)  # type: ignore[attr-defined]
            yield from walk(child, inside)

    yield from walk(ast.parse(path.read_text(), filename=str(path)), False)


def is_allowed(item: Import) -> bool:
    """The table at the top of this file."""
    who, what = item.importer, item.target
    ours = is_in(what, *PARTS)
    if is_in(what, "tests"):
        return False
    if is_in(who, "fa4"):
        return True
    if is_in(who, "roofline"):
        allowed = ("roofline", "kernels.common.plan", "kernels.emulator.records")
        return is_in(what, *allowed) if ours else not is_in(what, *HEAVY)
    if is_in(who, "kernels.common.plan", "kernels.common.plan_text"):
        plan = is_in(what, "kernels.common.plan", "kernels.common.plan_text")
        return plan if ours else not is_in(what, *HEAVY)
    if is_in(who, "kernels.common"):
        return not ours or is_in(what, "kernels.common")
    if is_in(who, "kernels.blackwell", "kernels.hopper"):
        family = ".".join(who.split(".")[:2])
        if item.in_main and is_in(what, "kernels.emulator"):
            return True
        return not ours or is_in(what, family, "kernels.common")
    if is_in(who, "kernels.emulator"):
        if ours:
            return is_in(what, "kernels.emulator")
        return is_in(who, CAPTURE) or not is_in(what, *HEAVY)
    return False  # a part that this table does not know


def violations(root: Path) -> list[str]:
    """Every import in the tree that the table forbids, as text."""
    files = [path for part in PARTS for path in sorted((root / part).rglob("*.py"))]
    return [str(item) for path in files for item in imports_of(path, root) if not is_allowed(item)]


def test_imports_go_one_way(root: Path) -> None:
    assert violations(root) == []


# One line that must be refused, and one beside it that must pass, for each row of the table.
PLANTED = [
    ("roofline/a.py", "import torch", "import json"),
    ("roofline/a.py", "from kernels.common import softmax", "from kernels.common import plan"),
    ("roofline/a.py", "import kernels.emulator", "from kernels.emulator import records"),
    (
        "roofline/a.py",
        "import kernels.emulator.machine",
        "from kernels.common.plan import KernelPlan",
    ),
    ("roofline/a.py", "import fa4", "from . import gpus"),
    ("kernels/common/plan.py", "def f():\n    import cutlass.cute", "import math"),
    ("kernels/common/plan.py", "from . import softmax", "from dataclasses import dataclass"),
    ("kernels/common/plan_text.py", "import cutlass", "from kernels.common.plan import KernelPlan"),
    ("kernels/common/mask.py", "from ..blackwell import load", "import cutlass"),
    ("kernels/blackwell/load.py", "from kernels.hopper import load", "from ..common import mask"),
    (
        "kernels/blackwell/gemm.py",
        "import kernels.emulator",
        "def main():\n    import kernels.emulator",
    ),
    ("kernels/blackwell/gemm.py", "def main():\n    import fa4", "import cutlass.cute as cute"),
    ("kernels/emulator/machine.py", "import torch", "import numpy"),
    ("kernels/emulator/machine.py", "from ..common.plan import X", "from .findings import Finding"),
    ("kernels/emulator/machine.py", "m = import_module('cutlass')", "m = import_module('numpy')"),
    ("kernels/emulator/capture.py", "import kernels.common.plan", "import torch, cutlass"),
    ("fa4/api.py", "from tests.conftest import ROOT", "import kernels.emulator"),
    ("kernels/other/a.py", "import json", None),
]


@pytest.mark.parametrize(("path", "bad", "good"), PLANTED)
def test_the_check_sees_a_planted_import(
    tmp_path: Path, path: str, bad: str, good: str | None
) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(bad)
    assert len(violations(tmp_path)) >= 1
    if good is not None:
        file.write_text(good)
        assert violations(tmp_path) == []


def test_kernels_is_a_namespace_package(root: Path) -> None:
    """With an __init__.py of its own it could not share an environment with Hugging Face's."""
    assert not (root / "kernels" / "__init__.py").exists()
    for package in ("fa4", "roofline", "kernels/common", "kernels/blackwell", "kernels/emulator"):
        assert (root / package / "__init__.py").is_file(), f"{package}/__init__.py"


# What each import must not load. torch itself loads cuda.bindings where they are installed (2.13,
# torch/cuda/_graph_annotations.py), so that fa4 is held to what it adds to `import torch`.
NOT_LOADED = [
    ("roofline", None, ("torch", "cutlass", "cuda", "fa4", "kernels.emulator")),
    ("roofline.cli", None, ("torch", "cutlass", "cuda", "fa4", "kernels.emulator")),
    ("kernels.common.plan", None, ("torch", "cutlass", "cuda", "numpy", "fa4", "roofline")),
    ("kernels.emulator", None, ("torch", "cutlass", "cuda", "fa4", "roofline")),
    ("fa4", "torch", ("cutlass", "cuda", "llvmlite", "kernels.emulator", "kernels.blackwell")),
]


@pytest.mark.parametrize(("module", "after", "unwanted"), NOT_LOADED)
def test_import_loads_no_more_than_it_says(
    root: Path, module: str, after: str | None, unwanted: tuple[str, ...]
) -> None:
    code = (
        f"import json, sys, {after or 'json'}; before = set(sys.modules); import {module};"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert module in loaded
    assert [name for name in loaded if is_in(name, *unwanted)] == []
