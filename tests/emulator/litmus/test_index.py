# SPDX-License-Identifier: Apache-2.0
"""INDEX.md names pairs and tests that exist, and leaves no pair's subject out by mistake."""

import re
from pathlib import Path

from . import test_hopper, test_tcgen05

HERE = Path(__file__).parent
TABLE = [line for line in (HERE / "INDEX.md").read_text().splitlines() if line.startswith("| ")]


def named():
    """The names in the table's cells; the first column is prose."""
    return [n for row in TABLE[1:] for n in re.findall(r"`([^`]+)`", row.split("|", 2)[2])]


def pairs():
    cases = [*test_hopper.EVERY, *test_tcgen05.CASES, *test_hopper.WGMMA]
    return {case.name for case in cases}


def functions():
    texts = (path.read_text() for path in HERE.parent.rglob("test_*.py"))
    return {name for text in texts for name in re.findall(r"^def (test_\w+)", text, flags=re.M)}


def test_what_the_index_names_exists():
    known = pairs() | functions()
    assert len(named()) > 100
    assert [name for name in named() if name not in known] == []


def test_there_are_more_than_sixty_pairs_and_each_has_a_name_of_its_own():
    cases = [*test_hopper.EVERY, *test_tcgen05.CASES]
    assert len(cases) > 160 and len(test_hopper.PORTABLE) > 110 and len(test_hopper.WGMMA) > 10
    texts = {(case.text(True), case.text(False)) for case in cases}
    assert len(texts) == len(cases), "two pairs are one"
