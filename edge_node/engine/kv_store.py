"""Owns llama.cpp's cache: sequence ids, cells, kept prefixes, export and import.

A *sequence* belongs to a run or hold (live), or was one and is kept for its prefix. Kept ones are evicted, least
recently used first, when cells or ids are needed. Prefixes are found by comparing token ids within a salt's
namespace, over live sequences too, so that runs side by side share a common prompt; sharing tags cells and copies
nothing. Every change here is made to the backend and to our ledger alike, and `check` compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from edge_node.engine.backend import Backend
from edge_node.engine.blob import BlobLayout, Rows, build, check, parse
from edge_node.engine.cells import Cells
from mesh.errors import Internal, PayloadCorrupt

_STRIDE = 64  # tokens compared at a time


@dataclass(slots=True, eq=False)
class Sequence:
    """KV of positions [first, first + length). `first` is 0 but for a tail whose head comes later (`join`).
    `token_ids` are the ids known: more than `length` in a run that has yet to
    compute them, fewer in an import that went beyond what was announced. In a run it is the run's own list."""

    id: int
    salt: bytes
    token_ids: list[int]
    length: int = 0
    reserved: int = field(default=0)  # positions promised to it, KV or not
    first: int = field(default=0)

    @property
    def known(self) -> int:
        """Leading positions with KV and a known id: what another sequence may share."""
        return min(self.leading, len(self.token_ids))

    @property
    def leading(self) -> int:
        """Positions from 0 on that have KV."""
        return 0 if self.first else self.length

    @property
    def stop(self) -> int:
        """One after the last position that has KV."""
        return self.first + self.length


class KvStore:
    """See the module. Not thread-safe; the engine core owns it."""

    def __init__(self, backend: Backend, layout: BlobLayout, *, capacity: int, n_sequences: int) -> None:
        self._backend = backend
        self._layout = layout
        self._cells = Cells(capacity)
        self._ids = list(range(n_sequences - 1, -1, -1))
        self._live: dict[int, Sequence] = {}
        self._kept: dict[int, Sequence] = {}  # in order of use, the oldest first

    # --- room -----------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self._cells.capacity

    @property
    def used(self) -> int:
        """Cells of live sequences, shared ones counted once."""
        return self._cells.pinned

    @property
    def room(self) -> int:
        """Cells that could be had now: free, or of kept prefixes, and promised to nobody."""
        return self._cells.available - sum(max(0, s.reserved - s.length) for s in self._live.values())

    @property
    def live_ids(self) -> set[int]:
        """Ids of the sequences that runs and holds have."""
        return set(self._live)

    @property
    def has_id(self) -> bool:
        """Whether a sequence could be opened now."""
        return bool(self._ids or self._kept)

    def only_of(self, sequence: Sequence) -> int:
        """Cells that dropping this sequence would free."""
        return self._cells.only_of(sequence.id)

    def make_room(self, n_cells: int) -> bool:
        """Evict kept prefixes until `n_cells` are free. False if that cannot be."""
        while self._cells.free < n_cells:
            if not self.evict_one():
                return False
        return True

    def evict_one(self, spare: Sequence | None = None) -> bool:
        """Evict the kept prefix that was not used for longest, other than `spare`. False if there is none."""
        victim = next((s for s in self._kept.values() if s is not spare), None)
        if victim is None:
            return False
        del self._kept[victim.id]
        self._forget(victim)
        return True

    # --- prefixes -------------------------------------------------------------------------------------------------

    def match(self, salt: bytes, token_ids: SequenceOf[int], limit: int) -> tuple[Sequence | None, int]:
        """The sequence that shares the longest prefix, and how many tokens of it, at most `limit`."""
        best: Sequence | None = None
        most = 0
        for group in (self._kept, self._live):
            for sequence in group.values():
                if sequence.salt != salt or (bound := min(limit, sequence.known)) <= most:
                    continue
                shared = _common(sequence.token_ids, token_ids, bound)
                if shared > most:
                    best, most = sequence, shared
        return best, most

    def cost(self, source: Sequence | None, shared: int, n_tokens: int) -> int:
        """Cells of `room` that a sequence of `n_tokens` takes if it shares `shared` tokens of `source`."""
        kept = self._cells.unpinned_in(source.id, shared) if source is not None else 0
        return n_tokens - shared + kept

    def open(self, salt: bytes, token_ids: list[int], source: Sequence | None = None, shared: int = 0) -> Sequence:
        """A live sequence that starts with `shared` tokens of `source`. There must be an id (`has_id`)."""
        if source is not None and source.id in self._kept:
            self._kept[source.id] = self._kept.pop(source.id)  # used just now
        if not self._ids and not self.evict_one(spare=source):
            return self._take_over(source, shared, salt, token_ids)
        sequence = Sequence(self._ids.pop(), salt, token_ids)
        self._cells.open(sequence.id)
        self._live[sequence.id] = sequence
        if source is not None and shared:
            self._cells.share(source.id, sequence.id, shared)
            self._backend.copy(source.id, sequence.id, 0, shared)
            sequence.length = shared
        return sequence

    def _take_over(self, source: Sequence | None, shared: int, salt: bytes, token_ids: list[int]) -> Sequence:
        """No other id is left: the kept source itself becomes the new sequence."""
        if source is None or source.id not in self._kept:
            raise AssertionError("no sequence id is left")
        del self._kept[source.id]
        sequence = Sequence(source.id, salt, token_ids, source.length)
        self._live[sequence.id] = sequence
        self._cells.pin(sequence.id)
        self.cut(sequence, shared)
        return sequence

    def keep(self, sequence: Sequence) -> None:
        """A live sequence is no longer needed: keep it for its prefix, unless a kept one holds all of that."""
        sequence.reserved = 0
        self.cut(sequence, sequence.known)
        sequence.token_ids = sequence.token_ids[: sequence.length]
        del self._live[sequence.id]
        namesakes = [s for s in self._kept.values() if s.salt == sequence.salt]
        if sequence.length == 0 or any(_is_prefix(sequence, other) for other in namesakes):
            self._forget(sequence)
            return
        for other in namesakes:
            if _is_prefix(other, sequence):
                del self._kept[other.id]
                self._forget(other)
        self._cells.unpin(sequence.id)
        self._kept[sequence.id] = sequence

    # --- growing and shrinking ------------------------------------------------------------------------------------

    def extend(self, sequence: Sequence, n_tokens: int) -> None:
        """The backend has computed `n_tokens` more positions."""
        self._cells.extend(sequence.id, n_tokens)
        sequence.length += n_tokens

    def cut(self, sequence: Sequence, length: int) -> None:
        """Keep positions [0, length) only."""
        if length < sequence.length:
            self._backend.remove(sequence.id, length)
            self._cells.cut(sequence.id, length)
            sequence.length = length

    def drop(self, sequence: Sequence) -> None:
        """A live sequence goes, and nothing of it is kept."""
        del self._live[sequence.id]
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._backend.remove(sequence.id)
        self._cells.close(sequence.id)
        self._ids.append(sequence.id)

    # --- KV in and out --------------------------------------------------------------------------------------------

    def export(self, sequence: Sequence, start: int, stop: int) -> tuple[Rows, Rows]:
        """K and V of positions [start, stop), 0 <= start < stop <= length, each [layers, tokens, heads, dim]."""
        scratch = self._backend.scratch
        self._backend.copy(sequence.id, scratch, start, stop)
        try:
            blob = self._backend.save(scratch)
        finally:
            self._backend.remove(scratch)
        return parse(blob, self._layout, start, stop)

    def append(self, sequence: Sequence, k: Rows, v: Rows) -> None:
        """Append KV at position `stop`; there must be room. On an error the sequence must be dropped.

        llama.cpp clears a sequence before it reads into it, so the rows go into the scratch sequence and its cells
        are then tagged as the target's."""
        start, stop = sequence.stop, sequence.stop + int(k.shape[1])
        scratch = self._backend.scratch
        blob = build(self._layout, start, k, v)
        check(blob, self._layout, start, stop)
        try:
            if not self._backend.restore(scratch, blob):
                raise PayloadCorrupt(f"llama.cpp refused the KV: {self._backend.last_errors() or 'no reason given'}")
            if self._backend.extent(scratch) != (start, stop - 1):
                raise Internal(f"llama.cpp restored positions {self._backend.extent(scratch)}, not [{start}, {stop})")
            self._backend.copy(scratch, sequence.id, start, stop)
        finally:
            self._backend.remove(scratch)
        if self._backend.extent(sequence.id) != (sequence.first, stop - 1):
            raise Internal(f"after an import llama.cpp has positions {self._backend.extent(sequence.id)}")
        self.extend(sequence, stop - start)

    def join(self, head: Sequence, tail: Sequence) -> None:
        """Give the cells of `tail`, which begins where `head` ends, to `head`; the tail is gone."""
        self._backend.copy(tail.id, head.id, tail.first, tail.stop)
        self._cells.append(tail.id, head.id)
        head.length, head.token_ids = tail.stop, tail.token_ids
        self.drop(tail)

    # --- integrity ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless our account and the backend's agree."""
        self._cells.check()
        owned = {**self._live, **self._kept}
        assert len(owned) == len(self._live) + len(self._kept), "a sequence is both live and kept"
        assert len(self._ids) == len(set(self._ids)), "a sequence id is free twice"
        assert not owned.keys() & set(self._ids), "a sequence id is both free and in use"
        for sequence in owned.values():
            assert self._cells.length(sequence.id) == sequence.length, f"length of sequence {sequence.id} is off"
            want = (sequence.first, sequence.stop - 1) if sequence.length else (-1, -1)
            got = self._backend.extent(sequence.id)
            assert got == want, f"llama.cpp has positions {got} of sequence {sequence.id}, we have {want}"
        for unused in (*self._ids, self._backend.scratch):
            assert self._backend.extent(unused) == (-1, -1), f"unused sequence {unused} is not empty"


def _is_prefix(shorter: Sequence, longer: Sequence) -> bool:
    n = shorter.length
    return n <= longer.length and _common(shorter.token_ids, longer.token_ids, n) == n


def _common(left: SequenceOf[int], right: SequenceOf[int], bound: int) -> int:
    """Length of the common prefix, at most `bound`. Slices are compared, which is quick for lists."""
    at = 0
    while at < bound:
        stop = min(at + _STRIDE, bound)
        if list(left[at:stop]) != list(right[at:stop]):
            return at + next(i for i in range(stop - at) if left[at + i] != right[at + i])
        at = stop
    return bound
