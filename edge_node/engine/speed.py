"""Moving averages of measured speed. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

HALF_LIFE_S: Final = 10.0  # of busy time: thermal throttling shows within seconds, one odd step does not


@dataclass(slots=True)
class SpeedMeter:
    """Tokens per second over the recent past, weighted by time spent, so that many tiny steps count as little as
    they took. 0.0 until something was measured."""

    _tokens: float = 0.0
    _seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """`tokens` took `seconds` (> 0, else ignored: the clock did not move)."""
        if seconds > 0:
            fade = math.exp2(-seconds / HALF_LIFE_S)
            self._tokens = self._tokens * fade + tokens
            self._seconds = self._seconds * fade + seconds

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0
