"""What each attached site is told: policies, key hashes and tenants' secrets; pushed whole at each change.

First form: every site gets every tenant that exists. Narrowing it to the tenants of a site needs a list of those,
which a later release brings.
"""

from __future__ import annotations

from mesh.rpc.uplink.hub import UplinkHub
from mesh.v1 import admin_pb2, uplink_pb2
from placement.service.stores import PolicyStore, TenantStore


class SiteConfigSource:
    """Pushes a new configuration to all sites whenever a store says `changed`."""

    def __init__(self) -> None:
        self._version = 0
        self._hub: UplinkHub | None = None
        self._stores: tuple[PolicyStore, TenantStore] | None = None

    def attach(self, hub: UplinkHub, policies: PolicyStore, tenants: TenantStore) -> None:
        """From now on there is somebody to tell."""
        self._hub, self._stores = hub, (policies, tenants)
        self.changed()

    def changed(self) -> None:
        """Policies or tenants changed."""
        self._version += 1
        if self._hub is not None and self._stores is not None:
            message = _message(self._version, *self._stores)
            self._hub.push_config(lambda _place: message)


def _message(version: int, policies: PolicyStore, tenants: TenantStore) -> uplink_pb2.SiteConfig:
    directory = tenants.directory
    return uplink_pb2.SiteConfig(
        version=version,
        policies=[
            admin_pb2.StoredPolicy(tenant=p.tenant, yaml=p.yaml, version=p.version)
            for p in policies.stored
            if p.yaml is not None
        ],
        keys=[
            uplink_pb2.TenantKeyHash(key_id=k.key_id, tenant=k.tenant, role=k.role.name.lower(), hash=k.hash)
            for k in directory.keys
            if not k.revoked
        ],
        salts=[uplink_pb2.TenantSalt(tenant=t.tenant, secret=t.secret) for t in directory.tenants],
    )
