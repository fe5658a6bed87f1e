"""The conformance suite on every Registry: embedded, the same over gRPC, and a real Consul."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conformance.registry_suite import OutageConformance, RegistryConformance
from tests.consul_fixture import ConsulAgent
from tests.mesh.registry.conftest import ConsulHarness, EmbeddedHarness, RemoteHarness


class TestEmbedded(RegistryConformance):
    """In this process, on a file."""

    @pytest.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[EmbeddedHarness]:
        harness = EmbeddedHarness(tmp_path / "state" / "registry.json")
        yield harness
        await harness.close()


class TestRemote(OutageConformance):
    """The embedded one over mutual TLS."""

    @pytest.fixture
    def harness(self, remote: RemoteHarness) -> RemoteHarness:
        return remote


@pytest.mark.consul
class TestConsul(OutageConformance):
    """A real Consul agent."""

    @pytest.fixture
    async def harness(self, consul_agent: ConsulAgent) -> AsyncIterator[ConsulHarness]:
        harness = ConsulHarness(consul_agent)
        yield harness
        await harness.close()
