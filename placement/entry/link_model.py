"""What is known of the link to one peer: round trip and goodput as moving averages, each with its age. Pure.

Two sources. Probes on an idle link measure both, and move the averages either way. Real transfers tell more bytes but
are often held up by what is no fault of the link (a prefill that goes on, a slow receiver): they prove that a link
carries at least so much, never that it carries no more, so they only raise the goodput, unless nothing newer is known.
One that was far slower than the model asks for a probe soon.

A link may become another one (a mobile uplink, a failed line): when two samples in a row are far from the average and
near each other, they replace it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_BYTES = 256 * 1024
"""A smaller transfer says more of the round trip than of the goodput."""
_LEAST_WEIGHT = 0.3  # of the newest sample
_MEMORY_S = 60.0  # after this long without a sample, the newest counts about two thirds
_PROBE_EVERY_S = 30.0
_LEAST_SHARE = 0.05  # of a probe's time that its bytes take, whatever the round trip says: that one is not so exact
_FAR_RATIO = 1.5  # of a sample to the average, either way: noise is less, mostly
_NEAR_RATIO = 1.3
_SLOW_RATIO = 0.5  # of a transfer's rate to the model's: worth a probe
_LEAST_PROBE_GAP_S = 3.0
_LARGE_PROBE_BYTES = 1024 * 1024
_FAT_BYTES_PER_S = 3e6  # a small probe over such a link tells of its shaper's burst, not of its rate


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
        self.jumped = False  # with the last sample
        self._last: float | None = None
        self._at_s = -math.inf

    def age_s(self, now_s: float) -> float:
        return now_s - self._at_s

    def forget(self) -> None:
        """The next sample is the value."""
        self.value = self._last = None

    def add(self, sample: float, now_s: float) -> None:
        last, self._last = self._last, sample
        self.jumped = False
        if self.value is None:
            self.value = sample
        elif last is not None and _is_another(self.value, last, sample):
            self.value, self.jumped = (last + sample) / 2, True
        else:
            weight = max(_LEAST_WEIGHT, 1.0 - math.exp(-self.age_s(now_s) / _MEMORY_S))
            self.value += weight * (sample - self.value)
        self._at_s = now_s


def _is_another(value: float, last: float, sample: float) -> bool:
    """Whether both samples are far from the value on one side, and near each other."""
    above = min(last, sample) > value * _FAR_RATIO
    below = max(last, sample) < value / _FAR_RATIO
    return (above or below) and max(last, sample) <= _NEAR_RATIO * min(last, sample)


class LinkModel:
    """One link. Times come in as seconds of one monotonic clock; samples that cannot be are ignored."""

    def __init__(self) -> None:
        self._rtt = _Average()
        self._goodput = _Average()
        self._suspect = 0  # probes that are due since something does not fit
        self._probed_bytes = 0  # by the last probe

    def saw_round_trip(self, rtt_s: float, *, now_s: float) -> None:
        """A small message went there and back."""
        if 0 <= rtt_s < math.inf:
            self._rtt.add(rtt_s, now_s)
            if self._rtt.jumped:
                self._suspect = 2

    def saw_probe(self, size_bytes: int, took_s: float, *, now_s: float) -> None:
        """`size_bytes` went one way and a small message the other, on a link that was idle."""
        if size_bytes > 0 and 0 <= took_s < math.inf:
            under_way_s = max(took_s - (self._rtt.value or 0.0), _LEAST_SHARE * took_s, 1e-4)
            before = self._goodput.value
            self._suspect = max(0, self._suspect - 1)
            if size_bytes > self._probed_bytes > 0:  # what the smaller one told is worth less than this alone
                self._goodput.forget()
                before = None
            self._probed_bytes = size_bytes
            self._goodput.add(size_bytes / under_way_s, now_s)
            if size_bytes < self.probe_bytes:
                self._suspect = max(self._suspect, 1)
            elif before is not None and not self._goodput.jumped and not self._suspect:
                ratio = size_bytes / under_way_s / before
                self._suspect = int(not 1 / _FAR_RATIO < ratio < _FAR_RATIO)  # one more tells whether it changed

    def saw_transfer(self, size_bytes: int, duration_s: float, *, now_s: float) -> None:
        """A transfer of so many bytes took so long from its order to its end."""
        if size_bytes < LEAST_BYTES or not 0 < duration_s < math.inf:
            return
        rate = size_bytes / duration_s
        known = self._goodput.value
        if known is None or rate >= known or self._goodput.age_s(now_s) > 2 * _PROBE_EVERY_S:
            self._goodput.add(rate, now_s)
        elif rate < _SLOW_RATIO * known:
            self._suspect = max(self._suspect, 1)

    @property
    def probe_bytes(self) -> int:
        """How large the next probe of the goodput should be."""
        return LEAST_BYTES if (self._goodput.value or 0.0) < _FAT_BYTES_PER_S else _LARGE_PROBE_BYTES

    def wants_probe(self, *, now_s: float) -> bool:
        """Whether the goodput should be probed when the link is next idle. Large probes are rare."""
        age_s = self._goodput.age_s(now_s)
        return age_s >= (_LEAST_PROBE_GAP_S if self._suspect else _PROBE_EVERY_S * self.probe_bytes / LEAST_BYTES)

    def estimate(self, *, now_s: float) -> LinkEstimate:
        """The figures now."""
        known = self._rtt.value is not None, self._goodput.value is not None
        return LinkEstimate(
            rtt_s=self._rtt.value,
            rtt_age_s=self._rtt.age_s(now_s) if known[0] else None,
            goodput_bytes_per_s=self._goodput.value,
            goodput_age_s=self._goodput.age_s(now_s) if known[1] else None,
        )
