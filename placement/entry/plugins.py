"""The settings of decisions as the decision core takes them: plug-ins by their names, from entry points.

Reads what is installed when a process starts, and never afterwards.
"""

from __future__ import annotations

from typing import Any

from mesh.cli.plugins import installed_entry_points
from mesh.errors import InvalidRequest
from mesh.settings import Decision
from placement.decide.plugins import Weighed
from placement.decide.settings import DEFAULTS, DecideSettings

FILTERS, SCORES, PICKS = "kvmesh.filters", "kvmesh.scores", "kvmesh.picks"


def decide_settings(decision: Decision, *, stale_load_s: float) -> DecideSettings:
    """Raises InvalidRequest for a name that nobody installed, or a plug-in that does not load."""
    scores = {weighed.score.name: weighed for weighed in DEFAULTS.scores}
    for weight in decision.weights:
        known = scores.get(weight.score)
        score = known.score if known is not None else _load(SCORES, weight.score, "decision.weights")
        scores[weight.score] = Weighed(score=score, weight=weight.weight)
    pick = DEFAULTS.pick if decision.pick == DEFAULTS.pick.name else _load(PICKS, decision.pick, "decision.pick")
    return DecideSettings(
        busy_after_s=stale_load_s,
        filters=tuple(_load(FILTERS, name, "decision.filters") for name in decision.filters),
        scores=tuple(scores.values()),
        pick=pick,
    )


def _load(group: str, name: str, field: str) -> Any:
    found = {entry_point.name: entry_point for entry_point in installed_entry_points(group)}
    if name not in found:
        names = ", ".join(sorted(found)) or "none"
        raise InvalidRequest(f"{field}: no plug-in {name!r} is installed in {group}; there are: {names}", field=field)
    try:
        return found[name].load()
    except (ImportError, AttributeError) as error:
        message = f"{field}: the plug-in {name!r} does not load: {type(error).__name__}: {error}"
        raise InvalidRequest(message, field=field) from error
