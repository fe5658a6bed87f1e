"""Rows, goals and the plot of a record."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from core_node.bench.engines.installed import EngineCommand, Kind
from core_node.bench.engines.probe import Speed, moved_ratio
from core_node.bench.engines.record import Part, Record
from core_node.bench.engines.report import Limits, plot, report_goals, report_rows


def engine(name: str, kind: Kind = Kind.LIBRARY, *, ours: bool = False) -> EngineCommand:
    return EngineCommand(name=name, kind=kind, ours=ours, command=())


ENGINES = [
    engine("kvmesh", ours=True),
    engine("kvmesh-int8", ours=True),
    engine("kvmesh-http", Kind.SERVER, ours=True),
    engine("slow"),
    engine("fast"),
    engine("server", Kind.SERVER),
]
LIMITS = Limits(speed=Speed(flop_per_s=1e12, read_bytes_per_s=1e10), weight_bytes=10**8, layer_parameters=10**8)


def record() -> Record:
    def values(speed: float) -> dict[str, dict[str, float]]:
        row = {
            "prefill_tokens_per_s": 10 * speed,
            "decode_tokens_per_s": speed,
            "output_tokens_per_s": speed,
            "ttft_p50_s": 1 / speed,
            "ttft_p95_s": 1 / speed,
            "tpot_p50_s": 1 / speed,
            "tpot_p95_s": 1 / speed,
        }
        return {"1 at once": row}

    speeds = {"kvmesh": 60.0, "kvmesh-int8": 120.0, "kvmesh-http": 50.0, "slow": 30.0, "fast": 50.0, "server": 100.0}
    found = Record.open(None, {})
    for attempt in range(2):
        values_of = {name: values(speed * (1 + attempt)) for name, speed in speeds.items()}
        calm = dict.fromkeys(speeds, ((1.0, 1.0), (1.0, 1.0)))
        found.add(Part(case="1 at once", attempt=attempt, speeds=calm, values=values_of))
    return found


def test_rows_compare_engines_of_one_kind() -> None:
    rows = {str(row["engine"]): row for row in report_rows(record(), ENGINES, LIMITS)}
    assert list(rows) == [e.name for e in ENGINES]
    assert {name: row["to_best_peer"] for name, row in rows.items()} == {
        "kvmesh": 1.2, "kvmesh-int8": 2.4, "kvmesh-http": 0.5, "slow": None, "fast": None, "server": None,
    }  # fmt: skip
    ours = rows["kvmesh"]
    assert (ours["rounds"], ours["output_tokens_per_s"], ours["output_least"], ours["output_most"]) == (2, 90, 60, 120)
    assert ours["of_read_limit"] == pytest.approx(0.9)  # 90 steps/s of 0.1 GB at 10 GB/s
    assert ours["of_flop_limit"] == pytest.approx(0.18)
    assert ours["goodput_per_s"] is None


def test_goals_are_of_our_engine_and_of_our_server() -> None:
    goals = {goal.name: goal for goal in report_goals(record(), ENGINES)}
    by_kind = {
        "in process, 1 at once: output_tokens_per_s to the best peer's, ratio": (1.2, True),
        "in process, 1 at once: prefill_tokens_per_s to the best peer's, ratio": (1.2, True),
        "in process, 1 at once: ttft_p50_s to the best peer's, ratio": (1 / 1.2, True),
        "over HTTP, 1 at once: output_tokens_per_s to the best peer's, ratio": (0.5, False),
        "over HTTP, 1 at once: prefill_tokens_per_s to the best peer's, ratio": (0.5, False),
        "over HTTP, 1 at once: ttft_p50_s to the best peer's, ratio": (2.0, False),
        "1 at once: int8 decode to bf16 decode, ratio": (2.0, True),
    }
    assert {name: (pytest.approx(goal.value), goal.ok) for name, goal in goals.items()} == by_kind


def test_without_peers_there_is_nothing_to_compare() -> None:
    alone = [e for e in ENGINES if e.name == "kvmesh"]
    assert report_goals(record(), alone) == [g for g in report_goals(record(), ENGINES) if "int8" in g.name]
    assert [row["to_best_peer"] for row in report_rows(record(), alone, LIMITS)] == [None]


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="kvmesh[bench] is not installed")
    plot(record(), ENGINES, tmp_path / "new" / "engines.png")
    assert (tmp_path / "new" / "engines.png").read_bytes().startswith(b"\x89PNG")


def test_the_probe_moved_by_the_worse_of_both() -> None:
    speeds = [Speed(flop_per_s=f, read_bytes_per_s=b) for f, b in ((1.0, 1.0), (1.1, 1.0), (1.0, 0.8))]
    assert math.isclose(moved_ratio(speeds), 0.25)
    assert moved_ratio(speeds[:1]) == 0.0
