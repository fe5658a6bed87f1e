"""How long an engine's steps take, fitted online to its own measured steps. Pure; durations come in, no clock.

    prefill step   a + b * tokens + c * attention      attention: positions before each new token, summed
    decode step    a + b * rows + c * context          context: positions that all decoding rows attend to

Over a whole prompt of n tokens the first is a + b n + c n^2 / 2 for each sequence alone, prefix hits left out (the
latency model of DistServe, arXiv 2401.09670); in a step that does both, the decoding rows are taken off as the second
says. Each is a least-squares fit of relative errors that forgets (half of a step's weight after `_HALF_LIFE_STEPS`
more), with coefficients of at least 0. A step far from the prediction counts for less (Huber); many of them in a row
on one side mean that the engine has become another one, and the past is forgotten at once. State is bounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

_HALF_LIFE_STEPS = 200.0
_DECAY = 0.5 ** (1.0 / _HALF_LIFE_STEPS)
_FEW_STEPS = 4
_REFIT_STEPS = 8  # between fits, unless a step was larger than all before it
_RIDGE = 1e-6
_FAR = 3.0  # times the usual error: from here on a step counts for less
_LEAST_ERROR_RATIO = 0.02
_ERROR_WEIGHT = 0.05  # of the newest step in the usual error
_STREAK_STEPS = 8  # far steps on one side in a row that mean another engine
_KEPT_AFTER_STREAK = 0.002  # of the weight of the past: steps that were faster weigh more, by the square
_SHORTEST_STEP_S, _LONGEST_STEP_S = 1e-7, 3600.0
_SUBSETS = tuple(s for size in (3, 2, 1) for s in combinations(range(3), size))

Vector = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyCurve:
    """What the fit says: seconds, each at least 0; all 0 where nothing was measured. `error_ratio`: how far a step is
    from its prediction, usually, as a share of it; 1.0: nothing is known."""

    prefill_base_s: float = 0.0  # of a step that prefills
    prefill_token_s: float = 0.0  # and for each token of it, at position 0
    prefill_growth_s: float = 0.0  # and for each position before each token
    decode_base_s: float = 0.0  # of a step that decodes
    decode_row_s: float = 0.0  # and for each sequence
    decode_context_s: float = 0.0  # and for each position that they attend to
    error_ratio: float = 1.0

    @property
    def knows_prefill(self) -> bool:
        """Whether prefill was measured."""
        return self.prefill_base_s + self.prefill_token_s > 0

    @property
    def knows_decode(self) -> bool:
        """Whether decoding was measured."""
        return self.decode_base_s + self.decode_row_s > 0

    def step_s(self, rows: float, context_tokens: float) -> float:
        """One decode step of so many sequences that attend to so many positions in all."""
        return self.decode_base_s + self.decode_row_s * rows + self.decode_context_s * context_tokens

    def prefill_s(
        self, start: int, stop: int, *, chunk_tokens: int, rows: float = 0, context_tokens: float = 0
    ) -> float:
        """Prefill of positions [start, stop) in chunks, beside `rows` decoding sequences in every step."""
        tokens = stop - start
        if tokens <= 0:
            return 0.0
        beside_s = self.decode_row_s * rows + self.decode_context_s * context_tokens
        steps = math.ceil(tokens / max(1, chunk_tokens))
        attention = tokens * (start + stop) / 2
        return (
            steps * (self.prefill_base_s + beside_s) + self.prefill_token_s * tokens + self.prefill_growth_s * attention
        )


UNKNOWN = LatencyCurve()
"""Nothing was measured."""


class LatencyModel:
    """Owned by an engine; on one thread."""

    def __init__(self) -> None:
        self._prefill, self._decode = _Fit(), _Fit()
        self._curve: LatencyCurve | None = UNKNOWN

    def saw_step(
        self,
        *,
        prefill_tokens: int,
        prefill_attention: float,
        decode_rows: int,
        decode_context: int,
        duration_s: float,
    ) -> None:
        """A step was computed. `prefill_attention`: positions before its prefill tokens, summed over them. What cannot
        be (no work, a clock that jumped) is ignored."""
        if (
            not _SHORTEST_STEP_S < duration_s < _LONGEST_STEP_S
            or min(prefill_tokens, prefill_attention, decode_rows, decode_context) < 0
        ):
            return
        if prefill_tokens == 0 and decode_rows > 0:
            self._decode.add((1.0, float(decode_rows), float(decode_context)), duration_s)
        elif prefill_tokens > 0:
            _, row_s, context_s = self._decode.coefficients
            beside_s = row_s * decode_rows + context_s * decode_context
            if beside_s < 0.8 * duration_s:  # else the step says nothing of prefill
                self._prefill.add((1.0, float(prefill_tokens), float(prefill_attention)), duration_s - beside_s)
        self._curve = None

    @property
    def curve(self) -> LatencyCurve:
        """The fit now."""
        if self._curve is None:
            prefill, decode = self._prefill, self._decode
            known = [fit.error_ratio for fit in (prefill, decode) if fit.known]
            self._curve = LatencyCurve(
                prefill_base_s=prefill.coefficients[0],
                prefill_token_s=prefill.coefficients[1],
                prefill_growth_s=prefill.coefficients[2],
                decode_base_s=decode.coefficients[0],
                decode_row_s=decode.coefficients[1],
                decode_context_s=decode.coefficients[2],
                error_ratio=max(known, default=1.0),
            )
        return self._curve


class _Fit:
    """y = k . x with k >= 0, by recursive least squares of relative errors."""

    def __init__(self) -> None:
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._largest: Vector = (0.0, 0.0, 0.0)
        self._count = 0
        self._streak = 0  # steps in a row that were far above (positive) or below
        self._error_ratio = 1.0
        self._solved: Vector | None = (0.0, 0.0, 0.0)

    @property
    def known(self) -> bool:
        return self._count >= _FEW_STEPS

    @property
    def error_ratio(self) -> float:
        return self._error_ratio

    @property
    def coefficients(self) -> Vector:
        """k now; zeros until a few steps were seen."""
        if not self.known:
            return (0.0, 0.0, 0.0)
        if self._solved is None:
            self._solved = _non_negative(self._squares, self._products)
        return self._solved

    def add(self, x: Vector, y: float) -> None:
        weight = 1.0 / (y * y)
        larger = any(a > b for a, b in zip(x, self._largest, strict=True))
        predicted = sum(k * v for k, v in zip(self.coefficients, x, strict=True)) if self.known else 0.0
        if predicted > 0:
            weight *= self._weigh(math.log(y / predicted), larger)
        for i in range(3):
            self._products[i] = _DECAY * self._products[i] + weight * x[i] * y
            for j in range(3):
                self._squares[i][j] = _DECAY * self._squares[i][j] + weight * x[i] * x[j]
        self._largest = (max(x[0], self._largest[0]), max(x[1], self._largest[1]), max(x[2], self._largest[2]))
        self._count += 1
        if larger or self._count <= 2 * _REFIT_STEPS or self._count % _REFIT_STEPS == 0:
            self._solved = None

    def _weigh(self, error: float, larger: bool) -> float:
        """How much a step with this error (log ratio to the prediction) counts; takes the error down."""
        size = min(abs(error), 1.0)
        usual = max(self._error_ratio, _LEAST_ERROR_RATIO)
        far = size > _FAR * usual and not larger  # of a step larger than all before it, a prediction says little
        weight = max(_ERROR_WEIGHT, 1.0 / self._count)
        self._error_ratio += weight * (min(size, _FAR * usual) - self._error_ratio)
        side = 1 if error > 0 else -1
        self._streak = (self._streak if self._streak * side > 0 else 0) + side if far else 0
        if abs(self._streak) >= _STREAK_STEPS:
            self._forget()
            return 1.0
        return _FAR * usual / size if far else 1.0

    def _forget(self) -> None:
        """Most of what was seen does not hold any more."""
        self._streak = 0
        self._solved = None
        self._products = [_KEPT_AFTER_STREAK * p for p in self._products]
        self._squares = [[_KEPT_AFTER_STREAK * s for s in row] for row in self._squares]


def _non_negative(squares: list[list[float]], products: list[float]) -> Vector:
    """The k >= 0 with the least error: every set of coefficients that may be above 0 is tried."""
    scale = [math.sqrt(squares[i][i]) or 1.0 for i in range(3)]
    m = [[squares[i][j] / (scale[i] * scale[j]) + (_RIDGE if i == j else 0.0) for j in range(3)] for i in range(3)]
    v = [products[i] / scale[i] for i in range(3)]
    best, most = (0.0, 0.0, 0.0), 0.0
    for kept in _SUBSETS:
        solved = _solve([[m[i][j] for j in kept] for i in kept], [v[i] for i in kept])
        explained = sum(k * v[i] for k, i in zip(solved, kept, strict=True))  # the error is a constant less this
        if min(solved) >= 0 and explained > most:
            most = explained
            full = [0.0, 0.0, 0.0]
            for k, i in zip(solved, kept, strict=True):
                full[i] = k / scale[i]
            best = (full[0], full[1], full[2])
    return best


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gauss elimination; the ridge keeps the diagonal above 0."""
    n = len(vector)
    rows = [[*matrix[i], vector[i]] for i in range(n)]
    for i in range(n):
        for j in range(i + 1, n):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [b - factor * a for a, b in zip(rows[i], rows[j], strict=True)]
    solved = [0.0] * n
    for i in reversed(range(n)):
        solved[i] = (rows[i][n] - sum(rows[i][j] * solved[j] for j in range(i + 1, n))) / rows[i][i]
    return solved
