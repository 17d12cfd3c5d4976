"""The wheel: what is in it, that it installs, and that it shares an environment with its namesake.

Hugging Face publishes a package whose import name is `kernels` too. Ours is a namespace package, so
both can be installed, in either order, and either can go again. Libraries ask whether Hugging
Face's is there; with ours alone the answer has to stay no. transformers 5.0 to 5.9 takes the
version of whichever distribution provides the name, so ours must stay below the 0.9.0 it asks for,
and it must be listed as a provider: without a version to compare, that check raises.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HUGGING_FACE = "kernels==0.17.2"

# transformers' own question, restated in the forms it has had: what is_kernels_available() answers.
# Source: huggingface/transformers, src/transformers/utils/import_utils.py, at v4.57.1, v5.0.0 (asks
# for 0.9.0), v5.9.0 (asks for 0.10.2) and v5.24.0.
ASK = """
import importlib, importlib.metadata as metadata, importlib.util, json
from packaging import version

def v4_57_1():
    if importlib.util.find_spec("kernels") is None:
        return False
    try:
        metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return False
    return True

def by_mapping():
    if importlib.util.find_spec("kernels") is None:
        return None
    try:
        names = metadata.packages_distributions()["kernels"]
        return metadata.version("kernels" if "kernels" in names else names[0])
    except (metadata.PackageNotFoundError, KeyError):
        return getattr(importlib.import_module("kernels"), "__version__", "N/A")

def v5(least):
    found = by_mapping()
    return found is not None and version.parse(found) >= version.parse(least)

def v5_24_0(least="0.18.2", below="0.19.0"):
    if importlib.util.find_spec("kernels") is None:
        return False
    found = None
    for name in ["kernels", *metadata.packages_distributions().get("kernels", [])]:
        try:
            found = metadata.version(name)
            break
        except metadata.PackageNotFoundError:
            pass
    else:
        found = getattr(importlib.import_module("kernels"), "__version__", None)
    return found is not None and version.parse(least) <= version.parse(found) < version.parse(below)

print(json.dumps([v4_57_1(), v5("0.9.0"), v5("0.10.2"), v5_24_0()]))
"""

IMPORT_OURS = """
import fa4, roofline, kernels.common.plan, kernels.emulator, kernels.blackwell
print(*(m.__file__ for m in (fa4, roofline, kernels.common.plan, kernels.emulator)), sep="\\n")
"""
IMPORT_THEIRS = "import kernels; from kernels import get_kernel; print(kernels.__file__)"


@dataclass(frozen=True)
class Environment:
    """A fresh virtual environment; our dependencies are lent to it by path, not downloaded."""

    path: Path

    def run(
        self, *command: str, lend: bool = True, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment outside the checkout and captures what it prints."""
        lent = [entry for entry in sys.path if Path(entry).is_relative_to(sys.prefix)]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        if lend:
            env["PYTHONPATH"] = os.pathsep.join(lent)
        done = subprocess.run(
            [str(self.path / "bin" / command[0]), *command[1:]],
            cwd=self.path,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if check:
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done

    def pip(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs pip, which must not see the lent packages: it would take them for installed ones."""
        options = ("--quiet", "--disable-pip-version-check")
        return self.run("python", "-m", "pip", *arguments, *options, lend=False, check=check)

    def python(self, code: str) -> str:
        """What a program prints."""
        return self.run("python", "-c", code).stdout.strip()


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree with the setuptools at hand: no network."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    for name in ("fa4", "kernels", "roofline"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / name, source / name, ignore=skip)
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(out), str(source)], check=True, timeout=300)
    (path,) = out.glob("fa4_cutedsl-*-py3-none-any.whl")
    return path


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    return Environment(tmp_path / "venv")


def test_wheel_holds_the_tree_and_nothing_else(root: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tree = {
        str(path.relative_to(root))
        for part in ("fa4", "kernels", "roofline")
        for path in (root / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == tree
    assert "kernels/__init__.py" not in tree


def test_metadata_is_pyprojects(root: Path, wheel: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
        licenses = {n.rsplit("/", 1)[1] for n in archive.namelist() if "/licenses/" in n}
    assert metadata["Name"] == "fa4-cutedsl"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert licenses == {"LICENSE", "NOTICE"}
    plain = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(plain) == len(project["dependencies"])
    assert all("<" in line and ">=" in line for line in plain), "each range is bounded both ways"


def test_wheel_installs_and_its_commands_run(wheel: Path, environment: Environment) -> None:
    environment.pip("install", "--no-deps", "--no-index", str(wheel))
    for line in environment.python(IMPORT_OURS).splitlines():
        assert Path(line).is_relative_to(environment.path), "imported from the checkout"
    assert "usage: fa4" in environment.run("fa4", "--help").stdout
    budget = environment.run("roofline", "budget", "--gpu", "b200", "--tile", "256x128")
    assert "2048" in budget.stdout
    answers = environment.python(ASK)
    assert answers == "[false, false, false, false]", "taken for Hugging Face's kernels"


def test_lives_beside_hugging_faces_kernels(wheel: Path, environment: Environment) -> None:
    """Installed in both orders, removed in both orders."""
    theirs = environment.pip("install", HUGGING_FACE, check=False)
    if theirs.returncode:
        pytest.skip(f"no package index: {theirs.stderr.strip().splitlines()[-1]}")
    package = environment.python(IMPORT_THEIRS)
    alone = environment.python(ASK)
    assert alone.startswith("[true, true, true"), "the questions are asked as transformers does"
    ours = ("install", "--no-deps", "--no-index", str(wheel))

    environment.pip(*ours)  # theirs, then ours
    environment.python(IMPORT_OURS)
    assert environment.python(IMPORT_THEIRS) == package
    assert environment.python(ASK) == alone

    environment.pip("uninstall", "--yes", "fa4-cutedsl")
    assert environment.python(IMPORT_THEIRS) == package

    environment.pip("uninstall", "--yes", "kernels")
    environment.pip(*ours)
    environment.pip("install", HUGGING_FACE)  # ours, then theirs
    environment.python(IMPORT_OURS)
    assert environment.python(IMPORT_THEIRS) == package
    assert environment.python(ASK) == alone

    environment.pip("uninstall", "--yes", "kernels")
    environment.python(IMPORT_OURS)
