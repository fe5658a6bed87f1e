"""mesh.v1.Node over a NodeHost: what other nodes may ask of this one.

Errors leave as MeshErrors; mesh.rpc's interceptor turns them into statuses. Who calls is read from the caller's
certificate by the function that is given in; every RPC is for nodes of the same mesh only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import grpc.aio

from mesh.errors import NodeUnreachable, NotImplementedHere, PolicyDenied
from mesh.identity.place import Place, Role
from mesh.node import wire_bounds as bounds
from mesh.node.engine import RunId
from mesh.node.host import NodeHost
from mesh.node.host_frames import HostFrame
from mesh.node.port import WorkContext
from mesh.node.serving_role import ServingRole, serving_role
from mesh.node.transport import Transport
from mesh.node.wire import event_to_wire, load_to_wire, order_from_wire, place_to_wire
from mesh.node.wire_kv import frame_from_wire, frame_to_wire, kv_order_from_wire, report_to_wire
from mesh.v1 import node_pb2, node_pb2_grpc

MAX_PROBE_BYTES = 1 << 20
_LOAD_PERIOD_S = 1.0
_LOAD_PAUSE_S = 0.05  # changes that come closer than this are told together

PeerPlace = Callable[[grpc.aio.ServicerContext], Place]


def check_site(caller: Place, entry_site: str, what: str) -> None:
    """Raise PolicyDenied if an edge orders or ends work of a site that is not its own: what a policy calls `own` must
    not be a matter of what a box says of itself. No site (empty) is nobody's."""
    if caller.role is Role.EDGE and entry_site not in ("", caller.site):
        raise PolicyDenied(
            f"{caller.node_id} is at site {caller.site}; it cannot {what} of site {entry_site}",
            rule="entry-site",
            node=caller.node_id,
        )


def check_mover(caller: Place, context: WorkContext) -> None:
    """Raise PolicyDenied unless the caller may order moves of this request's KV: placement may, and an edge or core
    node for what entered the mesh at its own site."""
    if caller.role is not Role.PLACEMENT and context.entry_site != caller.site:
        raise PolicyDenied(
            f"{caller.node_id} is not the entry of this request; its entry and placement may move it",
            rule="mover",
            node=caller.node_id,
        )


class NodeServicer(node_pb2_grpc.NodeServicer):
    """See the module's docstring. `peer_place` raises Unauthenticated where there is no certificate of a node.
    `transport` is how this node reaches others when it is ordered to move KV; without it such orders are refused.
    `on_role` hears of a role that placement gave the node."""

    def __init__(
        self,
        host: NodeHost,
        peer_place: PeerPlace,
        transport: Transport | None = None,
        on_role: Callable[[ServingRole], None] = lambda role: None,
    ) -> None:
        self._host = host
        self._peer_place = peer_place
        self._transport = transport
        self._on_role = on_role

    async def Run(
        self, request: node_pb2.RunRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[node_pb2.RunResponse]:
        caller = self._caller(context)
        order = order_from_wire(request.order)
        check_site(caller, order.context.entry_site, "order work")
        async with aclosing(self._host.run(order)) as events:
            async for event in events:
                yield node_pb2.RunResponse(event=event_to_wire(event))

    async def Release(
        self, request: node_pb2.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> node_pb2.ReleaseResponse:
        caller = self._caller(context)
        run_id = RunId(bounds.name("run_id", request.run_id))
        check_site(caller, self._host.entry_site_of(run_id), "end work")
        await self._host.release(run_id)
        return node_pb2.ReleaseResponse()

    async def TransferKv(
        self, request_iterator: AsyncIterator[node_pb2.TransferKvRequest], context: grpc.aio.ServicerContext
    ) -> None:
        stream = _ServedStream(self._caller(context), request_iterator, context)
        await self._host.serve_transfer(await stream.recv(), stream)

    async def MoveKv(
        self, request: node_pb2.MoveKvRequest, context: grpc.aio.ServicerContext
    ) -> node_pb2.MoveKvResponse:
        caller = self._caller(context)
        order = kv_order_from_wire(request.open, request.peer_address, request.peer_place)
        check_mover(caller, order.context)
        if self._transport is None:
            raise NotImplementedHere(f"node {self._host.place.node_id} does not dial; order the move at its peer")
        report = await self._host.move_kv(order, self._transport.dial)
        return node_pb2.MoveKvResponse(report=report_to_wire(report))

    async def GetInfo(
        self, request: node_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> node_pb2.GetInfoResponse:
        self._caller(context)
        return node_pb2.GetInfoResponse(
            place=place_to_wire(self._host.place),
            build=self._host.info.build,
            clock_unix_s=self._host.clock.unix_s(),
        )

    async def WatchLoad(
        self, request: node_pb2.WatchLoadRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[node_pb2.WatchLoadResponse]:
        self._caller(context)
        while True:
            # Asked for before the load is read: a change that falls between is told next.
            change = asyncio.create_task(self._host.wait_change())
            try:
                load = await self._host.load()
                now = load_to_wire(load, draining=self._host.draining, role=self._host.role)
                yield node_pb2.WatchLoadResponse(load=now)
                await asyncio.sleep(_LOAD_PAUSE_S)
                await asyncio.wait((change,), timeout=_LOAD_PERIOD_S - _LOAD_PAUSE_S)
            finally:
                change.cancel()

    async def SetRole(
        self, request: node_pb2.SetRoleRequest, context: grpc.aio.ServicerContext
    ) -> node_pb2.SetRoleResponse:
        caller = self._caller(context)
        if caller.role is not Role.PLACEMENT:
            raise PolicyDenied(
                f"{caller.node_id} is no placement service, it cannot give roles", rule="role", node=caller.node_id
            )
        role = serving_role(request.role)
        before = self._host.set_role(role)
        self._on_role(role)
        return node_pb2.SetRoleResponse(previous_role=before.value)

    async def Probe(self, request: node_pb2.ProbeRequest, context: grpc.aio.ServicerContext) -> node_pb2.ProbeResponse:
        self._caller(context)
        bounds.at_most("payload", len(request.payload), MAX_PROBE_BYTES)
        return node_pb2.ProbeResponse(
            payload=bytes(bounds.at_most("reply_bytes", request.reply_bytes, MAX_PROBE_BYTES))
        )

    def _caller(self, context: grpc.aio.ServicerContext) -> Place:
        place = self._peer_place(context)
        if place.mesh != self._host.place.mesh:
            raise PolicyDenied(
                f"node RPCs are for nodes of mesh {self._host.place.mesh!r}, the caller is of {place.mesh!r}",
                rule="node_mesh",
                node=place.node_id,
            )
        return place


class _ServedStream:
    """The dialled side's end of TransferKv as a FrameStream."""

    def __init__(
        self,
        peer_place: Place,
        requests: AsyncIterator[node_pb2.TransferKvRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        self.peer_place = peer_place
        self._requests = requests
        self._context = context

    async def send(self, frame: HostFrame) -> None:
        try:
            await self._context.write(node_pb2.TransferKvResponse(frame=frame_to_wire(frame)))
        except grpc.aio.BaseError as exc:
            raise self._gone() from exc

    async def recv(self) -> HostFrame:
        try:
            request = await anext(self._requests)
        except (grpc.aio.BaseError, StopAsyncIteration) as exc:
            raise self._gone() from exc
        return frame_from_wire(request.frame)

    def _gone(self) -> NodeUnreachable:
        node = self.peer_place.node_id
        return NodeUnreachable(f"node {node} ended the KV transfer's stream", node=node)
