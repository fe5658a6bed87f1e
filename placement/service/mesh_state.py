"""The mesh as the placement service sees it: registry, load streams of core nodes, attached edges.

Implements the entry's World. Nothing is deleted for being silent: a registered node that is silent is
`disconnected`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from mesh.errors import InvalidRequest, MeshError, NodeUnreachable, NotFound, UnknownNode
from mesh.identity.place import Place, Role, Tier
from mesh.node.port import KvReport, NodePort, Peer
from mesh.node.serving_role import ServingRole
from mesh.process import background_loop
from mesh.registry.types import Health, NodesView, RegisteredNode, Registry
from mesh.rpc.uplink.hub import UplinkHub
from mesh.rpc.uplink.types import AttachedEdge
from mesh.telemetry.log import get_logger
from mesh.v1 import admin_pb2 as admin
from placement.decide.types import Snapshot
from placement.entry.mesh_view import IDLE, NodeFacts, NodeState, models_from_wire, to_wire
from placement.entry.notes import Notes
from placement.entry.peers import Dial, Peers
from placement.entry.snapshot_table import SnapshotTable
from placement.service.registrations import from_registration, role_of, to_registration
from placement.service.witnesses import Dialled

log = get_logger(__name__)
_NEVER_S = 1e9  # age of a load that was never heard
_PUSH_EVERY_S = 1.0
_PUSH_PAUSE_S = 0.1
_EDGE_TTL_S = 10.0
_EDGE_BEAT_S = 3.0


@dataclass(frozen=True, slots=True)
class _Registered:
    """A registration as read: what it says of the node, and whether it beats."""

    facts: NodeFacts
    health: Health


class MeshState:
    """Owned by the placement service; `start` and `close` it."""

    def __init__(
        self,
        *,
        place: Place,
        registry: Registry,
        hub: UplinkHub,
        dial: Dial,
        on_siblings: Callable[[list[Peer]], None] = lambda peers: None,
    ) -> None:
        """`on_siblings` hears of the other placement services whenever the registry's nodes change."""
        self._on_siblings = on_siblings
        self._place = place
        self._registry = registry
        self._hub = hub
        self._table = SnapshotTable(self._node, entry_node_id=place.node_id)
        self._peers = Peers(dial, watch_load=True, on_change=self._changed, on_news=self._table.stale)
        self._heard_s: float | None = None  # monotonic time of the registry's last word
        self._registered: dict[str, _Registered] = {}
        self._sessions: dict[str, str] = {}  # of attached edges
        self._version = 0
        self._changes = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to watch. Returns at once."""
        self._hub.listen(self._edge_changed)
        for edge in self._hub.attached():
            self._edge_changed(edge.place.node_id)
        loops = (self._watch_registry, self._push_snapshots, self._beat_for_edges)
        self._tasks = [background_loop(loop, loop.__name__.strip("_")) for loop in loops]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._peers.close()

    async def redial(self) -> None:
        """New connections to all core nodes, as the own certificate was renewed."""
        await self._peers.redial()

    # The entry's World

    def snapshot(self) -> Snapshot:
        return self._table.snapshot(version=self._version, now_s=time.monotonic())

    def snapshot_with(self, node_id: str) -> Snapshot:
        return self.snapshot()  # all nodes are in it

    @property
    def relay_node_id(self) -> str:
        return self._place.node_id

    def view_of(self, node_id: str) -> admin.NodeView | None:
        """One node as it may be told to an entry that has to know it; None if it is not known."""
        nodes = self._to_wire([node for node in self.nodes() if node.place.node_id == node_id]).nodes
        return nodes[0] if nodes else None

    def snapshot_age_s(self) -> float:
        return _NEVER_S if self._heard_s is None else time.monotonic() - self._heard_s

    def port(self, node_id: str) -> NodePort:
        if node_id in self._sessions:
            return self._hub.port(node_id)
        return self._peers.port(node_id)

    @property
    def notes(self) -> Notes:
        return self._table.notes

    def saw_transfer(self, source_node_id: str, target_node_id: str, report: KvReport) -> None:
        # The bytes went between two other nodes; what this process measures are its own links.
        return

    # What operators and edges see

    async def set_role(self, node_id: str, role: ServingRole) -> ServingRole:
        """Give a core node a role; returns the one before. Raises UnknownNode, InvalidRequest for an edge,
        NodeUnreachable."""
        node = self._node(node_id)
        if node is None:
            raise UnknownNode(f"no node {node_id[:64]!r} in the mesh", field="node_id")
        if node.place.tier is not Tier.CORE:
            raise InvalidRequest(f"{node_id} is an edge node: it prefills and decodes for its site", field="node_id")
        link = self._peers.link(node_id)
        if link is None:
            raise NodeUnreachable(f"node {node_id} is not known here", node=node_id)
        before = await link.set_role(role)
        log.info("node_role_set", node=node_id, role=role.value, before=before.value)
        return before

    def dialled(self) -> tuple[Dialled, ...]:
        """Nodes that this service dials and that answer."""
        return tuple(Dialled(link.peer.place, link.channel) for link in self._peers.reachable())

    def nodes(self) -> tuple[NodeFacts, ...]:
        """All known nodes, each with the age of its figures."""
        found = (self._node(node_id) for node_id in sorted(self._registered.keys() | self._sessions.keys()))
        return tuple(node for node in found if node is not None)

    def wire_snapshot(self) -> admin.Snapshot:
        return self._to_wire(self.nodes())

    def snapshot_for(self, site_place: Place) -> admin.Snapshot:
        """What an edge needs to decide by itself: the core, and its own site. As of now for one site; of all sites
        those that are pushed together share one reading of the nodes."""
        return self._snapshots().of(site_place.site)

    def _snapshots(self) -> SiteSnapshots:
        return SiteSnapshots(self.wire_snapshot())

    async def changed(self, timeout_s: float) -> None:
        """Return at the next change, or after the time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changes.wait()

    def _to_wire(self, nodes: tuple[NodeFacts, ...] | list[NodeFacts]) -> admin.Snapshot:
        age = min(self.snapshot_age_s(), _NEVER_S)
        return to_wire(nodes, version=self._version, registry_age_s=age, made_unix_s=time.time())

    def _node(self, node_id: str) -> NodeFacts | None:
        edge = self._hub.find(node_id)
        if edge is not None:
            return _edge_facts(edge)
        node = self._registered.get(node_id)
        if node is None or node.facts.place.tier is not Tier.CORE:
            return None if node is None else node.facts
        return self._core_facts(node)

    def _core_facts(self, node: _Registered) -> NodeFacts:
        link = self._peers.link(node.facts.place.node_id)
        if link is None:
            return node.facts
        now = link.facts
        alive = node.health is Health.PASSING and now.reachable and now.load is not None
        return replace(
            node.facts,
            state=NodeState.READY if alive else NodeState.DISCONNECTED,
            reachable=now.reachable,
            load=now.load or IDLE,
            draining=now.draining,
            age_s=_NEVER_S if now.load_age_s is None else now.load_age_s,
            rtt_s=now.rtt_s,
            goodput_bytes_per_s=now.goodput_bytes_per_s,
            role=now.role or node.facts.role,
        )

    def _changed(self) -> None:
        self._version += 1
        self._changes.set()
        self._changes = asyncio.Event()

    async def _watch_registry(self) -> None:
        last: tuple[RegisteredNode, ...] | None = None
        async for view in self._registry.watch():
            self._heard_s = view.heard_monotonic_s
            if view.nodes != last:
                last = view.nodes
                before, self._registered = self._registered, self._read(view)
                self._on_siblings(self._siblings_in(view))
                for node_id in before.keys() | self._registered.keys():
                    if before.get(node_id) != self._registered.get(node_id):
                        self._table.stale(node_id)
                self._peers.update(
                    Peer(address=node.facts.address, place=node.facts.place)
                    for node in self._registered.values()
                    if node.facts.address and node.facts.place.role is Role.CORE
                )
                self._changed()

    def _siblings_in(self, view: NodesView) -> list[Peer]:
        found = []
        for node in view.nodes:
            with suppress(MeshError):  # _read says so
                place, _ = from_registration(node.registration, mesh=self._place.mesh)
                if place.role is Role.PLACEMENT and place != self._place and node.registration.address:
                    found.append(Peer(address=node.registration.address, place=place))
        return found

    def _read(self, view: NodesView) -> dict[str, _Registered]:
        """The nodes of a view that may do work, as far as they can be read, by id."""
        found = {}
        for node in view.nodes:
            try:
                place, models = from_registration(node.registration, mesh=self._place.mesh)
                role = role_of(node.registration)
            except MeshError as error:
                log.warning("registration_ignored", node_id=node.registration.node_id, reason=error.reason)
                continue
            if place.role is not Role.PLACEMENT:
                facts = NodeFacts(
                    place=place,
                    address=node.registration.address,
                    state=NodeState.DISCONNECTED,
                    models=models,
                    reachable=False,
                    age_s=_NEVER_S,
                    role=role,
                )
                found[place.node_id] = _Registered(facts, node.health)
        return found

    def _edge_changed(self, node_id: str) -> None:
        self._table.stale(node_id)
        edge = self._hub.find(node_id)
        session_id = "" if edge is None else edge.session_id
        if session_id == self._sessions.get(node_id, ""):
            return  # its load
        if edge is None:
            del self._sessions[node_id]
        else:
            self._sessions[node_id] = session_id
        self._changed()

    async def _push_snapshots(self) -> None:
        while True:
            # Not before the registry was heard once: a mesh without its core nodes would make sites drop their links.
            if self._heard_s is not None:
                together = self._snapshots()
                self._hub.push_snapshot(lambda site_place, now=together: now.of(site_place.site))  # type: ignore[misc]
            await self.changed(_PUSH_EVERY_S)
            await asyncio.sleep(_PUSH_PAUSE_S)  # what changes meanwhile is told together

    async def _beat_for_edges(self) -> None:
        """Register the edges that are attached here, and say which are; the registry remembers the others."""
        registered: dict[str, tuple[admin.NodeModel, ...]] = {}  # with which models
        while True:
            attached = {edge.place.node_id: edge for edge in self._hub.attached()}
            for node_id in registered.keys() | attached.keys():
                try:
                    if node_id in attached and registered.get(node_id) != attached[node_id].models:
                        await self._register_edge(attached[node_id])
                        registered[node_id] = attached[node_id].models
                    await self._registry.heartbeat(node_id, ready=node_id in attached)
                    if node_id not in attached:
                        registered.pop(node_id)  # said once; from now on it may be attached to another one
                except NotFound:
                    registered.pop(node_id, None)  # the registry lost it: register again next time
                except NodeUnreachable:
                    break  # the registry is gone for now
                except MeshError as error:  # this one cannot be registered (a full disk, too many models ...)
                    log.warning("edge_not_registered", node_id=node_id, reason=error.reason, error=error.message)
                except Exception as error:  # the other edges must not miss their beats for it
                    log.error("edge_not_registered", node_id=node_id, exc_info=error)
            await asyncio.sleep(_EDGE_BEAT_S)

    async def _register_edge(self, edge: AttachedEdge) -> None:
        models = models_from_wire(edge.models)
        await self._registry.register(to_registration(edge.place, "", models, ttl_s=_EDGE_TTL_S))


class SiteSnapshots:
    """One reading of the mesh, cut for each site: nodes are read once, not once for each site."""

    def __init__(self, whole: admin.Snapshot) -> None:
        self._whole = whole
        self._core = [node for node in whole.nodes if node.tier == Tier.CORE.value]
        self._at: dict[str, list[admin.NodeView]] = {}
        for node in whole.nodes:
            if node.tier != Tier.CORE.value:
                self._at.setdefault(node.site, []).append(node)

    def of(self, site: str) -> admin.Snapshot:
        """The core, and the site's own nodes, by id."""
        nodes = sorted((*self._core, *self._at.get(site, ())), key=lambda node: node.node_id)
        whole = self._whole
        return admin.Snapshot(
            version=whole.version,
            registry_age_s=whole.registry_age_s,
            made_unix_s=whole.made_unix_s,
            nodes=nodes,
        )


def _edge_facts(edge: AttachedEdge) -> NodeFacts:
    return NodeFacts(
        place=edge.place,
        address="",
        state=NodeState.READY,
        models=models_from_wire(edge.models),
        load=edge.load,
        draining=edge.draining,
        age_s=edge.age_s,
        rtt_s=edge.rtt_s,
    )
