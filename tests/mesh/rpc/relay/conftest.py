"""A relay on loopback over mutual TLS, and two edges that reach each other over nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from mesh.errors import NodeUnreachable
from mesh.identity.ca import CertificateAuthority, NodeCredentials
from mesh.identity.place import Place, Role, Tier
from mesh.identity.signing import NodeIdentity
from mesh.node.host import HostSettings, NodeHost
from mesh.rpc.channel import node_channel
from mesh.rpc.peer import peer_place
from mesh.rpc.relay.attendant import RelayAttendant
from mesh.rpc.relay.dialling import RelayDialler
from mesh.rpc.relay.servicer import RelayServicer
from mesh.rpc.server import node_server
from mesh.v1 import relay_pb2_grpc
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_node import FakeGuard


def place_of(node_id: str, role: Role = Role.EDGE) -> Place:
    tier = Tier.EDGE if role is Role.EDGE else Tier.CORE
    return Place(mesh="m", role=role, tier=tier, site=node_id, region="r", jurisdiction="FR", node_id=node_id)


@dataclass(eq=False)
class Site:
    """An edge node: host, engine and both ends of the relay."""

    credentials: NodeCredentials
    identity: NodeIdentity
    engine: FakeEngine
    guard: FakeGuard
    host: NodeHost
    attendant: RelayAttendant
    dialler: RelayDialler

    @property
    def place(self) -> Place:
        return self.identity.place


@dataclass(eq=False)
class Rig:
    """`seen`: sealed bytes as the relay saw them. `ringing`: who answers when a node is wanted."""

    authority: CertificateAuthority
    address: str = ""
    servicer: RelayServicer | None = None
    sites: dict[str, Site] = field(default_factory=dict)
    ringing: dict[str, str] = field(default_factory=dict)
    seen: list[bytes] = field(default_factory=list)
    tamper: Callable[[bytes], bytes] = bytes

    async def ring(self, node_id: str, ticket: bytes) -> None:
        site = self.sites.get(self.ringing.get(node_id, node_id))
        if site is None:
            raise NodeUnreachable(f"node {node_id} is not attached", node=node_id)
        site.attendant.attend(ticket)

    def make(self, node_id: str) -> Site:
        place = place_of(node_id)
        credentials = self.authority.issue(place)
        identity, engine, guard = NodeIdentity(place, credentials), FakeEngine(), FakeGuard()
        host = NodeHost(engine, identity, guard, place, settings=HostSettings(resume_timeout_s=0.5, idle_timeout_s=5.0))

        def dial() -> object:
            return node_channel(self.address, credentials, "relay-1")

        attendant = RelayAttendant(host, guard, identity, credentials.ca_pem, dial, relay="relay-1")  # type: ignore[arg-type]
        dialler = RelayDialler(dial, identity, credentials.ca_pem, relay="relay-1")  # type: ignore[arg-type]
        self.sites[node_id] = Site(credentials, identity, engine, guard, host, attendant, dialler)
        return self.sites[node_id]


class WatchedRelay(RelayServicer):
    """Keeps what passes, and may change it: a relay that is not to be trusted."""

    rig: Rig

    async def _read(self, meeting, requests, into):  # type: ignore[no-untyped-def]
        async def watched():  # type: ignore[no-untyped-def]
            async for request in requests:
                self.rig.seen.append(request.sealed)
                request.sealed = self.rig.tamper(request.sealed)
                yield request

        await super()._read(meeting, watched(), into)


@pytest.fixture
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    authority = CertificateAuthority.create_or_load(tmp_path_factory.mktemp("ca"), "m")
    async with AsyncExitStack() as stack:
        rig = Rig(authority)
        servicer = WatchedRelay(lambda context: peer_place(context, mesh="m"), rig.ring, answer_timeout_s=1.0)
        servicer.rig = rig
        rig.servicer = servicer
        listener = node_server("127.0.0.1:0", authority.issue(place_of("relay-1", Role.PLACEMENT)))
        relay_pb2_grpc.add_RelayServicer_to_server(servicer, listener.server)
        await listener.server.start()
        stack.push_async_callback(listener.server.stop, None)
        rig.address = listener.address
        for name in ("paris", "osaka"):
            rig.make(name)
        yield rig
        for site in rig.sites.values():
            await site.attendant.close()
            await site.host.close()
            await site.engine.check_integrity()
            assert site.engine.hold_ids == []
        for _ in range(3):
            await asyncio.sleep(0)
