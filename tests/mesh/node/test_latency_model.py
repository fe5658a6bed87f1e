"""The fit of step times: finds what made them, is not moved by a few wild ones, forgets, never goes below zero."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.node.latency_model import UNKNOWN, LatencyCurve, LatencyModel

TRUE = LatencyCurve(
    prefill_base_s=4e-3, prefill_token_s=2e-4, prefill_growth_s=1e-8,
    decode_base_s=2e-2, decode_row_s=1e-3, decode_context_s=2e-7,
)  # fmt: skip


def feed(
    model: LatencyModel,
    true: LatencyCurve,
    steps: int,
    rng: random.Random,
    *,
    noise: float = 0.05,
    wild: float = 0.0,
    scale: float = 1.0,
) -> None:
    """Steps of all kinds, `wild` of them ten times too long."""
    for _ in range(steps):
        rows = rng.randrange(1, 20)
        context, n, start = rows * rng.randrange(50, 2000), rng.randrange(16, 257), rng.randrange(4000)
        prefills = rng.random() < 0.4
        attention = n * (start + n / 2)
        seconds = (
            true.prefill_base_s + true.prefill_token_s * n + true.prefill_growth_s * attention
            + true.decode_row_s * rows + true.decode_context_s * context
            if prefills
            else true.step_s(rows, context)
        )  # fmt: skip
        seconds *= scale * rng.lognormvariate(0.0, noise) * (10.0 if rng.random() < wild else 1.0)
        model.saw_step(
            prefill_tokens=n if prefills else 0, prefill_attention=attention if prefills else 0,
            decode_rows=rows, decode_context=context, duration_s=seconds,
        )  # fmt: skip


@pytest.mark.parametrize("wild", [0.0, 0.03])
def test_it_finds_what_made_the_times_even_if_some_are_wild(wild: float) -> None:
    model = LatencyModel()
    feed(model, TRUE, 1500, random.Random(1), wild=wild)
    curve = model.curve
    for rows, context in ((1, 500), (8, 8000), (19, 30_000)):
        assert curve.step_s(rows, context) == pytest.approx(TRUE.step_s(rows, context), rel=0.08)
    for start, stop in ((0, 64), (0, 2000), (1000, 4000)):
        told = curve.prefill_s(start, stop, chunk_tokens=256, rows=4, context_tokens=4000)
        assert told == pytest.approx(
            TRUE.prefill_s(start, stop, chunk_tokens=256, rows=4, context_tokens=4000), rel=0.08
        )
    assert 0.01 < curve.error_ratio < 0.12


def test_an_engine_that_became_slower_is_believed_within_a_few_dozen_steps() -> None:
    model, rng = LatencyModel(), random.Random(2)
    feed(model, TRUE, 1000, rng)
    feed(model, TRUE, 60, rng, scale=3.0)
    assert model.curve.step_s(8, 8000) == pytest.approx(3 * TRUE.step_s(8, 8000), rel=0.15)
    feed(model, TRUE, 60, rng)
    assert model.curve.step_s(8, 8000) == pytest.approx(TRUE.step_s(8, 8000), rel=0.15)


def test_nothing_is_known_before_a_few_steps_and_it_says_so() -> None:
    model = LatencyModel()
    assert model.curve == UNKNOWN
    model.saw_step(prefill_tokens=100, prefill_attention=5000, decode_rows=0, decode_context=0, duration_s=0.1)
    assert not model.curve.knows_prefill
    assert model.curve.error_ratio == 1.0


def test_alike_steps_are_predicted_as_they_were() -> None:
    """Nothing tells the base from the rows: the sum is right."""
    model = LatencyModel()
    for _ in range(50):
        model.saw_step(prefill_tokens=0, prefill_attention=0, decode_rows=4, decode_context=400, duration_s=0.05)
    assert model.curve.step_s(4, 400) == pytest.approx(0.05, rel=1e-3)


@given(
    steps=st.lists(
        st.tuples(
            st.integers(-5, 5000), st.floats(-5, 1e12, allow_nan=False), st.integers(-5, 500), st.integers(-5, 10**7),
            st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.floats(1e-6, 1e3)),
        ),
        max_size=60,
    )
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_whatever_it_is_told_coefficients_are_finite_and_not_negative(
    steps: list[tuple[int, float, int, int, float]],
) -> None:
    model = LatencyModel()
    for n, attention, rows, context, seconds in steps:
        model.saw_step(
            prefill_tokens=n, prefill_attention=attention, decode_rows=rows, decode_context=context, duration_s=seconds
        )
    curve = model.curve
    for value in (
        curve.prefill_base_s, curve.prefill_token_s, curve.prefill_growth_s, curve.decode_base_s, curve.decode_row_s,
        curve.decode_context_s, curve.error_ratio,
    ):  # fmt: skip
        assert math.isfinite(value)
        assert value >= 0
