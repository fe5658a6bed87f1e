"""What an entry knows of nodes beside what they tell: the requests it has just given them, and what their answers take.

Owned by a world's snapshot table, which puts it into the facts of a node whenever those are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mesh.node.engine import EngineLoad
from mesh.telemetry.log import get_logger
from placement.entry.mesh_view import NodeFacts
from placement.predict.calibration import Calibration
from placement.predict.in_flight import NOTHING, InFlight, Placed
from placement.predict.predict import DEFAULT_STEP_TOKENS

_LEAST_GRACE_S = 0.05  # a node takes a request in and tells of its load, the round trip aside
_LONGEST_DRAIN_S = 2.0
log = get_logger(__name__)


class Notes:
    """`on_change(node_id)`: what is known of a node changed. Times are of the clock of decisions."""

    def __init__(self, on_change: Callable[[str], None] = lambda node_id: None) -> None:
        self._on_change = on_change
        self._in_flight = InFlight()
        self._calibration = Calibration()
        self._liars: set[str] = set()

    def placed(self, node_id: str, key: str, what: Placed, now_s: float) -> None:
        """A request was given to this node."""
        self._in_flight.placed(node_id, key, what, now_s)
        self._on_change(node_id)

    def left(self, node_id: str, key: str) -> None:
        """It is not there any more."""
        self._in_flight.left(node_id, key)
        self._on_change(node_id)

    def answered(self, node_id: str, *, ttft_ratio: float | None, tpot_ratio: float | None, now_s: float) -> None:
        """A request ran at this node alone: measured over predicted times, before any correction."""
        self._calibration.saw(node_id, ttft_ratio=ttft_ratio, tpot_ratio=tpot_ratio, now_s=now_s)
        times = self._calibration.liar(node_id, now_s)
        if times and node_id not in self._liars:
            log.warning("node_is_slower_than_it_says", node_id=node_id, times=round(times, 1))
        (self._liars.add if times else self._liars.discard)(node_id)
        self._on_change(node_id)

    @property
    def liars(self) -> frozenset[str]:
        """Nodes whose answers take several times what their own figures say."""
        return frozenset(self._liars)

    def applied(self, facts: NodeFacts, now_s: float) -> NodeFacts:
        """The facts with what is known beside them."""
        node_id, load = facts.place.node_id, facts.load
        grace_s = _LEAST_GRACE_S + (facts.rtt_s or 0.0)
        placed = self._in_flight.at(node_id, now_s - facts.age_s, now_s, grace_s=grace_s)
        ahead = _left_to_prefill(load, facts.age_s)
        if placed != NOTHING or ahead != load.waiting_prefill_tokens:
            load = replace(
                load,
                running=load.running + placed.runs,
                waiting_prefill_tokens=ahead + placed.prefill_tokens,
                kv_used_tokens=load.kv_used_tokens + placed.kv_tokens,
            )
        scale = self._calibration.scale(node_id, now_s)
        return facts if load is facts.load and scale == facts.scale else replace(facts, load=load, scale=scale)


def _left_to_prefill(load: EngineLoad, age_s: float) -> int:
    """Of the prompt tokens that waited when the load was told, those that the node, by its own fit, has not prefilled
    since. What is too old to be believed counts as busy, and is not made idle here."""
    curve, ahead = load.curve, load.waiting_prefill_tokens
    if not (ahead and curve.knows_prefill and 0 < age_s <= _LONGEST_DRAIN_S):
        return ahead
    chunk = max(1, (load.step_tokens or DEFAULT_STEP_TOKENS) - load.running)
    beside_s = curve.decode_row_s * load.running + curve.decode_context_s * load.context_tokens
    chunk_s = curve.prefill_base_s + beside_s + curve.prefill_token_s * chunk
    return max(0, ahead - int(age_s / chunk_s * chunk))
