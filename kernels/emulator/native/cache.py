"""Compiled blocks kept on disk between processes.

An object file is found by the hash of all that it depends on: the IR text, the LLVM that compiled
it and the host CPU. The folder is ``$FA4_CACHE_DIR/emulator``, by default
``$XDG_CACHE_HOME/fa4-cutedsl/emulator`` or ``~/.cache/fa4-cutedsl/emulator``; an empty
``FA4_CACHE_DIR`` turns the cache off. Whatever goes wrong with a file, it is compiled anew.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

MAX_FILES = 256  # of a few hundred KB each; the least recently used go first
_DIGEST_BYTES = 32


def cache_dir() -> Path | None:
    """The folder, which may not exist yet, or None where there is to be no cache."""
    asked = os.environ.get("FA4_CACHE_DIR")
    if asked is not None:
        return Path(asked, "emulator") if asked else None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "fa4-cutedsl", "emulator") if os.path.isabs(base) else None


def cached(parts: tuple[str, ...], make: Callable[[], bytes]) -> bytes:
    """The object that ``make`` gives for ``parts``, which name everything that it depends on."""
    folder = cache_dir()
    if folder is None:
        return make()
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = folder / f"{key}.o"
    if (found := _read(path)) is not None:
        return found
    data = make()
    _write(path, data)
    return data


def _read(path: Path) -> bytes | None:
    """The content, if it is whole: a digest of it stands in front."""
    try:
        raw = path.read_bytes()
        digest, data = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != digest:
            return None
        os.utime(path)
    except OSError:
        return None
    return data


def _write(path: Path, data: bytes) -> None:
    """Under a name of its own, then renamed: a reader sees a whole file or none."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        _prune(path.parent)
    except OSError:
        pass  # a cache that cannot be written is no reason to fail


def _prune(folder: Path) -> None:
    files = list(folder.glob("*.o"))
    if len(files) <= MAX_FILES:
        return
    for path in sorted(files, key=lambda p: p.stat().st_mtime)[: len(files) - MAX_FILES]:
        path.unlink(missing_ok=True)
