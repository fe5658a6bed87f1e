"""Where this entry sent work lately, for other entries, and what they sent, for its own decisions.

A node reports its load some time after it was given work; until then a burst over several entries would see it idle.
What others sent goes into the notes of this entry's world (placement.entry.notes), as its own does: it counts until a
report of the node must have it. On one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from placement.entry.notes import Notes
from placement.predict.in_flight import Placed

KEEP_S = 5.0
"""A node that has not reported for so long counts as busy anyhow."""
MOST = 1_024
"""Decisions that are remembered of one entry: more in so short a time are the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One decision: the request, the node that computes the prompt, tokens of it, and when, on this process' monotonic
    clock."""

    request_id: str
    node_id: str
    prefill_tokens: int
    at_s: float


class InFlight:
    """Owned by an entry. `notes` of its world; without them others are not counted."""

    def __init__(self, notes: Notes | None = None) -> None:
        self.notes = notes
        self._own: deque[Sent] = deque(maxlen=MOST)
        self._others: dict[str, tuple[Sent, ...]] = {}

    def decided(self, request_id: str, node_id: str, prefill_tokens: int, now_s: float) -> None:
        """This entry sent work."""
        self._own.append(Sent(request_id=request_id, node_id=node_id, prefill_tokens=prefill_tokens, at_s=now_s))

    def own(self, now_s: float) -> tuple[Sent, ...]:
        """What this entry sent lately, for the others."""
        while self._own and now_s - self._own[0].at_s > KEEP_S:
            self._own.popleft()
        return tuple(self._own)

    def told(self, origin: str, sent: Iterable[Sent]) -> None:
        """All that another entry sent lately, over and over: what is new in it counts."""
        known = {each.request_id for each in self._others.get(origin, ())}
        now = tuple(sent)[-MOST:]
        self._others[origin] = now
        if self.notes is not None:
            for each in now:
                if each.request_id not in known:
                    what = Placed(runs=1, prefill_tokens=each.prefill_tokens, kv_tokens=each.prefill_tokens)
                    self.notes.placed(each.node_id, each.request_id, what, each.at_s)

    def lost(self, origin: str) -> None:
        """Another entry is gone; what it ran ends with it."""
        for each in self._others.pop(origin, ()):
            if self.notes is not None:
                self.notes.left(each.node_id, each.request_id)
