"""Which step each group of coefficients gets: dynamic programming over measured rate and error. Pure numpy.

For each group and each candidate step (and for dropping it) rate and error were measured on text that the basis was
not made of; here the sum of errors is made as small as it gets under a total rate. Rates are rounded up to units, so a
budget is never exceeded; every uniform choice that fits the budget so rounded is among the candidates, so that the
result is never worse than one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mesh.errors import InvalidRequest

F64 = NDArray[np.float64]


def allocate(rates: F64, errors: F64, budget: float, *, units: int = 4096) -> NDArray[np.intp]:
    """The choice for each group. `rates` and `errors` are [n_groups, n_choices]; `budget` is in the unit of `rates`.

    Raises InvalidRequest if even the cheapest choices exceed the budget."""
    if rates.shape != errors.shape or rates.ndim != 2 or not (np.isfinite(rates).all() and np.isfinite(errors).all()):
        raise InvalidRequest("rates and errors must be finite and of one shape", field="rates")
    n_groups, n_choices = rates.shape
    cost = np.ceil(rates * (units / budget) - 1e-9).astype(np.int64) if budget > 0 else np.full(rates.shape, units + 1)
    if cost.min(axis=1).sum() > units:
        raise InvalidRequest(f"a budget of {budget:g} is below the cheapest choices", field="budget")
    best = np.zeros(units + 1)  # [u]: least error of the groups so far with at most u units
    taken = np.zeros((n_groups, units + 1), dtype=np.int16)
    for group in range(n_groups):
        now = np.full(units + 1, np.inf)
        for choice in range(n_choices):
            price = cost[group, choice]
            if price > units:
                continue
            candidate = np.full(units + 1, np.inf)
            candidate[price:] = best[: units + 1 - price] + errors[group, choice]
            better = candidate < now
            now[better] = candidate[better]
            taken[group, better] = choice
        best = now
    chosen = np.zeros(n_groups, dtype=np.intp)
    left = units
    for group in range(n_groups - 1, -1, -1):
        chosen[group] = taken[group, left]
        left -= cost[group, chosen[group]]
    return chosen


def greedy(rates: F64, errors: F64, budget: float) -> NDArray[np.intp]:
    """The usual heuristic, to compare with: start from the cheapest choices and buy the step that saves most error a
    bit, until none fits."""
    rows = np.arange(len(rates))
    chosen: NDArray[np.intp] = rates.argmin(axis=1)
    left = budget - rates[rows, chosen].sum()
    while True:
        more = rates - rates[rows, chosen][:, None]
        saved = errors[rows, chosen][:, None] - errors
        usable = (more > 0) & (more <= left) & (saved > 0)
        if not usable.any():
            return chosen
        gain = np.where(usable, saved / np.where(usable, more, 1.0), -np.inf)
        group, choice = np.unravel_index(int(gain.argmax()), gain.shape)
        left -= more[group, choice]
        chosen[group] = choice
