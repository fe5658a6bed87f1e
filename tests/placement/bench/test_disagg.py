"""The arithmetic of the disagg benchmark: the same arrivals for both ways, and refused requests count as missed."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from mesh.bench.types import BenchContext
from mesh.errors import InvalidRequest
from placement.bench.disagg import BENCH, Kind, Objective, Outcome, _goals, _kinds, _loads, _row, plan_arrivals

SHORT = Kind(name="short", prompt_tokens=8, output_tokens=4, share=0.75)
LONG = Kind(name="long", prompt_tokens=64, output_tokens=2, share=0.25)
OBJECTIVE = Objective(ttft_s={"short": 1.0, "long": 4.0}, tpot_s={"short": 0.1, "long": 0.2})


def test_arrivals_keep_the_shares_and_come_at_the_rate() -> None:
    arrivals = plan_arrivals((SHORT, LONG), 400, 10.0, random.Random(1))
    assert sum(a.kind is LONG for a in arrivals) == 100
    assert arrivals[-1].at_s == pytest.approx(40.0, rel=0.2)
    assert all(a.at_s < b.at_s for a, b in itertools.pairwise(arrivals))
    assert len({a.prompt for a in arrivals}) == 400
    again = plan_arrivals((SHORT, LONG), 400, 10.0, random.Random(1))
    assert again == arrivals


def test_a_refused_request_is_a_missed_one() -> None:
    outcomes = [
        Outcome(kind="short", ttft_s=0.5, tpot_s=0.05, shape="core"),
        Outcome(kind="short", ttft_s=1.5, tpot_s=0.05, shape="core"),  # late
        Outcome(kind="short", ttft_s=0.5, tpot_s=0.15, shape="disaggregated"),  # slow
        Outcome(kind="short", error="OVERLOADED"),
        Outcome(kind="long", ttft_s=3.0, tpot_s=0.15, shape="disaggregated"),
    ]
    row = _row("apart", 0.5, outcomes, OBJECTIVE)
    assert (row["requests"], row["no_answer"], row["goodput_ratio"], row["kv_moved"]) == (5, 1, 0.4, 2)
    assert (row["short_goodput_ratio"], row["long_goodput_ratio"]) == (0.25, 1.0)
    assert row["short_ttft_s_p50"] == 0.5  # of those that were answered
    nobody = _row("apart", 0.5, [Outcome(kind="short", error="EXPIRED")], OBJECTIVE)
    assert nobody["goodput_ratio"] == 0.0
    assert math.isnan(float(str(nobody["short_ttft_s_p95"])))


def test_goals_compare_the_two_ways_at_each_load() -> None:
    good = [Outcome(kind="short", ttft_s=0.5, tpot_s=0.05)]
    slow = [Outcome(kind="short", ttft_s=0.5, tpot_s=0.1)]
    rows = [_row("colocated", 0.5, slow, OBJECTIVE), _row("apart", 0.5, good, OBJECTIVE)]
    tpot, goodput = _goals(rows, [0.5])
    assert (tpot.value, goodput.value) == (0.5, 1.0)


@pytest.mark.parametrize(("key", "value"), [("long_share", 1.5), ("loads", "0.5,much"), ("loads", "0")])
def test_bad_settings_are_refused(key: str, value: object) -> None:
    context = BenchContext(settings={**BENCH.defaults, key: value}, progress=lambda *_: None)  # type: ignore[dict-item]
    with pytest.raises(InvalidRequest):
        (_kinds if key == "long_share" else _loads)(context)
