"""Plug-ins of the decision by the names that settings give."""

from __future__ import annotations

from importlib import metadata

import pytest

from mesh.errors import InvalidRequest
from mesh.settings import Decision, ScoreWeight
from placement.decide.picks import POWER_OF_TWO, UNIFORM
from placement.decide.settings import DEFAULTS
from placement.entry import plugins
from placement.entry.plugins import decide_settings

INSTALLED = {
    plugins.SCORES: ("doubt = placement.decide.score_terms:DOUBT", "broken = placement.decide.score_terms:NOTHING"),
    plugins.PICKS: ("uniform = placement.decide.picks:UNIFORM",),
    plugins.FILTERS: ("gone = no_such_package:FILTER",),
}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(group: str) -> list[metadata.EntryPoint]:
        lines = [line.split(" = ") for line in INSTALLED[group]]
        return [metadata.EntryPoint(name=name, value=value, group=group) for name, value in lines]

    monkeypatch.setattr(plugins, "installed_entry_points", found)


def test_without_settings_it_is_the_default() -> None:
    found = decide_settings(Decision(), stale_load_s=7.0)
    assert (found.scores, found.pick, found.filters) == (DEFAULTS.scores, POWER_OF_TWO, ())
    assert found.busy_after_s == 7.0


def test_weights_and_pick_by_name() -> None:
    weights = (ScoreWeight(score="doubt", weight=0.5), ScoreWeight(score="price", weight=0.0))
    found = decide_settings(Decision(weights=weights, pick="uniform"), stale_load_s=5.0)
    told = {weighed.score.name: weighed.weight for weighed in found.scores}
    assert (told["doubt"], told["price"], told["late"]) == (0.5, 0.0, 4.0)
    assert found.pick is UNIFORM


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (Decision(pick="lucky"), "decision.pick: no plug-in 'lucky'.*there are: uniform"),
        (Decision(filters=("gone",)), "decision.filters: the plug-in 'gone' does not load: ModuleNotFoundError"),
        (Decision(weights=(ScoreWeight(score="broken", weight=1.0),)), "'broken' does not load: AttributeError"),
    ],
)
def test_what_is_not_there_or_does_not_load_is_said(decision: Decision, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        decide_settings(decision, stale_load_s=5.0)
