"""What `kvmesh bench ship` makes of what it measured; no mesh is started."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from mesh.bench.types import BenchContext
from mesh.errors import InvalidRequest
from mesh.v1 import inference_pb2 as pb
from placement.bench import ship
from placement.bench.ship import BENCH, _CellRun, _cells, _is_open, _is_seen, _result, _way_of, words

HERE, SHIP, BOTH = ("", ""), ("f16", "ship"), ("f16", "both")
KVTC = ("kvtc:0123456789abcdef:30x", "ship")


def context(**settings: Any) -> BenchContext:
    return BenchContext(settings={**BENCH.defaults, **settings}, progress=lambda done, total, what: None)


def run(choice: ship.Way, **seen_s: float) -> _CellRun:
    names = {"here": HERE, "ship": SHIP, "both": BOTH}
    return _CellRun(
        20.0, 40.0, 1024, {names[k]: [v] for k, v in seen_s.items()}, Counter([choice]), [1.0], (0.04, 2.5e6)
    )


def test_all_cells_and_a_few_spread_over_them() -> None:
    everything = _cells(context())
    assert len(everything) == len(set(everything)) == 36
    few = _cells(context(cells=4))
    assert len(few) == 4
    assert {tokens for _, _, tokens in few} == {256, 1024, 4096}
    assert _cells(context(cells=99)) == everything


@pytest.mark.parametrize("bad", ["x", "0", "1e9", ""])
def test_bad_lists_are_refused(bad: str) -> None:
    with pytest.raises(InvalidRequest):
        _cells(context(round_trip_ms=bad))


def test_a_choice_is_judged_against_the_best_and_against_prefill() -> None:
    good, near, bad = (
        run(SHIP, here=2.0, ship=1.0, both=0.95),
        run(SHIP, here=0.99, ship=1.04),
        run(SHIP, here=1, ship=2),
    )
    assert good.within(good.best)
    assert good.best == BOTH
    assert near.within(near.best)
    assert not bad.within(bad.best)
    result = _result([good, near, bad], [HERE, SHIP, BOTH], context())
    assert [round(g.value, 3) for g in result.goals] == [0.667, 0.667]
    assert not any(g.ok for g in result.goals)
    assert [row["ok"] for row in result.rows] == [True, True, False]
    assert result.rows[1]["f16, both_s"] is None


def test_a_choice_that_was_never_measured_counts_as_missed() -> None:
    result = _result([run(KVTC, here=1.0, ship=2.0)], [HERE, SHIP], context())
    assert result.goals[0].value == 0.0
    assert "could not be judged" in result.notes[-1]
    assert result.rows[0]["choice_s"] is None


def test_words() -> None:
    assert [words(w) for w in (HERE, SHIP, KVTC)] == ["prefill here", "f16, ship", "kvtc 30x, ship"]


def test_ways_of_a_plan() -> None:
    plan = pb.Plan(legs=[pb.PlanLeg(kind="prefill"), pb.PlanLeg(kind="move_kv", codec="f16", own_tokens=16)])
    plan.shipping.extend([pb.ShipOption(codec="f16"), pb.ShipOption(codec="q4", refused="loses 9 %")])
    assert _way_of(plan) == BOTH
    assert _way_of(pb.Plan(legs=[pb.PlanLeg(kind="run")])) == HERE
    assert [_is_open(plan, w) for w in (HERE, SHIP, BOTH, ("q4", "ship"))] == [True, True, False, False]


@pytest.mark.parametrize(
    ("rtt_s", "mbit", "seen"), [(0.041, 19.0, True), (0.06, 19.0, False), (0.041, 9.0, False), (0.041, 0.0, False)]
)
def test_when_the_edge_has_seen_the_link(rtt_s: float, mbit: float, seen: bool) -> None:
    assert _is_seen((rtt_s, mbit * 1e6 / 8), 20.0, 40.0) == seen


def test_a_fat_link_is_seen_as_fat_enough() -> None:
    assert _is_seen((0.002, 400e6 / 8), 1000.0, 2.0)
