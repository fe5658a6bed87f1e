"""What is known of the link to one peer: round trip and goodput as moving averages, each with its age. Pure.

Two sources. Probes on an idle link measure both, and move the averages either way. Real transfers tell more bytes but
are often held up by what is no fault of the link (a prefill that goes on, a slow receiver): they prove that a link
carries at least so much, never that it carries no more, so they only raise the goodput, unless nothing newer is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_BYTES = 256 * 1024
"""A smaller transfer says more of the round trip than of the goodput."""
_LEAST_WEIGHT = 0.3  # of the newest sample
_MEMORY_S = 60.0  # after this long without a sample, the newest counts about two thirds
_PROBE_EVERY_S = 30.0
_LEAST_TIME_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """Figures of one link at one moment; None where nothing was measured. Ages in seconds."""

    rtt_s: float | None = None
    rtt_age_s: float | None = None
    goodput_bytes_per_s: float | None = None
    goodput_age_s: float | None = None


class _Average:
    """A moving average that forgets by time: samples that come after a long silence count for more."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._at_s = -math.inf

    def age_s(self, now_s: float) -> float:
        return now_s - self._at_s

    def add(self, sample: float, now_s: float) -> None:
        if self.value is None:
            self.value = sample
        else:
            weight = max(_LEAST_WEIGHT, 1.0 - math.exp(-self.age_s(now_s) / _MEMORY_S))
            self.value += weight * (sample - self.value)
        self._at_s = now_s


class LinkModel:
    """One link. Times come in as seconds of one monotonic clock; samples that cannot be are ignored."""

    def __init__(self) -> None:
        self._rtt = _Average()
        self._goodput = _Average()

    def saw_round_trip(self, rtt_s: float, *, now_s: float) -> None:
        """A small message went there and back."""
        if 0 <= rtt_s < math.inf:
            self._rtt.add(rtt_s, now_s)

    def saw_probe(self, size_bytes: int, took_s: float, *, now_s: float) -> None:
        """`size_bytes` went one way and a small message the other, on a link that was idle."""
        if size_bytes > 0 and 0 <= took_s < math.inf:
            under_way_s = max(took_s - (self._rtt.value or 0.0), _LEAST_TIME_S)
            self._goodput.add(size_bytes / under_way_s, now_s)

    def saw_transfer(self, size_bytes: int, duration_s: float, *, now_s: float) -> None:
        """A transfer of so many bytes took so long from its order to its end."""
        if size_bytes < LEAST_BYTES or not 0 < duration_s < math.inf:
            return
        rate = size_bytes / duration_s
        known = self._goodput.value
        if known is None or rate >= known or self._goodput.age_s(now_s) > 2 * _PROBE_EVERY_S:
            self._goodput.add(rate, now_s)

    def wants_probe(self, *, now_s: float) -> bool:
        """Whether the goodput should be probed when the link is next idle."""
        return self._goodput.age_s(now_s) >= _PROBE_EVERY_S

    def estimate(self, *, now_s: float) -> LinkEstimate:
        """The figures now."""
        known = self._rtt.value is not None, self._goodput.value is not None
        return LinkEstimate(
            rtt_s=self._rtt.value,
            rtt_age_s=self._rtt.age_s(now_s) if known[0] else None,
            goodput_bytes_per_s=self._goodput.value,
            goodput_age_s=self._goodput.age_s(now_s) if known[1] else None,
        )
