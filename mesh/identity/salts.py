"""Cache namespaces: the salt under which a tenant's KV blocks are hashed.

Blocks of two tenants, of two labels, or of two models never meet in a cache, since their hash chains start from
different salts. The salt is derived at the entry from the tenant's secret and never comes from the caller, so
nobody can aim at, or probe, another's namespace. Pure.
"""

from __future__ import annotations

import hashlib
import hmac

SALT_BYTES = 32
_DOMAIN = b"kvmesh cache namespace 1"


def namespace_salt(secret: bytes, *, tenant: str, label: str, model: str) -> bytes:
    """HMAC-SHA256 by the tenant's secret over its name, the label and the model, each with its length in front,
    so that no two triples read alike. 32 bytes."""
    mac = hmac.new(secret, _DOMAIN, hashlib.sha256)
    for part in (tenant, label, model):
        raw = part.encode()
        mac.update(len(raw).to_bytes(4, "big") + raw)
    return mac.digest()
