"""The recordings that tests read: those committed, or in FA4_HARDWARE_RECORD those just made."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

COMMITTED = Path(__file__).parent
NAMES = ("isa_sm90.json", "native_sm90.json", "tma_sm90.json", "approx_sm90.json")


def load(name: str) -> Any:
    folder = Path(os.environ.get("FA4_HARDWARE_RECORD") or COMMITTED)
    return json.loads((folder / name).read_text())
