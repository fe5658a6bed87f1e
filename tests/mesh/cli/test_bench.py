"""kvmesh bench: settings, the JSON that comes out, goals."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mesh.bench.report import _fitting, render
from mesh.bench.types import BenchContext, BenchResult, Cell, Direction, Goal
from mesh.cli import bench as bench_cli
from mesh.errors import InvalidRequest, NotFound


class Doubling:
    """A benchmark that doubles a number."""

    name = "doubling"
    question = "How much is twice x?"
    defaults: Mapping[str, Cell] = {"x": 2.0, "rounds": 1, "label": "a", "exact": True}

    async def run(self, context: BenchContext) -> BenchResult:
        context.progress(1, 1, "doubling")
        x = context.number("x")
        return BenchResult(
            rows=({"x": x, "twice": 2 * x, "label": context.text("label")},) * context.count("rounds"),
            goals=(Goal(name="twice", value=2 * x, goal=4.0, direction=Direction.EQUAL),),
            notes=("a note",),
        )


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(bench_cli, "benches", lambda: {"doubling": Doubling()})
    app = typer.Typer()
    bench_cli.register(app)
    app.command("other")(lambda: None)
    return app


def test_it_writes_json_and_exits_0_even_if_goals_are_missed(app: typer.Typer, tmp_path: Path) -> None:
    file = tmp_path / "new" / "out.json"
    arguments = ["bench", "doubling", "--set", "x=3", "--set", "rounds=2", "--json", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "How much is twice x?" in result.output
    assert "missed" in result.output
    written = json.loads(file.read_text())
    assert set(written) == {"bench", "version", "machine", "settings", "rows", "goals", "notes"}
    assert written["settings"] == {"x": 3.0, "rounds": 2, "label": "a", "exact": True}
    assert written["rows"] == [{"x": 3.0, "twice": 6.0, "label": "a"}] * 2
    assert written["goals"] == [{"name": "twice", "value": 6.0, "goal": 4.0, "direction": "equal", "ok": False}]
    assert written["machine"]["cores"] >= 1


def test_every_setting_is_a_flag_too(app: typer.Typer, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["bench", "doubling", "--x", "3", "--json", str(file), "--label=b=c"])
    assert result.exit_code == 0
    assert json.loads(file.read_text())["settings"] == {"x": 3.0, "rounds": 1, "label": "b=c", "exact": True}


@pytest.mark.parametrize("words", [["x", "3"], ["--x"], ["--", "3"], ["--x", "3", "y"], ["-x", "3"]])
def test_words_that_are_no_flags_are_refused(words: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="settings are given as --KEY VALUE"):
        bench_cli.flags(words)


def test_dashes_of_a_flag_are_underscores() -> None:
    assert bench_cli.flags(["--probe-tolerance-ratio", "0.2"]) == ["probe_tolerance_ratio=0.2"]


def test_list_tells_questions(app: typer.Typer) -> None:
    for arguments in (["bench", "--list"], ["bench"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0
        assert "How much is twice x?" in result.output


@pytest.mark.parametrize("change", ["x", "y=1", "x=many", "rounds=1.5", "rounds=true", "exact=1", "x=[", "=1"])
def test_bad_settings_are_refused(change: str) -> None:
    with pytest.raises(InvalidRequest):
        bench_cli.with_settings(Doubling(), [change])


def test_an_int_is_a_fine_float() -> None:
    assert bench_cli.with_settings(Doubling(), ["x=7", "label=1"])["x"] == 7.0
    assert bench_cli.with_settings(Doubling(), ["label=1"])["label"] == "1"


def test_unknown_benchmarks_get_a_hint() -> None:
    with pytest.raises(NotFound, match="did you mean doubling"):
        bench_cli.choose({"doubling": Doubling()}, "dubling")
    with pytest.raises(NotFound, match="--list"):
        bench_cli.choose({"doubling": Doubling()}, "zzz")


@pytest.mark.parametrize(
    ("value", "direction", "ok"),
    [
        (1.0, Direction.AT_MOST, True),
        (1.1, Direction.AT_MOST, False),
        (1.0, Direction.AT_LEAST, True),
        (0.9, Direction.AT_LEAST, False),
        (1.0, Direction.EQUAL, True),
        (math.nan, Direction.AT_LEAST, False),
    ],
)
def test_goals(value: float, direction: Direction, ok: bool) -> None:
    assert Goal(name="g", value=value, goal=1.0, direction=direction).ok is ok


def test_rows_need_the_same_columns() -> None:
    with pytest.raises(ValueError, match="same columns"):
        BenchResult(rows=({"a": 1}, {"b": 1}))


@pytest.mark.parametrize(
    ("width", "tables"),
    [
        (200, [["case", "speed_per_s", "share", "much_longer_name"]]),
        (45, [["case", "speed_per_s", "share"], ["case", "much_longer_name"]]),
        (5, [["case", "speed_per_s"], ["case", "share"], ["case", "much_longer_name"]]),
    ],
)
def test_columns_that_do_not_fit_go_into_a_table_of_their_own(width: int, tables: list[list[str]]) -> None:
    row = {"case": "1 at once", "speed_per_s": 1.0, "share": None, "much_longer_name": 2}
    assert _fitting(tuple(row), [row], width) == tables


def test_no_rows_are_no_trouble() -> None:
    render(Doubling(), BenchResult(rows=()), 80)
