"""The public listeners of an entry: gRPC with the services that every entry has, behind API keys, and HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import grpc.aio
from grpc_health.v1.health import aio as health_aio
from starlette.types import ASGIApp

from mesh.address import HostPort
from mesh.http.server import HttpServer
from mesh.identity.ca import NODE_CERT_FILE, NODE_KEY_FILE, NodeCredentials
from mesh.identity.keyring import Keyring
from mesh.identity.principal import Principal
from mesh.identity.tenants import TenantDirectory
from mesh.rpc.auth import Authenticator, current_principal
from mesh.rpc.server import Listener, add_health, add_reflection, public_server
from mesh.v1 import admin_pb2_grpc as admin_grpc
from mesh.v1 import inference_pb2_grpc as pb_grpc
from placement.entry.front_door import FrontDoor
from placement.entry.servicer import InferenceServicer, MeshViewServicer, RequestMover, RoleGiver, SnapshotSource

SERVICES = ("mesh.v1.Inference", "mesh.v1.MeshView", "grpc.health.v1.Health")


def public_listener(
    address: HostPort,
    credentials: NodeCredentials | Keyring,
    *,
    door: FrontDoor,
    source: SnapshotSource,
    mover: RequestMover,
    directory: Callable[[], TenantDirectory],
    more_services: Sequence[str] = (),
    roles: RoleGiver | None = None,
) -> tuple[Listener, health_aio.HealthServicer]:
    """Bound, not started, with what its health service says; plain text on loopback, TLS with the node's certificate
    elsewhere. `more_services` are named in reflection; the caller adds their servicers."""
    listener = public_server(
        str(address),
        credentials=None if address.is_loopback else credentials,
        interceptors=(Authenticator(directory),),
    )
    pb_grpc.add_InferenceServicer_to_server(InferenceServicer(door, _caller), listener.server)
    admin_grpc.add_MeshViewServicer_to_server(MeshViewServicer(source, mover, _caller, roles), listener.server)
    health = add_health(listener.server)
    add_reflection(listener.server, (*SERVICES, *more_services))
    return listener, health


def http_listener(app: ASGIApp, address: HostPort, identity_folder: Path) -> HttpServer:
    """Bound, not started; as the gRPC one: plain on loopback, TLS with the node's certificate elsewhere."""
    if address.is_loopback:
        return HttpServer(app, str(address))
    return HttpServer(
        app, str(address), cert_file=identity_folder / NODE_CERT_FILE, key_file=identity_folder / NODE_KEY_FILE
    )


def _caller(_: grpc.aio.ServicerContext) -> Principal:
    return current_principal()
