"""Names of prefixes, and cutting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.kv.chunks import PrefixNames, chunk_ranges
from mesh.kv.hashing import block_hashes, prefix_hash

ids = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(ids, max_size=4), salt=st.binary(max_size=40))
def test_names_are_those_of_the_whole(parts: list[list[int]], salt: bytes) -> None:
    names, whole = PrefixNames("layout", salt), [i for part in parts for i in part]
    for part in parts:
        names.extend(part)
    assert names.known_tokens == len(whole)
    assert names.token_ids == tuple(whole)
    for n in range(len(whole) + 1):
        assert names.prefix(n) == prefix_hash("layout", salt, whole[:n])
        assert names.full_blocks(n) == tuple(block_hashes("layout", salt, whole[:n]))
    assert names.full_blocks(10_000) == tuple(block_hashes("layout", salt, whole))


def test_names_of_what_is_not_known() -> None:
    for n in (-1, 3):
        with pytest.raises(IndexError):
            PrefixNames("layout", b"", (1, 2)).prefix(n)


@pytest.mark.parametrize(
    ("start", "stop", "ranges"),
    [
        (0, 0, []),
        (5, 3, []),
        (0, 256, [(0, 256)]),
        (10, 300, [(10, 266), (266, 300)]),
        (0, 513, [(0, 256), (256, 512), (512, 513)]),
    ],
)
def test_ranges(start: int, stop: int, ranges: list[tuple[int, int]]) -> None:
    assert list(chunk_ranges(start, stop)) == ranges
