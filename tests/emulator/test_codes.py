# SPDX-License-Identifier: Apache-2.0
"""Every code that the emulator can report is in docs/emulator.md, and the other way round."""

import re
from pathlib import Path

from kernels import emulator

SOURCE = Path(emulator.__file__).parent
# Where codes are: the first argument of a fault or finding, a pair that a classifier returns.
CODES = re.compile(
    r"(?:EmulatorFault|Finding|refuse|_reject|_fault)\(\s*(?:code=)?\"([a-z0-9_]+)\""
    r"|(?:return |code, why = )\(?\s*\"([a-z0-9]+_[a-z0-9_]+)\",\s|code = \"([a-z_]+)\""
)


def reported():
    found = set()
    for path in SOURCE.rglob("*.py"):
        for groups in CODES.findall(path.read_text()):
            found |= {code for code in groups if code}
    return found


def documented(root):
    table = (root / "docs/emulator.md").read_text().split("## Codes")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {code for row in rows for code in re.findall(r"`([a-z0-9_.]+)`", row)}


def pattern(code):
    return re.compile(re.escape(code).replace(r"\.\.\.", "[a-z0-9_]*"))


def test_every_code_is_documented(root):
    patterns = [pattern(code) for code in documented(root)]
    codes = reported()
    assert {"deadlock", "global_race", "tma_load_not_waited", "mbarrier_overflow"} <= codes
    assert sorted(c for c in codes if not any(p.fullmatch(c) for p in patterns)) == []


def test_every_documented_code_can_be_reported(root):
    text = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    text += '"smem_race" "tmem_race"'  # f"{space}_race"
    unknown = [c for c in documented(root) if not re.search(f'"{pattern(c).pattern}"', text)]
    assert unknown == []
