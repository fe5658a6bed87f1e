"""A backend made of lists: the model's next token is a fixed function of all tokens before, read from its cells.

So a run's tokens are right only if the cells of its sequence hold exactly its tokens, however they came there. K
of layer 0 holds the token id itself, so that exported and imported KV carries it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_node.engine.backend import BatchItem, DecodeStatus
from edge_node.engine.blob import Blob, BlobLayout, build, parse
from mesh.errors import PayloadCorrupt

VOCAB = 97
EOS = 96
LAYOUT = BlobLayout(n_layers=2, n_kv_heads=1, head_dim=4)


def next_token(token_ids: Sequence[int]) -> int:
    """What the model says after these tokens."""
    value = 7
    for token_id in token_ids:
        value = (value * 31 + token_id + 1) % 1_000_003
    return value % VOCAB


def continue_(token_ids: Sequence[int], n_tokens: int) -> list[int]:
    """The next `n_tokens`, one after the other."""
    ids = list(token_ids)
    for _ in range(n_tokens):
        ids.append(next_token(ids))
    return ids[len(token_ids) :]


class ListBackend:
    """Implements Backend. `fail_next`: statuses that the next batches get instead of being computed."""

    def __init__(self, n_cells: int, n_sequences: int) -> None:
        self.n_cells = n_cells
        self.scratch = n_sequences
        self.vocab_size = VOCAB
        self.fail_next: list[DecodeStatus] = []
        self.refuse_restore = False
        self.batches: list[list[BatchItem]] = []
        self._sequences: list[dict[int, int]] = [{} for _ in range(n_sequences + 1)]  # position -> cell
        self._cells: dict[int, int] = {}  # cell -> token
        self._next_cell = 0
        self._rows: list[NDArray[np.float32]] = []

    @property
    def used(self) -> int:
        return len(self._cells)

    def tokens(self, sequence: int) -> list[int]:
        cells = self._sequences[sequence]
        return [self._cells[cells[p]] for p in sorted(cells)]

    def decode(self, items: Sequence[BatchItem]) -> DecodeStatus:
        if self.fail_next:
            return self.fail_next.pop(0)
        if self.used + sum(len(i.token_ids) for i in items) > self.n_cells:
            return DecodeStatus.NO_SLOT
        self.batches.append(list(items))
        self._rows = []
        for item in items:
            assert item.token_ids, "an empty item"
            for offset, token_id in enumerate(item.token_ids):
                self._put(item.sequence, item.start + offset, token_id)
            row = np.zeros(VOCAB, np.float32)
            if item.output:
                row[next_token(self.tokens(item.sequence))] = 1.0
            self._rows.append(row)
        return DecodeStatus.OK

    def _put(self, sequence: int, position: int, token_id: int) -> None:
        cells = self._sequences[sequence]
        assert position == len(cells), f"position {position} after {len(cells)}"
        cells[position] = self._next_cell
        self._cells[self._next_cell] = token_id
        self._next_cell += 1

    def logits(self, item: int) -> NDArray[np.float32]:
        return self._rows[item]

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        for position, cell in self._sequences[source].items():
            if start <= position < stop:
                assert position not in self._sequences[target]
                self._sequences[target][position] = cell

    def remove(self, sequence: int, start: int = 0) -> None:
        cells = self._sequences[sequence]
        for position in [p for p in cells if p >= start]:
            del cells[position]
        held = {cell for cells in self._sequences for cell in cells.values()}
        self._cells = {cell: token_id for cell, token_id in self._cells.items() if cell in held}

    def extent(self, sequence: int) -> tuple[int, int]:
        cells = self._sequences[sequence]
        return (min(cells), max(cells)) if cells else (-1, -1)

    def save(self, sequence: int) -> Blob:
        low, high = self.extent(sequence)
        k = np.zeros(LAYOUT.shape(high - low + 1), np.float16)
        k[0, :, 0, 0] = self.tokens(sequence)
        return build(LAYOUT, low, k, -k)

    def restore(self, sequence: int, blob: Blob) -> bool:
        self.remove(sequence)
        if self.refuse_restore:
            return False
        n_tokens = next(n for n in range(self.n_cells + 1) if LAYOUT.blob_bytes(n) == blob.size)
        for start in range(self.n_cells):
            try:
                k, _ = parse(blob, LAYOUT, start, start + n_tokens)
            except PayloadCorrupt:
                continue
            for offset in range(n_tokens):
                self._sequences[sequence][start + offset] = self._next_cell
                self._cells[self._next_cell] = int(k[0, offset, 0, 0])
                self._next_cell += 1
            return self.used <= self.n_cells
        return False

    def last_errors(self) -> str:
        return "the list is torn"
