"""What a local mesh consists of: which processes, where they are said to be, their settings. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mesh.address import HostPort
from mesh.errors import InvalidRequest
from mesh.identity.place import Place, Role, Tier
from mesh.settings import (
    Authority,
    Bootstrap,
    CoreEngine,
    CoreListeners,
    CoreSettings,
    EdgeEngine,
    EdgeSettings,
    Identity,
    ModelFile,
    PlacementListeners,
    PlacementPeer,
    PlacementSettings,
    RegistryKind,
    RegistrySettings,
)

MESH = "local"
TENANT = "dev"
PLACEMENT_ID = "placement-1"
EDGE_CONTEXT_TOKENS = 8192
_DRAIN_S = 10.0
_LOOPBACK = HostPort("127.0.0.1", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place name with its region and jurisdiction."""

    name: str
    region: str
    jurisdiction: str


CORE_SITE = Site(name="dc1", region="eu-west", jurisdiction="DE")
KNOWN_SITES = (
    Site(name="paris", region="eu-west", jurisdiction="FR"),
    Site(name="osaka", region="ap-northeast", jurisdiction="JP"),
)


def parse_site(text: str) -> Site:
    """`paris`, or `NAME:REGION:JURISDICTION` for a site that is not in KNOWN_SITES. Raises InvalidRequest."""
    name, *rest = text.strip().split(":")
    if len(rest) == 2:
        return Site(name=name, region=rest[0], jurisdiction=rest[1])
    known = next((site for site in KNOWN_SITES if site.name == name), None)
    if rest or known is None:
        names = ", ".join(site.name for site in KNOWN_SITES)
        raise InvalidRequest(f"a site is {names} or NAME:REGION:JURISDICTION, got {text!r}", field="edge")
    return known


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """What the user asked for. Thread counts are per process; ports 0 take free ones."""

    folder: Path  # absolute; everything private is below it
    model_id: str
    model_path: Path
    cores: int
    sites: tuple[Site, ...]
    core_threads: int
    edge_threads: int
    core_device: str
    core_dtype: str
    grpc_port: int = 0
    http_port: int = 0
    consul: HostPort | None = None
    core_node: HostPort = _LOOPBACK  # node listener of the one core node ...
    core_advertise: HostPort | None = None  # ... and where others reach it, if a link lies in between
    placement_node: HostPort = _LOOPBACK  # node listener of placement ...
    edge_placement: HostPort | None = None  # ... and where edges reach it, if a link lies in between
    edge_engine: EdgeEngine | None = None  # all of an edge engine's settings, instead of the ones chosen here

    def __post_init__(self) -> None:
        if not 0 <= self.cores <= 64:
            raise InvalidRequest(f"core nodes: 0 to 64, got {self.cores}", field="core")
        if self.core_advertise is not None and self.cores > 1:
            raise InvalidRequest("only a single core node can be reached at another address", field="core_advertise")
        if self.cores + len(self.sites) == 0:
            raise InvalidRequest("a mesh needs at least one core node or edge site", field="core")
        names = [site.name for site in self.sites]
        if len(set(names)) < len(names):
            raise InvalidRequest(f"each site once, got {', '.join(names)}", field="edge")
        for place in self.places():
            self.folder_of(place.node_id)  # Place checked the names

    @property
    def keys_file(self) -> Path:
        """Where placement writes the first keys."""
        return self.folder / PLACEMENT_ID / "keys.json"

    def folder_of(self, node_id: str) -> Path:
        """The folder of one process: its identity, settings, state and log."""
        return self.folder / node_id

    def places(self) -> tuple[Place, ...]:
        """Every process's place: placement, then cores, then edges."""
        placement = _place(Role.PLACEMENT, CORE_SITE, PLACEMENT_ID)
        cores = [_place(Role.CORE, CORE_SITE, f"core-{n}") for n in range(1, self.cores + 1)]
        edges = [_place(Role.EDGE, site, f"edge-{site.name}") for site in self.sites]
        return (placement, *cores, *edges)

    def settings_of(self, place: Place, placement: HostPort | None) -> PlacementSettings | CoreSettings | EdgeSettings:
        """The settings of one process; `placement` is its node listener, known once it is ready."""
        folder = self.folder_of(place.node_id)
        identity = Identity(folder=folder / "identity")
        model = ModelFile(id=self.model_id, path=self.model_path)
        registry = RegistrySettings(kind=RegistryKind.CONSUL, consul=self.consul) if self.consul else RegistrySettings()
        if place.role is Role.PLACEMENT:
            return PlacementSettings(
                identity=identity,
                state_folder=folder / "state",
                registry=registry,
                drain_s=_DRAIN_S,
                models=(model,),
                listeners=PlacementListeners(
                    public=_LOOPBACK.with_port(self.grpc_port),
                    http=_LOOPBACK.with_port(self.http_port),
                    node=self.placement_node,
                ),
                authority=Authority(folder=self.folder / "ca"),
                bootstrap=Bootstrap(tenant=TENANT, keys_file=self.keys_file),
            )
        assert placement is not None
        peer = PlacementPeer(address=placement, node_id=PLACEMENT_ID)
        if place.role is Role.CORE:
            engine = CoreEngine(device=self.core_device, dtype=self.core_dtype, n_threads=self.core_threads)
            return CoreSettings(
                identity=identity, state_folder=folder / "state", registry=registry, drain_s=_DRAIN_S,
                placement=peer, model=model, engine=engine,
                listeners=CoreListeners(node=self.core_node, advertise=self.core_advertise),
            )  # fmt: skip
        return EdgeSettings(
            identity=identity, state_folder=folder / "state", registry=registry, drain_s=_DRAIN_S,
            placement=PlacementPeer(address=self.edge_placement or placement, node_id=PLACEMENT_ID), model=model,
            engine=self.edge_engine or EdgeEngine(n_threads=self.edge_threads, n_ctx_tokens=EDGE_CONTEXT_TOKENS),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """Compute threads per process."""

    core: int
    edge: int


def share_threads(processors: int, cores: int, edges: int) -> Threads:
    """Thread counts that let all engines compute at once as far as the processors go, one each at least.

    Core nodes get about twice an edge's share: OpenMP threads spin while they wait, so two processes that take
    all processors each slow one another by far more than two."""
    if cores == 0:
        return Threads(core=1, edge=max(1, processors // max(1, edges)))
    share = processors / (2 * cores + edges)
    return Threads(core=max(1, int(2 * share)), edge=max(1, int(share)))


def core_dtype(device: str, flags: frozenset[str]) -> str:
    """bf16 where the processor multiplies it, f32 elsewhere."""
    fast = device.startswith("cuda") or bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    return "bf16" if fast else "f32"


def sites_of(text: str) -> Sequence[Site]:
    """The sites of a comma-separated list; none for an empty text."""
    return tuple(parse_site(part) for part in text.split(",") if part.strip())


def _place(role: Role, site: Site, node_id: str) -> Place:
    return Place(
        mesh=MESH,
        role=role,
        tier=Tier.EDGE if role is Role.EDGE else Tier.CORE,
        site=site.name,
        region=site.region,
        jurisdiction=site.jurisdiction,
        node_id=node_id,
    )
