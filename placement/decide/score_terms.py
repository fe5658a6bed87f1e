"""The built-in scores: terms of a way's cost, in seconds. Their formulae are in placement/decide/PLUGINS.md. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from placement.decide.plugins import ScoreView
    from placement.decide.scores import Predicted
    from placement.decide.types import FloatArray


class Time:
    """Predicted time to the last token: compute, queue, prefix hit, round trips and KV transfer are all in it."""

    name = "time"

    def cost_s(self, ways: Predicted, view: ScoreView) -> FloatArray:
        return ways.total_s


class Price:
    """The policy's price of the engine time used."""

    name = "price"

    def cost_s(self, ways: Predicted, view: ScoreView) -> FloatArray | None:
        return ways.price_s


class Late:
    """Seconds by which a latency wish or the deadline is missed."""

    name = "late"

    def cost_s(self, ways: Predicted, view: ScoreView) -> FloatArray | None:
        request, late_s = view.request, None
        if request.ttft_s is not None:
            late_s = np.maximum(ways.ttft_s - request.ttft_s, 0.0)
        if request.tpot_s is not None:
            wanted_s = request.tpot_s * max(request.expected_tokens - 1, 0)
            slow_s = np.maximum(ways.total_s - ways.ttft_s - wanted_s, 0.0)
            late_s = slow_s if late_s is None else late_s + slow_s
        if request.deadline_s is not None:
            over_s = np.maximum(ways.total_s - request.deadline_s, 0.0)
            late_s = over_s if late_s is None else late_s + over_s
        return late_s


class Harm:
    """What the prefill of this request costs those who decode at the same node, where nodes have roles."""

    name = "harm"

    def cost_s(self, ways: Predicted, view: ScoreView) -> FloatArray | None:
        snapshot = view.snapshot
        if snapshot.all_do_both:
            return None  # it would be the same everywhere
        both = snapshot.prefills & snapshot.decodes
        slowed = np.where(both & ~snapshot.tier_edge, snapshot.running, 0)
        harm_s = slowed * view.times.prefill_s
        return harm_s if ways.prefill is None else harm_s[ways.prefill]


class Session:
    """A session stays where it was served, unless leaving is worth more than a share of its time: loads that differ for
    a moment should not send it to and fro."""

    name = "session"

    def cost_s(self, ways: Predicted, view: ScoreView) -> FloatArray | None:
        row = view.snapshot.row_of(view.request.session_node_id) if view.request.session_node_id else -1
        if row < 0:
            return None
        leaves_s: FloatArray = view.settings.session_switch_ratio * ways.total_s
        if ways.decode is None:
            leaves_s[row] = 0.0
            return leaves_s
        return np.where(ways.decode == row, 0.0, leaves_s)


class Doubt:
    """A share of the time: how far off predictions for the node usually are. Its weight is 0 unless it is set."""

    name = "doubt"

    def cost_s(self, ways: Predicted, view: ScoreView) -> FloatArray | None:
        error_ratio = view.times.error_ratio
        return (error_ratio if ways.decode is None else error_ratio[ways.decode]) * ways.total_s


TIME, PRICE, LATE, HARM, SESSION, DOUBT = Time(), Price(), Late(), Harm(), Session(), Doubt()
"""Entry points of `kvmesh.scores`."""
