"""How long the prefill of a token takes, by how many tokens stand before it: a straight line, fitted to steps. Pure.

Attention looks at all earlier tokens, so a chunk at position 4,000 takes longer than one at 0; over a whole prompt
that is a + b n + c n^2 (as in DistServe's latency model), with a the least that a step takes left out.
"""

from __future__ import annotations

import math

_MEMORY_TOKENS = 16_384.0
_LEAST_SPREAD_TOKENS = 128.0  # of positions; with less, a slope would be noise


class PrefillCurve:
    """Weighted least squares over the recent past; a chunk weighs as many tokens as it has."""

    def __init__(self) -> None:
        self._weight = self._mean_x = self._mean_y = self._var_x = self._cov_xy = 0.0
        self._growth_s = 0.0

    def add(self, start: int, n_tokens: int, seconds: float) -> None:
        """Positions [start, start + n_tokens) of one sequence alone took `seconds`."""
        if n_tokens < 1 or not 0 < seconds < math.inf:
            return
        x, y = start + n_tokens / 2, seconds / n_tokens
        self._weight = self._weight * math.exp(-n_tokens / _MEMORY_TOKENS) + n_tokens
        share = n_tokens / self._weight
        dx, dy = x - self._mean_x, y - self._mean_y
        self._mean_x += share * dx
        self._mean_y += share * dy
        self._var_x = (1 - share) * (self._var_x + share * dx * dx)
        self._cov_xy = (1 - share) * (self._cov_xy + share * dx * dy)
        if self._var_x >= _LEAST_SPREAD_TOKENS**2:
            steepest_s = self._mean_y / self._mean_x  # a token at position 0 does not take less than nothing
            self._growth_s = min(max(self._cov_xy / self._var_x, 0.0), steepest_s)

    @property
    def token_s(self) -> float:
        """Seconds of a token at position 0; 0.0 until measured."""
        return max(self._mean_y - self._growth_s * self._mean_x, 0.05 * self._mean_y)

    @property
    def growth_s(self) -> float:
        """Seconds more for each position before it."""
        return self._growth_s
