"""Rate limits of tenants at one entry: token buckets in virtual time, one for requests and one for tokens. Pure.

A bucket holds BURST_S seconds of its rate, so that over any time t a tenant gets at most rate * (t + BURST_S) and one
request more. A request that costs more than a bucket holds is taken when the bucket is full and leaves it in debt: it
is late, not impossible. Each entry counts for itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from placement.policy.rules import RateLimits

BURST_S = 10.0
_MOST_TENANTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Refused: `rule` names the limit, after `retry_after_s` it would be taken."""

    rule: str
    retry_after_s: float


class Bucket:
    """A token bucket; `now_s` never goes back, and a clock that does adds nothing."""

    def __init__(self, now_s: float) -> None:
        self._level = math.inf
        self._at_s = now_s

    def refill(self, rate_per_s: float, least: float, now_s: float) -> None:
        """Take in the time that passed. The bucket holds BURST_S of the rate, at least `least`."""
        most = max(least, rate_per_s * BURST_S)
        self._level = min(most, self._level + rate_per_s * max(0.0, now_s - self._at_s))
        self._at_s = max(self._at_s, now_s)

    def wait_s(self, cost: float, rate_per_s: float, least: float) -> float:
        """Seconds until it has what `cost` needs; 0: it has it."""
        needed = min(cost, max(least, rate_per_s * BURST_S))
        return max(0.0, (needed - self._level) / rate_per_s)

    def take(self, cost: float) -> None:
        """Spend; a negative cost gives back."""
        self._level -= cost


class RateLimiter:
    """All tenants of one entry."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def admit(self, tenant: str, limits: RateLimits, *, offline: bool, now_s: float) -> Wait | None:
        """Count one request, unless it has to wait. Tokens of earlier requests that are still owed hold it up too."""
        share = limits.offline_share_ratio if offline else 1.0
        for kind, rate, cost in (
            ("tokens_per_minute", limits.tokens_per_minute, 0.0),
            ("requests_per_minute", limits.requests_per_minute, 1.0),
        ):
            wait = self._take(tenant, kind, rate, share, cost, now_s)
            if wait is not None:
                return wait
        return None

    def charge(self, tenant: str, limits: RateLimits, tokens: int, *, offline: bool, now_s: float) -> Wait | None:
        """Count the tokens of a request, prompt and the most that it may generate, unless it has to wait."""
        share = limits.offline_share_ratio if offline else 1.0
        return self._take(tenant, "tokens_per_minute", limits.tokens_per_minute, share, float(tokens), now_s)

    def give_back(self, tenant: str, tokens: int, requests: int = 0) -> None:
        """Tokens that a request was charged and did not use, or requests that were not run after all."""
        for kind, count in (("tokens_per_minute", tokens), ("requests_per_minute", requests)):
            bucket = self._buckets.get((tenant, kind))
            if bucket is not None and count > 0:
                bucket.take(-float(count))

    def _take(
        self, tenant: str, kind: str, rate_per_minute: float | None, share: float, cost: float, now_s: float
    ) -> Wait | None:
        if rate_per_minute is None:
            self._buckets.pop((tenant, kind), None)
            return None
        rate_per_s = rate_per_minute * share / 60.0
        if rate_per_s <= 0.0:
            return Wait(rule=f"limits.{kind}", retry_after_s=3600.0)
        if len(self._buckets) >= _MOST_TENANTS and (tenant, kind) not in self._buckets:
            self._buckets.pop(next(iter(self._buckets)))
        bucket = self._buckets.setdefault((tenant, kind), Bucket(now_s))
        bucket.refill(rate_per_s, 1.0, now_s)
        wait_s = bucket.wait_s(cost, rate_per_s, 1.0)
        if wait_s > 0.0:
            return Wait(rule=f"limits.{kind}", retry_after_s=wait_s)
        bucket.take(cost)
        return None
