"""The race detector's native loop: a read through it finds what one cell at a time does."""

import numpy as np
import pytest

from kernels.emulator.checks.shadow import Conflict, Shadow
from kernels.emulator.native.scan import scan_and_fill


def test_ends_and_fill() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 1024):
        values = rng.integers(-(1 << 62), 1 << 62, 2000)
        others = rng.integers(0, 99, 2000)
        cells = rng.permutation(2000)[:count].astype(np.int64)
        expected, ends = others.copy(), np.zeros(2, np.int64)
        expected[cells] = -7
        addresses = (a.ctypes.data for a in (values, others, cells, ends))
        scan_and_fill()(*addresses, count, -7)
        assert ends.tolist() == [values[cells].min(), values[cells].max()]
        assert np.array_equal(others, expected)


def written(rng: np.random.Generator) -> Shadow:
    """256 cells, last written by agents 1 to 3 in runs, at clocks 1 to 9; some never."""
    shadow, everything = Shadow(256), np.full(8, 99, np.int32)
    for _ in range(12):
        first, agent, clock = (int(rng.integers(*ends)) for ends in ((256,), (1, 4), (1, 10)))
        cells = slice(first, min(first + int(rng.integers(1, 90)), 256))
        shadow.write(cells, everything, agent, clock, pc=clock)
    return shadow


@pytest.mark.parametrize("seed", range(40))
def test_a_read_of_many_cells_is_that_of_each(seed: int) -> None:
    """Conflicts, and what a later write finds of the reads."""
    many, single = (written(np.random.default_rng(seed)) for _ in range(2))
    rng = np.random.default_rng([seed, 1])
    view = rng.integers(4, 11, 8).astype(np.int32)
    cells = np.sort(rng.permutation(256)[: int(rng.integers(1, 60))]).astype(np.int64)
    found = many.read(cells, view, agent=5, clock=3, pc=17)
    each = [single.read(slice(c, c + 1), view, agent=5, clock=3, pc=17) for c in cells.tolist()]
    conflicts = [c for c in each if c is not None]
    assert (found is None) == (not conflicts)
    assert found is None or found in conflicts
    late = np.array([99, 99, 99, 99, 99, 2, 99, 99], np.int32)  # does not know the read
    for cell in range(256):
        expected = Conflict(cell, 5, 3, 17, False) if cell in cells else None
        assert many.write(slice(cell, cell + 1), late, 6, 1, 0) == expected


@pytest.mark.parametrize("seed", range(40))
def test_a_write_of_many_cells_is_that_of_each(seed: int) -> None:
    """Conflicts with writes and with reads, and what is known of the cells afterwards."""
    many, single = (written(np.random.default_rng(seed)) for _ in range(2))
    rng = np.random.default_rng([seed, 2])
    for agent in (3, 5, 6):
        first, clock = int(rng.integers(200)), int(rng.integers(1, 10))
        for shadow in (many, single):
            everything = np.full(8, 99, np.int32)
            shadow.read(slice(first, first + 50), everything, agent, clock, pc=agent)
    view, reads = rng.integers(4, 11, 8).astype(np.int32), rng.integers(4, 11, 8).astype(np.int32)
    cells = np.sort(rng.permutation(256)[: int(rng.integers(1, 60))]).astype(np.int64)
    found = many.write(cells, view, 7, 3, 17, reads)
    each = [single.write(slice(c, c + 1), view, 7, 3, 17, reads) for c in cells.tolist()]
    conflicts = [c for c in each if c is not None]
    assert (found is None) == (not conflicts)
    assert found is None or found in conflicts
    late = np.array([99, 99, 99, 99, 99, 99, 99, 2], np.int32)  # does not know the write
    for cell in range(256):
        expected = Conflict(cell, 7, 3, 17, True) if cell in cells else None
        assert many.read(slice(cell, cell + 1), late, 4, 1, 0) == expected
