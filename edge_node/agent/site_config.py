"""What a site needs to serve its own clients while it is cut off: policies, key hashes, salts; kept on disk.

Written whole and atomically, mode 0600; a file that cannot be read is said so and not used: without policies the
agent refuses every request (fail closed) until placement pushes them.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import DecodeError

from mesh.errors import PayloadCorrupt
from mesh.identity.files import write_private
from mesh.identity.principal import AccessRole
from mesh.identity.tenants import KeyRecord, TenantDirectory, TenantRecord, role_from_name
from mesh.v1 import uplink_pb2
from placement.entry.salts import derive_salt
from placement.policy.book import PolicyBook


class SiteConfig:
    """The configuration in force, as immutable views that are replaced as a whole."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.version = 0
        self.directory = TenantDirectory()
        self.book = PolicyBook()

    def load(self) -> bool:
        """Take what was kept, if anything was. Raises PayloadCorrupt on a damaged file."""
        if not self._file.exists():
            return False
        try:
            message = uplink_pb2.SiteConfig.FromString(self._file.read_bytes())
        except (DecodeError, OSError) as exc:
            raise PayloadCorrupt(f"{self._file} cannot be read: remove it, placement sends a new one") from exc
        self._use(message)
        return True

    def take(self, message: uplink_pb2.SiteConfig) -> None:
        """A newer configuration from placement: check it whole, keep it, then use it. Raises MeshError, and
        then the old one stays in force."""
        self._use(message)
        write_private(self._file, message.SerializeToString(deterministic=True))

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
        book = PolicyBook.of((p.tenant, p.yaml, p.version) for p in message.policies)
        self.directory, self.book = TenantDirectory(tenants=tenants, keys=keys), book
        self.version = message.version
