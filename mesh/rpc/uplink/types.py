"""Values of the uplink that both sides or their owners use.

Models, site configuration, snapshots and commands pass through as protobuf messages: the uplink carries them
and does not look inside.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from mesh.errors import MeshError
from mesh.identity.place import Place
from mesh.node.engine import EngineLoad, RunId
from mesh.node.port import KvOrder, KvReport, PortEvent, RunOrder
from mesh.v1 import admin_pb2

PROTOCOL = 1
"""Version of the session's messages. Peers of another one are refused with RevisionMismatch."""

MAX_MODELS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkLimits:
    """What one session may hold in memory, at either end. What waits to be written is at most `outbox_bytes`,
    one message per slot (lease renewal, heartbeat, configuration, snapshot), and one cancel per open order; what
    waits to be read by the entry is at most `unread_bytes` for each of `max_open` orders."""

    max_open: int = 256  # orders
    max_commands: int = 16
    outbox_bytes: int = 4 * 1024 * 1024
    unread_bytes: int = 1024 * 1024  # per order
    message_bytes: int = 4 * 1024 * 1024  # of one order or command; configuration and snapshots have gRPC's own


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedEdge:
    """An edge node whose session is alive. `age_s` is the age of `load`; `rtt_s` is as the agent measured it on
    this session, None until then."""

    place: Place
    build: str
    models: tuple[admin_pb2.NodeModel, ...]
    load: EngineLoad
    draining: bool
    age_s: float
    rtt_s: float | None
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """What an agent says of itself in its hello. Where it is, its certificate says."""

    build: str
    models: tuple[admin_pb2.NodeModel, ...]
    snapshot_deltas: bool = True  # it takes what changed instead of whole snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """The agent's side of its link. `since_monotonic_s`: connected, or disconnected, since then, by the agent's
    clock. `heard_monotonic_s`: what was sent then is known to have reached the hub; None while disconnected.
    `last_error` is why the last session or attempt ended; None before the first end."""

    connected: bool
    since_monotonic_s: float
    session_id: str
    heard_monotonic_s: float | None
    rtt_s: float | None
    last_error: MeshError | None


class UplinkHost(Protocol):
    """The node behind the agent. Errors are of mesh.errors."""

    @property
    def draining(self) -> bool:
        """It takes nothing new."""
        ...

    def run(self, order: RunOrder) -> AsyncGenerator[PortEvent, None]:
        """As NodePort.run: closing the iterator cancels the run."""
        ...

    async def move_kv(self, order: KvOrder) -> KvReport:
        """As NodePort.move_kv, this node being the one that dials."""
        ...

    async def release(self, run_id: RunId) -> None:
        """Free a hold or cancel a run. Idempotent."""

    async def load(self) -> EngineLoad: ...
