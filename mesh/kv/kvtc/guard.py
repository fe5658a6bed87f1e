"""How much the tokens of a chunk may err: a decision of the encoder alone. Pure.

What the model's output feels of a context grows with the mean error of its tokens, not with the largest. A setting
knows what usual text errs by on average (its `bound`). A chunk that errs no more is let through but for tokens far out.
One that errs more is of a kind that calibration saw little of: what the weights say of it is worth less too (two to
three times more is lost for the same error on other languages and on code), and so its tokens are brought far below
the usual error, not just to it. Text has easy and hard tokens; a chunk whose tokens all err much and alike is noise,
to which models are more sensitive still.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EXCESS_RATIO = 0.5  # of the bound: what a token may still err by once its excess is coded
_FAR_OUT_RATIO = 3.0  # of the bound: what no token may err by
_SPREAD_RATIO = 0.3  # of the bound: how much the errors of single tokens vary
_NOISE_SPREAD_RATIO = 0.19  # standard deviation of errors over their mean; text has 0.24 and more, noise 0.12 to 0.17
_NOISE_RATIO = 0.07  # of the bound, like EXCESS_RATIO
_LEAST_TOKENS_OF_NOISE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """Weighted squared errors: a token with more than `limit` gets excess, which leaves at most `after_excess`."""

    limit: float
    after_excess: float


def allowance(errors: NDArray[np.float32], bound: float) -> Allowance:
    """Of a chunk whose tokens would have these `errors` [n] if nothing was done."""
    n = len(errors)
    mean = float(errors.mean()) if n else 0.0
    if mean <= bound * (1.0 + _SPREAD_RATIO / max(1, n) ** 0.5):
        return Allowance(limit=_FAR_OUT_RATIO * bound, after_excess=EXCESS_RATIO * bound)
    noise = n >= _LEAST_TOKENS_OF_NOISE and float(errors.std()) < _NOISE_SPREAD_RATIO * mean
    most = (_NOISE_RATIO if noise else EXCESS_RATIO) * bound
    return Allowance(limit=most, after_excess=most)
