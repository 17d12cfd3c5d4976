"""The packages that backends need, checked when one is first used."""

from __future__ import annotations

import re
from importlib import metadata

from fa4.errors import MissingDependencyError

# [first, end) of what was tested; the same ranges as in pyproject.toml.
TESTED = {
    "nvidia-cutlass-dsl": ("4.8.1", "4.9"),
    "cuda-python": ("13", "14"),
    "torch": ("2.11", "2.15"),
    "numpy": ("2", "3"),
    "llvmlite": ("0.45", "0.52"),
    "safetensors": ("0.5", "1"),
}


def require(*names: str) -> None:
    """Raise MissingDependencyError naming each package that is absent or outside its range."""
    faults = [fault for fault in map(_fault, names) if fault]
    if faults:
        raise MissingDependencyError("; ".join(faults))


def installed(name: str) -> str | None:
    """The version of a distribution, None where it is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fault(name: str) -> str:
    found = installed(name)
    wanted = f"pip install '{name}{_specifier(name)}'"
    if found is None:
        return f"{name} is not installed: {wanted}"
    fault = outside_range(name, found)
    return f"{name} {found} is {fault}: {wanted}" if fault else ""


def outside_range(name: str, version: str) -> str:
    """ "" where the version was tested, else what is wrong with it."""
    first, end = map(_numbers, TESTED[name])
    return "" if first <= _numbers(version) < end else f"not in the tested {_specifier(name)}"


def _specifier(name: str) -> str:
    first, end = TESTED[name]
    return f">={first},<{end}"


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version, "4.8.1rc2+cu13" as (4, 8, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
