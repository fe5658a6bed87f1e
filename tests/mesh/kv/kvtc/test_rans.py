"""The entropy coder: lossless, near the entropy, and strict about bytes that are not its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import PayloadCorrupt
from mesh.kv.kvtc.rans import N_SYMBOLS, FrequencyTables, decode, encode, normalise


def geometric_tables(n_contexts: int = 8) -> FrequencyTables:
    scale = np.geomspace(0.05, 40.0, n_contexts)[:, None]
    return FrequencyTables(normalise(np.exp(-np.arange(N_SYMBOLS) / scale) + 1e-9))


def draw(tables: FrequencyTables, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    contexts = rng.integers(0, tables.n_contexts, n)
    slots = rng.integers(0, 4096, n)
    symbols = (tables.lookup[contexts * 4096 + slots] & 0xFF).astype(np.uint8)
    return symbols, contexts


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 2000), n_lanes=st.integers(1, 40), seed=st.integers(0, 999))
def test_gives_back_every_symbol(n: int, n_lanes: int, seed: int) -> None:
    tables = geometric_tables()
    symbols, contexts = draw(tables, n, seed)
    assert np.array_equal(decode(encode(symbols, contexts, n_lanes, tables), contexts, n_lanes, tables), symbols)


def test_is_within_one_percent_of_the_entropy_beside_its_states() -> None:
    tables = geometric_tables()
    symbols, contexts = draw(tables, 128_000, 1)
    bits = -np.log2(tables.frequencies[contexts, symbols] / 4096).sum()
    data = encode(symbols, contexts, 64, tables)
    assert (len(data) - 4 * 64) * 8 < 1.01 * bits


@settings(max_examples=50, deadline=None)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_never_passes_for_the_same_bytes(at: int, bit: int) -> None:
    tables = geometric_tables()
    symbols, contexts = draw(tables, 400, 2)
    data = bytearray(encode(symbols, contexts, 8, tables))
    data[at % len(data)] ^= 1 << bit
    try:
        out = decode(bytes(data), contexts, 8, tables)
    except PayloadCorrupt:
        return
    assert not np.array_equal(out, symbols)


@pytest.mark.parametrize("cut", [1, 2, 4, 100])
def test_bytes_that_end_early_are_refused(cut: int) -> None:
    tables = geometric_tables()
    symbols, contexts = draw(tables, 400, 3)
    data = encode(symbols, contexts, 8, tables)
    for wrong in (data[:-cut], data + bytes(cut), data[:16]):
        with pytest.raises(PayloadCorrupt):
            decode(wrong, contexts, 8, tables)


@pytest.mark.parametrize("row", [[4096] + [0] * 255, [2000, 2000] + [0] * 254, [4096 - 255, *([1] * 254), 2]])
def test_tables_that_do_not_add_up_are_refused(row: list[int]) -> None:
    with pytest.raises(PayloadCorrupt):
        FrequencyTables(np.asarray([row], dtype=np.uint16))
