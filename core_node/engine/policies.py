"""Who is admitted first. Pure: a policy is a function from a waiting request and a snapshot to a sort key.

The smallest key goes first. Others come from entry points of the group `kvmesh.scheduling_policies`: an object of type
`Policy` under the name that the setting `policy` chooses it by. A policy orders admissions only. Who is preempted is
always the worst by aged priority, so that no policy can make two requests take each other's memory in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

from mesh.errors import InvalidRequest

GROUP = "kvmesh.scheduling_policies"


class Queued(Protocol):
    """What a policy may know of a waiting request."""

    @property
    def priority(self) -> int:
        """Smaller is more urgent."""
        ...

    @property
    def arrival(self) -> int:
        """Its number in the order of arrival."""
        ...

    @property
    def arrived_s(self) -> float:
        """When it arrived, on the clock of `Snapshot.now_s`."""
        ...

    @property
    def n_tokens(self) -> int:
        """Tokens that it has now, prompt included."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """How many it may generate."""
        ...

    @property
    def predicted_tokens(self) -> int | None:
        """How many it will generate, as somebody predicted; None if nobody did."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The engine at the moment of a decision. `cached_tokens(request)` looks the request's prefix up when asked;
    `ageing_s` and `starvation_s` are settings."""

    now_s: float
    running: int
    waiting: int
    free_blocks: int
    ageing_s: float
    starvation_s: float
    cached_tokens: Callable[[Queued], int]


Key = tuple[float, ...]
Policy = Callable[[Queued, Snapshot], Key]


def aged_priority_s(priority: int, arrived_s: float, ageing_s: float) -> float:
    """The arrival, put off by `ageing_s` for each step of priority. Differences of two requests never change, so the
    order is fixed at arrival, and one of priority p is overtaken by one of priority q < p only if that arrives less
    than (p - q) * ageing_s later: that is the bound on its starvation."""
    return arrived_s + priority * ageing_s


def overdue(request: Queued, snapshot: Snapshot) -> bool:
    """Whether it has waited so long that it goes before all that have not."""
    return snapshot.now_s - request.arrived_s > snapshot.starvation_s


def fcfs(request: Queued, snapshot: Snapshot) -> Key:
    """First come, first served."""
    return (request.arrival,)


def priority(request: Queued, snapshot: Snapshot) -> Key:
    """The better priority first; waiting makes up for it (see `aged_priority_s`)."""
    return (aged_priority_s(request.priority, request.arrived_s, snapshot.ageing_s), request.arrival)


def longest_prefix(request: Queued, snapshot: Snapshot) -> Key:
    """Whoever finds most of its tokens in the cache first, so that they are used before they are evicted (Zheng et
    al., "SGLang", 2024); who is overdue goes before, by arrival."""
    if overdue(request, snapshot):
        return (0, 0, request.arrival)
    return (1, -snapshot.cached_tokens(request), request.arrival)


def shortest_predicted(request: Queued, snapshot: Snapshot) -> Key:
    """The shortest answer first, by prediction, or by what is allowed where nobody predicted; who is overdue goes
    before, by arrival."""
    if overdue(request, snapshot):
        return (0, 0, request.arrival)
    expected = request.max_new_tokens if request.predicted_tokens is None else request.predicted_tokens
    return (1, expected, request.arrival)


POLICIES: dict[str, Policy] = {
    "fcfs": fcfs,
    "priority": priority,
    "longest_prefix": longest_prefix,
    "shortest_predicted": shortest_predicted,
}


def find_policy(name: str) -> Policy:
    """Ours, or one of an installed package. Raises InvalidRequest with the list of names, or if two have this one."""
    others = entry_points(group=GROUP)
    found = [entry for entry in others if entry.name == name]
    if name in POLICIES and not found:
        return POLICIES[name]
    if len(found) == 1 and name not in POLICIES:
        policy: Policy = found[0].load()
        return policy
    if found:
        raise InvalidRequest(f"more than one scheduling policy is named {name!r}", field="policy")
    known = ", ".join(sorted({*POLICIES, *(entry.name for entry in others)}))
    raise InvalidRequest(f"there is no scheduling policy {name!r}; there are {known}", field="policy")
