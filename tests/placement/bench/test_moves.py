"""What the benchmark of moves counts, on streams that were made up."""

from __future__ import annotations

import math

import pytest

from mesh.client_types import Finish, Migration, Tokens, Usage
from placement.bench.moves import BENCH, Moved, _plan, _result, _row

pytestmark = pytest.mark.unit


def tokens(offset: int, *ids: int) -> Tokens:
    return Tokens(offset_tokens=offset, ids=ids, text="", logprobs=(), node_id="n")


def moved(how: str = "precopy", *, pause_s: float = 0.05, token_s: float = 0.03) -> Moved:
    """Four tokens, a move, four tokens."""
    made = Moved(how=how, start="edge", ids=list(range(8)), before=4)
    before = [i * token_s for i in range(4)]
    made.at_s = before + [before[-1] + pause_s + i * token_s for i in range(4)]
    made.migration = Migration(
        from_node_id="a", to_node_id="b", offset_tokens=4, kv_wire_bytes=2_000_000, kv_tokens=100, codec="f16",
        cause="operator", pause_s=pause_s, transfer_s=1.0, recomputed=False,
    )  # fmt: skip
    return made


def test_gaps_and_repeats_are_counted() -> None:
    made = Moved(how="precopy", start="edge")
    made.take(tokens(0, 1, 2))
    made.take(tokens(4, 5))
    made.take(tokens(2, 5))
    assert (made.lost, made.twice) == (2, 1)


def test_the_pause_and_the_interval_are_those_that_the_client_saw() -> None:
    made = moved(pause_s=0.5, token_s=0.02)
    assert made.counts
    assert made.pause_s == pytest.approx(0.5)
    assert made.token_s == pytest.approx(0.02)
    assert not Moved(how="precopy", start="edge").counts


def test_all_ways_take_turns() -> None:
    plan = _plan(100, 34)
    assert [plan.count(how) for how in ("precopy", "stop_and_copy", "replay")] == [100, 34, 34]
    for part in (plan[:84], plan[84:]):
        assert part.count("precopy") == pytest.approx(50, abs=2)


def test_rows_and_goals() -> None:
    seen = [moved(), moved(pause_s=0.2), moved("stop_and_copy", pause_s=1.0), moved("replay")]
    row = _row("precopy", seen[:2], 0.01)
    assert (row["moves"], row["within_ratio"], row["kv_mb"], row["lost"]) == (2, 0.5, 2.0, 0)
    result = _result(seen, rtt_s=0.01)
    assert [r["how"] for r in result.rows] == ["precopy", "stop_and_copy", "replay"]
    ratio, lost, twice = result.goals
    assert ratio.value == pytest.approx(0.2 / 0.07)
    assert not ratio.ok
    assert lost.ok
    assert twice.ok


def test_tokens_that_never_came_are_lost() -> None:
    made = moved()
    usage = Usage(prompt_tokens=1, completion_tokens=10, cached_tokens=0)
    made.finish = Finish(reason="length", usage=usage, receipt=None, ttft_s=0.1, total_s=1.0, stop_string="")  # type: ignore[call-arg]
    assert _row("precopy", [made], 0.0)["lost"] == 2


def test_nothing_measured_is_no_goal_reached() -> None:
    result = _result([], rtt_s=0.01)
    assert math.isnan(result.goals[0].value)
    assert not result.goals[0].ok
    assert BENCH.name == "moves"
