"""The Registry interface: who is in the mesh, and small shared values.

Two implementations: mesh.registry.embedded (file-backed, hosted by the placement service, reached by other
nodes over the Registry RPCs) and mesh.registry.consul. tests/conformance/registry_suite.py holds both to what is
written here. Fast-changing load never goes through a registry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

MAX_VALUE_BYTES = 512 * 1024 - 1


class Health(Enum):
    """PASSING: heartbeats arrive and the node says it is ready. CRITICAL: silent or not ready."""

    PASSING = "passing"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a node registers. `meta` holds stable facts: at most 64 pairs, keys of 128 and values of 512 bytes.
    `health_address` is the loopback gRPC health listener for Consul's own check; empty: none."""

    node_id: str
    address: str
    meta: Mapping[str, str] = field(default_factory=dict)
    ttl_s: float = 5.0
    health_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredNode:
    """A registration with its health. A silent node becomes CRITICAL; it is never deleted for being silent."""

    registration: Registration
    health: Health


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesView:
    """All registrations at one moment, sorted by node id. `index` grows with each change (within one server
    life). `heard_monotonic_s` is this process's monotonic time of the last word from the registry; a registry
    that is gone keeps the last view in use, and its age shows."""

    index: int
    nodes: tuple[RegisteredNode, ...]
    heard_monotonic_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A stored value; `version` grows with each change of it."""

    key: str
    value: bytes
    version: int


class Registry(Protocol):
    """See the module's docstring. An unreachable registry raises NodeUnreachable from every call but watch."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def register(self, registration: Registration) -> None:
        """Register or refresh (idempotent), then read back. Starts CRITICAL until the first heartbeat.
        Raises InvalidRequest on bad meta."""

    async def heartbeat(self, node_id: str, *, ready: bool) -> None:
        """Keep alive and set readiness. Raises NotFound if the registry does not know the node (it lost it):
        the caller registers again."""

    async def deregister(self, node_id: str) -> None:
        """Leave. Unknown nodes are fine."""

    async def nodes(self) -> NodesView:
        """All registrations now."""
        ...

    def watch(self) -> AsyncIterator[NodesView]:
        """The view now, at each change, and at least every 5 s, until `close`. Survives a registry that is gone for
        a while: it then repeats the last view with its old `heard_monotonic_s` until the registry is back.
        Raises what waiting cannot mend, such as PolicyDenied."""
        ...

    async def get(self, key: str) -> Value | None: ...

    async def put(self, key: str, value: bytes, *, expected_version: int | None = None) -> int:
        """Set and return the new version. `expected_version` 0: must not exist; n: must be at n, else
        RevisionMismatch. Raises InvalidRequest over MAX_VALUE_BYTES."""
        ...

    async def delete(self, key: str) -> None:
        """Unknown keys are fine."""

    async def list_values(self, prefix: str) -> tuple[Value, ...]:
        """Sorted by key."""
        ...

    def watch_values(self, prefix: str) -> AsyncIterator[tuple[Value, ...]]:
        """All values under the prefix now and at each change, until `close`. Survives as `watch` does, without
        repeating."""
        ...
