"""The decision benchmark's meshes and requests are what it says, and one small run gives its rows."""

from __future__ import annotations

import random

import pytest

from mesh.bench.types import BenchContext
from mesh.identity.place import Tier
from placement.bench import decide as bench
from placement.bench.decide import BENCH, MESHES, Mesh, make_nodes, make_request, measure


def test_meshes_have_the_size_that_they_are_named_by() -> None:
    assert [len(make_nodes(mesh, random.Random(1))) for mesh in MESHES] == [3, 1000, 13_200]
    tiers = [node.place.tier for node in make_nodes(MESHES[1], random.Random(1))]
    assert tiers.count(Tier.CORE) == MESHES[1].cores


def test_requests_differ() -> None:
    rng = random.Random(1)
    requests = [make_request(rng) for _ in range(50)]
    assert len({r.label for r in requests}) == 4
    assert len({r.prompt_tokens for r in requests}) > 30


@pytest.mark.parametrize("entry", ["placement", "edge"])
def test_every_decision_is_counted_and_gives_a_plan(entry: str) -> None:
    small = Mesh(name="small", cores=2, sites=3, nodes_per_site=2)
    row = measure(small, entry, BenchContext(settings={**BENCH.defaults, "decisions": 20}, progress=_quiet))
    assert (row["decisions"], row["planned"], row["entry"]) == (20, 20, entry)
    assert float(str(row["cpu_ms_p50"])) <= float(str(row["cpu_ms_p99"]))


async def test_goals_are_those_of_the_large_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MESHES", (Mesh(name="x", cores=1, sites=1, nodes_per_site=1, goal_ms=1.0),))
    result = await BENCH.run(BenchContext(settings={**BENCH.defaults, "decisions": 3}, progress=_quiet))
    assert [(goal.name, goal.goal) for goal in result.goals] == [
        ("x, placement: CPU p50, ms", 1.0),
        ("x, edge: CPU p50, ms", 1.0),
    ]


def _quiet(done: int, total: int, what: str) -> None:
    return
