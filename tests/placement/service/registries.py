"""A registry that can be taken away, and one with its clock in hand."""

from __future__ import annotations

from typing import Any

from mesh.errors import MeshError
from mesh.registry.embedded import EmbeddedRegistry


class MoodyRegistry(EmbeddedRegistry):
    """The embedded registry in memory; while `trouble` is set, every call but a watch raises it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.trouble: MeshError | None = None
        self.calls: list[str] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.trouble is not None:
            raise type(self.trouble)(self.trouble.message)

    async def register(self, registration: Any) -> None:
        self._note("register")
        await super().register(registration)

    async def heartbeat(self, node_id: str, *, ready: bool) -> None:
        self._note("heartbeat")
        await super().heartbeat(node_id, ready=ready)

    async def deregister(self, node_id: str) -> None:
        self._note("deregister")
        await super().deregister(node_id)

    async def get(self, key: str) -> Any:
        self._note("get")
        return await super().get(key)

    async def put(self, key: str, value: bytes, *, expected_version: int | None = None) -> int:
        self._note("put")
        return await super().put(key, value, expected_version=expected_version)

    async def list_values(self, prefix: str) -> Any:
        self._note("list_values")
        return await super().list_values(prefix)

    async def lose_everything(self) -> None:
        """As a Consul agent that restarts without its data."""
        for node_id in list(self._state.registrations):
            await super().deregister(node_id)
        for key in list(self._state.values):
            await self.delete(key)
