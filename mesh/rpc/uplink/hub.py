"""The placement side of the uplink: all attached edge nodes.

One session per node id. The node id and place come from the certificate; a hello says neither. A newer session
of the same node replaces the older one, whose open work fails with LeaseLost: the agent restarted, or its old
connection is half open. Two boxes that share one certificate keep replacing each other, which shows in their
states and in the log.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable

import grpc.aio

from mesh.errors import Draining, Expired, InvalidRequest, LeaseLost, MeshError, NodeUnreachable
from mesh.identity.place import Place, Role
from mesh.rpc.peer import require_role
from mesh.rpc.uplink import wire
from mesh.rpc.uplink.clock import Clock, SystemClock, time_limit
from mesh.rpc.uplink.port import UplinkPort
from mesh.rpc.uplink.session import Session
from mesh.rpc.uplink.types import AttachedEdge, UplinkLimits
from mesh.telemetry.log import get_logger
from mesh.v1 import admin_pb2, uplink_pb2, uplink_pb2_grpc

PeerPlace = Callable[[grpc.aio.ServicerContext], Place]
ConfigFor = Callable[[Place], uplink_pb2.SiteConfig]
SnapshotFor = Callable[[Place], admin_pb2.Snapshot]

log = get_logger(__name__)


class UplinkHub(uplink_pb2_grpc.UplinkServicer):
    """Servicer of mesh.v1.Uplink. `peer_place` reads the caller's place from its certificate and raises
    Unauthenticated without one. Errors leave as MeshErrors, for the server's interceptor to map."""

    def __init__(
        self,
        peer_place: PeerPlace,
        clock: Clock | None = None,
        *,
        lease_s: float = 6.0,
        heartbeat_s: float = 2.0,
        limits: UplinkLimits | None = None,
    ) -> None:
        if not 0.0 < heartbeat_s * 2.0 <= lease_s:
            raise InvalidRequest(f"lease_s ({lease_s}) must hold two heartbeats of heartbeat_s ({heartbeat_s})")
        self._peer_place = peer_place
        self._clock = clock or SystemClock()
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._limits = limits or UplinkLimits()
        self._sessions: dict[str, Session] = {}
        self._watchers: set[asyncio.Event] = set()
        self._listeners: list[Callable[[str], None]] = []
        self._config_for: ConfigFor | None = None
        self._snapshot_for: SnapshotFor | None = None
        self._closed = False

    # The mesh's view

    def attached(self) -> tuple[AttachedEdge, ...]:
        """All nodes with a live session, sorted by node id."""
        return tuple(self._sessions[node_id].view() for node_id in sorted(self._sessions))

    def find(self, node_id: str) -> AttachedEdge | None:
        """A node with a live session; None if it has none."""
        session = self._sessions.get(node_id)
        return None if session is None else session.view()

    def listen(self, on_change: Callable[[str], None]) -> None:
        """Call `on_change` with the node id at each change of a session (attach, end, load). It must be quick."""
        self._listeners.append(on_change)

    async def watch(self) -> AsyncIterator[tuple[AttachedEdge, ...]]:
        """`attached()` now and after each change (attach, detach, lease expiry, load), forever. Changes that come
        while the reader is busy are seen as one."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                yield self.attached()
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def port(self, node_id: str) -> UplinkPort:
        """The node as a NodePort; it stays good over reconnects. Raises NodeUnreachable if it is not attached."""
        return UplinkPort(self._session(node_id).place, lambda: self._session(node_id))

    # What goes out

    def push_config(self, config_for: ConfigFor) -> None:
        """Send each site its configuration, now and at each later attach. `config_for` must be quick and total."""
        self._config_for = config_for
        for session in self._sessions.values():
            session.push("config", uplink_pb2.AttachResponse(config=config_for(session.place)))

    def push_snapshot(self, snapshot_for: SnapshotFor) -> None:
        """Send each site the mesh as it may see it, now and at each later attach."""
        self._snapshot_for = snapshot_for
        for session in self._sessions.values():
            session.push("snapshot", uplink_pb2.AttachResponse(snapshot=snapshot_for(session.place)))

    async def command(
        self, node_id: str, command: uplink_pb2.Command, *, timeout_s: float = 30.0
    ) -> uplink_pb2.CommandResult:
        """Send a command to an agent and return its answer. Raises the agent's error, NodeUnreachable or LeaseLost
        if there is no session or it ends, Expired after `timeout_s`: then it is not known whether it was done."""
        session = self._session(node_id)
        try:
            result = await session.command(command, timeout_s)
        except TimeoutError as exc:
            raise Expired(f"node {node_id} did not answer a command within {timeout_s:g} s", node=node_id) from exc
        wire.raise_error(result.error_reason, result.error_message, node_id, result.error_details)
        return result

    def cut_off(self, refusal: Callable[[Place], MeshError | None]) -> tuple[str, ...]:
        """End the sessions of nodes that `refusal` has an error for: their open work fails, they are told it, and what
        a site was given is taken back as far as it listens. Returns their node ids."""
        ended = []
        for session in list(self._sessions.values()):
            error = refusal(session.place)
            if error is not None:
                node_id = session.place.node_id
                session.end(NodeUnreachable(f"node {node_id} is no node any more", node=node_id), told=error)
                ended.append(node_id)
        return tuple(ended)

    def close(self) -> None:
        """End all sessions, as the server is about to stop: their open work fails with Draining. New agents are
        refused with Draining. Idempotent."""
        self._closed = True
        for session in list(self._sessions.values()):
            session.end(
                Draining("the placement service is stopping", node=session.place.node_id),
                told=Draining("the placement service is stopping; attach again later"),
            )

    # The RPC

    async def Attach(
        self, request_iterator: AsyncIterator[uplink_pb2.AttachRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """One agent's session, from its hello to its end."""
        place = self._peer_place(context)
        require_role(place, (Role.EDGE,), "an uplink")
        requests = aiter(request_iterator)
        session = await self._greet(place, requests)
        await context.write(
            uplink_pb2.AttachResponse(
                lease=uplink_pb2.SessionLease(
                    session_id=session.session_id,
                    lease_s=self._lease_s,
                    heartbeat_s=self._heartbeat_s,
                    clock_unix_s=self._clock.unix(),
                )
            )
        )
        try:
            self._peer_place(context)  # it may have been cut off while it said hello
            self._attach(session)
            await session.serve(requests, context.write)
        finally:
            session.end(NodeUnreachable(f"node {place.node_id} is not attached", node=place.node_id), told=None)
            reason = session.why.reason if session.why is not None else ""
            log.info("uplink_ended", peer=place.node_id, site=place.site, reason=reason)

    async def _greet(self, place: Place, requests: AsyncIterator[uplink_pb2.AttachRequest]) -> Session:
        try:
            async with time_limit(self._clock, self._lease_s):
                first = await anext(requests)
        except TimeoutError:
            raise Expired(f"no hello within {self._lease_s:g} s", node=place.node_id) from None
        except StopAsyncIteration:
            raise InvalidRequest("the session ended before its hello", field="hello") from None
        facts, load, draining = wire.hello_from_wire(first)
        skew_s = first.hello.clock_unix_s - self._clock.unix()
        if abs(skew_s) > self._lease_s:
            log.warning("agent_clock_off", peer=place.node_id, skew_s=round(skew_s, 1))
        session = Session(
            session_id=uuid.uuid4().hex,
            place=place,
            facts=facts,
            load=load,
            draining=draining,
            lease_s=self._lease_s,
            limits=self._limits,
            clock=self._clock,
            on_change=lambda: self._session_changed(session),
        )
        return session

    def _attach(self, session: Session) -> None:
        if self._closed:
            raise Draining("the placement service is stopping; attach again later")
        place = session.place
        older = self._sessions.get(place.node_id)
        self._sessions[place.node_id] = session
        if older is not None:
            replaced = LeaseLost(f"a newer session of {place.node_id} replaced this one", node=place.node_id)
            older.end(replaced, told=replaced)
        log.info("agent_attached", peer=place.node_id, site=place.site, replaced=older is not None)
        if self._config_for is not None:
            session.push("config", uplink_pb2.AttachResponse(config=self._config_for(place)))
        if self._snapshot_for is not None:
            session.push("snapshot", uplink_pb2.AttachResponse(snapshot=self._snapshot_for(place)))
        self._changed(place.node_id)

    def _session(self, node_id: str) -> Session:
        session = self._sessions.get(node_id)
        if session is None:
            raise NodeUnreachable(f"node {node_id} is not attached", node=node_id)
        return session

    def _session_changed(self, session: Session) -> None:
        if not session.alive and self._sessions.get(session.place.node_id) is session:
            del self._sessions[session.place.node_id]
        self._changed(session.place.node_id)

    def _changed(self, node_id: str) -> None:
        for changed in self._watchers:
            changed.set()
        for on_change in self._listeners:
            on_change(node_id)
