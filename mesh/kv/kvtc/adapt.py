"""Tables that follow each token: some tokens are louder than others throughout, and what was coded of one already
tells how loud it is. Encoder and decoder run the same sums over whole numbers, so that they never differ. Pure numpy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mesh.kv.kvtc.artifact import N_CONTEXTS
from mesh.kv.kvtc.quantise import (
    ESCAPE,
    I32,
    PER_OCTAVE,
    U8,
    escape_what_has_no_frequency,
    expected_level,
    symbols_of,
)
from mesh.kv.kvtc.rans import N_SYMBOLS, FrequencyTables

BLOCK_ROWS = 16  # coefficients between two looks
_MAX_SHIFT = 6
_LARGEST = 15  # a level counts as this at most, an escaped one too
_UNIT = 256  # of expectations, and of levels beside them
_WEIGHT = 4 * _UNIT  # levels that a token is taken to have had, as expected, before its first
_LOUDNESS = np.minimum((np.arange(N_SYMBOLS) + 1) // 2, _LARGEST).astype(np.int64) * _UNIT
# Where the ratio of seen to expected is nearer to the next quarter octave; rounded, as pow is not equal everywhere.
_EDGES = np.round(2.0 ** ((np.arange(-_MAX_SHIFT, _MAX_SHIFT) + 0.5) / PER_OCTAVE), 6)
assert _LOUDNESS[ESCAPE] == _LARGEST * _UNIT


class TokenScales:
    """How loud each of `n_tokens` has been, over what its coefficients' tables expect."""

    def __init__(self, base: NDArray[np.intp], n_tokens: int) -> None:
        """`base`: each coefficient's table for a usual token."""
        self._base = base
        self._expected = np.rint(expected_level(base) * _UNIT).astype(np.int64)
        self._seen = np.full(n_tokens, _WEIGHT, dtype=np.int64)
        self._usual = _WEIGHT
        self._shift = np.zeros(n_tokens, dtype=np.intp)

    def contexts(self, row: int) -> NDArray[np.intp]:
        """Tables [rows, n_tokens] of the block of coefficients from `row` on."""
        base = self._base[row : row + BLOCK_ROWS, None]
        return np.clip(base + self._shift, 0, N_CONTEXTS - 1)

    def saw(self, row: int, symbols: U8) -> None:
        """Learn of the block's symbols [rows, n_tokens]."""
        self._seen += _LOUDNESS[symbols].sum(axis=0)
        self._usual += int(self._expected[row : row + len(symbols)].sum())
        self._shift = np.searchsorted(_EDGES, self._seen / self._usual).astype(np.intp) - _MAX_SHIFT


def symbols_and_contexts(base: NDArray[np.intp], levels: I32, tables: FrequencyTables) -> tuple[U8, NDArray[np.intp]]:
    """Symbols, each with a frequency under its table, and tables, of `levels` [n_coefficients, n_tokens]."""
    scales = TokenScales(base, levels.shape[1])
    symbols = symbols_of(levels)
    contexts = np.empty(levels.shape, dtype=np.intp)
    for row in range(0, len(base), BLOCK_ROWS):
        block = slice(row, row + BLOCK_ROWS)
        contexts[block] = scales.contexts(row)
        symbols[block] = escape_what_has_no_frequency(symbols[block], contexts[block], tables)
        scales.saw(row, symbols[block])
    return symbols, contexts
