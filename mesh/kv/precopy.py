"""When to stop a run that is shipped while it goes on making tokens. Pure; counts only, no clock.

Pre-copy ships what there is while the run decodes on, then what came to be meanwhile, and so on; each round is
shorter than the one before by the ratio of what grows to what is shipped in the same time. Once the rest can be
shipped in the time of a few tokens the run is paused, and the rest goes over while it stands still.

Where KV grows nearly as fast as the link carries it, rounds do not shrink: each one more only makes the pause longer.
The first round is therefore one chunk, which measures the ratio, and a run that cannot converge is stopped after it
and copied.
"""

from __future__ import annotations

from mesh.kv.chunks import CHUNK_TOKENS

_LEAST_GAIN_RATIO = 0.9  # of growth to shipment; above it another round is not worth its time


class Precopy:
    """One shipment. `pause_tokens`: the last copy may take as long as making so many tokens. `max_rounds` 0: stop the
    run at once."""

    def __init__(self, *, pause_tokens: float = 2.0, max_rounds: int = 16) -> None:
        self._pause_tokens = pause_tokens
        self._max_rounds = max_rounds
        self._left_tokens = 0  # by the last round, of what there was before it
        self._round_tokens = 0
        self.rounds = 0

    def next_round(self, rest_tokens: int) -> int:
        """Tokens to ship next while the run goes on; 0: pause it and ship the rest. `rest_tokens` have KV now that
        the receiver does not have; all that was shipped before is there."""
        size = self._size(rest_tokens)
        if size:
            self.rounds += 1
            self._round_tokens, self._left_tokens = size, rest_tokens - size
        return size

    def _size(self, rest_tokens: int) -> int:
        if self.rounds >= self._max_rounds:
            return 0
        if not self.rounds:
            return min(rest_tokens, CHUNK_TOKENS) if rest_tokens > self._pause_tokens else 0
        grown = rest_tokens - self._left_tokens
        if grown >= _LEAST_GAIN_RATIO * self._round_tokens:
            return 0  # it does not converge
        # At most one more token than was counted may have been under way.
        pause_tokens = rest_tokens * (grown + 1) / self._round_tokens
        return 0 if pause_tokens <= self._pause_tokens else rest_tokens
