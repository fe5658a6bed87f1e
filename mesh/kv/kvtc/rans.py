"""Range asymmetric numeral systems over many lanes at once, in numpy.

Each lane is a coder of its own with a 32-bit state (Duda, arXiv 1311.2540; renormalised by 16-bit words, so at most
one word a symbol); a step codes one symbol in every lane as whole-array work. Lanes share one stream: what a step
needs is read in lane order. The encoder runs through the steps backwards, the decoder forwards. More lanes are faster
(a step costs the same dozen calls) and cost two bytes each.

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
_PROB_BITS = np.uint32(PROB_BITS)
_SLOT_MASK = np.uint32(_ONE - 1)
_FREQUENCY_SHIFT = np.uint32(8)
_BIAS_SHIFT = np.uint32(20)

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


def encode(symbols: U8, contexts: NDArray[np.integer], n_lanes: int, tables: FrequencyTables) -> bytes:
    """`symbols` and their `contexts`, both [n], dealt to the lanes in turn, as bytes. Every symbol needs a
    frequency. The last step may leave the last lanes without work."""
    which = contexts.astype(np.int64) * N_SYMBOLS + symbols
    f = tables.frequencies.ravel().take(which)
    assert f.all(), "a symbol without a frequency must be escaped"
    limit = f << np.uint32(32 - PROB_BITS)  # a state from here on would overflow: shift a word out first
    start = tables.starts.ravel().take(which)
    state: U32 = np.full(n_lanes, _LOW, dtype=np.uint32)
    quotient = np.empty(n_lanes, dtype=np.uint32)
    words: list[NDArray[np.uint16]] = []
    for at in range((len(symbols) - 1) // n_lanes * n_lanes, -1, -n_lanes):
        now = f[at : at + n_lanes]
        some, q = state[: len(now)], quotient[: len(now)]
        full = np.flatnonzero(some >= limit[at : at + n_lanes])
        if len(full):
            old = some.take(full)
            words.append(old.astype("<u2"))
            some[full] = old >> _WORD_BITS
        np.floor_divide(some, now, out=q)  # state: quotient << PROB_BITS plus what is left, plus start
        now *= q
        some -= now
        some += start[at : at + n_lanes]
        q <<= _PROB_BITS
        some += q
    words.append(state.astype("<u4").view("<u2"))
    return b"".join(part.tobytes() for part in reversed(words))


def decode(data: bytes | memoryview, contexts: NDArray[np.integer], n_lanes: int, tables: FrequencyTables) -> U8:
    """The symbols [n] that `encode` was given with these contexts. Raises PayloadCorrupt unless `data` are such bytes,
    all of them."""
    if len(data) < 4 * n_lanes or len(data) % 2:
        raise PayloadCorrupt(f"{len(data)} bytes cannot hold {n_lanes} lanes")
    state: U32 = np.frombuffer(data, dtype="<u4", count=n_lanes).astype(np.uint32)
    words = np.frombuffer(data, dtype="<u2", offset=4 * n_lanes).astype(np.uint32)
    if (state < _LOW).any():
        raise PayloadCorrupt("a lane's state is out of range")
    used = 0
    base = contexts.astype(np.int64) << PROB_BITS
    entries = np.empty(len(contexts), dtype=np.uint32)  # of `lookup`
    scratch = np.empty(n_lanes, dtype=np.uint32)
    for at in range(0, len(contexts), n_lanes):
        slot, entry = base[at : at + n_lanes], entries[at : at + n_lanes]
        some, factor = state[: len(slot)], scratch[: len(slot)]
        np.bitwise_and(some, _SLOT_MASK, out=factor)
        slot += factor
        tables.lookup.take(slot, out=entry, mode="clip")  # in range: "clip" only spares a copy
        np.right_shift(entry, _FREQUENCY_SHIFT, out=factor)
        factor &= _SLOT_MASK
        some >>= _PROB_BITS
        some *= factor
        np.right_shift(entry, _BIAS_SHIFT, out=factor)
        some += factor
        empty = np.flatnonzero(some < _LOW)
        if n := len(empty):
            word = words[used : used + n]
            if len(word) < n:
                raise PayloadCorrupt("entropy-coded bytes end early")
            some[empty] = some.take(empty) << _WORD_BITS | word
            used += n
    if used != len(words) or (state != _LOW).any():
        raise PayloadCorrupt("entropy-coded bytes do not end where they should")
    return entries.astype(np.uint8)  # the low bits
