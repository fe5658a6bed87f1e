"""Real gRPC in this process: a generic server, and the credentials of a small mesh."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from mesh.identity.ca import CertificateAuthority
from mesh.identity.place import Place, Role, Tier

Serve = Callable[..., Awaitable[grpc.aio.Channel]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """serve({"Name": handler}, interceptors) -> a channel; methods are /test.Service/Name."""
    servers: list[grpc.aio.Server] = []
    channels: list[grpc.aio.Channel] = []

    async def run(handlers: dict[str, Any], interceptors: Sequence[Any] = (), options: Any = ()) -> grpc.aio.Channel:
        server = grpc.aio.server(interceptors=interceptors, options=options)
        add_handlers(server, handlers)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        channels.append(channel)
        return channel

    yield run
    for channel in channels:
        await channel.close()
    for server in servers:
        await server.stop(0)


def add_handlers(server: grpc.aio.Server, handlers: dict[str, Any]) -> None:
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority.create_or_load(tmp_path_factory.mktemp("demo") / "ca", "demo")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    """Another authority that calls its mesh by the same name."""
    return CertificateAuthority.create_or_load(tmp_path_factory.mktemp("stranger") / "ca", "demo")


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    """The authority of another mesh."""
    return CertificateAuthority.create_or_load(tmp_path_factory.mktemp("foreign") / "ca", "foreign")


def place(node_id: str, role: Role = Role.CORE, mesh: str = "demo") -> Place:
    tier = Tier.EDGE if role is Role.EDGE else Tier.CORE
    return Place(mesh=mesh, role=role, tier=tier, site="dc_1", region="eu", jurisdiction="DE", node_id=node_id)
