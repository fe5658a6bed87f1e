"""The transport suite on gRPC, and on the network in memory that other tests use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import grpc
import grpc.aio
import pytest
from grpc_status import rpc_status

from mesh.bench.link import LinkProxy
from mesh.errors import Internal, NodeUnreachable
from mesh.kv.transfer_frames import Done
from mesh.node.grpc_port_transfer import GrpcTransport, _DialledStream
from mesh.node.host import NodeHost
from mesh.node.port import Peer
from mesh.node.servicer import NodeServicer
from mesh.node.transport import Transport
from mesh.rpc.errors import ErrorInterceptor, to_status
from mesh.v1 import node_pb2_grpc
from tests.conformance.transport_suite import Far, TransportSuite
from tests.fakes.fake_node import CORE, EDGE, MemoryNetwork


class TestGrpc(TransportSuite):
    @pytest.fixture
    async def far(self) -> AsyncIterator[Far]:
        server = grpc.aio.server(interceptors=[ErrorInterceptor()])
        port = server.add_insecure_port("127.0.0.1:0")
        async with LinkProxy("127.0.0.1", port) as link:
            transport = GrpcTransport(lambda peer: grpc.aio.insecure_channel(peer.address))
            peer = Peer(address=link.address, place=CORE)
            far = Far(transport=transport, peer=peer, own=EDGE, sever=link.cut)
            servicer = NodeServicer(cast(NodeHost, far), lambda context: EDGE)
            node_pb2_grpc.add_NodeServicer_to_server(servicer, server)
            await server.start()
            yield far
        await server.stop(None)


class MemoryTransport:
    """The network of tests.fakes as a Transport."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.dial = network.dial_from(EDGE)


class TestMemory(TransportSuite):
    @pytest.fixture
    async def far(self) -> Far:
        network = MemoryNetwork()

        async def sever() -> None:
            network.hosts.clear()
            for ours, theirs in network.streams:
                ours.end()
                theirs.end()

        transport: Transport = MemoryTransport(network)
        far = Far(transport=transport, peer=Peer(address="memory", place=CORE), own=EDGE, sever=sever)
        network.hosts[CORE.node_id] = cast(NodeHost, far)
        return far


class BrokenCall:
    """A call that ends like one whose connection broke under a write, or like one whose handler raised a bug."""

    def __init__(self, trailing: tuple[tuple[str, bytes], ...]) -> None:
        self._error = grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(*trailing),
            details="Internal error from Core",
        )

    async def read(self) -> None:
        raise self._error

    async def write(self, message: object) -> None:
        raise self._error


async def test_an_internal_error_of_grpc_itself_is_a_broken_stream() -> None:
    """Resumable; one that the peer's handler gave is a bug there, and is told as such."""
    ours = _DialledStream(CORE, BrokenCall(()))
    for use in (ours.recv, lambda: ours.send(Done(1))):
        with pytest.raises(NodeUnreachable):
            await use()
    details = rpc_status.to_status(to_status(Internal("a bug"))).trailing_metadata
    theirs = _DialledStream(CORE, BrokenCall(details))
    with pytest.raises(Internal):
        await theirs.recv()
