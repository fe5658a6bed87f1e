"""Continuations: what a finished request hands out so that the next turn of its conversation keeps its label. Pure.

A continuation is a short text that says "made of data with this label", with a keyed hash of the tenant's cache
namespace of that label, so that nobody can forge one or lower what it says. It holds no state of the entry: it is good
at every entry of the mesh, is never forgotten, and has nothing to do with what is cached.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable

from mesh.errors import InvalidRequest

MAX_CHARS = 1_024
_DOMAIN = b"kvmesh continuation 1\0"
_PREFIX = "kmc1."
Salt = Callable[[str, str, str], bytes]
"""(tenant, label, model) -> the namespace's salt; raises PolicyDenied for a tenant without one."""


def issue(salt: Salt, *, tenant: str, label: str, model: str) -> str:
    """For a request that was answered under this label."""
    body = json.dumps({"tenant": tenant, "label": label, "model": model}, separators=(",", ":")).encode()
    return _PREFIX + base64.urlsafe_b64encode(_tag(salt(tenant, label, model), body) + body).decode()


def label_of(salt: Salt, continuation: str, *, tenant: str) -> str:
    """The label it says. Raises InvalidRequest unless it was issued by this mesh to this tenant, unchanged."""
    wrong = InvalidRequest(
        "`continues` takes the `continuation` of an earlier answer to this tenant, unchanged", field="continues"
    )
    if len(continuation) > MAX_CHARS or not continuation.startswith(_PREFIX):
        raise wrong
    try:
        raw = base64.b64decode(continuation.removeprefix(_PREFIX), altchars=b"-_", validate=True)
        told = json.loads(raw[32:])
        label, model = told["label"], told["model"]
        if told["tenant"] != tenant or not (isinstance(label, str) and isinstance(model, str)):
            raise wrong
        right = _tag(salt(tenant, label, model), raw[32:])
    except (ValueError, KeyError, TypeError, RecursionError):  # half a surrogate is a ValueError of the salt
        raise wrong from None
    if not hmac.compare_digest(raw[:32], right):
        raise wrong
    return label


def _tag(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, _DOMAIN + body, hashlib.sha256).digest()
