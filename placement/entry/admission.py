"""Whether an entry takes a request now: its tenant's rate limits, then the gate with its fair shares.

A request is counted when it comes (before anything is worked out for it, so that a flood costs little), charged for
its tokens when they are known, and given back what it did not use. An edge that has not heard of placement for
OFFLINE_AFTER_S gives out the policy's share for sites that are cut off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mesh.errors import Overloaded
from mesh.identity.place import Tier
from placement.entry.fair_queue import Ticket
from placement.entry.gate import MAX_WAIT_S, Gate
from placement.entry.rate_limit import RateLimiter, Wait
from placement.entry.world import World
from placement.policy.rules import Policy

OFFLINE_AFTER_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What a request was charged, to be settled once at its end. `limited`: tokens were counted."""

    tenant: str
    charged_tokens: int
    prompt_tokens: int


class Admission:
    """One per entry."""

    def __init__(self, world: World, own_tier: Tier, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._world = world
        self._own_tier = own_tier
        self._clock = clock
        self._limiter = RateLimiter()
        self._gate = Gate(world.snapshot, clock=clock)

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._gate.waiting

    def count(self, tenant: str, policy: Policy) -> None:
        """A request came. Raises Overloaded (with `rule` and `retry_after_s`) over the tenant's rate."""
        self._raise(self._limiter.admit(tenant, policy.limits, offline=self._offline(), now_s=self._clock()), tenant)

    async def enter(
        self, tenant: str, policy: Policy, *, prompt_tokens: int, max_tokens: int, deadline_s: float | None
    ) -> Admitted:
        """Return when it is the request's turn; `leave` follows once. Raises Overloaded, and nothing is charged."""
        charged = prompt_tokens + max_tokens
        wait = self._limiter.charge(tenant, policy.limits, charged, offline=self._offline(), now_s=self._clock())
        if wait is not None:
            self._limiter.give_back(tenant, 0, requests=1)  # it comes again
        self._raise(wait, tenant)
        ticket = Ticket(tenant=tenant, band=policy.priority, weight=policy.share, cost_tokens=float(charged))
        max_wait_s = MAX_WAIT_S if deadline_s is None else min(MAX_WAIT_S, deadline_s)
        try:
            await self._gate.enter(ticket, max_wait_s=max_wait_s)
        except BaseException:
            self._limiter.give_back(tenant, charged)
            raise
        return Admitted(tenant=tenant, charged_tokens=charged, prompt_tokens=prompt_tokens)

    def leave(self, admitted: Admitted, generated_tokens: int | None) -> None:
        """The request ended with so many tokens; None: it never ran."""
        used = 0 if generated_tokens is None else admitted.prompt_tokens + generated_tokens
        self._limiter.give_back(admitted.tenant, max(0, admitted.charged_tokens - used))
        self._gate.leave()

    def _offline(self) -> bool:
        return self._own_tier is Tier.EDGE and self._world.snapshot_age_s() > OFFLINE_AFTER_S

    def _raise(self, wait: Wait | None, tenant: str) -> None:
        if wait is None:
            return
        message = f"tenant {tenant} is over {wait.rule} of its policy here: try again in {wait.retry_after_s:.1f} s"
        raise Overloaded(message, rule=wait.rule, retry_after_s=f"{wait.retry_after_s:.3f}")
