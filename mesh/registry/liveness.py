"""Who is alive: heartbeats against time-to-live. A pure core; the clock is an argument (monotonic seconds).

A node passes while its last heartbeat said ready and is younger than its ttl_s. Heartbeats do not survive a
restart of the registry: after one, every node is critical until it is heard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mesh.errors import NotFound
from mesh.registry.types import Health, RegisteredNode, Registration


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heard:
    at_s: float
    ready: bool


class Liveness:
    """Heartbeats of the registered nodes. Owned by one registry; not thread-safe."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}

    def heartbeat(self, registrations: Mapping[str, Registration], node_id: str, *, ready: bool, now_s: float) -> None:
        """Raises NotFound for a node that is not registered."""
        if node_id not in registrations:
            raise NotFound(f"node {node_id!r} is not registered; register again", node=node_id)
        self._heard[node_id] = _Heard(at_s=now_s, ready=ready)

    def forget(self, node_id: str) -> None:
        """The node left."""
        self._heard.pop(node_id, None)

    def nodes(self, registrations: Mapping[str, Registration], now_s: float) -> tuple[RegisteredNode, ...]:
        """All registrations with their health, by node id."""
        return tuple(
            RegisteredNode(registration=registrations[node_id], health=self._health(registrations[node_id], now_s))
            for node_id in sorted(registrations)
        )

    def next_expiry_s(self, registrations: Mapping[str, Registration], now_s: float) -> float | None:
        """When the next passing node turns critical if it is not heard before; None if no node passes."""
        return min(
            (
                self._heard[node_id].at_s + registration.ttl_s
                for node_id, registration in registrations.items()
                if self._health(registration, now_s) is Health.PASSING
            ),
            default=None,
        )

    def _health(self, registration: Registration, now_s: float) -> Health:
        heard = self._heard.get(registration.node_id)
        if heard is None or not heard.ready or now_s - heard.at_s >= registration.ttl_s:
            return Health.CRITICAL
        return Health.PASSING
