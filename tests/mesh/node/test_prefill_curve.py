"""The fitted line of prefill time by position."""

from __future__ import annotations

import math
import random

import pytest

from mesh.node.prefill_curve import PrefillCurve


def feed(curve: PrefillCurve, token_s: float, growth_s: float, positions: list[int], noise: float = 0.0) -> None:
    rng = random.Random(1)
    for start in positions:
        seconds = 256 * (token_s + growth_s * (start + 128))
        curve.add(start, 256, seconds * (1 + rng.uniform(-noise, noise)))


def test_nothing_measured() -> None:
    assert (PrefillCurve().token_s, PrefillCurve().growth_s) == (0.0, 0.0)


def test_it_finds_the_line() -> None:
    curve = PrefillCurve()
    feed(curve, 0.002, 5e-7, list(range(0, 4096, 256)))
    assert curve.token_s == pytest.approx(0.002, rel=0.02)
    assert curve.growth_s == pytest.approx(5e-7, rel=0.02)


def test_noise_is_averaged() -> None:
    curve = PrefillCurve()
    feed(curve, 0.002, 5e-7, list(range(0, 4096, 256)) * 3, noise=0.1)
    assert curve.token_s + 2048 * curve.growth_s == pytest.approx(0.003, rel=0.06)


def test_short_prompts_tell_nothing_of_growth_and_take_nothing_back() -> None:
    short = PrefillCurve()
    feed(short, 0.002, 0.0, [0] * 20)
    assert (short.token_s, short.growth_s) == (pytest.approx(0.002), 0.0)
    curve = PrefillCurve()
    feed(curve, 0.002, 5e-7, list(range(0, 4096, 256)))
    feed(curve, 0.002, 5e-7, [0] * 10)
    assert curve.growth_s == pytest.approx(5e-7, rel=0.1)


def test_a_machine_that_became_slower_is_followed() -> None:
    curve = PrefillCurve()
    feed(curve, 0.002, 5e-7, list(range(0, 4096, 256)))
    feed(curve, 0.006, 5e-7, list(range(0, 4096, 256)) * 8)
    assert curve.token_s == pytest.approx(0.006, rel=0.15)


def test_what_cannot_be_is_ignored_and_no_figure_is_negative() -> None:
    curve = PrefillCurve()
    for start, tokens, seconds in ((0, 0, 1.0), (0, 10, 0.0), (0, 10, -1.0), (0, 10, math.nan), (0, 10, math.inf)):
        curve.add(start, tokens, seconds)
    assert (curve.token_s, curve.growth_s) == (0.0, 0.0)
    feed(curve, 0.004, -9e-7, list(range(0, 4096, 256)))
    assert curve.growth_s == 0.0
    assert curve.token_s > 0
