"""Who may do what over the Registry RPCs, by certificate."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from mesh.errors import InvalidRequest, NodeUnreachable, PolicyDenied
from mesh.identity.place import Role
from mesh.registry import remote as remote_module
from mesh.registry.consul import ConsulRegistry
from mesh.registry.embedded import EmbeddedRegistry
from mesh.registry.open import ConsulSettings, EmbeddedSettings, RemoteSettings, open_registry
from mesh.registry.remote import RemoteRegistry
from mesh.rpc.channel import node_channel
from mesh.rpc.errors import translate_rpc_errors
from mesh.v1 import registry_pb2 as pb
from mesh.v1 import registry_pb2_grpc as pb_grpc
from tests.conformance.registry_suite import node, until
from tests.mesh.registry.conftest import RemoteHarness, place


async def test_a_node_changes_its_own_registration_only(remote: RemoteHarness) -> None:
    registry = await remote.connect("core-1", Role.CORE)
    other = await remote.connect("core-2", Role.CORE)
    await registry.register(node("core-1"))
    for call in (
        other.register(node("core-1", address="192.0.2.9:1")),
        other.heartbeat("core-1", ready=True),
        other.deregister("core-1"),
    ):
        with pytest.raises(PolicyDenied, match="its own registration only") as caught:
            await call
        assert caught.value.details["rule"] == "own_registration"
    assert (await other.nodes()).nodes[0].registration == node("core-1")


async def test_a_registered_place_is_the_certificates(remote: RemoteHarness) -> None:
    registry = await remote.connect("core-1", Role.CORE)
    with pytest.raises(PolicyDenied, match="certificate does not have"):
        await registry.register(node("core-1", meta={"place": place("core-1", Role.PLACEMENT).uri}))
    await registry.register(node("core-1", meta={"place": place("core-1", Role.CORE).uri}))


async def test_values_are_for_placement(remote: RemoteHarness) -> None:
    await (await remote.connect("placement-2")).put("tenants", b"secret")
    core = await remote.connect("core-1", Role.CORE)
    for call in (
        core.get("tenants"),
        core.put("tenants", b""),
        core.delete("tenants"),
        core.list_values(""),
        until(core.watch_values(""), lambda _: True),
    ):
        with pytest.raises(PolicyDenied) as caught:
            await call
        assert caught.value.details["rule"] == "node_role"


async def test_core_nodes_read_policies_and_nothing_else(remote: RemoteHarness) -> None:
    placement, core = await remote.connect("placement-2"), await remote.connect("core-1", Role.CORE)
    for key in ("policies/acme", "policies-of-others", "tenants"):
        await placement.put(key, b"{}")
    assert [value.key for value in await core.list_values("policies/")] == ["policies/acme"]
    assert (await core.get("policies/acme")) is not None
    assert await until(core.watch_values("policies/"), lambda values: len(values) == 1)
    for call in (
        core.list_values("policies"),
        core.list_values("polic"),
        core.get("policies-of-others"),
        core.put("policies/acme", b"mine"),
        core.delete("policies/acme"),
        until(core.watch_values("policies"), lambda _: True),
    ):
        with pytest.raises(PolicyDenied) as caught:
            await call
        assert caught.value.details["rule"] == "node_role"
    edge = await remote.connect("edge-1", Role.EDGE)
    with pytest.raises(PolicyDenied):
        await edge.list_values("policies/")


async def test_an_edge_sees_nothing(remote: RemoteHarness) -> None:
    edge = await remote.connect("edge-1", Role.EDGE)
    for call in (
        edge.register(node("edge-1")),
        edge.heartbeat("edge-1", ready=True),
        edge.nodes(),
        until(edge.watch(), lambda _: True),
        edge.list_values(""),
    ):
        with pytest.raises(PolicyDenied):
            await call


async def test_the_servicer_checks_by_itself(remote: RemoteHarness) -> None:
    """A peer that is not our client sends what it likes."""
    async with node_channel(remote.address, remote.credentials("placement-2")) as channel:
        stub = pb_grpc.RegistryStub(channel)
        for request in (
            pb.PutValueRequest(key="../etc", value=b""),
            pb.PutValueRequest(key="key", value=bytes(512 * 1024)),
            pb.PutValueRequest(key="key", expected_version=1),
            pb.PutValueRequest(),
        ):
            with pytest.raises(InvalidRequest), translate_rpc_errors():
                await stub.PutValue(request, timeout=10)
        registration = pb.Registration(node_id="placement-2", ttl_s=-1.0)
        with pytest.raises(InvalidRequest, match="ttl_s"), translate_rpc_errors():
            await stub.Register(pb.RegisterRequest(registration=registration), timeout=10)
        with pytest.raises(PolicyDenied), translate_rpc_errors():
            await stub.Register(pb.RegisterRequest(), timeout=10)


async def test_open_registry(remote: RemoteHarness, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("registry") / "registry.json"
    assert isinstance(open_registry(EmbeddedSettings(path=path)), EmbeddedRegistry)
    consul = open_registry(ConsulSettings(token="secret"))
    assert isinstance(consul, ConsulRegistry)
    assert "secret" not in repr(ConsulSettings(token="secret"))
    with pytest.raises(InvalidRequest):
        open_registry(ConsulSettings(address="nonsense"))
    credentials = remote.credentials("core-1", Role.CORE)
    for placement in (None, "placement-1", "placement-9"):
        registry = open_registry(RemoteSettings(address=remote.address, credentials=credentials, placement=placement))
        assert isinstance(registry, RemoteRegistry)
        with pytest.raises(NodeUnreachable, match="not started"):
            await registry.nodes()
        await registry.start()
        if placement == "placement-9":
            with pytest.raises(NodeUnreachable):
                await registry.nodes()
        else:
            assert (await registry.nodes()).nodes == ()
        await registry.close()


async def test_a_registry_that_does_not_answer_in_time_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks tries again, or elsewhere, as with any other registry that is gone."""
    server = grpc.aio.server()

    class Silent(pb_grpc.RegistryServicer):
        async def ListValues(self, request: object, context: object) -> None:
            await asyncio.sleep(30)

    pb_grpc.add_RegistryServicer_to_server(Silent(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setattr(remote_module, "CALL_TIMEOUT_S", 0.1)
    client = RemoteRegistry(lambda: grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
    await client.start()
    try:
        with pytest.raises(NodeUnreachable, match="in time"):
            await client.list_values("p/")
    finally:
        await client.close()
        await server.stop(None)
