"""The registry in Consul, through its local agent. Tested on 1.8.7.

Calls go through py-consul's requests client on threads of their own, not through its aiohttp one: that one leans on
arguments which aiohttp deprecates, makes its session in the constructor, and adds a dependency, for a handful of
calls a second. Watches are blocking queries; Consul answers one at a change, or after its wait. Registration is
with the agent only (never with the catalog beside it: anti-entropy would remove one of them), so heartbeat and
deregister work on the machine where the node was registered.

An agent that restarts without its data forgets the nodes; `heartbeat` then raises NotFound and the node registers
again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import consul

from mesh.address import HostPort
from mesh.errors import NodeUnreachable, NotFound, RevisionMismatch
from mesh.identity.place import check_name
from mesh.registry import consul_wire as wire
from mesh.registry.checks import check_key, check_prefix, check_registration, check_value
from mesh.registry.consul_access import ConsulTls
from mesh.registry.embedded import REPEAT_S
from mesh.registry.follow import Follower
from mesh.registry.threads import CallThread
from mesh.registry.types import NodesView, RegisteredNode, Registration, Value

CALL_TIMEOUT_S = 5.0
WAIT_S = 4.0
"""Of a blocking query. Below REPEAT_S, so that a view that repeats is also one that is fresh."""
_READ_BACK_S, _READ_BACK_PERIOD_S = 5.0, 0.05

T = TypeVar("T")


class ConsulRegistry:
    """See mesh.registry.types.Registry. `address`: the local agent's HTTP API; with `tls` its HTTPS one. `prefix`
    starts the service's name and all keys; meshes that share a Consul need different ones. `token`: of Consul's ACL,
    sent as a header and never logged. `deregister_after_s`: Consul forgets a node that was critical for so long (hours,
    if at all; None: never)."""

    def __init__(
        self,
        address: str,
        *,
        prefix: str = "kvmesh",
        token: str | None = None,
        tls: ConsulTls | None = None,
        deregister_after_s: float | None = None,
    ) -> None:
        check_name("prefix", prefix)
        self._agent = HostPort.parse(address)
        self._prefix = prefix
        self._token = token
        self._tls = tls
        self._deregister_after_s = deregister_after_s
        self._client: consul.Consul | None = None
        self._calls: CallThread | None = None
        self._nodes: Follower[NodesView] = Follower(self._node_views, name="nodes")
        self._followers: set[Follower[tuple[Value, ...]]] = set()

    async def start(self) -> None:
        """Does not wait for Consul to be there."""
        self._client, self._calls = self._open("consul-calls")

    async def close(self) -> None:
        """End all watches. Threads end with the query they are in, WAIT_S at most."""
        await self._nodes.close()
        for follower in tuple(self._followers):
            await follower.close()
        if self._calls is not None:
            self._calls.close()
            self._calls = None

    async def register(self, registration: Registration) -> None:
        check_registration(registration)
        arguments = wire.service_arguments(self._prefix, registration, self._deregister_after_s)
        await self._call(lambda client: client.agent.service.register(**arguments))
        # Consul says yes even to a token that may not write the service: only reading it back tells.
        deadline_s = time.monotonic() + _READ_BACK_S
        while not await self._is_listed(registration):
            if time.monotonic() > deadline_s:
                raise NodeUnreachable(
                    f"Consul took the registration of {registration.node_id!r} but does not list it; does the token "
                    f"have service:write on {wire.service_name(self._prefix)!r}?",
                    node="consul",
                )
            await asyncio.sleep(_READ_BACK_PERIOD_S)

    async def heartbeat(self, node_id: str, *, ready: bool) -> None:
        check_name("node_id", node_id)
        check_id = wire.ready_check_id(self._prefix, node_id)

        def update(client: consul.Consul) -> bool:
            beat = client.agent.check.ttl_pass if ready else client.agent.check.ttl_fail
            try:
                # False: a 404, as newer versions answer.
                return bool(beat(check_id))
            except consul.ConsulException as error:
                if "does not have associated TTL" in str(error) or "Unknown check" in str(error):
                    return False
                raise

        if not await self._call(update):
            raise NotFound(f"node {node_id!r} is not registered with this Consul agent; register again", node=node_id)

    async def deregister(self, node_id: str) -> None:
        check_name("node_id", node_id)
        await self._call(lambda client: client.agent.service.deregister(wire.service_id(self._prefix, node_id)))

    async def nodes(self) -> NodesView:
        index, nodes = await self._call(self._query_nodes(None))
        return NodesView(index=int(index), nodes=nodes, heard_monotonic_s=time.monotonic())

    async def watch(self) -> AsyncIterator[NodesView]:
        async with aclosing(self._nodes.states(REPEAT_S)) as views:
            async for view in views:
                yield view

    async def get(self, key: str) -> Value | None:
        check_key(key)
        _, entry = await self._call(lambda client: client.kv.get(self._path(key)))
        return None if entry is None else wire.value_from(entry, self._prefix)

    async def put(self, key: str, value: bytes, *, expected_version: int | None = None) -> int:
        check_key(key)
        check_value(key, value)
        # Consul does not tell the version that a write made, so the write carries a mark to know it by.
        mark = secrets.randbits(63)

        def write(client: consul.Consul) -> int | None:
            if not client.kv.put(self._path(key), value, cas=expected_version, flags=mark):
                return None
            index, entry = client.kv.get(self._path(key), consistency="consistent")
            if entry is not None and entry["Flags"] == mark:
                return int(entry["ModifyIndex"])
            # Somebody wrote or deleted it since. Ours was an older version; any number below theirs stands for
            # it, since no later compare-and-set can match.
            return int(entry["ModifyIndex"] if entry is not None else index) - 1

        version = await self._call(write)
        if version is None:
            raise RevisionMismatch(f"{key!r} is not at version {expected_version}; read it again", key=key)
        return version

    async def delete(self, key: str) -> None:
        check_key(key)
        await self._call(lambda client: client.kv.delete(self._path(key)))

    async def list_values(self, prefix: str) -> tuple[Value, ...]:
        check_prefix(prefix)
        _, values = await self._call(self._query_values(prefix, None))
        return values

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
        async with aclosing(self._blocking(self._query_nodes)) as answers:
            async for index, nodes in answers:
                yield NodesView(index=index, nodes=nodes, heard_monotonic_s=time.monotonic())

    async def _value_states(self, prefix: str) -> AsyncGenerator[tuple[Value, ...], None]:
        async with aclosing(self._blocking(lambda index: self._query_values(prefix, index))) as answers:
            async for _, values in answers:
                yield values

    async def _blocking(
        self, query: Callable[[int | None], Callable[[consul.Consul], tuple[str, T]]]
    ) -> AsyncGenerator[tuple[int, T], None]:
        """Answers of a blocking query, forever, on a connection and a thread of its own."""
        client, thread = self._open("consul-watch")
        index: int | None = None
        try:
            while True:
                asked_s = time.monotonic()
                answered, state = await _run(thread, client, query(index))
                yield int(answered), state
                following = wire.next_index(index, answered)
                changed = following is None or following != index
                await asyncio.sleep(wire.pause_s(changed=changed, took_s=time.monotonic() - asked_s, wait_s=WAIT_S))
                index = following
        finally:
            thread.close()

    def _query_nodes(self, index: int | None) -> Callable[[consul.Consul], tuple[str, tuple[RegisteredNode, ...]]]:
        def query(client: consul.Consul) -> tuple[str, tuple[RegisteredNode, ...]]:
            name = wire.service_name(self._prefix)
            answered, entries = client.health.service(name, index=index, wait=f"{WAIT_S:g}s")
            return answered, wire.nodes_from_health(self._prefix, entries)

        return query

    def _query_values(self, prefix: str, index: int | None) -> Callable[[consul.Consul], tuple[str, tuple[Value, ...]]]:
        def query(client: consul.Consul) -> tuple[str, tuple[Value, ...]]:
            path = f"{self._prefix}/{prefix}"
            answered, entries = client.kv.get(path, recurse=True, index=index, wait=f"{WAIT_S:g}s")
            values = [wire.value_from(entry, self._prefix) for entry in entries or ()]
            return answered, tuple(sorted(values, key=lambda value: value.key))

        return query

    async def _is_listed(self, registration: Registration) -> bool:
        _, nodes = await self._call(self._query_nodes(None))
        return any(node.registration == registration for node in nodes)

    async def _call(self, function: Callable[[consul.Consul], T]) -> T:
        if self._calls is None or self._client is None:
            raise NodeUnreachable("the Consul client is not started", node="consul")
        return await _run(self._calls, self._client, function)

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _open(self, name: str) -> tuple[consul.Consul, CallThread]:
        """A client and the one thread that uses it: its HTTP session is not made for several."""
        host = str(self._agent).rpartition(":")[0]  # with brackets, if it is IPv6
        tls = self._tls
        client = consul.Consul(
            host=host,
            port=self._agent.port,
            scheme="http" if tls is None else "https",
            verify=True if tls is None else str(tls.ca_file),
            cert=None if tls is None else tls.client_pair,
            connections_timeout=CALL_TIMEOUT_S,
        )
        # Nothing from the environment: neither a token (which would win over ours) nor a proxy.
        client.token = self._token
        client.http.session.trust_env = False
        return client, CallThread(name, at_end=client.http.session.close)


async def _run(thread: CallThread, client: consul.Consul, function: Callable[[Any], T]) -> T:
    try:
        return await thread.run(lambda: function(client))
    except Exception as error:
        translated = wire.translate(error)
        if translated is None:
            raise
        raise translated from error
