"""Where work was sent so lately that the nodes' own figures cannot show it yet: by this entry, and by others. Pure.

A node reports its load some time after it was given work; until then a burst of decisions, over one or several
entries, would all see it idle. So each decision counts as one more waiting request, with the prompt tokens that it has
to compute, for as long as it is younger than the node's figures. One that is older is in them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from placement.decide.types import Snapshot

KEEP_S = 5.0
"""Figures that are older count as busy anyhow."""
MOST = 1_024
"""Decisions that are remembered of one entry: more in so short a time are the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One decision: the node that computes the prompt, tokens of it, and when, on this process' monotonic clock."""

    node_id: str
    prefill_tokens: int
    at_s: float


class InFlight:
    """Owned by an entry."""

    def __init__(self) -> None:
        self._own: deque[Sent] = deque(maxlen=MOST)
        self._others: dict[str, tuple[Sent, ...]] = {}

    def decided(self, node_id: str, prefill_tokens: int, now_s: float) -> None:
        """This entry sent work."""
        self._own.append(Sent(node_id=node_id, prefill_tokens=prefill_tokens, at_s=now_s))

    def own(self, now_s: float) -> tuple[Sent, ...]:
        """What this entry sent lately, for the others."""
        while self._own and now_s - self._own[0].at_s > KEEP_S:
            self._own.popleft()
        return tuple(self._own)

    def told(self, origin: str, sent: Iterable[Sent]) -> None:
        """All that another entry sent lately; replaces what it told before."""
        self._others[origin] = tuple(sent)[-MOST:]

    def lost(self, origin: str) -> None:
        """Another entry is gone; what it ran ends with it."""
        self._others.pop(origin, None)

    def applied(self, snapshot: Snapshot, now_s: float) -> Snapshot:
        """The snapshot with what its figures cannot show yet."""
        sent = [each for own in (self.own(now_s), *self._others.values()) for each in own]
        if not sent:
            return snapshot
        waiting, tokens = snapshot.waiting.copy(), snapshot.waiting_prefill_tokens.copy()
        for each in sent:
            row = snapshot.row_of(each.node_id)
            # NaN where the snapshot does not know when it was made: then its ages are of now.
            passed_s = now_s - snapshot.made_s if snapshot.made_s == snapshot.made_s else 0.0
            if row >= 0 and now_s - each.at_s < snapshot.age_s[row] + passed_s:
                waiting[row] += 1
                tokens[row] += each.prefill_tokens
        return replace(snapshot, waiting=waiting, waiting_prefill_tokens=tokens)
