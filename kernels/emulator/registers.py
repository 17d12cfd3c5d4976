"""The register file of a warp: where each PTX register lives in memory, and views of it.

Rows of 128 bytes hold 32 lanes of 32 bits. A .b64 register takes two rows (low halves, high
halves), a .b128 register four, a .b16 register the first 64 bytes of a row, a predicate one 32-bit
mask behind the rows. Only registers that cross a block boundary get a place: the others live and
die in generated code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

ROW_BYTES = 128
_ROWS = {"b64": 2, "b128": 4}  # of registers wider than a row
POISON = 0x7FA5A5A5  # a signalling NaN, so that arithmetic on it shows


class RegisterFile:
    """Assigns places. ``groups`` are vector operands that should lie in consecutive rows."""

    def __init__(
        self, kinds: dict[str, str], used: Iterable[str], groups: Iterable[Sequence[str]]
    ) -> None:
        self._kinds = kinds
        self._rows: dict[str, int] = {}
        self._preds: dict[str, int] = {}
        self.rows = 0
        names = dict.fromkeys(used)
        for group in groups:
            if all(
                name in names and name not in self._rows and kinds[name] == "b32" for name in group
            ):
                for name in group:
                    self._take(name, 1)
        for name in names:
            if name not in self._rows and kinds[name] != "pred":
                self._take(name, _ROWS.get(kinds[name], 1))
        self._preds = {n: i for i, n in enumerate(n for n in names if kinds[n] == "pred")}

    def _take(self, name: str, rows: int) -> None:
        self._rows[name] = self.rows
        self.rows += rows

    def kind(self, name: str) -> str:
        return self._kinds[name]

    def row(self, name: str) -> int:
        return self._rows[name]

    def pred(self, name: str) -> int:
        return self._preds[name]

    def __contains__(self, name: str) -> bool:
        return name in self._rows or name in self._preds

    def offset(self, name: str) -> int:
        """Byte offset of the register in the warp's buffer."""
        if name in self._preds:
            return self.rows * ROW_BYTES + 4 * self._preds[name]
        return self._rows[name] * ROW_BYTES

    @property
    def nbytes(self) -> int:
        return self.rows * ROW_BYTES + 4 * len(self._preds)


class WarpRegisters:
    """One warp's registers, poisoned. ``r32``: uint32[rows, 32]; ``preds``: uint32[predicates].
    ``words`` and ``flags`` are the same memory flat, for access to single integers, which is three
    times as fast there."""

    __slots__ = ("_buffer", "address", "flags", "i32", "preds", "r16", "r32", "words")

    def __init__(self, layout: RegisterFile) -> None:
        self._buffer = np.empty(layout.nbytes + 64 + 4, np.uint8)
        skew = -self._buffer.ctypes.data % 64
        data = self._buffer[skew : skew + layout.nbytes]
        self.address = data.ctypes.data
        split = layout.rows * ROW_BYTES
        self.r32 = data[:split].view(np.uint32).reshape(-1, 32)
        self.i32 = self.r32.view(np.int32)
        self.r16 = data[:split].view(np.uint16).reshape(-1, 64)
        self.preds = data[split:].view(np.uint32)
        self.r32[:] = POISON
        self.preds[:] = 0
        self.words = self.r32.reshape(-1).data
        self.flags = self.preds.data
