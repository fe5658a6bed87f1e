"""KV of runs and holds from outside: lengths, export, imports. Commands between steps; see mesh.node.engine."""

from __future__ import annotations

from edge_node.engine.blob import Rows
from edge_node.engine.book import CoreLimits, RunBook
from edge_node.engine.kv_store import KvStore, Sequence
from edge_node.engine.run import Hold
from mesh.errors import InvalidRequest, MeshError, Overloaded
from mesh.kv.hashing import BLOCK_TOKENS
from mesh.node.engine import ImportSpec, RunId


class KvAccess:
    """Every method raises errors of mesh.errors; one that fails changes nothing, except as `write` says."""

    def __init__(self, book: RunBook, store: KvStore, limits: CoreLimits) -> None:
        self._book = book
        self._store = store
        self._limits = limits

    def kv_tokens(self, run_id: RunId) -> int:
        """Leading positions with KV. Raises NotFound."""
        sequence = self._book.sequence(run_id)
        return sequence.leading if sequence is not None else 0

    def cached_tokens(self, token_ids: tuple[int, ...], salt: bytes) -> int:
        """What a run of these tokens would share now, short of the last one. Changes nothing."""
        return self._store.match(salt, token_ids, len(token_ids) - 1)[1]

    def export(self, run_id: RunId, start: int, stop: int) -> tuple[Rows, Rows]:
        """K and V of positions [start, stop), each [layers, tokens, heads, dim]. Raises NotFound, InvalidRequest."""
        sequence = self._book.sequence(run_id)
        have = sequence.leading if sequence is not None else 0
        if sequence is None or not 0 <= start < stop <= have:
            raise InvalidRequest(f"positions [{start}, {stop}) of {run_id!r}: it has KV of {have}", field="stop")
        return self._store.export(sequence, start, stop)

    def open_import(self, spec: ImportSpec) -> int:
        """A hold to be written to; see Engine.open_import. Room for `max_tokens` is reserved."""
        self._book.check_free(spec.run_id)
        limit = min(self._limits.max_context_tokens, self._store.capacity)
        if not 0 < len(spec.token_ids) <= spec.max_tokens:
            raise InvalidRequest(f"{len(spec.token_ids)} token ids for {spec.max_tokens} positions", field="max_tokens")
        if spec.max_tokens > limit:
            raise Overloaded(f"an import of {spec.max_tokens} tokens can never fit, {limit} could")
        first = spec.first_position
        if first % BLOCK_TOKENS or not 0 <= first < len(spec.token_ids):
            raise InvalidRequest(f"first_position {first} is no block's border below the ids", field="first_position")
        if first:
            return self._open_tail(spec)
        source, shared = self._store.match(spec.salt, spec.token_ids, len(spec.token_ids) - 1)
        shared -= shared % BLOCK_TOKENS
        source = source if shared else None
        if not self._store.has_id or self._store.cost(source, shared, spec.max_tokens) > self._store.room:
            raise Overloaded(f"no room for an import of {spec.max_tokens} tokens now ({self._store.room} are free)")
        sequence = self._store.open(spec.salt, list(spec.token_ids), source, shared)
        sequence.reserved = spec.max_tokens
        self._book.holds[spec.run_id] = Hold(sequence, spec.salt, max_tokens=spec.max_tokens)
        return shared

    def _open_tail(self, spec: ImportSpec) -> int:
        """Positions below `first_position` come by `join`, in cells that their own prefill takes."""
        n_tokens = spec.max_tokens - spec.first_position
        if not self._store.has_id or n_tokens > self._store.room:
            raise Overloaded(f"no room for an import of {n_tokens} tokens now ({self._store.room} are free)")
        sequence = self._store.open(spec.salt, list(spec.token_ids))
        sequence.first, sequence.reserved = spec.first_position, n_tokens
        self._book.holds[spec.run_id] = Hold(sequence, spec.salt, max_tokens=spec.max_tokens)
        return spec.first_position

    def join(self, run_id: RunId, head: RunId) -> None:
        """Put hold `head` in front of a tail; see Engine.join_kv."""
        tail, front = self._import(run_id), self._import(head)
        if tail is None or front is None or not tail.first or front.first:
            raise InvalidRequest(f"{run_id!r} is no tail of {head!r}", field="head")
        if front.length != tail.first:
            raise InvalidRequest(f"{head!r} has KV of {front.length}, not of {tail.first}", field="head")
        if front.salt != tail.salt or front.token_ids[: tail.first] != tail.token_ids[: tail.first]:
            raise InvalidRequest(f"{head!r} is of other tokens or of another namespace", field="head")
        hold = self._book.holds[run_id]
        self._store.join(front, tail)
        front.reserved = hold.max_tokens or 0
        self._book.holds[run_id] = Hold(front, hold.salt, max_tokens=hold.max_tokens)
        del self._book.holds[head]

    def _import(self, run_id: RunId) -> Sequence | None:
        """KV of a hold. Raises NotFound."""
        self._book.sequence(run_id)
        hold = self._book.holds.get(run_id)
        return None if hold is None else hold.sequence

    def write(self, run_id: RunId, start: int, k: Rows, v: Rows) -> None:
        """Append to a hold, be it an import or a prefill whose tail comes from elsewhere. If llama.cpp fails, the
        hold is gone."""
        hold = self._book.holds.get(run_id)
        if hold is None:
            self._book.sequence(run_id)  # raises NotFound if there is no run either
            raise InvalidRequest(f"{run_id!r} is running: KV can be written to a hold only", field="run_id")
        sequence, n_tokens = hold.sequence, int(k.shape[1])
        if sequence is None:
            raise InvalidRequest(f"hold {run_id!r} has no KV to append to", field="run_id")
        if start != sequence.stop:
            raise InvalidRequest(f"KV starts at {start}, hold {run_id!r} has {sequence.stop}", field="start")
        limit = hold.max_tokens if hold.max_tokens is not None else self._limits.max_context_tokens
        if start + n_tokens > limit:
            raise InvalidRequest(f"KV up to {start + n_tokens} in a hold of at most {limit}", field="max_tokens")
        beyond = sequence.length + n_tokens - max(sequence.reserved, sequence.length)
        if beyond > self._store.room or not self._store.make_room(n_tokens):
            raise Overloaded(f"no room for KV of {n_tokens} more tokens")
        try:
            self._store.append(sequence, k, v)
        except MeshError:
            del self._book.holds[run_id]
            self._store.drop(sequence)
            raise
