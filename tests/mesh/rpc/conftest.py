"""A generic gRPC server in this process, so that interceptors are tested on real calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

Serve = Callable[..., Awaitable[grpc.aio.Channel]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """serve({"Name": handler}, interceptors) -> a channel; methods are /test.Service/Name."""
    servers: list[grpc.aio.Server] = []
    channels: list[grpc.aio.Channel] = []

    async def run(handlers: dict[str, Any], interceptors: Sequence[Any] = (), options: Any = ()) -> grpc.aio.Channel:
        server = grpc.aio.server(interceptors=interceptors, options=options)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
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
