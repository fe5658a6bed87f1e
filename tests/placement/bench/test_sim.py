"""`kvmesh bench sim` over a small synthetic load: rows, goals, notes; what it refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mesh.bench.types import BenchContext, BenchResult, Cell
from mesh.errors import InvalidRequest
from placement.bench.sim import BENCH


def run(**changes: Cell) -> BenchResult:
    settings = {**BENCH.defaults, "mesh": "rack", "requests": 60, **changes}
    return asyncio.run(BENCH.run(BenchContext(settings=settings, progress=lambda done, total, what: None)))


def test_rows_goals_and_notes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "sim.png"
    found = run(routers="kvmesh,dynamo,edge-only", rate=4.0, loads="0.7,1.1", plot=str(plot))
    assert [(row["router"], row["load"]) for row in found.rows] == [
        ("kvmesh", 0.7), ("dynamo", 0.7), ("kvmesh", 1.1), ("dynamo", 1.1),
    ]  # fmt: skip
    assert all(0.0 <= float(str(row["goodput_ratio"])) <= 1.0 for row in found.rows)
    assert [goal.goal for goal in found.goals] == [1.0, 1.0, 1.1, 1.0]
    assert any("comparison of models" in note for note in found.notes)
    assert any("edge-only" in note for note in found.notes)
    assert plot.stat().st_size > 10_000


def test_capacity_is_searched_among_rivals() -> None:
    found = run(routers="dynamo,round-robin", loads="1.0", requests=40)
    capacity = next(note for note in found.notes if note.startswith("capacity"))
    assert "of dynamo" in capacity or "of round-robin" in capacity
    assert max(float(str(row["goodput_ratio"])) for row in found.rows) >= 0.99
    assert not found.goals


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"routers": "oracle", "rate": 1.0}, "no router"),
        ({"routers": "kvmesh"}, "best rival"),
        ({"loads": "0.7,x", "rate": 1.0}, "loads"),
        ({"loads": "-1", "rate": 1.0}, "loads"),
        ({"mesh": "moon"}, "no mesh"),
        ({"requests": -1}, "requests"),
        ({"trace": "/nowhere/t.jsonl"}, "cannot read"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Cell], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        run(**changes)
