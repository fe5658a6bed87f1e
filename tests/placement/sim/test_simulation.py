"""Whole simulated runs: conservation, determinism, failures, partitions, stale metrics."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import InvalidRequest
from placement.sim.flight import Outcome
from placement.sim.net import Cut
from placement.sim.results import summarise
from placement.sim.routers import BASELINES
from placement.sim.scenario import OWN, Faults, NodeDown, StaleMetrics
from placement.sim.simulation import simulate
from tests.placement.sim.helpers import CORES, mesh, scenario, trace

ROUTERS = (OWN, *BASELINES)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_ends_in_exactly_one_outcome(router: str) -> None:
    requests = trace(120)
    records = simulate(scenario(requests, router=router))
    assert [r.request.index for r in records] == [r.index for r in requests]
    assert all(r.outcome in (Outcome.WITHIN_SLO, Outcome.LATE) and r.node_id and r.total_s > 0 for r in records)
    assert all(0 < r.ttft_s <= r.total_s for r in records)


def test_the_same_seed_gives_the_same_records_and_another_one_does_not() -> None:
    def times(seed: int) -> list[tuple[str, float]]:
        run = scenario(trace(80), on=mesh(CORES))
        object.__setattr__(run, "seed", seed)
        return [(r.node_id, r.total_s) for r in simulate(run)]

    assert times(1) == times(1)
    assert times(1) != times(2)


@pytest.mark.parametrize("router", [OWN, "dynamo", "round-robin"])
def test_a_node_that_dies_costs_fallbacks_and_no_request(router: str) -> None:
    requests = trace(150, rate=20.0)
    dead = NodeDown(node_id="core-dc1-1", start_s=2.0, end_s=1e5)
    records = simulate(scenario(requests, router=router, on=mesh(CORES), faults=Faults(down=(dead,))))
    assert all(r.outcome in (Outcome.WITHIN_SLO, Outcome.LATE) for r in records)
    assert sum(r.fallbacks for r in records) > 0
    assert not [r for r in records if r.node_id == "core-dc1-1" and r.request.arrival_s > 2.0]


def test_without_any_node_requests_are_refused_or_fail() -> None:
    down = tuple(NodeDown(node_id=f"core-dc1-{i}", start_s=0.0, end_s=1e5) for i in (1, 2, 3))
    for router in (OWN, "least-loaded"):
        records = simulate(scenario(trace(30), router=router, on=mesh(CORES), faults=Faults(down=down)))
        outcomes = Counter(r.outcome for r in records)
        assert outcomes[Outcome.REFUSED] + outcomes[Outcome.FAILED] == 30
        assert outcomes[Outcome.REFUSED] > 0
        assert summarise(records).goodput_ratio == 0.0


def test_a_site_that_is_cut_off_serves_itself() -> None:
    """Its node is slow, so that the core is the better place; after the cut only itself is left."""
    built = mesh()
    site = built.entries[0]
    requests = [r for r in trace(400, rate=3.0) if built.entry_of(r.session) == site]
    middle = requests[len(requests) // 2].arrival_s
    cut = Cut(a=site, b="dc1", start_s=middle, end_s=1e6)
    records = simulate(scenario(requests, on=built, faults=Faults(cuts=(cut,))))
    late = [r for r in records if r.request.arrival_s > middle + 5.0]
    assert late
    assert {r.node_id for r in late} == {f"edge-{site}-1"}
    assert {r.node_id for r in records if r.total_s + r.request.arrival_s < middle} & {"core-dc1-1", "core-dc1-2"}
    assert not [r for r in records if r.outcome is Outcome.FAILED]


def test_a_short_cut_only_delays() -> None:
    built = mesh()
    cuts = tuple(Cut(a=site, b="dc1", start_s=10.0, end_s=11.0) for site in built.entries)
    records = simulate(scenario(trace(150), router="cloud-only", on=built, faults=Faults(cuts=cuts)))
    assert not any(r.fallbacks for r in records)
    assert all(r.outcome in (Outcome.WITHIN_SLO, Outcome.LATE) for r in records)


def test_a_node_that_is_not_heard_of_is_avoided() -> None:
    requests = trace(300, rate=4.0)
    stale = StaleMetrics(node_id="core-dc1-1", start_s=1.0, end_s=1e5)
    records = simulate(scenario(requests, on=mesh(CORES), faults=Faults(stale=(stale,))))
    # Busy after 5 s, refused after 60 s.
    share = Counter(r.node_id for r in records if r.request.arrival_s > 10.0)
    assert share["core-dc1-1"] < 0.15 * sum(share.values())
    last = [r.node_id for r in records if r.request.arrival_s > 65.0]
    assert last
    assert "core-dc1-1" not in last


def test_labels_keep_requests_at_home() -> None:
    built = mesh()
    records = simulate(scenario(trace(150, labels=("public", "internal")), on=built))
    for r in records:
        if r.request.label == "internal":
            assert r.node_id == f"edge-{built.entry_of(r.request.session)}-1"
    assert {r.node_id[:4] for r in records if r.request.label == "public"} >= {"core"}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no router"):
        simulate(scenario(trace(3), router="oracle"))
    with pytest.raises(InvalidRequest, match="edge-only has no node"):
        simulate(scenario(trace(3), router="edge-only", on=mesh(CORES)))
    bad = Faults(down=(NodeDown(node_id="nobody", start_s=0.0, end_s=1.0),))
    with pytest.raises(InvalidRequest, match="not there"):
        simulate(scenario(trace(3), faults=bad))


_NODES = ("core-dc1-1", "core-dc1-2", "edge-site-0001-1")
_SPANS = st.tuples(st.floats(0.0, 12.0), st.floats(0.1, 15.0))


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(_NODES), _SPANS), max_size=4),
    st.lists(st.tuples(st.sampled_from(("site-0001", "site-0002")), _SPANS), max_size=3),
    st.sampled_from((OWN, "dynamo")),
)
def test_under_any_faults_every_request_ends_once(
    down: list[tuple[str, tuple[float, float]]], cuts: list[tuple[str, tuple[float, float]]], router: str
) -> None:
    faults = Faults(
        down=tuple(NodeDown(node_id=n, start_s=at, end_s=at + long) for n, (at, long) in down),
        cuts=tuple(Cut(a=site, b="dc1", start_s=at, end_s=at + long) for site, (at, long) in cuts),
    )
    requests = trace(60)
    records = simulate(scenario(requests, router=router, faults=faults))
    assert len(records) == len(requests)  # simulate itself asserts that none has two outcomes
