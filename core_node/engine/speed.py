"""Moving averages of measured speed. Pure: durations come in, nothing looks at a clock."""

from __future__ import annotations

import math

_PREFILL_MEMORY_TOKENS = 2048.0
_DECODE_MEMORY_STEPS = 64.0


class SpeedMeter:
    """Prefill in tokens per second, decode in tokens per second of one sequence; 0.0 until measured.

    A mixed step counts for prefill if most of its tokens are prompt; each step that decodes gives every decoding
    sequence one token, however many they are. Exponential averages of seconds per token, weighted by tokens."""

    def __init__(self) -> None:
        self._prefill_s_per_token = 0.0
        self._decode_s_per_token = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return 1.0 / self._prefill_s_per_token if self._prefill_s_per_token > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return 1.0 / self._decode_s_per_token if self._decode_s_per_token > 0 else 0.0

    def observe(self, *, duration_s: float, prefill_tokens: int, decode_tokens: int) -> None:
        """One step of `prefill_tokens` in long chunks and `decode_tokens` sequences of one token each."""
        total = prefill_tokens + decode_tokens
        if prefill_tokens > decode_tokens:
            weight = 1.0 - math.exp(-prefill_tokens / _PREFILL_MEMORY_TOKENS)
            self._prefill_s_per_token = _blend(self._prefill_s_per_token, duration_s / total, weight)
        if decode_tokens > 0:
            weight = 1.0 - math.exp(-1.0 / _DECODE_MEMORY_STEPS)
            self._decode_s_per_token = _blend(self._decode_s_per_token, duration_s, weight)


def _blend(old: float, new: float, weight: float) -> float:
    return new if old == 0.0 else old + weight * (new - old)
