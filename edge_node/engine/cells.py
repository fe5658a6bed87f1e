"""Our own account of a unified cache: which cells each sequence holds, and how many are free. Pure.

llama.cpp does not say which cell a token went to, nor how many are free, so the ledger numbers cells itself: a
cell is a (token, place) that one or more sequences hold, counted once however many share it. A sequence is
*pinned* while a run or hold needs it; cells that only unpinned sequences hold can be had by evicting.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray


class Cells:
    """Ledger of `capacity` cells. Invariant: free + held = capacity, and pinned cells are held."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pinned = 0  # cells that at least one pinned sequence holds
        self._holders = np.zeros(capacity, np.int32)  # sequences per cell
        self._pins = np.zeros(capacity, np.int32)  # pinned sequences per cell
        self._free = array("i", range(capacity))
        self._of: dict[int, array[int]] = {}
        self._pinned: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Cells that are free or would be, were every unpinned sequence evicted."""
        return self.capacity - self.pinned

    def length(self, sequence: int) -> int:
        """Positions that the sequence holds."""
        return len(self._of.get(sequence, ()))

    def only_of(self, sequence: int) -> int:
        """Cells that would become free if this sequence went."""
        return int((self._holders[_index(self._of[sequence])] == 1).sum())

    def unpinned_in(self, sequence: int, stop: int) -> int:
        """Cells of positions [0, stop) that no pinned sequence holds: what pinning a copy would take away."""
        return int((self._pins[_index(self._of[sequence][:stop])] == 0).sum())

    def open(self, sequence: int) -> None:
        """A new, empty, pinned sequence."""
        if sequence in self._of:
            raise AssertionError(f"sequence {sequence} is in use")
        self._of[sequence] = array("i")
        self._pinned.add(sequence)

    def extend(self, sequence: int, n_cells: int) -> None:
        """Take `n_cells` free cells for the next positions."""
        if n_cells > len(self._free):
            raise AssertionError(f"{n_cells} cells wanted, {len(self._free)} free")
        taken = self._free[len(self._free) - n_cells :]
        del self._free[len(self._free) - n_cells :]
        self._of[sequence].extend(taken)
        index = _index(taken)
        self._holders[index] = 1
        if sequence in self._pinned:
            self._pins[index] = 1
            self.pinned += n_cells

    def share(self, source: int, target: int, stop: int) -> None:
        """Let the empty `target` hold positions [0, stop) of `source` too."""
        if self._of[target] or stop > len(self._of[source]):
            raise AssertionError("only an empty sequence can share, and only what is there")
        cells = self._of[source][:stop]
        self._of[target].extend(cells)
        index = _index(cells)
        self._holders[index] += 1
        if target in self._pinned:
            self._pin(index)

    def append(self, source: int, target: int) -> None:
        """Let `target` hold all positions of `source` too, behind its own."""
        cells = self._of[source]
        self._of[target].extend(cells)
        index = _index(cells)
        self._holders[index] += 1
        if target in self._pinned:
            self._pin(index)

    def cut(self, sequence: int, start: int) -> None:
        """Give up positions [start, end)."""
        cells = self._of[sequence][start:]
        del self._of[sequence][start:]
        index = _index(cells)
        if sequence in self._pinned:
            self._unpin(index)
        self._holders[index] -= 1
        self._free.extend(array("i", index[self._holders[index] == 0].tolist()))

    def close(self, sequence: int) -> None:
        """Give up all positions and the id."""
        self.cut(sequence, 0)
        del self._of[sequence]
        self._pinned.discard(sequence)

    def pin(self, sequence: int) -> None:
        """A run or hold needs it. Idempotent."""
        if sequence not in self._pinned:
            self._pinned.add(sequence)
            self._pin(_index(self._of[sequence]))

    def unpin(self, sequence: int) -> None:
        """It may be evicted. Idempotent."""
        if sequence in self._pinned:
            self._pinned.discard(sequence)
            self._unpin(_index(self._of[sequence]))

    def check(self) -> None:
        """Raise AssertionError if the counts are not those of the sequences."""
        holders, pins = np.zeros_like(self._holders), np.zeros_like(self._pins)
        for sequence, cells in self._of.items():
            index = _index(cells)
            assert len(np.unique(index)) == len(index), f"sequence {sequence} holds a cell twice"
            holders[index] += 1
            if sequence in self._pinned:
                pins[index] += 1
        free = _index(self._free)
        assert np.array_equal(holders, self._holders), "holder counts are off"
        assert np.array_equal(pins, self._pins), "pin counts are off"
        assert int((pins > 0).sum()) == self.pinned, "the number of pinned cells is off"
        assert len(free) + int((holders > 0).sum()) == self.capacity, "free and held cells do not add up"
        assert not holders[free].any(), "a free cell is held"

    def _pin(self, index: NDArray[np.int32]) -> None:
        self.pinned += int((self._pins[index] == 0).sum())
        self._pins[index] += 1

    def _unpin(self, index: NDArray[np.int32]) -> None:
        self._pins[index] -= 1
        self.pinned -= int((self._pins[index] == 0).sum())


def _index(cells: array[int]) -> NDArray[np.int32]:
    """A copy as an index array; a view would lock the array against growing."""
    return np.array(cells, np.int32)
