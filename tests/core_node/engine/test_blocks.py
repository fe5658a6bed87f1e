"""Who owns which block, and in which order free ones are used again."""

from __future__ import annotations

import pytest

from core_node.engine.blocks import BlockPool, blocks_for


def test_blocks_for() -> None:
    assert [blocks_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_allocate_takes_the_oldest_and_counts() -> None:
    pool = BlockPool(4)
    assert pool.allocate(2) == [0, 1]
    assert (pool.n_free, pool.n_used) == (2, 2)
    pool.check([[0, 1]])


def test_too_many_blocks_change_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(IndexError):
        pool.allocate(3)
    assert pool.n_free == 2
    pool.check([])


def test_a_freed_block_is_found_until_it_is_used_again() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.name(0, b"a")
    pool.free([0])
    assert pool.find([b"a"]) == [0]
    pool.allocate(1)  # the one that has no name
    assert pool.find([b"a"]) == [0]
    pool.allocate(1)
    assert pool.find([b"a"]) == []


def test_find_stops_at_the_first_unknown_name() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.name(0, b"a")
    pool.name(2, b"c")
    assert pool.find([b"a", b"b", b"c"]) == [0]


def test_a_taken_block_is_not_given_away() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.name(0, b"a")
    pool.free([0])
    assert pool.n_free_without([0]) == 1
    pool.take([0])
    assert pool.allocate(1) == [1]
    assert pool.n_free == 0
    pool.take([0])
    pool.free([0])
    pool.check([[0], [1]])


def test_the_tail_of_a_table_is_used_first() -> None:
    """A prefix outlives what hangs on it: an evicted ancestor would leave descendants that nobody can reach."""
    pool = BlockPool(4)
    table = pool.allocate(4)
    for block in table:
        pool.name(block, bytes([block]))
    pool.free(table)
    assert pool.allocate(4) == [3, 2, 1, 0]


def test_equal_blocks_are_kept_once() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    assert pool.name(0, b"a") == 0
    assert pool.name(1, b"a") == 0  # block 0 takes over the reference, block 1 is free and the next to be used
    assert pool.find([b"a"]) == [0]
    pool.check([[0], [0]])
    assert pool.allocate(1) == [1]
    pool.free([0])
    pool.free([0])
    pool.check([[1]])


def test_a_block_is_freed_once() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.free([0])
    with pytest.raises(AssertionError):
        pool.free([0])


def test_check_notices_a_leak_and_a_double_owner() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="1 references, 0 owners"):
        pool.check([])
    with pytest.raises(AssertionError, match="1 references, 2 owners"):
        pool.check([[0], [0]])
