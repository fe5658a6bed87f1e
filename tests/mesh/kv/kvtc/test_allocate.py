"""Dynamic programming over steps: the optimum, never worse than uniform or greedy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import InvalidRequest
from mesh.kv.kvtc.allocate import allocate, greedy


def problem(seed: int, n_groups: int, n_choices: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rates = rng.integers(0, 20, (n_groups, n_choices)).astype(float)
    rates[:, 0] = 0.0
    return rates, rng.random((n_groups, n_choices)) * 10


def total(values: np.ndarray, chosen: np.ndarray) -> float:
    return float(values[np.arange(len(values)), chosen].sum())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), budget=st.integers(1, 60))
def test_is_the_optimum(seed: int, budget: int) -> None:
    rates, errors = problem(seed, 4, 4)
    chosen = allocate(rates, errors, budget, units=budget)
    assert total(rates, chosen) <= budget
    every = (np.asarray(c) for c in itertools.product(range(4), repeat=4))
    best = min(total(errors, c) for c in every if total(rates, c) <= budget)
    assert total(errors, chosen) == pytest.approx(best)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), budget=st.integers(1, 400))
def test_is_no_worse_than_greedy_and_uniform(seed: int, budget: int) -> None:
    rates, errors = problem(seed, 30, 6)
    error = total(errors, allocate(rates, errors, budget, units=budget))
    assert error <= total(errors, greedy(rates, errors, budget)) + 1e-9
    for choice in range(6):
        if rates[:, choice].sum() <= budget:
            assert error <= errors[:, choice].sum() + 1e-9


def test_a_budget_below_the_cheapest_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        allocate(np.ones((3, 2)), np.ones((3, 2)), 2.0)
    with pytest.raises(InvalidRequest):
        allocate(np.ones((3, 2)), np.ones((3, 2)), 0.0)


def test_measurements_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        allocate(np.full((3, 2), np.nan), np.ones((3, 2)), 2.0)
