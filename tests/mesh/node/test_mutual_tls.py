"""Two hosts as they are deployed: mutual TLS, places from certificates, reports signed with the nodes' keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from mesh.errors import NodeUnreachable, PolicyDenied
from mesh.identity.ca import CertificateAuthority, NodeCredentials
from mesh.identity.place import Place, Tier
from mesh.identity.signing import NodeIdentity, verify_record
from mesh.node.engine import RunId
from mesh.node.grpc_port import GrpcPort
from mesh.node.host import NodeHost
from mesh.node.local_port import LocalPort
from mesh.node.port import KvDirection, KvOrder, KvSource, Peer, PortFinished
from mesh.node.servicer import NodeServicer
from mesh.rpc.channel import node_channel
from mesh.rpc.peer import peer_place
from mesh.rpc.server import node_server
from mesh.v1 import node_pb2_grpc
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_node import CORE, EDGE, FakeGuard, collect, kv_order, place_of, prompt, run_order

IDS = prompt(601)


@dataclass(slots=True)
class Mesh:
    authority: CertificateAuthority
    edge: NodeHost
    core: NodeHost
    edge_credentials: NodeCredentials
    core_guard: FakeGuard
    address: str

    @property
    def edge_port(self) -> LocalPort:
        return LocalPort(self.edge, lambda peer: node_channel(peer.address, self.edge_credentials, peer.place))

    def prefill_order(self, peer: Place) -> KvOrder:
        prefill = run_order("p", IDS[:-1], prefill_only=True)
        return kv_order(
            peer,
            direction=KvDirection.PULL,
            token_ids=IDS[:-1],
            source=KvSource(run_id=RunId("p"), prefill=prefill),
            address=self.address,
        )


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority.create_or_load(tmp_path_factory.mktemp("node-tls") / "ca", "test")


@pytest.fixture
async def mesh(authority: CertificateAuthority) -> AsyncIterator[Mesh]:
    credentials = {place: authority.issue(place) for place in (EDGE, CORE)}
    engines, guards = [FakeEngine(), FakeEngine()], [FakeGuard(), FakeGuard()]
    edge, core = (
        NodeHost(engine, NodeIdentity(place, credentials[place]), guard, place)
        for place, engine, guard in zip((EDGE, CORE), engines, guards, strict=True)
    )
    listener = node_server("127.0.0.1:0", credentials[CORE])
    servicer = NodeServicer(core, lambda context: peer_place(context, mesh="test"))
    node_pb2_grpc.add_NodeServicer_to_server(servicer, listener.server)
    await listener.server.start()
    yield Mesh(authority, edge, core, credentials[EDGE], guards[1], listener.address)
    await edge.close()
    await core.close()
    await listener.server.stop(None)
    assert engines[0].hold_ids == engines[1].hold_ids == []


async def test_a_transfer_and_its_signed_legs(mesh: Mesh) -> None:
    report = await mesh.edge_port.move_kv(mesh.prefill_order(CORE))
    assert report.leg is not None
    leg, place = verify_record(report.leg, mesh.authority.ca_pem)
    assert place == CORE
    assert (leg["node"], leg["kind"], leg["kv_out_bytes"]) == ("core-1", "prefill", report.wire_bytes)
    outcome = await collect(mesh.edge, run_order("r", IDS, kv_from=RunId("target")))
    assert isinstance(outcome.last, PortFinished)
    leg, place = verify_record(outcome.last.leg, mesh.authority.ca_pem)
    assert place == EDGE
    assert (leg["kind"], leg["kv_in_bytes"]) == ("decode", report.wire_bytes)


async def test_the_receivers_place_is_that_of_its_certificate(mesh: Mesh) -> None:
    mesh.core_guard.no_kv = {EDGE.node_id}
    with pytest.raises(PolicyDenied):
        await mesh.edge_port.move_kv(mesh.prefill_order(CORE))
    assert ("kv", EDGE.node_id) in mesh.core_guard.asked


async def test_a_peer_that_is_another_gets_nothing(mesh: Mesh) -> None:
    for other in (place_of("core-2"), place_of("core-1", Tier.EDGE)):
        with pytest.raises(NodeUnreachable):
            await mesh.edge_port.move_kv(mesh.prefill_order(other))
    assert mesh.core_guard.asked == []


async def test_a_run_over_tls(mesh: Mesh) -> None:
    async with node_channel(mesh.address, mesh.edge_credentials, CORE) as channel:
        port = GrpcPort(channel, Peer(address=mesh.address, place=CORE))
        events = [event async for event in port.run(run_order("r", prompt(9)))]
    assert isinstance(events[-1], PortFinished)
    assert verify_record(events[-1].leg, mesh.authority.ca_pem)[1] == CORE
