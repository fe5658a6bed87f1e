"""Fair shares in virtual time: weights are kept, bands come first, nobody saves up, a flood pushes out only itself."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.entry.fair_queue import FairQueue, Ticket
from placement.entry.rate_limit import RateLimiter
from placement.policy.rules import RateLimits


def ticket(tenant: str, *, band: int = 0, weight: float = 1.0, cost: float = 100.0) -> Ticket:
    return Ticket(tenant=tenant, band=band, weight=weight, cost_tokens=cost)


def drained(queue: FairQueue) -> list[Ticket]:
    return list(iter(queue.pop, None))


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from((-1, 0, 5)), st.sampled_from((0.5, 1.0, 4.0)),
                  st.integers(1, 1_000), st.booleans()),
        max_size=80,
    )
)  # fmt: skip
def test_everything_comes_out_once_in_the_tenants_own_order(steps: list[tuple[str, int, float, int, bool]]) -> None:
    queue, pushed, popped = FairQueue(), [], []
    for tenant, band, weight, cost, pop in steps:
        pushed.append(ticket(tenant, band=band, weight=weight, cost=float(cost)))
        assert queue.push(pushed[-1]) is None
        if pop:
            found = queue.pop()
            assert found is not None
            popped.append(found)
    popped += drained(queue)
    assert len(queue) == 0
    assert set(popped) == set(pushed)
    assert len(popped) == len(pushed)
    for key in {(t.tenant, t.band) for t in pushed}:
        mine = [t for t in popped if (t.tenant, t.band) == key]
        assert mine == [t for t in pushed if (t.tenant, t.band) == key]


@pytest.mark.parametrize(("weights", "costs"), [((1, 1), (100, 100)), ((3, 1), (100, 100)), ((1, 1), (300, 100))])
def test_shares_follow_weights_counted_in_tokens(weights: tuple[int, int], costs: tuple[int, int]) -> None:
    queue = FairQueue(most=10_000, most_per_tenant=5_000)
    for name, weight, cost in zip("ab", weights, costs, strict=True):
        for _ in range(2_000):
            queue.push(ticket(name, weight=float(weight), cost=float(cost)))
    served: Counter[str] = Counter()
    for _ in range(1_000):
        found = queue.pop()
        assert found is not None
        served[found.tenant] += int(found.cost_tokens)
    assert served["a"] / served["b"] == pytest.approx(weights[0] / weights[1], rel=0.02)


def test_an_urgent_band_goes_first() -> None:
    queue = FairQueue()
    for band in (5, 0, -3):
        queue.push(ticket("a", band=band))
    assert [t.band for t in drained(queue)] == [-3, 0, 5]


def test_who_was_idle_has_saved_nothing_up() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.push(ticket("busy"))
    for _ in range(50):
        queue.pop()
    for _ in range(50):
        queue.push(ticket("back"))
    first = [queue.pop() for _ in range(20)]
    assert Counter(t.tenant for t in first if t) == {"busy": 10, "back": 10}


def test_a_flood_pushes_out_its_own_newest() -> None:
    queue = FairQueue(most=10, most_per_tenant=9)
    flood = [ticket("flood") for _ in range(20)]
    refused = [t for t in map(queue.push, flood) if t is not None]
    assert refused == flood[9:]
    assert queue.push(ticket("quiet")) is None
    assert queue.push(quiet := ticket("quiet")) is flood[8]
    assert quiet in drained(queue)


def test_one_that_gave_up_is_out_and_costs_nothing() -> None:
    queue = FairQueue()
    gone, stays = ticket("a", cost=1e9), ticket("a")
    queue.push(gone)
    queue.push(stays)
    assert queue.remove(gone)
    assert not queue.remove(gone)
    queue.push(ticket("b"))
    assert [t.tenant for t in drained(queue)] == ["a", "b"]


def waits_of(flood_per_s: float, *, limited: bool) -> list[float]:
    """Waiting times of a quiet tenant's requests (1 a second for 100 s) beside one that floods; a server that takes
    0.2 s for each request, in virtual time."""
    limits = RateLimits(requests_per_minute=60.0) if limited else RateLimits()
    limiter, queue = RateLimiter(), FairQueue()
    arrivals = deque(
        sorted(
            [(i / flood_per_s, "flood") for i in range(int(100 * flood_per_s))]
            + [(i + 0.05, "quiet") for i in range(100)]
        )
    )
    waiting: dict[Ticket, float] = {}
    waits, now_s = [], 0.0
    while arrivals or len(queue):
        while arrivals and (arrivals[0][0] <= now_s or not len(queue)):
            at_s, tenant = arrivals.popleft()
            now_s = max(now_s, at_s)
            if limiter.admit(tenant, limits, offline=False, now_s=at_s) is None:
                entry = ticket(tenant)
                if queue.push(entry) is not entry:
                    waiting[entry] = at_s
        found = queue.pop()
        if found is None:
            continue
        if found.tenant == "quiet":
            waits.append(now_s - waiting[found])
        now_s += 0.2
    return waits


@pytest.mark.parametrize("limited", [True, False])
def test_a_tenant_at_100_times_its_rate_does_not_hurt_another(limited: bool) -> None:
    alone, beside = waits_of(0.5, limited=limited), waits_of(100.0, limited=limited)
    assert len(beside) == len(alone) == 100  # none refused
    # Never more than the request that is being served, and one of the flood's that is before it.
    assert max(beside) <= 0.4 + 1e-9
    assert sum(beside) / 100 <= sum(alone) / 100 + 0.3
