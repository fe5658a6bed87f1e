"""The admin face of the placement service: mesh.v1.Policies and mesh.v1.Tenants. Roles are the interceptor's."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc.aio

from mesh.errors import InvalidRequest
from mesh.identity.place import Place, check_name
from mesh.identity.principal import AccessRole
from mesh.identity.tenants import TenantDirectory, checked_sites, issue_key, new_tenant, role_from_name
from mesh.telemetry.log import get_logger
from mesh.v1 import admin_pb2 as admin
from mesh.v1 import admin_pb2_grpc as admin_grpc
from placement.policy.model import Problem, check_meaning, check_policy
from placement.service.stores import PolicyStore, StoredPolicy, TenantStore

log = get_logger(__name__)

RecordAdmin = Callable[[str, dict[str, str]], Awaitable[str]]
"""Keeps in the audit log what is about to be changed, and who asked; the change waits for it. Returns the
id of the key that asked; raises MeshError if it cannot be kept, and then nothing is changed."""


class PoliciesServicer(admin_grpc.PoliciesServicer):
    """Policies per tenant."""

    def __init__(
        self,
        store: PolicyStore,
        tenants: TenantStore,
        record: RecordAdmin,
        places: Callable[[], Sequence[Place]] = tuple,
    ) -> None:
        """`places`: of the mesh's engines, up or down; none: warnings say nothing of what fits where."""
        self._store = store
        self._tenants = tenants
        self._record = record
        self._places = places

    async def Put(self, request: admin.PutPolicyRequest, context: grpc.aio.ServicerContext) -> admin.PutPolicyResponse:
        self._tenants.directory.tenant(request.tenant)
        expected = request.expected_version if request.HasField("expected_version") else None
        digest = hashlib.sha256(request.yaml.encode()).hexdigest()
        by = await self._record("policy.put", {"tenant": request.tenant, "sha256": digest})
        version = await self._store.put(request.tenant, request.yaml, expected, by=by)
        log.info("policy_stored", tenant=request.tenant, version=version)
        return admin.PutPolicyResponse(version=version)

    async def Get(self, request: admin.GetPolicyRequest, context: grpc.aio.ServicerContext) -> admin.GetPolicyResponse:
        return admin.GetPolicyResponse(policy=_to_wire(self._store.get(request.tenant)))

    async def List(
        self, request: admin.ListPoliciesRequest, context: grpc.aio.ServicerContext
    ) -> admin.ListPoliciesResponse:
        kept = [s for s in self._store.stored if s.yaml is not None]
        return admin.ListPoliciesResponse(policies=[_to_wire(s) for s in kept])

    async def Delete(
        self, request: admin.DeletePolicyRequest, context: grpc.aio.ServicerContext
    ) -> admin.DeletePolicyResponse:
        by = await self._record("policy.delete", {"tenant": request.tenant[:64]})
        await self._store.delete(request.tenant, by=by)
        log.info("policy_deleted", tenant=request.tenant)
        return admin.DeletePolicyResponse()

    async def Validate(
        self, request: admin.ValidatePolicyRequest, context: grpc.aio.ServicerContext
    ) -> admin.ValidatePolicyResponse:
        problems = await asyncio.to_thread(check_policy, request.yaml)
        meaning = () if problems else await asyncio.to_thread(check_meaning, request.yaml, tuple(self._places()))
        return admin.ValidatePolicyResponse(
            problems=map(_problem_to_wire, problems), warnings=map(_problem_to_wire, meaning)
        )

    async def History(
        self, request: admin.PolicyHistoryRequest, context: grpc.aio.ServicerContext
    ) -> admin.PolicyHistoryResponse:
        self._tenants.directory.tenant(request.tenant)
        return admin.PolicyHistoryResponse(policies=map(_to_wire, await self._store.history(request.tenant)))


class TenantsServicer(admin_grpc.TenantsServicer):
    """Tenants and their keys."""

    def __init__(self, store: TenantStore, record: RecordAdmin) -> None:
        self._store = store
        self._record = record

    async def Create(
        self, request: admin.CreateTenantRequest, context: grpc.aio.ServicerContext
    ) -> admin.CreateTenantResponse:
        tenant = new_tenant(request.tenant, request.sites)
        await self._record("tenant.create", {"tenant": request.tenant, "sites": " ".join(tenant.sites)})
        await self._store.change(lambda directory: directory.with_tenant(tenant))
        log.info("tenant_created", tenant=request.tenant)
        return admin.CreateTenantResponse()

    async def List(
        self, request: admin.ListTenantsRequest, context: grpc.aio.ServicerContext
    ) -> admin.ListTenantsResponse:
        directory = self._store.directory
        return admin.ListTenantsResponse(tenants=[_tenant(directory, t.tenant) for t in directory.tenants])

    async def SetSites(
        self, request: admin.SetTenantSitesRequest, context: grpc.aio.ServicerContext
    ) -> admin.SetTenantSitesResponse:
        sites = checked_sites(request.sites)
        self._store.directory.tenant(request.tenant)
        await self._record("tenant.sites", {"tenant": request.tenant, "sites": " ".join(sites)})
        await self._store.change(lambda directory: directory.with_sites(request.tenant, sites))
        log.info("tenant_sites_set", tenant=request.tenant, sites=len(sites))
        return admin.SetTenantSitesResponse()

    async def IssueKey(
        self, request: admin.IssueKeyRequest, context: grpc.aio.ServicerContext
    ) -> admin.IssueKeyResponse:
        check_name("tenant", request.tenant)
        try:
            role = role_from_name(request.role) if request.role else AccessRole.TENANT
        except KeyError:
            raise InvalidRequest(
                f"role is tenant, operator or admin, got {request.role[:40]!r}", field="role"
            ) from None
        api_key, record = issue_key(request.tenant, role, created_unix_s=int(time.time()))
        facts = {"tenant": request.tenant, "key_id": record.key_id, "role": role.name}
        await self._record("key.issue", facts)
        await self._store.change(lambda directory: directory.with_key(record))
        log.info("key_issued", tenant=request.tenant, key_id=record.key_id, role=role.name)
        return admin.IssueKeyResponse(key_id=record.key_id, api_key=api_key)

    async def RevokeKey(
        self, request: admin.RevokeKeyRequest, context: grpc.aio.ServicerContext
    ) -> admin.RevokeKeyResponse:
        await self._record("key.revoke", {"key_id": request.key_id[:64]})
        await self._store.change(lambda directory: directory.with_revoked(request.key_id))
        log.info("key_revoked", key_id=request.key_id)
        return admin.RevokeKeyResponse()


def _problem_to_wire(problem: Problem) -> admin.PolicyProblem:
    return admin.PolicyProblem(line=problem.line, column=problem.column, path=problem.path, message=problem.message)


def _to_wire(stored: StoredPolicy) -> admin.StoredPolicy:
    return admin.StoredPolicy(
        tenant=stored.tenant,
        yaml=stored.yaml or "",
        version=stored.version,
        stored_unix_s=stored.stored_unix_s,
        stored_by=stored.stored_by,
        deleted=stored.yaml is None,
    )


def _tenant(directory: TenantDirectory, tenant: str) -> admin.Tenant:
    keys = [
        admin.KeyInfo(
            key_id=key.key_id, role=key.role.name.lower(), created_unix_s=key.created_unix_s, revoked=key.revoked
        )
        for key in directory.keys_of(tenant)
    ]
    return admin.Tenant(tenant=tenant, keys=keys, sites=directory.tenant(tenant).sites)
