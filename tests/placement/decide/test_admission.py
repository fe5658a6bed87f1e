"""Deadlines, bursts, sessions, lies and clocks: what decisions do when nodes are late, alike or not what they say."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from mesh.errors import Expired, Overloaded
from placement.decide.decide import decide
from placement.decide.filters import Filtered
from placement.decide.picks import BEST, POWER_OF_TWO, UNIFORM
from placement.decide.plugins import ScoreView, Weighed
from placement.decide.score_terms import DOUBT
from placement.decide.scores import Predicted
from placement.decide.settings import DEFAULTS, DecideSettings
from placement.decide.types import (
    BoolArray,
    FitColumns,
    FloatArray,
    PlacementRequest,
    Plan,
    PlanShape,
    Reason,
    Refusal,
    Snapshot,
)
from placement.entry.refusal import refusal_error
from placement.policy.book import BUILTIN
from placement.policy.model import Policy, parse_policy
from tests.placement.decide.meshes import core, edge, request, snapshot

ANYWHERE = parse_policy("version: 1\nrules: {internal: {anywhere: true}}", version=1)


def run(
    mesh: Snapshot,
    asked: PlacementRequest,
    policy: Policy = ANYWHERE,
    *,
    seed: int = 1,
    now_s: float = 0.0,
    settings: DecideSettings = DEFAULTS,
) -> Plan | Refusal:
    return decide(mesh, asked, policy, entry_site="paris", now_s=now_s, rng=random.Random(seed), settings=settings)


def fits(n: int, **other: float) -> FitColumns:
    """The same fit at n nodes: about 1 ms a prompt token, 20 ms a step."""
    values = {
        "prefill_base_s": 0.005, "prefill_token_s": 0.001, "prefill_growth_s": 0.0, "decode_base_s": 0.02,
        "decode_row_s": 0.001, "decode_context_s": 0.0, "error_ratio": 0.1, "ttft_scale": 1.0, "tpot_scale": 1.0,
        "scale_error_ratio": 1.0, **other,
    }  # fmt: skip
    counts = {"context_tokens": 0, "step_tokens": 256, "most_running": 32}
    return FitColumns(
        **{name: np.full(n, value) for name, value in values.items()},
        **{name: np.full(n, value, dtype=np.int64) for name, value in counts.items()},
    )


def test_late_everywhere_for_its_queue_is_refused_now_with_a_time_to_retry() -> None:
    mesh = replace(
        snapshot([core(waiting_prefill_tokens=20_000), edge("paris", waiting_prefill_tokens=20_000)]), fit=fits(2)
    )
    found = run(mesh, request(500, expected_tokens=20, deadline_s=3.0))
    assert isinstance(found, Refusal)
    assert (found.late, found.overloaded, found.permanent) == (True, True, False)
    assert 10 < found.retry_s < 20
    error = refusal_error(found)
    assert isinstance(error, Overloaded)
    assert error.details["retry_after_s"] == f"{found.retry_s:.1f}"
    assert "deadline" in error.message


def test_late_even_on_an_idle_node_is_expired_and_not_to_be_retried() -> None:
    mesh = replace(snapshot([core(), edge("paris")]), fit=fits(2))
    found = run(mesh, request(8000, max_tokens=100, deadline_s=0.5))
    assert isinstance(found, Refusal)
    assert (found.late, found.overloaded, found.retry_s) == (True, False, 0.0)
    assert isinstance(refusal_error(found), Expired)


def test_an_unsure_prediction_refuses_nobody() -> None:
    mesh = snapshot([core()])
    for error_ratio, kind in ((0.05, Refusal), (1.0, Plan)):
        unsure = replace(mesh, fit=fits(1, error_ratio=error_ratio))
        assert isinstance(run(unsure, request(2000, expected_tokens=20, deadline_s=2.0)), kind)


def test_nodes_that_would_be_late_are_left_out_of_plan_and_fallbacks() -> None:
    mesh = replace(snapshot([core("core-1", waiting_prefill_tokens=20_000), core("core-2")]), fit=fits(2))
    found = run(mesh, request(500, expected_tokens=20, deadline_s=3.0))
    assert isinstance(found, Plan)
    assert {c.decode.node_id for c in found.candidates} == {"core-2"}


def test_an_overloaded_edge_spills_to_the_core_only_where_the_label_may() -> None:
    full = edge("paris", running=8, waiting=64, waiting_prefill_tokens=9000)
    mesh = snapshot([core(), full], entry="edge-paris")
    spilled = run(mesh, request(100, label="internal"), BUILTIN)
    assert isinstance(spilled, Plan)
    assert spilled.choice.shape is PlanShape.CORE
    held = run(mesh, request(100, label="restricted"), BUILTIN)
    assert isinstance(held, Refusal)
    assert held.overloaded
    assert held.missing == ("edge-paris",)


def test_what_is_in_flight_is_counted_so_that_a_burst_spreads() -> None:
    mesh, taken = snapshot([core(f"core-{i}", running=0) for i in range(4)]), Counter[str]()
    for seed in range(40):
        found = run(mesh, request(800), seed=seed)
        assert isinstance(found, Plan)
        row = mesh.row_of(found.choice.decode.node_id)
        taken[found.choice.decode.node_id] += 1
        at = np.array([row])
        mesh = mesh.patched(
            at,
            {
                "running": mesh.running[at] + 1,
                "waiting_prefill_tokens": mesh.waiting_prefill_tokens[at] + 800,
            },
        )
    assert max(taken.values()) <= 12, taken


def test_equals_on_one_stale_snapshot_are_spread_by_power_of_two() -> None:
    mesh = snapshot([core(f"core-{i}") for i in range(100)])
    taken: Counter[str] = Counter()
    for seed in range(400):
        found = run(mesh, request(800), seed=seed)
        assert isinstance(found, Plan)
        taken[found.choice.decode.node_id] += 1
    assert len(taken) > 80
    assert max(taken.values()) < 20


@pytest.mark.parametrize("pick", [POWER_OF_TWO, UNIFORM, BEST])
def test_a_pick_takes_one_of_the_near_best(pick: object) -> None:
    mesh = snapshot([core("core-1"), core("core-2", rtt_s=0.0201), core("far", rtt_s=5.0)])
    settings = replace(DEFAULTS, pick=pick)  # type: ignore[arg-type]
    taken = set()
    for seed in range(40):
        found = run(mesh, request(800), seed=seed, settings=settings)
        assert isinstance(found, Plan)
        taken.add(found.choice.decode.node_id)
    assert taken == ({"core-1"} if pick is BEST else {"core-1", "core-2"} if pick is UNIFORM else {"core-1"})


def test_a_session_stays_unless_leaving_is_worth_it() -> None:
    mesh = snapshot([core("core-1"), core("core-2", rtt_s=0.1)])
    asked = replace(request(800), session_node_id="core-2")
    found = run(mesh, asked)
    assert isinstance(found, Plan)
    assert found.choice.decode.node_id == "core-2"
    busy = run(snapshot([core("core-1"), core("core-2", rtt_s=0.1, waiting_prefill_tokens=30_000)]), asked)
    assert isinstance(busy, Plan)
    assert busy.choice.decode.node_id == "core-1"


def test_a_node_that_lies_of_its_speed_loses_once_its_answers_were_measured() -> None:
    mesh = snapshot([core("honest"), core("liar")])
    told = fits(2)
    told.prefill_token_s[1] = told.decode_base_s[1] = 1e-4  # ten times as fast, it says
    trusted = run(replace(mesh, fit=told), request(800))
    assert isinstance(trusted, Plan)
    assert trusted.choice.decode.node_id == "liar"
    found_out = replace(told, ttft_scale=np.array([1.0, 12.0]), tpot_scale=np.array([1.0, 30.0]))
    found = run(replace(mesh, fit=found_out), request(800))
    assert isinstance(found, Plan)
    assert found.choice.decode.node_id == "honest"


def test_a_snapshot_from_the_future_or_of_long_ago_counts_as_busy_and_then_as_stale() -> None:
    """The clock jumped, either way: nobody knows how old the load is."""
    mesh = snapshot([core(), edge("paris")], entry="edge-paris", made_s=1000.0)
    fresh = run(mesh, request(4000), now_s=1000.0)
    assert isinstance(fresh, Plan)
    for now_s in (990.0, 1010.0):
        busy = run(mesh, request(4000), now_s=now_s)
        assert isinstance(busy, Plan)
        core_way = next(c for c in busy.candidates if c.shape is PlanShape.CORE)
        known = next(c for c in fresh.candidates if c.shape is PlanShape.CORE)
        assert core_way.ttft_s == pytest.approx(known.ttft_s + DEFAULTS.busy_wait_s)
    for now_s in (0.0, 2000.0):
        alone = run(mesh, request(4000), now_s=now_s)
        assert isinstance(alone, Plan)
        assert alone.choice.decode.node_id == "edge-paris"
        assert [r.reason for r in alone.refused] == [Reason.STALE]


class _OnlyEven:
    name = "only_even"

    def refuses(self, snapshot: Snapshot, request: PlacementRequest, filtered: Filtered) -> BoolArray:
        return np.array([int(p.node_id[-1]) % 2 == 1 for p in snapshot.places])


class _Dislikes:
    name = "dislikes"

    def cost_s(self, ways: Predicted, view: ScoreView) -> FloatArray:
        dear = np.array([100.0 if p.node_id == "core-2" else 0.0 for p in view.snapshot.places])
        return dear if ways.decode is None else dear[ways.decode]


def test_a_filter_and_a_score_of_ones_own() -> None:
    mesh = snapshot([core(f"core-{i}") for i in range(1, 7)])
    settings = replace(
        DEFAULTS, filters=(_OnlyEven(),), scores=(*DEFAULTS.scores, Weighed(score=_Dislikes(), weight=0.5))
    )
    found = run(mesh, request(800), settings=settings)
    assert isinstance(found, Plan)
    assert {c.decode.node_id for c in found.candidates} == {"core-2", "core-4", "core-6"}
    assert found.candidates[-1].decode.node_id == "core-2"
    assert [(r.reason, r.count) for r in found.refused] == [(Reason.PLUGIN, 3)]


def test_doubt_prefers_the_node_that_is_known() -> None:
    mesh = replace(snapshot([core("core-1"), core("core-2")]), fit=fits(2))
    assert mesh.fit is not None
    mesh.fit.error_ratio[0] = 0.9
    settings = replace(DEFAULTS, scores=(*DEFAULTS.scores, Weighed(score=DOUBT, weight=1.0)))
    found = run(mesh, request(800), settings=settings)
    assert isinstance(found, Plan)
    assert found.choice.decode.node_id == "core-2"
    assert found.choice.error_ratio == pytest.approx(0.1)
