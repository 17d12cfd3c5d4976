"""The on-disk cache of compiled blocks: found again, never trusted blindly, never in the way."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kernels.emulator import machine
from kernels.emulator.native import cache, jit

from .ptx_harness import execute

BIG = "\n".join(f"mad.lo.s32 %d, %d, %a, {i};" for i in range(1000))  # enough IR to be cached


def _big_result(a: np.ndarray) -> np.ndarray:
    d = np.full_like(a, 1)
    for i in range(1000):
        d = d * a + np.uint32(i)
    return d


def _run_big() -> None:
    """Decoded anew each time: the machine keeps programs in memory."""
    machine._programs.clear()
    a = np.arange(3, 35, dtype=np.uint32)
    got = execute(f"mov.b32 %d, 1;\n{BIG}", {"a": a}, {"d": np.uint32})["d"]
    np.testing.assert_array_equal(got, _big_result(a))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path))
    return tmp_path / "emulator"


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the modules that LLVM compiled."""
    made: list[int] = []
    compile_text = jit._object_code

    def counted(text: str, opt: int) -> bytes:
        if len(text) > jit._CACHED_FROM_BYTES:
            made.append(len(text))
        return compile_text(text, opt)

    monkeypatch.setattr(jit, "_object_code", counted)
    return made


def test_second_time_is_not_compiled(folder: Path, compiles: list[int]) -> None:
    _run_big()
    _run_big()
    assert len(compiles) == 1
    assert [p.suffix for p in folder.iterdir()] == [".o"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "directory"])
def test_damaged_file_is_compiled_anew(folder: Path, compiles: list[int], damage: str) -> None:
    _run_big()
    (path,) = folder.iterdir()
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.unlink()
    if damage == "directory":
        path.mkdir()
    else:
        path.write_bytes({"truncated": raw[:-9], "flipped": raw, "empty": b""}[damage])
    _run_big()
    assert len(compiles) == 2


@pytest.mark.parametrize("part", ["cpu", "level", "version"])
def test_other_hosts_and_levels_have_other_keys(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    before = jit._key("text", 0)
    if part == "cpu":
        monkeypatch.setattr(jit, "_host", lambda: ("generic", ""))
    elif part == "version":
        monkeypatch.setattr(jit.llvmlite, "__version__", "0.0.1")
    assert jit._key("text", 3 if part == "level" else 0) != before


def test_old_cpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not run into code that calls what is not there."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    if "f16c" not in features:
        pytest.skip("not an x86 host")
    features["f16c"] = False
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: features)
    with pytest.raises(RuntimeError, match=r"x86-64-v3.*lacks f16c"):
        jit._host.__wrapped__()


def test_empty_variable_turns_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: list[int]
) -> None:
    monkeypatch.setenv("FA4_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _run_big()
    _run_big()
    assert len(compiles) == 2
    assert not list(tmp_path.iterdir())


def test_unwritable_folder_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: list[int]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path / "file"))
    _run_big()
    _run_big()
    assert len(compiles) == 2


def test_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FA4_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_dir() == Path("/somewhere/fa4-cutedsl/emulator")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache.cache_dir() == Path("/home/me/.cache/fa4-cutedsl/emulator")


def test_writers_at_once_leave_one_whole_file(folder: Path) -> None:
    data = [bytes([i]) * 300_000 for i in range(8)]
    threads = [threading.Thread(target=cache.cached, args=(("k",), lambda d=d: d)) for d in data]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = folder.iterdir()
    assert cache._read(path) in data


def test_oldest_files_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_FILES", 3)
    for i in range(3):
        cache.cached((str(i),), lambda: b"x")
    for age, path in enumerate(sorted(folder.iterdir())):
        os.utime(path, (age, age))
    kept = {p.name for p in sorted(folder.iterdir())[1:]}
    cache.cached(("new",), lambda: b"x")
    names = {p.name for p in folder.iterdir()}
    assert len(names) == 3 and kept < names
