"""The admin servicers over stores in memory. Roles are the interceptor's (tests/mesh/rpc/test_auth.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from mesh.errors import (
    AlreadyExists,
    InvalidRequest,
    MeshError,
    NotFound,
    Overloaded,
    RevisionMismatch,
    Unauthenticated,
)
from mesh.identity.principal import AccessRole
from mesh.v1 import admin_pb2 as admin
from placement.service.admin import PoliciesServicer, TenantsServicer
from placement.service.stores import PolicyStore, TenantStore
from tests.placement.service.registries import MoodyRegistry

NO_CONTEXT: Any = None
YAML = "version: 1\npriority: 3"


class Recorded:
    """What was written to the audit log; `error` is raised instead."""

    def __init__(self) -> None:
        self.actions: list[tuple[str, dict[str, str]]] = []
        self.error: MeshError | None = None

    async def __call__(self, action: str, facts: dict[str, str]) -> str:
        if self.error is not None:
            raise self.error
        self.actions.append((action, facts))
        return "key-1"


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
async def stores(registry: MoodyRegistry) -> AsyncIterator[tuple[PolicyStore, TenantStore]]:
    policies, tenants = PolicyStore(registry, lambda: None), TenantStore(registry, lambda: None)
    for store in (policies, tenants):
        await store.start()
    yield policies, tenants
    for store in (policies, tenants):
        await store.close()


@pytest.fixture
async def tenants(stores: tuple[PolicyStore, TenantStore], recorded: Recorded) -> TenantsServicer:
    servicer = TenantsServicer(stores[1], recorded)
    await servicer.Create(admin.CreateTenantRequest(tenant="acme"), NO_CONTEXT)
    return servicer


@pytest.fixture
async def policies(
    stores: tuple[PolicyStore, TenantStore], tenants: TenantsServicer, recorded: Recorded
) -> PoliciesServicer:
    return PoliciesServicer(*stores, recorded)


async def put(policies: PoliciesServicer, tenant: str = "acme", yaml: str = YAML, **more: int) -> int:
    request = admin.PutPolicyRequest(tenant=tenant, yaml=yaml, **more)
    return (await policies.Put(request, NO_CONTEXT)).version


async def test_a_policy_s_life(policies: PoliciesServicer) -> None:
    assert await put(policies) == 1
    assert await put(policies, yaml="version: 1", expected_version=1) == 2
    got = (await policies.Get(admin.GetPolicyRequest(tenant="acme"), NO_CONTEXT)).policy
    assert (got.tenant, got.yaml, got.version) == ("acme", "version: 1", 2)
    assert len((await policies.List(admin.ListPoliciesRequest(), NO_CONTEXT)).policies) == 1
    await policies.Delete(admin.DeletePolicyRequest(tenant="acme"), NO_CONTEXT)
    assert len((await policies.List(admin.ListPoliciesRequest(), NO_CONTEXT)).policies) == 0
    for call in (
        policies.Get(admin.GetPolicyRequest(tenant="acme"), NO_CONTEXT),
        policies.Delete(admin.DeletePolicyRequest(tenant="acme"), NO_CONTEXT),
    ):
        with pytest.raises(NotFound):
            await call


async def test_policies_of_unknown_tenants_and_stale_versions_are_refused(policies: PoliciesServicer) -> None:
    with pytest.raises(NotFound):
        await put(policies, tenant="nobody")
    with pytest.raises(RevisionMismatch):
        await put(policies, expected_version=4)
    with pytest.raises(InvalidRequest) as caught:
        await put(policies, yaml="version: 1\nrules:\n  moon: {anywhere: true}")
    assert (caught.value.details["line"], caught.value.details["path"]) == ("3", "rules.moon")


async def test_validate_tells_all_problems_and_stores_nothing(policies: PoliciesServicer) -> None:
    request = admin.ValidatePolicyRequest(yaml="version: 1\nx: 1\nrules: {moon: {anywhere: true}}\ny: 2")
    told = await policies.Validate(request, NO_CONTEXT)
    assert len(told.problems) >= 2
    assert all(p.line and p.message for p in told.problems)
    assert not (await policies.Validate(admin.ValidatePolicyRequest(yaml=YAML), NO_CONTEXT)).problems
    assert not (await policies.List(admin.ListPoliciesRequest(), NO_CONTEXT)).policies


async def test_a_full_disk_is_told_and_changes_nothing(policies: PoliciesServicer, registry: MoodyRegistry) -> None:
    await put(policies)
    registry.trouble = Overloaded("the disk of /x is full")
    with pytest.raises(Overloaded, match="is full"):
        await put(policies, yaml="version: 1")
    registry.trouble = None
    assert (await policies.Get(admin.GetPolicyRequest(tenant="acme"), NO_CONTEXT)).policy.yaml == YAML


async def test_keys_are_issued_listed_and_revoked(
    tenants: TenantsServicer, stores: tuple[PolicyStore, TenantStore]
) -> None:
    issued = [
        await tenants.IssueKey(admin.IssueKeyRequest(tenant="acme", role=role), NO_CONTEXT) for role in ("", "admin")
    ]
    authenticate = stores[1].directory.authenticate
    assert [authenticate(f"Bearer {k.api_key}").role for k in issued] == [AccessRole.TENANT, AccessRole.ADMIN]
    (listed,) = (await tenants.List(admin.ListTenantsRequest(), NO_CONTEXT)).tenants
    assert {k.key_id: (k.role, k.revoked) for k in listed.keys} == {
        issued[0].key_id: ("tenant", False),
        issued[1].key_id: ("admin", False),
    }
    await tenants.RevokeKey(admin.RevokeKeyRequest(key_id=issued[0].key_id), NO_CONTEXT)
    with pytest.raises(Unauthenticated):
        stores[1].directory.authenticate(f"Bearer {issued[0].api_key}")
    (listed,) = (await tenants.List(admin.ListTenantsRequest(), NO_CONTEXT)).tenants
    assert {k.key_id for k in listed.keys if k.revoked} == {issued[0].key_id}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda t: t.Create(admin.CreateTenantRequest(tenant="acme"), NO_CONTEXT), AlreadyExists),
        (lambda t: t.Create(admin.CreateTenantRequest(tenant=""), NO_CONTEXT), InvalidRequest),
        (lambda t: t.Create(admin.CreateTenantRequest(tenant="a/b"), NO_CONTEXT), InvalidRequest),
        (lambda t: t.Create(admin.CreateTenantRequest(tenant="x" * 64), NO_CONTEXT), InvalidRequest),
        (lambda t: t.IssueKey(admin.IssueKeyRequest(tenant="acme", role="king"), NO_CONTEXT), InvalidRequest),
        (lambda t: t.IssueKey(admin.IssueKeyRequest(tenant="nobody"), NO_CONTEXT), NotFound),
        (lambda t: t.IssueKey(admin.IssueKeyRequest(tenant="../x"), NO_CONTEXT), InvalidRequest),
        (lambda t: t.RevokeKey(admin.RevokeKeyRequest(key_id="0"), NO_CONTEXT), NotFound),
    ],
)
async def test_bad_input(tenants: TenantsServicer, call: Any, error: type[MeshError]) -> None:
    with pytest.raises(error):
        await call(tenants)


async def test_what_admins_do_is_written_down_first(
    policies: PoliciesServicer, tenants: TenantsServicer, recorded: Recorded
) -> None:
    await put(policies)
    issued = await tenants.IssueKey(admin.IssueKeyRequest(tenant="acme", role="operator"), NO_CONTEXT)
    await tenants.RevokeKey(admin.RevokeKeyRequest(key_id=issued.key_id), NO_CONTEXT)
    await policies.Delete(admin.DeletePolicyRequest(tenant="acme"), NO_CONTEXT)
    assert [action for action, _ in recorded.actions] == [
        "tenant.create", "policy.put", "key.issue", "key.revoke", "policy.delete",
    ]  # fmt: skip
    assert recorded.actions[2][1] == {"tenant": "acme", "key_id": issued.key_id, "role": "OPERATOR"}
    assert issued.api_key not in str(recorded.actions), "no secret is written down"


async def test_nothing_changes_that_cannot_be_written_down(policies: PoliciesServicer, recorded: Recorded) -> None:
    recorded.error = Overloaded("the disk is full")
    with pytest.raises(Overloaded):
        await put(policies)
    with pytest.raises(NotFound):
        await policies.Get(admin.GetPolicyRequest(tenant="acme"), NO_CONTEXT)


async def test_versions_are_kept_with_who_and_when(policies: PoliciesServicer, recorded: Recorded) -> None:
    await put(policies)
    await put(policies, yaml="version: 1")
    await policies.Delete(admin.DeletePolicyRequest(tenant="acme"), NO_CONTEXT)
    response = await policies.History(admin.PolicyHistoryRequest(tenant="acme"), NO_CONTEXT)
    assert [(p.version, p.yaml, p.deleted) for p in response.policies] == [
        (3, "", True), (2, "version: 1", False), (1, YAML, False),
    ]  # fmt: skip
    assert {p.stored_by for p in response.policies} == {"key-1"}
    assert all(p.stored_unix_s > 0 for p in response.policies)
    with pytest.raises(NotFound):
        await policies.History(admin.PolicyHistoryRequest(tenant="nobody"), NO_CONTEXT)


async def test_old_versions_go_in_the_end(
    policies: PoliciesServicer, stores: tuple[PolicyStore, TenantStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("placement.service.stores.KEPT_VERSIONS", 3)
    for _ in range(6):
        await put(policies)
    assert [p.version for p in await stores[0].history("acme")] == [6, 5, 4, 3]
