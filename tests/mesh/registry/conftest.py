"""Harnesses of the registry's conformance suite, and its short repeat interval."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mesh.identity.ca import CertificateAuthority, NodeCredentials
from mesh.identity.place import Place, Role, Tier
from mesh.registry import consul as consul_module
from mesh.registry import embedded as embedded_module
from mesh.registry import remote as remote_module
from mesh.registry.consul import ConsulRegistry
from mesh.registry.embedded import EmbeddedRegistry
from mesh.registry.remote import RemoteRegistry
from mesh.registry.servicer import RegistryServicer
from mesh.registry.types import Registry
from mesh.rpc.channel import node_channel
from mesh.rpc.server import Listener, node_server
from mesh.v1 import registry_pb2_grpc
from tests.consul_fixture import ConsulAgent
from tests.consul_fixture import consul_agent as consul_agent


def place(node_id: str, role: Role = Role.PLACEMENT) -> Place:
    tier = Tier.EDGE if role is Role.EDGE else Tier.CORE
    return Place(mesh="demo", role=role, tier=tier, site="dc-1", region="eu", jurisdiction="DE", node_id=node_id)


class EmbeddedHarness:
    """The embedded registry itself: every client is the same object."""

    def __init__(self, path: Path | None) -> None:
        self._registry = EmbeddedRegistry(path)
        self._started = False

    async def connect(self, node_id: str) -> Registry:
        if not self._started:
            self._started = True
            await self._registry.start()
        return self._registry

    async def close(self) -> None:
        await self._registry.close()


class RemoteHarness:
    """The embedded registry behind a node listener, over mutual TLS."""

    durable = True

    def __init__(self, authority: CertificateAuthority, path: Path) -> None:
        self._authority = authority
        self._path = path
        self._server_credentials = authority.issue(place("placement-1"))
        self._listener: Listener | None = None
        self._registry: EmbeddedRegistry | None = None
        self.address = "127.0.0.1:0"
        self._clients: list[RemoteRegistry] = []

    async def start(self) -> None:
        self._registry = EmbeddedRegistry(self._path)
        await self._registry.start()
        self._listener = node_server(self.address, self._server_credentials)
        self.address = self._listener.address
        servicer = RegistryServicer(self._registry, "demo")
        registry_pb2_grpc.add_RegistryServicer_to_server(servicer, self._listener.server)
        await self._listener.server.start()

    async def stop(self) -> None:
        if self._listener is not None and self._registry is not None:
            await self._listener.server.stop(0)
            await self._registry.close()
            self._listener = self._registry = None

    def credentials(self, node_id: str, role: Role = Role.PLACEMENT) -> NodeCredentials:
        return self._authority.issue(place(node_id, role))

    async def connect(self, node_id: str, role: Role = Role.PLACEMENT) -> Registry:
        credentials = self.credentials(node_id, role)
        client = RemoteRegistry(lambda: node_channel(self.address, credentials, Role.PLACEMENT))
        await client.start()
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.stop()


class ConsulHarness:
    """A real agent. It forgets everything on a restart, as -dev does."""

    durable = False

    def __init__(self, agent: ConsulAgent) -> None:
        self._agent = agent
        self._clients: list[ConsulRegistry] = []

    async def start(self) -> None:
        self._agent.start()

    async def stop(self) -> None:
        self._agent.kill()

    async def connect(self, node_id: str) -> Registry:
        client = ConsulRegistry(self._agent.address)
        await client.start()
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority.create_or_load(tmp_path_factory.mktemp("demo") / "ca", "demo")


@pytest.fixture
async def remote(authority: CertificateAuthority, tmp_path: Path) -> AsyncIterator[RemoteHarness]:
    harness = RemoteHarness(authority, tmp_path / "state" / "registry.json")
    await harness.start()
    yield harness
    await harness.close()


@pytest.fixture
def short_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views repeat after a moment instead of 5 s, so that tests need not wait for that."""
    for module in (embedded_module, remote_module, consul_module):
        monkeypatch.setattr(module, "REPEAT_S", 0.1)
    monkeypatch.setattr(consul_module, "WAIT_S", 0.5)
