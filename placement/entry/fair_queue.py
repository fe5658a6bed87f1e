"""Who is next: priority bands, and inside a band weighted fair queueing between tenants in virtual time. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): the request with the least start tag goes first; its
tenant's next one starts where it finishes, cost / weight later. A tenant that was idle starts at the virtual time of
now, so that nobody saves up a share; when nothing waits any more, all tags are forgotten.

A lower band waits until no higher one has a request; how long a request may wait is the caller's limit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ticket:
    """A request that waits. `band`: smaller first. `cost_tokens`: prompt and expected output. `weight` > 0."""

    tenant: str
    band: int
    weight: float
    cost_tokens: float


@dataclass(slots=True, eq=False)
class _Flow:
    """One tenant in one band: what waits, oldest first, and the start tag of the first."""

    start: float
    order: int
    waiting: deque[Ticket] = field(default_factory=deque)


class _Band:
    """Fair between its tenants."""

    def __init__(self) -> None:
        self.flows: dict[str, _Flow] = {}
        self._now = 0.0
        self._n = 0

    def push(self, ticket: Ticket) -> None:
        flow = self.flows.get(ticket.tenant)
        if flow is None:
            flow = self.flows[ticket.tenant] = _Flow(self._now, self._n)
        elif not flow.waiting:
            flow.start = max(flow.start, self._now)
        self._n += 1
        flow.waiting.append(ticket)

    def pop(self) -> Ticket | None:
        ready = [flow for flow in self.flows.values() if flow.waiting]
        if not ready:
            return None
        flow = min(ready, key=lambda f: (f.start, f.order))
        ticket = flow.waiting.popleft()
        self._now = flow.start
        flow.start += max(1.0, ticket.cost_tokens) / ticket.weight
        self._n += 1
        flow.order = self._n
        self.forget_idle()
        return ticket

    def forget_idle(self) -> None:
        if not any(flow.waiting for flow in self.flows.values()):
            self.flows.clear()  # the busy time is over
        elif len(self.flows) > 1_000:
            late = {t: f for t, f in self.flows.items() if f.waiting or f.start > self._now}
            self.flows = late


class FairQueue:
    """All waiting requests of one entry, at most `most` and `most_per_tenant` of a tenant."""

    def __init__(self, *, most: int = 1024, most_per_tenant: int = 256) -> None:
        self._most = most
        self._most_per_tenant = most_per_tenant
        self._bands: dict[int, _Band] = {}
        self._count: dict[str, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def waiting_of(self, tenant: str) -> int:
        """Requests of a tenant that wait."""
        return self._count.get(tenant, 0)

    def push(self, ticket: Ticket) -> Ticket | None:
        """Take in a request. Returns one that has to go for want of room: itself if its tenant has too many, else the
        newest of the tenant that has the most for its weight."""
        if self.waiting_of(ticket.tenant) >= self._most_per_tenant:
            return ticket
        self._bands.setdefault(ticket.band, _Band()).push(ticket)
        self._add(ticket, 1)
        if self._total <= self._most:
            return None
        victim = self._newest_of_the_greediest()
        self.remove(victim)
        return victim

    def pop(self) -> Ticket | None:
        """The next one, or None if nothing waits."""
        for number in sorted(self._bands):
            ticket = self._bands[number].pop()
            if not self._bands[number].flows:
                del self._bands[number]
            if ticket is not None:
                self._add(ticket, -1)
                return ticket
        return None

    def remove(self, ticket: Ticket) -> bool:
        """Take out one that waits no longer; False if it does not wait. What it would have cost is not counted."""
        band = self._bands.get(ticket.band)
        flow = None if band is None else band.flows.get(ticket.tenant)
        if band is None or flow is None or ticket not in flow.waiting:
            return False
        flow.waiting.remove(ticket)
        self._add(ticket, -1)
        band.forget_idle()
        if not band.flows:
            del self._bands[ticket.band]
        return True

    def _add(self, ticket: Ticket, n: int) -> None:
        self._total += n
        left = self._count.get(ticket.tenant, 0) + n
        if left:
            self._count[ticket.tenant] = left
        else:
            del self._count[ticket.tenant]

    def _newest_of_the_greediest(self) -> Ticket:
        """Of the last band that waits, so that a flood cannot push out what is more urgent."""
        flows = [flow for flow in self._bands[max(self._bands)].flows.values() if flow.waiting]
        greediest = max(flows, key=lambda f: (len(f.waiting) / f.waiting[-1].weight, f.order))
        return greediest.waiting[-1]
