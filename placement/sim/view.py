"""The mesh as one modelled entry sees it: facts of nodes, late and sometimes stale, behind the real snapshot table with
its notes of requests under way and of what nodes' answers take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mesh.identity.place import Place
from mesh.node.engine import EngineLoad
from placement.decide.types import Snapshot
from placement.entry.mesh_view import ModelFacts, NodeFacts, NodeState
from placement.entry.snapshot_table import SnapshotTable
from placement.sim.profiles import NodeProfile

MODEL = "model"
"""The one model of a modelled mesh."""
_BEAT_S = 2.0  # how often the ages of nodes that have nothing new are renewed; they count as busy after more


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNode:
    """A node as an entry first hears of it."""

    place: Place
    profile: NodeProfile
    load: EngineLoad
    rtt_s: float
    goodput_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What was heard of a node last. `silent`: nothing is heard any more, not even that nothing is new."""

    load: EngineLoad
    heard_s: float
    state: NodeState = NodeState.READY
    silent: bool = False


class View:
    """Owned by one entry. `heartbeat_s`: age of the news of a node that has nothing new."""

    def __init__(self, nodes: Sequence[SeenNode], *, entry_node_id: str, heartbeat_s: float) -> None:
        self._facts = {node.place.node_id: _facts(node) for node in nodes}
        self._news = {node.place.node_id: News(load=node.load, heard_s=0.0) for node in nodes}
        self._heartbeat_s = heartbeat_s
        self._now_s = 0.0
        self._beat_s = _BEAT_S
        self.on_read: Callable[[float], None] = _nothing
        """Called before each snapshot, with the time: brings what was pushed."""
        self._table = SnapshotTable(self._read, entry_node_id=entry_node_id)
        self.notes = self._table.notes
        for node_id in self._facts:
            self._table.stale(node_id)

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._facts

    def news(self, node_id: str) -> News:
        """What was heard last."""
        return self._news[node_id]

    def hear(self, node_id: str, news: News) -> None:
        """News of a node."""
        if news is not self._news[node_id]:
            self._news[node_id] = news
            self._table.stale(node_id)

    def reachable(self, node_ids: Iterable[str], reachable: bool) -> None:
        """Whether work can be sent there, as far as is known here."""
        for node_id in node_ids:
            if node_id in self._facts:
                self._facts[node_id] = replace(self._facts[node_id], reachable=reachable)
                self._table.stale(node_id)

    def snapshot(self, now_s: float) -> Snapshot:
        """The snapshot now."""
        self._now_s = now_s
        self.on_read(now_s)
        if now_s >= self._beat_s:
            self._beat_s = now_s + _BEAT_S
            for node_id in self._facts:
                self._table.stale(node_id)
        return self._table.snapshot(version=1, now_s=now_s)

    def _read(self, node_id: str) -> NodeFacts:
        news = self._news[node_id]
        age_s = self._now_s - news.heard_s
        if not news.silent:
            age_s = min(age_s, self._heartbeat_s)
        return replace(self._facts[node_id], load=news.load, state=news.state, age_s=age_s)


def _facts(node: SeenNode) -> NodeFacts:
    profile = node.profile
    model = ModelFacts(
        model_id=MODEL, weights_dtype="f16", max_context_tokens=profile.max_context_tokens, layout_hash="0" * 64,
        weights_lineage="sim", digest="0" * 64, kv_bytes_per_token=profile.kv_bytes_per_token,
    )  # fmt: skip
    return NodeFacts(
        place=node.place, address="", state=NodeState.READY, models=(model,), load=node.load, rtt_s=node.rtt_s,
        goodput_bytes_per_s=node.goodput_bytes_per_s,
    )  # fmt: skip


def _nothing(now_s: float) -> None:
    """Nothing is pushed."""
