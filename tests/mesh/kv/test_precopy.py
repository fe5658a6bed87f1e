"""When a moving run is stopped: rounds against a link and an engine of known speeds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mesh.kv.chunks import CHUNK_TOKENS
from mesh.kv.precopy import Precopy


@dataclass(frozen=True, slots=True)
class Move:
    """What a simulated move came to."""

    rounds: tuple[int, ...]
    pause_tokens: float  # time of the last copy in token intervals, round trips apart


def simulate(precopy: Precopy, n_tokens: int, *, ship_per_s: float, decode_per_s: float, round_trip_s: float) -> Move:
    shipped, now_s, rounds = 0, 0.0, []
    while size := precopy.next_round(n_tokens + int(now_s * decode_per_s) - shipped):
        rounds.append(size)
        shipped += size
        now_s += size / ship_per_s + round_trip_s
    rest = n_tokens + int(now_s * decode_per_s) - shipped
    return Move(tuple(rounds), rest / ship_per_s * decode_per_s)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 17, 300, 4000])
@pytest.mark.parametrize("round_trip_s", [0.0, 0.002, 0.04, 0.15])
@pytest.mark.parametrize("faster", [2.0, 5.0, 50.0, 1e4])
def test_the_pause_is_about_two_tokens_where_the_link_keeps_up(
    n_tokens: int, round_trip_s: float, faster: float
) -> None:
    """Beside what grows during round trips, which no round can catch."""
    decode_per_s = 50.0
    move = simulate(
        Precopy(), n_tokens, ship_per_s=faster * decode_per_s, decode_per_s=decode_per_s, round_trip_s=round_trip_s
    )
    grown_meanwhile = round_trip_s * decode_per_s / (faster - 1)
    assert move.pause_tokens <= 2.0 + grown_meanwhile + 1
    assert len(move.rounds) <= 16


def test_rounds_shrink() -> None:
    move = simulate(Precopy(), 4000, ship_per_s=200.0, decode_per_s=50.0, round_trip_s=0.0)
    assert move.rounds[0] == CHUNK_TOKENS
    assert list(move.rounds[1:]) == sorted(move.rounds[1:], reverse=True)
    assert len(move.rounds) >= 4


@pytest.mark.parametrize("ratio", [1.0, 1.1, 3.0, 100.0])
def test_a_run_that_outgrows_its_link_is_stopped_after_one_chunk(ratio: float) -> None:
    """Going on would only make the pause longer."""
    move = simulate(Precopy(), 4000, ship_per_s=50.0, decode_per_s=50.0 * ratio, round_trip_s=0.04)
    assert move.rounds == (CHUNK_TOKENS,)


def test_little_is_copied_at_once() -> None:
    assert Precopy().next_round(2) == 0
    assert Precopy().next_round(0) == 0
    assert Precopy().next_round(-5) == 0  # the receiver has more than the source
    assert Precopy().next_round(3) == 3


def test_a_fast_link_needs_one_chunk_for_a_few_hundred_tokens() -> None:
    precopy = Precopy()
    assert precopy.next_round(500) == CHUNK_TOKENS
    assert precopy.next_round(500 - CHUNK_TOKENS) == 0  # not one token came meanwhile: the rest takes less than two
    assert precopy.rounds == 1


def test_rounds_are_bounded() -> None:
    precopy = Precopy(max_rounds=5, pause_tokens=0.0)
    rest = 10_000
    while size := precopy.next_round(rest):
        rest = rest - size + size // 2
    assert precopy.rounds == 5
