"""The Registry RPCs over any Registry: the placement service serves its embedded one to core nodes with it.

Who calls is read from the certificate: core and placement nodes only, a node changes its own registration only,
values are for placement nodes only (they hold tenants'
secrets), but for policies, which core nodes may read. An edge gets what its site needs over its uplink.
Goes on a mesh.rpc.server.node_server, whose interceptor maps the errors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc.aio

from mesh.errors import InvalidRequest, PolicyDenied
from mesh.identity.place import Place, Role
from mesh.registry import wire
from mesh.registry.types import Registry
from mesh.rpc.peer import peer_place, require_role
from mesh.v1 import registry_pb2 as pb
from mesh.v1 import registry_pb2_grpc as pb_grpc

PLACE_META = "place"
"""Meta key under which a registration may carry its place URI. Here it is held to the certificate; wherever it was
read, dialling with mesh.rpc.channel.node_channel(expect=...) proves it."""


OPEN_TO_CORE = ("policies/", "revoked_sites/")
"""Prefixes of the values that core nodes may read."""


class RegistryServicer(pb_grpc.RegistryServicer):
    """`mesh`: the certificates' mesh."""

    def __init__(self, registry: Registry, mesh: str) -> None:
        self._registry = registry
        self._mesh = mesh

    async def Register(self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext) -> pb.RegisterResponse:
        registration = wire.registration_from_pb(request.registration)
        place = self._own(context, registration.node_id)
        if registration.meta.get(PLACE_META, place.uri) != place.uri:
            raise PolicyDenied(
                f"{place.node_id} registers a place that its certificate does not have",
                rule="own_place",
                node=place.node_id,
            )
        await self._registry.register(registration)
        return pb.RegisterResponse()

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.aio.ServicerContext) -> pb.HeartbeatResponse:
        self._own(context, request.node_id)
        await self._registry.heartbeat(request.node_id, ready=request.ready)
        return pb.HeartbeatResponse()

    async def Deregister(
        self, request: pb.DeregisterRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeregisterResponse:
        self._own(context, request.node_id)
        await self._registry.deregister(request.node_id)
        return pb.DeregisterResponse()

    async def WatchNodes(
        self, request: pb.WatchNodesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchNodesResponse]:
        self._caller(context, "the registry")
        async with aclosing(self._registry.watch()) as views:  # type: ignore[type-var]  # a generator in every Registry
            async for view in views:
                yield wire.view_to_pb(view)

    async def ListValues(
        self, request: pb.ListValuesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListValuesResponse:
        self._reader(context, request.prefix)
        values = await self._registry.list_values(request.prefix)
        return pb.ListValuesResponse(values=wire.values_to_pb(values))

    async def PutValue(self, request: pb.PutValueRequest, context: grpc.aio.ServicerContext) -> pb.PutValueResponse:
        self._placement(context)
        expected = request.expected_version if request.HasField("expected_version") else None
        if request.HasField("value"):
            version = await self._registry.put(request.key, request.value, expected_version=expected)
            return pb.PutValueResponse(version=version)
        if expected is not None:
            raise InvalidRequest("a delete takes no expected_version", field="expected_version")
        await self._registry.delete(request.key)
        return pb.PutValueResponse()

    async def WatchValues(
        self, request: pb.WatchValuesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchValuesResponse]:
        self._reader(context, request.prefix)
        async with aclosing(self._registry.watch_values(request.prefix)) as states:  # type: ignore[type-var]
            async for values in states:
                yield pb.WatchValuesResponse(values=wire.values_to_pb(values))

    def _caller(self, context: grpc.aio.ServicerContext, what: str) -> Place:
        place = peer_place(context, mesh=self._mesh)
        require_role(place, {Role.CORE, Role.PLACEMENT}, what)
        return place

    def _reader(self, context: grpc.aio.ServicerContext, prefix: str) -> None:
        """Core nodes read policies, which their border guards need; everything else is for placement nodes."""
        roles = {Role.CORE, Role.PLACEMENT} if prefix.startswith(OPEN_TO_CORE) else {Role.PLACEMENT}
        require_role(peer_place(context, mesh=self._mesh), roles, "the value store")

    def _placement(self, context: grpc.aio.ServicerContext) -> None:
        require_role(peer_place(context, mesh=self._mesh), {Role.PLACEMENT}, "the value store")

    def _own(self, context: grpc.aio.ServicerContext, node_id: str) -> Place:
        place = self._caller(context, "the registry")
        if node_id != place.node_id:
            raise PolicyDenied(
                f"{place.node_id} may change its own registration only, not that of {node_id!r}",
                rule="own_registration",
                node=place.node_id,
            )
        return place
