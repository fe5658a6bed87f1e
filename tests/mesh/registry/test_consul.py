"""What is Consul's alone: the mapping, its gRPC check, its errors, and that a watch never spins."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
import requests
from consul import exceptions
from grpc_health.v1 import health_pb2

from mesh.errors import InvalidRequest, MeshError, NodeUnreachable, NotFound, PolicyDenied, RevisionMismatch
from mesh.registry import consul as consul_module
from mesh.registry import consul_wire as wire
from mesh.registry.consul import ConsulRegistry
from mesh.registry.types import Health
from mesh.rpc.server import health_server
from tests.conformance.registry_suite import eventually, healths, node, until
from tests.consul_fixture import ConsulAgent


def entry(node_id: str, *statuses: str, **service: Any) -> dict[str, Any]:
    return {
        "Service": {
            "ID": f"kvmesh-node-{node_id}",
            "Address": "192.0.2.7",
            "Port": 50051,
            "Meta": None,
            "Tags": ["ttl_s=5.0"],
            **service,
        },
        "Checks": [{"Status": status} for status in statuses],
    }


def test_health_needs_every_check() -> None:
    for statuses, health in [
        (("passing", "passing"), Health.PASSING),
        (("passing", "critical"), Health.CRITICAL),
        (("warning",), Health.CRITICAL),
        ((), Health.CRITICAL),
    ]:
        (listed,) = wire.nodes_from_health("kvmesh", [entry("core-1", *statuses)])
        assert listed.health is health


def test_a_node_on_two_agents_is_one_node() -> None:
    stale, current = entry("a", "critical", Port=1), entry("a", "passing", Port=2)
    for entries in ([stale, current], [current, stale]):
        (listed,) = wire.nodes_from_health("kvmesh", entries)
        assert (listed.health, listed.registration.address) == (Health.PASSING, "192.0.2.7:2")


def test_instances_of_others_are_left_out() -> None:
    foreign = [
        entry("a", "passing", ID="something-else"),
        entry("b", "passing", Tags=None),
        entry("c", "passing", Tags=["ttl_s=soon"]),
    ]
    assert wire.nodes_from_health("kvmesh", foreign) == ()


@pytest.mark.parametrize(
    ("current", "answered", "following"), [(None, "5", 5), (5, "7", 7), (5, "5", 5), (7, "5", None), (None, "0", None)]
)
def test_an_index_that_goes_backwards_starts_over(current: int | None, answered: str, following: int | None) -> None:
    assert wire.next_index(current, answered) == following


def test_a_watch_never_spins() -> None:
    assert wire.pause_s(changed=True, took_s=0.0, wait_s=4.0) >= 0.05
    assert wire.pause_s(changed=False, took_s=0.0, wait_s=4.0) >= 1.0
    assert wire.pause_s(changed=True, took_s=3.0, wait_s=4.0) == 0.0
    assert wire.pause_s(changed=False, took_s=4.0, wait_s=4.0) == 0.0


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (requests.exceptions.ConnectionError("refused"), NodeUnreachable),
        (requests.exceptions.ReadTimeout("slow"), NodeUnreachable),
        (exceptions.Timeout(), NodeUnreachable),
        (exceptions.ConsulException("500 No cluster leader"), NodeUnreachable),
        (exceptions.ACLPermissionDenied("Permission denied"), PolicyDenied),
        (exceptions.BadRequest("400 no"), InvalidRequest),
        (exceptions.ClientError("413 too large"), InvalidRequest),
    ],
)
def test_errors(error: Exception, ours: type[MeshError]) -> None:
    assert type(wire.translate(error)) is ours


def test_a_bug_is_not_translated() -> None:
    assert wire.translate(KeyError("Service")) is None


def test_a_bad_prefix_or_address_is_refused() -> None:
    for arguments in ({"prefix": "a/b"}, {"prefix": ""}):
        with pytest.raises(InvalidRequest):
            ConsulRegistry("127.0.0.1:8500", **arguments)
    with pytest.raises(InvalidRequest):
        ConsulRegistry("127.0.0.1")


async def test_no_consul_is_node_unreachable_everywhere() -> None:
    registry = ConsulRegistry("127.0.0.1:1")
    with pytest.raises(NodeUnreachable, match="not started"):
        await registry.nodes()
    await registry.start()
    with pytest.raises(NodeUnreachable, match="Consul does not answer"):
        await registry.register(node())
    await registry.close()


@pytest.mark.consul
async def test_the_grpc_check_counts_too(consul_agent: ConsulAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_ALIVE_INTERVAL_S", 1.0)  # the least that Consul takes
    listener, servicer = health_server()
    await listener.server.start()
    registry = ConsulRegistry(consul_agent.address)
    await registry.start()
    registered = node(health_address=listener.address)
    async with aclosing(registry.watch()) as views:
        await registry.register(registered)
        assert (await registry.nodes()).nodes[0].registration == registered
        await registry.heartbeat("core-1", ready=True)
        await until(views, lambda view: healths(view) == {"core-1": Health.PASSING})
        await servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await until(views, lambda view: healths(view) == {"core-1": Health.CRITICAL})
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        await until(views, lambda view: healths(view) == {"core-1": Health.PASSING})
        # A crash: the process and with it the listener are gone, the TTL has not run out yet.
        await listener.server.stop(0)
        await until(views, lambda view: healths(view) == {"core-1": Health.CRITICAL})
    await registry.close()


@pytest.mark.consul
async def test_services_are_there_for_people_to_see(consul_agent: ConsulAgent) -> None:
    registry = ConsulRegistry(consul_agent.address, prefix="kvmesh-demo", deregister_after_s=7 * 86400.0)
    await registry.start()
    await registry.register(node())
    client = consul_agent.client
    _, services = client.catalog.services()
    assert "kvmesh-demo-node" in services
    definition = client.agent.checks()["kvmesh-demo-node-core-1:ready"]["Definition"]
    assert definition is not None
    client.http.session.close()
    other = ConsulRegistry(consul_agent.address, prefix="kvmesh-test")
    await other.start()
    assert (await other.nodes()).nodes == ()
    await registry.put("key", b"1")
    assert await other.list_values("") == ()
    with pytest.raises(NotFound):
        await other.heartbeat("core-1", ready=True)
    await registry.close()
    await other.close()


@pytest.mark.consul
async def test_a_registration_that_is_not_listed_is_an_error(
    consul_agent: ConsulAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a token that may not write the service: Consul says yes all the same."""
    registry = ConsulRegistry(consul_agent.address)
    await registry.start()
    client = registry._client
    assert client is not None
    monkeypatch.setattr(client.agent.service, "register", lambda **arguments: True)
    monkeypatch.setattr(consul_module, "_READ_BACK_S", 0.0)
    with pytest.raises(NodeUnreachable, match="does not list it"):
        await registry.register(node())
    await registry.close()


@pytest.mark.consul
async def test_a_write_that_was_overtaken_gets_a_version_that_no_longer_counts(
    consul_agent: ConsulAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = ConsulRegistry(consul_agent.address)
    await registry.start()
    client, other = registry._client, consul_agent.client
    assert client is not None
    real = client.kv.put

    def overtaken(key: str, *arguments: Any, **options: Any) -> Any:
        done = real(key, *arguments, **options)
        other.kv.put(key, b"theirs")
        return done

    monkeypatch.setattr(client.kv, "put", overtaken)
    version = await registry.put("key", b"ours")
    monkeypatch.setattr(client.kv, "put", real)
    stored = await registry.get("key")
    assert stored is not None
    assert stored.value == b"theirs"
    assert version < stored.version
    with pytest.raises(RevisionMismatch):
        await registry.put("key", b"ours again", expected_version=version)
    other.http.session.close()
    await registry.close()


@pytest.mark.consul
async def test_a_blocked_query_does_not_block_the_loop_or_close(consul_agent: ConsulAgent) -> None:
    registry = ConsulRegistry(consul_agent.address)
    await registry.start()
    async with aclosing(registry.watch()) as views:
        await anext(views)
        pending = asyncio.create_task(anext(views))
        for _ in range(20):  # calls go on while the watch waits in its query
            await registry.get("key")
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
    await eventually(registry.nodes, lambda view: view.nodes == ())
    await registry.close()
