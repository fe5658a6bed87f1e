"""Range asymmetric numeral systems over many lanes at once, in numpy.

Each lane is a coder of its own with a 32-bit state (Duda, arXiv 1311.2540; renormalised by 16-bit words, so at most
one word a symbol); a step codes one symbol in every lane as whole-array work. Lanes share one stream: what a step
needs is read in lane order. The encoder runs through the steps backwards and so must know all symbols and contexts;
the decoder runs forwards and may derive a step's contexts from what it has decoded.

Frequencies are static, given by context, and add up to 2**12. The final states are written in front of the words; the
decoder must arrive at the state that every lane started from with all words used, else the bytes were not these.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mesh.errors import PayloadCorrupt

PROB_BITS = 12
N_SYMBOLS = 256
_ONE = 1 << PROB_BITS
_LOW = np.uint32(1 << 16)
_WORD_BITS = np.uint32(16)
_WORD_MASK = np.uint32(0xFFFF)

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]


class FrequencyTables:
    """Static frequencies, u16 [n_contexts, N_SYMBOLS], each row adding up to 2**PROB_BITS with no entry at it (a
    symbol that is certain leaves no room for an escape). An entry of 0 is a symbol that the context cannot code."""

    def __init__(self, frequencies: NDArray[np.uint16]) -> None:
        f = frequencies.astype(np.uint32)
        if f.ndim != 2 or f.shape[1] != N_SYMBOLS or (f.sum(axis=1) != _ONE).any() or (f >= _ONE).any():
            raise PayloadCorrupt("frequency tables do not add up")
        self.frequencies = f
        self.starts: U32 = (np.cumsum(f, axis=1) - f).astype(np.uint32)
        # One entry for each slot of each context: symbol, frequency and slot - start of symbol, in 8 + 12 + 12 bits.
        symbols = np.repeat(np.tile(np.arange(N_SYMBOLS, dtype=np.uint32), len(f)), f.ravel())
        rows = np.repeat(np.arange(len(f)), _ONE)
        slots = np.tile(np.arange(_ONE, dtype=np.uint32), len(f))
        bias = slots - self.starts[rows, symbols]
        self.lookup: U32 = symbols | f[rows, symbols] << np.uint32(8) | bias << np.uint32(20)

    @property
    def n_contexts(self) -> int:
        return len(self.frequencies)


def normalise(counts: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Frequencies for counts [n_contexts, N_SYMBOLS]: at least 1 where a count is positive, sums 2**PROB_BITS.
    Every row needs at least two positive counts."""
    share = counts / counts.sum(axis=1, keepdims=True)
    f = np.where(counts > 0, np.maximum(1, np.rint(share * _ONE)), 0).astype(np.int64)
    rows = np.arange(len(f))
    while (excess := f.sum(axis=1) - _ONE).any():
        top = f.argmax(axis=1)  # the most frequent symbol can best afford it
        f[rows, top] -= np.clip(excess, -_ONE, np.maximum(f[rows, top] // 2, 1))
    return f.astype(np.uint16)


def encode(symbols: U8, contexts: NDArray[np.intp], tables: FrequencyTables) -> bytes:
    """`symbols` and their `contexts`, both [n_steps, n_lanes], as bytes. Every symbol needs a frequency."""
    n_steps, n_lanes = symbols.shape
    f = tables.frequencies[contexts, symbols]
    assert f.all(), "a symbol without a frequency must be escaped"
    limit = f << np.uint32(32 - PROB_BITS)  # a state from here on would overflow: shift a word out first
    start = tables.starts[contexts, symbols]
    state: U32 = np.full(n_lanes, _LOW, dtype=np.uint32)
    words: list[NDArray[np.uint16]] = []
    for t in range(n_steps - 1, -1, -1):
        full = state >= limit[t]
        words.append((state[full] & _WORD_MASK).astype("<u2"))
        state = np.where(full, state >> _WORD_BITS, state)
        quotient = state // f[t]
        state = (quotient << np.uint32(PROB_BITS)) + (state - quotient * f[t]) + start[t]
    words.append(state.astype("<u4").view("<u2"))
    return b"".join(part.tobytes() for part in reversed(words))


class Decoder:
    """Takes the lanes' symbols back, one step a call, in the order of the steps."""

    def __init__(self, data: bytes | memoryview, n_lanes: int, tables: FrequencyTables) -> None:
        """Raises PayloadCorrupt if `data` cannot hold the states."""
        if len(data) < 4 * n_lanes or len(data) % 2:
            raise PayloadCorrupt(f"{len(data)} bytes cannot hold {n_lanes} lanes")
        self._state: U32 = np.frombuffer(data, dtype="<u4", count=n_lanes).astype(np.uint32)
        self._words = np.frombuffer(data, dtype="<u2", offset=4 * n_lanes).astype(np.uint32)
        self._at = 0
        self._lookup = tables.lookup
        if (self._state < _LOW).any():
            raise PayloadCorrupt("a lane's state is out of range")

    def step(self, contexts: NDArray[np.intp] | np.intp) -> U8:
        """The next symbol of every lane under its context, or one for all. Raises PayloadCorrupt if words run out."""
        state = self._state
        entry = self._lookup[(contexts << PROB_BITS) + (state & np.uint32(_ONE - 1))]
        state = ((entry >> np.uint32(8)) & np.uint32(_ONE - 1)) * (state >> np.uint32(PROB_BITS)) + (
            entry >> np.uint32(20)
        )
        empty = np.flatnonzero(state < _LOW)
        if n := len(empty):
            word = self._words[self._at : self._at + n]
            if len(word) < n:
                raise PayloadCorrupt("entropy-coded bytes end early")
            state[empty] = state[empty] << _WORD_BITS | word
            self._at += n
        self._state = state
        return (entry & np.uint32(0xFF)).astype(np.uint8)

    def finish(self) -> None:
        """Raise PayloadCorrupt unless all was read and every lane is back where it began."""
        if self._at != len(self._words) or (self._state != _LOW).any():
            raise PayloadCorrupt("entropy-coded bytes do not end where they should")
