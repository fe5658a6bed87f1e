"""Silent, half-sent and too many connections: cut in time, while requests are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from mesh.http.app import create_app
from mesh.http.server import HttpServer
from mesh.identity.ca import CertificateAuthority
from tests.fakes.mesh import place_of
from tests.mesh.http.fake_gateway import KEY, FakeGateway, decision

HALF = b"GET /healthz HTTP/1.1\r\nx-a: "
WHOLE = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def started(
    stack: AsyncExitStack, gateway: FakeGateway, *, timeout_s: float = 60.0, most: int = 1000, pem: Path | None = None
) -> HttpServer:
    server = HttpServer(
        create_app(gateway), "127.0.0.1:0", header_timeout_s=timeout_s, max_connections=most,
        cert_file=pem, key_file=pem,
    )  # fmt: skip
    await server.start()
    stack.push_async_callback(server.close, 0)
    return server


async def connect(
    stack: AsyncExitStack, server: HttpServer, send: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    stack.callback(writer.close)
    writer.write(send)
    await writer.drain()
    return reader, writer


async def ended(reader: asyncio.StreamReader) -> None:
    """Wait until the other side has closed."""
    async with asyncio.timeout(10):
        try:
            while await reader.read(1024):
                pass
        except ConnectionError:
            return


@pytest.mark.parametrize("send", [b"", HALF], ids=["silent", "half"])
async def test_a_header_that_does_not_come_ends_its_connection(
    stack: AsyncExitStack, gateway: FakeGateway, send: bytes
) -> None:
    server = await started(stack, gateway, timeout_s=0.05)
    reader, _ = await connect(stack, server, send)
    await ended(reader)


async def test_so_does_a_second_request_s_header(stack: AsyncExitStack, gateway: FakeGateway) -> None:
    server = await started(stack, gateway, timeout_s=0.05)
    reader, writer = await connect(stack, server, WHOLE)
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    writer.write(HALF)
    await ended(reader)


async def test_a_tls_handshake_that_does_not_come_ends_its_connection(
    stack: AsyncExitStack, gateway: FakeGateway, tmp_path: Path
) -> None:
    credentials = CertificateAuthority.create_or_load(tmp_path / "ca", "toy").issue(place_of("core-1"))
    pem = tmp_path / "both.pem"
    pem.write_bytes(credentials.key_pem + credentials.cert_pem)
    server = await started(stack, gateway, timeout_s=0.05, pem=pem)
    await ended((await connect(stack, server, b""))[0])


async def test_requests_that_are_served_and_kept_alive_connections_are_left_alone(
    stack: AsyncExitStack, gateway: FakeGateway
) -> None:
    server = await started(stack, gateway, timeout_s=0.02)
    gateway.events = [decision(), None]
    http = await stack.enter_async_context(httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}))
    asking = asyncio.create_task(
        http.post(f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    )
    stack.callback(asking.cancel)
    await gateway.waiting.wait()
    idle, _ = await connect(stack, server, WHOLE)
    assert (await idle.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    for _ in range(3):  # the time is over when these are cut
        await ended((await connect(stack, server, HALF))[0])
    assert not asking.done()
    assert not idle.at_eof()


async def test_a_flood_of_silent_connections_leaves_room_for_requests(
    stack: AsyncExitStack, gateway: FakeGateway
) -> None:
    server = await started(stack, gateway, most=32)
    readers = [(await connect(stack, server, HALF))[0] for _ in range(100)]
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{server.url}/healthz")).status_code == 200
    for reader in readers[:60]:  # the longest waiting
        await ended(reader)
    assert len(server._server.server_state.connections) <= 32


async def test_a_served_request_is_never_cut_for_a_new_connection(stack: AsyncExitStack, gateway: FakeGateway) -> None:
    server = await started(stack, gateway, most=1)
    gateway.events = [decision(), None]
    http = await stack.enter_async_context(httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}))
    asking = asyncio.create_task(
        http.post(f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    )
    stack.callback(asking.cancel)
    await gateway.waiting.wait()
    await ended((await connect(stack, server, b""))[0])
    assert not asking.done()
