"""The registry of a mesh without Consul as other nodes see it: a client of the placement service's Registry RPCs."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager

import grpc.aio

from mesh.errors import Expired, NodeUnreachable
from mesh.registry import wire
from mesh.registry.checks import check_key, check_prefix, check_registration, check_value
from mesh.registry.embedded import REPEAT_S
from mesh.registry.follow import Follower
from mesh.registry.types import NodesView, Registration, Value
from mesh.rpc.errors import translate_rpc_errors
from mesh.v1 import registry_pb2 as pb
from mesh.v1 import registry_pb2_grpc as pb_grpc

CALL_TIMEOUT_S = 5.0


@contextmanager
def _errors() -> Iterator[None]:
    """A registry that does not answer in time is not there, whoever's clock ran out: NodeUnreachable, like any other
    way of not being there."""
    try:
        with translate_rpc_errors("registry"):
            yield
    except Expired as error:
        raise NodeUnreachable(f"the registry did not answer in time: {error.message}", node="registry") from error


class RemoteRegistry:
    """See mesh.registry.types.Registry. `connect` makes the channel to the placement service's node listener, once,
    in `start`; it is this registry's own."""

    def __init__(self, connect: Callable[[], grpc.aio.Channel]) -> None:
        self._connect = connect
        self._channel: grpc.aio.Channel | None = None
        self._nodes: Follower[NodesView] = Follower(self._node_views, name="nodes")
        self._followers: set[Follower[tuple[Value, ...]]] = set()

    async def start(self) -> None:
        """Does not wait for the registry to be there."""
        self._channel = self._connect()

    async def redial(self) -> None:
        """A new connection, as the own certificate was renewed; calls that run over the old one get a moment to end,
        watches begin anew over the new one."""
        old, self._channel = self._channel, self._connect()
        await self._nodes.restart()
        for follower in tuple(self._followers):
            await follower.restart()
        if old is not None:
            await old.close(CALL_TIMEOUT_S)

    async def close(self) -> None:
        """End all watches and the connection."""
        await self._nodes.close()
        for follower in tuple(self._followers):
            await follower.close()
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def register(self, registration: Registration) -> None:
        check_registration(registration)
        request = pb.RegisterRequest(registration=wire.registration_to_pb(registration))
        with _errors():
            await self._stub.Register(request, timeout=CALL_TIMEOUT_S)

    async def heartbeat(self, node_id: str, *, ready: bool) -> None:
        with _errors():
            await self._stub.Heartbeat(pb.HeartbeatRequest(node_id=node_id, ready=ready), timeout=CALL_TIMEOUT_S)

    async def deregister(self, node_id: str) -> None:
        with _errors():
            await self._stub.Deregister(pb.DeregisterRequest(node_id=node_id), timeout=CALL_TIMEOUT_S)

    async def nodes(self) -> NodesView:
        with _errors():
            call = self._stub.WatchNodes(pb.WatchNodesRequest(), timeout=CALL_TIMEOUT_S)
            try:
                response = await call.read()
            finally:
                call.cancel()
        if response is grpc.aio.EOF:
            raise NodeUnreachable("the registry ended the stream before its first view", node="registry")
        return wire.view_from_pb(response, time.monotonic())

    async def watch(self) -> AsyncIterator[NodesView]:
        async with aclosing(self._nodes.states(REPEAT_S)) as views:
            async for view in views:
                yield view

    async def get(self, key: str) -> Value | None:
        check_key(key)
        return next((value for value in await self.list_values(key) if value.key == key), None)

    async def put(self, key: str, value: bytes, *, expected_version: int | None = None) -> int:
        check_key(key)
        check_value(key, value)
        request = pb.PutValueRequest(key=key, value=value, expected_version=expected_version)
        with _errors():
            response = await self._stub.PutValue(request, timeout=CALL_TIMEOUT_S)
        return int(response.version)

    async def delete(self, key: str) -> None:
        check_key(key)
        with _errors():
            await self._stub.PutValue(pb.PutValueRequest(key=key), timeout=CALL_TIMEOUT_S)

    async def list_values(self, prefix: str) -> tuple[Value, ...]:
        check_prefix(prefix)
        with _errors():
            response = await self._stub.ListValues(pb.ListValuesRequest(prefix=prefix), timeout=CALL_TIMEOUT_S)
        return wire.values_from_pb(response.values)

    async def watch_values(self, prefix: str) -> AsyncIterator[tuple[Value, ...]]:
        check_prefix(prefix)
        follower: Follower[tuple[Value, ...]] = Follower(lambda: self._value_states(prefix), name=f"values {prefix}")
        self._followers.add(follower)
        last: tuple[Value, ...] | None = None
        try:
            async with aclosing(follower.states(None)) as states:
                async for values in states:
                    if values != last:
                        last = values
                        yield values
        finally:
            self._followers.discard(follower)
            await follower.close()

    async def _node_views(self) -> AsyncGenerator[NodesView, None]:
        with _errors():
            call = self._stub.WatchNodes(pb.WatchNodesRequest())
            try:
                async for response in call:
                    yield wire.view_from_pb(response, time.monotonic())
            finally:
                call.cancel()

    async def _value_states(self, prefix: str) -> AsyncGenerator[tuple[Value, ...], None]:
        with _errors():
            call = self._stub.WatchValues(pb.WatchValuesRequest(prefix=prefix))
            try:
                async for response in call:
                    yield wire.values_from_pb(response.values)
            finally:
                call.cancel()

    @property
    def _stub(self) -> pb_grpc.RegistryStub:
        if self._channel is None:
            raise NodeUnreachable("the registry client is not started", node="registry")
        return pb_grpc.RegistryStub(self._channel)
