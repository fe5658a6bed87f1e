"""What a filter, a score and a pick are: the three kinds of plug-ins of the decision. Each is an object behind an entry
point (`kvmesh.filters`, `kvmesh.scores`, `kvmesh.picks`) that the settings name (placement.entry.plugins reads them).
`placement/decide/PLUGINS.md` has the formula of each that is built in.

All are pure and are called with whole arrays. A filter can only refuse more: what the policy forbids is refused before
it is asked. A score must not fall where a predicted time or price rises, or pairs that it would prefer are left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from placement.decide.filters import Filtered
    from placement.decide.scores import NodeTimes, Predicted
    from placement.decide.settings import DecideSettings
    from placement.decide.types import BoolArray, Candidate, FloatArray, PlacementRequest, Snapshot


class Filter(Protocol):
    """Refuses nodes, for Reason.PLUGIN."""

    @property
    def name(self) -> str:
        """Its word in the settings."""
        ...

    def refuses(self, snapshot: Snapshot, request: PlacementRequest, filtered: Filtered) -> BoolArray:
        """Nodes that must not take the request, shape [n_nodes]. `filtered`: what the built-in filters say."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreView:
    """What a score may look at beside the predictions."""

    snapshot: Snapshot
    request: PlacementRequest
    times: NodeTimes
    settings: DecideSettings


class Score(Protocol):
    """One term of the cost, in seconds."""

    @property
    def name(self) -> str:
        """Its word in the settings."""
        ...

    def cost_s(self, ways: Predicted, view: ScoreView) -> FloatArray | None:
        """What each way costs by this, in the shape of `ways.total_s` or one that broadcasts to it; None: nothing."""
        ...


class Pick(Protocol):
    """Takes one of the candidates."""

    @property
    def name(self) -> str:
        """Its word in the settings."""
        ...

    def pick(self, near: Sequence[Candidate], rng: random.Random) -> Candidate:
        """One of `near`, which are as good as the best, best first; there is at least one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """A score with its weight, at least 0."""

    score: Score
    weight: float
