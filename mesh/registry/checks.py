"""What a registry accepts, the same for every implementation. Pure.

The limits are Consul's (64 pairs of meta, 128 and 512 bytes, values under 512 KiB), so that a mesh can change from
the embedded registry to Consul without a name or a policy that no longer fits.
"""

from __future__ import annotations

import re

from mesh.address import HostPort
from mesh.errors import InvalidRequest
from mesh.identity.place import check_name
from mesh.registry.types import MAX_VALUE_BYTES, Registration

MAX_META_PAIRS = 64
MAX_META_VALUE_BYTES = 512
MAX_KEY_CHARS = 256
MIN_TTL_S, MAX_TTL_S = 0.1, 86_400.0

_META_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")
_RESERVED = "consul-"
# No empty, "." or ".." parts: a key is a part of a URL in Consul.
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*")


def check_registration(registration: Registration) -> None:
    """Raises InvalidRequest, naming the field."""
    check_name("node_id", registration.node_id)
    for field in ("address", "health_address"):
        if getattr(registration, field):
            HostPort.parse(getattr(registration, field))
    if not MIN_TTL_S <= registration.ttl_s <= MAX_TTL_S:
        raise InvalidRequest(f"ttl_s is from {MIN_TTL_S} to {MAX_TTL_S:g}, got {registration.ttl_s}", field="ttl_s")
    if len(registration.meta) > MAX_META_PAIRS:
        raise InvalidRequest(f"meta has {len(registration.meta)} pairs; at most {MAX_META_PAIRS}", field="meta")
    for key, value in registration.meta.items():
        if not _META_KEY.fullmatch(key) or key.startswith(_RESERVED):
            raise InvalidRequest(
                f"a meta key is 1 to 128 letters, digits, '_' or '-' and does not start with {_RESERVED!r}; "
                f"got {key[:140]!r}",
                field="meta",
            )
        size_bytes = len(value.encode())
        if size_bytes > MAX_META_VALUE_BYTES:
            raise InvalidRequest(
                f"meta {key!r} has {size_bytes} bytes; at most {MAX_META_VALUE_BYTES}",
                field="meta",
            )


def check_key(key: str) -> None:
    """Raises InvalidRequest unless `key` may name a value."""
    if len(key) > MAX_KEY_CHARS or not _KEY.fullmatch(key):
        raise InvalidRequest(
            f"a key is at most {MAX_KEY_CHARS} letters, digits, '.', '_', '-', in parts divided by '/'; "
            f"got {key[:300]!r}",
            field="key",
        )


def check_prefix(prefix: str) -> None:
    """Raises InvalidRequest unless `prefix` may be the start of a key."""
    if len(prefix) > MAX_KEY_CHARS or ".." in prefix or not _PREFIX.fullmatch(prefix) or prefix.startswith("/"):
        raise InvalidRequest(f"not the start of a key: {prefix[:300]!r}", field="prefix")


def check_value(key: str, value: bytes) -> None:
    """Raises InvalidRequest over MAX_VALUE_BYTES."""
    if len(value) > MAX_VALUE_BYTES:
        raise InvalidRequest(
            f"the value of {key!r} has {len(value)} bytes; at most {MAX_VALUE_BYTES}", field="value", key=key
        )
