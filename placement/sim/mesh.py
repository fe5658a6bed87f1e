"""Modelled meshes: sites with nodes, and the links between them as matrices of round trips and goodput. Pure.

Sites lie on a plane; a round trip is that of light in fibre along a route half as long again, plus an access link.
Only hubs (sites with core nodes) have a column in the matrices: two other sites meet over the best hub, which is how
two boxes that dial out only meet.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from mesh.errors import InvalidRequest
from mesh.identity.place import Place, Role, Tier
from placement.decide.types import FloatArray
from placement.sim.profiles import PROFILES, NodeProfile

_KM_PER_S = 200_000.0
_DETOUR = 1.5
_JURISDICTIONS = ("DE", "FR", "JP", "US")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimNodeSpec:
    """One node of a mesh. `factor`: how much slower than its profile."""

    place: Place
    profile: NodeProfile
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Links:
    """`rtt_s`, `goodput_bytes_per_s`: [n_sites, n_hubs]. Within a site: `local_rtt_s`, `local_bytes_per_s`."""

    sites: tuple[str, ...]
    hubs: tuple[str, ...]
    rtt_s: FloatArray
    goodput_bytes_per_s: FloatArray
    local_rtt_s: float = 0.0002
    local_bytes_per_s: float = 3.125e9

    def __post_init__(self) -> None:
        shape = (len(self.sites), len(self.hubs))
        if self.rtt_s.shape != shape or self.goodput_bytes_per_s.shape != shape:
            raise InvalidRequest(f"link matrices must be {shape} (sites, hubs)", field="links")
        if not (np.isfinite(self.rtt_s).all() and (self.rtt_s >= 0).all() and (self.goodput_bytes_per_s > 0).all()):
            raise InvalidRequest("link matrices hold round trips of at least 0 and goodput above 0", field="links")

    @cached_property
    def _row(self) -> Mapping[str, int]:
        return {site: i for i, site in enumerate(self.sites)}

    @cached_property
    def _column(self) -> Mapping[str, int]:
        return {hub: i for i, hub in enumerate(self.hubs)}

    def between(self, a: str, b: str) -> tuple[float, float]:
        """(round trip s, goodput bytes/s) between two sites. Raises InvalidRequest for a site it does not know."""
        if a == b:
            return self.local_rtt_s, self.local_bytes_per_s
        try:
            row_a, row_b = self._row[a], self._row[b]
        except KeyError as exc:
            raise InvalidRequest(f"no such site: {exc}", field="links") from exc
        for row, hub in ((row_a, self._column.get(b)), (row_b, self._column.get(a))):
            if hub is not None:
                return float(self.rtt_s[row, hub]), float(self.goodput_bytes_per_s[row, hub])
        over = self.rtt_s[row_a] + self.rtt_s[row_b]
        hub = int(np.argmin(over))
        return float(over[hub]), float(min(self.goodput_bytes_per_s[row_a, hub], self.goodput_bytes_per_s[row_b, hub]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimMesh:
    """Nodes and links. `entries`: the sites where requests enter, by session."""

    name: str
    nodes: tuple[SimNodeSpec, ...]
    links: Links
    entries: tuple[str, ...]

    def entry_of(self, session: int) -> str:
        """The site where a conversation enters; the same for all its requests."""
        return self.entries[(session * 2_654_435_761 % 2**32) * len(self.entries) >> 32]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """`hubs` sites with `per_hub` core nodes each, `sites` remote ones with `per_site` edge nodes each. Requests enter
    at remote sites, or at the first hub if there are none."""

    name: str
    hubs: int
    per_hub: int
    core: str
    sites: int = 0
    per_site: int = 1
    edge: str = "a10g"
    radius_km: float = 500.0
    spread: float = 0.1  # sigma of the logarithm of nodes' own speeds
    edge_bytes_per_s: float = 1.25e8


MESHES: Mapping[str, MeshSpec] = MappingProxyType(
    {
        m.name: m
        for m in (
            MeshSpec(name="rack", hubs=1, per_hub=4, core="a100"),
            MeshSpec(name="cluster", hubs=1, per_hub=8, core="a100"),
            MeshSpec(name="regional", hubs=2, per_hub=2, core="h100", sites=8),
            MeshSpec(name="national", hubs=4, per_hub=4, core="h100", sites=96, radius_km=1000.0),
            MeshSpec(name="world", hubs=20, per_hub=3, core="h100", sites=4380, radius_km=8000.0),
        )
    }
)
"""From 4 nodes to 4,400 sites."""


def mesh_spec(name: str) -> MeshSpec:
    """Raises InvalidRequest with the names that there are."""
    if name not in MESHES:
        raise InvalidRequest(f"no mesh {name[:64]!r}; there are {', '.join(MESHES)}", field="mesh")
    return MESHES[name]


def make_mesh(spec: MeshSpec, *, seed: int = 1) -> SimMesh:
    """The mesh of a spec; the same for the same seed."""
    rng = random.Random(seed)
    hubs = [f"dc{i + 1}" for i in range(spec.hubs)]
    remote = [f"site-{i + 1:04d}" for i in range(spec.sites)]
    at = {site: _spot(rng, spec.radius_km) for site in (*hubs, *remote)}
    nodes = [_node(f"core-{h}-{i + 1}", Tier.CORE, h, spec.core, spec, rng) for h in hubs for i in range(spec.per_hub)]
    nodes += [
        _node(f"edge-{s}-{i + 1}", Tier.EDGE, s, spec.edge, spec, rng) for s in remote for i in range(spec.per_site)
    ]
    return SimMesh(
        name=spec.name,
        nodes=tuple(nodes),
        links=_links((*hubs, *remote), hubs, at, spec, rng),
        entries=tuple(remote or hubs[:1]),
    )


def _spot(rng: random.Random, radius_km: float) -> tuple[float, float]:
    angle, far = rng.uniform(0, 2 * math.pi), radius_km * math.sqrt(rng.random())
    return far * math.cos(angle), far * math.sin(angle)


def _node(name: str, tier: Tier, site: str, profile: str, spec: MeshSpec, rng: random.Random) -> SimNodeSpec:
    place = Place(
        mesh="sim", role=Role(tier.value), tier=tier, site=site, region="sim",
        jurisdiction=_JURISDICTIONS[sum(site.encode()) % len(_JURISDICTIONS)], node_id=name,
    )  # fmt: skip
    return SimNodeSpec(place=place, profile=PROFILES[profile], factor=math.exp(rng.gauss(0.0, spec.spread)))


def _links(
    sites: Sequence[str],
    hubs: Sequence[str],
    at: Mapping[str, tuple[float, float]],
    spec: MeshSpec,
    rng: random.Random,
) -> Links:
    rtt_s, goodput = np.zeros((len(sites), len(hubs))), np.zeros((len(sites), len(hubs)))
    for i, site in enumerate(sites):
        is_hub = i < len(hubs)
        access_s = 0.0005 if is_hub else rng.uniform(0.002, 0.015)
        bytes_per_s = 1.25e9 if is_hub else spec.edge_bytes_per_s * math.exp(rng.gauss(0.0, 0.5))
        for j, hub in enumerate(hubs):
            far_km = math.dist(at[site], at[hub])
            rtt_s[i, j] = access_s + 2 * _DETOUR * far_km / _KM_PER_S
            goodput[i, j] = bytes_per_s
    return Links(sites=tuple(sites), hubs=tuple(hubs), rtt_s=rtt_s, goodput_bytes_per_s=goodput)
