"""Cache namespaces at an entry: derived per tenant, label and model from the tenant's secret. Pure."""

from __future__ import annotations

from mesh.errors import NotFound, PolicyDenied
from mesh.identity.salts import namespace_salt
from mesh.identity.tenants import TenantDirectory


def derive_salt(directory: TenantDirectory, tenant: str, label: str, model: str) -> bytes:
    """The namespace salt from a tenant's secret. Raises PolicyDenied for a tenant that is not in the directory."""
    try:
        record = directory.tenant(tenant)
    except NotFound as exc:
        raise PolicyDenied(f"tenant {tenant} has no cache namespace here", rule="tenant-known") from exc
    return namespace_salt(record.secret, tenant=tenant, label=label, model=model)
