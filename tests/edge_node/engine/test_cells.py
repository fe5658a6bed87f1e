"""The ledger of cells against a naive one: a list of sets."""

from __future__ import annotations

import random

import pytest

from edge_node.engine.cells import Cells


def test_shared_cells_are_counted_once() -> None:
    cells = Cells(10)
    cells.open(0)
    cells.extend(0, 6)
    cells.open(1)
    cells.share(0, 1, 4)
    cells.extend(1, 2)
    assert (cells.free, cells.pinned, cells.available) == (2, 8, 2)
    assert (cells.only_of(0), cells.only_of(1)) == (2, 2)
    cells.unpin(0)
    assert (cells.pinned, cells.available) == (6, 4)
    assert cells.unpinned_in(0, 6) == 2
    cells.close(0)
    assert (cells.free, cells.pinned) == (4, 6)
    cells.check()


def test_more_than_there_is_cannot_be_taken() -> None:
    cells = Cells(3)
    cells.open(0)
    with pytest.raises(AssertionError):
        cells.extend(0, 4)
    with pytest.raises(AssertionError):
        cells.open(0)


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_agree_with_sets(seed: int) -> None:
    rng = random.Random(seed)
    cells, naive, fresh = Cells(60), dict[int, list[int]](), iter(range(10**6))
    pinned: set[int] = set()
    for _ in range(400):
        in_use = len({c for held in naive.values() for c in held})
        sequence = rng.randrange(8)
        if sequence not in naive:
            cells.open(sequence)
            naive[sequence] = []
            pinned.add(sequence)
            source = rng.choice(sorted(naive))
            if source != sequence and naive[source] and rng.random() < 0.6:
                stop = rng.randint(1, len(naive[source]))
                cells.share(source, sequence, stop)
                naive[sequence] = naive[source][:stop]
        elif (action := rng.random()) < 0.4:
            n = rng.randint(0, min(9, 60 - in_use))
            cells.extend(sequence, n)
            naive[sequence] += [next(fresh) for _ in range(n)]
        elif action < 0.55:
            start = rng.randint(0, len(naive[sequence]))
            cells.cut(sequence, start)
            del naive[sequence][start:]
        elif action < 0.7:
            cells.close(sequence)
            del naive[sequence]
            pinned.discard(sequence)
        elif action < 0.85:
            cells.unpin(sequence)
            pinned.discard(sequence)
        else:
            cells.pin(sequence)
            pinned.add(sequence)
        cells.check()
        assert cells.free == 60 - len({c for held in naive.values() for c in held})
        assert cells.pinned == len({c for s in pinned for c in naive[s]})
        for name, held in naive.items():
            others = {c for other, those in naive.items() if other != name for c in those}
            assert cells.length(name) == len(held)
            assert cells.only_of(name) == len(set(held) - others)
