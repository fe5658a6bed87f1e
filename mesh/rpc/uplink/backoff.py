"""Reconnect delays: exponential backoff with full jitter. Pure; the caller sleeps.

Full jitter spreads the agents that a restarted hub lost at one moment over the whole interval (M. Brooker,
"Exponential Backoff And Jitter", 2015).
"""

from __future__ import annotations

import random


class FullJitter:
    """The n-th delay since the last reset is uniform in [0, min(cap_s, base_s * 2**n)). `base_s` is 0.2, or the cap
    if that is lower."""

    def __init__(self, rng: random.Random, *, base_s: float | None = None, cap_s: float = 5.0) -> None:
        base_s = min(0.2, cap_s) if base_s is None else base_s
        if not 0.0 < base_s <= cap_s:
            raise ValueError(f"need 0 < base_s <= cap_s, got {base_s} and {cap_s}")
        self._rng = rng
        self._base_s = base_s
        self._cap_s = cap_s
        self._ceiling_s = base_s

    def next_s(self) -> float:
        """The next delay, seconds."""
        delay_s = self._rng.uniform(0.0, self._ceiling_s)
        self._ceiling_s = min(self._cap_s, self._ceiling_s * 2.0)
        return delay_s

    def reset(self) -> None:
        """Start over, after a session that proved stable."""
        self._ceiling_s = self._base_s
