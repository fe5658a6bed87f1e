"""Which running requests should leave the node where they are, and why. Pure.

- drain: the node takes nothing new and waits for what runs there.
- overload: others wait at the node and its KV pool is nearly full, or many wait: one run at a time goes, the one that
  has the most left to do, since a move costs the same however long it stays.
- link: the round trip to the node has grown far beyond what it was when the request came there.

Where a request may go instead is another question (placement.decide.decide, with the same filters as ever); a node
that is no better off than the one to leave is not a place to go (`is_relief`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from placement.decide.moves import Progress
from placement.decide.types import Snapshot


class Pressure(Enum):
    """Why a request should leave."""

    DRAIN = "drain"
    OVERLOAD = "overload"
    LINK = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelocateSettings:
    """Thresholds. A request is not looked at again for `again_s` after a try, a node not for `node_again_s` after one
    of its runs was sent away for overload, so that the effect shows first."""

    again_s: float = 5.0
    node_again_s: float = 2.0
    least_left_tokens: int = 16
    full_ratio: float = 0.9  # of the KV pool, with others waiting
    many_waiting: int = 4
    most_load_age_s: float = 3.0
    rtt_growth_ratio: float = 4.0
    rtt_growth_s: float = 0.1


DEFAULT_RELOCATION = RelocateSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A running request of this entry. `rtt_s`: round trip to its node when it came there; NaN: not known then."""

    request_id: str
    node_id: str
    progress: Progress
    rtt_s: float
    tried_ago_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """One that should leave."""

    request_id: str
    pressure: Pressure


def departures(
    snapshot: Snapshot,
    residents: Iterable[Resident],
    *,
    node_tried_ago_s: dict[str, float],
    settings: RelocateSettings = DEFAULT_RELOCATION,
) -> tuple[Departure, ...]:
    """Those that should leave now; for overload at most one of each node."""
    found: list[Departure] = []
    relieved: dict[str, Resident] = {}
    for resident in residents:
        row = snapshot.row_of(resident.node_id)
        settled = resident.tried_ago_s < settings.again_s
        if row < 0 or settled or resident.progress.left_tokens < settings.least_left_tokens:
            continue
        if snapshot.draining[row]:
            found.append(Departure(request_id=resident.request_id, pressure=Pressure.DRAIN))
        elif _link_is_worse(float(snapshot.rtt_s[row]), resident.rtt_s, settings):
            found.append(Departure(request_id=resident.request_id, pressure=Pressure.LINK))
        elif is_overloaded(snapshot, row, settings):
            if node_tried_ago_s.get(resident.node_id, np.inf) < settings.node_again_s:
                continue
            longest = relieved.get(resident.node_id)
            if longest is None or resident.progress.left_tokens > longest.progress.left_tokens:
                relieved[resident.node_id] = resident
    found += [Departure(request_id=r.request_id, pressure=Pressure.OVERLOAD) for r in relieved.values()]
    return tuple(found)


def is_overloaded(snapshot: Snapshot, row: int, settings: RelocateSettings = DEFAULT_RELOCATION) -> bool:
    """Whether a node has more than it can do. A stale load tells nothing, and nothing is done on it."""
    waiting, capacity = int(snapshot.waiting[row]), int(snapshot.kv_capacity_tokens[row])
    if not waiting or float(snapshot.age_s[row]) > settings.most_load_age_s:
        return False
    full = capacity > 0 and int(snapshot.kv_free_tokens[row]) < (1.0 - settings.full_ratio) * capacity
    return full or waiting >= settings.many_waiting


def is_relief(
    snapshot: Snapshot, source: int, target: int, pressure: Pressure, settings: RelocateSettings = DEFAULT_RELOCATION
) -> bool:
    """Whether row `target` is better off than row `source` in what the request should leave for."""
    match pressure:
        case Pressure.DRAIN:
            return True  # the filters have seen to the rest
        case Pressure.OVERLOAD:
            return int(snapshot.waiting[target]) == 0 and not is_overloaded(snapshot, target, settings)
        case Pressure.LINK:
            if target == snapshot.entry_row:
                return True
            return bool(snapshot.rtt_s[target] < snapshot.rtt_s[source] / 2)


def _link_is_worse(now_s: float, then_s: float, settings: RelocateSettings) -> bool:
    # Not a number, on either side, compares as no.
    return now_s > settings.rtt_growth_ratio * then_s and now_s > then_s + settings.rtt_growth_s
