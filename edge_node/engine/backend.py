"""What the engine core asks of llama.cpp: the seam between our policy and its cache.

`llama.py` implements it over ctypes; tests implement it over lists. Sequence ids are 0 .. n_sequences - 1, and
`scratch` is one more that belongs to the KV store. Not thread-safe: one thread owns a backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_node.engine.blob import Blob


class DecodeStatus(Enum):
    """What came of a batch."""

    OK = "ok"
    NO_SLOT = "no_slot"  # no cells; the cache is as it was before
    FAILED = "failed"  # the sequences of the batch are in an unknown state


@dataclass(frozen=True, slots=True)
class BatchItem:
    """Tokens of one sequence at consecutive positions; `output` asks for the logits of the last one."""

    sequence: int
    start: int
    token_ids: Sequence[int]
    output: bool


class Backend(Protocol):
    """A unified KV cache and a model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def scratch(self) -> int: ...

    def decode(self, items: Sequence[BatchItem]) -> DecodeStatus:
        """Compute all items in one batch. Blocks."""
        ...

    def logits(self, item: int) -> NDArray[np.float32]:
        """Row [vocab] of item `item` of the last batch, a view that is valid until the next one."""
        ...

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Tag the cells of positions [start, stop) of `source` with `target` too. No bytes move."""

    def remove(self, sequence: int, start: int = 0) -> None:
        """Untag positions [start, end)."""

    def extent(self, sequence: int) -> tuple[int, int]:
        """Smallest and largest position, or (-1, -1)."""
        ...

    def save(self, sequence: int) -> Blob:
        """The sequence's state; empty on failure."""
        ...

    def restore(self, sequence: int, blob: Blob) -> bool:
        """Replace the sequence's state by a checked blob. False on failure; the sequence is then unknown."""
        ...

    def last_errors(self) -> str:
        """llama.cpp's last error lines, for messages."""
        ...
