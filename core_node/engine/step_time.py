"""How long a step takes, fitted to measured ones, and how much prefill fits beside decoding. Pure; no clock.

t = a + b * decode_tokens + c * decode_context + d * prefill_tokens + e * prefill_attention, all coefficients >= 0, by
least squares that forget: a step counts half as much as one `_HALF_LIFE_STEPS` later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core_node.engine.chunk import Chunk
from mesh.kv.hashing import BLOCK_TOKENS

_HALF_LIFE_STEPS = 200.0
_DECAY = 0.5 ** (1.0 / _HALF_LIFE_STEPS)
_SCALE = np.array([1.0, 32.0, 16_384.0, 256.0, 256.0 * 1024.0])
_RIDGE = 1e-6
_FEW_STEPS = 4
_REFIT_STEPS = 8  # between fits, unless a step was larger than all before it
_OUTLIER_RATIO = 4.0
_SPREAD_WEIGHT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a step computes. `decode_context`: positions that its decoding rows attend to; `prefill_attention`: the
    same, summed over all prefill rows."""

    decode_tokens: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    prefill_attention: int = 0

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> StepWork:
        decode = context = prefill = attention = 0
        for chunk in chunks:
            if chunk.n_tokens == 1:
                decode, context = decode + 1, context + chunk.stop
            else:
                prefill, attention = prefill + chunk.n_tokens, attention + _attention(chunk.start, chunk.n_tokens)
        return cls(decode_tokens=decode, decode_context=context, prefill_tokens=prefill, prefill_attention=attention)


class StepTimeFit:
    """Owned by one thread."""

    def __init__(self) -> None:
        self._squares = np.zeros((5, 5))
        self._products = np.zeros(5)
        self._largest = np.zeros(5)
        self._steps = 0
        self._spread_ratio = 0.0
        self._fitted: NDArray[np.float64] | None = None

    def observe(self, work: StepWork, duration_s: float) -> None:
        """One measured step. One that took far longer than predicted (the machine did something else) counts only up to
        a multiple of the prediction, unless it is larger than all before it: of those a prediction says little."""
        x = _features(work)
        known = bool((x <= self._largest).all())
        predicted_s = self.predict_s(work) if known else None
        if not known:
            self._largest = np.maximum(self._largest, x)
        if predicted_s is not None and predicted_s > 0:
            duration_s = min(duration_s, _OUTLIER_RATIO * predicted_s)
            self._spread_ratio += _SPREAD_WEIGHT * (abs(duration_s / predicted_s - 1) - self._spread_ratio)
        self._squares = _DECAY * self._squares + np.outer(x, x)
        self._products = _DECAY * self._products + duration_s * x
        self._steps += 1
        if not known or self._steps % _REFIT_STEPS == 0:
            self._fitted = None

    def predict_s(self, work: StepWork) -> float | None:
        """None: too few steps were measured."""
        if self._steps < _FEW_STEPS:
            return None
        if self._fitted is None:
            self._fitted = _non_negative(self._squares, self._products)
        return float(self._fitted @ _features(work))

    def prefill_budget(self, target_s: float, beside: StepWork, start: int, most: int) -> int:
        """How many prompt tokens from position `start` on fit beside `beside` into a step of `target_s`, the usual
        error included: a multiple of a block, at most `most`, and never less than a block, so that a prompt always gets
        on. `most` while too little is known."""
        low, high = 1, max(1, most // BLOCK_TOKENS)  # blocks; the answer is in [low, high]
        while low < high:
            middle = (low + high + 1) // 2
            n = middle * BLOCK_TOKENS
            predicted_s = self.predict_s(
                StepWork(
                    decode_tokens=beside.decode_tokens,
                    decode_context=beside.decode_context,
                    prefill_tokens=beside.prefill_tokens + n,
                    prefill_attention=beside.prefill_attention + _attention(start, n),
                )
            )
            if predicted_s is None:
                return most
            if predicted_s * (1 + self._spread_ratio) <= target_s:
                low = middle
            else:
                high = middle - 1
        return min(most, low * BLOCK_TOKENS)


def _attention(start: int, n: int) -> int:
    return n * start + n * (n + 1) // 2


def _features(work: StepWork) -> NDArray[np.float64]:
    values = (1, work.decode_tokens, work.decode_context, work.prefill_tokens, work.prefill_attention)
    features: NDArray[np.float64] = np.array(values, dtype=np.float64) / _SCALE
    return features


def _non_negative(squares: NDArray[np.float64], products: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with the most negative coefficient set to zero until none is left."""
    kept = np.arange(len(products))
    while len(kept):
        ridge = _RIDGE * max(float(np.trace(squares)), 1.0) * np.eye(len(kept))
        solved = np.linalg.solve(squares[np.ix_(kept, kept)] + ridge, products[kept])
        if solved.min() >= 0:
            break
        kept = np.delete(kept, int(solved.argmin()))
    fitted = np.zeros(len(products))
    if len(kept):
        fitted[kept] = solved
    return fitted
