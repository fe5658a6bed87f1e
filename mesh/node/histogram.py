"""Durations counted into fixed buckets, cheap enough for every token. Pure; knows no metrics library."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramCounts:
    """A moment's counts. `at_most[i]`: how many durations were at most `bounds_s[i]`; the last one: how many in all."""

    bounds_s: tuple[float, ...]
    at_most: tuple[int, ...]
    sum_s: float


class TimeHistogram:
    """Counts durations by upper bounds in seconds, ascending."""

    def __init__(self, bounds_s: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(self._bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds_s, duration_s)] += 1
        self._sum_s += duration_s

    def freeze(self) -> HistogramCounts:
        """The counts now."""
        return HistogramCounts(bounds_s=self._bounds_s, at_most=tuple(accumulate(self._counts)), sum_s=self._sum_s)
