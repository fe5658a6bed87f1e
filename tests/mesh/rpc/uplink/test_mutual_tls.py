"""The uplink as it is deployed: mutual TLS, the place read from the certificate."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc.aio

from mesh.errors import NodeUnreachable, PolicyDenied
from mesh.identity.ca import CertificateAuthority, NodeCredentials
from mesh.identity.place import Role
from mesh.node.port import PortFinished
from mesh.rpc.channel import node_channel
from mesh.rpc.peer import peer_place
from mesh.rpc.server import node_server
from mesh.rpc.uplink.agent import UplinkAgent
from mesh.rpc.uplink.backoff import FullJitter
from mesh.rpc.uplink.hub import UplinkHub
from mesh.rpc.uplink.types import AgentFacts
from mesh.v1 import admin_pb2, uplink_pb2, uplink_pb2_grpc
from tests.mesh.rpc.uplink.harness import MODEL, FakeHost, collect, eventually, place, run_order


async def ignore_config(_: uplink_pb2.SiteConfig) -> None:
    return


async def ignore_snapshot(_: admin_pb2.Snapshot) -> None:
    return


async def no_command(_: uplink_pb2.Command) -> uplink_pb2.CommandResult:
    return uplink_pb2.CommandResult()


def agent(address: str, credentials: NodeCredentials) -> UplinkAgent:
    def dial() -> grpc.aio.Channel:
        return node_channel(address, credentials, Role.PLACEMENT)

    return UplinkAgent(
        dial=dial,
        host=FakeHost(),
        facts=AgentFacts(build="test", models=(MODEL,)),
        on_config=ignore_config,
        on_snapshot=ignore_snapshot,
        on_command=no_command,
        backoff=FullJitter(random.Random(1), base_s=0.02, cap_s=0.1),
    )


async def test_the_certificate_says_who_attached_and_who_may(tmp_path: Path) -> None:
    ours = CertificateAuthority.create_or_load(tmp_path / "ours", "test")
    theirs = CertificateAuthority.create_or_load(tmp_path / "theirs", "test")
    hub = UplinkHub(lambda context: peer_place(context, mesh="test"))
    listener = node_server("127.0.0.1:0", ours.issue(place("placement-1", Role.PLACEMENT, "dc")))
    uplink_pb2_grpc.add_UplinkServicer_to_server(hub, listener.server)
    await listener.server.start()
    edge = agent(listener.address, ours.issue(place("edge-1")))
    core = agent(listener.address, ours.issue(place("core-1", Role.CORE, "dc")))
    stranger = agent(listener.address, theirs.issue(place("edge-1")))
    try:
        for one in (edge, core, stranger):
            await one.start()
        await edge.wait_connected()
        await eventually(lambda: [e.place for e in hub.attached()] == [place("edge-1")])
        assert isinstance((await collect(hub.port("edge-1").run(run_order())))[-1], PortFinished)
        await eventually(lambda: isinstance(core.state.last_error, PolicyDenied))
        await eventually(lambda: isinstance(stranger.state.last_error, NodeUnreachable))
        assert [e.place.node_id for e in hub.attached()] == ["edge-1"]
        assert edge.state.last_error is None
    finally:
        await asyncio.gather(*(one.stop() for one in (edge, core, stranger)))
        hub.close()
        await listener.server.stop(None)
