"""What each attached site is told, and no more: pushed whole at each change.

Keys' hashes and secrets of the tenants that the site's own entry serves; policies of these, and of tenants whose
policy lets data of a request that entered elsewhere be there, since the site's border has to check it. The salt of
such a request comes with it.
"""

from __future__ import annotations

from functools import cache

from mesh.identity.place import Place
from mesh.rpc.uplink.hub import UplinkHub
from mesh.v1 import admin_pb2, uplink_pb2
from placement.policy.book import PolicyBook
from placement.policy.model import DataKind
from placement.service.stores import PolicyStore, StoredPolicy, TenantStore


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
            version, (policies, tenants) = self._version, self._stores
            stored, book, directory = policies.stored, policies.book, tenants.directory

            @cache
            def config_for(place: Place) -> uplink_pb2.SiteConfig:
                here = directory.at_site(place.site)
                served = {t.tenant for t in here.tenants}
                wanted = [p for p in stored if p.tenant in served or may_be_at(book, p.tenant, place)]
                return uplink_pb2.SiteConfig(
                    version=version,
                    policies=map(_policy, wanted),
                    keys=[
                        uplink_pb2.TenantKeyHash(
                            key_id=k.key_id, tenant=k.tenant, role=k.role.name.lower(), hash=k.hash
                        )
                        for k in here.keys
                    ],
                    salts=[uplink_pb2.TenantSalt(tenant=t.tenant, secret=t.secret) for t in here.tenants],
                    epoch=directory.epoch,
                    directory_revision=directory.revision,
                )

            self._hub.push_config(config_for)


def may_be_at(book: PolicyBook, tenant: str, place: Place) -> bool:
    """Whether the tenant's policy lets any data of a request that entered at another site be at `place`."""
    policy = book.lookup(tenant).policy
    return any(
        policy.allows(label, place, entry_site="", kind=kind) is not None
        for label in policy.labels.names
        for kind in DataKind
    )


def _policy(stored: StoredPolicy) -> admin_pb2.StoredPolicy:
    """One that was deleted is told too: the site must know that what it has is over."""
    return admin_pb2.StoredPolicy(
        tenant=stored.tenant, yaml=stored.yaml or "", version=stored.version, deleted=stored.yaml is None
    )
