"""How a running request is moved, by prediction."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.decide.moves import CodecSize, MoveFacts, Tactic, choose_move, goal_s

F16, Q8, TINY = (
    CodecSize(name="f16", ratio=1.0),
    CodecSize(name="q8_0", ratio=34 / 64),
    CodecSize(name="kvtc", ratio=1 / 20),
)
MBIT = 1e6 / 8


def facts(**changes: object) -> MoveFacts:
    """SmolLM2 at an edge that makes 60 tokens/s."""
    values: dict[str, object] = {
        "tokens": 1000, "left_tokens": 1000, "token_s": 1 / 60, "f16_bytes_per_token": 23_040,
        "goodput_bytes_per_s": 100 * MBIT, "rtt_s": 0.002, "prefill_tokens_per_s": 300.0,
    }  # fmt: skip
    return MoveFacts(**{**values, **changes})  # type: ignore[arg-type]


def test_a_fast_link_takes_the_preferred_codec() -> None:
    way = choose_move(facts(), (F16, Q8))
    assert (way.tactic, way.codec, way.pace_s) == (Tactic.PRECOPY, "f16", 0.0)
    assert way.pause_s <= goal_s(facts())


def test_a_link_that_f16_outgrows_takes_a_smaller_codec() -> None:
    way = choose_move(facts(goodput_bytes_per_s=12 * MBIT), (F16, Q8))  # f16 needs 11 of them
    assert (way.tactic, way.codec, way.pace_s) == (Tactic.PRECOPY, "q8_0", 0.0)


def test_where_no_codec_is_small_enough_the_source_is_slowed_within_the_tpot_target() -> None:
    thin = facts(goodput_bytes_per_s=5 * MBIT, tpot_s=0.06, left_tokens=4000)
    way = choose_move(thin, (F16, Q8))
    assert (way.tactic, way.codec) == (Tactic.PRECOPY, "f16")
    assert thin.token_s < way.pace_s <= 0.06
    tight = choose_move(facts(goodput_bytes_per_s=5 * MBIT, tpot_s=0.03, left_tokens=4000), (F16, Q8))
    assert tight.codec == "q8_0"
    assert 1 / 60 < tight.pace_s <= 0.03


def test_nobody_is_slowed_who_did_not_say_how_much() -> None:
    assert choose_move(facts(goodput_bytes_per_s=3 * MBIT), (F16, Q8)).pace_s == 0.0


def test_a_tpot_target_that_is_missed_already_slows_nobody() -> None:
    assert choose_move(facts(goodput_bytes_per_s=3 * MBIT, tpot_s=0.001), (F16, Q8)).pace_s == 0.0


def test_a_thin_link_replays_where_the_target_is_fast_and_copies_where_it_is_not() -> None:
    thin = {"goodput_bytes_per_s": 2 * MBIT}
    assert choose_move(facts(**thin), (F16, Q8)).tactic is Tactic.REPLAY
    busy = facts(**thin, tokens=40, prefill_tokens_per_s=50.0, wait_s=30.0)
    stopped = choose_move(busy, (F16, Q8))
    assert (stopped.tactic, stopped.codec) == (Tactic.STOP_AND_COPY, "q8_0")


def test_a_request_that_is_about_to_end_is_not_precopied() -> None:
    """It would be over before its KV had gone."""
    assert choose_move(facts(left_tokens=3), (F16, Q8)).tactic is not Tactic.PRECOPY


@pytest.mark.parametrize("tactic", list(Tactic))
def test_an_operator_can_insist(tactic: Tactic) -> None:
    for link in (1, 100):
        way = choose_move(facts(goodput_bytes_per_s=link * MBIT), (F16, Q8), tactic=tactic)
        assert way.tactic is tactic
        assert bool(way.codec) == (tactic is not Tactic.REPLAY)


def test_what_the_target_has_is_not_shipped() -> None:
    whole = choose_move(facts(), (F16,), tactic=Tactic.STOP_AND_COPY)
    delta = choose_move(facts(target_has_tokens=992), (F16,), tactic=Tactic.STOP_AND_COPY)
    assert delta.pause_s < whole.pause_s / 10


@given(
    tokens=st.integers(1, 8192), left=st.integers(1, 4096), token_s=st.floats(0.002, 0.5), link=st.floats(0.1, 1000),
    rtt_s=st.floats(0, 0.3), prefill=st.floats(10, 20_000), tpot_s=st.none() | st.floats(0.01, 0.5),
)  # fmt: skip
def test_any_choice_can_be_carried_out(
    tokens: int, left: int, token_s: float, link: float, rtt_s: float, prefill: float, tpot_s: float | None
) -> None:
    now = facts(
        tokens=tokens, left_tokens=left, token_s=token_s, goodput_bytes_per_s=link * MBIT, rtt_s=rtt_s,
        prefill_tokens_per_s=prefill, tpot_s=tpot_s,
    )  # fmt: skip
    way = choose_move(now, (F16, Q8, TINY))
    assert math.isfinite(way.total_s)
    assert 0 < way.pause_s <= way.total_s
    assert way.pace_s == 0.0 or (tpot_s is not None and token_s < way.pace_s <= tpot_s)
    if way.tactic is not Tactic.PRECOPY:  # then nothing converged, and it is the least pause of the rest
        others = [choose_move(now, (F16, Q8, TINY), tactic=t) for t in (Tactic.STOP_AND_COPY, Tactic.REPLAY)]
        assert all(way.pause_s <= other.pause_s for other in others)
    else:
        carry_s = now.f16_bytes_per_token * {"f16": 1.0, "q8_0": 34 / 64, "kvtc": 1 / 20}[way.codec] / (link * MBIT)
        assert carry_s < max(way.pace_s, token_s), "it would never end"
