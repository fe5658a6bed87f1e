"""How much load routers serve: the highest rate at which a share of all requests is within the SLO. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

GOODPUT_RATIO = 0.99
_GROWTH = 1.3
_BISECTIONS = 4
_LEAST_RATE, _MOST_RATE = 1e-3, 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Requests/s, and the router that serves them."""

    router: str
    rate_per_s: float


def best_capacity(
    goodput: Callable[[str, float], float], routers: Sequence[str], *, start_per_s: float, least: float = GOODPUT_RATIO
) -> Capacity:
    """The highest rate that any of the routers serves, to about 2 %. `goodput(router, rate)` runs one.

    A router that does not serve more than the best so far is tried once. Goodput need not fall with every rise of the
    rate; what is found is a rate that is served with one 2 % above that is not."""
    best = Capacity(router="", rate_per_s=0.0)
    for router in routers:
        low = best.rate_per_s * 1.02 if best.router else start_per_s
        if goodput(router, low) < least:
            if best.router:
                continue
            high, low = low, _falling(goodput, router, low, least)
        else:
            low, high = _rising(goodput, router, low, least)
        for _ in range(_BISECTIONS):
            middle = (low * high) ** 0.5
            if goodput(router, middle) >= least:
                low = middle
            else:
                high = middle
        best = Capacity(router=router, rate_per_s=low)
    return best


def _falling(goodput: Callable[[str, float], float], router: str, rate: float, least: float) -> float:
    while rate > _LEAST_RATE:
        rate /= _GROWTH
        if goodput(router, rate) >= least:
            return rate
    return rate


def _rising(goodput: Callable[[str, float], float], router: str, rate: float, least: float) -> tuple[float, float]:
    while rate < _MOST_RATE and goodput(router, rate * _GROWTH) >= least:
        rate *= _GROWTH
    return rate, rate * _GROWTH
