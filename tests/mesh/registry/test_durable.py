"""The file format of the embedded registry: what was written comes back, what was damaged does not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import PayloadCorrupt
from mesh.registry.durable import DurableState, from_bytes, to_bytes
from mesh.registry.types import Registration

NAMES = st.text("abc019", min_size=1, max_size=8)
REGISTRATIONS = st.builds(
    Registration,
    node_id=NAMES,
    address=st.just("") | st.just("127.0.0.1:5"),
    meta=st.dictionaries(NAMES, st.text(max_size=20), max_size=3),
    ttl_s=st.floats(0.1, 100.0),
)


@st.composite
def states(draw: st.DrawFn) -> DurableState:
    state = DurableState()
    for registration in draw(st.lists(REGISTRATIONS, max_size=3)):
        state = state.with_registration(registration)
    for key, value in draw(st.lists(st.tuples(NAMES, st.binary(max_size=20)), max_size=5)):
        state = state.with_value(key, value, None)
    return state


@settings(max_examples=50)
@given(states())
def test_round_trip(state: DurableState) -> None:
    assert from_bytes(to_bytes(state)) == state


@settings(max_examples=50)
@given(states(), st.data())
def test_a_flipped_bit_never_reads_as_something_else(state: DurableState, data: st.DataObject) -> None:
    raw = bytearray(to_bytes(state))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert from_bytes(bytes(raw)) == state  # 1e-05 and 1E-05
    except PayloadCorrupt:
        pass


@settings(max_examples=50)
@given(states(), st.data())
def test_a_truncated_file_is_refused(state: DurableState, data: st.DataObject) -> None:
    raw = to_bytes(state)
    with pytest.raises(PayloadCorrupt):
        from_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])


def test_a_newer_format_is_named() -> None:
    document = json.loads(to_bytes(DurableState()))
    with pytest.raises(PayloadCorrupt, match="format 2; this build reads 1"):
        from_bytes(json.dumps({**document, "format": 2}).encode())


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b'{"format": 1}', b"\xff", b"[" * 100_000])
def test_anything_else_is_refused(raw: bytes) -> None:
    with pytest.raises(PayloadCorrupt):
        from_bytes(raw)


def test_versions_outlive_their_keys() -> None:
    state = DurableState().with_value("a", b"", 0)
    again = state.without_value("a").with_value("a", b"", 0)
    assert again.values["a"].version > state.values["a"].version
