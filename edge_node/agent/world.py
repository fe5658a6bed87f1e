"""The mesh as an edge agent sees it: its own engine, the last snapshot it was pushed, and links it measured itself.

Implements the entry's World. Cut off from placement, the snapshot ages; core nodes that answer this site's own probes
stay in use, with a load that counts as busy. Cut off from everything, the own node remains.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

from mesh.identity.place import Tier
from mesh.node.engine import EngineLoad
from mesh.node.local_port import LocalPort
from mesh.node.port import KvReport, NodePort, Peer
from mesh.rpc.relay.dialling import RelayDialler, RelayPort
from mesh.telemetry.log import get_logger
from mesh.v1 import admin_pb2 as admin
from placement.decide.settings import DEFAULTS
from placement.decide.types import Snapshot
from placement.entry.mesh_view import ModelFacts, NodeFacts, NodeState, build_snapshot, from_wire, to_wire
from placement.entry.notes import Notes
from placement.entry.peers import Dial, Peers
from placement.entry.snapshot_table import SnapshotTable
from placement.entry.world import NEVER_S

_SILENT_AFTER_S = 5.0  # snapshots come every second; after this, placement has nothing to say about a node's state
_READ_ALL_EVERY_S = 1.0
_MOST_GUESTS = 64

log = get_logger(__name__)


class EdgeWorld:
    """Owned by the agent. `set_load` and `set_snapshot` feed it."""

    def __init__(
        self,
        *,
        own: LocalPort,
        models: tuple[ModelFacts, ...],
        load: EngineLoad,
        dial: Dial,
        relay: RelayDialler | None = None,
    ) -> None:
        self._own = own
        self._relay = relay
        self._guests: dict[str, NodeFacts] = {}  # nodes of other sites, each told of for a move to it
        self._models = models
        self._load = load
        self._draining = False
        self._table = SnapshotTable(self._node, entry_node_id=own.place.node_id)
        self._table.stale(own.place.node_id)
        self._read_all_s = 0.0  # monotonic time at which the table last read every node
        self._peers = Peers(dial, watch_load=False, on_change=self._changed, on_news=self._table.stale)
        self._others: dict[str, NodeFacts] = {}  # as pushed; ages are those of that moment
        self._pushed_at_s: float | None = None
        self._unread = 0
        self._version = 0
        self._changes = asyncio.Event()

    async def close(self) -> None:
        await self._peers.close()

    async def redial(self) -> None:
        """New connections to all core nodes, as the own certificate was renewed."""
        await self._peers.redial()

    def set_load(self, load: EngineLoad, *, draining: bool) -> None:
        """The own engine's load now."""
        self._load, self._draining = load, draining
        self._table.stale(self._own.place.node_id)

    @property
    def models(self) -> tuple[ModelFacts, ...]:
        """What the own engine serves."""
        return self._models

    def set_models(self, models: tuple[ModelFacts, ...]) -> None:
        """What the own engine serves, where that changed (a codec came)."""
        self._models = models
        self._table.stale(self._own.place.node_id)
        self._changed()

    def set_snapshot(self, snapshot: admin.Snapshot) -> None:
        """A newer snapshot was pushed; open links to the core nodes in it."""
        known = from_wire(snapshot, mesh=self._own.place.mesh)
        unread = len(snapshot.nodes) - len(known)
        if unread != self._unread:
            self._unread = unread
            log.warning("snapshot_has_nodes_of_a_newer_kind", count=unread)
        before = self._others
        self._others = {node.place.node_id: node for node in known if node.place.node_id != self._own.place.node_id}
        for node_id in before.keys() | self._others.keys():
            self._table.stale(node_id)
        self._pushed_at_s = time.monotonic()
        self._peers.update(
            Peer(address=node.address, place=node.place)
            for node in self._others.values()
            if node.address and node.place.tier is Tier.CORE
        )
        self._changed()

    # The entry's World

    def snapshot(self) -> Snapshot:
        now_s = time.monotonic()
        if self.snapshot_age_s() > _SILENT_AFTER_S and now_s - self._read_all_s > _READ_ALL_EVERY_S:
            self._read_all_s = now_s  # what is said of nodes depends on the time now, see _heard
            for node_id in self._others:
                self._table.stale(node_id)
        return self._table.snapshot(version=self._version, now_s=now_s)

    def meet(self, view: admin.NodeView) -> None:
        """A node of another site, to which one request of this one may move. It is in no snapshot but those that are
        asked for it by name, so that nothing else is ever placed there."""
        known = from_wire(admin.Snapshot(nodes=[view]), mesh=self._own.place.mesh)
        for node in known:
            if node.place.node_id != self._own.place.node_id and node.place.tier is Tier.EDGE:
                self._guests.pop(node.place.node_id, None)
                self._guests[node.place.node_id] = replace(node, reachable=self._relay is not None)
        while len(self._guests) > _MOST_GUESTS:
            del self._guests[next(iter(self._guests))]

    def snapshot_with(self, node_id: str) -> Snapshot:
        guest = self._guests.get(node_id)
        if guest is None or node_id in self._others:
            return self.snapshot()
        return build_snapshot(
            (*self.nodes(), guest),
            entry_node_id=self._own.place.node_id,
            version=self._version,
            made_s=time.monotonic(),
        )

    @property
    def relay_node_id(self) -> str:
        return self._relay.relay if self._relay is not None else ""

    def snapshot_age_s(self) -> float:
        return NEVER_S if self._pushed_at_s is None else time.monotonic() - self._pushed_at_s

    def port(self, node_id: str) -> NodePort:
        if node_id == self._own.place.node_id:
            return self._own
        guest = self._guests.get(node_id)
        if guest is not None and self._relay is not None and node_id not in self._others:
            return RelayPort(guest.place, self._relay)
        return self._peers.port(node_id)

    @property
    def notes(self) -> Notes:
        return self._table.notes

    def saw_transfer(self, source_node_id: str, target_node_id: str, report: KvReport) -> None:
        ends = (source_node_id, target_node_id)
        if self._own.place.node_id not in ends:
            return  # between two core nodes: those bytes did not pass here
        for node_id in ends:
            link = self._peers.link(node_id)
            if link is not None:
                link.saw_transfer(report.wire_bytes, report.duration_s)

    # What operators see here

    def nodes(self) -> tuple[NodeFacts, ...]:
        """The own node first-hand, the others as last heard."""
        elapsed_s = self.snapshot_age_s()
        return (self._own_facts(), *(self._heard(node, elapsed_s) for node in self._others.values()))

    def wire_snapshot(self) -> admin.Snapshot:
        return to_wire(
            self.nodes(), version=self._version, registry_age_s=self.snapshot_age_s(), made_unix_s=time.time()
        )

    async def changed(self, timeout_s: float) -> None:
        """Return at the next change, or after the time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changes.wait()

    def _node(self, node_id: str) -> NodeFacts | None:
        if node_id == self._own.place.node_id:
            return self._own_facts()
        node = self._others.get(node_id)
        return None if node is None else self._heard(node, self.snapshot_age_s())

    def _own_facts(self) -> NodeFacts:
        return NodeFacts(
            place=self._own.place,
            address="",
            state=NodeState.READY,
            models=self._models,
            load=self._load,
            draining=self._draining,
            rtt_s=0.0,
        )

    def _heard(self, node: NodeFacts, elapsed_s: float) -> NodeFacts:
        age_s = node.age_s + elapsed_s
        link = self._peers.link(node.place.node_id)
        if link is None:  # another box of this site, or a core node without an address: no way there from here
            return replace(node, reachable=False, age_s=age_s)
        facts, state = link.facts, node.state
        if facts.reachable:
            # It answers us, whatever placement last knew: busy for all we know, but not to be refused as unheard of.
            age_s = min(age_s, DEFAULTS.stale_after_s - 2 * _READ_ALL_EVERY_S)
            if state is NodeState.DISCONNECTED and elapsed_s > _SILENT_AFTER_S:
                state = NodeState.READY
        elif state is NodeState.READY:
            state = NodeState.DISCONNECTED
        return replace(
            node,
            state=state,
            reachable=facts.reachable,
            age_s=age_s,
            rtt_s=facts.rtt_s,
            goodput_bytes_per_s=facts.goodput_bytes_per_s,
        )

    def _changed(self) -> None:
        self._version += 1
        self._changes.set()
        self._changes = asyncio.Event()
