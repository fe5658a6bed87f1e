"""Where a node is, as its certificate says it.

A node's place is never what it says of itself: it is the SPIFFE-style URI in the SAN of its certificate,
`spiffe://MESH/ROLE/tier/TIER/site/SITE/region/REGION/jurisdiction/J/node/NODE`. Pure; no I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from mesh.errors import InvalidRequest

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?", re.IGNORECASE)
_URI = re.compile(
    r"spiffe://(?P<mesh>[^/]+)/(?P<role>[^/]+)/tier/(?P<tier>[^/]+)/site/(?P<site>[^/]+)"
    r"/region/(?P<region>[^/]+)/jurisdiction/(?P<jurisdiction>[^/]+)/node/(?P<node_id>[^/]+)"
)


def check_name(field: str, name: str) -> None:
    """Raise InvalidRequest unless `name` may be the name of a mesh, site, node, tenant ..."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{field} must be 1 to 63 letters, digits, '.', '_' or '-', got {name!r}", field=field)


class Tier(Enum):
    """Tier of a node. A regional `metro` tier is a core with a region."""

    CORE = "core"
    EDGE = "edge"


class Role(Enum):
    """What a node is allowed to do on the node listener."""

    PLACEMENT = "placement"
    CORE = "core"
    EDGE = "edge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One node's identity and place. Names are 1 to 63 of [A-Za-z0-9._-], starting and ending alphanumeric."""

    mesh: str
    role: Role
    tier: Tier
    site: str
    region: str
    jurisdiction: str
    node_id: str

    def __post_init__(self) -> None:
        for field in ("mesh", "site", "region", "jurisdiction", "node_id"):
            check_name(field, getattr(self, field))

    @property
    def uri(self) -> str:
        """The SAN URI of this place."""
        return (
            f"spiffe://{self.mesh}/{self.role.value}/tier/{self.tier.value}/site/{self.site}"
            f"/region/{self.region}/jurisdiction/{self.jurisdiction}/node/{self.node_id}"
        )

    @classmethod
    def from_uri(cls, uri: str) -> Place:
        """Parse a SAN URI. Raises InvalidRequest if it is not one of ours."""
        match = _URI.fullmatch(uri)
        if match is None:
            raise InvalidRequest("the certificate's SAN URI is not a kvmesh place", field="san")
        fields = match.groupdict()
        try:
            role, tier = Role(fields.pop("role")), Tier(fields.pop("tier"))
        except ValueError as exc:
            raise InvalidRequest(f"the certificate's SAN URI names an unknown role or tier: {exc}") from exc
        return cls(role=role, tier=tier, **fields)
