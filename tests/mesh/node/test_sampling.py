"""Sampling against its definition: a plain sort of the whole vocabulary, and the counter-based random numbers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import InvalidRequest
from mesh.node.sampling import SamplingParams, sample, uniform

VOCAB = 600


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "seed": 5, "temperature": 1.0, **changes})


def logits(seed: int, *, ties: bool = False) -> np.ndarray[Any, np.dtype[np.float32]]:
    values = np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)
    return np.round(values) if ties else values


def allowed(row: np.ndarray[Any, Any], p: SamplingParams) -> dict[int, float]:
    """Token -> probability by definition: sort all, cut by top_k, then top_p, then min_p."""
    weights = np.exp((row.astype(np.float64) - row.max()) / p.temperature)
    order = sorted(range(len(row)), key=lambda i: (-weights[i], i))
    if p.top_k:
        order = order[: p.top_k]
    if p.top_p < 1.0:
        mass, kept, total = 0.0, [], sum(weights[i] for i in order)
        for i in order:
            kept.append(i)
            mass += weights[i]
            if mass >= p.top_p * total:
                break
        order = kept
    order = [i for i in order if weights[i] >= p.min_p * weights[order[0]]]
    total = sum(weights[i] for i in order)
    return {i: weights[i] / total for i in order}


@given(
    seed=st.integers(0, 50),
    ties=st.booleans(),
    temperature=st.sampled_from([0.3, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 7, 300, 599, 600, 5000]),
    top_p=st.sampled_from([0.01, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
    position=st.integers(1, 40),
)
def test_only_allowed_tokens_are_drawn(
    seed: int, ties: bool, temperature: float, top_k: int, top_p: float, min_p: float, position: int
) -> None:
    row = logits(seed, ties=ties)
    p = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    drawn = sample(row, p, [1] * position, position)
    assert drawn.token_id in allowed(row, p)
    assert sample(row, p, [1] * position, position) == drawn


@pytest.mark.parametrize(
    "changes", [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}]
)
def test_tokens_are_drawn_as_often_as_they_should(changes: dict[str, Any]) -> None:
    row, p, draws = logits(3), params(**changes), 4000
    counts = Counter(sample(row, p, [1] * n, n).token_id for n in range(1, draws + 1))
    for token, probability in allowed(row, p).items():
        if probability > 0.02:
            # Five standard deviations of a binomial: a right sampler fails once in millions.
            slack = 5 * math.sqrt(probability * (1 - probability) / draws)
            assert abs(counts[token] / draws - probability) < slack


def test_random_numbers_depend_on_their_counters_alone() -> None:
    assert uniform(1, 0, 7) == uniform(1, 0, 7)
    assert len({uniform(1, 0, 7), uniform(2, 0, 7), uniform(1, 1, 7), uniform(1, 0, 8)}) == 4
    assert all(0.0 <= uniform(2**64 - 1, 0, n) < 1.0 for n in range(100))


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    row = np.zeros(VOCAB, dtype=np.float32)
    row[[17, 4, 300]] = 2.0
    assert sample(row, params(temperature=0.0), [1], 1).token_id == 4


def test_penalties_by_their_definitions() -> None:
    row = np.array([2.0, -2.0, 1.0, 0.5], dtype=np.float32)
    repeated = sample(row, params(temperature=0.0, repetition_penalty=4.0), [0], 1)
    assert repeated.token_id == 2  # 2 / 4 = 0.5 is no longer the best; prompt tokens count
    present = sample(row, params(temperature=0.0, presence_penalty=1.5), [3, 0], 1)
    assert present.token_id == 2  # only generated tokens count
    often = sample(row, params(temperature=0.0, frequency_penalty=0.6), [3, 0, 0], 1)
    assert often.token_id == 2


def test_end_of_sequence_waits_for_min_tokens() -> None:
    row = np.array([5.0, 1.0, 0.0], dtype=np.float32)
    p = params(temperature=0.0, min_tokens=2)
    assert sample(row, p, [1, 1], 1, frozenset({0})).token_id == 1
    assert sample(row, p, [1, 1, 1], 1, frozenset({0})).token_id == 0


def test_log_probabilities_are_of_the_distribution_before_truncation() -> None:
    row = logits(9)
    drawn = sample(row, params(top_k=1, logprobs=3), [1], 1)
    exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    assert drawn.logprob == pytest.approx(exact[drawn.token_id])
    assert [i for i, _ in drawn.top] == list(np.argsort(-exact, kind="stable")[:3])
    assert sample(row, params(logprobs=0), [1], 1).top == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")), ("temperature", 2.1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1),
        ("repetition_penalty", 0.0), ("presence_penalty", 3.0), ("frequency_penalty", float("inf")), ("top_k", -1),
        ("max_tokens", 0), ("min_tokens", 9), ("seed", -1), ("logprobs", 21), ("stop", ("",)), ("stop", ("x",) * 17),
        ("stop", ("x" * 257,)),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params(**{field: value})
    assert caught.value.details["field"] == field
