"""What sites are told, and moves that are handed to the edge where a request entered."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from mesh.errors import MeshError, NodeUnreachable, NotFound, NotImplementedHere
from mesh.identity.principal import AccessRole, Principal
from mesh.identity.tenants import issue_key, new_tenant
from mesh.rpc.uplink.hub import UplinkHub
from mesh.v1 import admin_pb2, uplink_pb2
from placement.service.process import _Mover
from placement.service.site_config import SiteConfigSource
from placement.service.stores import PolicyStore, TenantStore
from tests.fakes.mesh import MemoryMesh, place_of, until
from tests.mesh.rpc.uplink.harness import Mesh, mesh, place
from tests.placement.service.registries import MoodyRegistry


@pytest.fixture
async def uplinks() -> AsyncIterator[Mesh]:
    async with mesh(lease_s=2.0, heartbeat_s=0.05) as made:
        yield made


CORE_ONLY = (
    "version: 1\nrules: {"
    + ", ".join(f"{label}: {{tiers: [core]}}" for label in ("public", "internal", "confidential", "restricted"))
    + "}"
)


async def test_each_change_is_pushed_whole_and_only_to_sites_that_it_concerns(
    registry: MoodyRegistry, uplinks: Mesh
) -> None:
    source = SiteConfigSource()
    policies, tenants = PolicyStore(registry, source.changed), TenantStore(registry, source.changed)
    for store in (policies, tenants):
        await store.start()
    source.changed()  # nobody is there to tell
    source.attach(uplinks.hub, policies, tenants)
    told: list[uplink_pb2.SiteConfig] = []
    site = uplinks.site("edge-1")
    site_place = place("edge-1")

    async def take(config: uplink_pb2.SiteConfig) -> None:
        told.append(config)

    site.on_config = take
    await site.agent.start()
    await until(lambda: len(told) == 1)

    kept, kept_record = issue_key("acme", AccessRole.TENANT, created_unix_s=1)
    _, gone = issue_key("acme", AccessRole.ADMIN, created_unix_s=1)
    served = new_tenant("acme", [site_place.site])
    await tenants.change(lambda d: d.with_tenant(served).with_key(kept_record).with_key(gone))
    await tenants.change(lambda d: d.with_revoked(gone.key_id))
    _, foreign = issue_key("foreign", AccessRole.TENANT, created_unix_s=1)
    await tenants.change(lambda d: d.with_tenant(new_tenant("foreign", ["elsewhere"])).with_key(foreign))
    await policies.put("acme", "version: 1", None)
    await policies.put("foreign", CORE_ONLY, None)
    await policies.put("guest", "version: 1\nrules: {public: {tiers: [edge]}}", None)
    await policies.put("other", "version: 1", None)
    await policies.delete("other")
    await until(lambda: any(p.deleted for p in told[-1].policies))
    last = told[-1]
    assert [(p.tenant, p.deleted) for p in last.policies] == [("acme", False), ("guest", False), ("other", True)]
    assert b"foreign" not in last.SerializeToString()
    assert last.epoch
    assert last.directory_revision == 3
    assert [(k.key_id, k.tenant, k.role) for k in last.keys] == [(kept_record.key_id, "acme", "tenant")]
    assert [(s.tenant, len(s.secret)) for s in last.salts] == [("acme", 32)]
    assert kept.split("_", 2)[2].encode() not in last.SerializeToString()
    assert [c.version for c in told] == sorted(c.version for c in told)
    for store in (policies, tenants):
        await store.close()


TENANT = Principal(tenant="acme", role=AccessRole.TENANT, key_id="k")
OPERATOR = Principal(tenant="ops", role=AccessRole.OPERATOR, key_id="k")


@pytest.mark.parametrize(("who", "scope"), [(TENANT, "acme"), (OPERATOR, "")])
async def test_a_request_that_entered_at_an_edge_is_moved_there(uplinks: Mesh, who: Principal, scope: str) -> None:
    site = await uplinks.attach("edge-1")
    mover = _Mover(MemoryMesh(entry="placement-1").door, uplinks.hub, lambda node_id: None, place_of("placement-1"))
    moved = await mover.migrate(who, admin_pb2.MigrateRequest(request_id="edge-1:abc", tier="core"))
    assert moved.to_node_id == "core-1"
    assert [(c.tenant, c.migrate.request_id, c.migrate.tier) for c in site.commands] == [(scope, "edge-1:abc", "core")]

    async def refuse(command: uplink_pb2.Command) -> uplink_pb2.CommandResult:
        raise NotFound("no request 'edge-1:abc' here")

    site.on_command = refuse
    with pytest.raises(NotFound):
        await mover.migrate(who, admin_pb2.MigrateRequest(request_id="edge-1:abc", tier="core"))


async def test_a_request_whose_entry_is_away_may_be_moved_later(uplinks: Mesh) -> None:
    known = {"edge-9": admin_pb2.NodeView(node_id="edge-9", tier="edge")}
    mover = _Mover(MemoryMesh(entry="placement-1").door, uplinks.hub, known.get, place_of("placement-1"))
    with pytest.raises(NodeUnreachable, match="edge-9"):
        await mover.migrate(OPERATOR, admin_pb2.MigrateRequest(request_id="edge-9:abc", tier="core"))


async def test_an_entry_is_told_of_a_target_at_another_site_and_of_no_other(uplinks: Mesh) -> None:
    site = await uplinks.attach("edge-1")
    known = {name: admin_pb2.NodeView(node_id=name, tier=name.split("-")[0]) for name in ("edge-2", "core-1", "edge-1")}
    mover = _Mover(MemoryMesh(entry="placement-1").door, uplinks.hub, known.get, place_of("placement-1"))
    for target in ("edge-2", "core-1", "edge-1", "edge-9"):
        await mover.migrate(OPERATOR, admin_pb2.MigrateRequest(request_id="edge-1:abc", node_id=target))
    assert [c.target.node_id for c in site.commands] == ["edge-2", "", "", ""]


@pytest.mark.parametrize("request_id", ["placement-1:abc", "edge-9:abc", "nonsense", ""])
async def test_other_requests_are_looked_for_here(request_id: str) -> None:
    def never(context: object) -> object:
        raise AssertionError

    hub = UplinkHub(never)  # type: ignore[arg-type]
    mover = _Mover(MemoryMesh(entry="placement-1").door, hub, lambda node_id: None, place_of("placement-1"))
    with pytest.raises(MeshError) as caught:
        await mover.migrate(OPERATOR, admin_pb2.MigrateRequest(request_id=request_id, tier="core"))
    assert isinstance(caught.value, NotFound)


async def test_requests_of_attached_sites_are_listed_and_silent_ones_named(uplinks: Mesh) -> None:
    old, site = await uplinks.attach("edge-0"), await uplinks.attach("edge-1")

    async def tell(command: uplink_pb2.Command) -> uplink_pb2.CommandResult:
        assert command.WhichOneof("command") == "list_requests"
        # A site speaks for itself only: the second is not its own.
        named = [admin_pb2.RunningRequest(request_id=f"{name}:1", entry_node_id=name) for name in ("edge-1", "edge-7")]
        return uplink_pb2.CommandResult(requests=admin_pb2.ListRequestsResponse(requests=named))

    async def refuse(command: uplink_pb2.Command) -> uplink_pb2.CommandResult:
        raise NotImplementedHere("this agent does not know the command: it is of an older version")

    old.on_command, site.on_command = refuse, tell
    mover = _Mover(MemoryMesh(entry="placement-1").door, uplinks.hub, lambda node_id: None, place_of("placement-1"))
    listed = await mover.list_requests()
    assert [r.request_id for r in listed.requests] == ["edge-1:1"]
    assert list(listed.silent_entry_node_ids) == ["edge-0"]
