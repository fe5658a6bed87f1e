"""What a site needs to serve its own clients while it is cut off: policies, key hashes, salts; kept on disk.

Written whole and atomically, mode 0600, sealed where the box has a state key. A file that cannot be read is not used:
without keys the agent refuses every request (fail closed) until placement pushes a configuration. One that cannot be
kept (full disk) is in force all the same: a revoked key or a stricter policy must not wait for an operator to free
some space.

A placement service that has not heard the registry's news must not take a site back: within one epoch a policy, or the
directory of tenants and keys, that is older than what is in force is left, and so is one that is not told of although
the site still serves its tenant.
"""

from __future__ import annotations

import threading
from pathlib import Path

from google.protobuf.message import DecodeError

from mesh.errors import MeshError, PayloadCorrupt
from mesh.identity.files import write_private
from mesh.identity.principal import AccessRole
from mesh.identity.sealing import Sealer, is_sealed
from mesh.identity.tenants import KeyRecord, TenantDirectory, TenantRecord, role_from_name
from mesh.telemetry.log import get_logger
from mesh.v1 import uplink_pb2
from placement.entry.salts import derive_salt
from placement.policy.book import PolicyBook

log = get_logger(__name__)
_NAME = "site configuration"


class SiteConfig:
    """The configuration in force, as immutable views that are replaced as a whole."""

    def __init__(self, file: Path, sealer: Sealer | None = None) -> None:
        self._file = file
        self._sealer = sealer
        self._message = uplink_pb2.SiteConfig()
        self._taking = threading.Lock()
        self.version = 0
        self.directory = TenantDirectory()
        self.book = PolicyBook()

    def load(self) -> bool:
        """Take what was kept, if anything was. Raises PayloadCorrupt on a damaged file."""
        try:
            self._use(uplink_pb2.SiteConfig.FromString(self._opened(self._file.read_bytes())))
        except FileNotFoundError:
            return False
        except (DecodeError, OSError, MeshError) as exc:
            raise PayloadCorrupt(
                f"{self._file} cannot be read; placement sends a new one", path=str(self._file)
            ) from exc
        return True

    def take(self, message: uplink_pb2.SiteConfig) -> None:
        """A configuration from placement: check it whole, use what is not older, keep it. Blocking. Raises
        MeshError if it is not valid, and then the old one stays in force; one that cannot be written is used and
        logged."""
        with self._taking:  # two placement services may tell at once
            message = newest(self._message, message)
            self._use(message)
            try:
                data = message.SerializeToString(deterministic=True)
                write_private(self._file, data if self._sealer is None else self._sealer.seal(data, _NAME))
            except MeshError as error:
                log.error("site_config_not_kept", reason=error.reason, error=error.message)

    def _opened(self, data: bytes) -> bytes:
        """Raises PayloadCorrupt, where there is a key for what is not sealed too: anybody with the disk could have
        written that."""
        if not is_sealed(data):
            if self._sealer is not None:
                raise PayloadCorrupt("it is not sealed, and there is a state key")
            return data
        if self._sealer is None:
            raise PayloadCorrupt("it is sealed, and no state key is given")
        return self._sealer.open(data, _NAME)

    def forget(self) -> None:
        """This site was revoked: keep nothing of what it was given, here or on disk. Every request is refused from
        now on. Blocking."""
        with self._taking:  # one that is being taken must not come back after this
            self.directory, self.book, self.version = TenantDirectory(), PolicyBook(), 0
            self._message = uplink_pb2.SiteConfig()
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:
                log.error("site_config_not_removed", error=error.strerror or str(error))

    def salt(self, tenant: str, label: str, model: str) -> bytes:
        """Cache namespace of a tenant's data. Raises PolicyDenied for a tenant this site does not serve."""
        return derive_salt(self.directory, tenant, label, model)

    def _use(self, message: uplink_pb2.SiteConfig) -> None:
        try:
            keys = tuple(
                KeyRecord(
                    key_id=key.key_id,
                    tenant=key.tenant,
                    role=role_from_name(key.role) if key.role else AccessRole.TENANT,
                    hash=key.hash,
                    created_unix_s=0,
                )
                for key in message.keys
            )
        except KeyError as exc:
            raise PayloadCorrupt("the site configuration holds a key with an unknown role") from exc
        tenants = tuple(TenantRecord(tenant=salt.tenant, secret=salt.secret) for salt in message.salts)
        book = PolicyBook.of((p.tenant, p.yaml, p.version) for p in message.policies if not p.deleted)
        self.directory, self.book = TenantDirectory(tenants=tenants, keys=keys), book
        self._message, self.version = message, message.version


def newest(have: uplink_pb2.SiteConfig, told: uplink_pb2.SiteConfig) -> uplink_pb2.SiteConfig:
    """What a site that has `have` makes of `told`: the newer of the two in each part, if they are of one epoch."""
    made = uplink_pb2.SiteConfig()
    made.CopyFrom(told)
    if not told.epoch or told.epoch != have.epoch:
        return made
    if told.directory_revision < have.directory_revision:
        log.warning("placement_lags", what="tenants", told=told.directory_revision, have=have.directory_revision)
        for field in ("keys", "salts"):
            made.ClearField(field)
            getattr(made, field).extend(getattr(have, field))
        made.directory_revision = have.directory_revision
    served = {salt.tenant for salt in made.salts}
    policies = {policy.tenant: policy for policy in told.policies}
    for policy in have.policies:
        other = policies.get(policy.tenant)
        if (other is None and policy.tenant in served) or (other is not None and other.version < policy.version):
            log.warning("placement_lags", what="policy", tenant=policy.tenant, have=policy.version)
            policies[policy.tenant] = policy
    kept = [policies[tenant] for tenant in sorted(policies)]
    made.ClearField("policies")
    made.policies.extend(kept)
    return made
