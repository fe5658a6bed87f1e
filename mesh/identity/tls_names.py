"""Names by which a dialling node tells TLS whom it expects.

A grpc.aio client cannot read the server's certificate, but it can say which name that certificate must carry
(grpc.ssl_target_name_override), and the handshake fails otherwise. So each node certificate carries, beside
its place URI, DNS names made from the place; the domain is never resolved:

- one from a hash of the whole place URI: dialling with it proves mesh, role, tier, site, region, jurisdiction
  and node id at once, whatever characters they hold;
- one from a hash of the node id, and one per role: for a dialler whose settings name no more than that (an agent
  that dials placement);
- one for any node of the mesh.

The authority is per mesh, so a name that verifies is of the own mesh. Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from mesh.errors import InvalidRequest
from mesh.identity.place import Place, Role

_DOMAIN = "kvmesh.internal"
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*\.?", re.IGNORECASE | re.ASCII)
_MAX_HOST_CHARS = 253


def name_of_place(place: Place) -> str:
    """The name that only this very place has."""
    return f"{hashlib.sha256(place.uri.encode()).hexdigest()[:40]}.place.{_DOMAIN}"


def name_of_node(node_id: str) -> str:
    """The name that only this node of the mesh has, wherever it is."""
    return f"{hashlib.sha256(node_id.encode()).hexdigest()[:40]}.node.{_DOMAIN}"


def name_of_role(role: Role) -> str:
    """The name that all nodes of a role have."""
    return f"{role.value}.role.{_DOMAIN}"


def name_of_any() -> str:
    """The name that every node has."""
    return f"any.{_DOMAIN}"


def names_of(place: Place) -> tuple[str, str, str, str]:
    """All TLS names of a node at `place`."""
    return name_of_place(place), name_of_node(place.node_id), name_of_role(place.role), name_of_any()


def check_host_names(names: Iterable[str]) -> None:
    """Raise InvalidRequest unless all may be in a certificate beside the names of its place: host names, and none of
    the domain above, which would let one node pass for another."""
    for name in names:
        if len(name) > _MAX_HOST_CHARS or not _HOST.fullmatch(name):
            raise InvalidRequest(f"not a host name: {name[:80]!r}", field="dns_names")
        if f".{name.lower().rstrip('.')}".endswith(f".{_DOMAIN}"):
            raise InvalidRequest(
                f"{name} is a name by which nodes know one another; give the host name of the listener",
                field="dns_names",
            )
