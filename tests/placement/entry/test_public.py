"""The public listeners over real sockets: who may call what, and that a client that hangs up frees its request."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.responses import PlainTextResponse

from mesh.address import HostPort
from mesh.client import Decision, MeshClient, Tokens
from mesh.errors import Cancelled, InvalidRequest, NotFound, NotImplementedHere, PolicyDenied, Unauthenticated
from mesh.identity.ca import CertificateAuthority, NodeCredentials
from mesh.identity.principal import AccessRole, Principal
from mesh.identity.tenants import TenantDirectory, issue_key, new_tenant
from mesh.rpc.channel import bearer
from mesh.rpc.errors import translate_rpc_errors
from mesh.v1 import admin_pb2 as admin
from mesh.v1 import admin_pb2_grpc as admin_grpc
from placement.entry.gateway import EntryGateway
from placement.entry.public import http_listener, public_listener
from placement.entry.request_view import running_requests
from tests.fakes.mesh import MemoryMesh, place_of, settle, until
from tests.placement.entry.conftest import MakeMesh


class _Source:
    """A snapshot of nothing, with a version per look."""

    def __init__(self) -> None:
        self.looks = 0

    def wire_snapshot(self) -> admin.Snapshot:
        self.looks += 1
        return admin.Snapshot(version=self.looks)

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(0)


class _Mover:
    def __init__(self, mesh: MemoryMesh) -> None:
        self._mesh = mesh
        self.asked: list[Principal] = []

    async def migrate(self, principal: Principal, request: admin.MigrateRequest) -> admin.MigrateResponse:
        self.asked.append(principal)
        return await self._mesh.door.migrate(principal, request)

    async def list_requests(self) -> admin.ListRequestsResponse:
        return admin.ListRequestsResponse(requests=running_requests(self._mesh.door, "paris", ()))


@dataclass
class Entry:
    mesh: MemoryMesh
    address: str
    keys: dict[str, str]
    directory: list[TenantDirectory]
    mover: _Mover
    clients: Callable[[str], MeshClient]


@pytest.fixture
async def entry(make_mesh: MakeMesh, authority: CertificateAuthority) -> AsyncIterator[Entry]:
    mesh = make_mesh("core-1", "paris", entry="paris", step_delay_s=0.001)
    directory, keys = TenantDirectory(), {}
    for tenant in ("acme", "rival"):
        directory = directory.with_tenant(new_tenant(tenant))
    for name, tenant, role in (
        ("tenant", "acme", AccessRole.TENANT), ("rival", "rival", AccessRole.TENANT),
        ("operator", "acme", AccessRole.OPERATOR), ("admin", "acme", AccessRole.ADMIN),
    ):  # fmt: skip
        keys[name], record = issue_key(tenant, role, created_unix_s=1)
        directory = directory.with_key(record)
    held, mover = [directory], _Mover(mesh)
    listener, _ = public_listener(
        HostPort("127.0.0.1", 0), authority.issue(place_of("paris")), door=mesh.door, source=_Source(), mover=mover,
        directory=lambda: held[0],
    )  # fmt: skip
    await listener.server.start()
    async with AsyncExitStack() as stack:

        def client(name: str) -> MeshClient:
            made = MeshClient(listener.address, keys[name])
            stack.push_async_callback(made.close)
            return made

        yield Entry(mesh, listener.address, keys, held, mover, client)
    await listener.server.stop(0)


OPTIONS = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


async def test_a_tenant_generates_explains_tokenizes_and_lists(entry: Entry) -> None:
    client = entry.clients("tenant")
    done = await client.complete("hello", **OPTIONS)
    assert len(done.ids) == 12
    assert done.decision.shape in ("core", "local")
    assert (await client.explain("hello")).decision.label == "internal"
    assert await client.tokenize("ab") == [100, 101]
    assert [m.id for m in await client.models()] == ["toy"]
    assert not await client.abort(done.decision.request_id)


async def test_errors_arrive_as_they_left(entry: Entry) -> None:
    client = entry.clients("tenant")
    with pytest.raises(InvalidRequest) as caught:
        await client.complete("hello", label="none")
    assert caught.value.details["field"] == "label"
    with pytest.raises(PolicyDenied) as denied:
        await client.complete("hello", label="restricted", shape="core")
    assert denied.value.details["rule"] == "rules.restricted"


@pytest.mark.parametrize("key", ["", "kvm_0000000000000000_" + "A" * 43, "nonsense"])
async def test_a_wrong_or_missing_key(entry: Entry, key: str) -> None:
    async with MeshClient(entry.address, key or "x") as client:
        for call in (client.complete("hello"), client.models(), client.snapshot(), client.abort("x")):
            with pytest.raises(Unauthenticated):
                await call
    async with grpc.aio.insecure_channel(entry.address) as channel:
        with pytest.raises(Unauthenticated), translate_rpc_errors():
            await admin_grpc.MeshViewStub(channel).GetSnapshot(admin.GetSnapshotRequest())


async def test_a_revoked_key_ends_at_once(entry: Entry) -> None:
    client = entry.clients("tenant")
    await client.models()
    entry.directory[0] = entry.directory[0].with_revoked(entry.keys["tenant"].split("_")[1])
    with pytest.raises(Unauthenticated):
        await client.models()


async def test_roles(entry: Entry) -> None:
    tenant, operator, admin_ = (entry.clients(name) for name in ("tenant", "operator", "admin"))
    with pytest.raises(PolicyDenied, match="needs the role operator"):
        await tenant.snapshot()
    assert (await operator.snapshot()).version > 0
    assert (await admin_.snapshot()).version > 0
    with pytest.raises(NotImplementedHere):  # an edge has no tenants to administer
        await admin_.list_tenants()


async def test_the_snapshot_is_watched(entry: Entry) -> None:
    async with grpc.aio.insecure_channel(entry.address) as channel:
        call = admin_grpc.MeshViewStub(channel).WatchSnapshot(
            admin.WatchSnapshotRequest(), metadata=bearer(entry.keys["operator"])
        )
        first, second = await call.read(), await call.read()
        assert second.snapshot.version > first.snapshot.version
        call.cancel()


async def test_a_tenant_moves_and_aborts_its_own_only(entry: Entry) -> None:
    tenant, rival = entry.clients("tenant"), entry.clients("rival")
    options = OPTIONS | {"max_tokens": 300, "shape": "local"}
    ids: list[int] = []
    async with aclosing(tenant.generate("hello there " * 4, **options)) as events:
        decision = await anext(events)
        assert isinstance(decision, Decision)
        for call in (rival.abort(decision.request_id), rival.migrate(decision.request_id, tier="core")):
            with pytest.raises(NotFound):
                await call
        moving: asyncio.Task[admin.MigrateResponse] | None = None
        async for event in events:
            if isinstance(event, Tokens):
                ids += event.ids
            if moving is None and len(ids) >= 3:
                moving = asyncio.create_task(tenant.migrate(decision.request_id, tier="core"))
    assert moving is not None
    assert (await moving).to_node_id == "core-1"
    assert len(ids) == 300
    assert [p.tenant for p in entry.mover.asked] == ["rival", "acme"]


async def test_operators_see_running_requests_without_their_text(entry: Entry) -> None:
    tenant, operator = entry.clients("tenant"), entry.clients("operator")
    with pytest.raises(PolicyDenied, match="needs the role operator"):
        await tenant.list_requests()
    assert list((await operator.list_requests()).requests) == []
    async with aclosing(tenant.generate("secret " * 4, **(OPTIONS | {"max_tokens": 300, "shape": "local"}))) as events:
        decision = await anext(events)
        assert isinstance(decision, Decision)
        await anext(events)
        (seen,) = (await operator.list_requests()).requests
    assert seen.request_id == decision.request_id
    assert (seen.tenant, seen.label, seen.shape, seen.node_id, seen.max_tokens) == (
        "acme", "internal", "local", "paris", 300,
    )  # fmt: skip
    assert seen.prompt_tokens == decision.prompt_tokens
    assert b"secret" not in seen.SerializeToString()


async def test_abort_ends_a_stream_with_its_error(entry: Entry) -> None:
    client = entry.clients("tenant")
    events = client.generate("hello", resume=False, **OPTIONS | {"max_tokens": 900})
    decision = await anext(events)
    assert isinstance(decision, Decision)
    await anext(events)
    assert await client.abort(decision.request_id)
    with pytest.raises(Cancelled):
        async for _ in events:
            pass


async def test_a_client_that_hangs_up_frees_its_request(entry: Entry) -> None:
    client = MeshClient(entry.address, entry.keys["tenant"])
    events = client.generate("hello", resume=False, **OPTIONS | {"max_tokens": 900})
    for _ in range(3):
        await anext(events)
    assert entry.mesh.door.running == 1
    await events.aclose()
    await client.close()
    await until(lambda: entry.mesh.door.running == 0)
    for node in entry.mesh.nodes.values():
        await settle(node)


async def test_health_is_open(entry: Entry) -> None:
    async with grpc.aio.insecure_channel(entry.address) as channel:
        told = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert told.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_gateway_is_the_front_door(entry: Entry) -> None:
    gateway = EntryGateway(entry.mesh.door, lambda: entry.directory[0], entry.mesh.metrics)
    who = await gateway.authenticate(f"Bearer {entry.keys['tenant']}")
    assert who.tenant == "acme"
    with pytest.raises(Unauthenticated):
        await gateway.authenticate(None)
    assert [m.id for m in await gateway.models(who)] == ["toy"]
    assert gateway.token_bytes("toy", [97]) == [b"t"]
    with pytest.raises(NotFound):
        gateway.token_bytes("other", [1])
    assert b"kvmesh_build" in gateway.metrics()
    assert gateway.ready()
    await entry.mesh.door.drain(0)
    assert not gateway.ready()


async def test_http_off_loopback_is_tls(authority: CertificateAuthority, tmp_path: object) -> None:
    folder = tmp_path / "identity"  # type: ignore[operator]
    authority.issue(place_of("paris"), ip_addresses=("127.0.0.1",)).save(folder)
    assert NodeCredentials.load(folder).place.node_id == "paris"
    for address, scheme in ((HostPort("0.0.0.0", 0), "https"), (HostPort("127.0.0.1", 0), "http")):
        server = http_listener(PlainTextResponse("hi"), address, folder)
        await server.start()
        trust = ssl.create_default_context(cadata=authority.ca_pem.decode())
        async with httpx.AsyncClient(verify=trust) as client:
            url = server.url.replace("0.0.0.0", "127.0.0.1")
            assert url.startswith(f"{scheme}:")
            assert (await client.get(url)).text == "hi"
        await server.close()
