"""The one settings tree: what the three processes read at start and never change afterwards.

A file is YAML; every leaf is also a flag of the same dotted name (`--listeners.public 127.0.0.1:7000`) that wins
over the file. Unknown keys and bad values stop start-up. A node's place is not a setting: its certificate says it.
Engine groups are plain values, so that one tree documents a whole node; what they mean is the engine's.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from mesh.address import HostPort
from mesh.configfile import Group, leaves, load_settings, to_yaml
from mesh.errors import InvalidRequest
from mesh.node.serving_role import ServingRole

__all__ = [
    "Address", "Authority", "Bootstrap", "ConsulTlsFiles", "CoreEngine", "CoreListeners", "CoreSettings", "Decision",
    "EdgeEngine",
    "EdgeListeners", "EdgeSettings", "Group", "Identity", "Log", "LogFormat", "LogLevel", "ModelFile",
    "PlacementListeners", "PlacementPeer", "PlacementSettings", "Receipts", "RegistryKind", "RegistrySettings",
    "Systemd", "Traces", "Uplink", "leaves", "load_settings", "to_yaml",
]  # fmt: skip


def _address(value: object) -> HostPort:
    if isinstance(value, HostPort):
        return value
    if not isinstance(value, str):
        raise ValueError("an address is written host:port")
    try:
        return HostPort.parse(value)
    except InvalidRequest as exc:
        raise ValueError(exc.message) from exc


def _loopback(address: HostPort) -> HostPort:
    if not address.is_loopback:
        raise ValueError(f"must be on loopback, got {address}")
    return address


def _number(value: object) -> object:
    if isinstance(value, bool):  # YAML reads yes and no as booleans, pydantic booleans as numbers
        raise ValueError("must be a number")
    return value


Address = Annotated[HostPort, BeforeValidator(_address), PlainSerializer(str, return_type=str)]
LocalAddress = Annotated[Address, AfterValidator(_loopback)]
Seconds = Annotated[float, BeforeValidator(_number), Field(gt=0, le=86_400, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1, le=2**31 - 1)]
ByteCount = Annotated[int, BeforeValidator(_number), Field(ge=0, le=2**44)]
NotNegative = Annotated[float, BeforeValidator(_number), Field(ge=0, le=86_400, allow_inf_nan=False)]
AutoCount = Annotated[int, BeforeValidator(_number), Field(ge=0, le=2**31 - 1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]


class Identity(Group):
    """Who this process is."""

    folder: Path
    """Folder of node_key.pem, node_cert.pem (its SAN says mesh, role, tier, site and node id) and ca_cert.pem."""


class PlacementListeners(Group):
    """Where the placement service listens; port 0 takes a free one."""

    public: Address = HostPort("127.0.0.1", 7000)
    """gRPC for clients: API keys; TLS, but plain text on loopback."""
    http: Address = HostPort("127.0.0.1", 7080)
    """OpenAI-compatible HTTP, /healthz and /metrics."""
    node: Address = HostPort("127.0.0.1", 7001)
    """gRPC between nodes: mutual TLS."""
    health: LocalAddress = HostPort("127.0.0.1", 0)
    """gRPC health; loopback only."""
    advertise: Address | None = None
    """The node listener as other nodes reach it; absent: the listener's own address."""


class CoreListeners(Group):
    """Where a core node listens; port 0 takes a free one."""

    node: Address = HostPort("127.0.0.1", 0)
    """gRPC between nodes: mutual TLS."""
    health: LocalAddress = HostPort("127.0.0.1", 0)
    """gRPC health; loopback only."""
    http: Address = HostPort("127.0.0.1", 0)
    """/healthz and /metrics only."""
    advertise: Address | None = None
    """The node listener as other nodes reach it; absent: the listener's own address."""


class EdgeListeners(Group):
    """Where an edge agent listens, for clients of its own site; other nodes cannot dial it."""

    public: Address = HostPort("127.0.0.1", 0)
    """gRPC for clients: API keys; TLS, but plain text on loopback."""
    http: Address = HostPort("127.0.0.1", 0)
    """OpenAI-compatible HTTP, /healthz and /metrics."""
    health: LocalAddress = HostPort("127.0.0.1", 0)
    """gRPC health; loopback only."""


class RegistryKind(Enum):
    """Which registry the mesh shares."""

    EMBEDDED = "embedded"
    CONSUL = "consul"


class ConsulTlsFiles(Group):
    """TLS to Consul: HTTPS instead of HTTP."""

    ca_file: Path
    """Who signed Consul's certificate, PEM; nobody else is believed."""
    cert_file: Path | None = None
    """This process' own certificate, where Consul asks for one."""
    key_file: Path | None = None
    """Its key."""


class RegistrySettings(Group):
    """Who is in the mesh."""

    kind: RegistryKind = RegistryKind.EMBEDDED
    """embedded (hosted by the placement service) or consul."""
    consul: Address = HostPort("127.0.0.1", 8500)
    """HTTP address of the local Consul agent."""
    prefix: Name = "kvmesh"
    """Service-name and key prefix in Consul."""
    token_file: Path | None = None
    """File with Consul's ACL token: service:write and key:write on the prefix, node:read, agent:read."""
    tls: ConsulTlsFiles | None = None
    """TLS to Consul; absent: plain HTTP, for an agent on loopback."""

    @model_validator(mode="after")
    def _token_is_not_sent_in_the_clear(self) -> RegistrySettings:
        if self.token_file is not None and self.tls is None and not self.consul.is_loopback:
            raise ValueError(f"token_file needs tls: the token would cross the network to {self.consul} in the clear")
        return self

    ttl_s: Seconds = 5.0
    """A node that is silent for this long counts as critical."""


class PlacementPeer(Group):
    """The placement service, as a node reaches it."""

    address: Address
    """Its node listener."""
    node_id: Name = "placement-1"
    """Who its certificate must say it is."""


class ModelFile(Group):
    """A model to serve, or (on an entry without an engine) to tokenise for."""

    id: Name
    """Name that clients use."""
    path: Path
    """GGUF file, or a Hugging Face folder (core only)."""


class ScoreWeight(Group):
    """How much one term of the cost counts."""

    score: Name
    """A score's name: time, price, late, harm, session, doubt, or one that is installed."""
    weight: Annotated[float, BeforeValidator(_number), Field(ge=0, le=1e6, allow_inf_nan=False)]
    """Its weight; 0 leaves it out."""


class Decision(Group):
    """Where requests run: plug-ins of the decision (placement/decide/PLUGINS.md)."""

    filters: tuple[Name, ...] = ()
    """Filters beside the built-in ones, by the names they are installed under."""
    weights: tuple[ScoreWeight, ...] = ()
    """Weights that differ from the defaults, as a list of {score, weight}."""
    pick: Name = "power_of_two"
    """Which of the near-best is taken: power_of_two, uniform, best, or one that is installed."""


class CoreEngine(Group):
    """The torch engine with paged KV; fields as in core_node.engine.settings."""

    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """cpu, cuda or cuda:N."""
    dtype: Annotated[str, Field(pattern=r"^(bf16|f32|int8)$")] = "bf16"
    """Precision of weights and arithmetic: bf16, f32, or int8 (weights only)."""
    exact: bool = False
    """Tokens never depend on a request's company, to the bit: slower in torch, free where the compiled step runs."""
    n_threads: AutoCount = 0
    """Compute threads; 0: as many as the CPUs this process may use. Counts of one machine must add up to its cores."""
    kv_pool_tokens: AutoCount = 0
    """Size of the KV pool; 0: the engine chooses."""
    max_context_tokens: AutoCount = 0
    """Longest prompt and output together; 0: the model's own."""
    max_step_tokens: Count = 256
    """Most tokens in one step."""
    max_running: Count = 32
    """Most sequences in one step."""
    max_waiting: Count = 256
    """Longest queue; more are refused as overloaded."""
    policy: str = "priority"
    """Who is admitted first: priority, fcfs, longest_prefix, shortest_predicted, or one of an installed package."""
    ageing_s: NotNegative = 10.0
    """Waiting this long makes up for one step of priority."""
    starvation_s: NotNegative = 30.0
    """Waiting this long goes before everything else (longest_prefix, shortest_predicted)."""
    tpot_target_s: NotNegative = 0.0
    """Prefill beside decoding requests is cut so that a step lasts no longer than this; 0: max_step_tokens alone."""
    swap_bytes: ByteCount = 128 * 1024 * 1024
    """Host memory for preempted KV, taken when first needed; 0: preempted KV is always computed again."""


class EdgeEngine(Group):
    """llama.cpp in a child process; fields as in edge_node.engine.settings."""

    n_threads: AutoCount = 0
    """Compute threads; 0: as many as the CPUs this process may use. Counts of one machine must add up to its cores."""
    n_ctx_tokens: Count = 4096
    """KV cells, shared by all runs, holds and kept prefixes."""
    max_context_tokens: AutoCount = 0
    """Longest prompt and output together; 0: the smaller of the model's own and n_ctx_tokens."""
    max_step_tokens: Count = 256
    """Most tokens in one step; up to 63, llama.cpp repeats itself to the bit more often, but prefills more slowly."""
    max_running: Count = 8
    """Most sequences in one step."""
    max_sequences: Count = 32
    """Runs, holds, imports and kept prefixes together."""
    max_waiting: AutoCount = 64
    """Longest queue; more are refused as overloaded."""


class Uplink(Group):
    """The session that an edge agent keeps to placement."""

    lease_s: Seconds = 5.0
    """Without a word for this long the site counts as disconnected."""
    heartbeat_s: Seconds = 1.0
    """Pace of heartbeats."""
    reconnect_max_s: Seconds = 10.0
    """Longest wait between attempts."""

    @model_validator(mode="after")
    def _lease_holds_two_beats(self) -> Uplink:
        if self.heartbeat_s * 2 > self.lease_s:
            raise ValueError(f"lease_s ({self.lease_s}) must hold two heartbeats of heartbeat_s ({self.heartbeat_s})")
        return self


class LogLevel(Enum):
    """Least severity that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(Enum):
    """How a log line looks."""

    JSON = "json"
    CONSOLE = "console"


class Log(Group):
    """The structured log, on stderr."""

    level: LogLevel = LogLevel.INFO
    """debug, info, warning or error."""
    format: LogFormat = LogFormat.JSON
    """json, or console for people."""


class Systemd(Group):
    """How to reach the service manager; the units fill it in."""

    notify_socket: Annotated[str, Field(pattern=r"^([/@].{1,107})?$")] = ""
    """Where to say that the process is ready and alive (NOTIFY_SOCKET); empty: nobody is told."""
    watchdog_us: Annotated[int, BeforeValidator(_number), Field(ge=0, le=3_600_000_000)] = 0
    """Silent for so many microseconds, the process is restarted (WATCHDOG_USEC); 0: no watchdog."""


class Traces(Group):
    """Traces of requests, off unless a collector is named (needs kvmesh[traces])."""

    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/@?#]+/?$")] | None = None
    """OTLP over HTTP, e.g. http://127.0.0.1:4318; absent: no traces."""
    sample_ratio: Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)] = 1.0
    """Share of traces that begin here and are kept; those of a caller are kept if it keeps them."""
    tell_tenant: bool = False
    """Tenants' names may be in spans."""
    tell_label: bool = False
    """Labels may be in spans."""


class Bootstrap(Group):
    """The first keys of an empty mesh."""

    tenant: Name
    """Tenant to create at first start."""
    keys_file: Path
    """Where its {"api_key", "admin_key"} are written, mode 0600."""


class Process(Group):
    """What all three processes have in common."""

    identity: Identity
    state_folder: Path
    """What this process keeps over a restart; made with mode 0700. ready.json appears here at readiness."""
    registry: RegistrySettings = RegistrySettings()
    load_period_s: Seconds = 0.5
    """Pace of load reports."""
    drain_s: Seconds = 30.0
    """Longest time that running requests get to end or move after SIGTERM."""
    log: Log = Log()
    traces: Traces = Traces()
    systemd: Systemd = Systemd()


class Authority(Group):
    """The mesh's certificate authority, where this process may sign with it."""

    folder: Path
    """Folder of the authority, as `kvmesh ca init` makes it."""
    lifetime_s: Annotated[float, BeforeValidator(_number), Field(gt=0, le=315_360_000)] = 2_592_000.0
    """Lifetime of the certificates that it issues; they are renewed after two thirds of it."""


class PlacementSettings(Process):
    """`kvmesh placement`: front door for the core side, policy admin, mesh view."""

    listeners: PlacementListeners = PlacementListeners()
    models: tuple[ModelFile, ...] = ()
    """Models to tokenise for, as a list of {id, path}; the first is the default."""
    uplink: Uplink = Uplink()
    stale_load_s: Seconds = 5.0
    """Load figures that are older count as busy."""
    decision: Decision = Decision()
    bootstrap: Bootstrap | None = None
    authority: Authority | None = None
    """Absent: no box can join by token here and no certificate is renewed by itself."""


class CoreSettings(Process):
    """`kvmesh core`: one torch engine behind the node listener."""

    placement: PlacementPeer
    model: ModelFile
    listeners: CoreListeners = CoreListeners()
    role: ServingRole = ServingRole.BOTH
    """both, prefill (computes KV for others) or decode (goes on from KV that came); `kvmesh node role` changes it
    until the next start."""
    engine: CoreEngine = CoreEngine()


class Receipts(Group):
    """The audit log of a site, which is also the spool of what the mesh has yet to hear. Nothing is ever dropped."""

    most_unmerged_bytes: ByteCount = 256 << 20
    """With so much waiting for the mesh, nothing new is taken."""
    keep_merged_bytes: ByteCount = 64 << 20
    """How much of what the mesh has is kept here too."""
    keep_free_bytes: ByteCount = 32 << 20
    """With less room on the disk nothing new is taken: what runs must find room for its receipts."""


class EdgeSettings(Process):
    """`kvmesh edge`: one llama.cpp engine, the entry of its own site; dials out only."""

    placement: PlacementPeer
    more_placements: tuple[PlacementPeer, ...] = ()
    """Further placement services of the mesh, as a list of {address, node_id}: the agent keeps an uplink to each."""
    model: ModelFile
    listeners: EdgeListeners = EdgeListeners()
    engine: EdgeEngine = EdgeEngine()
    receipts: Receipts = Receipts()
    state_key: Path | None = None
    """File of 32 random bytes or more that seals what this box keeps on its disk (key hashes, salts, policies,
    receipts). It should not be on that disk: a systemd credential, bound to a TPM if there is one. Absent: nothing is
    sealed."""
    uplink: Uplink = Uplink()
    stale_load_s: Seconds = 5.0
    """Load figures that are older count as busy."""
    decision: Decision = Decision()
