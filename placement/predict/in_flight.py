"""Requests that were given to nodes and are in no load report of theirs yet. Pure.

Without it, all decisions that are taken between two reports see the same idle node, and a burst falls on it. A request
counts until a report that was made a moment after it was placed has come, or until it ended. Memory: `_MOST` requests.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_LONGEST_S = 60.0  # without any report; the node is stale by then
_MOST = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What a request will be to a node. `runs`: 1 where it decodes, 0 where it is only prefilled."""

    runs: int
    prefill_tokens: int
    kv_tokens: int


NOTHING = Placed(runs=0, prefill_tokens=0, kv_tokens=0)


class InFlight:
    """Owned by an entry's world; on one thread."""

    def __init__(self) -> None:
        self._placed: OrderedDict[tuple[str, str], tuple[Placed, float]] = OrderedDict()
        self._keys: dict[str, set[str]] = {}  # node id -> keys

    def placed(self, node_id: str, key: str, what: Placed, now_s: float) -> None:
        """The request of this key was given to this node."""
        self._placed[node_id, key] = what, now_s
        self._keys.setdefault(node_id, set()).add(key)
        if len(self._placed) > _MOST:
            (oldest, old_key), _ = next(iter(self._placed.items()))
            self.left(oldest, old_key)

    def left(self, node_id: str, key: str) -> None:
        """It is not there any more; unknown ones are fine."""
        if self._placed.pop((node_id, key), None) is not None:
            keys = self._keys[node_id]
            keys.discard(key)
            if not keys:
                del self._keys[node_id]

    def at(self, node_id: str, heard_s: float, now_s: float, *, grace_s: float) -> Placed:
        """The sum of what the node's report, heard at `heard_s`, cannot know; the rest is forgotten. `grace_s`: from a
        decision until a report that is heard must have it."""
        if node_id not in self._keys:
            return NOTHING
        runs = prefill_tokens = kv_tokens = 0
        for key in tuple(self._keys[node_id]):
            what, at_s = self._placed[node_id, key]
            if heard_s > at_s + grace_s or not 0 <= now_s - at_s <= _LONGEST_S:
                self.left(node_id, key)
                continue
            runs, kv_tokens = runs + what.runs, kv_tokens + what.kv_tokens
            prefill_tokens += what.prefill_tokens
        return Placed(runs=runs, prefill_tokens=prefill_tokens, kv_tokens=kv_tokens)
