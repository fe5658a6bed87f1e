"""Listeners and channels together: who gets through, as whom, and what everybody else is told."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mesh.bench.link import LinkProxy, LinkShape
from mesh.errors import InvalidRequest, NodeUnreachable, PolicyDenied, Unauthenticated
from mesh.identity.ca import CertificateAuthority, NodeCredentials
from mesh.identity.place import Place, Role
from mesh.rpc.channel import node_channel, public_channel
from mesh.rpc.errors import translate_rpc_errors
from mesh.rpc.peer import peer_place, require_role
from mesh.rpc.server import (
    NODE_MESSAGE_BYTES,
    PUBLIC_MESSAGE_BYTES,
    Listener,
    add_health,
    add_reflection,
    health_server,
    node_server,
    public_server,
)
from tests.mesh.rpc.conftest import add_handlers, place

CORE = place("core-1")


@asynccontextmanager
async def started(listener: Listener) -> AsyncIterator[str]:
    async def who(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return peer_place(context, mesh="demo").uri.encode()

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    add_handlers(
        listener.server,
        {"Who": grpc.unary_unary_rpc_method_handler(who), "Echo": grpc.unary_unary_rpc_method_handler(echo)},
    )
    await listener.server.start()
    try:
        yield listener.address
    finally:
        await listener.server.stop(0)


async def ask(channel: grpc.aio.Channel, method: str = "Who", request: bytes = b"") -> bytes:
    async with channel:
        with translate_rpc_errors():
            response: bytes = await channel.unary_unary(f"/test.Service/{method}")(request, timeout=10)
            return response


@pytest.mark.parametrize("expect", [CORE, Role.CORE, "core-1", None])
async def test_a_node_is_read_from_its_certificate(
    authority: CertificateAuthority, expect: Place | Role | str | None
) -> None:
    caller = place("Edge_7", Role.EDGE)
    async with started(node_server("127.0.0.1:0", authority.issue(CORE))) as address:
        assert await ask(node_channel(address, authority.issue(caller), expect)) == caller.uri.encode()


@pytest.mark.parametrize(
    "expect",
    [
        replace(CORE, node_id="core-2"),
        replace(CORE, jurisdiction="FR"),
        replace(CORE, site="dc-1"),
        replace(CORE, role=Role.PLACEMENT),
        Role.EDGE,
        "core-2",
    ],
)
async def test_another_place_than_expected_is_not_spoken_to(
    authority: CertificateAuthority, expect: Place | Role | str
) -> None:
    async with started(node_server("127.0.0.1:0", authority.issue(CORE))) as address:
        with pytest.raises(NodeUnreachable, match="Verification"):
            await ask(node_channel(address, authority.issue(place("core-9")), expect))


def expired(authority: CertificateAuthority, who: Place) -> NodeCredentials:
    return authority.issue(who, now=datetime.now(UTC) - timedelta(days=2), lifetime=timedelta(days=1))


async def test_certificates_that_a_node_refuses(
    authority: CertificateAuthority, stranger: CertificateAuthority, foreign: CertificateAuthority
) -> None:
    good = authority.issue(CORE)
    trusting = {"ca_pem": authority.ca_pem}
    callers = {
        "expired": expired(authority, place("core-2")),
        "another CA, same mesh name": replace(stranger.issue(place("core-2")), **trusting),
        "another mesh": replace(foreign.issue(place("core-2", mesh="foreign")), **trusting),
    }
    async with started(node_server("127.0.0.1:0", good)) as address:
        for credentials in callers.values():
            with pytest.raises(NodeUnreachable):
                await ask(node_channel(address, credentials, CORE))
        tls = grpc.ssl_channel_credentials(authority.ca_pem)
        options = [("grpc.ssl_target_name_override", "any.kvmesh.internal")]
        with pytest.raises(NodeUnreachable):  # no certificate at all
            await ask(grpc.aio.secure_channel(address, tls, options))
        with pytest.raises(NodeUnreachable):  # plain text
            await ask(public_channel(address))
        # The listener is none the worse for it.
        assert await ask(node_channel(address, authority.issue(place("core-2")), CORE))


async def test_servers_that_a_node_refuses(
    authority: CertificateAuthority, stranger: CertificateAuthority, foreign: CertificateAuthority
) -> None:
    caller = authority.issue(place("core-2"))
    trusting = {"ca_pem": authority.ca_pem}
    for credentials in (
        expired(authority, CORE),
        replace(stranger.issue(CORE), **trusting),
        replace(foreign.issue(place("core-1", mesh="foreign")), **trusting),
    ):
        async with started(node_server("127.0.0.1:0", credentials)) as address:
            for expect in (CORE, None):
                with pytest.raises(NodeUnreachable):
                    await ask(node_channel(address, caller, expect))


async def test_a_peer_without_certificate_has_no_place(authority: CertificateAuthority) -> None:
    async with started(public_server("127.0.0.1:0", credentials=None)) as address:
        with pytest.raises(Unauthenticated, match="no node certificate"):
            await ask(public_channel(address))


async def test_roles_of_nodes() -> None:
    require_role(CORE, {Role.CORE, Role.PLACEMENT}, "this")
    with pytest.raises(PolicyDenied, match="core-1 is of role core") as caught:
        require_role(CORE, {Role.PLACEMENT}, "this")
    assert caught.value.details["rule"] == "node_role"


async def test_public_listener_over_tls(authority: CertificateAuthority, stranger: CertificateAuthority) -> None:
    credentials = authority.issue(CORE, ip_addresses=["127.0.0.1"])
    async with started(public_server("127.0.0.1:0", credentials=credentials)) as address:
        assert await ask(public_channel(address, authority.ca_pem), "Echo", b"hello") == b"hello"
        with pytest.raises(NodeUnreachable):
            await ask(public_channel(address, stranger.ca_pem), "Echo")
    unnamed = authority.issue(CORE)  # its SAN does not name 127.0.0.1
    async with started(public_server("127.0.0.1:0", credentials=unnamed)) as address:
        with pytest.raises(NodeUnreachable):
            await ask(public_channel(address, authority.ca_pem), "Echo")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:0"])
async def test_plain_text_stays_on_loopback(address: str) -> None:
    with pytest.raises(InvalidRequest, match="loopback only"):
        public_server(address, credentials=None)
    with pytest.raises(InvalidRequest, match="loopback only"):
        health_server(address)
    with pytest.raises(InvalidRequest, match="loopback only"):
        public_channel(address)


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:", "::1:0", "127.0.0.1:99999", "unix:/tmp/x", ":80"])
async def test_a_malformed_address_is_refused(authority: CertificateAuthority, address: str) -> None:
    credentials = authority.issue(CORE)
    for make in (
        lambda: node_server(address, credentials),
        lambda: public_server(address, credentials=credentials),
        lambda: node_channel(address, credentials),
        lambda: public_channel(address),
    ):
        with pytest.raises(InvalidRequest, match=r"address|host|port"):
            make()


async def test_a_port_in_use_is_named(authority: CertificateAuthority) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InvalidRequest, match=f"port {port} is in use") as caught:
            public_server(f"127.0.0.1:{port}", credentials=None)
        assert caught.value.details["port"] == str(port)
    async with started(node_server("127.0.0.1:0", authority.issue(CORE))) as address:
        with pytest.raises(InvalidRequest, match="in use"):
            node_server(address, authority.issue(CORE))
    with pytest.raises(InvalidRequest, match="not an address of this machine"):
        node_server("192.0.2.1:0", authority.issue(CORE))


async def test_oversized_messages_are_refused_and_the_link_lives(authority: CertificateAuthority) -> None:
    credentials = authority.issue(CORE, ip_addresses=["127.0.0.1"])
    async with started(public_server("127.0.0.1:0", credentials=credentials)) as address:
        with pytest.raises(InvalidRequest, match="too large"):
            await ask(public_channel(address, authority.ca_pem), "Echo", bytes(PUBLIC_MESSAGE_BYTES + 1))
    async with started(node_server("127.0.0.1:0", credentials)) as address:
        big = bytes(PUBLIC_MESSAGE_BYTES + 1)
        assert await ask(node_channel(address, credentials, CORE), "Echo", big) == big
        with pytest.raises(InvalidRequest, match="too large"):
            await ask(node_channel(address, credentials, CORE), "Echo", bytes(NODE_MESSAGE_BYTES + 1))
        assert await ask(node_channel(address, credentials, CORE), "Echo", b"x") == b"x"


async def test_health_listener() -> None:
    listener, servicer = health_server()
    await listener.server.start()
    async with grpc.aio.insecure_channel(listener.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        await servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch = stub.Watch(request)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
    await listener.server.stop(0)


async def test_reflection_and_health_on_the_public_listener() -> None:
    listener = public_server("127.0.0.1:0", credentials=None)
    add_health(listener.server)
    add_reflection(listener.server, ["mesh.v1.Inference"])
    await listener.server.start()
    async with public_channel(listener.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([request]), timeout=10)]
        assert "mesh.v1.Inference" in [service.name for service in answers[0].list_services_response.service]
    await listener.server.stop(0)


async def test_a_new_connection_has_the_time_that_a_long_link_takes(authority: CertificateAuthority) -> None:
    """TCP, TLS and HTTP/2 settings are round trips before the first call; at a quarter of a second each, none may be
    given up as timed out."""
    caller = place("Edge_7", Role.EDGE)
    async with started(node_server("127.0.0.1:0", authority.issue(CORE))) as address:
        far = LinkShape(delay_s=0.125)
        async with LinkProxy("127.0.0.1", int(address.rpartition(":")[2]), up=far, down=far) as link:
            channel = node_channel(link.address, authority.issue(caller), CORE)
            assert await ask(channel) == caller.uri.encode()
