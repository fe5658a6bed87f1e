"""API keys and the tenants that they belong to.

A key is `kvm_<key_id>_<secret>`: the id is public (logs, revocation), the secret 256 random bits that are shown
once and stored only as a hash. The hash is one BLAKE2b, salted by the key id. A slow password hash would buy
nothing: it protects secrets that people choose, and 256 random bits can't be guessed at any speed, while every
request has to be checked, on small boxes too. The salt keeps equal secrets from looking equal and ties a hash
to its id.

A TenantDirectory is an immutable snapshot: changes make a new one, whoever authenticates holds a whole one.
Pure but for the random source of new keys; the clock comes in as an argument.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from mesh.errors import AlreadyExists, InvalidRequest, MeshError, NotFound, PayloadCorrupt, Unauthenticated
from mesh.identity.place import check_name
from mesh.identity.principal import AccessRole, Principal

SECRET_BYTES = 32
HASH_BYTES = 32
FORMAT = 1
EVERY_SITE = ("*",)
MAX_SITES = 1_000

_KEY = re.compile(r"kvm_(?P<key_id>[0-9a-f]{16})_(?P<secret>[A-Za-z0-9_-]{43})")
_BEARER = re.compile(r"Bearer +(?P<key>[!-~]{1,256})", re.IGNORECASE)
_REFUSED = "no valid API key; send 'authorization: Bearer kvm_...'"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """An API key without its secret. Revoked keys stay, so that an old log line can still be explained."""

    key_id: str
    tenant: str
    role: AccessRole
    hash: bytes
    created_unix_s: int
    revoked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRecord:
    """A tenant and its secret of 32 random bytes, from which cache namespaces are derived (mesh.identity.salts).
    `sites`: those whose entries serve it, or EVERY_SITE; a site is told of no other tenant's keys and secret."""

    tenant: str
    secret: bytes = field(repr=False)
    sites: tuple[str, ...] = ()

    def is_served_at(self, site: str) -> bool:
        """Whether the site's own entry may take this tenant's requests."""
        return site in self.sites or self.sites == EVERY_SITE


def new_tenant(tenant: str, sites: Iterable[str] = ()) -> TenantRecord:
    """A tenant with a fresh secret. Raises InvalidRequest on a bad name."""
    check_name("tenant", tenant)
    return TenantRecord(tenant=tenant, secret=secrets.token_bytes(SECRET_BYTES), sites=checked_sites(sites))


def checked_sites(sites: Iterable[str]) -> tuple[str, ...]:
    """Sorted, each once; "*" stands alone. Raises InvalidRequest on a bad name or too many."""
    names = tuple(sorted(set(sites)))
    if names == EVERY_SITE:
        return names
    if len(names) > MAX_SITES:
        raise InvalidRequest(f"{len(names)} sites, at most {MAX_SITES}: use '*' for every site", field="sites")
    for name in names:
        check_name("sites", name)
    return names


def issue_key(tenant: str, role: AccessRole, *, created_unix_s: int) -> tuple[str, KeyRecord]:
    """A fresh key: the text to hand over, once, and the record to keep."""
    key_id = secrets.token_hex(8)
    secret = secrets.token_urlsafe(SECRET_BYTES)
    record = KeyRecord(
        key_id=key_id, tenant=tenant, role=role, hash=hash_secret(key_id, secret), created_unix_s=created_unix_s
    )
    return f"kvm_{key_id}_{secret}", record


def hash_secret(key_id: str, secret: str) -> bytes:
    """The stored hash of a key's secret, 32 bytes."""
    return hashlib.blake2b(
        secret.encode(), digest_size=HASH_BYTES, salt=key_id.encode()[:16], person=b"kvmesh-api-key"
    ).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantDirectory:
    """All tenants and keys at one moment (at an edge: those that its site needs). Sorted by name and id.

    `revision` counts the changes within one `epoch`; a directory that was restored from a backup has a new epoch, so
    that nobody takes it for an old one."""

    tenants: tuple[TenantRecord, ...] = ()
    keys: tuple[KeyRecord, ...] = ()
    epoch: str = ""
    revision: int = 0
    _tenants: dict[str, TenantRecord] = field(init=False, repr=False, compare=False)
    _keys: dict[str, KeyRecord] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {tenant.tenant: tenant for tenant in self.tenants}
        by_id = {key.key_id: key for key in self.keys}
        object.__setattr__(self, "tenants", tuple(by_name[name] for name in sorted(by_name)))
        object.__setattr__(self, "keys", tuple(by_id[key_id] for key_id in sorted(by_id)))
        object.__setattr__(self, "_tenants", by_name)
        object.__setattr__(self, "_keys", by_id)

    def authenticate(self, authorization: str | None) -> Principal:
        """The principal behind an `authorization` header. Raises Unauthenticated, with the same words and after
        the same work whatever was wrong, so that the answer does not tell which key ids exist."""
        bearer = _BEARER.fullmatch(authorization or "")
        match = _KEY.fullmatch(bearer["key"]) if bearer else None
        if match is None:
            raise Unauthenticated(_REFUSED)
        record = self._keys.get(match["key_id"])
        expected = record.hash if record else bytes(HASH_BYTES)
        same = hmac.compare_digest(hash_secret(match["key_id"], match["secret"]), expected)
        if record is None or not same or record.revoked or record.tenant not in self._tenants:
            raise Unauthenticated(_REFUSED)
        return Principal(tenant=record.tenant, role=record.role, key_id=record.key_id)

    def tenant(self, tenant: str) -> TenantRecord:
        """Raises NotFound."""
        found = self._tenants.get(tenant)
        if found is None:
            raise NotFound(f"there is no tenant {tenant!r}", tenant=tenant)
        return found

    def keys_of(self, tenant: str) -> tuple[KeyRecord, ...]:
        """A tenant's keys, revoked ones too."""
        return tuple(key for key in self.keys if key.tenant == tenant)

    def with_tenant(self, record: TenantRecord) -> TenantDirectory:
        """Raises AlreadyExists: a second secret would orphan every cache namespace of the first."""
        if record.tenant in self._tenants:
            raise AlreadyExists(f"tenant {record.tenant!r} exists already", tenant=record.tenant)
        return replace(self, tenants=(*self.tenants, record))

    def with_key(self, record: KeyRecord) -> TenantDirectory:
        """Raises NotFound for an unknown tenant, AlreadyExists for a known key id."""
        self.tenant(record.tenant)
        if record.key_id in self._keys:
            raise AlreadyExists(f"key {record.key_id} exists already", key_id=record.key_id)
        return replace(self, keys=(*self.keys, record))

    def with_sites(self, tenant: str, sites: Iterable[str]) -> TenantDirectory:
        """The tenant is served at these sites from now on. Raises NotFound, InvalidRequest."""
        record = replace(self.tenant(tenant), sites=checked_sites(sites))
        return replace(self, tenants=(*(t for t in self.tenants if t.tenant != tenant), record))

    def at_site(self, site: str) -> TenantDirectory:
        """What the site's own entry needs: its tenants, and their keys that are not revoked."""
        tenants = tuple(t for t in self.tenants if t.is_served_at(site))
        names = {t.tenant for t in tenants}
        keys = tuple(k for k in self.keys if k.tenant in names and not k.revoked)
        return replace(self, tenants=tenants, keys=keys)

    def with_revoked(self, key_id: str) -> TenantDirectory:
        """Revoke a key; again is fine. Raises NotFound."""
        record = self._keys.get(key_id)
        if record is None:
            raise NotFound(f"there is no key {key_id!r}", key_id=key_id)
        return replace(self, keys=(*self.keys, replace(record, revoked=True)))

    def to_json(self) -> bytes:
        """For the registry's value store. Holds tenants' secrets and keys' hashes: not for everybody."""
        document = {
            "format": FORMAT,
            "epoch": self.epoch,
            "revision": self.revision,
            "tenants": [{"tenant": t.tenant, "secret": _b64(t.secret), "sites": list(t.sites)} for t in self.tenants],
            "keys": [
                {
                    "key_id": k.key_id,
                    "tenant": k.tenant,
                    "role": k.role.name.lower(),
                    "hash": _b64(k.hash),
                    "created_unix_s": k.created_unix_s,
                    "revoked": k.revoked,
                }
                for k in self.keys
            ],
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> TenantDirectory:
        """Read what `to_json` wrote. Raises PayloadCorrupt on anything else; never a directory with gaps."""
        try:
            document = json.loads(raw)
            if document["format"] != FORMAT:
                raise PayloadCorrupt(f"the tenant directory has format {document['format']!r}, not {FORMAT}")
            return cls(
                tenants=tuple(_tenant_from(item) for item in document["tenants"]),
                keys=tuple(_key_from(item) for item in document["keys"]),
                epoch=str(document.get("epoch", "")),
                revision=int(document.get("revision", 0)),
            )
        except PayloadCorrupt:
            raise
        except (ValueError, KeyError, TypeError, RecursionError, MeshError) as error:
            # The cause may quote the document, which holds secrets: its type has to do.
            raise PayloadCorrupt(f"the tenant directory cannot be read ({type(error).__name__})") from None


def role_from_name(name: str) -> AccessRole:
    """ "tenant", "operator" or "admin". Raises KeyError."""
    return {role.name.lower(): role for role in AccessRole}[name]


def _tenant_from(item: dict[str, Any]) -> TenantRecord:
    check_name("tenant", item["tenant"])
    sites = checked_sites(map(str, item.get("sites", EVERY_SITE)))  # before there was a list, every site served all
    return TenantRecord(tenant=item["tenant"], secret=_unb64(item["secret"], SECRET_BYTES), sites=sites)


def _key_from(item: dict[str, Any]) -> KeyRecord:
    check_name("tenant", item["tenant"])
    if not isinstance(item["revoked"], bool) or not isinstance(item["created_unix_s"], int):
        raise TypeError("a key's fields are of another type")
    return KeyRecord(
        key_id=str(item["key_id"]),
        tenant=item["tenant"],
        role=role_from_name(item["role"]),
        hash=_unb64(item["hash"], HASH_BYTES),
        created_unix_s=item["created_unix_s"],
        revoked=item["revoked"],
    )


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _unb64(text: str, size_bytes: int) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error
    if len(raw) != size_bytes:
        raise ValueError("of another size")
    return raw
