"""The link model against known links."""

from __future__ import annotations

import math

import pytest

from placement.entry.link_model import LEAST_BYTES, LinkEstimate, LinkModel

LARGE = 1024 * 1024


def test_nothing_is_known_at_first() -> None:
    model = LinkModel()
    assert model.estimate(now_s=5.0) == LinkEstimate()
    assert model.wants_probe(now_s=5.0)


def test_ages_are_those_of_the_newest_samples() -> None:
    model = LinkModel()
    model.saw_round_trip(0.04, now_s=10.0)
    model.saw_probe(LEAST_BYTES, 0.14, now_s=12.0)
    now = model.estimate(now_s=15.0)
    assert (now.rtt_age_s, now.goodput_age_s) == (5.0, 3.0)
    assert now.rtt_s == 0.04
    assert now.goodput_bytes_per_s == pytest.approx(LEAST_BYTES / 0.1)  # the round trip is not the link's rate


def test_averages_follow_a_link_that_changes() -> None:
    model = LinkModel()
    for i in range(20):
        model.saw_round_trip(0.04, now_s=2.0 * i)
        model.saw_probe(LEAST_BYTES, 0.04 + LEAST_BYTES / 2.5e6, now_s=2.0 * i)
    for i in range(20, 40):
        model.saw_round_trip(0.15, now_s=2.0 * i)
        model.saw_probe(LEAST_BYTES, 0.15 + LEAST_BYTES / 1.25e6, now_s=2.0 * i)
    now = model.estimate(now_s=80.0)
    assert now.rtt_s == pytest.approx(0.15, rel=0.02)
    assert now.goodput_bytes_per_s == pytest.approx(1.25e6, rel=0.1)


def test_one_odd_sample_does_not_turn_it_over() -> None:
    model = LinkModel()
    for i in range(10):
        model.saw_round_trip(0.01, now_s=float(i))
    model.saw_round_trip(1.0, now_s=10.0)
    assert model.estimate(now_s=10.0).rtt_s == pytest.approx(0.307)


def test_after_a_long_silence_the_newest_sample_counts() -> None:
    model = LinkModel()
    model.saw_round_trip(0.01, now_s=0.0)
    model.saw_round_trip(0.11, now_s=600.0)
    assert model.estimate(now_s=600.0).rtt_s == pytest.approx(0.11, rel=0.01)


def test_a_transfer_proves_at_least_its_own_rate() -> None:
    model = LinkModel()
    model.saw_probe(LEAST_BYTES, LEAST_BYTES / 10e6, now_s=0.0)
    model.saw_transfer(10_000_000, 10.0, now_s=1.0)  # a prefill held it up
    assert model.estimate(now_s=1.0).goodput_bytes_per_s == pytest.approx(10e6)
    assert model.estimate(now_s=1.0).goodput_age_s == 1.0
    model.saw_transfer(10_000_000, 0.5, now_s=2.0)  # more than a probe could see
    assert model.estimate(now_s=2.0).goodput_bytes_per_s == pytest.approx(13e6)


def test_a_transfer_is_better_than_nothing_and_than_old_news() -> None:
    model = LinkModel()
    model.saw_transfer(10_000_000, 10.0, now_s=0.0)
    assert model.estimate(now_s=0.0).goodput_bytes_per_s == 1e6
    model.saw_probe(LEAST_BYTES, LEAST_BYTES / 10e6, now_s=1.0)
    model.saw_transfer(10_000_000, 10.0, now_s=601.0)
    goodput = model.estimate(now_s=601.0).goodput_bytes_per_s
    assert goodput == pytest.approx(1e6, rel=0.01)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.nan, math.inf])
def test_samples_that_cannot_be(duration_s: float) -> None:
    model = LinkModel()
    model.saw_transfer(10_000_000, duration_s, now_s=0.0)
    model.saw_transfer(LEAST_BYTES - 1, 1.0, now_s=0.0)
    model.saw_probe(0, 1.0, now_s=0.0)
    model.saw_probe(LEAST_BYTES, math.nan, now_s=0.0)
    model.saw_round_trip(math.nan, now_s=0.0)
    model.saw_round_trip(-0.1, now_s=0.0)
    assert model.estimate(now_s=0.0) == LinkEstimate()


def test_a_probe_is_due_when_the_goodput_is_old() -> None:
    model = LinkModel()
    model.saw_probe(LEAST_BYTES, 0.1, now_s=0.0)
    assert not model.wants_probe(now_s=29.0)
    assert model.wants_probe(now_s=30.0)
    model.saw_transfer(100_000_000, 1.0, now_s=30.0)
    assert not model.wants_probe(now_s=31.0)  # real bytes are a probe too


def test_two_samples_that_agree_make_another_link_of_it() -> None:
    model = LinkModel()
    for i in range(20):
        model.saw_round_trip(0.15, now_s=2.0 * i)
    model.saw_round_trip(0.01, now_s=40.0)
    assert model.estimate(now_s=40.0).rtt_s == pytest.approx(0.108)
    model.saw_round_trip(0.012, now_s=42.0)
    assert model.estimate(now_s=42.0).rtt_s == pytest.approx(0.011)
    assert model.wants_probe(now_s=42.0)  # its goodput is another too, most likely


def test_what_does_not_fit_is_probed_soon_and_twice_at_most() -> None:
    model = LinkModel()
    model.saw_probe(LEAST_BYTES, LEAST_BYTES / 10e6, now_s=0.0)
    model.saw_transfer(10_000_000, 8.0, now_s=5.0)  # an eighth of what the model says: a prefill, or another link
    assert model.wants_probe(now_s=5.0)
    model.saw_probe(LEAST_BYTES, LEAST_BYTES / 1.3e6, now_s=5.5)
    assert not model.wants_probe(now_s=6.0)
    assert model.wants_probe(now_s=9.0)
    model.saw_probe(LEAST_BYTES, LEAST_BYTES / 1.2e6, now_s=9.0)
    assert model.estimate(now_s=9.0).goodput_bytes_per_s == pytest.approx(1.25e6)
    assert not model.wants_probe(now_s=20.0)


def test_a_slow_transfer_over_a_good_link_costs_one_probe() -> None:
    model = LinkModel()
    model.saw_probe(LARGE, LARGE / 10e6, now_s=0.0)
    model.saw_transfer(10_000_000, 8.0, now_s=5.0)
    assert model.wants_probe(now_s=8.0)
    model.saw_probe(LARGE, LARGE / 9e6, now_s=8.0)
    assert not model.wants_probe(now_s=30.0)


def test_a_small_probe_over_a_fat_link_is_followed_by_a_large_one_that_counts_alone() -> None:
    model = LinkModel()
    model.saw_probe(model.probe_bytes, 0.005, now_s=0.0)  # all of it passed in a shaper's burst
    assert model.probe_bytes == LARGE
    assert model.wants_probe(now_s=3.0)
    model.saw_probe(LARGE, LARGE / 12.5e6, now_s=3.0)
    assert model.estimate(now_s=3.0).goodput_bytes_per_s == pytest.approx(12.5e6)
    assert not model.wants_probe(now_s=100.0)  # a large one costs more, so it is rarer
    assert model.wants_probe(now_s=123.0)


def test_a_thin_link_is_probed_with_little() -> None:
    model = LinkModel()
    for now_s in (0.0, 30.0):
        assert model.probe_bytes == LEAST_BYTES
        model.saw_probe(LEAST_BYTES, LEAST_BYTES / 0.6e6, now_s=now_s)
    assert not model.wants_probe(now_s=40.0)


def test_a_probe_as_quick_as_a_round_trip_makes_no_endless_link() -> None:
    model = LinkModel()
    model.saw_round_trip(0.08, now_s=0.0)
    model.saw_probe(LARGE, 0.075, now_s=1.0)  # jitter
    assert model.estimate(now_s=1.0).goodput_bytes_per_s == pytest.approx(LARGE / 0.00375)
