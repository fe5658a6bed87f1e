"""Reading a kvtc chunk's parts: nothing is taken that is not there, nothing is left over. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh.errors import PayloadCorrupt
from mesh.kv.kvtc.quantise import ESCAPE, MAX_LEVEL

WIDE = -128  # in place of an escaped level that a byte does not hold
I32 = NDArray[np.int32]


class Escapes:
    """Levels that no symbol holds, in the order of the symbols that stand for them."""

    def __init__(self, narrow: NDArray[np.int8], wide: I32) -> None:
        values = narrow.astype(np.int32)
        if (values == WIDE).sum() != len(wide) or (np.abs(wide.astype(np.int64)) > MAX_LEVEL).any():
            raise PayloadCorrupt("escaped levels are malformed")
        values[values == WIDE] = wide
        self._values = values
        self._at = 0

    def fill(self, levels: I32, symbols: NDArray[np.uint8]) -> None:
        where = symbols == ESCAPE
        n = int(where.sum())
        if self._at + n > len(self._values):
            raise PayloadCorrupt("fewer levels are escaped than the symbols say")
        levels[where] = self._values[self._at : self._at + n]
        self._at += n

    def finish(self) -> None:
        if self._at != len(self._values):
            raise PayloadCorrupt("more levels are escaped than the symbols say")


class Reader:
    """Takes a chunk's parts in order; raises PayloadCorrupt where they run out."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at

    def take(self, size: int) -> memoryview:
        part = self._data[self._at : self._at + size]
        if len(part) < size:
            raise PayloadCorrupt("a kvtc chunk ends early")
        self._at += size
        return part

    def array(self, dtype: str, count: int) -> NDArray[Any]:
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype=dtype)

    def finish(self) -> None:
        if self._at != len(self._data):
            raise PayloadCorrupt("a kvtc chunk has bytes too many")
