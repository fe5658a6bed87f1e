"""The gRPC face of an entry: mesh.v1.Inference, and mesh.v1.MeshView for the requests that this entry owns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Protocol

import grpc.aio

from mesh.errors import NotImplementedHere
from mesh.identity.principal import Principal
from mesh.node.serving_role import ServingRole, serving_role
from mesh.telemetry.traces import take_incoming
from mesh.v1 import admin_pb2 as admin
from mesh.v1 import admin_pb2_grpc as admin_grpc
from mesh.v1 import inference_pb2 as pb
from mesh.v1 import inference_pb2_grpc as pb_grpc
from placement.entry.front_door import FrontDoor

_WATCH_EVERY_S = 3.0
Authenticate = Callable[[grpc.aio.ServicerContext], Principal]


class InferenceServicer(pb_grpc.InferenceServicer):
    """Thin: authentication and roles are the interceptor's, everything else the front door's."""

    def __init__(self, door: FrontDoor, authenticate: Authenticate) -> None:
        self._door = door
        self._authenticate = authenticate

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        take_incoming(_traceparent(context))
        async with aclosing(self._door.generate(self._authenticate(context), request)) as responses:
            async for response in responses:
                yield response

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        return await self._door.tokenize(self._authenticate(context), request)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=self._door.models(self._authenticate(context)))

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=self._door.abort(self._authenticate(context), request.request_id))

    async def Explain(self, request: pb.ExplainRequest, context: grpc.aio.ServicerContext) -> pb.ExplainResponse:
        return await self._door.explain(self._authenticate(context), request.request)


def _traceparent(context: grpc.aio.ServicerContext) -> str:
    found = [value for key, value in context.invocation_metadata() or () if key == "traceparent"]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else ""


class SnapshotSource(Protocol):
    """What the mesh view of an entry shows."""

    def wire_snapshot(self) -> admin.Snapshot: ...

    async def changed(self, timeout_s: float) -> None:
        """Return at the next change, or after the time."""


class RequestMover(Protocol):
    """Moves running requests, wherever their entries are, and lists them."""

    async def migrate(self, principal: Principal, request: admin.MigrateRequest) -> admin.MigrateResponse: ...

    async def list_requests(self) -> admin.ListRequestsResponse:
        """The running requests that can be known here."""
        ...


class RoleGiver(Protocol):
    """Gives core nodes their roles."""

    async def set_role(self, node_id: str, role: ServingRole) -> ServingRole:
        """Returns the role before."""
        ...


class MeshViewServicer(admin_grpc.MeshViewServicer):
    """The mesh as this entry sees it."""

    def __init__(
        self, source: SnapshotSource, mover: RequestMover, authenticate: Authenticate, roles: RoleGiver | None = None
    ) -> None:
        self._source = source
        self._mover = mover
        self._roles = roles
        self._authenticate = authenticate

    async def GetSnapshot(
        self, request: admin.GetSnapshotRequest, context: grpc.aio.ServicerContext
    ) -> admin.GetSnapshotResponse:
        return admin.GetSnapshotResponse(snapshot=self._source.wire_snapshot())

    async def WatchSnapshot(
        self, request: admin.WatchSnapshotRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin.WatchSnapshotResponse]:
        while True:
            yield admin.WatchSnapshotResponse(snapshot=self._source.wire_snapshot())
            await self._source.changed(_WATCH_EVERY_S)

    async def Migrate(self, request: admin.MigrateRequest, context: grpc.aio.ServicerContext) -> admin.MigrateResponse:
        return await self._mover.migrate(self._authenticate(context), request)

    async def ListRequests(
        self, request: admin.ListRequestsRequest, context: grpc.aio.ServicerContext
    ) -> admin.ListRequestsResponse:
        return await self._mover.list_requests()

    async def SetNodeRole(
        self, request: admin.SetNodeRoleRequest, context: grpc.aio.ServicerContext
    ) -> admin.SetNodeRoleResponse:
        role = serving_role(request.role or "?")  # an empty word is no wish
        if self._roles is None:
            raise NotImplementedHere("a site's entry gives no roles to nodes: ask the placement service")
        before = await self._roles.set_role(request.node_id, role)
        return admin.SetNodeRoleResponse(previous_role=before.value)
