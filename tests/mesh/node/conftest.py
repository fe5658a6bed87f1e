"""Two hosts joined over real grpc.aio on loopback, and a bench of two linked in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from mesh.identity.place import Place
from mesh.node.grpc_port import GrpcPort
from mesh.node.host import NodeHost
from mesh.node.local_port import LocalPort
from mesh.node.port import Peer
from mesh.node.servicer import NodeServicer
from mesh.rpc.errors import ErrorInterceptor
from mesh.v1 import node_pb2_grpc
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_node import CORE, EDGE, FakeGuard, FakeSigner, collect, run_order
from tests.mesh.node.move_bench import IDS, PULL, PUSH, Bench


@dataclass(slots=True)
class GrpcPair:
    """A core that listens, and an edge that dials it. Plain text; the places are injected."""

    edge: NodeHost
    core: NodeHost
    edge_engine: FakeEngine
    core_engine: FakeEngine
    core_guard: FakeGuard
    server: grpc.aio.Server
    address: str
    channel: grpc.aio.Channel
    caller: list[Place]  # [0] is who the core thinks calls

    @property
    def core_port(self) -> GrpcPort:
        return GrpcPort(self.channel, Peer(address=self.address, place=CORE))

    @property
    def edge_port(self) -> LocalPort:
        return LocalPort(self.edge, lambda peer: grpc.aio.insecure_channel(peer.address))

    @property
    def stub(self) -> node_pb2_grpc.NodeStub:
        return node_pb2_grpc.NodeStub(self.channel)


@asynccontextmanager
async def grpc_pair() -> AsyncIterator[GrpcPair]:
    edge_engine, core_engine, core_guard = FakeEngine(), FakeEngine(), FakeGuard()
    edge = NodeHost(edge_engine, FakeSigner(EDGE), FakeGuard(), EDGE)
    core = NodeHost(core_engine, FakeSigner(CORE), core_guard, CORE)
    caller = [EDGE]
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    node_pb2_grpc.add_NodeServicer_to_server(NodeServicer(core, lambda context: caller[0]), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    async with grpc.aio.insecure_channel(address) as channel:
        yield GrpcPair(edge, core, edge_engine, core_engine, core_guard, server, address, channel, caller)
    await edge.close()
    await core.close()
    await server.stop(None)
    for engine in (edge_engine, core_engine):
        await engine.check_integrity()
        assert engine.hold_ids == []
        assert (await engine.load()).kv_used_tokens == 0


@pytest.fixture
async def over_grpc() -> AsyncIterator[GrpcPair]:
    async with grpc_pair() as pair:
        yield pair


@pytest.fixture(params=[PUSH, PULL], ids=["push", "pull"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    bench = Bench(request.param)
    await collect(bench.source, run_order("h", IDS[:-1], prefill_only=True))
    yield bench
    for host in (bench.edge, bench.core):
        await host.close()
    for engine in bench.engines.values():
        await engine.check_integrity()
