"""Rate limits in virtual time: the rate is kept over any time, the wait that is told is enough, debts are paid."""

from __future__ import annotations

import random

import pytest

from placement.entry.rate_limit import BURST_S, RateLimiter
from placement.policy.rules import RateLimits

PER_MINUTE = 600.0


def admitted(limiter: RateLimiter, limits: RateLimits, times: list[float], *, offline: bool = False) -> list[float]:
    return [t for t in times if limiter.admit("acme", limits, offline=offline, now_s=t) is None]


def test_over_any_time_no_more_than_the_rate_and_a_burst() -> None:
    rng = random.Random(1)
    times = sorted(rng.uniform(0.0, 120.0) for _ in range(60_000))
    taken = admitted(RateLimiter(), RateLimits(requests_per_minute=PER_MINUTE), times)
    rate_per_s = PER_MINUTE / 60.0
    for start in range(0, len(taken), 37):
        for end in range(start, len(taken), 101):
            n, over_s = end - start + 1, taken[end] - taken[start]
            assert n <= rate_per_s * (over_s + BURST_S) + 1
    assert len(taken) == pytest.approx(rate_per_s * (120.0 + BURST_S), rel=0.01)


def test_the_wait_that_is_told_is_enough_and_not_much_more() -> None:
    limiter, limits = RateLimiter(), RateLimits(requests_per_minute=60.0)
    while (wait := limiter.admit("acme", limits, offline=False, now_s=5.0)) is None:
        pass
    assert wait.rule == "limits.requests_per_minute"
    assert limiter.admit("acme", limits, offline=False, now_s=5.0 + wait.retry_after_s * 0.9) is not None
    assert limiter.admit("acme", limits, offline=False, now_s=5.0 + wait.retry_after_s) is None


def test_a_large_request_is_taken_from_a_full_bucket_and_leaves_a_debt() -> None:
    limiter, limits = RateLimiter(), RateLimits(tokens_per_minute=600.0)  # holds 100
    assert limiter.charge("acme", limits, 400, offline=False, now_s=0.0) is None
    wait = limiter.admit("acme", limits, offline=False, now_s=0.0)
    assert wait is not None
    assert wait.retry_after_s == pytest.approx(30.0)
    limiter.give_back("acme", 400)  # it never ran
    assert limiter.admit("acme", limits, offline=False, now_s=0.0) is None


def test_a_site_that_is_cut_off_gives_out_its_share() -> None:
    limits = RateLimits(requests_per_minute=600.0, offline_share_ratio=0.1)
    times = [i / 100 for i in range(6_000)]
    online, offline = (len(admitted(RateLimiter(), limits, times, offline=o)) for o in (False, True))
    assert offline == pytest.approx(online * 0.1, rel=0.05)
    none = RateLimits(requests_per_minute=600.0, offline_share_ratio=0.0)
    assert admitted(RateLimiter(), none, times, offline=True) == []


def test_a_clock_that_goes_back_gives_nothing() -> None:
    limiter, limits = RateLimiter(), RateLimits(requests_per_minute=6.0)
    assert limiter.admit("acme", limits, offline=False, now_s=100.0) is None
    for now_s in (100.0, 0.0, 50.0, 100.0, 0.0, 100.0):
        assert limiter.admit("acme", limits, offline=False, now_s=now_s) is not None


def test_tenants_do_not_share_a_bucket_and_no_limit_limits_nothing() -> None:
    limiter, limits = RateLimiter(), RateLimits(requests_per_minute=6.0)
    assert limiter.admit("a", limits, offline=False, now_s=0.0) is None
    assert limiter.admit("a", limits, offline=False, now_s=0.0) is not None
    assert limiter.admit("b", limits, offline=False, now_s=0.0) is None
    for _ in range(1_000):
        assert limiter.admit("c", RateLimits(), offline=True, now_s=0.0) is None
